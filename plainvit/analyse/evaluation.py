"""Evaluate one model on one dataset split and write a folder with a card, figures and a report.

    done = evaluate_model("runs/photos", "photos/", split="test")          done.card, done.folder, done.result
    plainvit evaluate runs/photos --data photos/

The folder holds card.json, images.parquet (a row for each image), classes.csv, figures/ and report.html.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.analyse.evaluation_report import slug, write_evaluation
from plainvit.analyse.figures import write_csv
from plainvit.analyse.gallery import Sample, choose_evenly, thumbnail
from plainvit.data.loader import Batch
from plainvit.data.splits import choose_split
from plainvit.disk import make_folder
from plainvit.evaluate.card import Card, make_card, write_card
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.evaluate.compare import TITLES, find_published, to_unit
from plainvit.evaluate.labels import Labels, align
from plainvit.evaluate.metrics import Result
from plainvit.evaluate.permuted_labels import warn_of_permuted_labels
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import FEW_CLASSES, describe_accuracy
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import World
from plainvit.runtime.distributed import join as join_processes

log = logging.getLogger("plainvit")
ERRORS = 24  # errors shown as images
SAMPLES = 48  # predictions in the report of a run
TIMEOUT = 600.0  # seconds to wait for the other processes


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    card: Card
    folder: Path
    result: Result


def evaluate_model(
    model: str | Path,
    data: str,
    *,
    split: str = "",
    data_root: str | Path | None = None,
    out: Path | None = None,
    preprocess: dict[str, Any] | None = None,
    batch: int = 64,
    workers: int | None = None,
    device: str = "auto",
    quiet: bool = False,
    **options: Any,
) -> Evaluation | None:
    """Evaluates a model on one split and writes its folder; returns None in all processes but the main one.

    preprocess overrides single settings of the model, mean and std included. Other options, such as precision and
    image_size, are those of `Predictor`. The default folder is evaluations/MODEL-DATA-SPLIT-HASH.
    """
    if out and (out / "config.json").is_file():
        raise ValueError(f"--out {out} is the folder of a run, which has its own report: choose another folder")
    if out:
        make_folder(out)  # fails before the evaluation rather than after it
    world = join_processes(device, TIMEOUT)

    def open_model_and_data() -> tuple[Predictor, Labels]:
        source = choose_split(model, data, split, data_root)  # first: it opens faster than weights and fails more often
        predictor = Predictor(model, device=world.device, **options | (preprocess or {}))
        if not predictor.classes:
            raise ValueError(f"{model} has no classification head: fine-tune it first, or evaluate other weights")
        return predictor, align(source, predictor.classes, predictor.class_names, data_root=data_root)

    try:
        predictor, labels = world.run_on_all_ranks(
            open_model_and_data, lambda both: both[1].fingerprint() + str(both[0].preprocess)
        )
        result = _classify(world, predictor, labels, batch, workers, quiet)
        if world.is_main and labels.targets.shape[1] == 1:
            warn_of_permuted_labels(labels.targets[result.index, 0], result.predictions[:, 0], labels.class_names)
        done = _write_folder(world, predictor, labels, result, out) if world.is_main else None
        world.barrier()  # processes leave together
        return done
    finally:
        world.leave()


def _classify(
    world: World, predictor: Predictor, labels: Labels, batch: int, workers: int | None, quiet: bool
) -> Result:
    """The main process shows progress; its part is as large as any."""
    source = labels.source
    options: dict[str, Any] = {"batch": batch, "workers": workers, "world": world}
    evaluation_set = EvaluationSet(source, predictor.size, predictor.preprocess, **options)
    local_images = len(range(world.rank, len(source), world.size))
    with Display("evaluate", local_images, quiet=quiet or not world.is_main) as display:

        def report_progress(batch: Batch) -> None:
            for index, reason in batch.bad:
                log.warning("%s: %s", source.name(index), reason)
            display.advance(display.done + len(batch.index), "images")

        return classify(predictor, evaluation_set, labels, report_progress)


def _write_folder(world: World, predictor: Predictor, labels: Labels, result: Result, out: Path | None) -> Evaluation:
    card = make_card(predictor, labels, result, world)
    folder = out or Path("evaluations") / default_name(card)
    make_folder(folder / "figures")
    if labels.single:
        titles, numbers = ["images", "precision", "recall", "f1"], result.by_class()
        rows = zip(labels.class_names, *(numbers[title].tolist() for title in titles), strict=True)
        write_csv(folder / "classes.csv", [["class", *titles], *rows])
    write_evaluation(card, labels, result, most_confident_errors(labels, result), folder)
    write_card(card, folder, labels, result)  # last: a folder with a card is complete
    return Evaluation(card, folder, result)


def default_name(card: Card) -> str:
    """Model, data, split and a hash of all that affects the result."""
    parts = slug(card.name), slug(card.data["spec"]), card.data["split"], card.identity()[:8]
    return "-".join(filter(None, parts))


# Samples ------------------------------------------------------------------------------------------------------------


def most_confident_errors(labels: Labels, result: Result, most: int = ERRORS) -> list[Sample]:
    """The errors with the highest probability of the predicted class."""
    wrong = np.flatnonzero(~result.correct)
    wrong = wrong[np.argsort(-result.probabilities[wrong], kind="stable")][:most]
    return [_make_sample(labels, result, row) for row in wrong.tolist()]


def choose_samples(labels: Labels, result: Result) -> list[Sample]:
    """The most confident errors, and correct predictions spread over the dataset."""
    wrong = most_confident_errors(labels, result, SAMPLES // 2)
    correct = np.flatnonzero(result.correct)
    chosen = correct[choose_evenly(len(correct), SAMPLES - len(wrong))]
    return [*wrong, *(_make_sample(labels, result, row) for row in chosen.tolist())]


def _make_sample(labels: Labels, result: Result, row: int) -> Sample:
    index = int(result.index[row])
    image = thumbnail(labels.source, index)
    return Sample(
        image=np.zeros((1, 1, 3), np.uint8) if image is None else image,  # the file was removed meanwhile
        truth=labels.truth(index),
        prediction=labels.class_names[result.predictions[row, 0]],
        probability=float(result.probabilities[row]),
        name=labels.source.name(index),
    )


# The terminal ---------------------------------------------------------------------------------------------------------


def summary_table(done: Evaluation) -> Group:
    """Metrics with their confidence intervals, and the path of the report."""
    card = done.card
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for title in ("value", "95 % interval"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in TITLES:
        if name in card.metrics and (name != "top5" or done.result.classes > FEW_CLASSES):
            ends, value = card.intervals.get(name), card.metrics[name]
            between = " to ".join(to_unit(name, end) for end in ends) if ends and np.isfinite(ends).all() else ""
            table.add_row(TITLES[name], to_unit(name, value), between)
    data = card.data
    counts = [f"{card.images:,} images"]
    counts += [f"{card.unreadable:,} unreadable"] if card.unreadable else []
    counts += [f"{data['left_out']:,} excluded"] if data["left_out"] else []
    title = f"{data['spec']} ({data['split']}): {', '.join(counts)}; correct is {data['rule']}"
    lines = [Text(title, style="bold"), table]
    lines += [Text(f"{100 * row['top1']:.2f} % in {row['source']}", style="dim") for row in find_published(card)]
    result = done.result
    notes = [result.confidence_sentence, f"report: {done.folder / 'report.html'}"]
    notes += describe_accuracy(int(result.correct.sum()), len(result.labels), result.majority_accuracy)
    return Group(*lines, *(Text(note, overflow="fold") for note in notes))
