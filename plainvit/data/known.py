"""Known data sets with their official splits and class counts, read from DATA_ROOT/NAME.

A set may be stored as parquet, tar shards or class folders. Nothing is downloaded by name; `hf:org/dataset` reads any
data set of the Hugging Face hub.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from plainvit.data import vtab
from plainvit.data.decode import DataError
from plainvit.data.folders import open_folder
from plainvit.data.sources import MissingSplitError, Source


@dataclass(frozen=True)
class Known:
    classes: int
    splits: tuple[str, ...]
    images: int = 0  # for training, as published; 0 for test sets
    folder: str = ""  # below the data root, if it differs from the name


SETS: dict[str, Known] = {
    "imagenet": Known(1000, ("train", "val"), 1_281_167),  # ILSVRC-2012; test is the validation set, as in the paper
    # ImageNet's validation images with the label lists of ReaL
    "imagenet-real": Known(1000, ("val",), folder="imagenet"),
    "imagenet-v2": Known(1000, ("test",)),  # a new test set for ImageNet (arXiv 1902.10811), folders 0 to 999
    "imagenet-a": Known(200, ("test",)),  # natural adversarial examples (arXiv 1907.07174)
    "imagenet-r": Known(200, ("test",)),  # renditions of ImageNet's classes (arXiv 2006.16241)
    "imagenet-sketch": Known(1000, ("test",)),  # sketches of ImageNet's classes (arXiv 1905.13549)
    "imagenet21k": Known(21843, ("train",), 14_197_122),  # the release of 2011
    "tiny-imagenet": Known(200, ("train", "val"), 100_000),  # 64 x 64 pixels; test is the validation set
    "cifar10": Known(10, ("train", "test"), 50_000),  # 32 x 32 pixels
    "cifar100": Known(100, ("train", "test"), 50_000),  # 32 x 32 pixels
    "oxford-pets": Known(37, ("train", "test"), 3_680),  # Oxford-IIIT Pets; train is the official trainval
    "flowers102": Known(102, ("train", "val", "test"), 1_020),  # Oxford Flowers-102
}
for _name, _task in vtab.TASKS.items():
    SETS[f"vtab/{_name}"] = Known(_task.classes, ("train", "val", "test"), 800, _name)
    SETS[f"vtab1000/{_name}"] = Known(_task.classes, ("train", "test"), 1_000, _name)


def open_known(name: str, split: str, data_root: Path | None) -> Source:
    """Open one split of a known dataset and check its number of classes."""
    known, layout = SETS[name], describe_layout(name)
    if data_root is None:
        raise DataError(f"{name} needs a data root: give --data-root DIR with the images in DIR/{layout}")
    group, _, task = name.partition("/")
    if task:
        return vtab.open_task(task, split, data_root, whole=group == "vtab1000")
    folder = data_root / (known.folder or name)
    if not folder.is_dir():
        problem = f"{name} is not in the data root: there is no folder {folder}"
        raise DataError(f"{problem}; put its images in {data_root / layout}")
    if known.splits == ("test",):
        source = _open_test_only(name, folder, split)
    else:
        source = open_folder(folder, official_split(name, split))
    if len(source.classes) != known.classes:
        raise DataError(f"{name} has {known.classes} classes, but the images in {folder} have {len(source.classes)}")
    return source


def describe_layout(name: str) -> str:
    """The class folders of a set below the data root; parquet or tar files may take their place."""
    known = SETS[name]
    folder = known.folder or name
    if name.startswith(("vtab/", "vtab1000/")):
        return folder
    if known.splits == ("test",):
        return f"{folder}/CLASS"
    if len(known.splits) == 1:
        return f"{folder}/{known.splits[0]}/CLASS"
    return f"{folder}/{{{','.join(known.splits)}}}/CLASS"


def find_known(spec: str) -> Known | None:
    """The known dataset that `--data spec` means; a folder or file of that name comes first."""
    return None if Path(spec).exists() else SETS.get(spec)


def official_split(spec: str, split: str) -> str:
    """The official name of a split: the test images of ImageNet are its validation set."""
    known = find_known(spec)
    return "val" if known and split == "test" and split not in known.splits else split


def _open_test_only(name: str, folder: Path, split: str) -> Source:
    """A test set without split folders; ImageNet-Sketch has one more folder level."""
    if split != "test":
        raise MissingSplitError(f"{name} has no {split} split: it is a test set")
    inner = folder / "sketch" if (folder / "sketch").is_dir() else folder
    try:
        return open_folder(inner, "test")
    except MissingSplitError:
        return open_folder(inner, "train")  # no split folders: all images


def real_labels(data_root: Path) -> list[list[int]]:
    """ReaL's label lists, one for each of ImageNet's 50,000 validation images in official order."""
    path = data_root / "imagenet-real" / "real.json"
    if not path.is_file():
        raise DataError(f"ImageNet-ReaL's labels are not in the data root: there is no file {path}")
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(labels, list) or len(labels) != 50_000 or not all(map(_is_label_list, labels)):
        raise DataError(f"{path} is not ReaL's list of 50,000 label lists")
    return labels


def _is_label_list(value: object) -> bool:
    return isinstance(value, list) and all(type(label) is int and 0 <= label < 1000 for label in value)
