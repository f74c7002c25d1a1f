"""Probe frozen features of a model on one or more datasets: few-shot as in big_vision, k-NN, linear.

    plainvit probe WEIGHTS --data cifar10 oxford-pets flowers102 --data-root DIR
    plainvit probe WEIGHTS --data photos/ --method fewshot knn linear

Each image passes the model once, with the model's own preprocessing (big_vision's few-shot evaluator resizes to 256 x
256 and crops the centre 224 x 224 for every model). Accuracies are top-1 on all images of the test split.
"""

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from plainvit import __version__
from plainvit.config import Checked, to_json
from plainvit.data.decode import DataError
from plainvit.data.order import permutation
from plainvit.data.sources import Source, Subset, open_source
from plainvit.evaluate import probe
from plainvit.evaluate.features import Features, extract
from plainvit.evaluate.grid import warn_at_edge
from plainvit.evaluate.predictor import Predictor

Method = Literal["fewshot", "knn", "linear"]


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Settings of the probes; the few-shot defaults are big_vision's."""

    methods: tuple[Method, ...] = ("fewshot",)
    shots: tuple[int, ...] = probe.SHOTS
    seeds: int = probe.SEEDS
    l2: float = probe.L2
    sweep: bool = False  # also try every l2 of probe.L2_SWEEP
    k: tuple[int, ...] = ()  # neighbours; (): those of probe.KS up to the number of training images
    temperature: float = probe.TEMPERATURE
    linear_l2: tuple[float, ...] = probe.LINEAR_L2
    per_class: int = 0  # largest number of training images per class; 0: all

    def __post_init__(self) -> None:
        self._check(positive=("shots", "seeds", "k"), natural=("per_class",))
        for name in ("methods", "shots", "linear_l2"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is empty: give at least one value")
        if self.l2 <= 0 or self.temperature <= 0 or min(self.linear_l2) < 0:
            raise ValueError("--l2 and --temperature must be above 0, --linear-l2 at least 0")


@dataclass
class Pair:
    """Features to train a probe on and to test it on."""

    train: Features
    test: Features
    classes: int


def probe_sets(
    predictor: Predictor,
    specs: Sequence[str],
    settings: Settings,
    *,
    split: str = "test",
    data_root: str | Path | None = None,
    cache: Path | None = None,
    workers: int = 0,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Probes each dataset; returns a card per dataset."""
    if not specs or len(set(specs)) < len(specs):
        raise ValueError(f"--data must name each dataset once, got {', '.join(specs) or 'none'}")
    opened = [_open(spec, split, data_root, settings) for spec in specs]  # report bad data before any work
    cards: list[dict[str, Any]] = []
    for spec, (train, test) in zip(specs, opened, strict=True):
        options: dict[str, Any] = {"cache": cache, "workers": workers, "quiet": quiet}
        pair = Pair(extract(predictor, train, **options), extract(predictor, test, **options), len(train.classes))
        started = time.perf_counter()
        results = run_probes(pair, settings)
        card = _describe(predictor, spec, train, test, pair) | {"settings": asdict(settings)}
        cards.append(card | {"results": results, "seconds": round(time.perf_counter() - started, 2)})
    if settings.sweep:
        _add_chosen_l2(cards, settings)
    return cards


def run_probes(pair: Pair, settings: Settings) -> dict[str, Any]:
    """The results of each method in the settings."""
    probes = {"fewshot": few_shot, "knn": _run_knn, "linear": _run_linear}
    return {name: run(pair, settings) for name, run in probes.items() if name in settings.methods}


def few_shot(pair: Pair, settings: Settings) -> dict[str, Any]:
    """For each number of shots: mean and standard deviation over the seeds; with `sweep`, for every l2."""
    l2s = tuple(dict.fromkeys((settings.l2, *(probe.L2_SWEEP if settings.sweep else ()))))
    labels = pair.train.labels.numpy()
    right: dict[int, dict[float, list[float]]] = {shots: {l2: [] for l2 in l2s} for shots in settings.shots}
    for seed in range(settings.seeds):
        for shots, positions in probe.draw_shots(labels, pair.classes, settings.shots, seed).items():
            support = torch.from_numpy(positions)
            solved = probe.solve(pair.train.features[support], pair.train.labels[support], pair.classes)
            for l2, guesses in solved.sweep(pair.test.features, l2s).items():
                right[shots][l2].append(accuracy(guesses, pair.test.labels))
    counts = np.bincount(labels, minlength=pair.classes)
    return {str(shots): _summarise_shots(by_l2, shots, counts, settings) for shots, by_l2 in right.items()}


def _summarise_shots(
    by_l2: Mapping[float, list[float]], shots: int, counts: np.ndarray, settings: Settings
) -> dict[str, Any]:
    summary: dict[str, Any] = {"l2": settings.l2, **_summarise_seeds(by_l2[settings.l2])}
    summary |= {"support": int(np.minimum(counts, shots).sum()), "classes_with_fewer": int((counts < shots).sum())}
    if settings.sweep:
        summary["sweep"] = {repr(l2): _summarise_seeds(by_l2[l2]) for l2 in probe.L2_SWEEP}
    return summary


def _summarise_seeds(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation, which is 0 for one seed."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"top1": statistics.fmean(values), "sd": sd, "seeds": values}


def _add_chosen_l2(cards: list[dict[str, Any]], settings: Settings) -> None:
    """Adds to each card the l2 chosen on the other datasets, and its accuracy."""
    for shots in map(str, settings.shots):
        results = {card["data"]: card["results"].get("fewshot", {}).get(shots) for card in cards}
        if not all(results.values()):
            return
        tops = {name: {float(l2): of["top1"] for l2, of in result["sweep"].items()} for name, result in results.items()}
        for name, l2 in probe.choose_l2(tops).items():
            at_edge = warn_at_edge(l2, probe.L2_SWEEP, f"{name}, {shots} shots: l2", "use --l2 for other values")
            results[name]["chosen"] = {"l2": l2, **results[name]["sweep"][repr(l2)], "at_edge": at_edge}


def _run_knn(pair: Pair, settings: Settings) -> dict[str, Any]:
    count = len(pair.train.features)
    ks = settings.k or tuple(k for k in probe.KS if k <= count)
    found = probe.neighbours(
        pair.train.features, pair.train.labels, pair.classes, pair.test.features, ks, settings.temperature
    )
    return {
        kind: {str(k): accuracy(guesses, pair.test.labels) for k, guesses in getattr(found, kind).items()}
        for kind in ("majority", "weighted")
    }


def _run_linear(pair: Pair, settings: Settings) -> dict[str, Any]:
    features, labels = pair.train.features, pair.train.labels
    if len(settings.linear_l2) == 1:
        l2, tried, edge = settings.linear_l2[0], {}, False
        fitted = probe.logistic(features, labels, pair.classes, l2)
    else:
        fitted, l2, tried = probe.search_logistic(features, labels, pair.classes, settings.linear_l2)
        edge = warn_at_edge(l2, tried, "linear probe: l2", f"extend --linear-l2 to {_extend(l2, tried):g}")
    return {
        "top1": accuracy(fitted.predict(pair.test.features), pair.test.labels),
        "l2": l2,
        "at_edge": edge,
        "converged": fitted.converged,
        "held_out": {repr(one): value for one, value in sorted(tried.items())},
    }


def _extend(l2: float, tried: Collection[float]) -> float:
    """A value outside of the grid: a hundred times larger or smaller."""
    return l2 * 100 if l2 == max(tried) else l2 / 100


def accuracy(guesses: Tensor, labels: Tensor) -> float:
    """Fraction of correct predictions."""
    return int((guesses == labels).sum()) / len(labels)


def _open(spec: str, split: str, data_root: str | Path | None, settings: Settings) -> tuple[Source, Source]:
    train = open_source(spec, "train", data_root=data_root)
    if split == "train":
        raise ValueError("--split train is not supported, as probes are fitted on it: use --split test or val")
    test = open_source(spec, split, data_root=data_root)
    if train.classes != test.classes:
        raise DataError(
            f"the {split} split of {spec} has other classes than its train split ({len(test.classes)} and "
            f"{len(train.classes)})"
        )
    for source in (train, test):
        if source.labels.min() < 0:
            raise DataError(f"{spec} has images without a label in its {source.split} split")
    counts = np.bincount(train.labels, minlength=len(train.classes))
    if not counts.all() and np.isin(test.labels, np.flatnonzero(counts == 0)).any():
        empty = train.classes[int(np.flatnonzero(counts == 0)[0])]
        raise DataError(f"{spec} has no training image of the class {empty!r}, which its {split} split has")
    train = _limit_classes(train, settings.per_class) if settings.per_class else train
    if settings.k and max(settings.k) > len(train):
        raise ValueError(f"--k {max(settings.k)} is above the {len(train):,} training images of {spec}")
    return train, test


def _limit_classes(source: Source, count: int) -> Source:
    """At most `count` images of each class, the same ones each time."""
    members = [np.flatnonzero(source.labels == label) for label in range(len(source.classes))]
    chosen = [positions[permutation(0, label, len(positions))[:count]] for label, positions in enumerate(members)]
    return Subset(source, np.sort(np.concatenate(chosen)))


def _describe(predictor: Predictor, spec: str, train: Source, test: Source, pair: Pair) -> dict[str, Any]:
    return {
        "kind": "probe",
        "plainvit": __version__,
        "model": str(predictor.source),
        "weights": predictor.weights_hash,
        "image_size": list(predictor.size),
        "preprocess": to_json(predictor.preprocess),
        "precision": str(predictor.dtype).removeprefix("torch."),
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


def tables(cards: list[dict[str, Any]]) -> Group:
    """A table of accuracies per method: a row per dataset, a column per number of shots or neighbours."""
    first = cards[0]
    settings, results = first["settings"], {card["data"]: card["results"] for card in cards}
    methods = first["results"]
    names = ", ".join(f"{card['data']} ({card['n']:,} {card['split']} images)" for card in cards)
    shown: list[Any] = [Text(f"{first['model']}: {first['width']} features at {first['image_size'][0]} px; {names}")]
    if "fewshot" in methods:
        title = f"few-shot least squares, l2 {_format_l2(settings['l2'])}, mean ± sd of {settings['seeds']} seeds"
        shown += [_title(title), _fewshot_table(results, settings)]
        for name, of in results.items() if settings["sweep"] else ():
            shown += [_title(f"{name}, every l2"), _sweep_table(of["fewshot"])]
    if "knn" in methods:
        shown += [_title("k-NN by cosine"), _knn_table(results)]
    if "linear" in methods:
        shown += [_title("linear probe, logistic regression by L-BFGS"), _linear_table(results)]
    return Group(*shown)


def _title(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, style="cyan", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _format(result: Mapping[str, Any]) -> str:
    return f"{100 * result['top1']:.2f} ± {100 * result['sd']:.2f}"


def _format_l2(l2: float) -> str:
    """1024 -> 2^10; numbers that are no power of two stay."""
    exponent = math.log2(l2)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{l2:g}"


def _fewshot_table(results: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    shots = [str(count) for count in settings["shots"]]
    table = _table("data", [f"{count} shot" for count in shots])
    for name, of in results.items():
        table.add_row(name, *(_format(of["fewshot"][count]) for count in shots))
        fewer = [of["fewshot"][count]["classes_with_fewer"] for count in shots]
        if any(fewer):
            table.add_row("  classes with fewer", *map(str, fewer), style="dim")
        if all("chosen" in of["fewshot"][count] for count in shots):
            chosen = (of["fewshot"][count]["chosen"] for count in shots)
            table.add_row(
                "  l2 chosen on the other datasets", *(f"{_format(one)} ({_format_l2(one['l2'])})" for one in chosen)
            )
    if len(results) > 1:
        means = (statistics.fmean(of["fewshot"][count]["top1"] for of in results.values()) for count in shots)
        table.add_row("mean", *(f"{100 * mean:.2f}" for mean in means), style="bold")
    return table


def _sweep_table(shots: Mapping[str, Any]) -> Table:
    table = _table("l2", [f"{count} shot" for count in shots])
    for l2 in next(iter(shots.values()))["sweep"]:
        table.add_row(_format_l2(float(l2)), *(_format(of["sweep"][l2]) for of in shots.values()))
    return table


def _knn_table(results: Mapping[str, Any]) -> Table:
    ks = list(dict.fromkeys(k for of in results.values() for k in of["knn"]["majority"]))
    table = _table("data", ["votes", *(f"k = {k}" for k in ks)])
    for name, of in results.items():
        for kind, by_k in of["knn"].items():
            table.add_row(name, kind, *(f"{100 * by_k[k]:.2f}" if k in by_k else "-" for k in ks))
    return table


def _linear_table(results: Mapping[str, Any]) -> Table:
    table = _table("data", ["top-1", "l2", ""])
    for name, of in results.items():
        linear = of["linear"]
        remarks = {"at the edge of --linear-l2": linear["at_edge"], "not converged": not linear["converged"]}
        remark = ", ".join(words for words, holds in remarks.items() if holds)
        table.add_row(name, f"{100 * linear['top1']:.2f}", f"{linear['l2']:g}", remark)
    return table
