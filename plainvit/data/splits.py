"""Training, validation and test images of a run. Test images are read once, at the end."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plainvit.config import MIN_FINETUNE_STEPS, Config, from_json
from plainvit.data.content_hash import CARD_SAMPLE, hash_to_unit_interval, sample_hash
from plainvit.data.decode import DataError
from plainvit.data.order import permutation
from plainvit.data.sources import SPLITS, MissingSplitError, Source, Subset, open_source
from plainvit.disk import read_json, run_folder, run_settings

log = logging.getLogger("plainvit")


@dataclass
class Splits:
    train: Source
    val: Source | None
    test: Source | None

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @cached_property
    def description(self) -> dict[str, Any]:
        """The content of data.json, by which changed images are detected. Cached: it reads every name."""
        present = {"train": self.train, "val": self.val, "test": self.test}
        sizes = {
            name: {"images": len(source), "fingerprint": source.fingerprint()}
            for name, source in present.items()
            if source is not None
        }
        return {"classes": list(self.classes), "splits": sizes}


def open_splits(config: Config) -> Splits:
    """Open the splits of the data. Without a validation split, `holdout` takes it from the training images."""
    if not config.data:
        raise ValueError("this run has no data: give --data FOLDER, or the name of a known dataset")
    train = _open(config, "train")
    if train.labels.min() < 0:
        raise DataError(f"{config.data} has training images without a label: label or remove them")
    _check_classes(train, config)
    val, test = _open_labeled(config, "val"), _open_labeled(config, "test")
    if val and test and _are_same_images(val, test):
        val = None
    if val is None and config.holdout > 0:
        train, val = hold_out(train, config.holdout)
    return Splits(take_fraction(train, config.train_fraction), val, test)


def _check_classes(source: Source, config: Config) -> None:
    """Labels must be learnable; class names are saved as UTF-8, but a folder's name may be any bytes."""
    classes, images = len(source.classes), len(source)
    if config.objective == "classify" and classes < 2:
        raise DataError(f"{source.spec} has only the class {source.classes[0]!r}: a classifier needs two or more")
    if config.objective == "classify" and images < classes:
        problem = f"{source.spec} has {images:,} training images for {classes:,} classes"
        raise DataError(f"{problem}: add images, or remove empty class folders")
    for name in source.classes:
        if name.encode("utf-8", "replace").decode() != name:
            raise DataError(f"{source.spec} has the class {name!r}, which is not UTF-8: rename it")


def _are_same_images(a: Source, b: Source) -> bool:
    """Compare names and content: val/cat/0.jpg and test/cat/0.jpg have the same name in their splits."""
    return a.fingerprint() == b.fingerprint() and sample_hash(a) == sample_hash(b)


def find_training_config(model: str | Path, data: str, data_root: str | Path | None) -> Config | None:
    """The settings of the run behind these weights if it was trained on this data; otherwise None."""
    stored = run_settings(model)
    own = stored.get("data")
    if not own or not isinstance(own, str):
        return None
    root = str(data_root or stored.get("data_root") or "")
    config = from_json(stored | {"data": data, "data_root": root}, ("run",))
    assert isinstance(config, Config)
    is_same_path = own == data or (Path(own).exists() and Path(own).resolve() == Path(data).resolve())
    return config if is_same_path or _matches_records(config, run_folder(model)) else None


def _matches_records(config: Config, run: Path) -> bool:
    """Whether the data matches the run's data.json and card.json: the images may have been moved."""
    recorded, card = read_json(run / "data.json"), read_json(run / "card.json").get("data") or {}
    try:
        splits = open_splits(config)
    except (ValueError, OSError):  # not the data of this run
        return False
    evaluated = splits.test or splits.val
    has_same_content = evaluated is None or card.get("content") in (None, sample_hash(evaluated, CARD_SAMPLE))
    return has_same_content and all(recorded.get(key) == value for key, value in splits.description.items())


def choose_split(model: str | Path, data: str, split: str, data_root: str | Path | None) -> Source:
    """Open `split`. If empty: the test images, else those that the run held out, else val, else all images."""
    split = next((name for name, synonyms in SPLITS.items() if split in synonyms), split)
    try:
        source = open_source(data, split or "test", data_root=data_root)
        if split == "train" and find_training_config(model, data, data_root):
            log.warning("the model was trained on these images: the result does not apply to new images")
        return source
    except MissingSplitError as error:
        run = find_training_config(model, data, data_root)
        if split and not (run and split == "val"):
            raise MissingSplitError(f"{error}; choose another with --split") from error
    if run:
        held_out = open_splits(run).val
        if held_out is not None:
            problem = "%s has no %s images: using the %d that the run held out"
            log.warning(problem, data, split or "test", len(held_out))
            return held_out
        raise MissingSplitError(f"{data} has no test images and the run held none out: use --split train")
    try:
        return open_source(data, "val", data_root=data_root)
    except MissingSplitError:
        source = open_source(data, "train", data_root=data_root)
        source.split = "all"  # only class folders
        return source


def find_data_problems(config: Config, splits: Splits) -> Iterator[tuple[str, str]]:
    """Problems of a resolved config with its training images: (problem, fix)."""
    images = len(splits.train)
    empty = np.flatnonzero(np.bincount(splits.train.labels, minlength=len(splits.classes)) == 0)
    if len(empty):
        names = ", ".join(splits.classes[label] for label in empty[:3])
        subject = f"{len(empty)} classes have" if len(empty) > 1 else "1 class has"
        yield f"{subject} no training image ({names})", "add images or remove the class folder"
    if config.batch > images:
        even = max(images // 2 * 2, 1)  # as mixup and CutMix need
        yield f"a batch of {config.batch} is more than the {images} training images", f"use --batch {even}"
    if config.init and 0 < config.steps < MIN_FINETUNE_STEPS:
        yield f"a fine-tuning of {config.steps} steps is short", f"use --steps {MIN_FINETUNE_STEPS} or more"
    if not config.init and images < 5000 and config.recipe != "small" and config.data.partition(":")[0] != "digits":
        gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
        weights = "vit_b16_augreg_i21k_224" if gpu else "vit_s16_augreg_i21k_i1k_224"  # as large as trains in minutes
        yield (
            f"{images} images are few to learn from alone",
            f"start from published weights: plainvit finetune --init {weights} --data {config.data}",
        )


def _open(config: Config, split: str) -> Source:
    return open_source(config.data, split, data_root=config.data_root or None, exclude=config.exclude or None)


def _open_labeled(config: Config, split: str) -> Source | None:
    """A split for evaluation, or None if it is missing or without labels, such as the test images of a competition."""
    try:
        source = _open(config, split)
    except MissingSplitError:
        return None
    if source.labels.min() >= 0:
        return source
    log.warning("the %s images of %s are not used: they lack labels", split, config.data)
    return None


def hold_out(source: Source, fraction: float) -> tuple[Source, Source]:
    """Split into (rest, held out) by content: the same images for every seed, machine and name of a file.

    Each image has a number from a hash of its content (`Source.identify`: of a file its size, first and last 4 KiB) and
    is held out if that is below `fraction`, so copies of an image are always in the same part, and adding or removing
    images moves no others. Of each class with two or more different images the lowest number is held out and the
    highest is not, whatever the fraction; only these two may move when images of the class are added or removed.
    """
    numbers = hash_to_unit_interval(source)
    lowest, highest = np.full(len(source.classes), np.inf), np.full(len(source.classes), -np.inf)
    np.minimum.at(lowest, source.labels, numbers)
    np.maximum.at(highest, source.labels, numbers)
    chosen = (numbers < fraction) | (numbers == lowest[source.labels])
    chosen = np.isin(numbers, numbers[chosen]) & ~np.isin(numbers, highest)  # copies may have other labels
    if not chosen.any():
        problem = f"--holdout needs a class with two or more different images, {source.spec} has none"
        raise DataError(f"{problem}: add images, or use --holdout 0")
    return Subset(source, np.flatnonzero(~chosen), "train"), Subset(source, np.flatnonzero(chosen), "val")


def take_fraction(source: Source, fraction: float) -> Source:
    """A fraction of each class, at least one image; smaller fractions are subsets of larger ones."""
    if fraction == 1:
        return source
    indices = [np.empty(0, int)]
    for label in range(len(source.classes)):
        members = np.flatnonzero(source.labels == label)
        indices.append(members[permutation(1, label, len(members))[: max(round(fraction * len(members)), 1)]])
    return Subset(source, np.sort(np.concatenate(indices)))
