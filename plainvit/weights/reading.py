"""Weights of any known format -> a model.

A file is recognised by what is in it. What the weights cannot say (heads, grid, arithmetic, preprocessing) comes from
what lies beside them, from the caller, or from the family's convention; `model.about.sources` says which.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch

from plainvit import hub
from plainvit.config import About, Preprocess, ViTConfig, nearest, pair
from plainvit.disk import read_json
from plainvit.models import ResNet, ViT
from plainvit.models.resample import choose_method, resize
from plainvit.names import is_model
from plainvit.weights import google, own, timm, torchvision, transformers
from plainvit.weights.files import Renamed, Tensors, open_file, open_folder
from plainvit.weights.grids import Hints
from plainvit.weights.layout import Found, fill, some
from plainvit.weights.pixels import Pixels, describe_assumptions, set_pixels
from plainvit.weights.published import PUBLISHED

if TYPE_CHECKING:
    from plainvit.models.fast.inference import InferenceModel

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "preprocessor_config.json"]
ALL = "`plainvit weights` lists them all"
# A weight of each family of names that has it exactly once
ANCHORS = ("patch_embed.proj.weight", "stem.conv.weight", "conv_proj.weight", transformers.PATCH_KERNEL)
log = logging.getLogger("plainvit")


@overload
def load(
    source: str | Path,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    *,
    heads: int | None = None,
    grid: tuple[int, int] | None = None,
    resample: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    optimise: Literal[False] = False,
    **pixels: Unpack[Pixels],
) -> ViT | ResNet: ...


@overload
def load(
    source: str | Path,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    *,
    heads: int | None = None,
    grid: tuple[int, int] | None = None,
    resample: str | None = None,
    optimise: Literal[True, "fp8"],
    **pixels: Unpack[Pixels],
) -> "InferenceModel": ...


def load(
    source: str | Path,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    *,
    heads: int | None = None,
    grid: tuple[int, int] | None = None,
    resample: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    optimise: bool | Literal["fp8"] = False,
    **pixels: Unpack[Pixels],
) -> "ViT | ResNet | InferenceModel":
    """A model from weights of any known format: a file, a folder, `hf:org/name[@revision]`, or a published name.

    classes replaces the head by one of zeros; image_size resamples the positions on the true grid, as the code that
    the weights come from does (`resample` names another method). heads and grid say what a bare file cannot.
    dtype=None keeps the file's own. optimise gives a model that only answers, as fast as this machine can. "fp8" lets
    it multiply 8-bit floats too, on a GPU that does: faster, and rounded to 1/16 at most, so that some close calls fall
    the other way; `agreement(images)` of the model says how many. True never takes fp8. mean, std, resize, crop,
    interpolation and antialias replace what the file says or its format implies. What was assumed, replaced or left out
    is logged in a line each.
    """
    if optimise not in (False, True, "fp8"):
        raise ValueError(f"optimise {optimise!r} is unknown: True, False or 'fp8'")
    found, tensors = look(source, heads=heads, image_size=image_size, grid=grid, **pixels)
    tensors.check()
    model = fill(found, tensors, dtype)
    model.about = _about(found)
    notes = list(found.notes)
    head = model.head
    if head is not None and classes is None and not head.weight.any():
        notes.append("its head is all zeros: features only, until it is trained")
    model = _adapted(model, classes, None if image_size is None else pair(image_size), resample, notes)
    for note in notes:
        log.warning("%s: %s", source, note)
    if not optimise:
        return model
    from plainvit.models.fast.inference import InferenceModel

    return InferenceModel(model, fp8=optimise == "fp8")


def look(
    source: str | Path,
    *,
    heads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    **pixels: Unpack[Pixels],
) -> tuple[Found, Tensors]:
    """What a source holds, by its headers alone: nothing is loaded yet."""
    path = resolve(source)
    hints = Hints(heads=heads, image_size=None if image_size is None else pair(image_size), grid=grid)
    unfinished, mend = _unfinished(path)
    if unfinished and not (path / "model.safetensors").is_file():
        raise ValueError(f"{unfinished}, and has no weights yet: {mend}")
    if path.is_dir():
        tensors, beside = open_folder(path, safe_only=_from_hub(source)), path
    elif path.is_file():
        tensors, beside = open_file(path), None
    else:
        raise ValueError(f"there is no file or folder {path}")
    tensors.metadata |= own.read_sidecar(tensors.path)
    described = "plainvit" in tensors.metadata
    try:
        found, tensors = _find(tensors, path, beside, hints)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # shapes and values no format writes
        raise ValueError(f"{path} is not a sound model: {type(error).__name__}, {error}".replace("\n", " ")) from error
    set_pixels(found, pixels)
    assumed = "" if described else describe_assumptions(found)
    # One line says all that is assumed of the pixels
    found.notes = [note for note in found.notes if not note.startswith(("mean: ", "preprocess: "))]
    found.notes += [assumed] if assumed else []
    found.notes += [f"{unfinished}: these are the weights from before it was made longer"] if unfinished else []
    return found, tensors


def _find(tensors: Tensors, path: Path, beside: Path | None, hints: Hints) -> tuple[Found, Tensors]:
    """Asks each format whether these are its names."""
    if "plainvit" in tensors.metadata:
        return own.find(tensors, path), tensors
    tensors, outside = _strip_prefix(tensors)
    found, tensors = _find_foreign(tensors, path, beside, hints)
    if outside:
        found.notes.append(f"left out weights that are not the model's: {some(outside)}")
    return found, tensors


def _find_foreign(tensors: Tensors, path: Path, beside: Path | None, hints: Hints) -> tuple[Found, Tensors]:
    config = read_json(beside / "config.json") if beside else {}
    if transformers.recognise(tensors):
        processor = read_json(beside / "preprocessor_config.json") if beside else {}
        return transformers.find(tensors, hints, config, processor), tensors
    if torchvision.recognise(tensors):
        return torchvision.find(tensors, hints), tensors
    if google.recognise(tensors):
        return google.find(tensors, hints)
    if timm.recognise(tensors):
        return timm.find(tensors, hints, config)
    folder = path if path.is_dir() else path.parent
    if folder.parent.name == "checkpoints" and (folder / "state.json").is_file():
        raise ValueError(f"{path} is a checkpoint of a run, to go on from: give the run's folder, {folder.parents[1]}")
    raise ValueError(f"{path} holds no model that plainvit knows: its first weights are {_first(tensors)}")


def _strip_prefix(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """The weights under the prefix that a training code gave its model, and the names of those outside it.

    Lightning's modules save `model.` or `net.`, compiled ones `model._orig_mod.`, next to the weights of a loss. A head
    next to a `backbone.` belongs to it. Names that need no change are left as they are.
    """
    prefixes = {
        _prefix(name, anchor) for anchor in ANCHORS for name in tensors.shapes if f".{name}".endswith(f".{anchor}")
    }
    outer = sorted(one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes))
    if not outer or outer == [""]:
        return tensors, []
    if len(outer) > 1:
        which = f"{{k.removeprefix({outer[0]!r}): v for k, v in weights.items() if k.startswith({outer[0]!r})}}"
        raise ValueError(f"it holds {len(outer)} models, under {some(outer)}: save the one you want alone, as {which}")
    prefix = outer[0]
    names: dict[str, tuple[str, int | None]] = {
        name.removeprefix(prefix): (name, None) for name in tensors.shapes if name.startswith(prefix)
    }
    if prefix.endswith("backbone."):
        parent = prefix.removesuffix("backbone.")
        heads = [name for name in tensors.shapes if name.startswith(f"{parent}head.")]
        names = {name.removeprefix(parent): (name, None) for name in heads} | names
    inside = Renamed(tensors, names)
    if not any(family.recognise(inside) for family in (transformers, torchvision, timm)):
        return tensors, []
    used = {old for old, _ in names.values()}
    return inside, [name for name in tensors.shapes if name not in used]


def _prefix(name: str, anchor: str) -> str:
    """What stands before a model's own names; "" too where only transformers' names follow, of which `vit.` is one."""
    prefix = name.removesuffix(anchor)
    if anchor != transformers.PATCH_KERNEL:
        return prefix
    inner = re.fullmatch(r"(|.*\.)(vit\.|deit\.)", prefix)
    if inner:
        return inner[1]
    return prefix if re.fullmatch(r"((model|net|network|module|_orig_mod|backbone)\.)*", prefix) else ""


def _unfinished(folder: Path) -> tuple[str, str]:
    """How far a run has come that has not ended, and what ends it; nothing of any other folder or file."""
    said = read_json(folder / "status.json") if folder.is_dir() else {}
    if said.get("state") in (None, "done"):
        return "", ""
    mend = "its `plainvit train` command once more goes on with it"
    if said["state"] == "diverged":
        mend = "another --out with a lower --optim.lr begins anew"
    kept = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdecimal()]
    if said["state"] == "running":  # or killed: then it could not say so
        return f"{folder} is a run whose last checkpoint is of step {max(kept, default=0)} of {said.get('steps')}", mend
    return f"{folder} is a run that stopped at step {said.get('step')} of {said.get('steps')} ({said['state']})", mend


def _from_hub(source: str | Path) -> bool:
    return isinstance(source, str) and not Path(source).exists()


def resolve(source: str | Path) -> Path:
    """A path as it is; a hub address or a published name, fetched or found in the hub's cache."""
    if isinstance(source, Path) or Path(source).exists():
        return Path(source)
    if source.startswith("hf:"):
        return hub.fetch(source.removeprefix("hf:"), HUB_FILES)
    if source in PUBLISHED:
        return hub.fetch(PUBLISHED[source].hub, HUB_FILES)
    if "/" in source and is_model(source):
        raise ValueError(f"{source!r} names a model, not weights; {nearest(source, PUBLISHED)}; {ALL}")
    if re.fullmatch(r"[\w-]+", source):
        words = f"there is no file {source!r}, nor published weights of that name"
        raise ValueError(f"{words}; {nearest(source, PUBLISHED)}; {ALL}")
    return Path(source)


def _adapted(
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
    before, after = (
        " x ".join(map(str, config.grid)) for config in (old, model.config) if isinstance(config, ViTConfig)
    )
    notes.append(f"positions resampled from {before} to {after} ({resample})")
    return model


def _about(found: Found) -> About:
    names = tuple(found.about.get("class_names") or ())
    if names and len(names) != found.config.classes:
        found.notes.append(f"{len(names)} class names for {found.config.classes} classes: left out")
        names = ()
    preprocess = Preprocess(**found.about.get("preprocess", {}))
    return About(family=found.family, preprocess=preprocess, class_names=names, sources=found.sources)


def _first(tensors: Tensors) -> str:
    return some(tensors.shapes) or "none at all"
