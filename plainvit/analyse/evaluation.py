"""One evaluation from weights to a page: a model, a set, a card, the figures, the worst errors as pictures.

    done = assess("runs/photos", "photos/", split="test")          done.card, done.folder, done.result
    plainvit evaluate runs/photos --data photos/

The folder holds card.json, images.parquet (a row for each image), classes.csv, figures/ and report.html.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.analyse import figures
from plainvit.analyse.evaluation_page import slug, write_evaluation
from plainvit.analyse.gallery import Sample
from plainvit.data.loader import Batch
from plainvit.data.sources import Source
from plainvit.data.splits import choose
from plainvit.data.transforms import resized
from plainvit.data.workers import default_workers
from plainvit.disk import make_folder
from plainvit.evaluate.card import Card, make_card, write_card
from plainvit.evaluate.chance import FEW
from plainvit.evaluate.classify import Prepared, Result, classify
from plainvit.evaluate.compare import TITLES, in_unit, published
from plainvit.evaluate.labels import Labels, align
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import World
from plainvit.runtime.distributed import join as join_processes

log = logging.getLogger("plainvit")
WORST = 24  # errors shown as pictures
SAMPLES = 48  # predictions in the report of a run
TIMEOUT = 600.0  # seconds to wait for the other processes


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
    split: str = "",
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

    preprocess changes single settings of the model's own, mean and std among them. Without `out` the folder is one of
    its own in evaluations/.
    """
    _check(out, batch, workers)
    world = join_processes(device, TIMEOUT)
    try:
        predictor, labels = world.agree(
            lambda: _opened(world, model, data, split, data_root, preprocess or {}, image_size, precision),
            lambda both: both[1].fingerprint() + str(both[0].preprocess),
        )
        result = _classified(world, predictor, labels, batch, workers, quiet)
        done = _written(world, predictor, labels, result, out) if world.first else None
        world.barrier()  # nobody leaves while another is still at work
        return done
    finally:
        world.leave()


def _check(out: Path | None, batch: int, workers: int | None) -> None:
    """Before the work, not after it: also that its results can be written."""
    if batch < 1 or (workers or 0) < 0:
        raise ValueError(f"a batch has at least one image, and workers are not below 0, got {batch}, {workers}")
    if out and (out / "config.json").is_file():
        raise ValueError(f"{out} is the folder of a run, with a report and a card of its own: give another --out")
    if out:
        make_folder(out)


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
    source = choose(model, data, split, data_root)
    told: Any = {} if str(model).startswith("timm:") else changes
    predictor = Predictor(model, device=world.device, precision=precision, image_size=image_size, **told)
    if not predictor.classes:
        raise ValueError(f"{model} has no head: it gives features, not classes; fine-tune it, or give other weights")
    if not told:  # another library's model: its pixels are its own, but photos may be prepared otherwise
        predictor.preprocess = predictor.preprocess.replace(**changes)
        if "crop" in changes and predictor.preprocess.resize == "squash":
            raise ValueError("--crop is what a centre crop keeps: give --resize crop or --resize squash-crop with it")
    return predictor, align(source, predictor.classes, predictor.model.about.class_names, data_root=data_root)


def _classified(
    world: World, predictor: Predictor, labels: Labels, batch: int, workers: int | None, quiet: bool
) -> Result:
    """With a progress bar of the first process, whose part is as large as any."""
    source = labels.source
    if workers is None:  # starting them takes longer than a small set does
        workers = 0 if len(source) < 16 * batch else default_workers()
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
    make_folder(folder / "figures")
    if labels.single:
        _write_classes(labels, result, folder)
    write_evaluation(card, labels, result, worst_errors(labels, result), folder)
    write_card(card, folder, labels, result)  # last: a folder with a card is whole
    return Assessed(card, folder, result)


def default_name(card: Card) -> str:
    """The model, the data and a hash of all that decides the result: the same evaluation is the same folder."""
    words = [slug(card.name), slug(card.data["spec"]), card.data["split"], card.identity()[:8]]
    return "-".join(word for word in words if word)


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


def choose_samples(labels: Labels, result: Result) -> list[Sample]:
    """The surest mistakes, and right answers spread over the set."""
    wrong = worst_errors(labels, result, SAMPLES // 2)
    right = np.flatnonzero(result.right)
    places = right[np.unique(np.linspace(0, len(right) - 1, SAMPLES - len(wrong)).astype(int))] if len(right) else right
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


def thumbnail(source: Source, index: int) -> np.ndarray:
    """An image as a page shows it, no larger than needed."""
    pixels = source.image(index)
    shrink = min(1.0, 160 / max(pixels.shape[:2]))
    height, width = (max(int(extent * shrink), 1) for extent in pixels.shape[:2])
    return resized(pixels, (height, width)).permute(1, 2, 0).numpy()


# The terminal ---------------------------------------------------------------------------------------------------------


def summary_table(done: Assessed) -> Group:
    """The numbers with their intervals, and where the rest is."""
    card = done.card
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("", no_wrap=True)
    for title in ("value", "95 % interval"):
        shown.add_column(title, justify="right", no_wrap=True)
    for name in TITLES:
        if name in card.metrics and (name != "top5" or done.result.classes > FEW):
            ends, value = card.intervals.get(name), card.metrics[name]
            between = " to ".join(in_unit(name, end) for end in ends) if ends else ""
            shown.add_row(TITLES[name], in_unit(name, value), between)
    data = card.data
    counts = [f"{card.images:,} images"]
    counts += [f"{card.unreadable:,} unreadable"] if card.unreadable else []
    counts += [f"{data['left_out']:,} left out"] if data["left_out"] else []
    title = f"{data['spec']} ({data['split']}): {', '.join(counts)}; right is {data['rule']}"
    lines = [Text(title, style="bold"), shown]
    lines += [Text(f"{100 * one['top1']:.2f} % in {one['source']}", style="dim") for one in published(card)]
    lines.append(Text(done.result.sureness))
    return Group(*lines, Text(f"report: {done.folder / 'report.html'}", overflow="fold"))
