"""A model -> weights in any known format, whole or not at all; the same model gives the same bytes."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plainvit.config import RESNET_NUMERICS, STEM_NUMERICS, VIT_NUMERICS, About, Model, ViTConfig, nearest
from plainvit.disk import DiskError, read_json, run_settings, write_atomically, write_together
from plainvit.models import ResNet, ViT
from plainvit.weights import own, timm, transformers
from plainvit.weights.files import CHECKSUM, DTYPES, SHARD_INDEX, hash_content
from plainvit.weights.layout import emit, unexpressed
from plainvit.weights.reading import load

log = logging.getLogger("plainvit")


def save(model: ViT | ResNet, path: str | Path, format: str = "plainvit", drop: Sequence[str] = ()) -> Path:  # noqa: A002
    """Writes a model in any of the formats, whole or not at all.

    google is one .npz; plainvit, timm and torchvision one file (.safetensors, or .pth for the latter two); timm may be
    a folder with its config.json; transformers is a folder. What the format cannot express is refused by name, unless
    `drop` names it. A .pth or .npz file holds weights alone: preprocessing, class names and the like are written into
    FILE.plainvit.json next to it, from where `load` reads them.
    """
    if format not in own.FORMATS:
        raise ValueError(f"format {format!r} is unknown; {nearest(format, own.FORMATS)}")
    path = Path(path)
    folder = format == "transformers" or (format == "timm" and path.suffix not in (".safetensors", ".pth", ".bin"))
    config, weights = _without(model, _lacks(format, model.config, folder), drop, format)
    layout = own.layout_for(format, config, weights)
    stray = unexpressed(layout, weights)
    assert not stray, f"{format} has no place for {stray}, and did not say so"
    out = emit(layout, weights, config)
    described = own.describe(format, config, model.about)
    metadata = {"plainvit": json.dumps(described)}
    if format != "plainvit":  # transformers asks for it
        metadata["format"] = "pt"
    if format == "google":
        _write_with_sidecar(path, lambda beside: _write_npz(beside, out), described)
    elif folder:
        _write_folder(path, out, metadata, _sidecars(format, config, model.about, weights))
    elif path.suffix in (".pth", ".bin") and format != "plainvit":
        _write_with_sidecar(path, lambda beside: write_torch(beside, out), described)
    else:
        write_atomically(path, lambda beside: write_safetensors(beside, out, metadata))
    return path


def _write_with_sidecar(path: Path, write: Callable[[Path], object], described: dict[str, Any]) -> None:
    """A file that holds weights alone, and next to it what they mean."""
    digest, sidecar = "", own.sidecar(path)

    def write_weights(beside: Path) -> None:
        nonlocal digest
        write(beside)
        digest = own.hash_described(beside, described)

    def write_description(beside: Path) -> None:
        text = json.dumps(described | {"sha256": digest}, indent=2, ensure_ascii=False) + "\n"
        beside.write_text(text, encoding="utf-8")

    write_together({path: write_weights, sidecar: write_description})
    log.warning("%s holds weights alone: preprocessing and class names are in %s next to it", path, sidecar.name)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """With a checksum, and the same bytes for the same content: the library orders metadata at random."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as the library has it
    raw = {name: tensors[name].contiguous().flatten().view(torch.uint8).numpy().data for name in order}
    content = {
        name: (names[tensors[name].dtype], tuple(tensors[name].shape), hashlib.sha256(raw[name]).hexdigest())
        for name in order
    }
    told = dict(metadata) | {CHECKSUM: hash_content(metadata, content)}
    header: dict[str, Any] = {"__metadata__": {key: told[key] for key in sorted(told)}}
    end = 0
    for name in order:
        dtype, shape, _ = content[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end := end + raw[name].nbytes)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(raw[name])


def convert(source: str | Path, target: str | Path, format: str, drop: Sequence[str] = (), **hints: Any) -> Path:  # noqa: A002
    """Weights from one format to another, every number as it was."""
    return save(load(source, dtype=None, **hints), target, format, drop)


def _lacks(format: str, config: Model, folder: bool) -> list[tuple[str, str]]:  # noqa: A002
    """(part, why) for everything that a format cannot express."""
    if format == "plainvit":
        return []
    beyond = _beyond(config) if isinstance(config, ViTConfig) else ()
    said = timm.SIDECAR_SAYS if format == "timm" and folder else ()
    return [*beyond, *(lack for lack in own.OTHERS[format].lacks(config) if lack[0] not in said)]


def _beyond(config: ViTConfig) -> Iterable[tuple[str, str]]:
    """The paper's ablations, which no other library has."""
    if config.axial:
        yield "axial", "only plainvit has axial blocks"
    if config.norm == "post":
        yield "norm", "only plainvit has post-norm"
    if config.posemb_at != "stem":
        yield "posemb_at", "only plainvit adds positions at every layer"


# What may be dropped; the rest has no meaning without the part
DROPS = (
    *("activation", "norm_eps", "standardise", "normalisation"),  # the target's own takes its place
    *("pre_logits", "registers", "layer_scale", "distillation"),
)


def _dropped(part: str, config: Model, format: str) -> Model:  # noqa: A002
    """The config as the target will read it, without the part."""
    match part:
        case "activation" | "norm_eps":
            return config.replace(**{part: VIT_NUMERICS[format][part]})
        case "standardise" if isinstance(config, ViTConfig):
            assert config.stem
            return config.replace(stem=config.stem.replace(**STEM_NUMERICS[format], padding="same"))
        case "standardise":
            return config.replace(**RESNET_NUMERICS[format], padding="symmetric")
        case "normalisation":
            return config.replace(mean=(0.5,), std=(0.5,))
        case "pre_logits":
            return config.replace(representation=0, classes=0)
        case "registers":
            return config.replace(registers=0)
        case "layer_scale":
            return config.replace(layer_scale=None)
        case _:
            return config.replace(distillation=False)


def _without(
    model: ViT | ResNet,
    lacking: list[tuple[str, str]],
    drop: Sequence[str],
    format: str,  # noqa: A002
) -> tuple[Model, dict[str, Tensor]]:
    """Config and weights less the parts that the caller agreed to lose; an error for the others."""
    for part in drop:
        if part not in DROPS:
            raise ValueError(f"nothing called {part!r} can be dropped; {nearest(part, DROPS)}")
    refused = [(part, why) for part, why in lacking if part not in drop]
    if refused:
        parts = "; ".join(f"{part} ({why})" for part, why in refused)
        asked = [*drop, *(part for part, _ in refused)]
        hint = f": --drop {' '.join(asked)} goes on without" if set(asked) <= set(DROPS) else ""
        raise ValueError(f"format {format!r} cannot express {parts}{hint}")
    config, weights = model.config, {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    for part, _ in lacking:
        weights = _drop_weights(part, config, weights)
        config = _dropped(part, config, format)
        log.warning("dropped %s%s", part, ", and the head that reads it" if part == "pre_logits" else "")
    for part in set(drop) - {part for part, _ in lacking}:
        log.warning("%s was not dropped: none stands in the way of format %r", part, format)
    return config, weights


def _drop_weights(part: str, config: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    prefixes = {
        "pre_logits": ("pre_logits.", "head."),  # the head reads the hidden layer: alone it means nothing
        "registers": ("registers",),
        "distillation": ("distillation_token", "head_distillation."),
    }.get(part, ())
    kept = (
        {name: weight for name, weight in weights.items() if not name.startswith(prefixes)}
        if prefixes
        else dict(weights)
    )
    if part == "layer_scale":  # folded into the layer before it: the same function, to rounding
        for name in [name for name in kept if name.endswith(".scale")]:
            layer = name.replace("residual1.scale", "attention.out").replace("residual2.scale", "mlp.fc2")
            scale = kept.pop(name)
            kept[f"{layer}.weight"] = kept[f"{layer}.weight"] * scale[:, None]
            kept[f"{layer}.bias"] = kept[f"{layer}.bias"] * scale
    table = kept.get("positions.0.table")
    if table is not None and isinstance(config, ViTConfig) and part in ("registers", "distillation"):
        first = config.class_token + (config.distillation if part == "registers" else 0)
        lost = (config.registers if config.posemb_prefix == "all" else 0) if part == "registers" else 1
        lost = 0 if config.posemb_prefix == "none" else lost
        kept["positions.0.table"] = torch.cat((table[:first], table[first + lost :])) if lost else table
    return kept


def _sidecars(format: str, config: Model, about: About, weights: dict[str, Tensor]) -> dict[str, dict[str, Any]]:  # noqa: A002
    if format == "timm":
        return {"config.json": timm.sidecar_for(config, about)}
    assert isinstance(config, ViTConfig)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    return transformers.sidecars_for(config, about, dtype)


def _write_folder(
    path: Path, out: dict[str, Tensor], metadata: dict[str, str], sidecars: dict[str, dict[str, Any]]
) -> None:
    """All files or none; shards of an earlier model go with the new one's arrival."""
    new = not path.exists()
    if path.is_file():
        raise ValueError(f"cannot write {path}: it is a file, and this format is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if run_settings(path):
        raise ValueError(f"{path} is the folder of a run, whose config.json would be lost: give another folder")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write into {path}: {error.strerror}") from error
    old = [path / name for name in _shards(path)]
    writers: dict[Path, Callable[[Path], object]] = {}
    for name, value in sidecars.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        writers[path / name] = lambda beside, text=text: beside.write_text(text, encoding="utf-8")
    writers[path / "model.safetensors"] = lambda beside: write_safetensors(beside, out, metadata)
    try:
        write_together(writers)
    except DiskError:
        if new and not any(path.iterdir()):
            path.rmdir()
        raise
    for stale in old:
        stale.unlink(missing_ok=True)


def _shards(folder: Path) -> list[str]:
    """The index of a sharded model and the shards that it names, the index first."""
    index = folder / SHARD_INDEX
    if not index.is_file():
        return []
    try:
        names = read_json(index).get("weight_map")
    except ValueError:
        names = None
    named = names.values() if isinstance(names, dict) else ()
    return [
        SHARD_INDEX,
        *{name for name in named if isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)},
    ]


def write_torch(path: Path, value: object) -> None:
    """Through an open file: given a name, torch.save stores that of the temporary file inside."""
    with path.open("wb") as file:
        torch.save(value, file)


def _write_npz(path: Path, out: dict[str, Tensor]) -> None:
    arrays: dict[str, Any] = {name: _as_numpy(tensor) for name, tensor in out.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _as_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:  # as big_vision stores it
        return tensor.view(torch.uint16).numpy().view("V2")
    return tensor.numpy()
