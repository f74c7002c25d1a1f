"""Cards side by side: the difference from the first, how much of it may be chance, and the published number beside it.

    plainvit compare evaluations/vit evaluations/bit

Image by image where both have results of the same images (McNemar's exact test, a paired bootstrap interval), else as
two samples (Newcombe's interval, the z-test). Cards of other images, splits or rules are refused: it says what differs.
Where the runs of the cards are there, the settings that differ are named, and runs that differ in the seed alone are
compared as groups (seeds.py), not with each other.
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
from plainvit.evaluate import chance, paper, seeds
from plainvit.evaluate.card import Card, Rows, read_card, read_rows, settings_of
from plainvit.weights.published import PUBLISHED

UNITS = {**dict.fromkeys(("top1", "top5", "precision", "recall", "f1"), "%"), "ece": "points"}  # of shares
TITLES = {"top1": "top-1", "top5": "top-5", "nll": "NLL", "ece": "calibration error"}
TITLES |= {"precision": "precision", "recall": "recall", "f1": "F1"}
# What must be alike, and how to speak of it
ALIKE = {
    "fingerprint": "the images",
    "content": "the pixels of the images",
    "split": "the split",
    "rule": "what counts as right",
    "labels": "the right answers",
}

UNTOLD = Config.OPERATIONAL | {"recipe"}  # settings that change no result
MOST = 12  # settings that are named before the rest is counted

PRETRAINED = ("ImageNet", "ImageNet-21k", "JFT-300M")
OBJECTNET = {"ViT-H/14 (JFT-300M)": 61.7}  # D.9
SHAPES = {(768, 12): "B", (1024, 24): "L", (1280, 32): "H"}  # (width, depth)


class UnlikeError(ValueError):
    """Cards that say nothing about each other."""


@dataclass(frozen=True)
class Read:
    """A card with the results beside it."""

    path: Path
    card: Card
    rows: Rows | None


def compare(paths: Sequence[Path], *, force: bool = False) -> dict[str, Any]:
    """Every card, and for each after the first its difference from it."""
    if len(paths) < 2:
        raise ValueError("compare takes two cards or more: plainvit compare CARD CARD")
    cards = [_read(path) for path in paths]
    first, names = cards[0], _names(cards)
    faults = [f"{names[at]}: {fault}" for at, one in enumerate(cards) if (fault := unlike(first.card, one.card))]
    if faults and not force:
        raise UnlikeError(f"these cards cannot be compared: {faults[0]}; --force compares them all the same")
    rows = [_row(name, one) for name, one in zip(names, cards, strict=True)]
    for row, one in zip(rows[1:], cards[1:], strict=True):
        row["difference"] = difference(first, one)
        row["settings"] = settings_apart(first, one)
        row["remarks"] = remarks(first.card, one.card)
    told = {"data": first.card.data, "images": first.card.images, "unlike": faults, "cards": rows}
    return told | {
        "groups": seeds.groups([run for name, one in zip(names, cards, strict=True) for run in _run(name, one)])
    }


def _run(name: str, one: Read) -> list[seeds.Run]:
    """One, where the run's settings are known; how its images were prepared counts among them."""
    own = _flat(settings_of(one.path, one.card))
    settings = {key: value for key, value in own.items() if key.partition(".")[0] not in UNTOLD}
    prepared = {"preprocess": one.card.preprocess["hash"], "precision": one.card.precision}
    metrics = {metric: _number(one.card.metrics.get(metric)) for metric in seeds.METRICS}
    return [seeds.Run(name, settings | prepared, metrics)] if settings else []


def _read(path: Path) -> Read:
    card = read_card(path)
    return Read(path, card, read_rows(path, card.images, card.counts))


def _row(name: str, one: Read) -> dict[str, Any]:
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


def _names(cards: Sequence[Read]) -> list[str]:
    """The models' where they differ, else the paths."""
    models = [Path(one.card.name).name or one.card.name for one in cards]
    return models if len(set(models)) == len(models) else [str(one.path) for one in cards]


def unlike(a: Card, b: Card) -> str:
    """What keeps two cards from being compared, in words; nothing where they can be."""
    for key, words in ALIKE.items():
        if a.data[key] != b.data[key]:
            where = f"of {b.data['spec']} " if key == "fingerprint" and a.data["spec"] != b.data["spec"] else ""
            return f"{words} {where}differ ({a.data[key]} and {b.data[key]})"
    if a.images != b.images:
        return (
            f"{b.images:,} images were scored, {a.images:,} in the first ({b.unreadable} and {a.unreadable} unreadable)"
        )
    return ""


def remarks(a: Card, b: Card) -> list[str]:
    """What differs besides the weights, and may be part of the difference."""
    found: list[str] = []
    if a.model["weights"] == b.model["weights"]:
        found.append("the weights are the same")
    if a.preprocess["hash"] != b.preprocess["hash"]:
        found.append(f"preprocessing differs: {_seen(a)}, and {_seen(b)}")
    if a.precision != b.precision:
        found.append(f"precision differs: {a.precision} and {b.precision}")
    versions = [card.environment.get("plainvit") for card in (a, b)]
    if versions[0] != versions[1]:
        found.append(f"plainvit differs: {versions[0]} and {versions[1]}")
    return found


def settings_apart(a: Read, b: Read) -> dict[str, list[Any]]:
    """{"model.posemb": ["1d", "none"]}: of the runs where both are there, else of the models alone."""
    runs = [settings_of(one.path, one.card) for one in (a, b)]
    both = runs if all(runs) else [{"model": one.card.model.get("config", {})} for one in (a, b)]
    ours, theirs = (_flat(settings) for settings in both)
    told = [key for key in ours | theirs if key.partition(".")[0] not in UNTOLD]
    return {key: [ours.get(key), theirs.get(key)] for key in told if ours.get(key) != theirs.get(key)}


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 0.001}} as {"optim.lr": 0.001}, the names that the flags have."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _seen(card: Card) -> str:
    size = "x".join(map(str, card.preprocess.get("image_size", ())))
    settings = card.preprocess.get("settings", {})
    crop = f" {settings.get('crop')}" if settings.get("resize") == "crop" else ""
    return f"{size} px, {settings.get('resize')}{crop}, {settings.get('interpolation')}"


# Differences ----------------------------------------------------------------------------------------------------------


def difference(a: Read, b: Read) -> dict[str, Any]:
    """b - a of each number that has an interval, by the images' pairs where there are any."""
    if a.rows and b.rows and a.rows.names == b.rows.names:
        return _paired(a.rows, b.rows)
    return _unpaired(a.card, b.card)


def _paired(a: Rows, b: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {"paired": True}
    for name, left, right in (("top1", a.right, b.right), ("top5", a.right5, b.right5)):
        only_a, only_b = int((left & ~right).sum()), int((right & ~left).sum())
        found[name] = {
            "difference": (only_b - only_a) / len(left),
            "interval": list(chance.paired(only_a, only_b, len(left))),
            "p": chance.mcnemar(only_a, only_b),
            "only_first": only_a,
            "only_this": only_b,
        }
    apart = b.nll - a.nll
    return found | {"nll": _of_means(float(apart.mean()), list(chance.mean_interval(apart)))}


def _unpaired(a: Card, b: Card) -> dict[str, Any]:
    found: dict[str, Any] = {"paired": False}
    for name in ("top1", "top5"):
        counts = a.counts[name], a.images, b.counts[name], b.images
        found[name] = {
            "difference": b.metrics[name] - a.metrics[name],
            "interval": list(chance.newcombe(*counts)),
            "p": chance.two_proportions(*counts),
        }
    halves = [_half(card.intervals.get("nll")) for card in (a, b)]
    centre = _number(b.metrics.get("nll")) - _number(a.metrics.get("nll"))
    half = math.hypot(*halves)
    return found | {"nll": _of_means(centre, [centre - half, centre + half])}


def _half(ends: Any) -> float:
    return (_number(ends[1]) - _number(ends[0])) / 2 if isinstance(ends, list) and len(ends) == 2 else math.nan


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def _of_means(centre: float, ends: list[float]) -> dict[str, Any]:
    """With the p-value of the normal distribution."""
    error = (ends[1] - ends[0]) / 2 / chance.Z
    p = math.erfc(abs(centre) / error / math.sqrt(2)) if error > 0 else math.nan if error else float(centre == 0)
    return {"difference": centre, "interval": ends, "p": p}


# Published numbers ----------------------------------------------------------------------------------------------------


def published(card: Card) -> list[dict[str, Any]]:
    """What others report of these weights, and what the paper reports of this architecture: top-1 as a share."""
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
        value = _in_paper(spec, f"ViT-{shape(card)} ({data})")
        if value is not None:
            source = f"{where}, for a model of this shape: ViT-{shape(card)} pre-trained on {data}"
            found.append({"top1": value / 100, "source": source})
    return found


def _in_paper(spec: str, model: str) -> float | None:
    """Of Table 5 in per cent, where it has the set and the model."""
    if spec == "objectnet":
        return OBJECTNET.get(model)
    table5 = paper.table(5)
    title = next((title for title, of in table5.columns.items() if of == spec), "")
    known = title and any(name == model for name, _ in table5.rows)
    return table5.value(model, title) if known else None


def shape(card: Card) -> str:
    """B/16 and the like where the model is one of the paper's, else nothing."""
    config = card.model.get("config")
    config = config if isinstance(config, dict) else {}  # of another library, or of a card that was edited
    patch = config.get("patch")
    size = next((name for sides, name in SHAPES.items() if sides == (config.get("width"), config.get("depth"))), "")
    square = isinstance(patch, list) and len(patch) == 2 and patch[0] == patch[1]
    plain = config.get("kind") == "vit" and not config.get("stem") and square
    return f"{size}/{patch[0]}" if size and plain else ""


# For people -----------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> Group:
    """Groups of seeds where there are any, a column for each card, and differences and published numbers in words."""
    rows, data = found["cards"], found["data"]
    lines: list[RenderableType] = [Text(f"{data['spec']} ({data['split']}), right is {data['rule']}", style="bold")]
    if found["groups"]:
        lines += [seeds.table(found["groups"]), *map(Text, seeds.words(found["groups"])), Text("")]
    for shown in _columns(rows):
        lines += [shown, Text("")]
    lines += [Text(f"not comparable: {fault}", style="red") for fault in found["unlike"]]
    pairs = _pairs(rows, found["groups"])
    for row in pairs:
        lines += _words(row, rows[0]["name"])
    if len(pairs) < len(rows) - 1:
        lines.append(
            Text("The other runs differ from these in the seed: as groups, above; by pairs, --json.", style="dim")
        )
    for row in rows:
        lines += [Text(f"{row['name']}: {100 * one['top1']:.2f} % in {one['source']}") for one in row["published"]]
    return Group(*lines)


def _pairs(rows: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cards to hold against the first: none of its own group, and of another group one, of its seed if there is."""
    member = {name: at for at, group in enumerate(groups) for name in group["runs"]}
    chosen: dict[int | str, dict[str, Any]] = {}
    for row in sorted(rows[1:], key=lambda row: "seed" in row["settings"]):
        chosen.setdefault(member[row["name"]] if row["name"] in member else row["path"], row)
    if rows[0]["name"] in member:
        chosen.pop(member[rows[0]["name"]], None)
    return [row for row in rows if any(row is one for one in chosen.values())]


def _columns(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """As many side by side as a narrow terminal has room for, so that no number is cut."""
    titles = {name: f"{title}, {UNITS[name]}" if name in UNITS else title for name, title in TITLES.items()}
    widest = min(max(6, *(len(row["name"]) for row in rows)), 24)
    room = max((80 - max(map(len, titles.values()))) // (widest + 2), 1)
    each = math.ceil(len(rows) / math.ceil(len(rows) / room))
    named = {titles[name]: name for name in TITLES if any(name in row["metrics"] for row in rows)}
    return [_some_columns(rows[at : at + each], named) for at in range(0, len(rows), each)]


def _some_columns(rows: Sequence[dict[str, Any]], named: dict[str, str]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("", style="dim", no_wrap=True)
    for row in rows:
        shown.add_column(Text(row["name"]), justify="right", overflow="fold", min_width=6)
    for title, name in named.items():
        shown.add_row(title, *(_bare(name, row["metrics"].get(name)) for row in rows))
    shown.add_row("images", *(f"{row['images']:,}" for row in rows))
    return shown


def in_unit(name: str, value: float) -> str:
    """A metric as it is printed: per cent, or points of it, where it is a share."""
    return f"{_bare(name, value)} {UNITS[name]}" if name in UNITS else _bare(name, value)


def _bare(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{100 * value:.2f}" if name in UNITS else f"{value:.4f}"


def _words(row: dict[str, Any], first: str) -> list[Text]:
    apart = row["difference"]
    how = "on the same images" if apart["paired"] else "as two samples"
    lines = [Text(f"{row['name']} - {first}, {how}:")]
    for name in ("top1", "top5", "nll"):
        one = apart[name]
        scale, unit = (100, " points") if name != "nll" else (1, "")
        digits = 2 if name != "nll" else 4
        low, high = (f"{scale * end:+.{digits}f}" for end in one["interval"])
        words = f"  {TITLES[name]} {scale * one['difference']:+.{digits}f}{unit}, 95 % {low} to {high}, "
        lines.append(Text(f"{words}{_chance(one['p'])}"))
        if "only_this" in one:
            alone = f"right in {row['name']} alone: {one['only_this']}, in {first} alone: {one['only_first']}"
            lines.append(Text(f"    {alone}"))
    told = [f"{key} {_setting(a)} -> {_setting(b)}" for key, (a, b) in row["settings"].items()]
    if told:
        more = f", and {len(told) - MOST} more (--json)" if len(told) > MOST else ""
        lines.append(Text(f"  settings that differ: {', '.join(told[:MOST])}{more}"))
    return lines + [Text(f"  {remark}", style="yellow") for remark in row["remarks"]]


def _setting(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "none" if value in (None, "") else str(value)


def _chance(p: float) -> str:
    if math.isnan(p):
        return "p unknown"
    verdict = "hardly chance" if p < 0.05 else "may be chance"
    return f"p {p:.2g}: {verdict}" if p >= 1e-4 else f"p < 0.0001: {verdict}"
