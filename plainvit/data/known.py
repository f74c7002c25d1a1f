"""Sets that have a name, with their official splits; read from the data root, DATA_ROOT/NAME.

Below it a set may lie as parquet shards, packed tars or folders. No address is shipped that could not be checked, so
nothing is downloaded by name: `hf:org/dataset` takes any address that you know.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plainvit.data.decode import DataError
from plainvit.data.sources import Source, Subset, open_folder


@dataclass(frozen=True)
class Known:
    classes: int
    splits: tuple[str, ...]  # the official ones
    about: str
    folder: str = ""  # below the data root, where it is not the name


SETS: dict[str, Known] = {
    "imagenet": Known(1000, ("train", "val"), "ILSVRC-2012; test is the validation set, as in the paper"),
    "imagenet-real": Known(1000, ("val",), "ImageNet's validation images with the label lists of ReaL", "imagenet"),
    "imagenet21k": Known(21843, ("train",), "ImageNet-21k, 14 million images"),
    "tiny-imagenet": Known(200, ("train", "val"), "64 x 64 pixels; test is the validation set"),
    "cifar10": Known(10, ("train", "test"), "32 x 32 pixels"),
    "cifar100": Known(100, ("train", "test"), "32 x 32 pixels"),
    "oxford-pets": Known(37, ("train", "test"), "Oxford-IIIT Pets; train is the official trainval"),
    "flowers102": Known(102, ("train", "val", "test"), "Oxford Flowers-102"),
}
# VTAB-1k: each task trains on train[:800] and validates on 200 more (arXiv 1910.04867). Which 200 the original code
# takes differs by task (some from a validation split of its own); here they are the next 200 of train, for all.
VTAB = {
    "natural": ("caltech101", "cifar100", "dtd", "flowers102", "oxford-pets", "sun397", "svhn"),
    "specialized": ("camelyon", "eurosat", "resisc45", "retinopathy"),
    "structured": (
        *("clevr-count", "clevr-distance", "dmlab", "dsprites-location", "dsprites-orientation"),
        *("kitti-distance", "smallnorb-azimuth", "smallnorb-elevation"),
    ),
}
_CLASSES = {
    "caltech101": 102,
    "cifar100": 100,
    "dtd": 47,
    "flowers102": 102,
    "oxford-pets": 37,
    "sun397": 397,
    "svhn": 10,
}
_CLASSES |= {"camelyon": 2, "eurosat": 10, "resisc45": 45, "retinopathy": 5, "clevr-count": 8, "clevr-distance": 6}
_CLASSES |= {"dmlab": 6, "dsprites-location": 16, "dsprites-orientation": 16, "kitti-distance": 4}
_CLASSES |= {"smallnorb-azimuth": 18, "smallnorb-elevation": 9}
for _group, _tasks in VTAB.items():
    for _task in _tasks:
        SETS[f"vtab/{_task}"] = Known(_CLASSES[_task], ("train", "val", "test"), f"VTAB-1k, {_group}", _task)


def open_known(name: str, split: str, data_root: Path | None) -> Source:
    """One split of a known set, checked against its official number of classes."""
    known = SETS[name]
    if data_root is None:
        raise DataError(
            f"{name} is read from a data root: give --data-root DIR, with the images in DIR/{known.folder or name}"
        )
    folder = data_root / (known.folder or name)
    if not folder.is_dir():
        raise DataError(f"{name} is not in the data root: there is no folder {folder}")
    if name.startswith("vtab/") and split in ("train", "val"):
        whole = open_folder(folder, "train")
        if len(whole) < 1000:
            raise DataError(f"{name} takes 1,000 training images, but {folder} has {len(whole):,}")
        source: Source = Subset(whole, np.arange(800) if split == "train" else np.arange(800, 1000), split)
    else:
        official = split if split in known.splits or split != "test" else "val"
        source = open_folder(folder, official)
    if len(source.classes) != known.classes:
        raise DataError(f"{name} has {known.classes} classes, but {folder} has {len(source.classes)}")
    return source


def real_labels(data_root: Path) -> list[list[int]]:
    """ReaL's lists of labels, one for each of ImageNet's 50,000 validation images in their official order."""
    path = data_root / "imagenet-real" / "real.json"
    if not path.is_file():
        raise DataError(f"ImageNet-ReaL's labels are not in the data root: there is no file {path}")
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(labels, list) or len(labels) != 50_000 or not all(map(_label_list, labels)):
        raise DataError(f"{path} is not ReaL's list of 50,000 label lists")
    return labels


def _label_list(value: object) -> bool:
    return isinstance(value, list) and all(type(label) is int and 0 <= label < 1000 for label in value)
