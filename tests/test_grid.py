"""Searches over a grid choose the best value and warn if it is at the edge."""

import math
from typing import Any

import pytest
import small_runs as runs
import torch

from plainvit.config import Optim, Probes
from plainvit.evaluate import probe_sets
from plainvit.evaluate.features import Features
from plainvit.evaluate.grid import choose_best, warn_at_edge
from plainvit.train.nonfinite import DivergedError
from plainvit.train.search import search_rates


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({1.0: 0.1, 2.0: 0.3, 3.0: 0.2}, 2.0),
        ({1.0: 0.3, 2.0: 0.3, 3.0: 0.2}, 2.0),  # ties: not at the edge
        ({1.0: 0.1, 2.0: 0.3, 3.0: 0.3, 4.0: 0.3, 5.0: 0.1}, 3.0),  # the middle
        ({1.0: 0.3, 2.0: 0.3, 3.0: 0.3, 4.0: 0.3}, 2.0),
        ({0.0: 0.3, 1.0: 0.2, 2.0: 0.3}, 0.0),  # nothing lies below 0
        ({1.0: (0.5, -2.0), 2.0: (0.5, -1.0), 3.0: (0.4, 0.0)}, 2.0),
        ({1.0: -math.inf, 2.0: 0.1}, 2.0),
    ],
)
def test_the_best_value_is_chosen_in_any_order(scores: dict[float, Any], best: float) -> None:
    assert choose_best(scores) == best
    assert choose_best(dict(reversed(scores.items()))) == best


@pytest.mark.parametrize(
    ("value", "values", "edge"),
    [(1.0, (1, 2, 3), True), (3.0, (3, 1, 2), True), (2.0, (1, 2, 3), False), (0.0, (0, 1), False), (1.0, (1,), False)],
)
def test_only_a_value_at_the_edge_is_warned_of(
    value: float, values: tuple[float, ...], edge: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert warn_at_edge(value, values, "lr", "extend --optim.grid") == edge
    assert ["--optim.grid" in line for line in caplog.messages] == [True] * edge


# Searches in the package ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "edge"), [((1e-9, 1e-8), True), ((0.0, 1e-8), None), ((1e-3,), False)])
def test_the_linear_probe_warns_of_an_l2_at_the_edge(
    grid: tuple[float, ...], edge: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    labels = torch.arange(120) % 3
    features = torch.eye(3, 8)[labels] + torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    noisy = Features(features, labels, torch.arange(120), 0)
    settings = Probes(method=("linear",), linear_l2=grid)
    l2 = probe_sets.run_probes(probe_sets.Pair(noisy, noisy, 3), settings)["linear"]["l2"]
    assert any("--linear-l2" in line for line in caplog.messages) == (l2 > 0 if edge is None else edge)


@pytest.mark.parametrize(
    ("scores", "best", "edge"),
    [
        ({0.1: 0.5, 0.2: 0.7, 0.3: 0.6}, 0.2, False),
        ({0.1: 0.5, 0.2: 0.6, 0.3: 0.7}, 0.3, True),
        ({0.1: 0.7, 0.2: 0.6, 0.3: 0.5}, 0.1, True),
        ({0.1: 0.5, 0.2: 0.7, 0.3: None}, 0.2, False),  # beyond it a run diverges
    ],
)
def test_the_learning_rate_search_warns_of_a_rate_at_the_edge(
    scores: dict[float, float | None], best: float, edge: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: object, __: object, lr: float) -> dict[str, float]:
        top1 = scores[lr]
        if top1 is None:
            raise DivergedError("it diverged")
        return {"top1": top1, "nll": 1.0}

    config = runs.config(optim=Optim(grid=tuple(scores)), search_holdout=0.1)
    assert search_rates(config, run).optim.lr == best
    assert any("--optim.grid" in line for line in caplog.messages) == edge
