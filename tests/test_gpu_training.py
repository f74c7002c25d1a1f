"""On a CUDA device: CUDA graphs change nothing about a run, the guard holds, and a run goes on bit for bit.

python -m pytest -m gpu tests/test_gpu_training.py
"""

from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
import tiny
import torch

from plainvit.config import Config, Optim
from plainvit.models.fast.fp8 import explain_unsupported
from plainvit.runtime.checkpoint import Checkpoints, tensor_hash
from plainvit.train import loop
from plainvit.train.graphs import Graph
from plainvit.train.optim import Optimizers
from plainvit.train.run import fit
from plainvit.train.state import Training
from plainvit.train.step import Gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.without_figures(monkeypatch)


def on_gpu(name: Any, **changes: Any) -> Config:
    optim = Optim(name=name, lr=3e-3, warmup=0.1, weight_decay=0.1, clip=1.0)
    return runs.config(device="cuda", graphs="auto", steps=20, optim=optim, **changes)


def state(out: Path) -> dict[str, str]:
    tensors, _ = Checkpoints(out / "checkpoints", 1).newest() or ({}, {})
    return {name: tensor_hash({name: tensor}) for name, tensor in tensors.items()}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in runs.metrics(out) if "loss" in line]


@pytest.mark.parametrize(
    ("name", "precision"), [("adamw", "auto"), ("sgd", "auto"), ("muon", "auto"), ("adamw", "fp8")]
)
def test_graphs_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str) -> None:
    """Against the same functions, called; with dropout, stochastic depth, mixing, averaging and clipping."""
    if precision == "fp8" and explain_unsupported("cuda"):
        pytest.skip("needs a GPU with fp8")
    captured: list[Graph] = []
    original = Graph._capture

    def counted(graph: Graph, tensors: tuple[torch.Tensor, ...]) -> None:
        original(graph, tensors)
        captured.append(graph)

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "_capture", counted)
        fit(on_gpu(name, precision=precision), tmp_path / "graphs", quiet=True)
    assert len(captured) == 2
    assert all(graph.graph for graph in captured)
    with monkeypatch.context() as patch:
        patch.setattr("plainvit.train.graphs.WARM", 10**9)
        fit(on_gpu(name, precision=precision), tmp_path / "called", quiet=True)
    assert losses(tmp_path / "graphs") == losses(tmp_path / "called")
    assert state(tmp_path / "graphs") == state(tmp_path / "called")


def test_the_steps_that_hours_time_are_captured_in_training_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of the timing is the one that the run replays: dropout and stochastic depth are in it."""
    modes: list[bool] = []
    original = Gradients.__call__

    def recorded(gradients: Gradients, *rest: Any, **named: Any) -> torch.Tensor:
        modes.append(all(module.training for module in gradients.forward.modules()))
        return original(gradients, *rest, **named)

    monkeypatch.setattr(Gradients, "__call__", recorded)
    fit(on_gpu("adamw", hours=1.0), tmp_path / "hours", quiet=True)
    assert modes
    assert all(modes)
    fit(on_gpu("adamw"), tmp_path / "plain", quiet=True)
    assert losses(tmp_path / "hours") == losses(tmp_path / "plain")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fit(on_gpu(name), tmp_path / "whole", quiet=True)
    step = loop.take_step

    def stopping(run: Training, *rest: Any) -> Any:
        if run.progress.step == 11:
            raise RuntimeError("stopped")
        return step(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", stopping)
        with pytest.raises(RuntimeError, match="stopped"):
            fit(on_gpu(name), tmp_path / "cut", quiet=True)
    fit(on_gpu(name), tmp_path / "cut", quiet=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert state(tmp_path / "cut") == state(tmp_path / "whole")


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_a_restored_optimizer_has_the_layout_of_a_new_one(name: Any) -> None:
    model = tiny.vit(torch.float32).cuda()

    def stepped(state: dict[str, torch.Tensor] | None) -> tuple[Optimizers, dict[str, Any]]:
        ours = Optimizers(model, model.named_parameters(), Optim(name=name))
        if state:
            ours.load({key: tensor.cpu() for key, tensor in state.items()})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        ours.step()
        return ours, {key: (value.device, value.dtype, value.shape) for key, value in ours.state().items()}

    ours, new = stepped(None)
    assert stepped(ours.state())[1] == new


def test_a_bad_step_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pixel of one batch is NaN, long after the graphs were captured."""
    runs.spoil_a_batch(monkeypatch, 9)
    seen: dict[int, tuple[str, str]] = {}
    step = loop.take_step

    def watched(run: Training, *rest: Any) -> Any:
        number, before = run.progress.step + 1, tensor_hash(run.tensors())
        found = step(run, *rest)
        seen[number] = before, tensor_hash(run.tensors())
        return found

    monkeypatch.setattr(loop, "take_step", watched)
    fit(on_gpu("muon"), tmp_path, quiet=True)
    assert [number for number, (before, after) in seen.items() if before == after] == [9]
    assert Checkpoints(tmp_path / "captures", 1).steps() == [9]
