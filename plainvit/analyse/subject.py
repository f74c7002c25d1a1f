"""What is analysed (a model and images), and what an analysis returns (figures with text).

subject = gather(Predictor("runs/photos"), "photos/", split="", data_root="", count=128)
next(analyse_filters(subject)).figure            one of the analyses in findings.py

An analysis that does not apply to a model raises NotApplicableError with the reason, which the report shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from plainvit.analyse.gallery import choose_evenly
from plainvit.analyse.html import Html
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.data.splits import choose_split, find_training_config
from plainvit.disk import run_settings
from plainvit.evaluate.inputs import find
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson
from plainvit.models.inference import check_finite
from plainvit.weights.published import PUBLISHED
from plainvit.weights.reading import locate_weights

MIN_LABELED = 16  # images needed for an accuracy


@dataclass
class Subject:
    """A model, and images in its size."""

    predictor: Predictor
    images: Tensor  # [n, 3, H, W] uint8
    names: list[str]
    labels: Tensor | None  # [n], if known and the model's classes
    description: str = "images"  # what the images are, after their number
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.predictor.model

    def predict(self, images: Tensor) -> Tensor:
        """[n, K] logits on the CPU; raises if they are NaN or Inf."""
        logits = torch.cat([self.predictor.logits(batch).cpu() for batch in images.split(self.predictor.batch)])
        check_finite(logits, lambda at: f"image {at}")
        return logits

    @cached_property
    def logits(self) -> Tensor:
        """[n, K] of all images"""
        return self.predict(self.images)

    def describe_predictions(self, count: int) -> list[str]:
        """Predicted class and probability of the first images."""
        if self.model.head is None:
            return [""] * min(count, len(self.images))
        best, names = self.logits[:count].softmax(-1).max(-1), self.predictor.class_names
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [f"{names[at]} ({100 * p:.0f} %)" for p, at in pairs]

    def find_warnings(self) -> list[str]:
        """A warning for a model at chance level."""
        classes, count = self.predictor.classes, len(self.images)
        if self.labels is None or count < MIN_LABELED or classes < 2:
            return []
        correct = int((self.logits.argmax(-1) == self.labels).sum())
        if wilson(correct, count)[0] > 1 / classes:
            return []
        accuracy = f"The accuracy on these {count} images is {100 * correct / count:.0f} %"
        return [f"{accuracy}, not above chance ({100 / classes:.0f} %): the maps show a model that has not learned."]


@dataclass
class Finding:
    """A figure with its data, and how to read it."""

    name: str  # of its files
    title: str
    text: str
    figure: Figure
    data: dict[str, Any]
    html: Html | None = None  # shown in the report instead of the figure


Findings = Iterator[Finding]


# Images ---------------------------------------------------------------------------------------------------------------


def resolve_data(model: str | Path, data: str, data_root: str) -> tuple[str, str]:
    """(data, data root); without --data, those of the run."""
    if data:
        return data, data_root
    stored = run_settings(model)
    if not isinstance(stored.get("data"), str) or not stored["data"]:
        is_on_hub = str(model).startswith("hf:") or str(model) in PUBLISHED
        if not is_on_hub and not locate_weights(model).exists():
            raise ValueError(f"there is no file or folder {model}")
        raise ValueError(f"--data is required, since {model} is no run folder: give a folder or a dataset name")
    return stored["data"], data_root or stored.get("data_root") or ""


def gather(predictor: Predictor, spec: str, split: str, data_root: str, count: int, model: str | Path = "") -> Subject:
    """Images spread evenly over the source, in the model's size; unreadable ones are skipped."""
    source = open_images(spec, split, data_root, model)
    rows: list[tuple[Tensor, str, int]] = []
    unreadable: list[str] = []
    for index in choose_evenly(len(source), count).tolist():
        try:
            rows.append((predictor.load_image(source.read(index)), source.name(index), int(source.labels[index])))
        except (ImageError, OSError) as error:
            unreadable.append(f"{source.name(index)}: {error}")
    if not rows:
        raise DataError(f"no image of {spec} can be read: {unreadable[0].splitlines()[0]} (see `plainvit data check`)")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()  # files are sorted by class
    images, names, labels = zip(*(rows[index] for index in order), strict=True)
    subject = Subject(predictor, torch.stack(images), list(names), None)
    if _has_matching_classes(predictor, source) and min(labels) >= 0:
        subject.labels = torch.tensor(labels)
    is_own = find_training_config(model, spec, data_root) is not None
    subject.description = _describe_images(source, is_own, len(rows))
    if unreadable:
        total = len(unreadable) + len(rows)
        subject.notes.append(f"{len(unreadable)} of {total} images could not be read: {unreadable[0]}.")
    return subject


def _describe_images(source: Source, is_own: bool, count: int) -> str:
    """What the images are, so that training images are not mistaken for unseen ones."""
    kinds = {"test": "test images", "val": "validation images"}
    kinds |= {"val": "held-out images of the run", "train": "training images of the run"} if is_own else {}
    kind = kinds.get(source.split, "images") if source.classes else "images"
    return f"of the {len(source):,} {kind}" if count < len(source) else kind


def _has_matching_classes(predictor: Predictor, source: Source) -> bool:
    """Whether the labels of the images are the classes of the model."""
    theirs, ours = tuple(source.classes), tuple(predictor.model.about.class_names)
    return len(theirs) == predictor.classes > 0 and (not ours or ours == theirs)


def open_images(spec: str, split: str, data_root: str, model: str | Path = "") -> Source:
    """A labeled dataset, without the training images of the model if possible; otherwise unlabeled images."""
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
