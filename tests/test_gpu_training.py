"""On a CUDA device: CUDA graphs change nothing about a run, non-finite steps are skipped, runs resume bit for bit.

python -m pytest -m gpu tests/test_gpu_training.py
"""

from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
import torch
from small_runs import before_step, losses, stopped_run

from plainvit.config import Config, Optim
from plainvit.data.loader import Batch
from plainvit.models.fast.fp8 import explain_unsupported
from plainvit.runtime.checkpoint import Checkpoints, hash_tensors
from plainvit.train.graphs import Graph
from plainvit.train.objectives import Classify
from plainvit.train.run import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("no_figures"),
]


def on_gpu(name: Any, **changes: Any) -> Config:
    optim = Optim(name=name, lr=3e-3, warmup=0.1, weight_decay=0.1, clip=1.0)
    return runs.config(device="cuda", graphs="auto", steps=20, optim=optim, **changes)


def state(out: Path) -> dict[str, str]:
    tensors, _ = Checkpoints(out / "checkpoints", 1).read_newest() or ({}, {})
    return {name: hash_tensors({name: tensor}) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "precision"), [("adamw", "auto"), ("sgd", "auto"), ("muon", "auto"), ("adamw", "fp8")]
)
def test_graphs_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str) -> None:
    """Against the same functions, called; with dropout, stochastic depth, mixing, averaging and clipping."""
    if precision == "fp8" and explain_unsupported("cuda"):
        pytest.skip("needs a GPU with fp8")
    captured: list[Graph] = []
    original = Graph._capture

    def capture(graph: Graph, *rest: Any) -> None:
        original(graph, *rest)
        captured.append(graph)

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "_capture", capture)
        fit(on_gpu(name, precision=precision), tmp_path / "graphs", quiet=True)
    assert len(captured) == 2
    assert all(graph.graph for graph in captured)
    with monkeypatch.context() as patch:
        patch.setattr("plainvit.train.graphs.WARM", 10**9)
        fit(on_gpu(name, precision=precision), tmp_path / "called", quiet=True)
    assert losses(tmp_path / "graphs") == losses(tmp_path / "called")
    assert state(tmp_path / "graphs") == state(tmp_path / "called")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    fit(on_gpu(name), tmp_path / "whole", quiet=True)
    stopped_run(on_gpu(name), tmp_path / "stopped", 12)
    fit(on_gpu(name), tmp_path / "stopped", quiet=True)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert state(tmp_path / "stopped") == state(tmp_path / "whole")


def test_a_non_finite_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of one batch are NaN, long after the graphs were captured."""
    prepare = Classify.make_inputs

    def spoil(objective: Classify, batch: Batch, number: int) -> tuple[torch.Tensor, ...]:
        images, *rest = prepare(objective, batch, number)
        return images.float() * (float("nan") if number == 8 else 1.0), *rest

    monkeypatch.setattr(Classify, "make_inputs", spoil)
    hashes: dict[int, str] = {}
    for number in range(8, 11):
        before_step(monkeypatch, number, lambda run: hashes.update({run.progress.step: hash_tensors(run.tensors())}))
    fit(on_gpu("muon"), tmp_path, quiet=True)
    assert hashes[7] != hashes[8] == hashes[9]
    assert Checkpoints(tmp_path / "captures", 1).steps() == [9]
