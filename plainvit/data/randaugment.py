"""RandAugment (Cubuk et al. 2019) and DeiT III's 3-Augment, for whole batches on the batch's device.

    randaugment = RandAugment(Augment(randaugment=(2, 10)), size=(64, 64), device="cuda")
    images = randaugment(images, u)                  # u: uniforms [B, randaugment.draws] on the host

Operations, magnitudes, fill, interpolation and uint8 arithmetic are those of torchvision's v2.RandAugment.

The host draws the operation of each sample and sorts the samples by it, so that each operation works on a slice with
known bounds: no synchronization with the device, and one operation per sample instead of fourteen. torchvision's own
functions are used where their result does not depend on the batch or the device. Five operations move pixels (one
gather by an index map), and three blend two images.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as V

from plainvit.config import Augment
from plainvit.data.transforms import to_device

FILL = 128  # gray level of pixels that a moved image leaves empty
MAGNITUDE_BINS = 31  # number of magnitudes
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
LEVELS = ("Brightness", "Posterize", "Solarize", "Contrast", "AutoContrast", "Equalize")
OPERATIONS = (*MOVES, *LEVELS, "Color", "Sharpness", "Identity")
BLUR = 9  # side of the kernel in pixels
SIGMAS = (0.1, 2.0)
Slices = dict[str, tuple[int, int, int]]  # operation -> (start, start of the negative ones, stop) of its samples


def magnitudes(magnitude: int, size: tuple[int, int]) -> dict[str, float]:
    """torchvision's magnitudes for images of (height, width), without signs; three operations have none."""

    def pick(first: float, last: float) -> float:
        return float(torch.linspace(first, last, MAGNITUDE_BINS)[magnitude])

    bits = int((8 - torch.arange(MAGNITUDE_BINS) / ((MAGNITUDE_BINS - 1) / 4)).round()[magnitude])
    moves = {
        "ShearX": pick(0, 0.3),
        "ShearY": pick(0, 0.3),
        "TranslateX": pick(0, 150 / 331 * size[1]),
        "TranslateY": pick(0, 150 / 331 * size[0]),
        "Rotate": pick(0, 30),
    }
    blends = dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), pick(0, 0.9))
    return moves | blends | {"Posterize": bits, "Solarize": pick(1, 0)}


class RandAugment:
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

    def __call__(self, images: Tensor, u: Tensor) -> Tensor:
        """Augment uint8 images, or floats in [0, 1], which are rounded to uint8; u [B, draws] is on the host."""
        images = as_bytes(images)
        if self.operations:
            images = self._rand_augment(images, u[:, 2:])
        return three_augment(images, u[:, :2]) if self.three else images

    def _rand_augment(self, images: Tensor, u: Tensor) -> Tensor:
        plan, slices = _sort_by_operation(u, self.operations)
        orders, variants, back = (to_device(x, images.device) for x in plan)
        for order, variant, bounds in zip(orders, variants, slices, strict=True):
            images = images[order]  # a copy, changed in place below
            self._apply_operations(images, variant, bounds)
        return images[back]

    def _apply_operations(self, images: Tensor, variant: Tensor, slices: Slices) -> None:
        """Apply one operation to each image in place; images are sorted by their variants."""
        moved = slice(0, slices[MOVES[-1]][2])
        if moved.stop:
            pixels = F.pad(images[moved].flatten(2), (0, 1), value=FILL)  # [n, 3, HW + 1]
            maps = self.maps[variant[moved]].unsqueeze(1).expand(-1, 3, -1)  # [n, 3, HW]
            images[moved] = pixels.gather(2, maps).view_as(images[moved])
        for name in (*LEVELS, "Color", "Sharpness"):
            start, middle, stop = slices[name]
            for first, last, sign in ((start, middle, 1), (middle, stop, -1)):
                if first < last:
                    amount = sign * self.magnitudes.get(name, 0.0)
                    images[first:last] = _apply_operation(name, images[first:last], amount)


def _apply_operation(name: str, images: Tensor, amount: float) -> Tensor:
    """One operation on gray levels; `amount` is negative for half of the images."""
    apply = {
        "Brightness": lambda: V.adjust_brightness(images, 1 + amount),
        "Posterize": lambda: V.posterize(images, int(abs(amount))),
        "Solarize": lambda: V.solarize(images, 255 * abs(amount)),
        "AutoContrast": lambda: V.autocontrast(images),
        "Equalize": lambda: V.equalize(images),
        "Contrast": lambda: _blend(images, _mean_gray(images), 1 + amount),
        "Color": lambda: _blend(images, _to_gray(images), 1 + amount),
        "Sharpness": lambda: _sharpen(images, 1 + amount),
    }
    return apply[name]()


def _sort_by_operation(u: Tensor, operations: int) -> tuple[tuple[Tensor, Tensor, Tensor], list[Slices]]:
    """(order before each pass, variant of each image, order back), and the slices of each operation in each pass."""
    draws = u.double().numpy()
    samples = np.arange(len(draws))  # the sample at each position
    orders, variants, slices = np.empty((operations, len(draws)), np.int64), [], []
    for number in range(operations):
        operation = (draws[:, 2 * number] * len(OPERATIONS)).astype(np.int64)
        variant = (2 * operation + (draws[:, 2 * number + 1] < 0.5))[samples]  # odd: negative sign
        orders[number] = np.argsort(variant, kind="stable")
        samples = samples[orders[number]]
        variants.append(variant[orders[number]])
        ends = [0, *np.cumsum(np.bincount(variant, minlength=2 * len(OPERATIONS))).tolist()]
        slices.append({name: (ends[2 * i], ends[2 * i + 1], ends[2 * i + 2]) for i, name in enumerate(OPERATIONS)})
    back = np.argsort(samples)
    return (torch.from_numpy(orders), torch.from_numpy(np.stack(variants)), torch.from_numpy(back)), slices


def _make_maps(magnitudes: dict[str, float], size: tuple[int, int]) -> Tensor:
    """[2 * MOVES, HW]: for each output pixel the index of its input pixel, HW for none.

    torchvision moves an image of indices, on the CPU, so that ties are rounded alike on every device.
    """
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


def _add_scaled(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    """x + alpha * other in fp32 with one rounding, as torch's vectorized code computes it for torchvision.

    Its scalar code rounds twice, which may change a gray level. In fp64 the product is exact, so the result does not
    depend on the batch or the device.
    """
    return x.double().add_(other, alpha=float(np.float32(alpha))).float()


def _to_gray(images: Tensor) -> Tensor:
    """Integer gray levels [n, 1, H, W] as floats, with torchvision's weights."""
    r, g, b = images.split(1, 1)
    return _add_scaled(_add_scaled(r.mul(0.2989), g, 0.587), b, 0.114).floor_()


def _blend(images: Tensor, other: Tensor, ratio: float) -> Tensor:
    return _add_scaled(images.mul(ratio), other, 1 - ratio).clamp_(0, 255).to(torch.uint8)


def _mean_gray(images: Tensor) -> Tensor:
    gray = _to_gray(images)  # integers: their sum is exact in any order
    return (gray.sum((1, 2, 3), dtype=torch.float64).float() / gray[0].numel()).view(-1, 1, 1, 1)


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


def three_augment(images: Tensor, u: Tensor) -> Tensor:
    """Make each image gray, solarized or blurred; u [B, 2] (which one, how much) is on the host."""
    kind = (u[:, 0].double() * 3).long()
    order = kind.argsort(stable=True)
    where, back, kernels = (
        to_device(x, images.device) for x in (order, order.argsort(), _make_gaussian_kernels(u[order, 1]))
    )
    gray, solar, sharp = images[where].split(kind.bincount(minlength=3).tolist())
    gray = _to_gray(gray).to(torch.uint8).expand_as(gray)
    solar = torch.where(solar >= 128, 255 - solar, solar)
    return torch.cat((gray, solar, _blur(sharp, kernels[len(gray) + len(solar) :])))[back]


def _make_gaussian_kernels(u: Tensor) -> Tensor:
    """[n, BLUR] Gaussian weights, sigma uniform within SIGMAS."""
    sigma = SIGMAS[0] + u.unsqueeze(1) * (SIGMAS[1] - SIGMAS[0])
    offset = torch.arange(BLUR) - BLUR // 2
    return torch.softmax(-(offset / sigma).square() / 2, 1)


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
