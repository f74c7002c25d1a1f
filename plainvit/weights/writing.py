"""Writes a model in any known format, atomically; the same model gives the same bytes."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plainvit.config import RESNET_NUMERICS, STEM_NUMERICS, VIT_NUMERICS, About, Model, ResNetConfig, ViTConfig, nearest
from plainvit.disk import DiskError, run_settings, write_atomically, write_together
from plainvit.models import ResNet, ViT
from plainvit.weights import own, timm_architectures, transformers_files
from plainvit.weights.files import CHECKSUM, DTYPES, hash_content
from plainvit.weights.layout import to_format
from plainvit.weights.reading import load

log = logging.getLogger("plainvit")

TORCH_SUFFIXES = (".pth", ".pt", ".bin")
SUFFIXES = (".safetensors", ".npz", *TORCH_SUFFIXES)  # of files, not of folders
FOLDER_FORMATS = ("timm", "transformers")


class UnsupportedPartError(ValueError):
    """A format does not support parts of a model."""

    def __init__(self, message: str, parts: Iterable[str]) -> None:
        super().__init__(message)
        self.parts = tuple(parts)


def save(model: ViT | ResNet, path: str | Path, format: str = "plainvit", drop: Sequence[str] = ()) -> Path:  # noqa: A002
    """Writes a model in one of the formats, atomically.

    A .pth or .npz file holds weights alone: preprocessing and class names go to FILE.plainvit.json next to it, from
    where `load` reads them.

    Args:
        model: The model to write.
        path: google: an .npz file. plainvit: a .safetensors file. timm, torchvision, open_clip: a .safetensors, .pth,
            .pt or .bin file. timm: also a folder with its config.json. transformers: a folder.
        format: plainvit, google, timm, transformers, torchvision or open_clip.
        drop: Parts of the model to leave out because the format does not support them; otherwise they are an error.

    Returns:
        The path.

    Example:
        plainvit.save(model, "folder", format="transformers")
    """
    _check_model(model)
    if format not in own.FORMATS:
        raise ValueError(f"--format {format} is unknown; {nearest(format, own.FORMATS)}")
    path = Path(path)
    folder = format == "transformers" or (format == "timm" and path.suffix not in SUFFIXES)
    config, weights = _drop_parts(model, _list_unsupported(format, model.config, folder), drop, format)
    _check_suffix(path, format)
    layout = own.layout_for(format, config, weights)
    out = to_format(layout, weights, config)
    described = own.describe(format, config, model.about)
    metadata = {"plainvit": json.dumps(described)}
    if format != "plainvit":  # transformers requires it
        metadata["format"] = "pt"
    if format == "google":
        _write_with_sidecar(path, lambda target: _write_npz(target, out), described)
    elif folder:
        _write_folder(path, out, metadata, _make_sidecars(format, config, model.about, weights))
    elif path.suffix in TORCH_SUFFIXES:
        _write_with_sidecar(path, lambda target: write_torch(target, out), described)
    else:
        write_atomically(path, lambda target: write_safetensors(target, out, metadata))
    return path


def _check_model(model: object) -> None:
    """Rejects a model inside another, whose names would have a prefix with which nothing loads them."""
    if not isinstance(model, ViT | ResNet):
        raise ValueError(
            f"save() takes a ViT or a ResNet, got {type(model).__name__}: pass the model inside it (`._orig_mod` after "
            "torch.compile, `.module` of DDP, `.model` after optimize=True)"
        )


def _check_suffix(path: Path, format: str) -> None:  # noqa: A002
    """Rejects the suffix of another kind of file, which other tools would fail to open."""
    is_suffix = path.suffix[1:2].isalpha()  # not the number of a version, as in vit-1.5
    written = {"plainvit": (".safetensors",), "google": (".npz",), "transformers": ()}
    allowed = written.get(format, (".safetensors", *TORCH_SUFFIXES))
    if is_suffix and path.suffix not in allowed and (path.suffix in SUFFIXES or not path.is_dir()):
        kinds = [f"files that end in {' or '.join(allowed)}"] if allowed else []
        kinds += ["a folder without suffix"] if format in FOLDER_FORMATS else []
        raise ValueError(f"--format {format} writes {', or '.join(kinds)}: give another name than {path.name}")


def _write_with_sidecar(path: Path, write: Callable[[Path], object], described: dict[str, Any]) -> None:
    """Writes a file of weights, and next to it their description."""
    digest, sidecar = "", own.sidecar_path(path)

    def write_weights(target: Path) -> None:
        nonlocal digest
        write(target)
        digest = own.hash_with_description(target, described)

    def write_description(target: Path) -> None:
        _write_json(target, described | {"sha256": digest})

    write_together({path: write_weights, sidecar: write_description})
    log.warning("%s holds weights alone: preprocessing and class names are in %s next to it", path, sidecar.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Adds a checksum, and writes the same bytes for the same content: the library orders metadata at random."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, like the library
    raw = {name: tensors[name].contiguous().flatten().view(torch.uint8).numpy().data for name in order}
    content = {
        name: (names[tensors[name].dtype], tuple(tensors[name].shape), hashlib.sha256(raw[name]).hexdigest())
        for name in order
    }
    checked = dict(metadata) | {CHECKSUM: hash_content(metadata, content)}
    header: dict[str, Any] = {"__metadata__": dict(sorted(checked.items()))}
    end = 0
    for name in order:
        dtype, shape, _ = content[name]
        start, end = end, end + raw[name].nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(raw[name])


def convert(source: str | Path, target: str | Path, format: str, drop: Sequence[str] = (), **hints: Any) -> Path:  # noqa: A002
    """Converts weights from one format to another without changing a value."""
    return save(load(source, dtype=None, **hints), target, format, drop)


def _list_unsupported(format: str, config: Model, folder: bool) -> list[tuple[str, str]]:  # noqa: A002
    """(part, reason) for everything that a format does not support."""
    if format == "plainvit":
        return []
    if isinstance(config, ResNetConfig) and format not in ("google", "timm"):
        return [("resnet", f"plainvit writes BiT for google and timm, not for {format}")]
    supported = timm_architectures.list_in_sidecar(config) if format == "timm" and folder else ()
    return [(part, why) for part, why in own.LIBRARIES[format].list_unsupported(config) if part not in supported]


# What --drop accepts: numerics, replaced by the target's own; a hidden layer, with the head that reads it; LayerScale,
# merged into the layer before. Without any other part the rest of the model has no meaning
DROPS = ("activation", "norm_eps", "standardize", "normalization", "pre_logits", "layer_scale")


def _drop_from_config(part: str, config: Model, format: str) -> Model:  # noqa: A002
    """The config without a part, or with the target's own in its place."""
    if part == "standardize" and isinstance(config, ViTConfig):
        assert config.stem
        numerics = STEM_NUMERICS.get(format, STEM_NUMERICS["timm"])
        return config.replace(stem=config.stem.replace(**numerics, padding="same"))
    match part:
        case "standardize":
            return config.replace(**RESNET_NUMERICS.get(format, {}), padding="symmetric")
        case "normalization":
            return config.replace(mean=(0.5,), std=(0.5,))
        case "pre_logits":
            return config.replace(representation=0, classes=0)
        case "layer_scale":
            return config.replace(layer_scale=None)
        case "activation" if isinstance(config, ViTConfig) and config.gated:
            return config.replace(activation="silu")  # in every library that has gated MLPs
        case _:
            return config.replace(**{part: VIT_NUMERICS[format][part]})


def _drop_parts(
    model: ViT | ResNet,
    unsupported: list[tuple[str, str]],
    drop: Sequence[str],
    format: str,  # noqa: A002
) -> tuple[Model, dict[str, Tensor]]:
    """Config and weights without the unsupported parts that `drop` names; the others are an error."""
    for part in drop:
        if part not in DROPS:
            raise ValueError(f"--drop {part} is not supported; {nearest(part, DROPS)}")
    remaining = [(part, why) for part, why in unsupported if part not in drop]
    if remaining:
        parts = "; ".join(f"{part} ({why})" for part, why in remaining)
        dropped = [*drop, *(part for part, _ in remaining)]
        hints = [f"add --drop {' '.join(dropped)} to leave it out"] if set(dropped) <= set(DROPS) else []
        in_sidecar = timm_architectures.list_in_sidecar(model.config) if format == "timm" else ()
        if all(part in in_sidecar for part, _ in remaining):
            hints.insert(0, "write a folder, a target without suffix, whose config.json states it")
        hint = f": {', or '.join(hints)}" if hints else ""
        raise UnsupportedPartError(f"--format {format} does not support {parts}{hint}", (part for part, _ in remaining))
    config, weights = model.config, {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
    for part, _ in unsupported:
        weights = _drop_weights(part, weights)
        config = _drop_from_config(part, config, format)
        log.warning("dropped %s%s", part, ", and the head that reads it" if part == "pre_logits" else "")
    for part in set(drop) - {part for part, _ in unsupported}:
        log.warning("--drop %s has no effect: --format %s supports what the model has", part, format)
    return config, weights


def _drop_weights(part: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if part == "pre_logits":
        return {name: weight for name, weight in weights.items() if not name.startswith(("pre_logits.", "head."))}
    kept = dict(weights)
    for name in [name for name in weights if name.endswith(".scale") and part == "layer_scale"]:
        layer = name.replace("residual1.scale", "attention.out").replace("residual2.scale", "mlp.fc2")
        scale = kept.pop(name)  # the same function, up to rounding
        kept[f"{layer}.weight"] = kept[f"{layer}.weight"] * scale[:, None]
        if f"{layer}.bias" in kept:
            kept[f"{layer}.bias"] = kept[f"{layer}.bias"] * scale
    return kept


def _make_sidecars(format: str, config: Model, about: About, weights: dict[str, Tensor]) -> dict[str, dict[str, Any]]:  # noqa: A002
    if format == "timm":
        return {"config.json": timm_architectures.make_sidecar(config, about)}
    assert isinstance(config, ViTConfig)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    return transformers_files.make_sidecars(config, about, dtype)


def _write_folder(
    path: Path, out: dict[str, Tensor], metadata: dict[str, str], sidecars: dict[str, dict[str, Any]]
) -> None:
    """Writes all files or none. Libraries read model.safetensors rather than the shards of an earlier model."""
    is_new = not path.exists()
    if path.is_file():
        raise ValueError(f"cannot write {path}: it is a file, and this format needs a folder")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if run_settings(path):
        raise ValueError(f"{path} is the folder of a run, whose config.json would be lost: use another folder")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write into {path}: {error.strerror}") from error
    writers: dict[Path, Callable[[Path], object]] = {}
    for name, value in sidecars.items():
        writers[path / name] = lambda target, value=value: _write_json(target, value)
    writers[path / "model.safetensors"] = lambda target: write_safetensors(target, out, metadata)
    try:
        write_together(writers)
    finally:
        if is_new and not any(path.iterdir()):
            path.rmdir()


def write_torch(path: Path, value: object) -> None:
    """Passes an open file: given a path, torch.save would store the name of the temporary file."""
    with path.open("wb") as file:
        torch.save(value, file)


def _write_npz(path: Path, out: dict[str, Tensor]) -> None:
    arrays: dict[str, Any] = {
        # bfloat16 as big_vision stores it
        name: tensor.view(torch.uint16).numpy().view("V2") if tensor.dtype is torch.bfloat16 else tensor.numpy()
        for name, tensor in out.items()
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)
