"""Sources: against os.walk, Pillow, pyarrow, tarfile, scikit-learn's digits and the published counts of known sets."""

import csv
import hashlib
import json
import os
import pickle
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import (
    by_pillow,
    jpeg,
    plant,
    plant_classes,
    png,
    real_data,
    write_parquet,
    write_tar,
)
from shell import Capture, fail, report
from sklearn.datasets import load_digits

from plainvit.config import Config
from plainvit.data import generated, known, tables
from plainvit.data.decode import DataError, ImageError
from plainvit.data.pack import pack
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.data.splits import open_splits
from plainvit.evaluate.inputs import find


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def by_class(source: Source) -> list[tuple[str, str]]:
    return [(source.name(i), source.classes[source.labels[i]]) for i in range(len(source))]


def catch_error(spec: Path | str, split: str = "train", **options: Any) -> str:
    """The one line of a DataError."""
    with pytest.raises(DataError) as caught:
        open_source(str(spec), split, **options)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


# A folder of class folders --------------------------------------------------------------------------------------------


def test_class_folders_are_labels(tmp_path: Path) -> None:
    root = plant_classes(tmp_path, {"dog": 2, "ant": 3, "cat": 1})
    source = open_source(str(root))
    assert source.classes == ("ant", "cat", "dog")
    assert names(source) == ["ant/0.png", "ant/1.png", "ant/2.png", "cat/0.png", "dog/0.png", "dog/1.png"]
    assert source.labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert (source.spec, source.split) == (str(root), "train")
    for index, name in enumerate(names(source)):
        data = (root / name).read_bytes()
        assert source.read(index) == data
        assert np.array_equal(source.image(index), by_pillow(data))
    with pytest.raises(MissingSplitError):
        open_source(str(root), "val")


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [
        ("train", "val", "test"),
        ("training", "validation", "testing"),
        ("trainval", "valid", "test"),
        ("train", "dev", "test"),
    ],
)
def test_split_folders_have_synonyms(tmp_path: Path, train: str, val: str, test: str) -> None:
    for number, (part, count) in enumerate(((train, 3), (val, 2), (test, 1))):
        plant_classes(tmp_path / part, {"a": count, "b": count}, start=100 * number)
    found = {split: open_source(str(tmp_path), split) for split in ("train", "val", "test")}
    assert {split: len(source) for split, source in found.items()} == {"train": 6, "val": 4, "test": 2}
    for part, source in zip((train, val, test), found.values(), strict=True):
        assert source.classes == ("a", "b")
        assert source.read(0) == (tmp_path / part / "a" / "0.png").read_bytes()


def test_nested_folders_belong_to_their_class(tmp_path: Path) -> None:
    plant(tmp_path, {"a/x/y/1.png": png(1), "a/2.png": png(2), "b/z/3.png": png(3)})
    assert by_class(open_source(str(tmp_path))) == [("a/2.png", "a"), ("a/x/y/1.png", "a"), ("b/z/3.png", "b")]


def test_hidden_and_other_files_are_skipped(tmp_path: Path) -> None:
    good = {"a/1.png": png(1), "a/2.JPG": jpeg(2), "a/3.Jpeg": jpeg(3)}
    passed = {
        name: png() for name in ("a/.hidden.png", ".git/a.png", "a/.cache/b.png", "a/notes.txt", "a/Thumbs.db", "c.png")
    }
    assert names(open_source(str(plant(tmp_path, good | passed)))) == list(good)


def test_images_of_unsupported_formats_are_counted_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    """As labels in a list are. One name that is no number, and they are in the order of text."""
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


@pytest.mark.parametrize("verb", ["info", "check", "pack"])
def test_a_class_missing_in_train_is_a_data_error(tmp_path: Path, capsys: Capture, verb: str) -> None:
    plant_classes(tmp_path / "set" / "train", {"a": 1, "b": 1})
    plant_classes(tmp_path / "set" / "val", {"a": 1, "zebra": 1}, start=10)
    target = [tmp_path / "packed"] if verb == "pack" else []
    assert "'zebra'" in fail(capsys, "data", verb, tmp_path / "set", *target)


def test_a_class_missing_in_val_keeps_the_other_labels(tmp_path: Path) -> None:
    plant_classes(tmp_path / "train", {"a": 1, "b": 1, "c": 1})
    plant_classes(tmp_path / "val", {"c": 2}, start=10)
    source = open_source(str(tmp_path), "val")
    assert source.classes == ("a", "b", "c")
    assert source.labels.tolist() == [2, 2]


# Lists ----------------------------------------------------------------------------------------------------------------

ROWS = [("x/1.png", "cat", "train"), ("2.png", "ant", "train"), ("3.png", "cat", "val"), ("4.png", "bee", "test")]


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
    rows = [("1.png", "a"), ("2.png", "b")]
    source = open_source(str(write_list(tmp_path / "my list.csv", rows, (file, label))))
    assert by_class(source) == rows


def test_a_list_without_splits_is_for_training(tmp_path: Path) -> None:
    """Given as val too, the same images would be trained on and tested on."""
    path = write_list(tmp_path / "labels.csv", [("1.png", "a"), ("2.png", "b")], ("file", "label"))
    assert len(open_source(str(path))) == 2
    catch_error(path, "val")
    catch_error(path, "test")


def test_classes_txt_fixes_the_order(tmp_path: Path) -> None:
    path = write_list(tmp_path / "labels.csv", ROWS)
    (tmp_path / "classes.txt").write_text("zebra\ncat\nbee\nant\n")
    source = open_source(str(path))
    assert source.classes == ("zebra", "cat", "bee", "ant")
    assert source.labels.tolist() == [1, 3]


def test_integer_labels_are_in_numeric_order(tmp_path: Path) -> None:
    """As words they would sort 0, 1, 10, 11, 2: the labels would change silently."""
    rows = [(f"{number}.png", number) for number in range(12)]
    source = open_source(str(write_list(tmp_path / "labels.csv", rows, ("file", "label"))))
    assert source.classes == tuple(map(str, range(12)))
    assert source.labels.tolist() == list(range(12))


def test_an_unknown_label_is_reported_with_its_line(tmp_path: Path) -> None:
    path = write_list(tmp_path / "labels.csv", ROWS)
    (tmp_path / "classes.txt").write_text("ant\ncat\n")
    message = catch_error(path, "test")
    assert "'bee'" in message
    assert "line 5:" in message


def test_a_list_exported_by_a_spreadsheet(tmp_path: Path) -> None:
    """With a byte order mark, semicolon-free, CRLF and quoted cells."""
    plant(tmp_path, {"a,b.png": png(1)})
    (tmp_path / "labels.csv").write_bytes(b'\xef\xbb\xbffile,label\r\n"a,b.png","new\nline"\r\n')
    assert by_class(open_source(str(tmp_path))) == [("a,b.png", "new\nline")]


# Parquet --------------------------------------------------------------------------------------------------------------

NAMES = ["ant", "bee", "cat"]


def shard(path: Path, start: int, count: int, **options: Any) -> list[bytes]:
    images = [png(start + number) for number in range(count)]
    options = {"names": NAMES, "labels": [number % 3 for number in range(start, start + count)], **options}
    write_parquet(path, images, **options)
    return images


@pytest.mark.parametrize(("struct", "memory"), [(True, 2**30), (False, 0)])
def test_parquet_equals_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, struct: bool, memory: int) -> None:
    """Held in memory, and read group by group as a larger set is."""
    monkeypatch.setattr(tables, "IN_MEMORY", memory)
    images = shard(tmp_path / "train-00.parquet", 0, 40, struct=struct, group=3)
    images += shard(tmp_path / "train-01.parquet", 40, 25, struct=struct, group=7)
    source = open_source(str(tmp_path))
    assert len(source) == 65
    assert source.classes == ("ant", "bee", "cat")
    assert source.labels.tolist() == [number % 3 for number in range(65)]
    for index in np.random.default_rng(0).permutation(65).tolist() * 2:
        assert source.read(index) == images[index]
    assert names(source) == [
        *(f"train-00.parquet#{i}" for i in range(40)),
        *(f"train-01.parquet#{i}" for i in range(25)),
    ]
    assert np.array_equal(source.image(41), by_pillow(images[41]))


@pytest.mark.parametrize("columns", [("img", "label"), ("image", "labels"), ("img", "fine_label"), ("jpg", "cls")])
def test_parquet_columns_have_synonyms(tmp_path: Path, columns: tuple[str, str]) -> None:
    images = shard(tmp_path / "train.parquet", 0, 4, columns=columns)
    source = open_source(str(tmp_path))
    assert [source.read(i) for i in range(4)] == images
    assert source.classes == ("ant", "bee", "cat")
    assert source.labels.tolist() == [0, 1, 2, 0]


LAYOUTS = {
    "flat": "{split}-00.parquet",
    "data": "data/{split}-00000-of-00001.parquet",
    "folders": "{split}/0000.parquet",
    "config": "default/{split}/0000.parquet",
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_hub_layouts_are_recognized(tmp_path: Path, layout: str) -> None:
    """`config/split/0000.parquet` is how the hub's own conversion (refs/convert/parquet) lies."""
    made = {
        split: shard(tmp_path / layout.format(split=word), 10 * number, 3)
        for number, (split, word) in enumerate({"train": "train", "val": "validation", "test": "test"}.items())
    }
    for split, images in made.items():
        source = open_source(str(tmp_path), split)
        assert [source.read(i) for i in range(len(source))] == images


def test_shards_without_splits_are_for_training(tmp_path: Path) -> None:
    images = shard(tmp_path / "photos-00.parquet", 0, 3) + shard(tmp_path / "photos-01.parquet", 3, 3)
    source = open_source(str(tmp_path))
    assert [source.read(i) for i in range(6)] == images
    catch_error(tmp_path, "val")


@pytest.mark.parametrize(
    ("labels", "class_names", "expected"),
    [([0, 1, 2], (), ("0", "1", "2")), (None, (), ()), ([-1, 2, -1], NAMES, tuple(NAMES))],
)
def test_parquet_labels_without_names_or_values(
    tmp_path: Path, labels: list[int] | None, class_names: Sequence[str], expected: tuple[str, ...]
) -> None:
    shard(tmp_path / "train.parquet", 0, 3, labels=labels, names=class_names)
    source = open_source(str(tmp_path))
    assert source.labels.tolist() == (labels or [-1] * 3)
    assert source.classes == expected


@pytest.mark.parametrize(
    ("which", "share"), [("train-00.parquet", 0), ("train-01.parquet", 0.5), ("train-00.parquet", 0.99)]
)
def test_a_truncated_parquet_file_is_rejected(tmp_path: Path, which: str, share: float) -> None:
    shard(tmp_path / "train-00.parquet", 0, 30)
    shard(tmp_path / "train-01.parquet", 30, 30)
    data = (tmp_path / which).read_bytes()
    (tmp_path / which).write_bytes(data[: int(len(data) * share)])
    assert which in catch_error(tmp_path)


def planted_sources(tmp_path: Path) -> dict[str, Source]:
    plant_classes(tmp_path / "folder", {"a": 3, "b": 2})
    shard(tmp_path / "parquet" / "train-00.parquet", 0, 9, group=4)
    pack(str(tmp_path / "folder"), tmp_path / "tars")
    return {name: open_source(str(tmp_path / name)) for name in ("folder", "parquet", "tars")}


@pytest.mark.parametrize("kind", ["folder", "parquet", "tars"])
def test_sources_can_be_pickled(tmp_path: Path, kind: str) -> None:
    source = planted_sources(tmp_path)[kind]
    copy = pickle.loads(pickle.dumps(source))
    assert (copy.spec, copy.split, copy.classes) == (source.spec, source.split, source.classes)
    assert copy.labels.tolist() == source.labels.tolist()
    assert names(copy) == names(source)
    assert [copy.read(index) for index in range(len(copy))] == [source.read(index) for index in range(len(copy))]


def test_only_parquet_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = shard(tmp_path / "data" / "train-00000-of-00001.parquet", 0, 3)
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = open_source("hf:org/photos@v1")
    assert [source.read(i) for i in range(3)] == images
    assert [name for name, _ in asked] == ["org/photos"]
    assert (asked[0][1]["repo_type"], asked[0][1]["revision"]) == ("dataset", "v1")
    assert all(pattern.endswith("*.parquet") for pattern in asked[0][1]["allow_patterns"])


# Tar shards -----------------------------------------------------------------------------------------------------------


def plain_members(count: int, label: Callable[[int], tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [member for i in range(count) for member in ((f"{i:04}.png", png(i)), label(i))]


LABELS = {
    "cls": lambda i: (f"{i:04}.cls", str(i % 3).encode()),
    "cls with a line end": lambda i: (f"{i:04}.cls", f"{i % 3}\n".encode()),
    "json": lambda i: (f"{i:04}.json", json.dumps({"label": i % 3, "caption": "x"}).encode()),
}


@pytest.mark.parametrize("kind", LABELS)
def test_plain_webdataset_shards(tmp_path: Path, kind: str) -> None:
    members = plain_members(12, LABELS[kind])
    write_tar(tmp_path / "train-000000.tar", members[:14])
    write_tar(tmp_path / "train-000001.tar", members[14:])
    source = open_source(str(tmp_path))
    assert source.labels.tolist() == [i % 3 for i in range(12)]
    assert source.classes == ("0", "1", "2")
    assert [source.read(i) for i in range(12)] == [png(i) for i in range(12)]


def test_images_of_a_tar_are_matched_with_labels_by_key(tmp_path: Path) -> None:
    """The key is everything up to the first dot after the last slash, as in WebDataset."""
    members = [("a.cls", b"3"), ("a.png", png(1)), ("a.seg.png", png(2)), ("a.txt", b"hello"), ("b.JPG", jpeg(3))]
    members += [("v1.0/a.png", png(4)), ("v1.0/a.cls", b"0"), ("v2.0/a.png", png(5)), ("v2.0/a.cls", b"1")]
    source = open_source(str(write_tar(tmp_path / "train.tar", members).parent))
    assert [source.read(i) for i in range(len(source))] == [png(1), jpeg(3), png(4), png(5)]
    assert source.labels.tolist() == [3, -1, 0, 1]


def cut_places(path: Path) -> dict[str, int]:
    with tarfile.open(path) as archive:
        members = list(archive)
    fifth = members[4]
    return {
        "in an image": fifth.offset_data + 40,
        "before an image": fifth.offset_data,
        "in a header": fifth.offset + 100,
        "one byte into a header": fifth.offset + 1,
        "between members": fifth.offset,
        "in the last label": members[-1].offset_data,
    }


@pytest.mark.parametrize(
    "place",
    ["in an image", "before an image", "in a header", "one byte into a header", "between members", "in the last label"],
)
def test_a_truncated_or_damaged_tar_is_rejected(tmp_path: Path, place: str) -> None:
    path = write_tar(tmp_path / "train-0.tar", plain_members(6, LABELS["cls"]))
    data, position = bytearray(path.read_bytes()), cut_places(path)[place]
    path.write_bytes(data[:position])
    assert "train-0.tar" in catch_error(tmp_path)
    if place == "between members":
        data[position + 10] ^= 0xFF  # a damaged header
        path.write_bytes(data)
        assert "train-0.tar" in catch_error(tmp_path)


def test_links_pipes_and_devices_in_a_tar_are_unreadable(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("good.png", png())])
    kinds = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
    with tarfile.open(path, "a") as file:
        for number, kind in enumerate(kinds):
            member = tarfile.TarInfo(f"{number}.png")
            member.type, member.linkname = kind, "/etc/passwd" if number else "good.png"
            file.addfile(member)
    source = open_source(str(tmp_path))
    assert source.read(0) == png()
    for index in range(1, 5):
        with pytest.raises(ImageError):
            source.read(index)


def test_a_huge_tar_header_is_not_read(tmp_path: Path) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 6 * 2**30
    (tmp_path / "x.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT))
    assert "6,442,450,944" in catch_error(tmp_path)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    plant(tmp_path / "set", {f"{'abc'[i % 3]}/{i:02}.jpg": jpeg(i) for i in range(12)})
    pack(str(tmp_path / "set"), tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_truncated_or_missing_packed_shard_is_rejected(packed: Path, share: float) -> None:
    last = pq.read_table(packed / "index.parquet").to_pylist()[-1]
    shard_file = packed / last["shard"]
    shard_file.write_bytes(shard_file.read_bytes()[: int((last["offset"] + last["length"]) * share)])
    assert last["shard"] in catch_error(packed)
    shard_file.unlink()
    assert last["shard"] in catch_error(packed)


def test_a_changed_byte_fails_its_checksum(packed: Path) -> None:
    data = bytearray((packed / "train-00000.tar").read_bytes())
    index = pq.read_table(packed / "index.parquet").to_pylist()
    data[index[3]["offset"] + index[3]["length"] // 2] ^= 1
    (packed / "train-00000.tar").write_bytes(data)
    source = open_source(str(packed))
    with pytest.raises(DataError, match=f"{index[3]['name']}.*checksum"):
        source.read(3)
    assert source.read(4) == jpeg(1)  # the fifth image is the first of class b


@pytest.mark.parametrize("label", [3, 99, -2])
def test_an_index_with_labels_outside_its_classes(packed: Path, label: int) -> None:
    table = pq.read_table(packed / "index.parquet")
    place = table.column_names.index("label")
    labels = pa.array([label, *table.column("label").to_pylist()[1:]])
    pq.write_table(table.set_column(place, "label", labels), packed / "index.parquet")
    catch_error(packed)


# Invalid data ---------------------------------------------------------------------------------------------------------


def write_table(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


LABELS_CSV = (b"1,cat\n2,dog\n", b"file\n1.png\n", b"file,label\n1.png\n", b"file,label\n,cat\n", b"", b"file,label\n")
LABELS_CSV += (b"file,label\n/etc/passwd,a\n", b"file,label\na\0.png,a\n", b"file,label\n1.png,caf\xe9\n")
LABELS_CSV += (b"file,label\n../1.png,a\n", b"file,label\na/../../1.png,a\n")
PARQUET_LABELS = ([0, 1, 3], [0, -2, 1], [2**40, 0, 1], ["ant", None, "cat"], [0, None, 1], [[0], [1], [2]], [0.5] * 3)
INVALID: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "no images": lambda root: (root / "a").mkdir(),
    "no classes": lambda root: plant(root, {"1.png": png()}),
    "no training images": lambda root: [plant_classes(root / split, {"a": 1}) for split in ("val", "test")],
    "a class twice": lambda root: plant(root, {"labels.csv": b"1.png,ant\n", "classes.txt": b"ant\nant\n"}),
    "classes not in UTF-8": lambda root: plant(root, {"labels.csv": b"1.png,ant\n", "classes.txt": b"ant\n\xff\n"}),
    **{f"csv {text!r}": lambda root, text=text: plant(root, {"labels.csv": text}) for text in LABELS_CSV},
    **{
        f"tar {len(data)}": lambda root, data=data: plant(root, {"x.tar": data})
        for data in (b"", b"no" * 100, bytes(600))
    },
    **{f"{one}": lambda root, one=one: shard(root / "train.parquet", 0, 3, labels=one) for one in PARQUET_LABELS},
    "other class names": lambda root: [shard(root / f"train-{n}.parquet", 0, 3, names=n) for n in ("abc", "bac")],
    "other columns": lambda root: [
        shard(root / f"train-{n}.parquet", 0, 3, columns=(n, "label")) for n in ("img", "jpg")
    ],
    "several configurations": lambda root: [shard(root / n / "train-00.parquet", 0, 3) for n in ("one", "two")],
    "no image column": lambda root: write_table(root / "train.parquet", text=["a", "b"], label=[0, 1]),
    "images that are numbers": lambda root: write_table(root / "train.parquet", image=[1, 2], label=[0, 1]),
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_data_is_a_data_error_of_one_line(tmp_path: Path, kind: str) -> None:
    INVALID[kind](tmp_path)
    catch_error(tmp_path)


# Known sets -----------------------------------------------------------------------------------------------------------

COUNTS = {
    ("cifar10", "train"): (50_000, 10),
    ("cifar10", "test"): (10_000, 10),
    ("tiny-imagenet", "val"): (10_000, 200),
    ("tiny-imagenet", "test"): (10_000, 200),
    ("oxford-pets", "train"): (3_680, 37),
    ("oxford-pets", "test"): (3_669, 37),
    ("flowers102", "train"): (1_020, 102),
    ("flowers102", "val"): (1_020, 102),
    ("flowers102", "test"): (6_149, 102),
}


@pytest.mark.parametrize(("name", "split"), COUNTS)
def test_known_sets_have_their_published_size(name: str, split: str) -> None:
    source = open_source(name, split, data_root=real_data())
    assert (len(source), len(source.classes)) == COUNTS[name, split]
    assert np.array_equal(np.unique(source.labels), np.arange(len(source.classes)))
    assert source.image(len(source) - 1).ndim == 3


def test_a_known_set_needs_its_root(tmp_path: Path) -> None:
    assert "--data-root DIR with the images in DIR/cifar10/{train,test}/CLASS" in catch_error("cifar10")
    assert str(tmp_path / "cifar10/{train,test}/CLASS") in catch_error("cifar10", data_root=tmp_path)


def test_a_wrong_number_of_classes_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "cifar10" / "train-00.parquet", [png(i) for i in range(12)], list(range(12)))
    message = catch_error("cifar10", data_root=tmp_path)
    assert "10" in message
    assert "12" in message


@pytest.mark.parametrize("name", ["cifar10", "flowers102", "imagenet-a"])
def test_known_sets_are_read_from_the_documented_folders(name: str, tmp_path: Path) -> None:
    """As the errors and docs/data.md draw them."""
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    assert all(f"DIR/{known.describe_layout(one)}" in page for one in (*known.SETS,)[:12])
    one, splits = known.SETS[name], re.search(r"\{(.*)\}", known.describe_layout(name))
    for split in splits[1].split(",") if splits else ("",):
        place = known.describe_layout(name).replace(splits[0] if splits else "?", split).removesuffix("/CLASS")
        plant_classes(tmp_path / place, {f"{k:03d}": 1 + (split == "test") for k in range(one.classes)})
    assert len(open_source(name, "test", data_root=tmp_path)) == one.classes * (1 + bool(splits))


def test_imagenet_tests_on_its_validation_set(tmp_path: Path) -> None:
    for split, count in (("train", 1000), ("val", 1001)):
        images = [png(0, 2, 2)] * count
        write_parquet(tmp_path / "imagenet" / f"{split}-00.parquet", images, [i % 1000 for i in range(count)])
    assert len(open_source("imagenet", "test", data_root=tmp_path)) == 1001
    assert len(open_source("imagenet", "val", data_root=tmp_path)) == 1001
    assert len(open_source("imagenet-real", "val", data_root=tmp_path)) == 1001


def test_real_labels_have_the_published_counts() -> None:
    """Counted for facts/paper.md from the published file: 3,163 lists are empty, 7,443 hold several labels."""
    labels = known.real_labels(real_data())
    assert len(labels) == 50_000
    assert sum(not one for one in labels) == 3_163
    assert sum(len(one) > 1 for one in labels) == 7_443
    assert {label for one in labels for label in one} == set(range(1000))


LAST = ("", "not json", "{}", "null", [[1], [1]], [5], [[1000]], [[-1]], [["a"]], [[0.5]])  # in place of the last list


@pytest.mark.parametrize("last", LAST, ids=range(len(LAST)))
def test_an_invalid_or_missing_real_json_is_rejected(tmp_path: Path, last: Any) -> None:
    text = last if isinstance(last, str) else json.dumps([[1]] * 49_999 + last)
    plant(tmp_path, {"imagenet-real/real.json": text.encode()})
    with pytest.raises(DataError, match=r"real\.json"):
        known.real_labels(tmp_path)
    with pytest.raises(DataError, match=r"real\.json"):
        known.real_labels(tmp_path / "nowhere")


# digits ---------------------------------------------------------------------------------------------------------------


def test_digits_equal_those_of_scikit_learn() -> None:
    reference = load_digits()
    grey = np.round(reference.images * 255 / 16).astype(np.uint8)
    numbers = np.arange(1797)
    for split, chosen in (("train", numbers % 5 != 0), ("test", numbers % 5 == 0)):
        source = open_source("digits", split)
        found = np.stack([source.image(i) for i in range(len(source))])
        assert np.array_equal(found, np.repeat(grey[chosen][..., None], 3, -1))
        assert np.array_equal(source.labels, reference.target[chosen])
        assert source.classes == tuple("0123456789")


def test_digits_splits_are_disjoint() -> None:
    found = {split: set(names(open_source("digits", split))) for split in ("train", "test")}
    assert (len(found["train"]), len(found["test"])) == (1437, 360)
    assert not found["train"] & found["test"]
    with pytest.raises(MissingSplitError, match="--holdout"):  # a validation split inside train would flatter a run
        open_source("digits", "val")


# shapes ---------------------------------------------------------------------------------------------------------------


def digests(source: Source, indices: Sequence[int]) -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(source.read(i)).tobytes()).hexdigest() for i in indices]


# Frozen: a new NumPy must not change a set that results were reported on
GOLDEN_SHAPES = [
    "a5f3ec26ab8b7d5a4dc1600967b99c8aa51751423f84e33b095bfac01bf5dfd0",
    "1ee3f64e29ca5cf71358fc9dd5590c3fd4aa768015f3f322c91f0e00788d7c94",
]


def test_shapes_equal_golden_hashes() -> None:
    assert digests(open_source("shapes:size=32"), [0, 1234]) == GOLDEN_SHAPES


def test_shapes_do_not_depend_on_the_count() -> None:
    few, many = open_source("shapes:size=16,count=30"), open_source("shapes:size=16,count=100000")
    assert digests(few, range(30)) == digests(many, range(30))
    assert few.labels.tolist() == many.labels[:30].tolist()
    every = {
        digest
        for split in ("train", "val", "test")
        for digest in digests(open_source("shapes:size=16", split), range(30))
    }
    assert len(every) == 90


def test_labels_of_shapes_are_balanced() -> None:
    for classes in (1, 3, 10):
        source = open_source(f"shapes:size=8,count=90,classes={classes}")
        assert np.bincount(source.labels).tolist() == [90 // classes] * classes
        assert len(source.classes) == classes
    assert (len(open_source("shapes")), len(open_source("shapes", "test"))) == (10_000, 2_000)


def test_masks_have_the_stated_position_and_area() -> None:
    """Its pixels are within reach of the centre, its area is the shape's, and circles are filled to their radius."""
    source = generated.shapes("train", "size=96,count=60")
    rows, columns = np.mgrid[:96, :96] + 0.5
    for index in range(60):
        pixels, mask, (row, column, radius) = source.draw(index)
        distance = np.hypot(rows - row, columns - column) / radius
        assert 0.18 * 96 <= radius <= 0.32 * 96
        assert distance[mask].max() < 1.15
        assert 0.2 < mask.sum() / (np.pi * radius**2) < 1.05
        assert np.array_equal(pixels, source.read(index))
        if source.classes[source.labels[index]] == "circle":
            assert np.array_equal(mask, distance < 1)


@pytest.mark.parametrize(
    "options", ["sise=64", "size=x", "size=", "size=7", "size=4097", "classes=11", "classes=0", "count=0", "size=-8"]
)
def test_invalid_options_of_shapes_are_rejected(options: str) -> None:
    with pytest.raises(ValueError, match="shapes") as caught:
        open_source(f"shapes:{options}")
    assert not isinstance(caught.value, DataError)


# Leaving out, and fingerprints ----------------------------------------------------------------------------------------


def test_exclude_by_name(tmp_path: Path) -> None:
    root = plant_classes(tmp_path / "set", {"a": 3, "b": 2})
    (tmp_path / "bad.txt").write_text("a/1.png\n\nb/0.png\nnot/there.png\n")
    source = open_source(str(root), exclude=tmp_path / "bad.txt")
    assert by_class(source) == [("a/0.png", "a"), ("a/2.png", "a"), ("b/1.png", "b")]
    assert source.read(2) == (root / "b/1.png").read_bytes()
    assert (source.spec, source.split, source.classes) == (str(root), "train", ("a", "b"))


def test_a_finding_excludes_images_of_its_split_only(tmp_path: Path) -> None:
    """train/a/0.png and val/a/0.png have the same name within their splits."""
    plant_classes(tmp_path / "set" / "train", {"a": 2})
    plant_classes(tmp_path / "set" / "val", {"a": 2}, start=10)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"split": "val", "name": "a/0.png", "problem": "unreadable"}))
    spec = str(tmp_path / "set")
    assert names(open_source(spec, "val", exclude=tmp_path / "bad.jsonl")) == ["a/1.png"]
    assert names(open_source(spec, "train", exclude=tmp_path / "bad.jsonl")) == ["a/0.png", "a/1.png"]


def test_a_finding_in_val_also_excludes_test_when_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out of one of the two alone, they would pass for two sets, and the run be validated on its test images."""
    monkeypatch.setitem(known.SETS, "small", known.Known(2, ("train", "val"), "test is the validation set"))
    plant_classes(tmp_path / "small" / "train", {"a": 10, "b": 1})
    plant_classes(tmp_path / "small" / "val", {"a": 4}, start=20)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"split": "val", "name": "a/0.png", "problem": "unreadable"}))
    config = Config(data="small", data_root=str(tmp_path), exclude=str(tmp_path / "bad.jsonl"), holdout=0.2)
    splits = open_splits(config)
    assert splits.val
    assert splits.test
    assert (len(splits.train) + len(splits.val), names(splits.test)) == (11, ["a/1.png", "a/2.png", "a/3.png"])


def test_val_and_test_with_equal_names_are_both_used(tmp_path: Path) -> None:
    """val/a/0.png and test/a/0.png are two images; only where they are one is a part of train held out instead."""
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
    assert "bad.jsonl" in catch_error(root, exclude=tmp_path / "bad.jsonl")


def test_fingerprint_ignores_location_and_other_files(tmp_path: Path) -> None:
    first = open_source(str(plant_classes(tmp_path / "one", {"a": 3, "b": 2}))).fingerprint()
    assert open_source(str(tmp_path / "one")).fingerprint() == first
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert open_source(str(tmp_path / "two")).fingerprint() == first
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
