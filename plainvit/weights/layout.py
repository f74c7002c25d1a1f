"""Names and shapes of one format against ours: a table that reads and writes.

A layout maps our parameter names, with {i} for a block, {s} and {u} for a ResNet's stage and unit, to a format's names
and to the change of shape between the two. Reading and writing use the same table, so a round trip is exact.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plainvit.config import Model, ViTConfig
from plainvit.models import ResNet, ViT, build
from plainvit.models.buffers import fill_buffers
from plainvit.weights.files import Tensors


@dataclass(frozen=True)
class Change:
    """A change of shape, from ours (the config may be needed) and back."""

    theirs: Callable[[Tensor, Model], Tensor]
    ours: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class To:
    """Where a parameter of ours is in a format. Under several names it is cut into as many parts along its rows."""

    names: tuple[str, ...]
    change: Change


Layout = Mapping[str, To]


@dataclass
class Found:
    """What a format makes of a file: the model it describes and how to read it."""

    family: str
    config: Model
    layout: Layout
    sources: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # preprocess, class_names
    ignore: Callable[[str], bool] = lambda _: False  # keys that belong to the file but not to the model
    notes: list[str] = field(default_factory=list)
    default: str = "shapes of the weights"  # where the settings without an entry in `sources` were learned


def _patch_kernel(weight: Tensor, config: Model) -> Tensor:
    """[D, C*P*Q] as a convolution's [D, C, P, Q]."""
    assert isinstance(config, ViTConfig)
    return weight.reshape(len(weight), -1, *config.patch)


# Where theirs has the same numbers in another shape, `fill` gives them ours back
SAME = Change(lambda t, _: t, lambda t: t)
LEAD1 = Change(lambda t, _: t.unsqueeze(0), lambda t: t)  # [n, D] <-> [1, n, D]
CONV1X1 = Change(lambda t, _: t[:, :, None, None], lambda t: t)  # a linear layer kept as a 1 x 1 convolution
PATCHES = Change(_patch_kernel, lambda t: t)
TRANSPOSED = Change(lambda t, _: t.mT, lambda t: t.mT)
HWIO = Change(lambda t, _: t.permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))
PATCHES_HWIO = Change(lambda t, c: _patch_kernel(t, c).permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))
CONV1X1_HWIO = Change(lambda t, _: t.mT[None, None], lambda t: t.reshape(t.shape[-2:]).mT)


def to(*names: str, change: Change = SAME) -> To:
    return To(names, change)


def linear(ours: str, *names: str, change: Change = SAME, kernel: str = "weight", bias: str = "bias") -> dict[str, To]:
    """The two entries of a linear or norm layer; `names` are the layers, `kernel` and `bias` their parameters."""
    return {
        f"{ours}.weight": To(tuple(name + kernel for name in names), change),
        f"{ours}.bias": To(tuple(name + bias for name in names), SAME),
    }


def locate(layout: Layout, name: str) -> To | None:
    """The entry of one of our parameters, its indices filled in; None where the format has no place for it."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
    if "stages." in name:
        pattern, values = re.sub(r"stages\.\d+\.\d+\.", "stages.{s}.{u}.", name), dict(zip("su", numbers, strict=False))
    else:
        pattern, values = re.sub(r"blocks\.\d+\.", "blocks.{i}.", name), {"i": numbers[0] if numbers else "0"}
    if pattern not in layout:
        return None
    fields = {key: int(value) for key, value in values.items()}
    fields |= {f"{key}1": value + 1 for key, value in fields.items()}
    return To(tuple(their.format(**fields) for their in layout[pattern].names), layout[pattern].change)


def fill(found: Found, tensors: Tensors, dtype: torch.dtype | None) -> ViT | ResNet:
    """Builds the model and moves the file's tensors into it one by one, so that it is never held twice."""
    with torch.device("meta"):
        model = build(found.config)
    places = {name: locate(found.layout, name) for name in model.state_dict()}
    _check_names(found, places, tensors)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    _check_shapes(found, places, shapes, tensors)
    # Neighbours in the file are read together: a layer-stacked file is then unpacked once per array
    order = sorted(places, key=lambda name: (re.sub(r"\d+", "", name), name))
    weights: dict[str, Tensor] = {}
    for name in order:
        place = places[name]
        assert place is not None
        parts = [place.change.ours(_checked(tensors.take(their), their)) for their in place.names]
        weights[name] = _owned(parts, shapes[name], dtype)
    fill_buffers(model, "cpu")
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _owned(parts: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """The parts as one tensor of the shape and dtype wanted; a lone part that fits is taken as it is."""
    only = parts[0]
    whole_storage = only.is_contiguous() and only.untyped_storage().nbytes() == only.numel() * only.element_size()
    if len(parts) == 1 and dtype in (None, only.dtype) and whole_storage:
        return only.view(shape)
    whole = torch.empty(shape, dtype=dtype or parts[0].dtype)
    for target, part in zip(whole.chunk(len(parts)), parts, strict=True):
        target.copy_(part.reshape(target.shape))
    if whole.dtype != parts[0].dtype and not torch.isfinite(whole).all():
        raise ValueError(f"a weight is too large for {str(dtype).removeprefix('torch.')}: load with another dtype")
    return whole


def _checked(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, which is not that of weights")
    if tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():  # without a mask as large as it is
        raise ValueError(f"{name} holds values that are not finite: the file is damaged or its training diverged")
    return tensor


def _check_names(found: Found, places: Mapping[str, To | None], tensors: Tensors) -> None:
    wanted = {their for place in places.values() if place for their in place.names}
    homeless = [name for name, place in places.items() if place is None]
    if homeless:
        raise ValueError(f"this {found.family} file is described as having {some(homeless)}, which its format has not")
    missing = sorted(wanted - tensors.shapes.keys())
    if missing:
        raise ValueError(f"this {found.family} file lacks {some(missing)}: it is incomplete, or of another model")
    extra = [name for name in tensors.shapes if name not in wanted and not found.ignore(name)]
    if extra:
        raise ValueError(f"this {found.family} file has weights that are not known there: {some(extra)}")


def _check_shapes(
    found: Found, places: Mapping[str, To | None], shapes: Mapping[str, tuple[int, ...]], tensors: Tensors
) -> None:
    for name, place in places.items():
        assert place is not None
        for their, example in theirs(place, torch.empty(shapes[name], device="meta"), found.config):
            if not _same_shape(tensors.shapes[their], tuple(example.shape)):
                raise ValueError(
                    f"{their} has shape {tensors.shapes[their]} where this {found.family} model has "
                    f"{tuple(example.shape)}: the file is damaged, or of another model"
                )


def _same_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Equal, but for old files that keep GroupNorm's vectors as (1, 1, 1, c)."""
    return found == expected or (len(expected) == 1 and found == (1, 1, 1, *expected))


def unexpressed(layout: Layout, names: Iterable[str]) -> list[str]:
    """Which of our parameters a format has no place for."""
    return [name for name in names if locate(layout, name) is None]


def emit(layout: Layout, weights: Mapping[str, Tensor], config: Model) -> dict[str, Tensor]:
    """Our weights under a format's names and in its shapes."""
    out: dict[str, Tensor] = {}
    for name, weight in weights.items():
        place = locate(layout, name)
        assert place is not None, name
        out |= {their: tensor.contiguous() for their, tensor in theirs(place, weight, config)}
    return out


def theirs(place: To, weight: Tensor, config: Model) -> list[tuple[str, Tensor]]:
    """A parameter of ours under a format's names and in its shapes."""
    parts = weight.chunk(len(place.names))
    return [(name, place.change.theirs(part, config)) for name, part in zip(place.names, parts, strict=True)]


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of a list, and how many more."""
    names = [repr(name)[1:-1] for name in names]  # a name from a file may hold anything
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
