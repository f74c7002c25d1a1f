"""Evaluate timm's models with the same code: timm:NAME.

    plainvit evaluate timm:tf_efficientnet_b7.ns_jft_in1k --data imagenet --data-root DIR
    plainvit evaluate timm:resnetv2_50x1_bit@weights.safetensors --data photos/

NAME is timm's, with or without a tag; NAME@FILE loads the weights from a file. The preprocessing is timm's for the
model. timm is imported only here, on use.
"""

import difflib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plainvit import hub
from plainvit.config import About, Preprocess, pair
from plainvit.data.transforms import as_floats
from plainvit.weights.files import open_file

log = logging.getLogger("plainvit")
INSTALL = "pip install 'timm>=1.0.29'"
HUB_FILE = "model.safetensors"


@dataclass(frozen=True)
class PeerConfig:
    """The settings of a timm model that evaluation needs."""

    name: str
    classes: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Peer(nn.Module):
    """A timm model that takes images in uint8 or [0, 1] and normalises them itself, as ours do."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, config: PeerConfig, about: About) -> None:
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


def load_timm(name: str, image_size: int | None = None) -> Peer:
    """Loads timm's NAME with its published weights, or NAME@FILE with those of a file."""
    timm = _import_timm()
    name, _, file = name.partition("@")
    _check_name(timm, name)
    config = timm.get_pretrained_cfg(name)
    path = Path(file) if file else _download(name, config)
    state, own = _read_state(path), tuple(config.input_size[1:])
    size = own if image_size is None else pair(image_size)
    options: dict[str, Any] = _find_classes(state, config.classifier)
    if config.fixed_input_size and size != own:
        options["img_size"] = size
    try:
        model = timm.create_model(name, pretrained=False, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"timm cannot make {name} at {size[0]} x {size[1]} px: {reason}") from error
    _load_state(model, state, path)
    peer = PeerConfig(name, model.num_classes, (size[0], size[1]), tuple(config.mean), tuple(config.std))
    return Peer(model, peer, About(family="timm", preprocess=_read_preprocess(name, config))).eval()


def _download(name: str, config: Any) -> Path:
    """The safetensors file of timm's hub entry, from the hub or its cache. Never a pickle."""
    if not config.hf_hub_id:
        raise ValueError(f"timm has no weights for {name} on the hub: use timm:{name}@FILE")
    try:
        folder = hub.fetch(config.hf_hub_id, [HUB_FILE])
    except ValueError as error:
        raise ValueError(f"{error}, as timm:{name}@FOLDER/{HUB_FILE}") from error
    return folder / HUB_FILE


def _import_timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"timm:NAME needs timm: {INSTALL}") from error
    return timm


def _check_name(timm: Any, name: str) -> None:
    known = timm.list_models()
    base, _, tag = name.partition(".")
    if base not in known:
        close = difflib.get_close_matches(base, known, 3, cutoff=0.5)
        raise ValueError(
            f"timm has no model {base!r}; nearest: {', '.join(close) or 'timm.list_models() has them all'}"
        )
    tags = [one.partition(".")[2] for one in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise ValueError(f"timm has no weights {tag!r} for {base}; it has: {', '.join(filter(None, tags)) or 'none'}")


def _read_preprocess(name: str, config: Any) -> Preprocess:
    """Converts timm's crop_pct, crop_mode and interpolation; warns where there is no equivalent."""
    if config.crop_mode == "border":
        log.warning("timm:%s pads to the size (crop_mode 'border'); plainvit crops instead", name)
    squash = "squash" if config.crop_pct == 1 else "squash-crop"
    return Preprocess(
        resize=squash if config.crop_mode == "squash" else "crop",
        crop=config.crop_pct,
        interpolation=config.interpolation,
    )


def _find_classes(state: dict[str, Tensor], classifier: object) -> dict[str, Any]:
    """The number of classes of a fine-tuned file: the rows of its head."""
    name = classifier[0] if isinstance(classifier, tuple | list) else classifier
    head = state.get(f"{name}.weight")
    return {} if head is None else {"num_classes": len(head)}


def _load_state(model: Any, state: dict[str, Tensor], path: Path) -> None:
    """Loads all weights of a file, with timm's own conversion for the model."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        model.load_state_dict(convert(state, model) if convert else state)
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the weights in {path} do not fit this timm model: {reason}") from error


def _read_state(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from a weights file of any format; nothing in it is executed."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    tensors = open_file(path)
    return {name: tensors.pop(name) for name in tensors.shapes}
