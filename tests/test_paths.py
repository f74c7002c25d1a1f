"""Paths are names of files and nothing else: one with a colon is no URI, for any reader or writer."""

import ast
import contextlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tiny
import torch
from pictures import plant_classes, png, write_parquet

import plainvit
from plainvit.cli import main

FILES = sorted((Path(__file__).parent.parent / "plainvit").rglob("*.py"))
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: only a relative path can begin with a scheme."""
    monkeypatch.chdir(tmp_path)
    plant_classes(tmp_path / "photos:1", {"a": 2, "b": 2})
    plainvit.save(tiny.vit(torch.float32, classes=2), "m:1.safetensors")
    return tmp_path


def run(*words: str) -> None:
    with contextlib.suppress(SystemExit):
        main(list(words))
        return
    pytest.fail(f"{words} ended with an exit code")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_predictions_go_to_a_path_with_a_colon(here: Path, suffix: str) -> None:
    run("predict", "m:1.safetensors", "photos:1", "--workers", "0", "--batch", "1", "--out", f"out:1.{suffix}")
    assert (here / f"out:1.{suffix}").stat().st_size
    assert not (here / f"out:1.{suffix}.parts").exists()


def test_evaluations_are_written_and_compared_below_a_folder_with_a_colon(here: Path, capsys: Capture) -> None:
    for out in ("lr:3e-4", "lr:1e-3"):
        run("evaluate", "m:1.safetensors", "--data", "photos:1", "--workers", "0", "--out", out)
    with (here / "lr:3e-4" / "images.parquet").open("rb") as file:
        assert pq.read_table(file).num_rows == 4
    capsys.readouterr()
    run("compare", "lr:3e-4", "lr:1e-3", "--json")
    assert json.loads(capsys.readouterr().out)


def test_packed_data_is_written_and_read_in_a_folder_with_a_colon(here: Path, capsys: Capture) -> None:
    run("data", "pack", "photos:1", "pk:1")
    capsys.readouterr()
    run("data", "info", "pk:1", "--json")
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["images"] == 4
    assert (here / "pk:1" / "index.parquet").is_file()


@pytest.mark.parametrize("name", ["pq:1", "pq:1/train:0.parquet", "train:0.parquet"])
def test_parquet_is_read_by_a_path_with_a_colon(here: Path, capsys: Capture, name: str) -> None:
    path = here / (name if name.endswith("parquet") else f"{name}/train-00.parquet")
    write_parquet(path, [png(1), png(2)], [0, 1]) if not path.exists() else None
    run("data", "info", name, "--json")
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["images"] == 2


def test_probes_and_conversions_take_paths_with_a_colon(here: Path) -> None:
    for name in ("train", "test"):
        plant_classes(here / "set:1" / name, {"a": 6, "b": 6}, start=20 if name == "test" else 0)
    run("probe", "m:1.safetensors", "--data", "set:1", "--cache", "c:1", "--workers", "0", "--json")
    for name in ("t:1.safetensors", "t:1.pth"):
        run("convert", "m:1.safetensors", name, "--format", "timm", "--drop", "activation")
    run("convert", "m:1.safetensors", "g:1.npz", "--format", "google")


OPENERS = {
    *("pq.ParquetFile", "pq.ParquetWriter", "pq.read_table", "pq.write_table", "pq.read_metadata", "pq.read_schema"),
    *("pq.ParquetDataset", "pa.OSFile", "pa.input_stream", "pa.output_stream", "pa.ipc.open_file"),
    *("pa.ipc.open_stream", "pa.csv.read_csv", "pa.csv.write_csv"),
}
OPENED = ("map_file(", "file", "sink", "row['rows']")  # what pyarrow is given: never a path


def test_pyarrow_is_never_given_a_path() -> None:
    """It would try to read it as a URI; `pyarrow.dataset` and `pyarrow.fs` do nothing else."""
    calls = 0
    for file in FILES:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pyarrow.dataset" not in ast.unparse(node), file
                assert "pyarrow.fs" not in ast.unparse(node), file
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in OPENERS:
                continue
            calls += 1
            place = 1 if ast.unparse(node.func) == "pq.write_table" else 0
            given = ast.unparse(node.args[place])
            assert given.startswith(OPENED), f"{file}: {ast.unparse(node)}"
    assert calls > 5
