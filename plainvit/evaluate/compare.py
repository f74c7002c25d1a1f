"""Compare cards: differences from the first with intervals and p-values, and published results.

    plainvit compare evaluations/vit evaluations/bit

Paired if both cards have results of the same images (McNemar's exact test, a paired bootstrap interval), else as two
samples (Newcombe's interval, the z-test). Cards of different images, splits or rules are an error without --force.
If the runs of the cards exist, their different settings are listed, and runs that differ only in the seed are compared
as groups (seeds.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plainvit.config import Config
from plainvit.data.known import official_split
from plainvit.evaluate import paper, seeds, statistics
from plainvit.evaluate.card import Card, Rows, read_card, read_rows, settings_of
from plainvit.weights.published import PUBLISHED

UNITS = {**dict.fromkeys(("top1", "top5", "precision", "recall", "f1"), "%"), "ece": "points"}  # of fractions
TITLES = {"top1": "top-1", "top5": "top-5", "nll": "NLL", "ece": "calibration error"}
TITLES |= {"precision": "precision", "recall": "recall", "f1": "F1"}
# What must be equal, and its name in messages
MUST_MATCH = {
    "fingerprint": "the images",
    "content": "the pixels of the images",
    "split": "the split",
    "rule": "the rule of what is correct",
    "labels": "the correct classes",
}

IGNORED = Config.OPERATIONAL | {"recipe"}  # settings that do not change results
MAX_SETTINGS = 12  # printed; --json has all

PRETRAINED = ("ImageNet", "ImageNet-21k", "JFT-300M")
OBJECTNET = {"ViT-H/14 (JFT-300M)": 61.7}  # D.9
SHAPES = {(768, 12): "B", (1024, 24): "L", (1280, 32): "H"}  # (width, depth)


class NotComparableError(ValueError):
    """Cards that cannot be compared."""


@dataclass(frozen=True)
class Read:
    """A card with its results per image, if any."""

    path: Path
    card: Card
    rows: Rows | None


def compare(paths: Sequence[Path], *, force: bool = False) -> dict[str, Any]:
    """All cards, with the difference of each from the first."""
    if len(paths) < 2:
        raise ValueError("compare needs at least two cards: plainvit compare CARD CARD")
    cards = [_read(path) for path in paths]
    first, names = cards[0], _name_cards(cards)
    faults = [
        f"{names[at]}: {fault}" for at, one in enumerate(cards) if (fault := find_incompatibility(first.card, one.card))
    ]
    if faults and not force:
        raise NotComparableError(f"the cards cannot be compared: {faults[0]}; use --force to compare them anyway")
    rows = [_describe(name, one) for name, one in zip(names, cards, strict=True)]
    for row, one in zip(rows[1:], cards[1:], strict=True):
        row["difference"] = difference(first, one)
        row["settings"] = compare_settings(first, one)
        row["remarks"] = list_remarks(first.card, one.card)
    runs = [run for name, one in zip(names, cards, strict=True) for run in _find_run(name, one)]
    shared = {"data": first.card.data, "images": first.card.images, "unlike": faults}
    return shared | {"cards": rows, "groups": seeds.groups(runs)}


def _find_run(name: str, one: Read) -> list[seeds.Run]:
    """The run of a card, if its settings are known; preprocessing and precision count as settings."""
    stored = _flatten(settings_of(one.path, one.card))
    settings = {key: value for key, value in stored.items() if key.partition(".")[0] not in IGNORED}
    inputs = {"preprocess": one.card.preprocess["hash"], "precision": one.card.precision}
    metrics = {metric: _number(one.card.metrics.get(metric)) for metric in seeds.METRICS}
    return [seeds.Run(name, settings | inputs, metrics)] if settings else []


def _read(path: Path) -> Read:
    card = read_card(path)
    return Read(path, card, read_rows(path, card.images, card.counts))


def _describe(name: str, one: Read) -> dict[str, Any]:
    card = one.card
    return {
        "name": name,
        "path": str(one.path),
        "model": card.name,
        "weights": card.model["weights"],
        "images": card.images,
        "unreadable": card.unreadable,
        "metrics": card.metrics,
        "intervals": card.intervals,
        "published": published(card),
    }


def _name_cards(cards: Sequence[Read]) -> list[str]:
    """Names of the models if they differ, else the paths."""
    models = [Path(one.card.name).name or one.card.name for one in cards]
    return models if len(set(models)) == len(models) else [str(one.path) for one in cards]


def find_incompatibility(a: Card, b: Card) -> str:
    """Why two cards cannot be compared; "" if they can."""
    for key, words in MUST_MATCH.items():
        if a.data[key] != b.data[key]:
            where = f"of {b.data['spec']} " if key == "fingerprint" and a.data["spec"] != b.data["spec"] else ""
            return f"{words} {where}differ ({a.data[key]} and {b.data[key]})"
    if a.images != b.images:
        unreadable = f"{b.unreadable} and {a.unreadable} unreadable"
        return f"it has {b.images:,} images, the first has {a.images:,} ({unreadable})"
    return ""


def list_remarks(a: Card, b: Card) -> list[str]:
    """Differences besides the weights that may affect the result."""
    found: list[str] = []
    if a.model["weights"] == b.model["weights"]:
        found.append("the weights are the same")
    if a.preprocess["hash"] != b.preprocess["hash"]:
        found.append(f"preprocessing differs: {_describe_preprocess(a)}, and {_describe_preprocess(b)}")
    if a.precision != b.precision:
        found.append(f"precision differs: {a.precision} and {b.precision}")
    versions = [card.environment.get("plainvit") for card in (a, b)]
    if versions[0] != versions[1]:
        found.append(f"plainvit differs: {versions[0]} and {versions[1]}")
    return found


def compare_settings(a: Read, b: Read) -> dict[str, list[Any]]:
    """{"model.posemb": ["1d", "none"]}: different settings of the runs or, if one is unknown, of the models."""
    runs = [settings_of(one.path, one.card) for one in (a, b)]
    both = runs if all(runs) else [{"model": one.card.model.get("config", {})} for one in (a, b)]
    ours, theirs = (_flatten(settings) for settings in both)
    keys = [key for key in ours | theirs if key.partition(".")[0] not in IGNORED]
    return {key: [ours.get(key), theirs.get(key)] for key in keys if ours.get(key) != theirs.get(key)}


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 0.001}} -> {"optim.lr": 0.001}, as the flags are named."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _describe_preprocess(card: Card) -> str:
    size = "x".join(map(str, card.preprocess.get("image_size", ())))
    settings = card.preprocess.get("settings", {})
    crop = f" {settings.get('crop')}" if settings.get("resize") == "crop" else ""
    return f"{size} px, {settings.get('resize')}{crop}, {settings.get('interpolation')}"


# Differences ----------------------------------------------------------------------------------------------------------


def difference(a: Read, b: Read) -> dict[str, Any]:
    """b - a of top1, top5 and nll with interval and p-value; paired by image where possible."""
    if a.rows and b.rows and a.rows.names == b.rows.names:
        return _compare_paired(a.rows, b.rows)
    return _compare_unpaired(a.card, b.card)


def _compare_paired(a: Rows, b: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {"paired": True}
    for name, left, right in (("top1", a.right, b.right), ("top5", a.right5, b.right5)):
        only_a, only_b = int((left & ~right).sum()), int((right & ~left).sum())
        found[name] = {
            "difference": (only_b - only_a) / len(left),
            "interval": list(statistics.paired_bootstrap(only_a, only_b, len(left))),
            "p": statistics.mcnemar(only_a, only_b),
            "only_first": only_a,
            "only_this": only_b,
        }
    nll = b.nll - a.nll
    return found | {"nll": _test_mean(float(nll.mean()), list(statistics.mean_interval(nll)))}


def _compare_unpaired(a: Card, b: Card) -> dict[str, Any]:
    found: dict[str, Any] = {"paired": False}
    for name in ("top1", "top5"):
        counts = a.counts[name], a.images, b.counts[name], b.images
        found[name] = {
            "difference": b.metrics[name] - a.metrics[name],
            "interval": list(statistics.newcombe(*counts)),
            "p": statistics.two_proportions(*counts),
        }
    halves = [_half_width(card.intervals.get("nll")) for card in (a, b)]
    centre = _number(b.metrics.get("nll")) - _number(a.metrics.get("nll"))
    half = math.hypot(*halves)
    return found | {"nll": _test_mean(centre, [centre - half, centre + half])}


def _half_width(ends: Any) -> float:
    return (_number(ends[1]) - _number(ends[0])) / 2 if isinstance(ends, list) and len(ends) == 2 else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def _test_mean(centre: float, ends: list[float]) -> dict[str, Any]:
    """A mean difference with its interval and the p-value of a z-test."""
    error = (ends[1] - ends[0]) / 2 / statistics.Z
    p = math.erfc(abs(centre) / error / math.sqrt(2)) if error > 0 else math.nan if error else float(centre == 0)
    return {"difference": centre, "interval": ends, "p": p}


# Published numbers ----------------------------------------------------------------------------------------------------


def published(card: Card) -> list[dict[str, Any]]:
    """Published top-1, as a fraction: of these weights by timm, of this architecture in the paper."""
    spec = card.data["spec"]
    field = {"imagenet": "top1", "imagenet-real": "real"}.get(spec, "")
    found = [
        {"top1": getattr(entry, field) / 100, "source": "timm's results for these weights"}
        for name, entry in PUBLISHED.items()
        if field
        and getattr(entry, field)
        and card.name in (name, f"hf:{entry.hub}", entry.hub.replace("timm/", "timm:"))
    ]
    tested = card.data["split"] in ("test", official_split(spec, "test"))
    where = "the paper" if spec == "objectnet" else "the paper's Table 5, 384 px"
    for data in PRETRAINED if tested else ():
        value = _read_paper(spec, f"ViT-{shape(card)} ({data})")
        if value is not None:
            source = f"{where}, for a model of this shape: ViT-{shape(card)} pre-trained on {data}"
            found.append({"top1": value / 100, "source": source})
    return found


def _read_paper(spec: str, model: str) -> float | None:
    """Top-1 in percent from Table 5; None if it has no such dataset or model."""
    if spec == "objectnet":
        return OBJECTNET.get(model)
    table5 = paper.table(5)
    title = next((title for title, of in table5.columns.items() if of == spec), "")
    known = title and any(name == model for name, _ in table5.rows)
    return table5.value(model, title) if known else None


def shape(card: Card) -> str:
    """Name of the paper's model, such as B/16; "" if it is none of them."""
    config = card.model.get("config")
    config = config if isinstance(config, dict) else {}  # another library's model, or an edited card
    patch = config.get("patch")
    size = next((name for sides, name in SHAPES.items() if sides == (config.get("width"), config.get("depth"))), "")
    square = isinstance(patch, list) and len(patch) == 2 and patch[0] == patch[1]
    plain = config.get("kind") == "vit" and not config.get("stem") and square
    return f"{size}/{patch[0]}" if size and plain else ""


# Printing -------------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> Group:
    """Groups of seeds, a column per card, differences and published results."""
    rows, data = found["cards"], found["data"]
    lines: list[RenderableType] = [Text(f"{data['spec']} ({data['split']}), correct is {data['rule']}", style="bold")]
    if found["groups"]:
        lines += [seeds.table(found["groups"]), *map(Text, seeds.words(found["groups"])), Text("")]
    for shown in _make_tables(rows):
        lines += [shown, Text("")]
    lines += [Text(f"not comparable: {fault}", style="red") for fault in found["unlike"]]
    pairs = _select_pairs(rows, found["groups"])
    for row in pairs:
        lines += _describe_difference(row, rows[0]["name"])
    if len(pairs) < len(rows) - 1:
        lines.append(Text("Runs that differ only in the seed are compared as groups; --json has all.", style="dim"))
    for row in rows:
        lines += [Text(f"{row['name']}: {100 * one['top1']:.2f} % in {one['source']}") for one in row["published"]]
    return Group(*lines)


def _select_pairs(rows: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cards to compare with the first: one of each other group, with the same seed if there is one."""
    member = {name: at for at, group in enumerate(groups) for name in group["runs"]}
    chosen: dict[int | str, dict[str, Any]] = {}
    for row in sorted(rows[1:], key=lambda row: "seed" in row["settings"]):
        chosen.setdefault(member[row["name"]] if row["name"] in member else row["path"], row)
    if rows[0]["name"] in member:
        chosen.pop(member[rows[0]["name"]], None)
    return [row for row in rows if any(row is one for one in chosen.values())]


def _make_tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Tables with as many columns as fit in 80 characters."""
    titles = {name: f"{title}, {UNITS[name]}" if name in UNITS else title for name, title in TITLES.items()}
    width = min(max(6, *(len(row["name"]) for row in rows)), 24)
    most = max((80 - max(map(len, titles.values()))) // (width + 2), 1)
    columns = math.ceil(len(rows) / math.ceil(len(rows) / most))
    named = {titles[name]: name for name in TITLES if any(name in row["metrics"] for row in rows)}
    return [_make_table(rows[at : at + columns], named) for at in range(0, len(rows), columns)]


def _make_table(rows: Sequence[dict[str, Any]], named: dict[str, str]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("", style="dim", no_wrap=True)
    for row in rows:
        shown.add_column(Text(row["name"]), justify="right", overflow="fold", min_width=6)
    for title, name in named.items():
        shown.add_row(title, *(_format(name, row["metrics"].get(name)) for row in rows))
    shown.add_row("images", *(f"{row['images']:,}" for row in rows))
    return shown


def to_unit(name: str, value: float) -> str:
    """A metric with its unit: fractions in percent or percentage points."""
    return f"{_format(name, value)} {UNITS[name]}" if name in UNITS else _format(name, value)


def _format(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{100 * value:.2f}" if name in UNITS else f"{value:.4f}"


def _describe_difference(row: dict[str, Any], first: str) -> list[Text]:
    paired = row["difference"]["paired"]
    lines = [Text(f"{row['name']} - {first}, {'on the same images' if paired else 'as two samples'}:")]
    for name in ("top1", "top5", "nll"):
        one = row["difference"][name]
        scale, unit, digits = (100, " points", 2) if name != "nll" else (1, "", 4)
        low, high = (f"{scale * end:+.{digits}f}" for end in one["interval"])
        words = f"  {TITLES[name]} {scale * one['difference']:+.{digits}f}{unit}, 95 % {low} to {high}, "
        lines.append(Text(f"{words}{_describe_p(one['p'])}"))
        if "only_this" in one:
            counts = f"correct only in {row['name']}: {one['only_this']}, only in {first}: {one['only_first']}"
            lines.append(Text(f"    {counts}"))
    changes = [f"{key} {_format_setting(a)} -> {_format_setting(b)}" for key, (a, b) in row["settings"].items()]
    if changes:
        more = f", and {len(changes) - MAX_SETTINGS} more (--json)" if len(changes) > MAX_SETTINGS else ""
        lines.append(Text(f"  settings that differ: {', '.join(changes[:MAX_SETTINGS])}{more}"))
    return lines + [Text(f"  {remark}", style="yellow") for remark in row["remarks"]]


def _format_setting(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "none" if value in (None, "") else str(value)


def _describe_p(p: float) -> str:
    if math.isnan(p):
        return "p unknown"
    verdict = "significant" if p < 0.05 else "not significant"
    return f"p {p:.2g}: {verdict}" if p >= 1e-4 else f"p < 0.0001: {verdict}"
