"""Probe frozen features of a model on one or more datasets; probe.py computes few-shot, k-NN and linear classifiers.

    plainvit probe WEIGHTS --data cifar10 oxford-pets flowers102 --data-root DIR
    plainvit probe WEIGHTS --data photos/ --method fewshot knn linear

Each image passes the model once, with the model's own preprocessing (big_vision's few-shot evaluator resizes to 256 x
256 and crops the center 224 x 224 for every model). Accuracies are top-1 on all images of the test split.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from plainvit import __version__
from plainvit.config import Probes
from plainvit.data.decode import DataError
from plainvit.data.sources import MissingSplitError, Source, open_source
from plainvit.data.splits import hold_out
from plainvit.evaluate import probe
from plainvit.evaluate.features import Features, extract
from plainvit.evaluate.grid import warn_at_edge
from plainvit.evaluate.labels import check_labels
from plainvit.evaluate.predictor import Predictor

log = logging.getLogger("plainvit")
HOLDOUT = 0.2  # of a folder without splits


@dataclass
class Pair:
    """Features to train a probe on and to test it on."""

    train: Features
    test: Features
    classes: int


def probe_sets(
    predictor: Predictor,
    specs: Sequence[str],
    settings: Probes,
    *,
    split: str = "test",
    data_root: str | Path | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Probes each dataset; returns a card per dataset."""
    if not specs or len(set(specs)) < len(specs):
        raise ValueError(f"--data must name each dataset once, got {', '.join(specs) or 'none'}")
    opened = [open_pair(spec, split, data_root, settings) for spec in specs]  # report bad data before any work
    cards: list[dict[str, Any]] = []
    for spec, (train, test) in zip(specs, opened, strict=True):
        options: dict[str, Any] = {"cache": cache, "workers": workers, "quiet": quiet}
        pair = Pair(extract(predictor, train, **options), extract(predictor, test, **options), len(train.classes))
        started = time.perf_counter()
        results = run_probes(pair, settings)
        card = _describe(predictor, spec, train, test, pair) | {"settings": asdict(settings)}
        cards.append(card | {"results": results, "seconds": round(time.perf_counter() - started, 2)})
    return cards


def run_probes(pair: Pair, settings: Probes) -> dict[str, Any]:
    """The results of each method in the settings."""
    probes = {"fewshot": few_shot, "knn": _run_knn, "linear": _run_linear}
    return {name: run(pair, settings) for name, run in probes.items() if name in settings.method}


def few_shot(pair: Pair, settings: Probes) -> dict[str, Any]:
    """For each number of shots: mean and sample standard deviation over the seeds."""
    labels = pair.train.labels.numpy()
    top1s: dict[int, list[float]] = {shots: [] for shots in settings.shots}
    for seed in range(settings.seeds):
        for shots, positions in probe.draw_shots(labels, pair.classes, settings.shots, seed).items():
            support = torch.from_numpy(positions)
            features, targets = pair.train.features[support], pair.train.labels[support]
            fitted = probe.least_squares(features, targets, pair.classes, settings.l2)
            top1s[shots].append(accuracy(fitted.predict(pair.test.features), pair.test.labels))
    counts = np.bincount(labels, minlength=pair.classes)
    return {
        str(shots): {
            "l2": settings.l2,
            "top1": statistics.fmean(values),
            "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
            "seeds": values,
            "support": int(np.minimum(counts, shots).sum()),
            "classes_with_fewer": int((counts < shots).sum()),
        }
        for shots, values in top1s.items()
    }


def _run_knn(pair: Pair, settings: Probes) -> dict[str, Any]:
    train, test = pair.train, pair.test
    images = len(train.features)
    ks = settings.k or tuple(k for k in probe.KS if k <= images)
    if max(ks) > images:  # `open_pair` counts images that cannot be read, too
        raise ValueError(f"--k {max(ks)} is above the {images:,} training images that can be read: use --k {images}")
    predicted = probe.neighbors(train.features, train.labels, pair.classes, test.features, ks)
    return {str(k): accuracy(classes, test.labels) for k, classes in predicted.items()}


def _run_linear(pair: Pair, settings: Probes) -> dict[str, Any]:
    features, labels = pair.train.features, pair.train.labels
    fitted, l2, tried = probe.search_logistic(features, labels, pair.classes, settings.linear_l2)
    wider = l2 * 100 if l2 == max(settings.linear_l2) else l2 / 100
    warn_at_edge(l2, settings.linear_l2, "linear probe: l2", f"extend --linear-l2 to {wider:g}")
    return {
        "top1": accuracy(fitted.predict(pair.test.features), pair.test.labels),
        "l2": l2,
        "converged": fitted.converged,
        "held_out": {repr(l2): value for l2, value in sorted(tried.items())},
    }


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Fraction of correct predictions."""
    return int((predicted == labels).sum()) / len(labels)


def open_pair(spec: str, split: str, data_root: str | Path | None, settings: Probes) -> tuple[Source, Source]:
    """The images to fit probes on and to test them on; a folder without splits holds out a part of each class."""
    train = open_source(spec, "train", data_root=data_root)
    test = _open_first(spec, (split, "val"), data_root)
    if test is None:
        if np.bincount(train.labels[train.labels >= 0], minlength=1).max() < 2:
            raise DataError(f"{spec} has no {split} images, and no class with two images to hold one out: add images")
        train, test = hold_out(train, HOLDOUT)
        counts = f"{len(test):,} of {len(train) + len(test):,} images"
        log.warning("%s has no %s images: %s are held out to test on", spec, split, counts)
    if train.classes != test.classes:
        counts = f"{len(test.classes)} and {len(train.classes)}"
        raise DataError(f"the {split} split of {spec} has other classes than its train split ({counts})")
    check_labels(train)
    check_labels(test)
    untrained = np.setdiff1d(test.labels, train.labels)
    if len(untrained):
        name = train.classes[untrained[0]]
        raise DataError(f"{spec} has no training image of the class {name!r}, which its {split} split has")
    if settings.k and max(settings.k) > len(train):
        raise ValueError(f"--k {max(settings.k)} is above the {len(train):,} training images of {spec}")
    return train, test


def _open_first(spec: str, splits: Sequence[str], data_root: str | Path | None) -> Source | None:
    """The first of these splits that the data has, if any."""
    for split in splits:
        with contextlib.suppress(MissingSplitError):
            return open_source(spec, split, data_root=data_root)
    return None


def _describe(predictor: Predictor, spec: str, train: Source, test: Source, pair: Pair) -> dict[str, Any]:
    return {
        "kind": "probe",
        "plainvit": __version__,
        "model": str(predictor.source),
        **predictor.describe(),
        "width": pair.test.features.shape[1],
        "data": spec,
        "split": test.split,
        "fingerprint": test.fingerprint(),
        "n": len(pair.test.labels),
        "unreadable": pair.test.unreadable,
        "classes": pair.classes,
        "train": {"fingerprint": train.fingerprint(), "n": len(pair.train.labels), "unreadable": pair.train.unreadable},
        "cached": pair.train.cached and pair.test.cached,
    }


# Printing -------------------------------------------------------------------------------------------------------------


def table(cards: list[dict[str, Any]]) -> Group:
    """One table: a row per probe, a column per dataset."""
    first, settings = cards[0], cards[0]["settings"]
    names = ", ".join(f"{card['data']} ({card['n']:,} {card['split']} images)" for card in cards)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("top-1, %", style="cyan", no_wrap=True)
    for card in cards:
        shown.add_column(Text(Path(card["data"]).name), justify="right", overflow="fold")
    columns = [_list_cells(card["results"]) for card in cards]
    for title in dict.fromkeys(title for column in columns for title in column):
        shown.add_row(title, *(column.get(title, "-") for column in columns))
    heading = f"{first['model']}: {first['width']} features at {first['image_size'][0]} px; {names}\n"
    note = f"few-shot: least squares, l2 {settings['l2']:g}, mean ± sd of {settings['seeds']} seeds"
    return Group(Text(heading), shown, *([Text(note, style="dim")] if "fewshot" in first["results"] else []))


def _list_cells(results: Mapping[str, Any]) -> dict[str, str]:
    """The results of one dataset by their titles."""
    cells: dict[str, str] = {}
    for shots, result in results.get("fewshot", {}).items():
        few = f" ({result['classes_with_fewer']} classes have fewer)" if result["classes_with_fewer"] else ""
        cells[f"{shots} per class"] = f"{100 * result['top1']:.2f} ± {100 * result['sd']:.2f}{few}"
    cells |= {f"k-NN, k = {k}": f"{100 * top1:.2f}" for k, top1 in results.get("knn", {}).items()}
    linear = results.get("linear")
    if linear:
        remark = "" if linear["converged"] else ", not converged"
        cells["linear"] = f"{100 * linear['top1']:.2f} (l2 {linear['l2']:g}{remark})"
    return cells
