"""Compare cards with the first one: differences with intervals and p-values, and published results.

    plainvit compare evaluations/vit evaluations/bit

Two cards are compared on the images that both evaluated, found by their content, so names and folders may differ
(McNemar's exact test, a paired bootstrap interval). If the runs of the cards exist, their different settings are
listed, and runs that differ only in the seed are also compared as groups (seeds.py).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plainvit.config import Config, flatten
from plainvit.disk import run_settings
from plainvit.evaluate import seeds, statistics
from plainvit.evaluate.card import Card, Rows, match_images, read_card, read_rows, read_run_settings
from plainvit.evaluate.permuted_labels import assign_classes
from plainvit.weights.published import PUBLISHED

UNITS = {**dict.fromkeys(("top1", "top5", "precision", "recall", "f1"), "%"), "ece": "points"}  # of fractions
TITLES = {"top1": "top-1", "top5": "top-5", "nll": "NLL", "ece": "calibration error"}
TITLES |= {"precision": "precision", "recall": "recall", "f1": "F1"}
HEADINGS = {name: f"{title} %" if UNITS.get(name) == "%" else title for name, title in TITLES.items()}
HEADINGS |= {"ece": "ECE %", "precision": "prec. %"}  # eight columns fit a terminal
MIN_SHARED = 10  # images; all of them if a card has fewer
IGNORED = Config.OPERATIONAL | {"recipe"}  # settings that do not change results
MAX_SETTINGS = 12  # printed; --json has all
Shared = tuple[np.ndarray, np.ndarray]  # positions of the images that two cards share, in the rows of each


@dataclass(frozen=True)
class Entry:
    """A card to compare, with its results per image."""

    name: str
    path: Path
    card: Card
    rows: Rows

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of its run that affect results, named as the flags are; {} if the run is unknown."""
        stored = flatten(read_run_settings(self.path, self.card))
        return {key: value for key, value in stored.items() if key.partition(".")[0] not in IGNORED}

    def as_run(self) -> seeds.Run:
        """Preprocessing and precision count as settings, and so do the steps that the run was to take."""
        planned = (run_settings(self.path) or run_settings(self.card.name)).get("steps")
        inputs = {"preprocess": self.card.preprocess["hash"], "precision": self.card.precision, "steps": planned}
        return seeds.Run(self.name, self.settings | inputs, self.card.metrics)


def compare(paths: Sequence[Path]) -> dict[str, Any]:
    """All cards, with the difference of each from the first.

    Raises:
        ValueError: Two cards share too few images, or have another rule of what is correct.
    """
    if len(paths) < 2:
        raise ValueError("compare needs at least two runs: plainvit compare RUN RUN")
    entries = _read_entries(paths)
    first = entries[0]
    rows = [_describe(entry) for entry in entries]
    for row, entry in zip(rows[1:], entries[1:], strict=True):
        shared = match_images(first.rows, entry.rows)
        row["difference"] = compare_pair(first, entry, shared)
        row["settings"] = compare_settings(first, entry)
        row["remarks"] = list(_list_remarks(first, entry, shared))
    groups = seeds.groups([entry.as_run() for entry in entries if entry.settings])
    return {"data": first.card.data, "images": first.card.images, "cards": rows, "groups": groups}


def _read_entries(paths: Sequence[Path]) -> list[Entry]:
    """Entries are named by their models if these names differ, else by their paths."""
    cards = [read_card(path) for path in paths]
    names = [Path(card.name).name or card.name for card in cards]
    names = names if len(set(names)) == len(names) else list(map(str, paths))
    rows = [read_rows(path, card) for path, card in zip(paths, cards, strict=True)]
    return [Entry(*parts) for parts in zip(names, paths, cards, rows, strict=True)]


def _describe(entry: Entry) -> dict[str, Any]:
    card = entry.card
    return {
        "name": entry.name,
        "path": str(entry.path),
        "model": card.name,
        "weights": card.model["weights"],
        "classes": card.model["config"]["classes"],
        "images": card.images,
        "unreadable": card.unreadable,
        "metrics": card.metrics,
        "intervals": card.intervals,
        "published": find_published(card),
    }


def _list_remarks(a: Entry, b: Entry, shared: Shared) -> Iterator[str]:
    """Differences besides the settings that may affect the result."""
    if a.card.model["weights"] == b.card.model["weights"]:
        yield "the weights are the same"
    if a.card.preprocess["hash"] != b.card.preprocess["hash"]:
        yield f"preprocessing differs: {_describe_preprocess(a.card)}, and {_describe_preprocess(b.card)}"
    if a.card.precision != b.card.precision:
        yield f"precision differs: {a.card.precision} and {b.card.precision}"
    versions = [entry.card.environment.get("plainvit") for entry in (a, b)]
    if versions[0] != versions[1]:
        yield f"plainvit differs: {versions[0]} and {versions[1]}"
    in_a, in_b = shared
    differing = _count_different_labels(a.rows.truth[in_a], b.rows.truth[in_b])
    if differing:
        yield f"{differing:,} of the {len(in_a):,} shared images have different labels"


def _count_different_labels(a: np.ndarray, b: np.ndarray) -> int:
    """Images whose labels differ; classes with other names are matched by the images that they share."""
    _, labels = np.unique(a.astype(str), return_inverse=True)
    _, others = np.unique(b.astype(str), return_inverse=True)
    mapping = assign_classes(labels, others)
    mapped = np.array([mapping.get(label, -1) for label in labels.tolist()])
    return int((mapped != others).sum())


def compare_settings(a: Entry, b: Entry) -> dict[str, list[Any]]:
    """{"model.posemb": ["1d", "none"]}: different settings of the runs or, if one is unknown, of the models."""
    ours, theirs = a.settings, b.settings
    if not ours or not theirs:
        ours, theirs = (flatten({"model": entry.card.model["config"]}) for entry in (a, b))
    return {key: [ours.get(key), theirs.get(key)] for key in ours | theirs if ours.get(key) != theirs.get(key)}


def _describe_preprocess(card: Card) -> str:
    size = "x".join(map(str, card.preprocess.get("image_size", ())))
    settings = card.preprocess.get("settings", {})
    crop = f" {settings.get('crop')}" if settings.get("resize") == "crop" else ""
    return f"{size} px, {settings.get('resize')}{crop}, {settings.get('interpolation')}"


# Differences ----------------------------------------------------------------------------------------------------------


def compare_pair(a: Entry, b: Entry, shared: Shared) -> dict[str, Any]:
    """b - a of top1, top5 and nll on the shared images, with interval and p-value."""
    if a.card.data["rule"] != b.card.data["rule"]:
        rules = f"{a.card.data['rule']!r} and {b.card.data['rule']!r}"
        raise ValueError(
            f"{a.name} and {b.name} count different predictions as correct: {rules}; evaluate both on the same --data"
        )
    in_a, in_b = shared
    fewest = min(len(a.rows.truth), len(b.rows.truth))
    if len(in_a) < min(MIN_SHARED, fewest):
        raise ValueError(
            f"{a.name} and {b.name} share {len(in_a)} of {fewest:,} images, too few to compare: evaluate both on the "
            "same data with `plainvit evaluate MODEL --data DATA`"
        )
    return {
        "shared": len(in_a),
        "top1": _compare_accuracy(a.rows.correct[in_a], b.rows.correct[in_b]),
        "top5": _compare_accuracy(a.rows.correct_top5[in_a], b.rows.correct_top5[in_b]),
        "nll": _compare_means(b.rows.nll[in_b] - a.rows.nll[in_a]),
    }


def _compare_accuracy(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return {
        "difference": (only_second - only_first) / len(first),
        "interval": list(statistics.paired_bootstrap(only_first, only_second, len(first))),
        "p": statistics.mcnemar(only_first, only_second),
        "only_first": only_first,
        "only_this": only_second,
    }


def _compare_means(differences: np.ndarray) -> dict[str, Any]:
    """The mean difference with its interval and the p-value of a z-test."""
    center, ends = float(differences.mean()), list(statistics.mean_interval(differences))
    error = (ends[1] - ends[0]) / 2 / statistics.Z
    if error > 0:
        p = math.erfc(abs(center) / error / math.sqrt(2))
    elif error == 0:  # all differences are equal
        p = 1.0 if center == 0 else 0.0
    else:  # NaN: a single image
        p = math.nan
    return {"difference": center, "interval": ends, "p": p}


# Published results ----------------------------------------------------------------------------------------------------


def find_published(card: Card) -> list[dict[str, Any]]:
    """Published top-1 of these weights on ImageNet or ImageNet-ReaL, as a fraction, with its source."""
    results: list[dict[str, Any]] = []
    for name, entry in PUBLISHED.items():
        if card.name not in (name, f"hf:{entry.hub}"):
            continue
        top1 = {"imagenet": entry.top1, "imagenet-real": entry.real}.get(card.data["spec"])
        if top1 is not None:
            results.append({"top1": top1 / 100, "source": "timm's results for these weights"})
    return results


# Printing -------------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> Group:
    """Groups of seeds, a row per card, differences and published results."""
    rows, data, groups = report["cards"], report["data"], report["groups"]
    lines: list[RenderableType] = [Text(f"{data['spec']} ({data['split']}), correct is {data['rule']}", style="bold")]
    if groups:
        lines += [_make_group_table(groups), *(_describe_group(group, groups[0]) for group in groups[1:]), Text("")]
    lines += [_make_table(rows), Text("")]
    if groups:
        lines.append(Text("The differences of single runs are in --json.", style="dim"))
    else:
        lines += [line for row in rows[1:] for line in _describe_difference(row, rows[0])]
    for row in rows:
        lines += [Text(f"{row['name']}: {100 * peer['top1']:.2f} % in {peer['source']}") for peer in row["published"]]
    return Group(*lines)


def _make_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row per card, a column per metric."""
    hidden = () if _has_many_classes(rows) else ("top5",)
    metrics = [name for name in TITLES if name not in hidden and any(name in row["metrics"] for row in rows)]
    shown = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    shown.add_column("", overflow="fold", min_width=8)
    for title in (*(HEADINGS[name] for name in metrics), "images"):
        shown.add_column(title, justify="right")
    for row in rows:
        cells = (_format(name, row["metrics"].get(name)) for name in metrics)
        shown.add_row(Text(row["name"]), *cells, f"{row['images']:,}")
    return shown


def _make_group_table(groups: Sequence[dict[str, Any]]) -> Table:
    """A row per group: mean and standard deviation over its seeds."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("mean ± sd over seeds", overflow="fold")
    for title in (*(HEADINGS[name] for name in seeds.METRICS), "seeds"):
        shown.add_column(title, justify="right")
    for group in groups:
        pairs = ((name, group["mean"][name], group["std"][name]) for name in seeds.METRICS)
        cells = (f"{_format(name, mean)} ± {_format(name, spread)}" for name, mean, spread in pairs)
        shown.add_row(Text(group["name"]), *cells, str(len(group["seeds"])))
    return shown


def _describe_group(group: dict[str, Any], first: dict[str, Any]) -> Text:
    """The difference of a group from the first, in one line."""
    title, change = f"{group['name']} - {first['name']}", group["difference"]
    if change is None:
        return Text(f"{title}: no interval: the groups have fewer than two seeds in common")
    unpaired = f" (no matching seed: {', '.join(change['left_out'])})" if change["left_out"] else ""
    points, low, high = (f"{100 * value:+.2f}" for value in (change["top1"]["difference"], *change["top1"]["interval"]))
    return Text(f"{title}: {points} points of top-1, 95 % {low} to {high} over {len(change['seeds'])} seeds{unpaired}")


def _describe_difference(row: dict[str, Any], first: dict[str, Any]) -> list[Text]:
    shared = row["difference"]["shared"]
    same = shared == row["images"] == first["images"]
    images = "the same images" if same else f"{shared:,} shared of {first['images']:,} and {row['images']:,} images"
    lines = [Text(f"{row['name']} - {first['name']}, on {images}:")]
    for name in ("top1", "top5") if _has_many_classes([row]) else ("top1",):
        result = row["difference"][name]
        lines.append(_describe_metric(name, result, scale=100, digits=2, unit=" points"))
        counts = f"{row['name']}: {result['only_this']}, only in {first['name']}: {result['only_first']}"
        lines.append(Text(f"    correct only in {counts}"))
    lines.append(_describe_metric("nll", row["difference"]["nll"], scale=1, digits=4, unit=""))
    changes = [f"{key} {_format_setting(a)} -> {_format_setting(b)}" for key, (a, b) in row["settings"].items()]
    if changes:
        more = f", and {len(changes) - MAX_SETTINGS} more (--json)" if len(changes) > MAX_SETTINGS else ""
        lines.append(Text(f"  settings that differ: {', '.join(changes[:MAX_SETTINGS])}{more}"))
    return lines + [Text(f"  {remark}", style="yellow") for remark in row["remarks"]]


def _describe_metric(name: str, result: dict[str, Any], *, scale: int, digits: int, unit: str) -> Text:
    change, low, high = (f"{scale * value:+.{digits}f}" for value in (result["difference"], *result["interval"]))
    interval = "no interval" if math.isnan(result["interval"][0]) else f"95 % {low} to {high}"
    return Text(f"  {TITLES[name]} {change}{unit}, {interval}, {_describe_p(result['p'])}")


def _has_many_classes(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether top-5 is worth showing."""
    return any(row["classes"] > statistics.FEW_CLASSES for row in rows)


def to_unit(name: str, value: float) -> str:
    """A metric with its unit: fractions in percent or percentage points."""
    return f"{_format(name, value)} {UNITS[name]}" if name in UNITS else _format(name, value)


def _format(name: str, value: Any) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if name in UNITS else f"{value:.4f}"


def _format_setting(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


def _describe_p(p: float) -> str:
    if math.isnan(p):
        return "p unknown"
    verdict = "significant" if p < 0.05 else "not significant"
    return f"p {p:.2g}: {verdict}" if p >= 1e-4 else f"p < 0.0001: {verdict}"
