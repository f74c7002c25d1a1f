"""Commands of plainvit in this process: exit code, output, JSON, or the one line of an error."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny
import torch

import plainvit
from plainvit.cli import main
from plainvit.config import About

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def report(capsys: Capture, *words: object, code: int = 0) -> Any:
    """The JSON that a command prints."""
    exit_code, out, err = run(capsys, *words, "--json")
    assert exit_code == code, err
    return json.loads(out)


def fail(capsys: Capture, *words: object, code: int = 3) -> str:
    """The one line of an error; nothing else is printed to standard output."""
    exit_code, out, err = run(capsys, *words)
    assert exit_code == code, err
    assert out == ""
    (line,) = (line for line in err.splitlines() if line.startswith("plainvit: "))
    assert "Traceback" not in err
    return line


def save_model(path: Path, names: tuple[str, ...] = (), **settings: Any) -> Path:
    """A small ViT on disk, with weights that give different predictions."""
    model = tiny.vit(torch.float32, **{"image_size": (16, 16)} | settings)
    model.about = About(class_names=names)
    return plainvit.save(model, path)


def evaluate_to(capsys: Capture, out: Path, *words: object) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The card and the rows of images.parquet."""
    card = report(capsys, "evaluate", *words, "--out", out, "--device", "cpu")
    return card, pq.read_table(out / "images.parquet").to_pydict()
