"""Loads a model from weights of any known format.

The format is detected from the names in a file. What weights do not contain (heads, grid, arithmetic, preprocessing)
comes from files next to them, from the caller, or from the family's convention; `model.about.sources` says which.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch

from plainvit import hub
from plainvit.config import About, ViTConfig, nearest, pair
from plainvit.disk import read_json
from plainvit.models import ResNet, ViT
from plainvit.models.resample import choose_method, resize
from plainvit.names import is_model
from plainvit.weights import google, open_clip, own, timm, torchvision, transformers
from plainvit.weights.files import RenamedTensors, Tensors, open_file, open_folder
from plainvit.weights.layout import DetectedModel, build_model, check_size, join_names
from plainvit.weights.pixels import Pixels, list_assumptions, set_pixels
from plainvit.weights.published import PUBLISHED
from plainvit.weights.shapes import Hints
from plainvit.weights.text_head import load_text_head

if TYPE_CHECKING:
    from plainvit.models.fast.inference import InferenceModel

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*config.json"]
LIST_ALL = "`plainvit weights` lists them all"
# One weight of each family, which a model has exactly once
ANCHORS = ("patch_embed.proj.weight", "stem.conv.weight", "conv_proj.weight", *transformers.PATCH_KERNELS)
Size = int | tuple[int, int] | None
log = logging.getLogger("plainvit")


class LoadOptions(Pixels, total=False):
    """Keywords of `load`, with those of preprocessing."""

    heads: int | None
    grid: tuple[int, int] | None
    resample: str | None
    text_head: str | Path | None
    dtype: torch.dtype | None


@overload
def load(
    source: str | Path,
    classes: int | None = None,
    image_size: Size = None,
    *,
    optimize: Literal[False] = False,
    **options: Unpack[LoadOptions],
) -> ViT | ResNet: ...


@overload
def load(
    source: str | Path,
    classes: int | None = None,
    image_size: Size = None,
    *,
    optimize: Literal[True, "fp8"],
    **options: Unpack[LoadOptions],
) -> "InferenceModel": ...


def load(
    source: str | Path,
    classes: int | None = None,
    image_size: Size = None,
    *,
    optimize: bool | Literal["fp8"] = False,
    **options: Unpack[LoadOptions],
) -> "ViT | ResNet | InferenceModel":
    """Loads a model from weights of any known format. What was assumed, replaced or left out is logged.

    Args:
        source: A file, a folder, `hf:org/name[@revision]`, or a published name (`plainvit weights`).
        classes: Replaces the head by one of zeros for this many classes; 0 removes it.
        image_size: Resamples the positions for this image size: one number or (height, width).
        optimize: True returns an InferenceModel, as fast as this machine allows. "fp8" also allows fp8 matmuls on a
            GPU that has them: faster, but close decisions may change; `model.agreement(images)` measures how many.
        options:
            heads: The number of attention heads, if the file does not contain it.
            grid: Rows and columns of patches, if the file does not contain them.
            resample: How to resample positions; None: as the code that the weights come from.
            text_head: Embeddings of class names by the text tower, for zero-shot classification (`text_head.py`).
            dtype: The dtype of the weights, float32 by default; None keeps the file's own.
            mean, std, resize, crop, interpolation, antialias: Replace the file's own preprocessing.

    Returns:
        The model in evaluation mode.

    Example:
        model = plainvit.load("B_16.npz", classes=10, image_size=384)
    """
    if optimize not in (False, True, "fp8"):
        raise ValueError(f"optimize must be True, False or 'fp8', got {optimize!r}")
    resample, text_head = options.pop("resample", None), options.pop("text_head", None)
    dtype = options.pop("dtype", torch.float32)
    if text_head is not None and classes is not None:
        raise ValueError("--classes is not supported with --text-head, whose class names are the classes: remove it")
    detected, tensors = inspect_weights(source, image_size=image_size, **options)
    tensors.check()
    model = build_model(detected, tensors, dtype)
    model.about = _make_about(detected)
    notes = list(detected.notes)
    if model.head is not None and classes is None and not model.head.weight.any():
        notes.append("its head is all zeros: features only, until it is trained")
    model = _adapt(model, classes, None if image_size is None else pair(image_size), resample, notes)
    if text_head is not None:
        if not isinstance(model, ViT):
            raise ValueError(f"{source} is a ResNet: a text head requires an image-text tower such as CLIP")
        model = load_text_head(model, text_head)
    for note in notes:
        log.warning("%s: %s", source, note)
    if not optimize:
        return model
    from plainvit.models.fast.inference import InferenceModel

    return InferenceModel(model, fp8=optimize == "fp8")


def inspect_weights(
    source: str | Path,
    *,
    heads: int | None = None,
    image_size: Size = None,
    grid: tuple[int, int] | None = None,
    **pixels: Unpack[Pixels],
) -> tuple[DetectedModel, Tensors]:
    """Describes a source from its headers, without reading the weights."""
    path = locate_weights(source)
    hints = Hints(heads=heads, image_size=None if image_size is None else pair(image_size), grid=grid)
    unfinished = _check_run(path)
    if path.is_dir():
        is_from_hub = isinstance(source, str) and not Path(source).exists()
        tensors = open_folder(path, safe_only=is_from_hub)
    elif path.is_file():
        tensors = open_file(path)
    else:
        raise ValueError(f"there is no file or folder {path}")
    tensors.metadata |= own.read_sidecar(tensors.path)
    is_described = "plainvit" in tensors.metadata
    try:
        if is_described:
            detected = own.detect(tensors, path)
        else:
            detected, tensors = _detect(tensors, path, hints)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # shapes and values of no format
        raise ValueError(f"{path} is not a valid model: {type(error).__name__}, {error}".replace("\n", " ")) from error
    check_size(detected.config, tensors)
    set_pixels(detected, pixels)
    detected.notes += [] if is_described else list_assumptions(detected)
    detected.notes += unfinished
    return detected, tensors


def _detect(tensors: Tensors, path: Path, hints: Hints) -> tuple[DetectedModel, Tensors]:
    """Asks each format whether these are its names."""
    tensors, outside = _strip_prefix(tensors)
    folder = path if path.is_dir() else None
    config = read_json(folder / "config.json") if folder else {}
    open_clip_config = read_json(folder / open_clip.CONFIG) if folder else {}
    if transformers.matches(tensors):
        detected = transformers.detect(tensors, hints, config, transformers.read_processor(folder) if folder else {})
    elif torchvision.matches(tensors):
        detected = torchvision.detect(tensors, hints)
    elif google.matches(tensors):
        detected, tensors = google.detect(tensors, hints)
    elif timm.matches(tensors):
        detected = timm.detect(tensors, hints, config or open_clip.make_timm_sidecar(open_clip_config))
    elif open_clip.matches(tensors):
        detected = open_clip.detect(tensors, hints, open_clip_config)
    else:
        _check_checkpoint(folder or path.parent)
        first = join_names(tensors.shapes) or "missing"
        raise ValueError(f"{path} has no model that plainvit knows: its first weights are {first}")
    if outside:
        detected.notes.append(f"left out weights that are not the model's: {join_names(outside)}")
    return detected, tensors


def _check_checkpoint(folder: Path) -> None:
    if folder.parent.name == "checkpoints" and (folder / "state.json").is_file():
        raise ValueError(
            f"{folder} is a checkpoint of a run, not its weights: give the run's folder, {folder.parents[1]}"
        )


def _strip_prefix(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """The weights under the prefix that a training script gave its model, and the names of the other weights.

    Lightning saves `model.` or `net.`, compiled modules `model._orig_mod.`, next to the weights of a loss. A head next
    to a `backbone.` belongs to it, as open_clip's projection does to a tower of timm.
    """
    prefixes = _list_prefixes(tensors)
    if prefixes in ([], [""]):
        return tensors, []
    prefix = prefixes[0]
    if len(prefixes) > 1:
        chosen = f"{{k.removeprefix({prefix!r}): v for k, v in weights.items() if k.startswith({prefix!r})}}"
        models = f"{len(prefixes)} models, under {join_names(prefixes)}"
        raise ValueError(f"the file has {models}: save the one you want alone, as {chosen}")
    names: dict[str, tuple[str, int | None]] = {
        name.removeprefix(prefix): (name, None) for name in tensors.shapes if name.startswith(prefix)
    }
    for inner, head in (("backbone.", "head."), ("trunk.", "head.proj.")):
        if prefix.endswith(inner):
            parent = prefix.removesuffix(inner)
            heads = [name for name in tensors.shapes if name.startswith(parent + head)]
            names = {name.removeprefix(parent): (name, None) for name in heads} | names
    inside = RenamedTensors(tensors, names)
    if not any(family.matches(inside) for family in (transformers, torchvision, timm)):
        return tensors, []
    used = {old for old, _ in names.values()}
    return inside, [name for name in tensors.shapes if name not in used]


def _list_prefixes(tensors: Tensors) -> list[str]:
    """The prefixes of the models in a file; not those inside another, as of a hybrid's stem."""
    prefixes: set[str] = set()
    for anchor in ANCHORS:
        prefixes |= {_find_prefix(name, anchor) for name in tensors.shapes if f".{name}".endswith(f".{anchor}")}
    return sorted(prefix for prefix in prefixes if not any(prefix.startswith(other) for other in prefixes - {prefix}))


def _find_prefix(name: str, anchor: str) -> str:
    """The part of a name before the model's own names; `vit.`, `vision_model.` and such are transformers' own."""
    prefix = name.removesuffix(anchor)
    if anchor not in transformers.PATCH_KERNELS:
        return prefix
    for own_prefix in transformers.OWN_PREFIXES:
        if f".{prefix}".endswith(f".{own_prefix}"):
            return prefix.removesuffix(own_prefix)
    return prefix if re.fullmatch(r"((model|net|network|module|_orig_mod|backbone)\.)*", prefix) else ""


def _check_run(folder: Path) -> list[str]:
    """A note if the run of a folder has not finished; it is an error if it has no weights yet."""
    status = read_json(folder / "status.json") if folder.is_dir() else {}
    if status.get("state") in (None, "done"):
        return []
    if status["state"] == "running":  # or killed before it could write its state
        numbers = [path.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*")]
        saved = [int(number) for number in numbers if number.isdecimal()]
        progress = f"whose last checkpoint is of step {max(saved, default=0)} of {status.get('steps')}"
    else:
        progress = f"that stopped at step {status.get('step')} of {status.get('steps')} ({status['state']})"
    if not (folder / "model.safetensors").is_file():
        is_diverged = status["state"] == "diverged"
        resume = "its `plainvit train` command resumes it"
        advice = "another --out with a lower --optim.lr starts over" if is_diverged else resume
        raise ValueError(f"{folder} is a run {progress}, and has no weights yet: {advice}")
    is_first = (folder / "first.json").is_file()
    weights = "its first result" if is_first else "the weights from before it was made longer"
    return [f"{folder} is a run {progress}: these are {weights}"]


def locate_weights(source: str | Path) -> Path:
    """The path of a source; a hub address or a published name is fetched, or detected in the hub's cache."""
    if isinstance(source, Path) or Path(source).exists():
        return Path(source)
    if source.startswith("hf:"):
        return hub.fetch(source.removeprefix("hf:"), HUB_FILES)
    if source in PUBLISHED:
        return hub.fetch(PUBLISHED[source].hub, HUB_FILES)
    if "/" in source and is_model(source):
        size = source.rpartition("-")[2].replace("/", "").lower()  # b16 of ViT-B/16
        same = [name for name in PUBLISHED if size in name.split("_")]
        examples = f"such as {', '.join(same[:3])}" if same else nearest(source, PUBLISHED)
        raise ValueError(f"{source!r} is an architecture, not weights: give published weights, {examples}; {LIST_ALL}")
    if re.fullmatch(r"[\w-]+", source):
        raise ValueError(
            f"there is no file {source!r}, nor published weights of that name; {nearest(source, PUBLISHED)}; {LIST_ALL}"
        )
    return Path(source)


def _adapt(
    model: ViT | ResNet, classes: int | None, size: tuple[int, int] | None, resample: str | None, notes: list[str]
) -> ViT | ResNet:
    old = model.config
    if classes is not None and classes != old.classes:
        model.replace_head(classes)
        model.about = replace(model.about, class_names=())
        notes.append(f"head of {old.classes} classes replaced by one of {classes}, all zeros")
    if size is None or size == old.image_size:
        return model
    if isinstance(model, ResNet):
        model.config = model.config.replace(image_size=size)
        return model
    resample = choose_method(model) if resample is None else resample
    model = resize(model, size, method=resample)
    assert isinstance(old, ViTConfig)
    grids = (" x ".join(map(str, config.grid)) for config in (old, model.config))
    notes.append(f"positions resampled from {' to '.join(grids)} ({resample})")
    return model


def _make_about(detected: DetectedModel) -> About:
    names = detected.class_names
    if names and len(names) != detected.config.classes:
        detected.notes.append(f"{len(names)} class names for {detected.config.classes} classes: left out")
        names = ()
    return About(family=detected.family, preprocess=detected.preprocess, class_names=names, sources=detected.sources)
