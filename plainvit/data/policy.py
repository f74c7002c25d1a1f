"""RandAugment (Cubuk et al. 2019) and DeiT III's 3-Augment, for whole batches on the batch's device.

    policy = Policy(Augment(randaugment=(2, 10)), size=(64, 64), device="cuda")
    images = policy(images, u)                  # u: uniforms [B, policy.draws] on the host

Operations, magnitudes, fill, interpolation and uint8 arithmetic are those of torchvision's v2.RandAugment.

The host draws the operation of each sample and sorts the samples by it, so that each operation works on a slice with
known bounds: no synchronization with the device, and one operation per sample instead of fourteen. Five operations move
pixels (one gather by an index map), six change grey levels (one gather by a table of 256), two blend two images.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import Augment

FILL = 128  # grey level of pixels that a moved image leaves empty
BINS = 31  # number of magnitudes
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
FIXED = ("Brightness", "Posterize", "Solarize")  # grey-level tables that are the same for every image
OWN = ("Contrast", "AutoContrast", "Equalize")  # grey-level tables computed from the image
BLENDS = ("Color", "Sharpness")
OPERATIONS = (*MOVES, *FIXED, *OWN, *BLENDS, "Identity")
BLUR = 9  # side of the kernel in pixels
SIGMAS = (0.1, 2.0)
Parts = dict[str, tuple[int, int, int]]  # operation -> (start, start of the negative ones, stop) of its samples


def magnitudes(magnitude: int, size: tuple[int, int]) -> dict[str, float]:
    """torchvision's magnitudes for images of (height, width), without signs; three operations have none."""

    def at(first: float, last: float) -> float:
        return float(torch.linspace(first, last, BINS)[magnitude])

    bits = int((8 - torch.arange(BINS) / ((BINS - 1) / 4)).round()[magnitude])
    moves = {
        "ShearX": at(0, 0.3),
        "ShearY": at(0, 0.3),
        "TranslateX": at(0, 150 / 331 * size[1]),
        "TranslateY": at(0, 150 / 331 * size[0]),
        "Rotate": at(0, 30),
    }
    blends = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), at(0, 0.9))
    return moves | blends | {"Posterize": bits, "Solarize": at(1, 0)}


class Policy:
    """RandAugment, 3-Augment or both, for batches of one size on one device."""

    def __init__(self, augment: Augment, size: tuple[int, int], device: str | torch.device) -> None:
        self.operations, magnitude = augment.randaugment
        self.three = augment.three_augment
        self.draws = 2 + 2 * self.operations  # two for 3-Augment, then an operation and a sign for each
        if self.three and min(size) <= BLUR // 2:
            raise ValueError(
                f"--augment.three-augment needs images of at least {BLUR // 2 + 1} pixels a side, got {size}"
            )
        if self.operations:
            self.magnitudes = magnitudes(magnitude, size)
            self.maps = _make_maps(self.magnitudes, size).to(device)
            self.tables = _make_tables(self.magnitudes).to(device)

    def __call__(self, images: Tensor, u: Tensor) -> Tensor:
        """Augment uint8 images, or floats in [0, 1], which are rounded to uint8; u [B, draws] is on the host."""
        images = as_bytes(images)
        if self.operations:
            images = self._rand_augment(images, u[:, 2:])
        return three_augment(images, u[:, :2]) if self.three else images

    def _rand_augment(self, images: Tensor, u: Tensor) -> Tensor:
        plan, parts = _sort_by_operation(u, self.operations)
        orders, variants, back = (to_device(x, images.device) for x in plan)
        for order, variant, part in zip(orders, variants, parts, strict=True):
            images = images[order]  # a copy, changed in place below
            self._apply_operations(images, variant, part)
        return images[back]

    def _apply_operations(self, images: Tensor, variant: Tensor, parts: Parts) -> None:
        """Apply one operation to each image in place; images are sorted by their variants."""
        moved, tabled = _find_slice(parts, MOVES), _find_slice(parts, (*FIXED, *OWN))
        if len(images[moved]):
            images[moved] = self._move_pixels(images[moved], variant[moved])
        if len(images[tabled]):
            images[tabled] = self._apply_tables(images, variant, parts, tabled)
        for name, blend in (("Color", _saturate), ("Sharpness", _sharpen)):
            for where, sign in _signed_slices(parts, name):
                images[where] = blend(images[where], 1 + sign * self.magnitudes[name])

    def _move_pixels(self, images: Tensor, row: Tensor) -> Tensor:
        pixels = F.pad(images.flatten(2), (0, 1), value=FILL)  # [n, 3, HW + 1]
        maps = self.maps[row].unsqueeze(1).expand(-1, 3, -1)  # [n, 3, HW]
        return pixels.gather(2, maps).view_as(images)

    def _apply_tables(self, images: Tensor, variant: Tensor, parts: Parts, tabled: slice) -> Tensor:
        levels = images[tabled].flatten(2).long()  # [n, 3, HW]
        fixed, equal = _find_slice(parts, FIXED), _find_slice(parts, ("Equalize",))
        tables = [self.tables[variant[fixed] - 2 * len(MOVES)].unsqueeze(1).expand(-1, 3, -1)]  # each [n, 3, 256]
        for where, sign in _signed_slices(parts, "Contrast"):
            tables.append(_contrast_tables(images[where], 1 + sign * self.magnitudes["Contrast"]))
        tables.append(_auto_contrast_tables(images[_find_slice(parts, ("AutoContrast",))]))
        tables.append(_equalize_tables(images[equal], levels[equal.start - tabled.start :]))
        return torch.cat(tables).gather(2, levels).view_as(images[tabled])


def _sort_by_operation(u: Tensor, operations: int) -> tuple[tuple[Tensor, Tensor, Tensor], list[Parts]]:
    """(order before each pass, variant of each image, order back), and the slices of each operation in each pass."""
    draws = u.double().numpy()
    samples = np.arange(len(draws))  # the sample at each position
    orders, variants, parts = np.empty((operations, len(draws)), np.int64), [], []
    for number in range(operations):
        operation = (draws[:, 2 * number] * len(OPERATIONS)).astype(np.int64)
        variant = (2 * operation + (draws[:, 2 * number + 1] < 0.5))[samples]  # odd: negative sign
        orders[number] = np.argsort(variant, kind="stable")
        samples = samples[orders[number]]
        variants.append(variant[orders[number]])
        ends = [0, *np.cumsum(np.bincount(variant, minlength=2 * len(OPERATIONS))).tolist()]
        parts.append({name: (ends[2 * i], ends[2 * i + 1], ends[2 * i + 2]) for i, name in enumerate(OPERATIONS)})
    back = np.argsort(samples)
    return (torch.from_numpy(orders), torch.from_numpy(np.stack(variants)), torch.from_numpy(back)), parts


def _find_slice(parts: Parts, names: tuple[str, ...]) -> slice:
    return slice(parts[names[0]][0], parts[names[-1]][2])


def _signed_slices(parts: Parts, name: str) -> list[tuple[slice, int]]:
    """The slices of an operation's images with their signs, empty slices left out."""
    start, middle, stop = parts[name]
    return [(slice(a, b), sign) for a, b, sign in ((start, middle, 1), (middle, stop, -1)) if a < b]


def _make_maps(magnitudes: dict[str, float], size: tuple[int, int]) -> Tensor:
    """[2 * MOVES, HW]: for each output pixel the index of its input pixel, HW for none.

    torchvision moves an image of indices, on the CPU, so that ties are rounded alike on every device.
    """
    from torchvision.transforms.v2 import functional as V

    count = size[0] * size[1]
    assert count <= 2**24, "torchvision computes pixel positions in fp32, which is exact only up to 2**24"
    numbers = torch.arange(count, dtype=torch.float32).view(1, *size)
    maps: list[Tensor] = []
    for name in MOVES:
        for value in (magnitudes[name], -magnitudes[name]):
            if name == "Rotate":
                moved = V.rotate(numbers, value, fill=[float(count)])
            elif name.startswith("Shear"):
                angle = math.degrees(math.atan(value))
                shear = [angle, 0.0] if name == "ShearX" else [0.0, angle]
                moved = V.affine(numbers, 0.0, [0.0, 0.0], 1.0, shear, fill=[float(count)], center=[0.0, 0.0])
            else:
                pixels = float(int(value))
                shift = [pixels, 0.0] if name == "TranslateX" else [0.0, pixels]
                moved = V.affine(numbers, 0.0, shift, 1.0, [0.0, 0.0], fill=[float(count)])
            maps.append(moved.flatten().long())
    return torch.stack(maps)


def _make_tables(magnitudes: dict[str, float]) -> Tensor:
    """[2 * FIXED, 256] grey levels by variant; only brightness has a sign."""
    levels = torch.arange(256, dtype=torch.uint8)
    bright = [levels.mul(1 + sign * magnitudes["Brightness"]).clamp(0, 255).to(torch.uint8) for sign in (1, -1)]
    posterised = levels & (256 - (1 << (8 - int(magnitudes["Posterize"]))))
    solarised = torch.where(levels >= 255 * magnitudes["Solarize"], 255 - levels, levels)
    return torch.stack([*bright, posterised, posterised, solarised, solarised])


def _add_scaled(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    """x + alpha * other in fp32 with one rounding, as torch's vectorized code computes it for torchvision.

    Its scalar code rounds twice, which may change a grey level. In fp64 the product is exact, so the result does not
    depend on the batch or the device.
    """
    return x.double().add_(other, alpha=float(np.float32(alpha))).float()


def _to_grey(images: Tensor) -> Tensor:
    """Integer grey levels [n, 1, H, W] as floats, with torchvision's weights."""
    r, g, b = images.split(1, 1)
    return _add_scaled(_add_scaled(r.mul(0.2989), g, 0.587), b, 0.114).floor_()


def _blend(images: Tensor, other: Tensor, ratio: float) -> Tensor:
    return _add_scaled(images.mul(ratio), other, 1 - ratio).clamp_(0, 255).to(torch.uint8)


def _saturate(images: Tensor, ratio: float) -> Tensor:
    return _blend(images, _to_grey(images), ratio)


def _sharpen(images: Tensor, ratio: float) -> Tensor:
    """Blend with a blur of 1/13 of each neighbor and 5/13 of the pixel; the border stays."""
    if min(images.shape[2:]) <= 2:
        return images
    result = images.float()
    inner = result[:, :, 1:-1, 1:-1]
    # Integer sums are exact and thirteenths never tie: the same on every device, unlike a convolution
    blurred = F.avg_pool2d(result, 3, 1, divisor_override=1).add_(inner, alpha=4).div_(13).round_()
    inner.copy_(_add_scaled(inner, blurred.sub_(inner), 1 - ratio))
    return result.clamp_(0, 255).to(torch.uint8)


def _contrast_tables(images: Tensor, ratio: float) -> Tensor:
    """Tables [n, 3, 256] that blend with the mean grey."""
    grey = _to_grey(images)
    mean = grey.sum((1, 2, 3), dtype=torch.float64).float() / grey[0].numel()  # integers: exact in any order
    levels = torch.arange(256, dtype=torch.uint8, device=images.device).expand(len(images), 1, -1)
    return _blend(levels, mean.view(-1, 1, 1), ratio).expand(-1, 3, -1)


def _auto_contrast_tables(images: Tensor) -> Tensor:
    """Tables [n, 3, 256] that stretch each channel to the full range, unless it has only one level."""
    low, high = (x.float().unsqueeze(2) for x in (images.amin((2, 3)), images.amax((2, 3))))  # [n, 3, 1]
    flat = low == high
    scale = torch.where(flat, 1.0, (high - low) * (1 / 255))
    levels = torch.arange(256, dtype=torch.float32, device=images.device)
    return ((levels - torch.where(flat, 0.0, low)) / scale).clamp_(0, 255).to(torch.uint8)


def _equalize_tables(images: Tensor, levels: Tensor) -> Tensor:
    """Tables [n, 3, 256] that equalize each channel's histogram by Pillow's rule; `levels` are the flat images."""
    histogram = levels.new_zeros((*levels.shape[:2], 256))
    histogram.scatter_add_(2, levels, levels.new_ones(1).expand_as(levels))
    top = images.amax((2, 3)).long().unsqueeze(2)
    step = (levels.shape[2] - histogram.gather(2, top)) // 255  # [n, 3, 1]
    darker = F.pad(histogram.cumsum(2)[..., :-1], (1, 0))  # number of darker pixels
    table = ((darker + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    return torch.where(step == 0, torch.arange(256, device=levels.device), table).to(torch.uint8)


def three_augment(images: Tensor, u: Tensor) -> Tensor:
    """Make each image grey, solarized or blurred; u [B, 2] (which one, how much) is on the host."""
    kind = (u[:, 0].double() * 3).long()
    order = kind.argsort(stable=True)
    where, back, kernels = (
        to_device(x, images.device) for x in (order, order.argsort(), _make_gaussian_kernels(u[order, 1]))
    )
    grey, solar, sharp = images[where].split(kind.bincount(minlength=3).tolist())
    grey = _to_grey(grey).to(torch.uint8).expand_as(grey)
    solar = torch.where(solar >= 128, 255 - solar, solar)
    return torch.cat((grey, solar, _blur(sharp, kernels[len(grey) + len(solar) :])))[back]


def _make_gaussian_kernels(u: Tensor) -> Tensor:
    """[n, BLUR] Gaussian weights, sigma uniform within SIGMAS."""
    sigma = SIGMAS[0] + u.unsqueeze(1) * (SIGMAS[1] - SIGMAS[0])
    place = torch.arange(BLUR) - BLUR // 2
    return torch.softmax(-(place / sigma).square() / 2, 1)


def _blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Separable blur with reflected border, added tap by tap because a convolution may be rounded to TF32."""
    half = BLUR // 2
    weights = kernels.view(-1, BLUR, 1, 1, 1).unbind(1)
    result = images.float()
    for axis, border in ((2, (0, 0, half, half)), (3, (half, half, 0, 0))):
        wide, length = F.pad(result, border, mode="reflect"), images.shape[axis]
        result = wide.narrow(axis, 0, length) * weights[0]
        for tap in range(1, BLUR):
            result.addcmul_(wide.narrow(axis, tap, length), weights[tap])
    return result.round_().to(torch.uint8)


def as_bytes(images: Tensor) -> Tensor:
    return images if images.dtype is torch.uint8 else (images * 255).round_().to(torch.uint8)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy without synchronizing, which needs pinned memory."""
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)
