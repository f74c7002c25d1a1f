"""Folders of images: class folders, split folders, and the choice between them, lists, tables and tar shards.

photos/beagle/1.jpg             a folder per class
photos/train/beagle/1.jpg       the same in a folder per split
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from plainvit.data.decode import DataError
from plainvit.data.sources import (
    SPLITS,
    Files,
    MissingSplitError,
    Source,
    image_files,
    is_folder,
    log,
    warn_unread,
)


def open_folder(folder: Path, split: str) -> Source:
    """Open one split of a folder: tables, shards, a list of labels, split folders or class folders."""
    from plainvit.data import lists, shards, tables

    if tables.has_saved(folder):
        return tables.open_saved(folder, split)
    if tables.has_parquet(folder):
        return tables.open_parquet(folder, split)
    if shards.has_tars(folder):
        return shards.open_tars(folder, split)
    image_list = lists.find_list(folder)
    if image_list:
        return lists.open_list(image_list, split)
    found = _find_split_folders(folder)
    if not found and split == "train":
        return _open_class_folders(folder, class_names(folder))
    if split not in found:
        raise MissingSplitError(f"{folder} has no {split} split: no folder {' or '.join(SPLITS[split])}")
    if "train" in found:
        classes = _read_classes(found["train"])
    else:
        classes = order_classes({name for path in found.values() for name in _read_classes(path)})
    image_list = lists.find_list(found[split])
    if image_list:
        return lists.open_list(image_list, split, folder_of=split, classes=classes)
    return _open_class_folders(found[split], classes)


def _find_split_folders(folder: Path) -> dict[str, Path]:
    """The folder of each split. Without train/, only folders with classes inside count: a class may be named dev."""
    found = {name: next((folder / a for a in names if (folder / a).is_dir()), None) for name, names in SPLITS.items()}
    return {name: path for name, path in found.items() if path and (found["train"] or _read_classes(path))}


def _read_classes(folder: Path) -> list[str]:
    """The classes of a split folder, from its list or its class folders."""
    from plainvit.data import lists

    image_list = lists.find_list(folder)
    return lists.list_classes(image_list) if image_list else class_names(folder)


def class_names(folder: Path) -> list[str]:
    """Names of the class folders, in label order."""
    with os.scandir(folder) as entries:
        return order_classes(entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry))


def order_classes(names: Iterable[str]) -> list[str]:
    """Label order: alphabetical, or numeric if all names are integers. ImageNet's is that of its sorted WordNet ids."""
    found = list(names)
    if all(len(name) < 19 and name.removeprefix("-").isdecimal() for name in found):
        return sorted(found, key=lambda name: (int(name), name))
    return sorted(found)


def _open_class_folders(folder: Path, classes: Sequence[str]) -> Source:
    unknown = sorted(set(class_names(folder)).difference(classes))
    if unknown:
        raise DataError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
    if not classes:
        layout = "put the images of each class into a folder of its own, such as beagle/1.jpg"
        raise DataError(f"{folder} has no class folders and no labels.csv or labels.jsonl: {layout}")
    names: list[str] = []
    counts: list[int] = []
    unread: list[str] = []
    irregular = _find_broken_links(folder)
    for name in classes:
        exists = (folder / name).is_dir()
        files = sorted(image_files(folder / name, name, unread=unread, irregular=irregular)) if exists else []
        names += files
        counts.append(len(files))
    warn_unread(folder, unread)
    if irregular:
        problem = "%s: %d unreadable entries (broken links, pipes or devices): %s"
        log.warning(problem, folder, len(irregular), ", ".join(irregular[:3]))
    return Files(folder, names, np.repeat(np.arange(len(classes)), counts), classes)


def _find_broken_links(folder: Path) -> list[str]:
    """Broken links among the class folders."""
    with os.scandir(folder) as entries:
        links = [entry for entry in entries if entry.is_symlink() and not entry.name.startswith(".")]
    return [entry.name for entry in links if not Path(entry.path).exists()]
