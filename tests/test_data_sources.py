"""Class folders, lists, exclusion and fingerprints, compared with the files on disk."""

import csv
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import by_pillow, catch_error, jpeg, names, plant, plant_classes, png, write_parquet, write_tar
from shell import Capture, report

from plainvit.config import Config
from plainvit.data import known
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.data.splits import open_splits
from plainvit.evaluate.inputs import find


def by_class(source: Source) -> list[tuple[str, str]]:
    return [(source.name(i), source.classes[source.labels[i]]) for i in range(len(source))]


# Class folders --------------------------------------------------------------------------------------------------------


def test_class_folders_are_labels(tmp_path: Path) -> None:
    root = plant(plant_classes(tmp_path, {"dog": 2, "cat": 1}), {"ant/x/y/1.png": png(7), "ant/2.png": png(8)})
    source = open_source(str(root))
    assert source.classes == ("ant", "cat", "dog")
    assert names(source) == ["ant/2.png", "ant/x/y/1.png", "cat/0.png", "dog/0.png", "dog/1.png"]
    assert source.labels.tolist() == [0, 0, 1, 2, 2]
    assert (source.spec, source.split) == (str(root), "train")
    for index, name in enumerate(names(source)):
        data = (root / name).read_bytes()
        assert source.read(index) == data
        assert np.array_equal(source.image(index), by_pillow(data))
    with pytest.raises(MissingSplitError):
        open_source(str(root), "val")


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("train", "val", "test"), ("training", "validation", "testing"), ("trainval", "valid", "test")],
)
def test_split_folders_have_synonyms(tmp_path: Path, train: str, val: str, test: str) -> None:
    for number, (part, count) in enumerate(((train, 3), (val, 2), (test, 1))):
        plant_classes(tmp_path / part, {"a": count, "b": count}, start=100 * number)
    found = {split: open_source(str(tmp_path), split) for split in ("train", "val", "test")}
    assert {split: len(source) for split, source in found.items()} == {"train": 6, "val": 4, "test": 2}
    for part, source in zip((train, val, test), found.values(), strict=True):
        assert source.classes == ("a", "b")
        assert source.read(0) == (tmp_path / part / "a" / "0.png").read_bytes()


def test_hidden_and_other_files_are_skipped(tmp_path: Path) -> None:
    good = {"a/1.png": png(1), "a/2.JPG": jpeg(2), "a/3.Jpeg": jpeg(3)}
    skipped = ("a/.hidden.png", ".git/a.png", "a/.cache/b.png", "a/notes.txt", "a/Thumbs.db", "c.png")
    assert names(open_source(str(plant(tmp_path, good | dict.fromkeys(skipped, png()))))) == list(good)


def test_a_tar_next_to_class_folders_is_not_read(tmp_path: Path) -> None:
    """The download that the images were unpacked from."""
    plant_classes(tmp_path / "train", {"a": 1, "b": 1})
    write_tar(tmp_path / "images.tar", [("c.png", png(5)), ("c.cls", b"0")])
    assert names(open_source(str(tmp_path))) == ["a/0.png", "b/0.png"]


def test_a_warning_counts_images_of_unsupported_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(tmp_path, {"a/1.png": png(1), "b/2.jpg": jpeg(2), "a/notes.txt": b"", "a/.x.heic": b""})
    assert len(open_source(str(tmp_path))) == 2
    assert not caplog.text
    plant(tmp_path, {"a/IMG_1.HEIC": b"", "a/deep/IMG_2.heic": b"", "b/x.avif": b""})
    assert len(open_source(str(tmp_path))) == 2
    assert "3 files skipped: .avif, .heic" in caplog.text
    for word in (f"{tmp_path}/b", f"{tmp_path}/b/*"):
        caplog.clear()
        assert len(find([word])) == 1
        assert f"{word}: 1 files skipped: .avif" in caplog.text


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    root = plant(tmp_path / "set", {"a/1.png": png(1), "b/2.png": png(2)})
    plant(tmp_path / "elsewhere", {"3.png": png(3)})
    (root / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "4.png").symlink_to(tmp_path / "elsewhere" / "3.png")
    (root / "a" / "up").symlink_to("..")
    (root / "a" / "here").symlink_to(".")
    found = names(open_source(str(root)))
    assert {"a/1.png", "a/4.png", "a/linked/3.png", "b/2.png"} <= set(found)
    assert len(found) < 20


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "broken link": lambda path: path.symlink_to("nowhere.jpg"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_broken_links_and_pipes_are_unreadable_images(
    tmp_path: Path, make: Callable[[Path], None], capsys: Capture
) -> None:
    root = plant_classes(tmp_path, {"a": 1, "b": 1})
    make(root / "a" / "x.jpg")
    source = open_source(str(root))
    assert names(source) == ["a/0.png", "a/x.jpg", "b/0.png"]
    with pytest.raises(ImageError):
        source.read(1)
    assert report(capsys, "data", "info", root)["splits"]["train"]["unreadable"] == 1
    found = report(capsys, "data", "check", root, code=3)
    assert [(one["name"], one["problem"]) for one in found] == [("a/x.jpg", "unreadable")]


LONG = "/".join("x" * 240 for _ in range(4)) + "/y"  # 966 bytes: each part is within what a disk allows
STRANGE = ["päö", "日本語", "with space", "new\nline", "tab\tname", "quote'\"", "a,b", "[red]x", "{x}", "%s", "é"]


def test_any_file_name_can_be_read(tmp_path: Path) -> None:
    words = [*STRANGE, os.fsdecode(b"caf\xe9")]
    planted = {f"{word}/{word}.png": png(number) for number, word in enumerate(words)} | {f"a/{LONG}.png": png(99)}
    source = open_source(str(plant(tmp_path, planted)))
    assert source.classes == tuple(sorted([*words, "a"]))
    assert {source.name(i): source.read(i) for i in range(len(source))} == planted
    assert len(source.fingerprint()) == 16


def test_numeric_class_folders_are_in_numeric_order(tmp_path: Path, capsys: Capture) -> None:
    """If one name is not a number, they are in the order of text."""
    root = plant_classes(tmp_path, dict.fromkeys(("10", "2", "0", "1"), 1))
    source = open_source(str(root))
    assert source.classes == ("0", "1", "2", "10")
    assert names(source) == ["0/0.png", "1/0.png", "2/0.png", "10/0.png"]
    assert report(capsys, "data", "info", root)["ordered_as_numbers"] is True
    plant_classes(tmp_path, {"x": 1})
    assert open_source(str(root)).classes == ("0", "1", "10", "2", "x")
    for split in ("train", "test"):
        plant_classes(tmp_path / "split" / split, dict.fromkeys(("10", "9"), 1))
        assert open_source(str(tmp_path / "split"), split).classes == ("9", "10")


def test_a_class_missing_in_train_is_a_data_error(tmp_path: Path) -> None:
    plant_classes(tmp_path / "train", {"a": 1, "b": 1})
    plant_classes(tmp_path / "val", {"a": 1, "zebra": 1}, start=10)
    assert "'zebra'" in catch_error(tmp_path, "val")


def test_a_class_missing_in_val_keeps_the_other_labels(tmp_path: Path) -> None:
    plant_classes(tmp_path / "train", {"a": 1, "b": 1, "c": 1})
    plant_classes(tmp_path / "val", {"c": 2}, start=10)
    source = open_source(str(tmp_path), "val")
    assert source.classes == ("a", "b", "c")
    assert source.labels.tolist() == [2, 2]


# Lists ----------------------------------------------------------------------------------------------------------------

ROWS = [("x/1.png", "cat", "train"), ("2.png", "ant", ""), ("3.png", "cat", "val"), ("4.png", "bee", "test")]


def write_list(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[str] = ("file", "label", "split")) -> Path:
    plant(path.parent, {str(row[0]): png(number) for number, row in enumerate(rows)})
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.mark.parametrize("by_folder", [False, True])
def test_a_list_has_splits(tmp_path: Path, by_folder: bool) -> None:
    path = write_list(tmp_path / "labels.csv", ROWS)
    spec = str(tmp_path if by_folder else path)
    found = {split: open_source(spec, split) for split in ("train", "val", "test")}
    assert {split: by_class(source) for split, source in found.items()} == {
        "train": [("x/1.png", "cat"), ("2.png", "ant")],
        "val": [("3.png", "cat")],
        "test": [("4.png", "bee")],
    }
    assert {source.classes for source in found.values()} == {("ant", "bee", "cat")}  # one order for all splits
    assert found["test"].read(0) == png(3)


@pytest.mark.parametrize(("file", "label"), [("path", "class"), ("image", "label"), ("filename", "class")])
def test_list_columns_have_synonyms(tmp_path: Path, file: str, label: str) -> None:
    """Without a column of splits, all rows are training images, and no others; numbers are in numeric order."""
    rows = [("1.png", "10"), ("2.png", "9")]
    path = write_list(tmp_path / "my list.csv", rows, (file, label))
    assert by_class(open_source(str(path))) == rows
    assert open_source(str(path)).classes == ("9", "10")
    for split in ("val", "test"):
        with pytest.raises(MissingSplitError):
            open_source(str(path), split)


def test_a_list_exported_by_a_spreadsheet(tmp_path: Path) -> None:
    """With a byte order mark, CRLF, quoted cells and an empty one too many."""
    plant(tmp_path, {"a,b.png": png(1)})
    (tmp_path / "labels.csv").write_bytes(b'\xef\xbb\xbffile,label\r\n"a,b.png","new\nline",\r\n')
    assert by_class(open_source(str(tmp_path))) == [("a,b.png", "new\nline")]


# Invalid data ---------------------------------------------------------------------------------------------------------

LABELS_CSV = (
    *(b"1,cat\n2,dog\n", b"1.png,cat\n", b"file\n1.png\n", b"file,label\n1.png\n", b"file,label\n,cat\n", b""),
    *(b"file,label\n", b"file,label\n/etc/passwd,a\n", b"file,label\na\0.png,a\n", b"file,label\n1.png,caf\xe9\n"),
    *(b"file,label\n../1.png,a\n", b"file,label\na/../../1.png,a\n", b"file,label,split\n1.png,a,trian\n"),
    b"file,label\na,b.png,cat\n",  # a comma in a name without quotes
)
TARS = (b"", b"no" * 100, bytes(600))
PARQUET_LABELS = ([0, 1, 3], [0, -2, 1], [2**40, 0, 1], ["ant", None, "cat"], [0, None, 1], [[0], [1], [2]], [0.5] * 3)
IMAGES = [png(seed) for seed in range(3)]


def parquet(path: Path, labels: Sequence[Any] = (0, 1, 2), names: str = "abc", **options: Any) -> None:
    write_parquet(path, IMAGES, list(labels), names=list(names), **options)


INVALID: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "no images": lambda root: (root / "a").mkdir(),
    "no classes": lambda root: plant(root, {"1.png": png()}),
    "no training images": lambda root: [plant_classes(root / split, {"a": 1}) for split in ("val", "test")],
    **{f"csv {text!r}": lambda root, text=text: plant(root, {"labels.csv": text}) for text in LABELS_CSV},
    **{f"tar {len(data)}": lambda root, data=data: plant(root, {"x.tar": data}) for data in TARS},
    **{f"{one}": lambda root, one=one: parquet(root / "train.parquet", one) for one in PARQUET_LABELS},
    "other class names": lambda root: [parquet(root / f"train-{n}.parquet", names=n) for n in ("abc", "bac")],
    "other columns": lambda root: [parquet(root / f"train-{n}.parquet", columns=(n, "label")) for n in ("img", "jpg")],
    "several configurations": lambda root: [parquet(root / n / "train-00.parquet") for n in ("one", "two")],
    "no image column": lambda root: parquet(root / "train.parquet", columns=("text", "label")),
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_data_is_a_data_error_of_one_line(tmp_path: Path, kind: str) -> None:
    INVALID[kind](tmp_path)
    catch_error(tmp_path)


# Exclusion and fingerprints -------------------------------------------------------------------------------------------


def test_images_are_excluded_by_name(tmp_path: Path) -> None:
    """A file that Windows wrote: with a byte order mark and CRLF."""
    root = plant_classes(tmp_path / "set", {"a": 3, "b": 2})
    (tmp_path / "bad.txt").write_bytes(b"\xef\xbb\xbfa/1.png\r\n\r\nb/0.png\r\nnot/there.png\r\n")
    source = open_source(str(root), exclude=tmp_path / "bad.txt")
    assert by_class(source) == [("a/0.png", "a"), ("a/2.png", "a"), ("b/1.png", "b")]
    assert source.read(2) == (root / "b/1.png").read_bytes()
    assert (source.spec, source.split, source.classes) == (str(root), "train", ("a", "b"))


def test_a_warning_says_that_nothing_is_excluded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Full paths are not the names of images."""
    root = plant_classes(tmp_path / "set", {"a": 3, "b": 2})
    (tmp_path / "bad.txt").write_text(f"{root}/a/1.png\n")
    assert len(open_source(str(root), exclude=tmp_path / "bad.txt")) == 5
    assert "--exclude" in caplog.text


def exclude_from_val(tmp_path: Path) -> Path:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"split": "val", "name": "a/0.png", "problem": "unreadable"}))
    return tmp_path / "bad.jsonl"


def test_a_finding_excludes_images_of_its_split_only(tmp_path: Path) -> None:
    """train/a/0.png and val/a/0.png have the same name within their splits."""
    plant_classes(tmp_path / "set" / "train", {"a": 2})
    plant_classes(tmp_path / "set" / "val", {"a": 2}, start=10)
    bad, spec = exclude_from_val(tmp_path), str(tmp_path / "set")
    assert names(open_source(spec, "val", exclude=bad)) == ["a/1.png"]
    assert names(open_source(spec, "train", exclude=bad)) == ["a/0.png", "a/1.png"]


def test_a_finding_in_val_also_excludes_from_test_if_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Excluded from one of the two alone, they would look like two sets, and test images would validate the run."""
    monkeypatch.setitem(known.SETS, "small", known.Known(2, ("train", "val")))
    plant_classes(tmp_path / "small" / "train", {"a": 10, "b": 1})
    plant_classes(tmp_path / "small" / "val", {"a": 4}, start=20)
    exclude = str(exclude_from_val(tmp_path))
    splits = open_splits(Config(data="small", data_root=str(tmp_path), exclude=exclude, holdout=0.2))
    assert splits.val
    assert splits.test
    assert (len(splits.train) + len(splits.val), names(splits.test)) == (11, ["a/1.png", "a/2.png", "a/3.png"])


def test_val_and_test_with_equal_names_are_both_used(tmp_path: Path) -> None:
    """val/a/0.png and test/a/0.png are two images; only if they were one, some of train would be held out instead."""
    for start, split in enumerate(("train", "val", "test")):
        plant_classes(tmp_path / "set" / split, {"a": 5, "b": 1}, start=6 * start)
    splits = open_splits(Config(data=str(tmp_path / "set"), holdout=0.2))
    assert splits.val
    assert (len(splits.train), len(splits.val)) == (6, 6)
    assert splits.val.read(0) == (tmp_path / "set/val/a/0.png").read_bytes()


@pytest.mark.parametrize("text", ["{broken", '{"problem": "x"}', "{}"])
def test_a_malformed_exclude_file_is_rejected(tmp_path: Path, text: str) -> None:
    root = plant_classes(tmp_path / "set", {"a": 2})
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        open_source(str(root), exclude=tmp_path / "bad.jsonl")


def test_fingerprint_ignores_location_and_other_files(tmp_path: Path) -> None:
    first = open_source(str(plant_classes(tmp_path / "one", {"a": 3, "b": 2}))).fingerprint()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    plant(tmp_path / "two", {"a/readme.txt": b"x", "a/.hidden.png": png()})
    assert open_source(str(tmp_path / "two")).fingerprint() == first


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda root: plant(root, {"a/9.png": png(9)}),
    "a file less": lambda root: (root / "a/0.png").unlink(),
    "a file renamed": lambda root: (root / "a/0.png").rename(root / "a/00.png"),
    "a file in another class": lambda root: (root / "a/0.png").rename(root / "b/0x.png"),
    "a class renamed": lambda root: (root / "b").rename(root / "c"),
    "an empty class more": lambda root: (root / "aa").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_files_and_classes(tmp_path: Path, change: str) -> None:
    root = plant_classes(tmp_path, {"a": 3, "b": 2})
    before = open_source(str(root)).fingerprint()
    CHANGES[change](root)
    assert open_source(str(root)).fingerprint() != before
