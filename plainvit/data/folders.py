"""Folders of images: class folders, split folders, and the choice between them, lists, tables and tar shards.

photos/beagle/1.jpg             a folder per class
photos/train/beagle/1.jpg       the same in a folder per split
"""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from plainvit.data.decode import DataError
from plainvit.data.sources import SPLITS, FileSource, MissingSplitError, Source, find_images, is_folder


def open_folder(folder: Path, split: str) -> Source:
    """Open one split of a folder: tables, shards, a list of labels, split folders or class folders."""
    from plainvit.data import lists, shards, tables

    if tables.has_parquet(folder):
        return tables.open_parquet(folder, split)
    if shards.has_tars(folder):
        return shards.open_tars(folder, split)
    if (folder / lists.LIST).is_file():
        return lists.open_list(folder / lists.LIST, split)
    folders = _find_split_folders(folder)
    if not folders and split == "train":
        return _open_class_folders(folder, list_class_folders(folder))
    if split not in folders:
        raise MissingSplitError(f"{folder} has no {split} split: no folder {' or '.join(SPLITS[split])}")
    labeled = [folders["train"]] if "train" in folders else folders.values()
    classes = order_classes({name for path in labeled for name in list_class_folders(path)})
    return _open_class_folders(folders[split], classes)


def _find_split_folders(folder: Path) -> dict[str, Path]:
    """The folder of each split. Without train/, only folders with classes inside count: a class may be named dev."""
    folders: dict[str, Path] = {}
    for split, synonyms in SPLITS.items():
        existing = [folder / name for name in synonyms if (folder / name).is_dir()]
        if existing:
            folders[split] = existing[0]
    if "train" in folders:
        return folders
    return {split: path for split, path in folders.items() if list_class_folders(path)}


def list_class_folders(folder: Path) -> list[str]:
    """Names of the class folders, in label order."""
    with os.scandir(folder) as entries:
        return order_classes(entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry))


def order_classes(names: Iterable[str]) -> list[str]:
    """Label order: alphabetical, or numeric if all names are integers. ImageNet's is that of its sorted WordNet ids."""
    names = list(names)
    if all(len(name) < 19 and name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _open_class_folders(folder: Path, classes: Sequence[str]) -> Source:
    own = list_class_folders(folder)
    if not own:
        layout = "put the images of each class into a folder of its own, such as beagle/1.jpg"
        raise DataError(f"{folder} has no class folders and no labels.csv: {layout}")
    unknown = sorted(set(own).difference(classes))
    if unknown:
        raise DataError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
    by_class: dict[str, list[str]] = {name: [] for name in classes}
    for path in find_images(folder):
        top, is_inside, _ = path.partition("/")
        if is_inside:
            by_class[top].append(path)
    labels = np.repeat(np.arange(len(classes)), [len(names) for names in by_class.values()])
    return FileSource(folder, chain.from_iterable(by_class.values()), labels, classes)
