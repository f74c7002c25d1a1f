"""info, check and pack as a user meets them: against planted flaws, and Pillow, tarfile and pyarrow as readers."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pictures import encode, jpeg, photo, plant, plant_classes, png, write_parquet
from PIL import Image
from shell import Capture, fail, report, run

from plainvit.data import pack
from plainvit.data.sources import open_source

# info -----------------------------------------------------------------------------------------------------------------


def test_info_of_a_folder(tmp_path: Path, capsys: Capture) -> None:
    plant(tmp_path / "set" / "train", {"a/1.png": png(1, 10, 20), "a/2.png": png(2, 30, 40), "b/3.png": png(3, 50, 60)})
    plant(tmp_path / "set" / "val", {"a/4.png": png(4, 8, 9)})
    found = report(capsys, "data", "info", tmp_path / "set")
    assert found["classes"] == 2
    assert list(found["splits"]) == ["train", "val"]
    train, val = found["splits"]["train"], found["splits"]["val"]
    assert (train["images"], val["images"]) == (3, 1)
    assert train["per_class"] == {"least": 1, "most": 2}
    assert val["per_class"] == {"least": 0, "most": 1}
    assert train["height"] == {"least": 10, "median": 30, "most": 50}
    assert train["width"] == {"least": 20, "median": 40, "most": 60}
    assert train["fingerprint"] == open_source(str(tmp_path / "set")).fingerprint()
    assert train["fingerprint"] != val["fingerprint"]


# check ----------------------------------------------------------------------------------------------------------------


def problems(findings: list[dict[str, str]]) -> set[tuple[str, str, str]]:
    return {(one["split"], one["name"], one["problem"]) for one in findings}


def test_check_finds_everything_planted(tmp_path: Path, capsys: Capture) -> None:
    root = tmp_path / "set"
    sound = {f"train/{name}/{i}.png": png(100 * k + i, 80, 80) for k, name in enumerate("abc") for i in range(6)}
    planted = {
        "train/a/page.jpg": b"<html>not found</html>",
        "train/a/short.jpg": jpeg(1, 80, 80, quality=95)[:2000],
        "train/a/empty.png": b"",
        "train/a/again.png": png(1, 80, 80),  # of train/a/1.png
        "train/b/copy.png": png(0, 80, 80),  # of train/a/0.png
        "val/a/leak.png": png(2, 80, 80),  # of train/a/2.png
        "val/a/own.png": png(999, 80, 80),
    }
    plant(root, sound | planted)
    (root / "train" / "empty").mkdir()
    findings = report(capsys, "data", "check", root, "--save", tmp_path / "bad.jsonl", code=3)
    assert problems(findings) == {
        ("train", "a/page.jpg", "unreadable"),
        ("train", "a/short.jpg", "unreadable"),
        ("train", "a/empty.png", "unreadable"),
        ("train", "a/again.png", "duplicate"),
        ("train", "a/0.png", "two labels"),
        ("train", "b/copy.png", "two labels"),
        ("train", "empty", "empty class"),
        ("val", "a/leak.png", "duplicate across splits"),
        *(("val", name, "empty class") for name in ("b", "c", "empty")),
    }
    reasons = {one["name"]: one["detail"] for one in findings}
    assert "<html>" in reasons["a/page.jpg"]
    assert "empty" in reasons["a/empty.png"]
    assert "a/0.png" in reasons["b/copy.png"]
    assert "a/2.png" in reasons["a/leak.png"]
    assert "train" in reasons["a/leak.png"]
    assert "'a' here, 'b' there" in reasons["a/0.png"]
    saved = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert saved == findings
    assert all(set(finding) == {"split", "name", "problem", "detail"} for finding in findings)
    assert len(open_source(str(root), exclude=tmp_path / "bad.jsonl")) == 23 - 6


@pytest.mark.parametrize("name", ["x[/b].png", "new\nline.png", "日本語.png", os.fsdecode(b"\xff.png")])
def test_the_table_escapes_names(tmp_path: Path, capsys: Capture, name: str) -> None:
    """Brackets are no markup, and a line end does not break the line."""
    plant(tmp_path, {f"a/{name}": b"<html>", "a/good.png": png()})
    code, out, err = run(capsys, "data", "check", tmp_path)
    assert (code, err) == (3, "")
    assert repr(f"a/{name}")[1:-1] in out.replace("\n", "").replace(" ", "")


# pack -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two splits of large and small pictures in several formats, one of them bad."""
    exif = Image.Exif()
    exif[0x0112] = 6
    train = {
        "a/large.jpg": jpeg(1, 200, 300),
        "a/small.jpg": jpeg(2, 40, 60),
        "a/large.png": encode(photo(150, 120, 3)),
        "b/small.png": encode(photo(50, 50, 4)),
        "b/turned.jpg": jpeg(5, 60, 200, exif=exif),
        "b/gray.jpg": encode(photo(30, 30, 6).convert("L"), "JPEG"),
        "b/bad.jpg": b"<html>",
    }
    files = {f"train/{name}": data for name, data in train.items()} | {"val/b/one.jpg": jpeg(7, 90, 100)}
    return plant(tmp_path / "mixed", files)


def test_pack_shrinks_images_and_keeps_labels(mixed: Path, tmp_path: Path, capsys: Capture) -> None:
    found = report(capsys, "data", "pack", mixed, tmp_path / "out", "--side", "64")
    assert found["images"] == 7
    assert [one["name"] for one in found["left_out"]] == ["b/bad.jpg"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["index.parquet", "train-00000.tar", "val-00000.tar"]
    origin, made = open_source(str(mixed)), open_source(str(tmp_path / "out"))
    assert made.classes == origin.classes == ("a", "b")
    kept = [i for i in range(len(origin)) if "bad" not in origin.name(i)]
    assert made.labels.tolist() == origin.labels[kept].tolist()
    shapes = [made.image(i).shape[:2] for i in range(6)]
    assert shapes == [(64, 96), (80, 64), (40, 60), (30, 30), (50, 50), (200, 60)]
    assert made.read(2) == (mixed / "train/a/small.jpg").read_bytes()
    assert made.read(3) == (mixed / "train/b/gray.jpg").read_bytes()
    with Image.open(io.BytesIO(made.read(5))) as turned:
        assert (turned.size, turned.getexif().get(0x0112, 1)) == ((60, 200), 1)
    found = report(capsys, "data", "info", tmp_path / "out")
    assert {split: part["images"] for split, part in found["splits"].items()} == {"train": 6, "val": 1}
    assert problems(report(capsys, "data", "check", tmp_path / "out")) == {("val", "a", "empty class")}


@pytest.mark.parametrize(("limit", "count"), [(8000, 8), (1, 30)])
def test_pack_splits_into_shards(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, limit: int, count: int
) -> None:
    """None of them is empty, also where the last image fills a shard."""
    monkeypatch.setattr(pack, "SHARD_BYTES", limit)
    plant(tmp_path / "set", {f"a/{i:02}.jpg": jpeg(i) for i in range(30)})
    report(capsys, "data", "pack", tmp_path / "set", tmp_path / "out")
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.tar"))
    assert shards == [f"train-{number:05}.tar" for number in range(count)]
    made = open_source(str(tmp_path / "out"))
    assert [made.read(i) for i in range(30)] == [jpeg(i) for i in range(30)]


def test_a_folder_with_the_name_of_a_known_dataset_has_all_of_its_splits(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known dataset `imagenet` has no test split."""
    for split in ("train", "val", "test"):
        plant_classes(tmp_path / "imagenet" / split, {"a": 1, "b": 1})
    monkeypatch.chdir(tmp_path)
    assert list(report(capsys, "data", "info", "imagenet")["splits"]) == ["train", "val", "test"]


def test_pack_says_how_much_it_wrote_and_what_it_left_out(
    mixed: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = run(capsys, "data", "pack", mixed, "out", "--side", "64")[1]
    assert re.match(r"packed 7 images \([\d.]+ KiB\) into out/; 1 unreadable image left out", line)


def test_images_too_large_for_a_jpeg_are_left_out(tmp_path: Path) -> None:
    """One of them ended the whole pack, as if the disk had failed."""
    root = plant_classes(tmp_path / "set", {"a": 2})
    plant(root, {"a/long.png": encode(Image.new("RGB", (65_501, 8)))})
    packed = pack.pack(str(root), tmp_path / "packed")
    assert (packed["images"], [one["name"] for one in packed["left_out"]]) == (2, ["a/long.png"])


def test_pack_needs_an_empty_folder_and_images(tmp_path: Path, capsys: Capture) -> None:
    plant(tmp_path / "out", {"mine.txt": b"keep me"})
    fail(capsys, "data", "pack", "digits", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "set" / "a").mkdir(parents=True)
    fail(capsys, "data", "pack", tmp_path / "set", tmp_path / "new")


def test_an_interrupted_pack_cannot_be_opened(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after two shards: the class names and most images are missing, so it must not open as if it were all."""
    monkeypatch.setattr(pack, "SHARD_BYTES", 8000)
    plant(tmp_path / "set", {f"{'ab'[i % 2]}/{i:02}.jpg": jpeg(i) for i in range(30)})
    original = pack._add_image

    def stop_at_twenty(archive: Any, index: int, *rest: Any) -> Any:
        if index == 20:
            raise KeyboardInterrupt
        return original(archive, index, *rest)

    monkeypatch.setattr(pack, "_add_image", stop_at_twenty)
    assert run(capsys, "data", "pack", tmp_path / "set", tmp_path / "out")[0] == 130
    monkeypatch.undo()
    code, _, err = run(capsys, "data", "info", tmp_path / "out")
    assert code == 3, "half a pack opens as a whole one"
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["info", "check", "pack"])
def test_a_damaged_split_is_an_error(tmp_path: Path, capsys: Capture, command: str) -> None:
    """train is sound and val is cut short: to speak of train alone would hide it."""
    for split in ("train", "val"):
        write_parquet(tmp_path / "set" / f"{split}-00.parquet", [png(i) for i in range(6)], [0, 1] * 3)
    path = tmp_path / "set" / "val-00.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    target = [tmp_path / "out"] if command == "pack" else []
    code, _, err = run(capsys, "data", command, tmp_path / "set", *target)
    assert code == 3
    assert "val-00.parquet" in err
