"""The images that a run trains on, validates on and tests on. Test images are read once, at the end."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plainvit.config import LEAST_STEPS, Config, from_json
from plainvit.data.content import CONTENT, sample_hash
from plainvit.data.decode import DataError
from plainvit.data.order import permutation
from plainvit.data.sources import AbsentSplit, Source, Subset, open_source
from plainvit.disk import read_json, run_folder, run_settings

log = logging.getLogger("plainvit")
SAME = {"validation": "val", "valid": "val", "dev": "val", "testing": "test", "training": "train"}  # its other names


@dataclass
class Splits:
    train: Source
    val: Source | None
    test: Source | None

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @cached_property
    def described(self) -> dict[str, Any]:
        """What data.json keeps, to notice that the images changed; every name is read for it, so once."""
        present = {"train": self.train, "val": self.val, "test": self.test}
        sizes = {
            name: {"images": len(source), "fingerprint": source.fingerprint()}
            for name, source in present.items()
            if source is not None
        }
        return {"classes": list(self.classes), "splits": sizes}


def open_splits(config: Config) -> Splits:
    """The splits that the data has; where it has no validation images apart from its test images, `holdout` does."""
    if not config.data:
        raise ValueError("this run has no data: give --data FOLDER, or a known set's name")
    train = _open(config, "train")
    assert train is not None
    if train.labels.min() < 0:
        raise DataError(f"{config.data} has training images without a label")
    _check_names(train)
    val, test = _open(config, "val"), _open(config, "test")
    if val and test and _same_images(val, test):
        val = None
    if val is None and config.holdout:
        train, val = hold_out(train, config.holdout)
    return Splits(part_of(train, config.share), val, test)


def _check_names(source: Source) -> None:
    """A folder's name may be any bytes; what a run and its weights say of their classes is UTF-8."""
    for name in source.classes:
        if name.encode("utf-8", "replace").decode() != name:
            raise DataError(f"{source.spec} has the class {name!r}, whose name is not UTF-8: rename it")


def _same_images(one: Source, other: Source) -> bool:
    """By their bytes too: val/cat/0.jpg and test/cat/0.jpg have one name within their splits."""
    return one.fingerprint() == other.fingerprint() and sample_hash(one) == sample_hash(other)


def trained_on(model: str | Path, data: str, data_root: str | Path | None) -> Config | None:
    """The settings of a run that learned from this data, wherever it lies; None of other weights, and of other data."""
    stored = run_settings(model)
    own = stored.get("data")
    if not own or not isinstance(own, str):
        return None
    root = str(data_root or stored.get("data_root") or "")
    made = from_json(stored | {"data": data, "data_root": root}, ("run",))
    assert isinstance(made, Config)
    same = own == data or _one_place(own, data) or _learned_from(made, run_folder(model))
    return made if same else None


def _one_place(one: str, other: str) -> bool:
    """photos, photos/ and ../here/photos are the same images."""
    return Path(one).exists() and Path(one).resolve() == Path(other).resolve()


def _learned_from(config: Config, run: Path) -> bool:
    """By what the run noted of its images: they may have been moved, or be named from another folder than it was."""
    noted, card = read_json(run / "data.json"), read_json(run / "card.json").get("data") or {}
    try:
        found = open_splits(config)
    except (ValueError, OSError):  # it could not have learned from these
        return False
    judged = found.test or found.val
    alike = judged is None or card.get("content") in (None, sample_hash(judged, CONTENT))
    return alike and all(noted.get(key) == value for key, value in found.described.items())


def choose(model: str | Path, data: str, split: str, data_root: str | Path | None) -> Source:
    """The split asked for; without one, test images, or those that the run held out of this data, or all there are."""
    split = SAME.get(split, split)
    try:
        source = open_source(data, split or "test", data_root=data_root)
        if split == "train" and trained_on(model, data, data_root):
            log.warning("the model was trained on these images, or most of them: this says little of new ones")
        return source
    except AbsentSplit as error:
        run = trained_on(model, data, data_root)
        if split and not (run and split == "val"):
            raise AbsentSplit(f"{error}; --split takes another") from error
    if run:
        held_out = open_splits(run).val
        if held_out is not None:
            log.warning(
                "%s has no %s images: these are the %d that the run held out", data, split or "test", len(held_out)
            )
            return held_out
        raise AbsentSplit(f"{data} has no test images, and the run held none out: --split train has those it learned")
    try:
        return open_source(data, "val", data_root=data_root)
    except AbsentSplit:
        return open_source(data, "train", data_root=data_root)  # class folders and nothing else: all of them


def risks(config: Config, splits: Splits) -> Iterator[tuple[str, str]]:
    """What the training images say of a run whose config is resolved: each risk, and how to mend it."""
    images = len(splits.train)
    counts = np.bincount(splits.train.labels, minlength=len(splits.classes))
    empty = [name for name, count in zip(splits.classes, counts, strict=True) if not count]
    if empty:
        words = f"{len(empty)} classes have" if len(empty) > 1 else "1 class has"
        yield f"{words} no training image ({', '.join(empty[:3])})", "remove its folder, or add images: data check"
    if config.batch > images:
        yield f"a batch of {config.batch} is more than the {images} training images", f"--batch {max(images // 8, 1)}"
    if config.init and 0 < config.steps < LEAST_STEPS:
        yield f"a fine-tuning of {config.steps} steps is short", f"--steps {LEAST_STEPS} or more"
    if not config.init and images < 5000 and config.data.partition(":")[0] != "digits":
        yield (
            f"{images} images are few to learn from alone",
            f"start from published weights: plainvit finetune --init {_suited(config)} --data {config.data}",
        )


def _suited(config: Config) -> str:
    """Weights that the machine can fine-tune in reasonable time (weights/published.py)."""
    gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    return "vit_b16_augreg_i21k_224" if gpu else "vit_s16_augreg_i21k_i1k_224"


def _open(config: Config, split: str) -> Source | None:
    try:
        return open_source(config.data, split, data_root=config.data_root or None, exclude=config.exclude or None)
    except AbsentSplit:
        if split == "train":
            raise
        return None


def hold_out(source: Source, share: float) -> tuple[Source, Source]:
    """(rest, held out): the same images whatever the seed, and as near as can be the same share of each class."""
    chosen = _drawn(source, share, 0, lambda count: count - 1)  # each class keeps one to learn from
    if not len(chosen):
        raise DataError(f"no class of {source.spec} has two images: none can be held out to validate on; --holdout 0")
    rest = np.setdiff1d(np.arange(len(source)), chosen)
    return Subset(source, rest, "train"), Subset(source, chosen, "val")


def part_of(source: Source, share: float) -> Source:
    """A share of each class, at least one image of it: that of a smaller share is among that of a larger one."""
    return source if share == 1 else Subset(source, _drawn(source, share, 1, lambda count: count))


def _drawn(source: Source, share: float, salt: int, most: Callable[[int], int]) -> np.ndarray:
    """Places of a share of each class, at least one where there may be one, in the order of the source."""
    found = [np.empty(0, int)]
    for label in range(len(source.classes)):
        members = np.flatnonzero(source.labels == label)
        count = min(max(round(share * len(members)), 1), most(len(members)))
        found.append(members[permutation(salt, label, len(members))[: max(count, 0)]])
    return np.sort(np.concatenate(found))
