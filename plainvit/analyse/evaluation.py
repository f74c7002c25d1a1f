"""One evaluation from weights to a page: a model, a set, a card, the figures, the worst errors as pictures.

    done = assess("runs/photos", "photos/", split="test")          done.card, done.folder, done.result
    plainvit evaluate runs/photos --data photos/

The folder holds card.json, images.parquet (a row for each image), classes.csv, figures/ and report.html.
"""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.analyse import figures
from plainvit.analyse.page import Html, Section, counted, element, join, notice, page, pairs, percent, table
from plainvit.analyse.report import SPLIT, Run, Sample, command_line, drawing, fact, mistakes, predictions
from plainvit.data.loader import Batch
from plainvit.data.sources import AbsentSplit, Source, open_source
from plainvit.data.transforms import resized
from plainvit.disk import DiskError, write_atomically
from plainvit.evaluate.card import Card, make_card, write_card
from plainvit.evaluate.classify import MOST_CONFUSED, Prepared, Result, classify
from plainvit.evaluate.compare import PERCENT, TITLES, published
from plainvit.evaluate.labels import Labels, align
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import World
from plainvit.runtime.distributed import join as join_processes

log = logging.getLogger("plainvit")
WORST = 24  # errors shown as pictures
SAMPLES = 48  # predictions in the report of a run
TIMEOUT = 600.0  # seconds to wait for the other processes
FEW = 20  # classes shown before the rest is folded


@dataclass(frozen=True)
class Assessed:
    """What an evaluation came to."""

    card: Card
    folder: Path
    result: Result


def assess(
    model: str | Path,
    data: str,
    *,
    split: str = "test",
    data_root: str | Path | None = None,
    out: Path | None = None,
    preprocess: dict[str, object] | None = None,
    image_size: int | None = None,
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    quiet: bool = False,
) -> Assessed | None:
    """Evaluates a model on one split and writes its folder; in other processes than the first, nothing is returned.

    preprocess changes single settings of the model's own. Without `out` the folder is one of its own in evaluations/.
    """
    if batch < 1 or (workers or 0) < 0:
        raise ValueError(f"a batch has at least one image, and workers are not below 0, got {batch}, {workers}")
    if out and (out / "config.json").is_file():
        raise ValueError(f"{out} is the folder of a run, with a report and a card of its own: give another --out")
    if out:
        _make(out)  # before the work, not after it
    world = join_processes(device, TIMEOUT)
    try:
        predictor, labels = world.agree(
            lambda: _opened(world, model, data, split, data_root, preprocess or {}, image_size, precision),
            lambda both: both[1].fingerprint() + str(both[0].preprocess),
        )
        result = _classified(world, predictor, labels, batch, workers, quiet)
        bad = np.flatnonzero(~np.isfinite(result.nll))
        if len(bad):
            name = labels.source.name(int(result.index[bad[0]]))
            raise ValueError(f"the model's answer is not finite for {len(bad)} of {len(result.nll)} images: {name}")
        done = _written(world, predictor, labels, result, out) if world.first else None
        world.barrier()  # nobody leaves while another is still at work
        return done
    finally:
        world.leave()


def _opened(
    world: World,
    model: str | Path,
    data: str,
    split: str,
    data_root: str | Path | None,
    changes: dict[str, object],
    image_size: int | None,
    precision: Literal["auto", "fp32", "bf16"],
) -> tuple[Predictor, Labels]:
    """Data first: it is opened sooner than weights, and wrong more often."""
    try:
        source = open_source(data, split, data_root=data_root)
    except AbsentSplit as error:
        raise AbsentSplit(f"{error}; --split takes another") from error
    predictor = Predictor(model, device=world.device, precision=precision, image_size=image_size)
    if not predictor.classes:
        raise ValueError(f"{model} has no head: it gives features, not classes; fine-tune it, or give other weights")
    predictor.preprocess = predictor.preprocess.replace(**changes)
    if "crop" in changes and predictor.preprocess.resize != "crop":
        raise ValueError("--crop says how much is kept of a centre crop: it goes with --resize crop")
    return predictor, align(source, predictor.classes, predictor.model.about.class_names, data_root=data_root)


def _classified(
    world: World, predictor: Predictor, labels: Labels, batch: int, workers: int | None, quiet: bool
) -> Result:
    """With a progress bar of the first process, whose part is as large as any."""
    source = labels.source
    if workers is None:  # starting them takes longer than a small set does
        workers = 0 if len(source) < 16 * batch else min((os.cpu_count() or 1) // world.size, 8)
    prepared = Prepared(
        source, predictor.size, predictor.preprocess, batch=batch, workers=workers, world=world, keep=False
    )
    share = len(range(world.rank, len(source), world.size))
    with Display("evaluate", share, quiet=quiet or not world.first) as display:

        def tell(done: Batch) -> None:
            for index, reason in done.bad:
                log.warning("%s: %s", source.name(index), reason)
            display.advance(display.done + len(done.index), "images")

        return classify(predictor, prepared, labels, tell)


def _written(world: World, predictor: Predictor, labels: Labels, result: Result, out: Path | None) -> Assessed:
    card = make_card(predictor, labels, result, world)
    folder = out or Path("evaluations") / default_name(card)
    _make(folder / "figures")
    if labels.single:
        _write_classes(labels, result, folder)
    write_page(card, labels, result, folder)
    write_card(card, folder, labels, result)  # last: a folder with a card is whole
    return Assessed(card, folder, result)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write into {folder}: {error.strerror}") from error


def default_name(card: Card) -> str:
    """The model, the data and a hash of all that decides the result: the same evaluation is the same folder."""
    words = [_slug(card.name), _slug(card.data["spec"]), card.data["split"], card.identity()[:8]]
    return "-".join(word for word in words if word)


def _slug(text: str) -> str:
    """The end of a path, in characters that any file system takes."""
    parts = [part for part in re.split(r"[/\\]", text) if part not in ("", ".", "..")]
    return re.sub(r"[^A-Za-z0-9._]+", "-", parts[-1] if parts else "").strip("-.")[:60]


def _write_classes(labels: Labels, result: Result, folder: Path) -> None:
    found = result.by_class()
    columns = [labels.guess_names, *(found[name].tolist() for name in ("images", "precision", "recall", "f1"))]
    figures.write_csv(
        folder / "classes.csv", [["class", "images", "precision", "recall", "f1"], *zip(*columns, strict=True)]
    )


# The worst errors -----------------------------------------------------------------------------------------------------


def worst_errors(labels: Labels, result: Result, most: int = WORST) -> list[Sample]:
    """The surest mistakes: they teach most."""
    wrong = np.flatnonzero(~result.right)
    wrong = wrong[np.argsort(-result.probabilities[wrong], kind="stable")][:most]
    return [_sample(labels, result, int(place)) for place in wrong]


def choose_samples(labels: Labels, result: Result, most: int = SAMPLES) -> list[Sample]:
    """The surest mistakes, and right answers spread over the set."""
    wrong = worst_errors(labels, result, most // 2)
    right = np.flatnonzero(result.right)
    places = right[np.unique(np.linspace(0, len(right) - 1, most - len(wrong)).astype(int))] if len(right) else right
    return [*wrong, *(_sample(labels, result, int(place)) for place in places)]


def _sample(labels: Labels, result: Result, place: int) -> Sample:
    index = int(result.index[place])
    return Sample(
        image=thumbnail(labels.source, index),
        truth=labels.truth(index),
        guess=labels.guess_names[result.guesses[place, 0]],
        probability=float(result.probabilities[place]),
        name=labels.source.name(index),
    )


def thumbnail(source: Source, index: int, side: int = 160) -> np.ndarray:
    """An image as a page shows it, no larger than needed."""
    pixels = source.image(index)
    shrink = min(1.0, side / max(pixels.shape[:2]))
    height, width = (max(int(extent * shrink), 1) for extent in pixels.shape[:2])
    return resized(pixels, (height, width)).permute(1, 2, 0).numpy()


# The page -------------------------------------------------------------------------------------------------------------


def write_page(card: Card, labels: Labels, result: Result, folder: Path) -> None:
    """report.html with its figures."""
    run = _as_run(card, labels, result, folder)
    errors = worst_errors(labels, result)
    sections = [
        mistakes(run) if labels.single else None,
        _classes(labels, result),
        _calibration(result, folder),
        predictions(run, errors) if errors else None,
        _repeat(card),
        _settings(card),
    ]
    if errors:
        sections[3] = Section("The surest errors", sections[3].body) if sections[3] else None
    day = str(card.environment.get("started") or "")[:10]
    text = page(
        f"{_slug(card.name)} on {_slug(card.data['spec'])}",
        _head(card),
        [one for one in sections if one],
        eyebrow=" · ".join(word for word in ("Evaluation", card.data["split"], day) if word),
    )
    write_atomically(folder / "report.html", lambda target: target.write_text(text, encoding="utf-8"))


def _as_run(card: Card, labels: Labels, result: Result, folder: Path) -> Run:
    """What the sections of a run's report read."""
    split = card.data["split"]
    numbers = result.summary() if labels.single and result.classes <= MOST_CONFUSED else {"images": card.images}
    data = {"classes": list(labels.guess_names)}
    curves = figures.tabulate([])
    return Run(folder, {}, data, {split: numbers}, card.environment, {}, curves, 0, ())


def _head(card: Card) -> Html:
    data, images = card.data, card.images
    lead = f"{card.name} on {counted(images, SPLIT[data['split']] + ' image')} of {data['spec']}, "
    lead += f"{counted(data['classes'], 'class', 'classes')}. Right is {data['rule']}."
    low, high = (percent(end, images) for end in card.intervals["top1"])
    chief = fact(
        "top-1 accuracy",
        percent(card.metrics["top1"], images),
        f"95 % interval {low} to {high} · {card.counts['top1']:,} of {images:,} right",
        chief=True,
    )
    facts = [
        fact("top-5", percent(card.metrics["top5"], images)),
        fact("NLL", f"{card.metrics['nll']:.3f}", "negative log-likelihood"),
        fact("calibration error", percent(card.metrics["ece"], images), "expected, 15 bins"),
    ]
    if "f1" in card.metrics:
        facts.append(fact("F1", percent(card.metrics["f1"], images), "mean over the classes"))
    rows = [element("dl", chief, class_="facts"), element("dl", *facts, class_="facts")]
    return join([element("p", lead, class_="lead"), *rows, *_notices(card)])


def _notices(card: Card) -> list[Html]:
    found: list[Html] = []
    if card.unreadable:
        verb = "is" if card.unreadable == 1 else "are"
        words = f"{counted(card.unreadable, 'image')} could not be read and {verb} not scored."
        found.append(notice(words, warning=True))
    if card.data["left_out"]:
        found.append(notice(f"{counted(card.data['left_out'], 'image')} left out, as the rule says."))
    found += [notice(f"{percent(one['top1'], 10_000)} in {one['source']}.") for one in published(card)]
    return found


def _classes(labels: Labels, result: Result) -> Section | None:
    """Precision, recall and F1 of each class, worst first."""
    if not labels.single:
        return None
    found = result.by_class()
    seen = np.flatnonzero(found["images"] > 0)
    order = seen[np.lexsort((seen, found["f1"][seen]))]
    rows = [
        (
            labels.guess_names[one],
            f"{found['images'][one]:,}",
            *(percent(float(found[name][one])) for name in ("precision", "recall", "f1")),
        )
        for one in order
    ]
    titles = ["class", "images", "precision", "recall", "F1"]
    parts: list[object] = [
        element("p", "Worst first, by F1. All numbers are in ", element("a", "classes.csv", href="classes.csv"), "."),
        table(titles, rows[:FEW], numbers=(1, 2, 3, 4)),
    ]
    if rows[FEW:]:
        rest = element("summary", f"The other {counted(len(rows) - FEW, 'class', 'classes')}")
        parts.append(element("details", rest, table(titles, rows[FEW:], numbers=(1, 2, 3, 4))))
    return Section("By class", join(parts))


def _calibration(result: Result, folder: Path) -> Section:
    bins = result.bins()
    figure = draw_calibration(bins)
    figures.save(figure, folder / "figures" / "calibration.png")
    figures.write_csv(
        folder / "figures" / "calibration.csv", [["images", "mean probability", "share right"], *bins.tolist()]
    )
    gap = percent(result.calibration_error, len(result.labels))
    words = f"Probability and accuracy differ by {gap} on average. "
    words += "A bar below the line: surer than right; a deeper one: more images."
    shown = element("div", drawing(figure, "Accuracy by probability"), style="max-width:520px")
    return Section("Is it as sure as it should be", join([element("p", words), shown]))


@figures.styled()
def draw_calibration(bins: np.ndarray) -> figures.Figure:
    """Accuracy of each bin of probability as a bar, against the line where both are equal; opacity is its share."""
    figure, axes = figures.new_figure(panel=(4.6, 3.4))
    one, width = axes[0, 0], 1 / len(bins)
    images, _, accuracy = bins.T
    for place, (count, share) in enumerate(zip(images, accuracy, strict=True)):
        if count:
            opacity = 0.25 + 0.75 * float(np.sqrt(count / images.max()))
            one.bar((place + 0.5) * width, share, 0.92 * width, color=figures.COLOURS["blue"], alpha=opacity)
            one.plot((place + 0.5) * width, share, "_", color=figures.COLOURS["blue"], markersize=9)
    one.plot([0, 1], [0, 1], color=figures.COLOURS["orange"], linewidth=1)
    one.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of the guess", ylabel="share that is right")
    return figure


def _repeat(card: Card) -> Section | None:
    command = str(card.environment.get("command") or "")
    if not command:
        return None
    commit = card.environment.get("commit")
    note = element("p", f"With commit {commit}.", class_="note") if commit else ""
    return Section("Repeat", join([element("p", "The same evaluation again:"), command_line(command), note]))


def _settings(card: Card) -> Section:
    data, seen = card.data, card.preprocess
    said = {
        "model": card.name,
        "weights (sha256 of the tensors)": card.model["weights"],
        "parameters": f"{card.model['parameters']:,}",
        "data": f"{data['spec']}, {data['split']}",
        "fingerprint of names and labels": data["fingerprint"],
        "preprocessing": ", ".join(f"{key} {value}" for key, value in seen["settings"].items()),
        "image size": " x ".join(map(str, seen["image_size"])),
        "precision": card.precision,
        **{key: str(card.environment.get(key) or "") for key in ("device", "plainvit", "torch", "started")},
    }
    return Section("What was evaluated, and how", pairs({key: value for key, value in said.items() if value}))


# The terminal ---------------------------------------------------------------------------------------------------------


def summary_table(done: Assessed) -> Group:
    """The numbers with their intervals, and where the rest is."""
    card = done.card
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("", no_wrap=True)
    for title in ("value", "95 % interval"):
        shown.add_column(title, justify="right", no_wrap=True)
    for name in TITLES:
        if name in card.metrics:
            ends = card.intervals.get(name)
            between = " to ".join(_shown(name, end) for end in ends) if ends else ""
            shown.add_row(TITLES[name], _shown(name, card.metrics[name]), between)
    data = card.data
    counts = [f"{card.images:,} images"]
    counts += [f"{card.unreadable:,} unreadable"] if card.unreadable else []
    counts += [f"{data['left_out']:,} left out"] if data["left_out"] else []
    title = f"{data['spec']} ({data['split']}): {', '.join(counts)}; right is {data['rule']}"
    lines = [Text(title, style="bold"), shown]
    lines += [Text(f"{100 * one['top1']:.2f} % in {one['source']}", style="dim") for one in published(card)]
    return Group(*lines, Text(f"report: {done.folder / 'report.html'}", overflow="fold"))


def _shown(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if name in PERCENT else f"{value:.4f}"
