"""Evaluate timm's models with the same code on the same pixels: timm:NAME.

    plainvit evaluate timm:tf_efficientnet_b7.ns_jft_in1k --data imagenet --data-root DIR
    plainvit evaluate timm:local-dir:FOLDER --data photos/

NAME is anything that timm.create_model takes: a name with or without a tag, hf-hub:org/name, or local-dir:FOLDER with
config.json and model.safetensors. Preprocessing and normalisation are timm's. timm is imported only here, on use; it
reads safetensors, and other files with `weights_only=True`.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plainvit.config import About, Preprocess, pair
from plainvit.data.transforms import as_floats

log = logging.getLogger("plainvit")
INSTALL = "pip install 'timm>=1.0.29'"


@dataclass(frozen=True)
class TimmConfig:
    """The settings of a timm model that evaluation needs."""

    name: str
    classes: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class TimmModel(nn.Module):
    """A timm model that takes images in uint8 or [0, 1] and normalises them itself, as ours do."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, config: TimmConfig, about: About) -> None:
        super().__init__()
        self.model: Any = model
        self.config, self.about = config, about
        self.register_buffer("mean", torch.tensor(config.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K]"""
        return self.model(self._normalise(images))

    def features(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, D]: the input of the classifier."""
        found = self.model.forward_features(self._normalise(images))
        return self.model.forward_head(found, pre_logits=True).flatten(1)

    def _normalise(self, images: Tensor) -> Tensor:
        return (as_floats(images) - self.mean) / self.std


def load_timm(name: str, image_size: int | None = None) -> TimmModel:
    """Loads a model of timm with its weights. Raises ValueError with timm's reason if it cannot."""
    try:
        import timm
        from timm.data.config import resolve_model_data_config
    except ImportError as error:
        raise ValueError(f"timm:NAME needs timm: {INSTALL}") from error
    try:
        model: Any = timm.create_model(name, pretrained=True)
        if image_size and hasattr(model, "set_input_size"):
            model.set_input_size(img_size=pair(image_size))
    except Exception as error:  # timm raises many types, also for a name that it does not know
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"timm cannot load {name!r}: {reason or type(error).__name__}") from error
    data = resolve_model_data_config(model)
    size = pair(image_size) if image_size else tuple(data["input_size"][1:])
    config = TimmConfig(name, model.num_classes, (size[0], size[1]), tuple(data["mean"]), tuple(data["std"]))
    return TimmModel(model, config, About(family="timm", preprocess=_convert_preprocess(name, data))).eval()


def _convert_preprocess(name: str, data: dict[str, Any]) -> Preprocess:
    """Converts timm's crop_pct, crop_mode and interpolation; warns where there is no equivalent."""
    if data["crop_mode"] == "border":
        log.warning("timm:%s pads to the size (crop_mode 'border'); plainvit crops instead", name)
    squash = "squash" if data["crop_pct"] == 1 else "squash-crop"
    resize = squash if data["crop_mode"] == "squash" else "crop"
    return Preprocess(resize=resize, crop=data["crop_pct"], interpolation=data["interpolation"])
