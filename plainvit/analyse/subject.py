"""What is analysed (a model and images), and what an analysis returns (figures with text).

subject = gather(Predictor("runs/photos"), "photos/", split="", data_root="", count=128)
next(analyse_filters(subject)).drawings[""].figure            one of the analyses in findings.py and maps.py

An analysis that does not apply to a model raises a ValueError with the reason, which the report shows. One that needs
many forward passes uses as many images as a fixed number of multiply-adds allows, and says how many.
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
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.data.splits import choose_split, find_training_config
from plainvit.disk import run_settings
from plainvit.evaluate.inputs import find
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT
from plainvit.planning.cost import macs

LEAST = 16  # images needed for an accuracy
WORK = {"cpu": 7e11, "cuda": 2e14}  # multiply-adds of an analysis: about ten seconds


@dataclass
class Subject:
    """A model, and images in its size."""

    predictor: Predictor
    images: Tensor  # [n, 3, H, W] uint8
    names: list[str]
    labels: Tensor | None  # [n], if known and the model's classes
    which: str = "images"  # their description, after a number
    against: Predictor | None = None
    other: str = ""  # name of the model in `against`
    thorough: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.predictor.model

    @property
    def grid(self) -> tuple[int, int]:
        """The model's patches; for a ResNet, at most 14 x 14 squares."""
        if isinstance(self.model, ViT):
            return self.model.config.grid
        height, width = (max(n for n in range(1, 15) if side % n == 0) for side in self.model.config.image_size)
        return height, width

    def affordable_images(self, passes: float, most: int, least: int = LEAST) -> int:
        """Number of images for an analysis that needs this many passes for each."""
        count = min(most, len(self.images))
        if self.thorough:
            return count
        work = WORK.get(self.predictor.device.split(":")[0], WORK["cpu"])
        return max(min(count, int(work / (passes * macs(self.model.config)))), min(least, count))

    @cached_property
    def logits(self) -> Tensor:
        """[n, K]"""
        return robust.logits(self.model, self.images)

    def labelled_images(self, count: int) -> tuple[Tensor, Tensor]:
        """The first images with their labels, or with the model's predictions if there are no labels."""
        if self.model.head is None:
            raise ValueError(robust.NO_HEAD)
        labels = self.logits.argmax(-1) if self.labels is None else self.labels
        return self.images[:count], labels[:count]

    def describe_predictions(self, count: int) -> list[str]:
        """Predicted class and probability of the first images."""
        if self.model.head is None:
            return [""] * min(count, len(self.images))
        best, names = self.logits[:count].softmax(-1).max(-1), self.predictor.class_names
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [f"{names[at]} ({100 * p:.0f} %)" for p, at in pairs]


class Drawing(NamedTuple):
    """A figure and its data."""

    figure: Figure
    numbers: Any


@dataclass
class Finding:
    """One or more figures and how to read them."""

    name: str
    title: str
    text: str
    drawings: dict[str, Drawing]  # by the suffix of their file names
    html: Html | None = None  # shown in the report instead of the figures
    table: Html | None = None  # shown below them


Findings = Iterator[Finding]


# Images ---------------------------------------------------------------------------------------------------------------


def resolve_images(model: str | Path, images: str, split: str, data_root: str) -> tuple[str, str, str]:
    """(data, split, data root); without --data, those of the run."""
    if images:
        return images, split, data_root
    stored = run_settings(model)
    if not isinstance(stored.get("data"), str) or not stored["data"]:
        raise ValueError("--data is required: give a folder, or a dataset name (see `plainvit data info`)")
    return stored["data"], split, data_root or stored.get("data_root") or ""


def gather(predictor: Predictor, spec: str, split: str, data_root: str, count: int, model: str | Path = "") -> Subject:
    """Images spread evenly over the source, in the model's size; unreadable ones are skipped."""
    source = open_images(spec, split, data_root, model)
    rows: list[tuple[Tensor, str, int]] = []
    broken: list[str] = []
    for index in np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int)).tolist():
        try:
            rows.append((predictor.load_image(source.read(index)), source.name(index), int(source.labels[index])))
        except (ImageError, OSError) as error:
            broken.append(f"{source.name(index)}: {error}")
    if not rows:
        raise DataError(f"no image of {spec} can be read: {broken[0].splitlines()[0]}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()  # files are sorted by class
    images, names, labels = zip(*(rows[index] for index in order), strict=True)
    subject = Subject(predictor, torch.stack(images), list(names), torch.tensor(labels))
    own = find_training_config(model, spec, data_root) is not None
    subject.which = _describe_images(source, own, len(rows))
    if broken:
        subject.notes.append(f"{len(broken)} of {len(broken) + len(rows)} images could not be read: {broken[0]}.")
    if not _has_matching_classes(predictor, source) or min(labels) < 0:
        subject.labels = None
        note = "The images have no labels of this model: accuracy is agreement with its original predictions."
        subject.notes += [note] if predictor.classes else []
    return subject


def _describe_images(source: Source, own: bool, count: int) -> str:
    """What the images are, so that training images are not mistaken for unseen ones."""
    kinds = {"test": "test images", "val": "validation images"}
    kinds |= {"val": "held-out images of the run", "train": "training images of the run"} if own else {}
    kind = kinds.get(source.split, "images") if source.classes else "images"
    return f"of the {len(source):,} {kind}" if count < len(source) else kind


def _has_matching_classes(predictor: Predictor, source: Source) -> bool:
    """Whether the labels of the images are the classes of the model."""
    theirs, ours = tuple(source.classes), tuple(predictor.model.about.class_names)
    return len(theirs) == predictor.classes > 0 and (not ours or ours == theirs)


def open_images(spec: str, split: str, data_root: str, model: str | Path = "") -> Source:
    """A labelled dataset, without the training images of the model if possible; otherwise unlabelled images."""
    if any(letter in spec for letter in "*?["):
        return find([spec], split=split or "test", data_root=data_root or None)
    try:
        return choose_split(model, spec, split, data_root or None)
    except MissingSplitError:
        if split:
            raise
        return open_source(spec, "train", data_root=data_root or None)  # a run without held-out images
    except DataError:
        if not Path(spec).exists():
            raise
        return find([spec], split=split or "test", data_root=data_root or None)
