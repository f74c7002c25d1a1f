"""VTAB-1k: its lists of images, the means of the paper's table, and three tasks from images to a table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
from pictures import encode, plant
from shell import Capture, fail, report
from shell import run as run_command

import plainvit
from plainvit.data import vtab
from plainvit.data.decode import DataError, decode
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.evaluate import paper
from plainvit.models import build
from plainvit.recipes import recipe
from plainvit.studies import vtab as study
from plainvit.train import run

# What may be done to images -------------------------------------------------------------------------------------------


def test_augmentations_that_would_change_labels_are_disabled() -> None:
    """Written out from the paper (B.1.1 follows BiT)."""
    no_flip = {"dsprites-orientation", "dsprites-location", "smallnorb-azimuth"}
    no_crop = {"clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"}
    given = recipe("ft-vtab").augment
    assert (given.crop, given.resized_side(384), given.flip) == ("random", 448, 0.5)
    for task in vtab.TASKS:
        found = vtab.augment_for(task, given)
        assert found.flip == (0.0 if task in no_flip else 0.5)
        assert found.crop == ("none" if task in no_crop else "random")
        assert found.replace(flip=0.5, crop="random") == given


def test_the_papers_setting_and_a_shorter_warm_up_for_fewer_steps() -> None:
    """Table 4 and section 4.1: 2,500 steps, rate 0.01, 384 pixels, batches of 512."""
    config = study.base_config("weights", "paper")
    assert (config.steps, config.optim.lr, config.image_size, config.batch) == (2500, 0.01, 384, 512)
    assert study.base_config("weights", "paper", steps=100).optim.warmup * 100 == pytest.approx(8)  # 200 of 2,500


# Means ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(3))
def test_table_9_averages_to_its_printed_means(row: int) -> None:
    *cells, mean = paper.table(9).rows[row][1]
    found = study.average_by_group(dict(zip(vtab.TASKS, cells, strict=True)))
    assert round(found["vtab"], 1) == mean
    assert [found[group]["tasks"] for group in ("natural", "specialized", "structured")] == [7, 4, 8]
    assert "mean_of_available" not in found


# Images ---------------------------------------------------------------------------------------------------------------


def write_lists(folder: Path, classes: int) -> None:
    """800, 200 and 30 images by the lists of VTAB-1k; the pixels of an image are its number."""
    for name, count, start in (("train800", 800, 0), ("val200", 200, 800), ("test", 30, 1000)):
        numbers = range(start, start + count)
        pixels = {at: np.full((2, 2, 3), (at % 256, at // 256, 7), np.uint8) for at in numbers}
        plant(folder, {f"images/{at:06d}.png": encode(image) for at, image in pixels.items()})
        (folder / f"{name}.txt").write_text("".join(f"images/{at:06d}.png {at % classes}\n" for at in numbers))


def read_numbers(source: Source) -> list[int]:
    pixels = [decode(source.read(index))[0, 0].astype(int) for index in range(len(source))]
    return [int(red + 256 * green) for red, green, _ in pixels]


def test_published_lists_are_read_and_vtab1000_trains_on_800_and_200(tmp_path: Path) -> None:
    write_lists(tmp_path / "smallnorb_azi", 18)
    expected = {"train": range(800), "val": range(800, 1000), "test": range(1000, 1030)}
    for split, numbers in expected.items():
        source = open_source("vtab/smallnorb-azimuth", split, data_root=tmp_path)
        assert read_numbers(source) == list(numbers)
        assert source.labels.tolist() == [at % 18 for at in numbers]
        assert len(source.classes) == 18
    train = open_source("vtab1000/smallnorb-azimuth", "train", data_root=tmp_path)
    assert read_numbers(train) == list(range(1000))
    assert train.labels.tolist() == [at % 18 for at in range(1000)]
    assert len(open_source("vtab1000/smallnorb-azimuth", "test", data_root=tmp_path)) == 30
    with pytest.raises(MissingSplitError):
        open_source("vtab1000/smallnorb-azimuth", "val", data_root=tmp_path)


@pytest.mark.parametrize("line", ["images/a.png", "images/a.png 18", "/etc/passwd 1", "../a.png 1", "images/a.png x"])
def test_an_invalid_list_line_is_rejected(tmp_path: Path, line: str) -> None:
    plant(tmp_path / "smallnorb-azimuth", {"train800.txt": f"images/0.png 3\n{line}\n".encode()})
    with pytest.raises(DataError, match=r"train800\.txt line 2"):
        open_source("vtab/smallnorb-azimuth", "train", data_root=tmp_path)


# The study ------------------------------------------------------------------------------------------------------------


def shade(label: int, classes: int) -> bytes:
    """An image whose gray is its class."""
    return encode(np.full((8, 8, 3), 255 * label // (classes - 1), np.uint8))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two tasks by the lists of VTAB-1k, under the names that its copies give them, and weights."""
    root = tmp_path_factory.mktemp("vtab")
    for folder, classes, tests in (("patch_camelyon", 2, 40), ("dsprites_loc", 16, 100)):
        plant(root / folder, {f"{label}.png": shade(label, classes) for label in range(classes)})
        for name, count in (("train800", 800), ("val200", 200), ("test", tests)):
            lines = (f"{7 * i % classes}.png {7 * i % classes}\n" for i in range(count))
            (root / folder / f"{name}.txt").write_text("".join(lines))
    plainvit.save(build(small_runs.MODEL.replace(classes=3)), root / "model.safetensors")
    return root, str(root / "model.safetensors")


@pytest.mark.usefixtures("no_figures")
def test_two_tasks_from_images_to_the_table(
    planted: tuple[Path, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, weights = planted
    out, tasks = tmp_path / "out", ("camelyon", "dsprites-location", "svhn")
    words = ["vtab", "--init", weights, "--data-root", root, "--setting", "light", "--steps", 80]
    words += ["--device", "cpu", "--out", out, "--tasks", *tasks]
    result = report(capsys, *words)
    assert json.loads((out / "vtab.json").read_text()) == result
    rows, means = result["tasks"], result["means"]
    assert [rows[task]["state"] for task in tasks] == ["done", "done", "absent"]
    tops = [rows[task]["top1"] for task in tasks[:2]]
    assert tops[0] == 1.0  # black and white
    assert tops[1] * 16 > 1.5  # well above chance
    assert [rows[task]["n"] for task in tasks[:2]] == [40, 100]
    assert means["mean_of_available"] == pytest.approx(np.mean(tops))
    assert means["structured"] == {"mean": pytest.approx(tops[1]), "tasks": 1, "of": 8}
    assert "vtab" not in means  # it needs all tasks
    configs = [json.loads((out / task / "config.json").read_text()) for task in tasks[:2]]
    assert [config["augment"]["flip"] for config in configs] == [0.5, 0.0]
    assert [config["augment"]["crop"] for config in configs] == ["random", "none"]
    assert [config["model"]["classes"] for config in configs] == [2, 16]
    data = json.loads((out / "camelyon" / "data.json").read_text())
    assert {split: one["images"] for split, one in data["splits"].items()} == {"train": 1000, "test": 40}

    monkeypatch.setattr(run, "train_timed", None)  # finished runs are not repeated
    table = run_command(capsys, *words)[1]
    assert "svhn" in table
    assert "mean of the 2 available tasks" in table
    assert "no VTAB score: 17 of the 19 tasks are missing" in table
    stored, other = Path(weights).read_bytes(), plainvit.load(weights)
    other.embedding.weight.data += 1
    plainvit.save(other, weights)
    assert "another --out" in run_command(capsys, *words)[2]  # the file holds other weights now
    Path(weights).write_bytes(stored)


@pytest.mark.usefixtures("no_figures")
def test_a_task_that_diverges_is_reported(
    planted: tuple[Path, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, weights = planted
    made = study.base_config

    def wild(*given: Any, **named: Any) -> Any:
        config = made(*given, **named)
        return config.replace(optim=config.optim.replace(lr=1e6, warmup=0.0, weight_decay=1e6), max_skipped_steps=1)

    monkeypatch.setattr(study, "base_config", wild)
    words = ("vtab", "--init", weights, "--data-root", root, "--setting", "light", "--steps", "40", "--device", "cpu")
    result = report(capsys, *words, "--out", tmp_path / "out", "--tasks", "camelyon", code=4)
    assert result["tasks"]["camelyon"]["state"] == "diverged"
    assert result["means"] == {}


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("--tasks", "svhm"), 2, "nearest: svhn"),
        (("--tasks", "svhn", "dmlab"), 3, "none of these tasks: svhn, dmlab"),
        (("--steps", "-1"), 2, "--steps"),
        (("--init", "/no/such/file"), 2, "/no/such/file"),
    ],
)
def test_wrong_arguments_are_one_line(
    planted: tuple[Path, str], capsys: Capture, words: tuple[str, ...], code: int, part: str
) -> None:
    root, weights = planted
    init = () if "--init" in words else ("--init", weights)
    assert part in fail(capsys, "vtab", *init, "--data-root", root, "--setting", "light", *words, code=code)
