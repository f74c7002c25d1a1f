"""Random crops, flips and colors as functions of uniform numbers, and the preprocessing for evaluation.

Crops are boxes in the original image, so a JPEG is decoded no larger than its crop needs, and streamed and resident
images use the same boxes. The model itself normalizes.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.config import Augment, Preprocess
from plainvit.data.decode import PIXEL_LIMIT, decode, get_image_size

TRIES = 10  # crop attempts of an image, four random numbers each
NUM_UNIFORMS = 4 * TRIES + 9  # per image: crop attempts, flip, 3 for color, 5 for erasing; RandAugment's follow


def crop_boxes(u: Tensor, sizes: Tensor, augment: Augment, out: tuple[int, int]) -> Tensor:
    """[B, 4] boxes (top, left, height, width) in pixels of images of `sizes` [B, 2].

    `u` has NUM_UNIFORMS random numbers in [0, 1) for each image. Boxes of crop 'pad' may extend beyond the image.
    """
    h, w = sizes[:, 0].float(), sizes[:, 1].float()
    if augment.crop == "none":
        return torch.stack((torch.zeros_like(h), torch.zeros_like(w), h, w), 1)
    if augment.crop == "pad":
        top, left = ((u[:, i] * (2 * augment.pad + 1)).floor() - augment.pad for i in (0, 1))
        return torch.stack((top, left, h, w), 1)
    if augment.crop == "random":  # crop the resized image, with the box mapped back to the original
        resized_h, resized_w = (augment.resized_side(side) for side in out)
        spare_h, spare_w = resized_h - out[0], resized_w - out[1]
        top, left = (u[:, 0] * (spare_h + 1)).floor(), (u[:, 1] * (spare_w + 1)).floor()
        kh, kw = h / resized_h, w / resized_w
        return torch.stack((top * kh, left * kw, out[0] * kh, out[1] * kw), 1)
    return _inception_boxes(u, h, w, augment)


def _inception_boxes(u: Tensor, h: Tensor, w: Tensor, augment: Augment) -> Tensor:
    """The first of TRIES random boxes that fits into the image, or a fallback."""
    tries = u[:, : 4 * TRIES].view(-1, TRIES, 4)
    propose = _propose_torchvision if augment.crop == "inception" else _propose_tensorflow
    ch, cw, fits = propose(tries, h.unsqueeze(1), w.unsqueeze(1), augment)  # each [B, TRIES]
    first = fits.float().argmax(1, keepdim=True)  # the first that fits
    ch, cw = ch.gather(1, first).squeeze(1), cw.gather(1, first).squeeze(1)
    draws = tries.gather(1, first.unsqueeze(2).expand(-1, -1, 4)).squeeze(1)
    # torchvision falls back to the center, TensorFlow to the whole image
    fallback_h, fallback_w = _largest_center_crop(h, w, augment) if augment.crop == "inception" else (h, w)
    none = ~fits.any(1)
    ch, cw = torch.where(none, fallback_h, ch), torch.where(none, fallback_w, cw)
    top, left = (draws[:, 2] * (h - ch + 1)).floor(), (draws[:, 3] * (w - cw + 1)).floor()
    top, left = torch.where(none, ((h - ch) / 2).floor(), top), torch.where(none, ((w - cw) / 2).floor(), left)
    return torch.stack((top, left, ch, cw), 1)


def _propose_torchvision(u: Tensor, h: Tensor, w: Tensor, augment: Augment) -> tuple[Tensor, Tensor, Tensor]:
    """Area uniform, aspect (width / height) log-uniform."""
    area = (augment.area[0] + u[..., 0] * (augment.area[1] - augment.area[0])) * h * w
    low, high = (math.log(value) for value in augment.aspect)
    aspect = torch.exp(low + u[..., 1] * (high - low))
    ch, cw = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    return ch, cw, (ch <= h) & (cw <= w) & (ch > 0) & (cw > 0)


def _propose_tensorflow(u: Tensor, h: Tensor, w: Tensor, augment: Augment) -> tuple[Tensor, Tensor, Tensor]:
    """tf.image.sample_distorted_bounding_box: aspect uniform, then height uniform within the area limits."""
    aspect = augment.aspect[0] + u[..., 0] * (augment.aspect[1] - augment.aspect[0])
    least = (augment.area[0] * h * w / aspect).sqrt().round()
    most = torch.minimum((augment.area[1] * h * w / aspect).sqrt().round(), ((w + 0.5 - 1e-4) / aspect).floor())
    most = torch.minimum(most, h)
    least = torch.minimum(least, most)
    ch = least + (u[..., 1] * (most - least + 1)).floor()
    cw = (ch * aspect).round()
    area = ch * cw
    inside = (area >= augment.area[0] * h * w) & (area <= augment.area[1] * h * w)
    return ch, cw, inside & (ch <= h) & (cw <= w) & (ch > 0) & (cw > 0)


def _largest_center_crop(h: Tensor, w: Tensor, augment: Augment) -> tuple[Tensor, Tensor]:
    """torchvision's fallback: the largest center crop within the aspect limits."""
    low, high = augment.aspect
    aspect = w / h
    ch = torch.where(aspect > high, h, torch.where(aspect < low, (w / low).round(), h))
    cw = torch.where(aspect > high, (h * high).round(), w)
    return ch.clamp(min=1), cw.clamp(min=1)


def crop_and_resize(data: bytes | np.ndarray, box: Tensor, out: tuple[int, int], extent: tuple[int, int]) -> Tensor:
    """Crop a box of one image and resize it with antialiasing: uint8 [3, *out].

    Boxes are in pixels of `extent`, the (height, width) of the original; `data` may be pixels of a smaller copy.
    """
    top, left, ch, cw = box.tolist()
    target = (math.ceil(extent[0] * out[0] / max(ch, 1)), math.ceil(extent[1] * out[1] / max(cw, 1)))
    needs_padding = min(top, left) <= -1 or top + ch >= extent[0] + 1 or left + cw >= extent[1] + 1
    pixels = decode(data, None if needs_padding else target)  # padding counts pixels at full scale
    ky = kx = divisor(pixels, extent)
    if isinstance(data, np.ndarray):
        ky, kx = extent[0] / pixels.shape[0], extent[1] / pixels.shape[1]
    return resized_box(pixels, (top / ky, left / kx, (top + ch) / ky, (left + cw) / kx), out)


def divisor(pixels: np.ndarray, extent: tuple[int, int]) -> int:
    """The factor by which the decoder reduced the image: 1, 2, 4 or 8."""
    return round(max(extent[0] / pixels.shape[0], extent[1] / pixels.shape[1]))


def resized_box(
    pixels: np.ndarray, box: tuple[float, ...], out: tuple[int, int], interpolation: str = "bilinear"
) -> Tensor:
    """Resize a box (top, left, bottom, right) to uint8 [3, *out]: torch for integer boxes, Pillow for others."""
    top, left, bottom, right = box
    if all(side == int(side) for side in box):
        y0, x0, y1, x1 = (int(side) for side in box)
        return resize_image(_window(pixels, y0, x0, max(y1, y0 + 1), max(x1, x0 + 1)), out, interpolation)
    inside = (max(left, 0), max(top, 0), min(right, pixels.shape[1]), min(bottom, pixels.shape[0]))
    return _resize_with_pillow(pixels, out, interpolation, inside)


def _window(pixels: np.ndarray, y0: int, x0: int, y1: int, x1: int) -> np.ndarray:
    """Rows y0 to y1 and columns x0 to x1, with zeros outside the image (crop 'pad')."""
    height, width, _ = pixels.shape
    top, left, bottom, right = max(-y0, 0), max(-x0, 0), max(y1 - height, 0), max(x1 - width, 0)
    if top or left or bottom or right:
        pixels = np.pad(pixels, ((top, bottom), (left, right), (0, 0)))
    return pixels[y0 + top : y1 + top, x0 + left : x1 + left]


def resize_image(
    pixels: np.ndarray, out: tuple[int, int], interpolation: str = "bilinear", antialias: bool = True
) -> Tensor:
    """Resize pixels [h, w, 3] to uint8 [3, *out] with torch's uint8 kernels."""
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).unsqueeze(0)
    if tuple(image.shape[-2:]) == out:
        return image[0].contiguous()
    if interpolation not in ("bilinear", "bicubic"):
        return _resize_with_pillow(pixels, out, interpolation)
    smooth = antialias and (image.shape[-2] > out[0] or image.shape[-1] > out[1] or interpolation == "bicubic")
    return F.interpolate(image, out, mode=interpolation, antialias=smooth)[0].contiguous()


def _resize_with_pillow(
    pixels: np.ndarray, out: tuple[int, int], interpolation: str, box: tuple[float, float, float, float] | None = None
) -> Tensor:
    image = Image.fromarray(pixels).resize((out[1], out[0]), Image.Resampling[interpolation.upper()], box)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def preprocess_image(data: bytes | np.ndarray, preprocess: Preprocess, out: tuple[int, int]) -> Tensor:
    """Resize and crop an image for the model: uint8 [3, *out]. Evaluation, prediction and serving use it.

    `Preprocess` (model_config.py) decides how; it comes with the weights, from the config or from the caller.
    """
    extent = get_image_size(data)
    target = out
    if preprocess.resize != "squash":
        target = (math.floor(out[0] / preprocess.crop + 1e-6), math.floor(out[1] / preprocess.crop + 1e-6))
    if preprocess.resize == "crop":  # keeps the aspect ratio: the short side reaches the target
        scale = max(target[0] / extent[0], target[1] / extent[1])
        target = (max(int(extent[0] * scale + 1e-6), out[0]), max(int(extent[1] * scale + 1e-6), out[1]))
    # Decoding a JPEG at a smaller scale averages pixels: only with antialiasing
    smooth = preprocess.antialias and preprocess.interpolation != "nearest"
    pixels = decode(data, target if smooth else None)
    k = divisor(pixels, extent)
    if target[0] * target[1] > PIXEL_LIMIT:  # a 1 x 30000 image would need gigabytes: enlarge only the center
        y, x = (extent[axis] * out[axis] / target[axis] / k for axis in (0, 1))
        top, left = ((extent[0] / k - y) / 2, (extent[1] / k - x) / 2)
        return _resize_with_pillow(pixels, out, preprocess.interpolation, (left, top, left + x, top + y))
    if k > 1:
        image = resized_box(pixels, (0, 0, extent[0] / k, extent[1] / k), target, preprocess.interpolation)
    else:
        image = resize_image(pixels, target, preprocess.interpolation, preprocess.antialias)
    top, left = round((target[0] - out[0]) / 2), round((target[1] - out[1]) / 2)
    return image[:, top : top + out[0], left : left + out[1]].contiguous()


def augment_batch(images: Tensor, u: Tensor, augment: Augment) -> Tensor:
    """Flip, color and erase a batch on its device, each sample by its own uniforms. Color makes floats of uint8."""
    flip, colors, holes = u[:, 4 * TRIES], u[:, 4 * TRIES + 1 : 4 * TRIES + 4], u[:, 4 * TRIES + 4 : NUM_UNIFORMS]
    if augment.flip:
        images = torch.where((flip < augment.flip).view(-1, 1, 1, 1), images.flip(-1), images)
    if augment.color:
        images = _jitter_color(as_floats(images), 1 + (2 * colors - 1) * augment.color)
    if augment.erase:
        images = _erase(images, holes, augment.erase)
    return images


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy without synchronizing, which needs pinned memory."""
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)


def as_floats(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype is torch.uint8 else images


def _jitter_color(images: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast, saturation, in this order (torchvision shuffles it)."""
    brightness, contrast, saturation = (factors[:, i].view(-1, 1, 1, 1) for i in range(3))
    images = (images * brightness).clamp(0, 1)
    gray = _to_gray(images)
    images = torch.lerp(gray.mean((2, 3), keepdim=True).expand_as(images), images, contrast).clamp(0, 1)
    return torch.lerp(_to_gray(images).expand_as(images), images, saturation).clamp(0, 1)


def _to_gray(images: Tensor) -> Tensor:
    r, g, b = images.split(1, 1)
    return r * 0.299 + g * 0.587 + b * 0.114  # [B, 1, H, W]


def _erase(images: Tensor, u: Tensor, probability: float) -> Tensor:
    """Random erasing: a gray rectangle of 2-33 % of the area, aspect 0.3-3.3, with the given probability."""
    _, _, height, width = images.shape
    area = (0.02 + u[:, 1] * (1 / 3 - 0.02)) * height * width
    aspect = torch.exp((2 * u[:, 4] - 1) * math.log(1 / 0.3))
    eh, ew = (area * aspect).sqrt().clamp(max=height), (area / aspect).sqrt().clamp(max=width)
    eh, ew = eh.round().clamp(min=1), ew.round().clamp(min=1)
    top, left = (u[:, 2] * (height - eh + 1)).floor(), (u[:, 3] * (width - ew + 1)).floor()
    rows, columns = torch.arange(height, device=u.device), torch.arange(width, device=u.device)
    inside_rows = (rows >= top.unsqueeze(1)) & (rows < (top + eh).unsqueeze(1))  # [B, H]
    inside_columns = (columns >= left.unsqueeze(1)) & (columns < (left + ew).unsqueeze(1))  # [B, W]
    hole = inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1) & (u[:, 0] < probability).view(-1, 1, 1)
    return torch.where(hole.unsqueeze(1), 128 if images.dtype is torch.uint8 else 0.5, images)
