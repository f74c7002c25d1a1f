"""`--search`: the learning rate, chosen on held-out training images (paper, B.1.1)."""

import logging
import math
from collections.abc import Callable
from typing import Any

from plainvit.config import Config
from plainvit.data.splits import Splits, open_splits
from plainvit.evaluate.grid import choose_best, warn_at_edge
from plainvit.train.loop import validation_score
from plainvit.train.nonfinite import DivergedError

log = logging.getLogger("plainvit")


def check_search(config: Config) -> None:
    if not config.optim.grid:
        raise ValueError("--search needs rates to try: give --optim.grid 0.001 0.003 0.01 0.03")
    if open_splits(config.replace(holdout=config.search_holdout)).val is None:
        raise ValueError("--search needs held-out images: give --search-holdout 0.1 to hold out a tenth")


def search_rates(config: Config, run: Callable[[Config, Splits, float], dict[str, Any]]) -> Config:
    """The config with the best rate of optim.grid.

    Args:
        config: The run whose rate is searched.
        run: Trains with one rate and returns the metrics on held-out images.
    """
    held_out = config.replace(holdout=config.search_holdout)
    splits = open_splits(held_out)
    splits.test = None  # read once, by the run that follows
    scores: dict[float, tuple[float, float]] = {}  # rate -> (score, negative NLL)
    for lr in config.optim.grid:
        try:
            metrics = run(held_out.replace(optim=config.optim.replace(lr=lr, grid=())), splits, lr)
        except DivergedError:
            log.warning("search: lr %g diverges", lr)
            scores[lr] = -math.inf, 0.0
            continue
        value = f"{metrics['top1']:.2%}" if "top1" in metrics else f"loss {metrics['loss']:.4f}"
        log.warning("search: lr %g gives %s on held-out images", lr, value)
        scores[lr] = validation_score(metrics), -(metrics.get("nll") or 0.0)
    best = choose_best(scores)
    if scores[best][0] == -math.inf:
        raise DivergedError("every rate of --optim.grid diverges: give lower ones")
    log.warning("search: using lr %g", best)
    warn_at_edge(best, scores, "search: lr", "extend --optim.grid")
    return config.replace(optim=config.optim.replace(lr=best))
