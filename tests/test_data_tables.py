"""Other people's tables and lists: parquet, Hugging Face's save_to_disk and imagefolder, CSVs; parquet's memory."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import plant, plant_classes, png, write_parquet

from plainvit.cli import main
from plainvit.data import tables
from plainvit.data.decode import DataError, ImageError
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.evaluate.inputs import find


def rows(source: Source) -> list[tuple[bytes | np.ndarray, str]]:
    return [(source.read(i), source.classes[source.labels[i]]) for i in range(len(source))]


def save_to_disk(
    folder: Path, images: Sequence[bytes | None], labels: Sequence[Any], names: Sequence[str] = (), shards: int = 1
) -> None:
    """As `datasets.Dataset.save_to_disk` writes a set: Arrow streams, state.json and dataset_info.json."""
    folder.mkdir(parents=True)
    cells = pa.array([{"bytes": data, "path": f"{at}.png"} for at, data in enumerate(images)])
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}} if names else {}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": cells, "label": pa.array(labels)}).replace_schema_metadata(about)
    files = [f"data-{at:05d}-of-{shards:05d}.arrow" for at in range(shards)]
    size = -(-len(images) // shards)
    for at, name in enumerate(files):
        with (folder / name).open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(at * size, size), max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


IMAGES = [png(seed) for seed in range(7)]
WORDS = ["cat", "dog", "cat", "ant", "dog", "cat", "ant"]

# save_to_disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_a_save_to_disk_folder_is_read(tmp_path: Path, shards: int) -> None:
    save_to_disk(tmp_path / "set", IMAGES, [0, 1, 0, 2, 1, 0, 2], ["cat", "dog", "ant"], shards)
    source = open_source(str(tmp_path / "set"))
    assert source.classes == ("cat", "dog", "ant")
    assert rows(source) == list(zip(IMAGES, WORDS, strict=True))
    assert len({source.name(at) for at in range(7)}) == 7
    with pytest.raises(MissingSplitError):
        open_source(str(tmp_path / "set"), "test")


def test_a_save_to_disk_folder_with_splits_is_read(tmp_path: Path) -> None:
    for split, part in {"train": slice(0, 5), "test": slice(3, 7)}.items():
        save_to_disk(tmp_path / split, IMAGES[part], WORDS[part])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split, part in {"train": slice(0, 5), "test": slice(3, 7)}.items():
        source = open_source(str(tmp_path), split)
        assert source.classes == ("ant", "cat", "dog")
        assert rows(source) == list(zip(IMAGES[part], WORDS[part], strict=True))
    with pytest.raises(MissingSplitError):
        open_source(str(tmp_path), "val")
    assert len(find([str(tmp_path)])) == 4


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "", 7, None])
def test_state_json_cannot_name_files_outside_its_folder(tmp_path: Path, name: Any) -> None:
    save_to_disk(tmp_path / "set", IMAGES, WORDS)
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError):
        open_source(str(tmp_path / "set"))


def test_a_damaged_arrow_file_is_never_read_out_of_bounds(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", IMAGES, WORDS)
    path = tmp_path / "set" / "data-00000-of-00001.arrow"
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    for at in generator.integers(0, len(whole), 60).tolist():
        data = bytearray(whole)
        data[at : at + 4] = generator.bytes(4)
        path.write_bytes(data)
        try:
            source = open_source(str(tmp_path / "set"))
            for index in range(len(source)):
                source.read(index)
        except (DataError, ImageError):
            continue
    for length in (0, 7, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            open_source(str(tmp_path / "set"))


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


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_single_parquet_or_arrow_file_is_read(tmp_path: Path, suffix: str) -> None:
    save_to_disk(tmp_path / "set", IMAGES, WORDS)
    write_parquet(tmp_path / "photos.parquet", IMAGES, WORDS)
    (tmp_path / "set" / "data-00000-of-00001.arrow").rename(tmp_path / "photos.arrow")
    source = open_source(str(tmp_path / f"photos.{suffix}"))
    assert rows(source) == list(zip(IMAGES, WORDS, strict=True))
    (tmp_path / f"photos.{suffix}").rename(tmp_path / f"test-0.{suffix}")
    assert len(open_source(str(tmp_path / f"test-0.{suffix}"), "test")) == 7
    assert len(find([str(tmp_path / f"test-0.{suffix}")])) == 7
    with pytest.raises(MissingSplitError):
        open_source(str(tmp_path / f"test-0.{suffix}"))


def test_paths_instead_of_image_bytes_are_rejected(tmp_path: Path) -> None:
    cells = pa.array([{"bytes": None, "path": "a.png"}] * 3, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    for name, column in {"struct": cells, "text": pa.array(["a.png"] * 3)}.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"image": column, "label": [0, 1, 0]}), tmp_path / name / "train.parquet")
        with pytest.raises(DataError, match="paths"):
            open_source(str(tmp_path / name))
    save_to_disk(tmp_path / "saved", [None] * 3, [0, 1, 0])
    with pytest.raises(DataError):
        open_source(str(tmp_path / "saved"))


def test_a_parquet_error_exits_without_an_abort(tmp_path: Path) -> None:
    """Threads of pyarrow outlive the error: what they hold must not need the interpreter, which is ending."""
    column = pa.array([{"bytes": None, "path": "a.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(pa.table({"image": column, "label": [0]}), tmp_path / "train.parquet")
    command = [sys.executable, "-m", "plainvit", "data", "info", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 3


# Memory for parquet ---------------------------------------------------------------------------------------------------


def test_loaded_images_are_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "train.parquet", IMAGES, WORDS, group=3)
    source = open_source(str(tmp_path))
    source.load()
    monkeypatch.setattr(tables.Table, "_read_group", lambda *_: pytest.fail("it is decoded again"))
    assert [source.read(at) for at in range(7)] == IMAGES


@pytest.mark.parametrize(("limit", "groups"), [(0, 1), (1500, 1), (10_000, 5)])
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

METADATA = {
    "metadata.csv": "file_name,label,text\n1.png,dog,a\nin/2.png,cat,b\n",
    "metadata.jsonl": '{"file_name": "1.png", "label": "dog"}\n{"file_name": "in/2.png", "label": "cat"}\n',
    "labels.csv": "1.png,dog\nin/2.png,cat\n",  # no header
    "list.csv": "1.png,dog,train\nin/2.png,cat,train\n",
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_and_headerless_lists_are_read(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {"1.png": png(1), "in/2.png": png(2), name: METADATA[name].encode()})
    source = open_source(str(tmp_path if name != "list.csv" else tmp_path / name))
    assert source.classes == ("cat", "dog")
    assert rows(source) == [(png(1), "dog"), (png(2), "cat")]


@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv", "metadata.jsonl"])
def test_lists_inside_split_folders_are_read(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for split, label in {"train": "dog", "validation": "cat"}.items():
        texts = {"csv": f"file_name,label\n1.png,{label}\n2.png,cat\n"}
        texts["jsonl"] = "".join(
            f'{{"file_name": "{n}.png", "label": "{label if n == 1 else "cat"}"}}\n' for n in (1, 2)
        )
        plant(tmp_path / split, {"1.png": png(1), "2.png": png(2), name: texts[name.partition(".")[2]].encode()})
    assert rows(open_source(str(tmp_path))) == [(png(1), "dog"), (png(2), "cat")]
    assert rows(open_source(str(tmp_path), "val")) == [(png(1), "cat"), (png(2), "cat")]
    assert open_source(str(tmp_path), "val").classes == ("cat", "dog")
    main(["data", "info", str(tmp_path), "--json"])
    assert {name: part["images"] for name, part in json.loads(capsys.readouterr().out)["splits"].items()} == {
        "train": 2,
        "val": 2,
    }


def test_metadata_next_to_split_folders_is_read(tmp_path: Path) -> None:
    text = "file_name,label\ntrain/1.png,dog\ntrain/2.png,cat\ntest/3.png,cat\n"
    plant(
        tmp_path,
        {**{f"{place}.png": png() for place in ("train/1", "train/2", "test/3")}, "metadata.csv": text.encode()},
    )
    assert [len(open_source(str(tmp_path), split)) for split in ("train", "test")] == [2, 1]


def test_metadata_without_labels_is_ignored(tmp_path: Path) -> None:
    plant_classes(tmp_path, {"a": 1, "b": 2})
    plant(tmp_path, {"metadata.csv": b"file_name,text\na/0.png,hello\n"})
    assert open_source(str(tmp_path)).labels.tolist() == [0, 1, 1]


def test_a_list_in_a_split_folder_cannot_name_another_split(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {"train/labels.csv": b"file,label\n1.png,a\n", "test/labels.csv": b"file,label,split\n1.png,a,train\n"},
    )
    with pytest.raises(DataError):
        open_source(str(tmp_path), "test")
