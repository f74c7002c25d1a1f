"""A path with a colon is a file, not a URI, for every reader and writer."""

from pathlib import Path

import pytest
from pictures import plant_classes, png, write_parquet
from shell import Capture, report, run, save_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: only a relative path can begin with a scheme."""
    monkeypatch.chdir(tmp_path)
    plant_classes(tmp_path / "photos:1", {"a": 2, "b": 2})
    save_model(Path("m:1.safetensors"), classes=2)
    return tmp_path


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_predictions_go_to_a_path_with_a_colon(here: Path, capsys: Capture, suffix: str) -> None:
    words = ("m:1.safetensors", "photos:1", "--workers", "0", "--batch", "1", "--out", f"out:1.{suffix}")
    assert run(capsys, "predict", *words)[0] == 0
    assert (here / f"out:1.{suffix}").stat().st_size
    assert not (here / f"out:1.{suffix}.parts").exists()


def test_packed_data_is_written_and_read_in_a_folder_with_a_colon(here: Path, capsys: Capture) -> None:
    report(capsys, "data", "pack", "photos:1", "pk:1")
    assert report(capsys, "data", "info", "pk:1")["splits"]["train"]["images"] == 4
    assert (here / "pk:1" / "index.parquet").is_file()


@pytest.mark.parametrize("name", ["pq:1", "train:0.parquet"])
def test_parquet_is_read_by_a_path_with_a_colon(here: Path, capsys: Capture, name: str) -> None:
    write_parquet(here / name if name.endswith("parquet") else here / name / "train-00.parquet", [png(1)] * 2, [0, 1])
    assert report(capsys, "data", "info", name)["splits"]["train"]["images"] == 2


def test_cards_are_written_and_compared_in_a_folder_with_a_colon(here: Path, capsys: Capture) -> None:
    report(capsys, "evaluate", "m:1.safetensors", "--data", "photos:1", "--out", "card:1", "--device", "cpu")
    assert (here / "card:1" / "images.parquet").is_file()
    assert report(capsys, "compare", "card:1", "card:1")
