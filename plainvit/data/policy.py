"""RandAugment (Cubuk et al. 2019) and DeiT III's 3-Augment, a whole batch at a time, on the batch's device.

    policy = Policy(Augment(randaugment=(2, 10)), size=(64, 64), device="cuda")
    images = policy(images, u)                  # u: uniforms on the host, policy.draws of each sample

Operations, magnitudes, fill and interpolation are those of torchvision's v2.RandAugment, and its arithmetic: on uint8,
where posterising, solarising and equalising are defined, and which a streamed and a resident batch both come down to.

What each sample draws is decided on the host. There the samples are sorted by what they drew, so that each operation
works on a slice of the batch whose bounds are known: nothing waits for the device, and the cost is that of one
operation a sample, not of fourteen. Five operations move pixels: one gather by a map. Six change grey levels: one
gather by a table of 256. Two blend with something.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import Augment

FILL = 128  # where a moved image leaves nothing behind
BINS = 31  # of magnitudes
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
FIXED = ("Brightness", "Posterize", "Solarize")  # tables of grey levels that are the same for every image
OWN = ("Contrast", "AutoContrast", "Equalize")  # tables that follow from the image
BLENDS = ("Color", "Sharpness")
OPERATIONS = (*MOVES, *FIXED, *OWN, *BLENDS, "Identity")
BLUR = 9  # pixels of the kernel's side
SIGMAS = (0.1, 2.0)
Parts = dict[str, tuple[int, int, int]]  # operation -> where its samples begin, where its negative ones do, their end


def magnitudes(magnitude: int, size: tuple[int, int]) -> dict[str, float]:
    """torchvision's table for images of (height, width), without signs. Three operations know no more or less."""

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
        self.draws = 2 + 2 * self.operations  # two for 3-Augment; then an operation and a sign each
        if self.three and min(size) <= BLUR // 2:
            raise ValueError(f"three_augment blurs over {BLUR // 2} pixels around each: images of {size} are too small")
        if self.operations:
            self.magnitudes = magnitudes(magnitude, size)
            self.maps = _maps(self.magnitudes, size).to(device)
            self.tables = _tables(self.magnitudes).to(device)

    def __call__(self, images: Tensor, u: Tensor) -> Tensor:
        """uint8 images of uint8 ones, or of floats in [0, 1], which are rounded; u [B, draws] lies on the host."""
        images = as_bytes(images)
        if self.operations:
            images = self._rand_augment(images, u[:, 2:])
        return three_augment(images, u[:, :2]) if self.three else images

    def _rand_augment(self, images: Tensor, u: Tensor) -> Tensor:
        plan, parts = _plan(u, self.operations)
        orders, variants, back = (to_device(x, images.device) for x in plan)
        for order, variant, part in zip(orders, variants, parts, strict=True):
            images = images[order]  # a copy, which the operations may change
            self._operate(images, variant, part)
        return images[back]

    def _operate(self, images: Tensor, variant: Tensor, parts: Parts) -> None:
        """One operation for each image, in place: they are sorted by their variants."""
        moved, tabled = _span(parts, MOVES), _span(parts, (*FIXED, *OWN))
        if len(images[moved]):
            images[moved] = self._moved(images[moved], variant[moved])
        if len(images[tabled]):
            images[tabled] = self._tabled(images, variant, parts, tabled)
        for name, blend in (("Color", _saturated), ("Sharpness", _sharpened)):
            for where, sign in _signs(parts, name):
                images[where] = blend(images[where], 1 + sign * self.magnitudes[name])

    def _moved(self, images: Tensor, row: Tensor) -> Tensor:
        pixels = F.pad(images.flatten(2), (0, 1), value=FILL)  # [n, 3, HW + 1]
        maps = self.maps[row].unsqueeze(1).expand(-1, 3, -1)  # [n, 3, HW]
        return pixels.gather(2, maps).view_as(images)

    def _tabled(self, images: Tensor, variant: Tensor, parts: Parts, tabled: slice) -> Tensor:
        levels = images[tabled].flatten(2).long()  # [n, 3, HW]
        fixed, equal = _span(parts, FIXED), _span(parts, ("Equalize",))
        tables = [self.tables[variant[fixed] - 2 * len(MOVES)].unsqueeze(1).expand(-1, 3, -1)]  # each [n, 3, 256]
        for where, sign in _signs(parts, "Contrast"):
            tables.append(_contrast(images[where], 1 + sign * self.magnitudes["Contrast"]))
        tables.append(_auto_contrast(images[_span(parts, ("AutoContrast",))]))
        tables.append(_equalising(images[equal], levels[equal.start - tabled.start :]))
        return torch.cat(tables).gather(2, levels).view_as(images[tabled])


def _plan(u: Tensor, operations: int) -> tuple[tuple[Tensor, Tensor, Tensor], list[Parts]]:
    """How to sort the batch before each pass, what each image then gets, how to sort it back; and each pass's parts."""
    draws = u.double().numpy()
    held = np.arange(len(draws))  # which sample stands where
    orders, variants, parts = np.empty((operations, len(draws)), np.int64), [], []
    for number in range(operations):
        operation = (draws[:, 2 * number] * len(OPERATIONS)).astype(np.int64)
        variant = (2 * operation + (draws[:, 2 * number + 1] < 0.5))[held]  # odd: the negative one
        orders[number] = np.argsort(variant, kind="stable")
        held = held[orders[number]]
        variants.append(variant[orders[number]])
        ends = [0, *np.cumsum(np.bincount(variant, minlength=2 * len(OPERATIONS))).tolist()]
        parts.append({name: (ends[2 * i], ends[2 * i + 1], ends[2 * i + 2]) for i, name in enumerate(OPERATIONS)})
    back = np.argsort(held)
    return (torch.from_numpy(orders), torch.from_numpy(np.stack(variants)), torch.from_numpy(back)), parts


def _span(parts: Parts, names: tuple[str, ...]) -> slice:
    return slice(parts[names[0]][0], parts[names[-1]][2])


def _signs(parts: Parts, name: str) -> list[tuple[slice, int]]:
    """The images of an operation with the sign that they drew; none for a sign that nobody drew."""
    start, middle, stop = parts[name]
    return [(slice(a, b), sign) for a, b, sign in ((start, middle, 1), (middle, stop, -1)) if a < b]


def _maps(magnitudes: dict[str, float], size: tuple[int, int]) -> Tensor:
    """[2 * MOVES, HW]: for each pixel the one that comes to its place, HW where none does.

    torchvision moves an image of numbers, here on the CPU, so that maps are its own to the last tie on every device.
    """
    from torchvision.transforms.v2 import functional as V

    count = size[0] * size[1]
    assert count <= 2**24, "fp32, in which torchvision computes where pixels go, has no more whole numbers"
    numbers = torch.arange(count, dtype=torch.float32).view(1, *size)
    found: list[Tensor] = []
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
            found.append(moved.flatten().long())
    return torch.stack(found)


def _tables(magnitudes: dict[str, float]) -> Tensor:
    """[2 * FIXED, 256] grey levels, by variant; only brightness has a sign."""
    levels = torch.arange(256, dtype=torch.uint8)
    bright = [levels.mul(1 + sign * magnitudes["Brightness"]).clamp(0, 255).to(torch.uint8) for sign in (1, -1)]
    posterised = levels & (256 - (1 << (8 - int(magnitudes["Posterize"]))))
    solarised = torch.where(levels >= 255 * magnitudes["Solarize"], 255 - levels, levels)
    return torch.stack([*bright, posterised, posterised, solarised, solarised])


def _fused(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    """x + alpha * other in floats with one rounding, as torch's vector code does it for torchvision.

    Its scalar code, for the last pixels of a row or of a thread's part, rounds twice, and a level may hang on that.
    In fp64 the product is exact, so that it is rounded alike everywhere, whatever the batch and on every device.
    """
    return x.double().add_(other, alpha=float(np.float32(alpha))).float()


def _grey(images: Tensor) -> Tensor:
    """Whole levels [n, 1, H, W] in floats, with torchvision's weights."""
    r, g, b = images.split(1, 1)
    return _fused(_fused(r.mul(0.2989), g, 0.587), b, 0.114).floor_()


def _blended(images: Tensor, other: Tensor, ratio: float) -> Tensor:
    return _fused(images.mul(ratio), other, 1 - ratio).clamp_(0, 255).to(torch.uint8)


def _saturated(images: Tensor, ratio: float) -> Tensor:
    return _blended(images, _grey(images), ratio)


def _sharpened(images: Tensor, ratio: float) -> Tensor:
    """Away from or towards a blur by 1/13 of the neighbours and 5/13 of the pixel; the border stays."""
    if min(images.shape[2:]) <= 2:
        return images
    found = images.float()
    inner = found[:, :, 1:-1, 1:-1]
    # A sum of whole numbers is exact, and a thirteenth never a tie: the same on every device, unlike a convolution
    blurred = F.avg_pool2d(found, 3, 1, divisor_override=1).add_(inner, alpha=4).div_(13).round_()
    inner.copy_(_fused(inner, blurred.sub_(inner), 1 - ratio))
    return found.clamp_(0, 255).to(torch.uint8)


def _contrast(images: Tensor, ratio: float) -> Tensor:
    """Tables [n, 3, 256] that blend with the mean grey."""
    grey = _grey(images)
    mean = grey.sum((1, 2, 3), dtype=torch.float64).float() / grey[0].numel()  # whole numbers: exact in any order
    levels = torch.arange(256, dtype=torch.uint8, device=images.device).expand(len(images), 1, -1)
    return _blended(levels, mean.view(-1, 1, 1), ratio).expand(-1, 3, -1)


def _auto_contrast(images: Tensor) -> Tensor:
    """Tables [n, 3, 256] that stretch each channel to all levels, unless it has only one."""
    low, high = (x.float().unsqueeze(2) for x in (images.amin((2, 3)), images.amax((2, 3))))  # [n, 3, 1]
    flat = low == high
    scale = torch.where(flat, 1.0, (high - low) * (1 / 255))
    levels = torch.arange(256, dtype=torch.float32, device=images.device)
    return ((levels - torch.where(flat, 0.0, low)) / scale).clamp_(0, 255).to(torch.uint8)


def _equalising(images: Tensor, levels: Tensor) -> Tensor:
    """Tables [n, 3, 256] that even out each channel's histogram, by Pillow's rule; `levels` are the images', flat."""
    histogram = levels.new_zeros((*levels.shape[:2], 256))
    histogram.scatter_add_(2, levels, levels.new_ones(1).expand_as(levels))
    top = images.amax((2, 3)).long().unsqueeze(2)
    step = (levels.shape[2] - histogram.gather(2, top)) // 255  # [n, 3, 1]
    before = F.pad(histogram.cumsum(2)[..., :-1], (1, 0))  # pixels that are darker
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    return torch.where(step == 0, torch.arange(256, device=levels.device), table).to(torch.uint8)


def three_augment(images: Tensor, u: Tensor) -> Tensor:
    """Each image grey, solarised or blurred; u [B, 2], which and how much, lies on the host."""
    kind = (u[:, 0].double() * 3).long()
    order = kind.argsort(stable=True)
    where, back, kernels = (to_device(x, images.device) for x in (order, order.argsort(), _kernels(u[order, 1])))
    grey, solar, sharp = images[where].split(kind.bincount(minlength=3).tolist())
    grey = _grey(grey).to(torch.uint8).expand_as(grey)
    solar = torch.where(solar >= 128, 255 - solar, solar)
    return torch.cat((grey, solar, _blurred(sharp, kernels[len(grey) + len(solar) :])))[back]


def _kernels(u: Tensor) -> Tensor:
    """[n, BLUR] Gaussian weights, sigma uniform between the bounds."""
    sigma = SIGMAS[0] + u.unsqueeze(1) * (SIGMAS[1] - SIGMAS[0])
    place = torch.arange(BLUR) - BLUR // 2
    return torch.softmax(-(place / sigma).square() / 2, 1)


def _blurred(images: Tensor, kernels: Tensor) -> Tensor:
    """Down, then across; the border is mirrored. Added up tap by tap: a convolution may be rounded to TF32."""
    half = BLUR // 2
    weights = kernels.view(-1, BLUR, 1, 1, 1).unbind(1)
    found = images.float()
    for axis, border in ((2, (0, 0, half, half)), (3, (half, half, 0, 0))):
        wide, length = F.pad(found, border, mode="reflect"), images.shape[axis]
        found = wide.narrow(axis, 0, length) * weights[0]
        for tap in range(1, BLUR):
            found.addcmul_(wide.narrow(axis, tap, length), weights[tap])
    return found.round_().to(torch.uint8)


def as_bytes(images: Tensor) -> Tensor:
    return images if images.dtype is torch.uint8 else (images * 255).round_().to(torch.uint8)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device still does: that takes memory it can read by itself."""
    pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)
