"""Zero-shot classification: text embeddings of class prompts as the head of an image-text tower.

    load_text_head(model, "names.safetensors")      plainvit evaluate clip/ --text-head names.safetensors --data pets/

The file holds the tensor `embeddings` [classes, width], computed elsewhere by the text tower that belongs to the image
tower; the metadata entry `names`, a JSON list of class names in the same order; and optionally the tensors
`logit_scale` and `logit_bias` as the model stores them (the scale as a logarithm). Logits are scaled cosine
similarities: their order does not depend on the scale, which only calibrates probabilities.
"""

import dataclasses
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.models.families import make_head
from plainvit.models.vit import ViT
from plainvit.weights.files import SafetensorsFiles
from plainvit.weights.layout import check_values

DEFAULT_SCALE = 100.0  # the value at which CLIP clips its logit scale
MAX_LOG_SCALE = 10.0


def load_text_head(model: ViT, path: str | Path) -> ViT:
    """Replaces the head of an image-text tower by class embeddings, in place.

    Args:
        model: A CLIP or SigLIP tower; timm's files store CLIP's projection as a head, which becomes the projection.
        path: The file, as described above.

    Returns:
        The same model, whose logits are those of zero-shot classification.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}: --text-head needs a .safetensors file of text embeddings")
    file = SafetensorsFiles([Path(path)])
    if len(file.shapes.get("embeddings", ())) != 2 or not all(file.shapes["embeddings"]):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in list(file.shapes.items())[:3]) or "no tensor"
        raise ValueError(f"{path}: expected a tensor 'embeddings' of shape [classes, width], found {listed}")
    names = _read_names(path, file.metadata.get("names"), file.shapes["embeddings"][0])
    embeddings = check_values(file.read("embeddings"), "embeddings").float()
    if model.head is not None and model.projection is None and not model.config.cosine_head:
        _turn_head_into_projection(model, embeddings.shape[1])
    if embeddings.shape[1] != model.config.feature_width:
        raise ValueError(
            f"{path} has text embeddings of width {embeddings.shape[1]}, the image tower's are "
            f"{model.config.feature_width} wide: they belong to another model, or the tower lacks its projection"
        )
    scale = _read_scalar(file, "logit_scale")
    if scale is not None and scale > MAX_LOG_SCALE:
        raise ValueError(
            f"logit_scale in {path} must be the logarithm of the scale and at most {MAX_LOG_SCALE:g}, got {scale:g}"
        )
    weight = F.normalize(embeddings, dim=-1) * (DEFAULT_SCALE if scale is None else torch.tensor(scale).exp())
    model.config = model.config.replace(classes=len(embeddings), cosine_head=True)
    head = make_head(model.config)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.fill_(_read_scalar(file, "logit_bias") or 0.0)
    model.head = head.to(model.embedding.weight)
    model.about = dataclasses.replace(model.about, class_names=names)
    return model


def _read_names(path: str | Path, stored: str | None, count: int) -> tuple[str, ...]:
    try:
        names = json.loads(stored or "")
    except ValueError:
        names = None
    if not isinstance(names, list) or len(names) != count or len(set(map(str, names))) != count:
        raise ValueError(f"the metadata entry 'names' of {path} must be a JSON list of {count} distinct class names")
    return tuple(map(str, names))


def _read_scalar(file: SafetensorsFiles, name: str) -> float | None:
    if name not in file.shapes:
        return None
    value: Tensor = check_values(file.read(name), name)
    if value.numel() != 1:
        raise ValueError(f"{name} in {file.path} must be one number, it has shape {tuple(value.shape)}")
    return value.item()


def _turn_head_into_projection(model: ViT, width: int) -> None:
    """A head without biases that is as wide as the text embeddings is timm's name of CLIP's projection."""
    head, config = model.head, model.config
    if config.classes != width or head is None or head.bias.any():
        raise ValueError(
            f"the model has a classifier of {config.classes} classes: use an image-text tower without a classifier"
        )
    model.config = config.replace(classes=0, projection=width)
    model.projection = torch.nn.Linear(config.width, width, bias=False)
    model.projection.weight = head.weight
    model.head = None
