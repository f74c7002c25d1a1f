"""Parquet files of others, its memory, and lists inside split folders."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import plant, png, write_parquet
from shell import Capture, report

from plainvit.data import tables
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.evaluate.inputs import find


def rows(source: Source) -> list[tuple[bytes | np.ndarray, str]]:
    return [(source.read(i), source.classes[source.labels[i]]) for i in range(len(source))]


IMAGES = [png(seed) for seed in range(7)]
WORDS = ["cat", "dog", "cat", "ant", "dog", "cat", "ant"]

# Parquet --------------------------------------------------------------------------------------------------------------


def test_string_labels_use_the_classes_of_the_training_images(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", IMAGES[:3], WORDS[:3])
    write_parquet(tmp_path / "train-1.parquet", IMAGES[3:5], WORDS[3:5])
    write_parquet(tmp_path / "test-0.parquet", IMAGES[5:], WORDS[5:])
    for split, part in {"train": slice(0, 5), "test": slice(5, 7)}.items():
        source = open_source(str(tmp_path), split)
        assert source.classes == ("ant", "cat", "dog")
        assert rows(source) == list(zip(IMAGES[part], WORDS[part], strict=True))
    write_parquet(tmp_path / "val-0.parquet", IMAGES[:1], ["bee"])
    with pytest.raises(DataError, match="bee"):
        open_source(str(tmp_path), "val")
    write_parquet(tmp_path / "numbers" / "x.parquet", IMAGES[:3], ["10", "9", "10"])
    assert open_source(str(tmp_path / "numbers")).classes == ("9", "10")


def test_a_single_parquet_file_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "photos.parquet", IMAGES, WORDS)
    source = open_source(str(tmp_path / "photos.parquet"))
    assert rows(source) == list(zip(IMAGES, WORDS, strict=True))
    (tmp_path / "photos.parquet").rename(tmp_path / "test-0.parquet")
    assert len(open_source(str(tmp_path / "test-0.parquet"), "test")) == 7
    assert len(find([str(tmp_path / "test-0.parquet")])) == 7
    with pytest.raises(MissingSplitError):
        open_source(str(tmp_path / "test-0.parquet"))


def test_paths_instead_of_image_bytes_are_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": ["a.png"] * 3, "label": [0, 1, 0]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="paths"):
        open_source(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", [None] * 3, [0, 1, 0])
    with pytest.raises(ImageError, match="path"):
        open_source(str(tmp_path)).read(0)


def test_a_parquet_error_exits_without_an_abort(tmp_path: Path) -> None:
    """Threads of pyarrow outlive the error: what they hold must not need the interpreter, which is ending."""
    pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), tmp_path / "train.parquet")
    command = [sys.executable, "-m", "plainvit", "data", "info", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3


# Memory for parquet ---------------------------------------------------------------------------------------------------


def test_loaded_images_are_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "train.parquet", IMAGES, WORDS, group=3)
    source = open_source(str(tmp_path))
    source.load()
    monkeypatch.setattr(tables.Table, "_read_group", lambda *_: pytest.fail("it is decoded again"))
    assert [source.read(at) for at in range(7)] == IMAGES


@pytest.mark.parametrize(("limit", "groups"), [(0, 1), (1500, 1), (100_000, 5)])
def test_a_memory_limit_does_not_change_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, groups: int
) -> None:
    monkeypatch.setattr(tables, "IN_MEMORY", limit)
    images = [*IMAGES[:3], None, b"", *IMAGES[3:]]
    write_parquet(tmp_path / "train.parquet", images, [0] * 9, group=2)
    source = open_source(str(tmp_path))
    assert isinstance(source, tables.Table)
    for index in np.random.default_rng(0).integers(0, 9, 60).tolist():
        if images[index]:
            assert source.read(index) == images[index]
        else:
            with pytest.raises(ImageError):
                source.read(index)
        assert len(source._images) == groups


def test_images_larger_than_stated_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet stores equal images once in a dictionary: decoded they take more memory than the file says."""
    monkeypatch.setattr(tables, "IN_MEMORY", 10 * len(IMAGES[0]))
    write_parquet(tmp_path / "train.parquet", [IMAGES[0]] * 50, [0] * 50, group=5)
    source = open_source(str(tmp_path))
    assert isinstance(source, tables.Table)
    assert [source.read(at) for at in range(50)] == [IMAGES[0]] * 50
    assert len(source._images) == 1


# Lists ----------------------------------------------------------------------------------------------------------------


def test_lists_inside_split_folders_are_read(tmp_path: Path, capsys: Capture) -> None:
    for split, label in {"train": "dog", "validation": "cat"}.items():
        text = f"file_name,label\n1.png,{label}\n2.png,cat\n"
        plant(tmp_path / split, {"1.png": png(1), "2.png": png(2), "labels.csv": text.encode()})
    assert rows(open_source(str(tmp_path))) == [(png(1), "dog"), (png(2), "cat")]
    assert rows(open_source(str(tmp_path), "val")) == [(png(1), "cat"), (png(2), "cat")]
    assert open_source(str(tmp_path), "val").classes == ("cat", "dog")
    splits = report(capsys, "data", "info", tmp_path)["splits"]
    assert {name: part["images"] for name, part in splits.items()} == {"train": 2, "val": 2}


def test_a_list_in_a_split_folder_cannot_name_another_split(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {"train/labels.csv": b"file,label\n1.png,a\n", "test/labels.csv": b"file,label,split\n1.png,a,train\n"},
    )
    with pytest.raises(DataError):
        open_source(str(tmp_path), "test")
