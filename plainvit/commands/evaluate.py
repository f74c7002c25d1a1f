"""Evaluation: evaluate, compare."""

import os
from pathlib import Path

from plainvit.commands.parsing import (
    ClassNames,
    Data,
    InferenceFlags,
    Json,
    Model,
    Processes,
    TextHead,
    collect_pixel_flags,
    print_result,
)


def evaluate(
    model: Model,
    /,
    *,
    data: Data,
    split: str = "",
    out: Path | None = None,
    class_names: ClassNames = None,
    text_head: TextHead = None,
    flags: InferenceFlags,
    devices: int = 1,
    json: Json = False,
) -> "Processes | None":
    """Measure the accuracy, calibration and errors of a model on a dataset.

    The output folder holds a report, the figures, card.json, which `plainvit compare` reads, and images.parquet with a
    row for each image. imagenet-real, imagenet-v2, imagenet-a, imagenet-r and imagenet-sketch follow their authors'
    protocol.

    Args:
        split: Split to use: train, val or test; default: test, else the run's held-out images, else all
        out: Output folder; default: evaluations/MODEL-DATA-SPLIT-HASH
        devices: Number of processes on this machine, one per device (several machines: torchrun)
    """
    if devices < 1:
        raise ValueError(f"--devices must be at least 1, got {devices}")
    if devices > 1 and "RANK" not in os.environ:
        return Processes(devices, 0, flags.device)
    from dataclasses import asdict

    from plainvit.analyse.evaluation import evaluate_model, summary_table
    from plainvit.runtime.folder import replace_non_finite

    changes = collect_pixel_flags(flags)
    if text_head is not None:
        changes["text_head"] = str(text_head)  # for plainvit.load
    evaluation = evaluate_model(
        model,
        data,
        split=split,
        data_root=flags.data_root,
        out=out,
        preprocess=changes,
        image_size=flags.image_size,
        class_names=class_names,
        batch=flags.batch,
        workers=flags.processes,
        device=flags.device,
        precision=flags.precision,
        quiet=json,
    )
    if evaluation:  # only the main process has it
        card = {"folder": str(evaluation.folder), **asdict(evaluation.card)}
        print_result(replace_non_finite(card), None if json else summary_table(evaluation))
    return None


def compare(runs: tuple[Path, ...], /, *, json: Json = False) -> None:
    """Compare evaluations with the first one and test whether the differences are significant.

    Two evaluations are compared on the images that both have; file names may differ. Different settings are listed, and
    published results are shown if known. Runs that differ only in the seed are also grouped: mean, standard deviation,
    and the difference between groups with its interval.

    Args:
        runs: Run folders or output folders of `plainvit evaluate`; the first is compared with each of the others
    """
    from plainvit.evaluate import compare as comparison
    from plainvit.runtime.folder import replace_non_finite

    report = comparison.compare(runs)
    print_result(replace_non_finite(report), None if json else comparison.table(report))
