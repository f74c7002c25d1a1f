"""The names and shapes of our parameters in each format, for reading and for writing.

The folder parameter_names has a file per library, and explains their syntax. Reading and writing use the same names, so
a round trip is exact.
"""

import configparser
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from plainvit.config import Model, Preprocess, ResNetConfig, ViTConfig
from plainvit.models import ResNet, ViT, build
from plainvit.models.buffers import fill_buffers
from plainvit.weights.files import Tensors

Shapes = Mapping[str, tuple[int, ...]]
MAX_TOKENS = 1_000_000
MAX_RELATIVE_TOKENS = 10_000  # of models with an entry per pair of tokens


@dataclass(frozen=True)
class Conversion:
    """Changes the shape of a tensor: `write` from ours to the format's (it may need the config), `read` back."""

    write: Callable[[Tensor, Model], Tensor]
    read: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """The names of one of our parameters in a format. Several names: it is split into as many parts along its rows."""

    names: tuple[str, ...]
    conversion: Conversion


Layout = Mapping[str, Entry]  # {our name, with {i} for a block, {s} and {u} for a ResNet's stage and unit: its entry}


@dataclass
class DetectedModel:
    """The model that a file describes, and how to read it."""

    family: str
    config: Model
    layout: Layout
    sources: dict[str, str] = field(default_factory=dict)
    preprocess: Preprocess = field(default_factory=Preprocess)
    class_names: tuple[str, ...] = ()
    ignore: Callable[[str], bool] = lambda _: False  # names in the file that are not the model's
    notes: list[str] = field(default_factory=list)
    default: str = "shapes of the weights"  # the source of settings without an entry in `sources`


def _patch_kernel(weight: Tensor, config: Model) -> Tensor:
    """[D, C*P*Q] as the kernel of a convolution, [D, C, P, Q]."""
    assert isinstance(config, ViTConfig)
    return weight.reshape(len(weight), -1, *config.patch)


def _head_width(config: Model) -> int:
    assert isinstance(config, ViTConfig)
    return config.width // config.heads


# `read` is the identity where only the shape differs: `build_model` restores ours
SAME = Conversion(lambda t, _: t, lambda t: t)
TRANSPOSE = Conversion(lambda t, _: t.mT, lambda t: t.mT)
HWIO = Conversion(lambda t, _: t.permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))
# flax's attention by head: kernels [D, H, d] into the heads, [H, d, D] out of them, biases [H, d]
INTO_HEADS = Conversion(lambda t, c: t.mT.reshape(t.shape[1], -1, _head_width(c)), lambda t: t.flatten(1).mT)
OUT_OF_HEADS = Conversion(lambda t, c: t.mT.reshape(-1, _head_width(c), t.shape[0]), lambda t: t.flatten(0, 1).mT)
HEAD_BIAS = Conversion(lambda t, c: t.reshape(-1, _head_width(c)), lambda t: t)
PATCHES = Conversion(_patch_kernel, lambda t: t)
PATCHES_HWIO = Conversion(lambda t, c: _patch_kernel(t, c).permute(2, 3, 1, 0), HWIO.read)
CONV1X1_HWIO = Conversion(lambda t, _: t.mT[None, None], lambda t: t.reshape(t.shape[-2:]).mT)


@dataclass(frozen=True)
class Style:
    """How a format stores a layer or a tensor: the names of weight and bias, and their conversions."""

    weight: Conversion = SAME
    leaves: tuple[str, str] = ("weight", "bias")
    bias: Conversion = SAME


FLAX = ("kernel", "bias")
STYLES = {
    "": Style(),
    "leading": Style(Conversion(lambda t, _: t.unsqueeze(0), lambda t: t)),  # [n, D] <-> [1, n, D]
    "row": Style(Conversion(lambda t, _: t[0], lambda t: t)),  # [1, D] <-> [D]
    "conv1x1": Style(Conversion(lambda t, _: t[:, :, None, None], lambda t: t)),  # a linear layer as a convolution
    "patches": Style(PATCHES),
    "transpose": Style(TRANSPOSE),
    "in_proj": Style(leaves=("in_proj_weight", "in_proj_bias")),
    "scale": Style(leaves=("scale", "bias")),
    "gamma": Style(leaves=("gamma", "beta")),
    "dense": Style(TRANSPOSE, FLAX),
    "hwio": Style(HWIO, FLAX),
    "patches_hwio": Style(PATCHES_HWIO, FLAX),
    "conv1x1_hwio": Style(CONV1X1_HWIO, FLAX),
    "into_heads": Style(INTO_HEADS, FLAX, HEAD_BIAS),
    "out_of_heads": Style(OUT_OF_HEADS, FLAX),
}
FIRST = {"i": 0, "s": 0, "u": 0, "s1": 1, "u1": 1}  # the first block, or the first unit of a ResNet


@functools.cache
def _read_sections() -> dict[str, dict[str, str]]:
    """{section: {our name: its names there}}, with what a section takes from another."""
    parser = configparser.RawConfigParser(delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]  # names keep their case
    for path in sorted(Path(__file__).with_name("parameter_names").glob("*.ini")):
        parser.read_string(path.read_text(encoding="utf-8"))
    sections: dict[str, dict[str, str]] = {}
    for title in parser.sections():
        section, _, base = title.partition(" : ")
        rows = sections[section] = dict(sections.get(base, {}))
        for ours, theirs in parser[title].items():
            for number, letter in zip("123", "abc", strict=True) if "{n}" in ours else [("", "")]:
                rows[ours.replace("{n}", number)] = theirs.replace("{n}", number).replace("{letter}", letter)
    return sections


def make_layout(
    section: str, shapes: Shapes | None = None, prefix: str = "", name_parts: tuple[str, ...] = ()
) -> dict[str, Entry]:
    """The names of a format. Of alternatives, those of a file; without a file, those with one of `name_parts`.

    Args:
        section: A section of the files in parameter_names.
        shapes: The tensors of a file.
        prefix: What the names in the file begin with.
        name_parts: Parts of names to write in place of the first alternative; of several, the shortest is written.
    """
    rows = dict(_read_sections()[section])
    fields = {"{prefix}": prefix.replace("{", "{{").replace("}", "}}")}
    for name in ("block", "unit", "pool"):
        options = [_fill(option, fields) for option in rows.pop(name, "").split(" | ")]
        fields[f"{{{name}}}"] = _choose_start(options, shapes or {})
    layout: dict[str, Entry] = {}
    for ours, theirs in rows.items():
        options = [_parse(ours, _fill(option, fields)) for option in theirs.split(" | ")]
        layout |= _choose_entries(options, shapes or {}, name_parts)
    return layout


def _fill(text: str, fields: Mapping[str, str]) -> str:
    for field_name, value in fields.items():
        text = text.replace(field_name, value)
    return text


def _choose_start(options: list[str], shapes: Shapes) -> str:
    """The first of the options that names in a file start with; else the first of all."""
    for option in options:
        if any(name.startswith(option.format(**FIRST)) for name in shapes):
            return option
    return options[0]


def _choose_entries(options: list[dict[str, Entry]], shapes: Shapes, name_parts: tuple[str, ...]) -> dict[str, Entry]:
    """The first alternative that a file has; else the shortest with one of `name_parts`; else the first of all."""
    for entries in options:
        if _is_present(entries, shapes):
            return entries
    written = [entries for entries in options if any(part in _join(entries) for part in name_parts)]
    return min(written, key=lambda entries: len(_join(entries)), default=options[0])


def _parse(ours: str, theirs: str) -> dict[str, Entry]:
    """The entries of one alternative: two for a layer."""
    text, _, how = theirs.partition(" @")
    start, bracket, end = text.partition("<")
    inner, _, end = end.partition(">")
    names = tuple(f"{start}{part}{end}" for part in inner.split(",")) if bracket else (text,)
    style = STYLES[how.strip()]
    if not text.endswith((".", "/")):
        return {ours: Entry(names, style.weight)}
    weight_leaf, bias_leaf = style.leaves
    return {
        f"{ours}.weight": Entry(tuple(name + weight_leaf for name in names), style.weight),
        f"{ours}.bias": Entry(tuple(name + bias_leaf for name in names), style.bias),
    }


def _join(entries: Layout) -> str:
    """All names of an alternative as one text, a line each."""
    return "\n".join(name for entry in entries.values() for name in entry.names)


def _is_present(entries: Layout, shapes: Shapes) -> bool:
    """Whether a file has the first of the entries (a layer may have no bias)."""
    names = next(iter(entries.values())).names
    return all(_THIRD.sub(r"\1", name.format(**FIRST)) in shapes for name in names)


def read_shapes(layout: Layout, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of our parameters that a file has, of the first block or unit; kernels have four sides."""
    ours_to_shape: dict[str, tuple[int, ...]] = {}
    for ours, entry in layout.items():
        parts = [_find_shape(shapes, name.format(**FIRST)) for name in entry.names]
        if not all(parts):
            continue
        with contextlib.suppress(RuntimeError, IndexError):  # of a wrong number of sides: an error where it is needed
            parts = [tuple(entry.conversion.read(torch.empty(part, device="meta")).shape) for part in parts]
        ours_to_shape[ours] = (sum(part[0] for part in parts), *parts[0][1:])
    return ours_to_shape


_THIRD = re.compile(r"(.+)\[([012])/3\]$")


def locate(layout: Layout, name: str) -> Entry | None:
    """The entry of one of our parameters with its indices filled in, or None if the format does not have it."""
    fields: dict[str, int] = {}
    pattern = name
    if match := re.search(r"stages\.(\d+)\.(\d+)\.", name):
        pattern = name.replace(match[0], "stages.{s}.{u}.")
        stage, unit = int(match[1]), int(match[2])
        fields = {"s": stage, "u": unit, "s1": stage + 1, "u1": unit + 1}  # some formats count from 1
    elif match := re.search(r"blocks\.(\d+)\.", name):
        pattern = name.replace(match[0], "blocks.{i}.")
        fields = {"i": int(match[1])}
    if pattern not in layout:
        return None
    return Entry(tuple(their.format(**fields) for their in layout[pattern].names), layout[pattern].conversion)


def check_size(config: Model, tensors: Tensors) -> None:
    """Rejects a config of a model far larger than the file, before anything is built.

    Computed positions are in no file: whatever image size is stated next to it, they take memory for every token.
    """
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    layers = sum(resnet.blocks) if resnet else 0
    if isinstance(config, ViTConfig):
        layers += config.depth
        limit = MAX_RELATIVE_TOKENS if config.posemb in ("relative", "bias") else MAX_TOKENS
        if config.tokens > limit:
            size = " x ".join(map(str, config.image_size))
            raise ValueError(
                f"{tensors.path} is of a model for images of {size} pixels, {config.tokens:,} tokens, and the limit is "
                f"{limit:,}: check the image size in its config"
            )
    if layers > len(tensors.shapes):
        problem = f"has {len(tensors.shapes):,} tensors, too few for the {layers:,} layers of its config"
        raise ValueError(f"{tensors.path} {problem}: download it again")


def build_model(detected: DetectedModel, tensors: Tensors, dtype: torch.dtype | None) -> ViT | ResNet:
    """Builds the model and moves the file's tensors into it one by one, so that memory never holds them twice."""
    with torch.device("meta"):
        model = build(detected.config)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    entries = _check_names(detected, shapes, tensors)
    _check_shapes(detected, entries, shapes, tensors)
    # Neighbors in the file are read together, so a file that stacks its layers is unpacked once per array
    order = sorted(entries, key=lambda name: (re.sub(r"\d+", "", name), name))
    weights: dict[str, Tensor] = {}
    for name in order:
        conversion = entries[name].conversion
        parts = [conversion.read(check_values(_read_part(tensors, their), their)) for their in entries[name].names]
        weights[name] = _merge_parts(parts, shapes[name], dtype)
        if any(part.dtype != weights[name].dtype for part in parts):
            _check_range(weights[name], ", ".join(entries[name].names))
    fill_buffers(model, "cpu")
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _read_part(tensors: Tensors, name: str) -> Tensor:
    """A tensor of a file, or a third of its rows."""
    match = _THIRD.match(name)
    if not match:
        return tensors.pop(name)
    rows = _find_shape(tensors.shapes, name)[0]
    return tensors.read(match[1])[int(match[2]) * rows :][:rows].clone()


def _find_shape(shapes: Shapes, name: str) -> tuple[int, ...]:
    """The shape of a tensor of a file, or of a third of its rows; () if it is missing."""
    match = _THIRD.match(name)
    shape = shapes.get(match[1] if match else name, ())
    if not match or not shape:
        return shape
    if shape[0] % 3:
        raise ValueError(f"{match[1]} has shape {shape}: its rows are not q, k and v")
    return (shape[0] // 3, *shape[1:])


def _merge_thirds(out: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to write, with thirds as one."""
    parts: dict[str, list[Tensor]] = {}
    for name in sorted(out):  # thirds in their order
        match = _THIRD.match(name)
        parts.setdefault(match[1] if match else name, []).append(out[name])
    return {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}


def _merge_parts(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """The parts as one tensor of this shape and dtype; a single part that fits is not copied."""
    first = parts[0]
    owns_storage = first.is_contiguous() and first.untyped_storage().nbytes() == first.numel() * first.element_size()
    if len(parts) == 1 and dtype in (None, first.dtype) and owns_storage:
        return first.view(shape)
    widest = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    merged = torch.empty(shape, dtype=dtype or widest)
    for target, part in zip(merged.chunk(len(parts)), parts, strict=True):
        target.copy_(part.reshape(target.shape))
    return merged


def _check_range(weight: Tensor, name: str) -> None:
    """Rejects values that became infinite when they were cast."""
    if not torch.isfinite(weight).all():
        limit = torch.finfo(weight.dtype).max
        raise ValueError(f"{name} has values above {weight.dtype}'s limit of {limit:.4g}: load with another dtype")


def check_values(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself, if it has finite floating-point values."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}: weights must be floats")
    if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():  # needs no mask of the same size
        raise ValueError(f"{name} has non-finite values (NaN or Inf): the file is damaged or its training diverged")
    return tensor


def _check_names(detected: DetectedModel, names: Iterable[str], tensors: Tensors) -> dict[str, Entry]:
    """{our name: its entry}, if the file has exactly the weights of the model."""
    located = {name: locate(detected.layout, name) for name in names}
    entries = {name: value for name, value in located.items() if value is not None}
    file = f"this {detected.family} file"
    if len(entries) < len(located):
        unsupported = join_names(name for name in located if name not in entries)
        raise ValueError(f"{file} describes a model with {unsupported}, which its format does not support")
    expected = {_THIRD.sub(r"\1", their) for value in entries.values() for their in value.names}
    missing = sorted(expected - tensors.shapes.keys())
    if missing:
        raise ValueError(f"{file} lacks {join_names(missing)}: it is incomplete, or of another model")
    extra = [name for name in tensors.shapes if name not in expected and not detected.ignore(name)]
    if extra:
        raise ValueError(f"{file} has unknown weights: {join_names(extra)}")
    return entries


def _check_shapes(
    detected: DetectedModel, entries: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]], tensors: Tensors
) -> None:
    for name, value in entries.items():
        for their, example in write_parameter(value, torch.empty(shapes[name], device="meta"), detected.config):
            actual, expected = _find_shape(tensors.shapes, their), tuple(example.shape)
            # Old files store GroupNorm's vectors as (1, 1, 1, c)
            if actual != expected and not (len(expected) == 1 and actual == (1, 1, 1, *expected)):
                raise ValueError(
                    f"{their} has shape {actual} where this {detected.family} model has {expected}: "
                    "the file is damaged, or of another model"
                )


def to_format(layout: Layout, weights: Mapping[str, Tensor], config: Model) -> dict[str, Tensor]:
    """Our weights under a format's names and in its shapes."""
    out: dict[str, Tensor] = {}
    for name, weight in weights.items():
        located = locate(layout, name)
        assert located is not None, f"list_unsupported does not list {name}"
        out |= {their: tensor.contiguous() for their, tensor in write_parameter(located, weight, config)}
    return _merge_thirds(out)


def write_parameter(located: Entry, weight: Tensor, config: Model) -> list[tuple[str, Tensor]]:
    """One of our parameters under a format's names and in its shapes."""
    parts = weight.chunk(len(located.names))
    return [(name, located.conversion.write(part, config)) for name, part in zip(located.names, parts, strict=True)]


def join_names(names: Iterable[str], count: int = 3) -> str:
    """The first few names, and how many more there are."""
    names = [repr(name)[1:-1] for name in names]  # a name from a file may hold any character
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
