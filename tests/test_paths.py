"""A path with a colon is a file, not a URI, for every reader and writer."""

import ast
from pathlib import Path

import pytest
from pictures import plant_classes, png, write_parquet
from shell import Capture, report, run, save_model

FILES = sorted((Path(__file__).parent.parent / "plainvit").rglob("*.py"))


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


OPENERS = {
    *("pq.ParquetFile", "pq.ParquetWriter", "pq.read_table", "pq.write_table", "pq.read_metadata", "pq.read_schema"),
    *("pq.ParquetDataset", "pa.OSFile", "pa.input_stream", "pa.output_stream", "pa.ipc.open_file"),
    *("pa.ipc.open_stream", "pa.csv.read_csv", "pa.csv.write_csv"),
}
OPENED = ("map_file(", "file", "sink", "row['rows']")  # what pyarrow is given: never a path


def test_pyarrow_is_never_given_a_path() -> None:
    """It would try to read it as a URI; `pyarrow.dataset` and `pyarrow.fs` do nothing else."""
    texts = {file: file.read_text() for file in FILES}
    calls = 0
    for file, text in texts.items():
        if "pyarrow" not in text:
            continue
        assert "pyarrow.dataset" not in text, file
        assert "pyarrow.fs" not in text, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in OPENERS:
                calls += 1
                given = ast.unparse(node.args[ast.unparse(node.func) == "pq.write_table"])
                assert given.startswith(OPENED), f"{file}: {ast.unparse(node)}"
    assert calls > 5
