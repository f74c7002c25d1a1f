"""Two data sets without a download: `digits`, shipped with the package, and `shapes`, drawn on the fly.

    digits                                     1,797 handwritten digits of 8 x 8 pixels; every fifth is a test image
    digits:01234                               only these classes
    shapes:size=64,count=10000,classes=10      textured shapes on cluttered backgrounds, with known position and mask

digits.npz is the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak; UCI Machine Learning
Repository, 1998, CC BY 4.0), gray levels 0 to 16.
"""

from pathlib import Path

import numpy as np

from plainvit.config import nearest
from plainvit.data.sources import MissingSplitError, Source

# Each split of `shapes` has its own random stream, so that no training set contains test images
STREAMS = {"train": 0, "val": 1, "test": 2}
MAX_HELD_OUT = 10_000  # largest number of val or test images of `shapes`


class ArraySource(Source):
    """Images held in memory."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], numbers: np.ndarray) -> None:
        self.images, self.labels, self.classes, self._numbers = images, labels.astype(np.int32), classes, numbers

    def read(self, index: int) -> np.ndarray:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"{self.spec or 'image'}-{self._numbers[index]}"


def digits(split: str, only: str = "") -> ArraySource:
    """Every fifth image is for testing, the others for training. `only` lists the digits to keep, such as 01234."""
    if not set(only) <= set("0123456789") or len(set(only)) != len(only):
        raise ValueError(f"digits has the classes 0 to 9, each named once: digits:01234; got {only!r}")
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        gray, labels = file["images"], file["labels"]
    numbers = np.arange(len(labels))
    chosen = {"test": numbers[::5], "train": numbers[numbers % 5 != 0]}.get(split)
    if chosen is None:
        raise MissingSplitError(f"digits has no {split} split, only train and test: use --holdout to validate")
    kept = np.array([int(digit) for digit in only or "0123456789"])
    chosen = chosen[np.isin(labels[chosen], kept)]
    new_labels = np.zeros(10, int)
    new_labels[kept] = np.arange(len(kept))
    pixels = (gray[chosen].astype(np.float64) * (255 / 16)).round().astype(np.uint8)
    rgb = np.repeat(pixels[..., None], 3, axis=-1)  # [N, 8, 8, 3]
    return ArraySource(rgb, new_labels[labels[chosen]], tuple(only or "0123456789"), numbers[chosen])


# Signed distances to each shape's edge at unit size; below 0 is inside
SHAPES = {
    "circle": lambda x, y: np.hypot(x, y) - 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) - 0.8,
    "triangle": lambda x, y: np.maximum(np.maximum(0.87 * x + 0.5 * y, -0.87 * x + 0.5 * y), -y) - 0.55,
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.75) - 0.25,
    "cross": lambda x, y: np.minimum(np.maximum(abs(x) - 0.3, abs(y) - 1), np.maximum(abs(y) - 0.3, abs(x) - 1)),
    "star": lambda x, y: np.hypot(x, y) - (0.65 + 0.35 * np.cos(5 * np.arctan2(y, x))),
    "bar": lambda x, y: np.maximum(abs(x) - 1.1, abs(y) - 0.3),
    "half": lambda x, y: np.maximum(np.hypot(x, y) - 1, -y),
    "diamond": lambda x, y: abs(x) + 1.4 * abs(y) - 1.1,
    "flower": lambda x, y: np.hypot(x, y) - (0.75 + 0.25 * np.cos(3 * np.arctan2(y, x))),
}


class Shapes(Source):
    """Drawn images; each is a function of (split, index) alone."""

    def __init__(self, split: str, size: int, count: int, classes: int) -> None:
        self.size, self.stream, self.classes = size, STREAMS[split], tuple(SHAPES)[:classes]
        self.labels = (np.arange(count) % classes).astype(np.int32)

    def name(self, index: int) -> str:
        return f"shapes-{self.size}-{self.stream}-{index}"

    def read(self, index: int) -> np.ndarray:
        return self.draw(index)[0]

    def identify(self, index: int) -> bytes:
        return self.name(index).encode()  # without drawing the image

    def extent(self, index: int) -> tuple[int, int]:  # noqa: ARG002
        return self.size, self.size

    def draw(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[float, float, float]]:
        """(pixels [size, size, 3], mask [size, size], (row, column, radius) in pixels)."""
        random = np.random.Generator(np.random.Philox(key=[self.stream, 0], counter=[0, 0, len(self.classes), index]))
        size, label = self.size, int(self.labels[index])
        radius = size * random.uniform(0.18, 0.32)
        row, column = random.uniform(radius, size - radius, 2)
        pixels = self._draw_background(random)
        mask = self._draw_mask(self.classes[label], row, column, radius, random.uniform(0, 2 * np.pi))
        texture = _draw_texture(random, size)
        return np.where(mask[..., None], texture, pixels).astype(np.uint8), mask, (row, column, radius)

    def _draw_background(self, random: np.random.Generator) -> np.ndarray:
        """Another texture, with small pieces of random shapes that do not depend on the label."""
        pixels = _draw_texture(random, self.size)
        for _ in range(6):
            kind = list(SHAPES)[random.integers(len(SHAPES))]
            row, column = random.uniform(0, self.size, 2)
            piece = self._draw_mask(kind, row, column, self.size * random.uniform(0.04, 0.1), random.uniform(0, 6.28))
            pixels[piece] = random.uniform(0, 255, 3)
        return pixels

    def _draw_mask(self, kind: str, row: float, column: float, radius: float, angle: float) -> np.ndarray:
        steps = np.arange(self.size) + 0.5
        y, x = (steps[:, None] - row) / radius, (steps[None, :] - column) / radius
        cos, sin = np.cos(angle), np.sin(angle)
        return SHAPES[kind](cos * x + sin * y, cos * y - sin * x) < 0


def _draw_texture(random: np.random.Generator, size: int) -> np.ndarray:
    """Noisy stripes of two random colors: neither color nor texture depends on the class."""
    first, second = random.uniform(0, 255, (2, 3))
    angle, period, phase = random.uniform(0, np.pi), random.uniform(3, 12) * size / 64, random.uniform(0, 6.28)
    steps = np.arange(size)
    wave = np.sin((np.cos(angle) * steps[:, None] + np.sin(angle) * steps[None, :]) * (2 * np.pi / period) + phase)
    mixed = first + (second - first) * (wave[..., None] * 0.5 + 0.5)
    return (mixed + random.normal(0, 12, (size, size, 1))).clip(0, 255)


def shapes(split: str, options: str) -> Shapes:
    """Parse options such as size=64,count=500,classes=10 (count is 10,000 for train, otherwise 2,000).

    A large count is that of the training images: val and test have at most 10,000.
    """
    values = {"size": 64, "count": 10_000 if split == "train" else 2_000, "classes": 10}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in values or not value.isdecimal():
            raise ValueError(f"shapes has no option {option!r}; {nearest(key, values)}, as in shapes:size=64,count=500")
        values[key] = int(value)
    limits = {"size": (8, 4096), "count": (1, 10**9), "classes": (1, len(SHAPES))}
    if not all(least <= values[key] <= most for key, (least, most) in limits.items()):
        taken = ", ".join(f"{key} {least:,} to {most:,}" for key, (least, most) in limits.items())
        raise ValueError(f"shapes takes {taken}; got {options!r}")
    count = values["count"] if split == "train" else min(values["count"], MAX_HELD_OUT)
    return Shapes(split, values["size"], count, values["classes"])
