"""Predictor: images -> classes or features. Training, evaluation, prediction and serving share it.

predictor = plainvit.Predictor("runs/photos")       a run, weights of any library, hf:org/name, a model
predictor("a.jpg")                                  [Prediction("cat", 0.93), Prediction("dog", 0.05), ...]
predictor(["a.jpg", image, array])                  a list of such lists
predictor.features("a.jpg")                         [D]
"""

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from plainvit.config import Preprocess, to_json
from plainvit.data.decode import ImageError, to_pixels
from plainvit.data.transforms import as_floats, preprocess_image
from plainvit.device import choose_device, choose_precision
from plainvit.evaluate.class_names import default_class_names, read_class_names
from plainvit.models import has_fast_path
from plainvit.models.inference import check_finite, eval_mode
from plainvit.weights import load
from plainvit.weights.pixels import Pixels

log = logging.getLogger("plainvit")
# A path, the contents of a file, an image of Pillow, an array [height, width, 3], or a tensor [3, height, width]
ImageLike = str | Path | bytes | Image.Image | np.ndarray | Tensor


class Prediction(NamedTuple):
    """A class and its predicted probability."""

    label: str
    probability: float


class Predictor:
    """A model on one device in one precision, with its preprocessing.

    Args:
        model: A run, a weights file of any library, hf:org/name, or a model. A model object is not copied or moved;
            each call switches it to eval mode and restores its mode afterwards.
        device: cpu, cuda, cuda:N, or auto.
        precision: fp32, bf16, or auto.
        preprocess: Replaces the model's own preprocessing.
        image_size: Side of the input images, for a run or weights file; the positions are resampled.
        batch: Images per forward pass.
        class_names: Names of the classes, or a file with them. Default: the model's own; for 1,000 classes without
            names ImageNet-1k's; else numbers.
        **pixels: mean, std, resize, crop and interpolation that a weights file does not contain, as in
            `plainvit.load`.

    Example:
        >>> predictor = Predictor("runs/photos")
        >>> predictor("a.jpg", k=1)
        [Prediction(label='cat', probability=0.93)]
        >>> predictor.features(["a.jpg", "b.jpg"]).shape
        torch.Size([2, 192])
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
        class_names: str | Path | Sequence[str] | None = None,
        **pixels: Unpack[Pixels],
    ) -> None:
        self.source = model if isinstance(model, str | Path) else ""
        given = [name for name, value in {"image_size": image_size, **pixels}.items() if value is not None]
        if isinstance(model, str | Path):
            self.device = choose_device(device)
            self.model: Any = load(model, image_size=image_size, **pixels).to(self.device).eval()
            if self.device.startswith("cuda") and has_fast_path():
                from plainvit.models.fast import accelerate

                accelerate(self.model)
        elif given:
            raise ValueError(f"{', '.join(given)} can only be given for a weights file, not for a model object")
        else:
            self.device, self.model = _find_device(model, device), model
        self.dtype = choose_precision(precision, self.device)
        self.size: tuple[int, int] = self.model.config.image_size
        self.preprocess = preprocess or self.model.about.preprocess
        self.batch = batch
        if class_names is not None:
            self.class_names = _check_names(class_names, self.classes)

    @property
    def classes(self) -> int:
        return self.model.config.classes

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; ImageNet-1k's for 1,000 classes without names, else numbers."""
        return self.model.about.class_names or default_class_names(self.classes, str(self.source or "the model"))

    @functools.cached_property
    def weights_hash(self) -> str:
        """Hash of the weights at the first access, which takes half a second for ViT-B."""
        from plainvit.runtime.checkpoint import hash_tensors  # loads FSDP, which takes another half

        return hash_tensors(self.model.state_dict())[:16]

    def describe(self) -> dict[str, Any]:
        """Everything that the outputs depend on, except the images and the last digits."""
        return {
            "weights": self.weights_hash,
            "config": to_json(self.model.config),
            "preprocess": to_json(self.preprocess),
            "image_size": list(self.size),
            "precision": str(self.dtype).removeprefix("torch."),
        }

    def load_image(self, image: ImageLike) -> Tensor:
        """Preprocesses one image to [3, H, W].

        A tensor that has the model's size already is returned as it is; all else is resized and becomes uint8.

        Raises:
            ImageError: The image cannot be read.
            ValueError: Its type or shape is not supported.
        """
        if isinstance(image, Tensor) and image.dtype != torch.uint8 and not image.is_floating_point():
            raise ValueError(f"a tensor must be uint8 or floats in [0, 1], got {image.dtype}")
        if isinstance(image, Tensor) and tuple(image.shape) == (3, *self.size):
            return image
        try:
            return preprocess_image(_to_array(image), self.preprocess, self.size)
        except ImageError as error:
            raise ImageError(f"{image}: {error}" if isinstance(image, str | Path) else str(error)) from error

    def stack(self, images: Iterable[ImageLike]) -> Tensor:
        """Preprocesses images of any sizes into one batch [B, 3, H, W]."""
        loaded = [self.load_image(image) for image in images]
        mixed = len({image.dtype for image in loaded}) > 1
        return torch.stack([as_floats(image) if mixed else image for image in loaded])

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K] in fp32, on the model's device."""
        with eval_mode(self.model), self._cast():
            return self.model(images.to(self.device, non_blocking=True)).float()

    @torch.no_grad()
    def features(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """The input of the model's last layer, in fp32 on the model's device.

        Args:
            images: One image, a list of images, or a batch [B, 3, H, W] of the model's size.

        Returns:
            [D] for one image, otherwise [B, D].

        Example:
            >>> predictor.features("a.jpg").shape
            torch.Size([192])
        """
        if _is_one_image(images):
            return self.features([cast(ImageLike, images)])[0]
        if isinstance(images, Tensor) and tuple(images.shape[2:]) == tuple(self.size):
            return self._features(images)
        batches = [self._features(self.stack(batch)) for batch in _batches(images, self.batch)]
        if not batches:
            raise ValueError("images is empty: give at least one image")
        return torch.cat(batches)

    def _features(self, images: Tensor) -> Tensor:
        with eval_mode(self.model), self._cast():
            return self.model.features(images.to(self.device, non_blocking=True)).float()

    def __call__(self, images: ImageLike | Iterable[ImageLike], k: int = 5) -> Any:
        """Predicts the k most probable classes, in descending order; all classes if there are fewer.

        Args:
            images: One image or several: paths, contents of files, images of Pillow, arrays [height, width, 3] in
                uint8, or tensors [3, height, width] in uint8 or [0, 1].
            k: Number of classes per image.

        Returns:
            A list of predictions for one image, a list of such lists for several.

        Example:
            >>> predictor("a.jpg", k=2)
            [Prediction(label='cat', probability=0.93), Prediction(label='dog', probability=0.05)]
        """
        if not self.classes:
            raise ValueError("the model has no head and cannot predict classes: use Predictor.features")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if _is_one_image(images):
            return self([cast(ImageLike, images)], k)[0]
        predictions: list[list[Prediction]] = []
        for batch in _batches(images, self.batch):
            logits = self.logits(self.stack(batch))
            names = [_name(image, number) for number, image in enumerate(batch, len(predictions))]
            check_finite(logits, names.__getitem__, computed_in=self.dtype)
            best = logits.softmax(-1).topk(min(k, self.classes))
            for values, classes in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                pairs = zip(classes, values, strict=True)
                predictions.append([Prediction(self.class_names[label], value) for label, value in pairs])
        return predictions

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


def _check_names(names: str | Path | Sequence[str], classes: int) -> tuple[str, ...]:
    if isinstance(names, str | Path):
        return read_class_names(Path(names), classes)
    if len(names) != classes:
        raise ValueError(f"class_names has {len(names):,} names, but the model has {classes:,} classes")
    return tuple(names)


def _to_array(image: ImageLike) -> bytes | np.ndarray:
    """The contents of a file, or uint8 pixels [height, width, 3]."""
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    if isinstance(image, Image.Image):
        return to_pixels(image)
    if isinstance(image, Tensor):
        pixels = image if image.dtype == torch.uint8 else image.clamp(0, 1).mul(255).round().byte()
        image = pixels.movedim(0, -1).contiguous().cpu().numpy()
    if isinstance(image, np.ndarray) and (image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8):
        kind = f"{image.dtype} {list(image.shape)}"
        raise ValueError(f"pixels must be uint8 [height, width, 3], or a tensor [3, height, width], got {kind}")
    return image


def _is_one_image(images: object) -> bool:
    return isinstance(images, str | Path | bytes | Image.Image) or getattr(images, "ndim", 0) == 3


def _name(image: ImageLike, number: int) -> str:
    return str(image) if isinstance(image, str | Path) else f"image {number}"


def _batches(images: object, size: int) -> Iterator[list[ImageLike]]:
    rest = iter(cast(Iterable[ImageLike], images))
    while batch := list(islice(rest, size)):
        yield batch
