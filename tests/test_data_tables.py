"""Parquet and tar shards, written by pyarrow and tarfile."""

import pickle
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import catch_error, jpeg, names, plant, plant_classes, png, write_parquet, write_tar

from plainvit.data import tables
from plainvit.data.decode import DataError, ImageError
from plainvit.data.pack import pack
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.evaluate.inputs import find

IMAGES = [png(seed) for seed in range(7)]
WORDS = ["cat", "dog", "cat", "ant", "dog", "cat", "ant"]
NAMES = ["ant", "bee", "cat"]


def shard(path: Path, start: int, count: int, **options: Any) -> list[bytes]:
    images = [png(start + number) for number in range(count)]
    options = {"names": NAMES, "labels": [number % 3 for number in range(start, start + count)], **options}
    write_parquet(path, images, **options)
    return images


def contents(source: Source) -> list[bytes | np.ndarray]:
    return [source.read(index) for index in range(len(source))]


# Parquet --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_equals_its_images(tmp_path: Path, struct: bool) -> None:
    images = shard(tmp_path / "train-00.parquet", 0, 40, struct=struct, group=3)
    images += shard(tmp_path / "train-01.parquet", 40, 25, struct=struct, group=7)
    source = open_source(str(tmp_path))
    assert source.classes == ("ant", "bee", "cat")
    assert source.labels.tolist() == [number % 3 for number in range(65)]
    assert contents(source) == images
    expected = [f"train-0{file}.parquet#{row}" for file, count in enumerate((40, 25)) for row in range(count)]
    assert names(source) == expected


@pytest.mark.parametrize("columns", [("img", "label"), ("image", "labels"), ("img", "fine_label"), ("jpg", "cls")])
def test_parquet_columns_have_synonyms(tmp_path: Path, columns: tuple[str, str]) -> None:
    images = shard(tmp_path / "train.parquet", 0, 4, columns=columns)
    source = open_source(str(tmp_path))
    assert contents(source) == images
    assert source.classes == ("ant", "bee", "cat")
    assert source.labels.tolist() == [0, 1, 2, 0]


LAYOUTS = {
    "flat": "{split}-00.parquet",
    "data": "data/{split}-00000-of-00001.parquet",
    "folders": "{split}/0000.parquet",
    "config": "default/{split}/0000.parquet",  # of the hub's own conversion, refs/convert/parquet
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_hub_layouts_are_recognized(tmp_path: Path, layout: str) -> None:
    words = {"train": "train", "val": "validation", "test": "test"}
    made = {
        split: shard(tmp_path / layout.format(split=word), 10 * number, 3)
        for number, (split, word) in enumerate(words.items())
    }
    for split, images in made.items():
        assert contents(open_source(str(tmp_path), split)) == images


def test_parquet_without_a_split_in_its_name_is_for_training(tmp_path: Path) -> None:
    images = shard(tmp_path / "photos-00.parquet", 0, 3) + shard(tmp_path / "photos-01.parquet", 3, 3)
    assert contents(open_source(str(tmp_path))) == images
    with pytest.raises(MissingSplitError):
        open_source(str(tmp_path), "val")
    named = shard(tmp_path / "train-00.parquet", 10, 3)  # now the others belong to no split
    assert contents(open_source(str(tmp_path))) == named


def test_the_number_of_classes_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "words.parquet", IMAGES[:3], ["ant", "bee", "cat"])
    shard(tmp_path / "numbers.parquet", 0, 3, labels=[0, 1, 2], names=())
    monkeypatch.setattr("plainvit.data.columns.MAX_CLASSES", 3)
    for name in ("words", "numbers"):
        assert len(open_source(str(tmp_path / f"{name}.parquet")).classes) == 3
    monkeypatch.setattr("plainvit.data.columns.MAX_CLASSES", 2)
    for name in ("words", "numbers"):
        with pytest.raises(DataError, match="classes"):
            open_source(str(tmp_path / f"{name}.parquet"))


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


def test_string_labels_use_the_classes_of_the_training_images(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", IMAGES[:3], WORDS[:3])
    write_parquet(tmp_path / "train-1.parquet", IMAGES[3:5], WORDS[3:5])
    write_parquet(tmp_path / "test-0.parquet", IMAGES[5:], WORDS[5:])
    for split, part in {"train": slice(0, 5), "test": slice(5, 7)}.items():
        source = open_source(str(tmp_path), split)
        assert source.classes == ("ant", "cat", "dog")
        assert contents(source) == IMAGES[part]
        assert [source.classes[label] for label in source.labels] == WORDS[part]
    write_parquet(tmp_path / "val-0.parquet", IMAGES[:1], ["bee"])
    with pytest.raises(DataError, match="bee"):
        open_source(str(tmp_path), "val")
    write_parquet(tmp_path / "numbers" / "x.parquet", IMAGES[:3], ["10", "9", "10"])
    assert open_source(str(tmp_path / "numbers")).classes == ("9", "10")


def test_a_single_parquet_file_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "photos.parquet", IMAGES, WORDS)
    assert contents(open_source(str(tmp_path / "photos.parquet"))) == IMAGES
    (tmp_path / "photos.parquet").rename(tmp_path / "test-0.parquet")
    assert len(open_source(str(tmp_path / "test-0.parquet"), "test")) == 7
    assert len(find([str(tmp_path / "test-0.parquet")], split="train")) == 7  # an input need not be of the split
    with pytest.raises(MissingSplitError):
        open_source(str(tmp_path / "test-0.parquet"))


@pytest.mark.parametrize("column", [["a.png"] * 3, [1, 2, 3]])
def test_columns_without_image_bytes_are_rejected(tmp_path: Path, column: list[Any]) -> None:
    pq.write_table(pa.table({"image": column, "label": [0, 1, 0]}), tmp_path / "train.parquet")
    catch_error(tmp_path)
    write_parquet(tmp_path / "train.parquet", [None] * 3, [0, 1, 0])
    with pytest.raises(ImageError, match="path"):
        open_source(str(tmp_path)).read(0)


@pytest.mark.parametrize(("which", "share"), [("train-00.parquet", 0), ("train-01.parquet", 0.5)])
def test_a_truncated_parquet_file_is_rejected(tmp_path: Path, which: str, share: float) -> None:
    shard(tmp_path / "train-00.parquet", 0, 30)
    shard(tmp_path / "train-01.parquet", 30, 30)
    data = (tmp_path / which).read_bytes()
    (tmp_path / which).write_bytes(data[: int(len(data) * share)])
    assert which in catch_error(tmp_path)


def test_a_parquet_error_exits_without_an_abort(tmp_path: Path) -> None:
    """Threads of pyarrow outlive the error: what they use must not need the interpreter, which is ending."""
    pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "train.parquet")
    command = [sys.executable, "-m", "plainvit", "data", "info", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3


def test_only_parquet_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = shard(tmp_path / "data" / "train-00000-of-00001.parquet", 0, 3)
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert contents(open_source("hf:org/photos@v1")) == images
    ((name, options),) = asked
    assert (name, options["repo_type"], options["revision"]) == ("org/photos", "dataset", "v1")
    assert all(pattern.endswith("*.parquet") for pattern in options["allow_patterns"])


# Memory for parquet ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "groups"), [(0, 1), (1500, 1), (100_000, 5)])
def test_a_memory_limit_does_not_change_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, groups: int
) -> None:
    monkeypatch.setattr(tables, "memory_budget", lambda: limit)
    images = [*IMAGES[:3], None, b"", *IMAGES[3:]]
    write_parquet(tmp_path / "train.parquet", images, [0] * 9, group=2)
    source = open_source(str(tmp_path))
    assert isinstance(source, tables.ParquetSource)
    for index in np.random.default_rng(0).integers(0, 9, 60).tolist():
        if images[index]:
            assert source.read(index) == images[index]
        else:
            with pytest.raises(ImageError):
                source.read(index)
        assert len(source._images) == groups


def test_images_larger_than_stated_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet stores equal images once in a dictionary: decoded they take more memory than the file says."""
    monkeypatch.setattr(tables, "MEMORY_LIMIT", 20 * len(IMAGES[0]))
    write_parquet(tmp_path / "train.parquet", [IMAGES[0]] * 50, [0] * 50, group=25)
    source = open_source(str(tmp_path))
    assert isinstance(source, tables.ParquetSource)
    assert source.total_bytes < tables.MEMORY_LIMIT
    assert contents(source) == [IMAGES[0]] * 50
    assert len(source._images) == 1


# Tar shards -----------------------------------------------------------------------------------------------------------


def plain_members(count: int, end: bytes = b"") -> list[tuple[str, bytes]]:
    pairs = (((f"{i:04}.png", png(i)), (f"{i:04}.cls", b"%d" % (i % 3) + end)) for i in range(count))
    return [member for pair in pairs for member in pair]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_plain_webdataset_shards(tmp_path: Path, end: bytes) -> None:
    members = plain_members(12, end)
    write_tar(tmp_path / "train-000000.tar", members[:14])
    write_tar(tmp_path / "train-000001.tar", members[14:])
    source = open_source(str(tmp_path))
    assert source.labels.tolist() == [i % 3 for i in range(12)]
    assert source.classes == ("0", "1", "2")
    assert contents(source) == [png(i) for i in range(12)]


def test_images_of_a_tar_are_matched_with_labels_by_key(tmp_path: Path) -> None:
    """The key is everything up to the first dot after the last slash, as in WebDataset."""
    members = [("a.cls", b"3"), ("a.png", png(1)), ("a.seg.png", png(2)), ("a.txt", b"hello"), ("b.JPG", jpeg(3))]
    members += [("v1.0/a.png", png(4)), ("v1.0/a.cls", b"0"), ("v2.0/a.png", png(5)), ("v2.0/a.cls", b"1")]
    source = open_source(str(write_tar(tmp_path / "train.tar", members).parent))
    assert contents(source) == [png(1), jpeg(3), png(4), png(5)]
    assert source.labels.tolist() == [3, -1, 0, 1]


def test_shards_do_not_stay_open(tmp_path: Path) -> None:
    """ImageNet-21k has 2,048, and a process may open 1,024 files."""
    for number in range(20):
        write_tar(tmp_path / f"{number}.tar", [("a.png", png(number))])
    source = open_source(str(tmp_path))
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert len(set(contents(source))) == 20
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before


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
    path = write_tar(tmp_path / "train-0.tar", plain_members(6))
    data, position = bytearray(path.read_bytes()), cut_places(path)[place]
    path.write_bytes(data[:position])
    assert "train-0.tar" in catch_error(tmp_path)
    if place == "between members":
        data[position + 10] ^= 0xFF  # a damaged header
        path.write_bytes(data)
        assert "train-0.tar" in catch_error(tmp_path)


@pytest.mark.parametrize("label", [b"cat", b"", b"-2", b"1000000"])
def test_an_invalid_label_in_a_tar_is_rejected(tmp_path: Path, label: bytes) -> None:
    write_tar(tmp_path / "train-0.tar", [("a.png", png()), ("a.cls", label)])
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


# Packed shards --------------------------------------------------------------------------------------------------------


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


CHANGES = [("label", 3), ("label", -2), ("offset", -1), ("length", None), ("shard", "../x.tar"), ("label", "a")]


@pytest.mark.parametrize(("column", "value"), CHANGES)
def test_an_invalid_index_is_rejected(packed: Path, column: str, value: Any) -> None:
    table = pq.read_table(packed / "index.parquet")
    kept = table.column(column).to_pylist()[1:]
    values = pa.array([value, *map(type(value or 0), kept)])
    changed = table.set_column(table.column_names.index(column), column, values)
    pq.write_table(changed, packed / "index.parquet")
    catch_error(packed)


@pytest.mark.parametrize("kind", ["folder", "parquet", "tars"])
def test_sources_can_be_pickled(tmp_path: Path, kind: str) -> None:
    """As Ray sends them to other machines."""
    plant_classes(tmp_path / "folder", {"a": 3, "b": 2})
    shard(tmp_path / "parquet" / "train-00.parquet", 0, 9, group=4)
    pack(str(tmp_path / "folder"), tmp_path / "tars")
    source = open_source(str(tmp_path / kind))
    copy = pickle.loads(pickle.dumps(source))
    assert (copy.spec, copy.split, copy.classes) == (source.spec, source.split, source.classes)
    assert copy.labels.tolist() == source.labels.tolist()
    assert names(copy) == names(source)
    assert contents(copy) == contents(source)
