"""plainvit's own format, and the description in every safetensors file that plainvit writes.

Names are those of our models. The metadata entry "plainvit" holds a schema version, the format of the names (plainvit,
timm ...), the config, preprocessing and class names. For .pth and .npz files FILE.plainvit.json holds the same.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from plainvit.config import About, Model, Preprocess, from_json, to_json
from plainvit.disk import read_json
from plainvit.errors import first_line
from plainvit.models import build
from plainvit.weights import google, open_clip, timm, torchvision, transformers
from plainvit.weights.files import DamagedError, Tensors, hash_range
from plainvit.weights.layout import SAME, DetectedModel, Entry, Layout, check_size

SCHEMA = 1  # a newer one is an error
LIBRARIES: Mapping[str, ModuleType] = {
    "google": google,
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
    "open_clip": open_clip,
}
FORMATS = ("plainvit", *LIBRARIES)


def layout_for(format: str, config: Model, names: Iterable[str]) -> Layout:  # noqa: A002
    """The layout of a format; our own is made from `names`, the parameters of the model."""
    return LIBRARIES[format].layout_for(config) if format in LIBRARIES else _own_layout(names)


def _own_layout(names: Iterable[str]) -> Layout:
    patterns = (re.sub(r"stages\.\d+\.\d+\.", "stages.{s}.{u}.", name) for name in names)
    patterns = {re.sub(r"blocks\.\d+\.", "blocks.{i}.", pattern) for pattern in patterns}
    return {pattern: Entry((pattern,), SAME) for pattern in patterns}


def describe(format: str, config: Model, about: About) -> dict[str, Any]:  # noqa: A002
    """The description in every safetensors file that plainvit writes."""
    return {"schema": SCHEMA, "format": format, "config": to_json(config), "about": asdict(about)}


def sidecar_path(path: Path) -> Path:
    """The file next to a .pth or .npz file that describes it."""
    return path.with_name(f"{path.name}.plainvit.json")


def hash_with_description(path: Path, described: Mapping[str, Any]) -> str:
    """SHA-256 of a weights file together with its description."""
    weights = hash_range(path, 0, path.stat().st_size)
    return hashlib.sha256(f"{weights} {json.dumps(described, sort_keys=True)}".encode()).hexdigest()


def read_sidecar(path: Path) -> dict[str, str]:
    """The metadata of a weights file from its sidecar; {} if there is none."""
    described, name = read_json(sidecar_path(path)), sidecar_path(path).name
    if described and described.pop("sha256", "") != hash_with_description(path, described):
        raise DamagedError(
            f"{path} does not match {name}: one of them is damaged or was changed. Copy both again, or delete {name} "
            "to load the weights without it"
        )
    return {"plainvit": json.dumps(described)} if described else {}


def detect(tensors: Tensors, path: Path) -> DetectedModel:
    try:
        described = json.loads(tensors.metadata["plainvit"])
        schema, format_, about = int(described["schema"]), described["format"], described["about"]
        if schema > SCHEMA:
            raise ValueError(f"it has schema {schema}, this plainvit reads up to {SCHEMA}: update plainvit")
        config = from_json(described["config"])
        if format_ not in FORMATS:
            raise ValueError(f"format {format_!r} is unknown")
        check_size(config, tensors)
        with torch.device("meta"):
            layout = layout_for(format_, config, build(config).state_dict())
        sources = {name: str(source) for name, source in dict(about["sources"]).items()}
        preprocess = Preprocess(**about["preprocess"])
        names = tuple(str(name) for name in about["class_names"])
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ValueError(f"the description in {path} is invalid: {first_line(error)}") from error
    notes = [f"its weights have the names and shapes of {format_}"] if format_ != "plainvit" else []
    detected = DetectedModel(str(about.get("family")), config, layout, sources, preprocess, names, notes=notes)
    detected.default = "the file's own description"
    return detected
