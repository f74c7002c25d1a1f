"""Training and held-out images: stable by content, fair to classes, never a copy on both sides."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pictures
import pytest
from pictures import jpeg, plant, plant_classes, png, write_parquet
from shell import Capture, run

from plainvit.config import Config
from plainvit.data import tables
from plainvit.data.content_hash import hash_to_unit_interval
from plainvit.data.decode import DataError
from plainvit.data.pack import pack
from plainvit.data.sources import Source, open_source
from plainvit.data.splits import hold_out, open_splits


def names(source: Source) -> set[str]:
    return set(pictures.names(source))


def held_names(root: Path, fraction: float = 0.3) -> set[str]:
    return names(hold_out(open_source(str(root)), fraction)[1])


def test_sides_are_disjoint_and_near_the_fraction_and_nested() -> None:
    source = open_source("digits")
    rest, held = hold_out(source, 0.2)
    assert len(rest) + len(held) == len(source)
    assert not names(rest) & names(held)
    for label in range(10):
        count = (source.labels == label).sum()
        assert abs((held.labels == label).sum() - 0.2 * count) < 4 * (0.2 * 0.8 * count) ** 0.5  # binomial
    assert names(held) < names(hold_out(source, 0.3)[1])


def test_adding_and_removing_photos_moves_no_others(tmp_path: Path) -> None:
    plant_classes(tmp_path, {"a": 40, "b": 40})
    before = held_names(tmp_path)
    plant_classes(tmp_path / "c", {"new": 20}, start=100)
    plant(tmp_path, {f"a/00{i}.png": png(200 + i) for i in range(30)})
    assert {name for name in held_names(tmp_path) if name in before or name.startswith("b/")} == before
    for index in range(0, 40, 3):
        (tmp_path / f"b/{index}.png").unlink()
    kept = {name for name in before if (tmp_path / name).exists()}
    assert {name for name in held_names(tmp_path) if not name.startswith(("c/", "a/00"))} == kept


def test_moving_and_renaming_photos_changes_no_sides(tmp_path: Path) -> None:
    plant_classes(tmp_path / "one", {"a": 30, "b": 30})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for path in sorted((tmp_path / "two/a").iterdir()):
        path.rename(path.with_name(f"x{path.name}"))
    renamed = {name.replace("a/", "a/x") for name in held_names(tmp_path / "one")}
    assert held_names(tmp_path / "two") == renamed


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.95])
def test_copies_are_on_one_side(tmp_path: Path, fraction: float) -> None:
    """Also under another label, where one of them is the only image that its class could hold out."""
    files = {f"{'abc'[seed % 3]}/{seed}-{copy}.png": png(seed) for seed in range(12) for copy in range(3)}
    files |= {f"d/{seed}.png": png(seed) for seed in range(4)} | {"e/0.png": png(0), "f/1.png": png(1)}
    rest, held = hold_out(open_source(str(plant(tmp_path, files))), fraction)
    assert not {rest.read(i) for i in range(len(rest))} & {held.read(i) for i in range(len(held))}


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_each_class_has_images_on_both_sides(tmp_path: Path, fraction: float) -> None:
    source = open_source(str(plant_classes(tmp_path, {"one": 1, "two": 2, "three": 3, "ten": 10})))
    rest, held = hold_out(source, fraction)
    assert {source.classes[label] for label in held.labels} == {"two", "three", "ten"}
    assert set(rest.labels) == {0, 1, 2, 3}


def test_splits_without_labels_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the test images of ImageNet on the hub: a run failed on them at its end."""
    for number, (split, labels) in enumerate({"train": [0, 1] * 5, "test": [-1, -1]}.items()):
        images = [png(100 * number + index) for index in range(len(labels))]
        write_parquet(tmp_path / f"{split}.parquet", images, labels, names=["a", "b"])
    splits = open_splits(Config(data=str(tmp_path), holdout=0.3))
    assert splits.val
    assert (len(splits.train) + len(splits.val), splits.test) == (10, None)
    assert "test images" in caplog.text


def test_files_tables_and_tars_hold_out_the_same_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_classes(tmp_path / "files", {"a": 60, "b": 60})
    write_parquet(tmp_path / "table/train.parquet", [png(i) for i in range(120)], [i // 60 for i in range(120)])
    pack(str(tmp_path / "files"), tmp_path / "tars")
    for name in ("files", "table", "tars"):
        assert 12 < len(held_names(tmp_path / name)) < 60
    monkeypatch.setattr(tables, "MEMORY_LIMIT", 0)  # by name: reading all would take minutes
    assert 12 < len(held_names(tmp_path / "table")) < 60


def test_tables_hold_out_the_same_images_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory, or many processes that share it."""
    write_parquet(tmp_path / "train.parquet", [png(i) for i in range(60)], [i // 30 for i in range(60)], group=7)
    expected = held_names(tmp_path)
    groups: list[int] = []
    read_group = tables.ParquetSource._read_group
    monkeypatch.setattr(tables, "memory_budget", lambda: 0)
    monkeypatch.setattr(tables.ParquetSource, "_read_group", lambda self, n: groups.append(n) or read_group(self, n))
    assert held_names(tmp_path) == expected
    assert groups == list(range(9))  # each is decoded once


def test_files_are_told_apart_by_both_ends_and_their_size(tmp_path: Path) -> None:
    body = bytes(20_000)
    files = {"a/1.png": body, "a/2.png": body + b"\0", "a/3.png": b"x" + body[1:], "a/4.png": body[1:] + b"x"}
    numbers = hash_to_unit_interval(open_source(str(plant(tmp_path, files | {"a/5.png": body}))))
    assert len(set(numbers.tolist())) == 4
    assert numbers[0] == numbers[4]


# Wrong folders --------------------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Path], object]] = {
    "one class": lambda root: plant_classes(root, {"a": 5}),
    "one image per class": lambda root: plant_classes(root, {"a": 1, "b": 1, "c": 1}),
    "fewer images than classes": lambda root: (plant_classes(root, {"a": 1, "b": 1}), (root / "c").mkdir()),
    "a file": lambda root: root.write_bytes(jpeg()),
    "a broken link": lambda root: root.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_folder_is_one_line_and_exit_code_3(tmp_path: Path, capsys: Capture, kind: str) -> None:
    root = tmp_path / "photos"
    WRONG[kind](root)
    with pytest.raises(DataError):
        open_splits(Config(data=str(root), holdout=0.2))
    code, out, err = run(capsys, "train", "photos", "--data", root, "--holdout", 0.2, "--out", tmp_path / "run")
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert len(err) < 400
    assert not (tmp_path / "run").exists()


def test_few_images_can_be_trained_on_without_labels_or_holding_out(tmp_path: Path) -> None:
    one_class = plant_classes(tmp_path / "one", {"all": 5})
    assert len(open_splits(Config(data=str(one_class), objective="mae")).train) == 5
    one_each = plant_classes(tmp_path / "each", {"a": 1, "b": 1})
    assert len(open_splits(Config(data=str(one_each))).train) == 2
