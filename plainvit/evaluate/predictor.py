"""Predictor: images -> classes or features. Training, evaluation, prediction and serving share it.

predictor = plainvit.Predictor("runs/photos")       a run, weights of any library, hf:org/name, timm:NAME, a model
predictor(["a.jpg", "b.jpg"])[0]                    [Guess("cat", 0.93), Guess("dog", 0.05), ...]
predictor.features(predictor.stack(["a.jpg"]))      [1, D]
"""

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from plainvit.config import Preprocess
from plainvit.data.decode import to_pixels
from plainvit.data.transforms import preprocess_image
from plainvit.device import choose_device, choose_precision
from plainvit.models import has_fast_path
from plainvit.models.inference import check_finite
from plainvit.runtime.checkpoint import tensor_hash
from plainvit.weights import load
from plainvit.weights.pixels import Pixels

Picture = str | Path | bytes | np.ndarray | Image.Image  # path, file contents, or pixels [height, width, 3]


class Prediction(NamedTuple):
    """A class and its predicted probability."""

    label: str
    probability: float


class Predictor:
    """A model on one device in one precision, with its preprocessing.

    Args:
        model: A run, a weights file of any library, hf:org/name, timm:NAME, or a model. A model object is not copied
            or moved; each call switches it to eval mode and restores its mode afterwards.
        device: cpu, cuda, cuda:N, or auto.
        precision: fp32, bf16, or auto.
        preprocess: Replaces the model's own preprocessing.
        image_size: Side of the input images; the positions are resampled.
        batch: Images per forward pass.
        **pixels: mean, std, resize, crop and interpolation that a weights file does not contain, as in
            `plainvit.load`.

    Example:
        >>> Predictor("runs/photos")(["a.jpg"], k=1)
        [[Guess(label='cat', probability=0.93)]]
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str = "auto",
        precision: Literal["auto", "fp32", "bf16"] = "auto",
        preprocess: Preprocess | None = None,
        image_size: int | None = None,
        batch: int = 64,
        **pixels: Unpack[Pixels],
    ) -> None:
        self.source = model if isinstance(model, str | Path) else ""
        if isinstance(model, str | Path):
            self.device = choose_device(device)
            self.model: Any = _load_model(model, image_size, pixels).to(self.device).eval()
            if self.device.startswith("cuda") and has_fast_path():
                from plainvit.models.fast import accelerate

                accelerate(self.model)
        elif any(value is not None for value in pixels.values()):
            raise ValueError(f"{', '.join(pixels)} can only be given for a weights file, not for a model object")
        else:
            self.device, self.model = _find_device(model, device), model
        self._lock, self._calls, self._training_modules = threading.Lock(), 0, []
        self.dtype = choose_precision(precision, self.device)
        self.size: tuple[int, int] = self.model.config.image_size
        self.preprocess = preprocess or self.model.about.preprocess
        self.batch = batch

    @property
    def classes(self) -> int:
        return self.model.config.classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names of the model; numbers if it has none."""
        return self.model.about.class_names or tuple(map(str, range(self.classes)))

    @functools.cached_property
    def weights_hash(self) -> str:
        """Hash of the weights at the first access, which takes half a second for ViT-B."""
        return tensor_hash(self.model.state_dict())[:16]

    def load_image(self, picture: Picture) -> Tensor:
        """Preprocesses one image to uint8 [3, H, W]. Raises ImageError if it cannot be read."""
        if isinstance(picture, str | Path):
            picture = Path(picture).read_bytes()
        elif isinstance(picture, Image.Image):
            picture = to_pixels(picture)
        elif isinstance(picture, np.ndarray) and (
            picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8
        ):
            got = f"{picture.dtype} {picture.shape}"
            raise ValueError(f"pixels must be uint8 of shape [height, width, 3], got {got}")
        return preprocess_image(picture, self.preprocess, self.size)

    def stack(self, pictures: Iterable[Picture]) -> Tensor:
        """Preprocesses images of any sizes into one batch [B, 3, H, W]."""
        return torch.stack([self.load_image(picture) for picture in pictures])

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K] in fp32, on the model's device."""
        with self._eval_mode(), self._cast():
            return self.model(images.to(self.device, non_blocking=True)).float()

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, D] in fp32: the input of the last layer."""
        with self._eval_mode(), self._cast():
            return self.model.features(images.to(self.device, non_blocking=True)).float()

    def __call__(self, pictures: Iterable[Picture], k: int = 5) -> list[list[Prediction]]:
        """The k most probable classes of each image, in descending order."""
        if not 1 <= k <= self.classes:
            raise ValueError(f"k must be between 1 and the model's {self.classes} classes, got {k}")
        found: list[list[Prediction]] = []
        for some in _batches(pictures, self.batch):
            logits = self.logits(self.stack(some))
            check_finite(logits, [_name(one, at) for at, one in enumerate(some, len(found))].__getitem__)
            best = logits.softmax(-1).topk(k)
            for values, classes in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found.append(
                    [Prediction(self.class_names[at], value) for value, at in zip(values, classes, strict=True)]
                )
        return found

    @contextlib.contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Threads share the model: the first call switches to eval mode, the last one restores the modes."""
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._training_modules = [module for module in self.model.modules() if module.training]
                for module in self._training_modules:
                    module.training = False
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    for module in self._training_modules:
                        module.training = True

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.device.split(":")[0], self.dtype, enabled=self.dtype is not torch.float32)


def _find_device(model: nn.Module, device: str) -> str:
    """The device of the model. Raises ValueError if another one is requested."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        return choose_device(device)
    requested = parameter.device if device == "auto" else torch.device(choose_device(device))
    if requested.type != parameter.device.type or requested.index not in (None, parameter.device.index):
        raise ValueError(
            f"device is {device!r}, but the model is on {parameter.device}: call model.to({device!r}) first"
        )
    return str(parameter.device)


def _load_model(source: str | Path, image_size: int | None, pixels: Pixels) -> nn.Module:
    if str(source).startswith("timm:"):
        if any(value is not None for value in pixels.values()):
            raise ValueError(f"{', '.join(pixels)} can only be given for a weights file, not for a timm model")
        from plainvit.evaluate.timm_models import load_timm

        return load_timm(str(source).removeprefix("timm:"), image_size)
    return load(source, image_size=image_size, **pixels)


def _name(picture: Picture, number: int) -> str:
    return str(picture) if isinstance(picture, str | Path) else f"image {number}"


def _batches(pictures: Iterable[Picture], size: int) -> Iterator[list[Picture]]:
    rest = iter(pictures)
    while some := list(islice(rest, size)):
        yield some
