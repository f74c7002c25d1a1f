"""What an analysis looks at, a model and images as it sees them; and what a part of it gives, figures with words.

subject = gather(Predictor("runs/photos"), "photos/", split="", data_root="", count=128)
next(filters(subject)).drawings[""].figure                    one of the parts in parts.py and maps.py

What does not apply to a model is a ValueError that says why; `understand` puts it into the page and goes on. Parts that
take many passes look at as many images as a bounded number of multiply-adds allows, and say at how many.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from plainvit.analyse import robust
from plainvit.analyse.page import Html
from plainvit.data.decode import DataError, ImageError, size
from plainvit.data.sources import AbsentSplit, Source, open_source
from plainvit.data.splits import choose, trained_on
from plainvit.disk import run_settings
from plainvit.evaluate.inputs import find
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.planning.cost import macs

LEAST = 16  # images below which accuracy says nothing
TINY, SHRUNK = 64, 3  # pixels along a side, and how many times smaller, at which little of a photo is left
WORK = {"cpu": 7e11, "cuda": 2e14}  # multiply-adds of a part that takes many passes: some ten seconds


@dataclass
class Subject:
    """A model, and images as it sees them."""

    predictor: Predictor
    images: Tensor  # [n, 3, H, W] uint8
    names: list[str]
    labels: Tensor | None  # [n], where they are known and are the model's classes
    which: str = "images"  # what they are, in words that follow their number
    held_out: bool = False  # by the run whose model it is, of the data that it learned from
    against: Predictor | None = None
    other: str = ""  # what the model that it is compared with is called
    thorough: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.predictor.model

    @property
    def grid(self) -> tuple[int, int]:
        """The model's patches; a ResNet has none, and gets squares of about a fourteenth of the image."""
        if isinstance(self.model, ViT):
            return self.model.config.grid
        height, width = self.model.config.image_size
        return _divisor(height), _divisor(width)

    def affordable(self, passes: float, most: int, least: int = LEAST) -> int:
        """Images that a part with so many passes over each may look at."""
        count = min(most, len(self.images))
        if self.thorough:
            return count
        work = WORK.get(self.predictor.device.split(":")[0], WORK["cpu"])
        return max(min(count, int(work / (passes * macs(self.model.config)))), min(least, count))

    @cached_property
    def answers(self) -> Tensor:
        """[n, K] logits of all images."""
        return robust.logits(self.model, self.images)

    def some(self, count: int) -> tuple[Tensor, Tensor]:
        """Images with labels; the model's own answers where there are none."""
        if self.model.head is None:
            raise ValueError("the model has no head, so there is no answer to lose")
        labels = self.answers.argmax(-1) if self.labels is None else self.labels
        return self.images[:count], labels[:count]

    def guesses(self, count: int) -> list[str]:
        """What the model says of the first images, in words."""
        if self.model.head is None:
            return [""] * min(count, len(self.images))
        best, names = self.answers[:count].softmax(-1).max(-1), self.predictor.class_names
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [f"{names[at]} ({100 * p:.0f} %)" for p, at in pairs]


def _divisor(side: int) -> int:
    return max(count for count in range(1, 15) if side % count == 0)


class Drawing(NamedTuple):
    """A figure and its numbers, which are written side by side."""

    figure: Figure
    numbers: Any


@dataclass
class Part:
    """One figure or more, with words on how to read them."""

    name: str
    title: str
    words: str
    drawings: dict[str, Drawing]
    html: Html | None = None  # what the page shows in place of the figures, where pictures are many
    table: Html | None = None  # and what it shows below them


Parts = Iterator[Part]


# Images ---------------------------------------------------------------------------------------------------------------


def images_of(model: str | Path, images: str, split: str, data_root: str) -> tuple[str, str, str]:
    """Without --data, the run's own."""
    if images:
        return images, split, data_root
    stored = run_settings(model)
    if not isinstance(stored.get("data"), str) or not stored["data"]:
        raise ValueError("which images? --data takes a folder, an archive, or a set that `plainvit data info` knows")
    return stored["data"], split, data_root or stored.get("data_root") or ""


def gather(predictor: Predictor, spec: str, split: str, data_root: str, count: int, model: str | Path = "") -> Subject:
    """Images spread evenly over the source, as the model sees them; those that cannot be read are passed over."""
    source = opened(spec, split, data_root, model)
    rows: list[tuple[Tensor, str, int]] = []
    sides: list[int] = []  # the shorter one of each image, as it lies there
    broken: list[str] = []
    for index in np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int)).tolist():
        try:
            pixels = source.read(index)
            rows.append((predictor.prepare(pixels), source.name(index), int(source.labels[index])))
            sides.append(min(size(pixels)))
        except (ImageError, OSError) as error:
            broken.append(f"{source.name(index)}: {error}")
    if not rows:
        raise DataError(f"no image of {spec} can be read; {broken[0].splitlines()[0]}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()  # sets lie sorted by class
    rows = [rows[place] for place in order]
    labels, fits = torch.tensor([row[2] for row in rows]), _fits(predictor, source)
    fits = fits and bool((labels >= 0).all())
    subject = Subject(predictor, torch.stack([row[0] for row in rows]), [row[1] for row in rows], labels)
    own = trained_on(model, spec, data_root) is not None
    subject.which, subject.held_out = _which(source, own, len(rows)), own and source.split != "train"
    if broken:
        subject.notes.append(f"{len(broken)} of {len(broken) + len(rows)} images could not be read; {broken[0]}.")
    subject.notes += _shrunk(int(np.median(sides)), predictor.size)
    if not fits:
        subject.labels = None
        said = "The images have no labels that the model knows: accuracy is agreement with its answers."
        subject.notes += [said] if predictor.classes else []
    return subject


def _which(source: Source, own: bool, count: int) -> str:
    """What the images are to the model, that its maps are not taken for those of images it has never seen."""
    kinds = {"test": "test images", "val": "validation images"}
    kinds |= {"val": "images that the run held out", "train": "images that the run learned from"} if own else {}
    kind = kinds.get(source.split, "images") if source.classes else "images"
    return f"of the {len(source):,} {kind}" if count < len(source) else kind


def _shrunk(side: int, wanted: tuple[int, int]) -> list[str]:
    """That photos were made so small that a reader must not expect to recognise much."""
    height, width = wanted
    if min(wanted) > TINY or side < SHRUNK * min(wanted):
        return []
    seen = f"{width} x {height} pixels, which is all that this model sees"
    return [f"The images were shrunk, from {side} pixels along the shorter side (median) to {seen}."]


def _fits(predictor: Predictor, source: Source) -> bool:
    """Whether the images' labels are the model's classes."""
    theirs, ours = tuple(source.classes), tuple(predictor.model.about.class_names)
    return len(theirs) == predictor.classes > 0 and (not ours or ours == theirs)


def opened(spec: str, split: str, data_root: str, model: str | Path = "") -> Source:
    """A set with labels where it is one, the images that its model was not trained on; otherwise just images."""
    if any(letter in spec for letter in "*?["):
        return find([spec], split=split or "test", data_root=data_root or None)
    try:
        return choose(model, spec, split, data_root or None)
    except AbsentSplit:
        if split:
            raise
        return open_source(spec, "train", data_root=data_root or None)  # of a run that held none out
    except DataError:
        if not Path(spec).exists():
            raise
        return find([spec], split=split or "test", data_root=data_root or None)
