"""The end of a run: the final weights, the metrics of each split, the report."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plainvit.analyse.evaluation import choose_samples
from plainvit.analyse.report import Sample, write_report
from plainvit.config import Config
from plainvit.data.sources import Source
from plainvit.data.splits import Splits
from plainvit.evaluate.card import make_card, write_card
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.evaluate.labels import align
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ResNet, ViT, build
from plainvit.models.inference import NonFiniteError
from plainvit.runtime.distributed import World
from plainvit.runtime.parallel import full_tensor
from plainvit.train.masked_objective import PredictPatches, evaluate_masked
from plainvit.train.nonfinite import DivergedError
from plainvit.train.state import Training, averaged_weights
from plainvit.weights import load, save

FIRST, FIRST_RESULTS = "first", "first.json"  # of the model with a linear head (linear_head.py), as results.json


def finalize(
    run: Training, splits: Splits, first: dict[str, Any] | None = None, *, report: bool = True
) -> tuple[ViT | ResNet, dict[str, Any]]:
    """Writes model.safetensors, results.json, the card and report.html; doing it again gives the same result."""
    model, chosen = choose_model(run, first)
    if run.world.is_main:
        save(model, run.folder.path / "model.safetensors")
    metrics: dict[str, Any] = {}
    samples: list[Sample] = []
    try:
        if not isinstance(run.objective, PredictPatches):
            metrics, samples = evaluate_splits(run, model, splits)
        elif run.validation:  # self-supervised training does not read test images
            metrics["val"] = evaluate_masked(run.objective, run.validation)
    except NonFiniteError as error:
        raise DivergedError(f"with the final weights, {error}") from error
    progress = run.progress
    is_best_step = bool(run.config.patience and progress.best_step)
    metrics |= chosen | find_better_step(run, metrics)
    metrics |= {
        "chosen_on_val": is_best_step or "trained" in chosen,
        "skipped_steps": progress.skipped,
        "steps": progress.step,
        "steps_planned": run.config.steps,
    }
    run.folder.write("results.json", metrics)
    if run.world.is_main:  # the report of an interruption must not be mistaken for the final one
        (run.folder.path / "report.html").unlink(missing_ok=True)
        if report:
            write_report(run.folder.path, samples, state="done")
    run.folder.write_status("done", progress.step, run.steps)
    return model, metrics


def choose_model(run: Training, first: dict[str, Any] | None) -> tuple[ViT | ResNet, dict[str, Any]]:
    """The trained model, or the first model if that is at least as good on held-out images; and both results."""
    trained = make_trained_model(run)
    if first is None or "top1" not in first or not run.validation:
        return trained, {}
    compared: dict[str, Any] = {"first": {key: first.get(key) for key in ("top1", "images", "seconds")}}
    with contextlib.suppress(NonFiniteError):
        predictor = make_predictor(run.config, trained, run.world.device, run.folder.path)
        result = classify(predictor, run.validation)
        compared["trained"] = {"top1": result.top1, "images": len(result.labels)}
        if result.top1 > first["top1"]:
            return trained, compared | {"final": "trained"}
    return load(run.folder.path / FIRST).to(run.loader.device), compared | {"final": "first"}


def describe_choice(metrics: dict[str, Any]) -> Iterator[str]:
    """A line on which of the first and the trained model is the final one; nothing for other runs."""
    if "final" not in metrics:
        return
    first = f"{metrics['first']['top1']:.2%}"
    trained = f"{metrics['trained']['top1']:.2%}" if "trained" in metrics else "non-finite values"
    accuracies = f"held-out images: first {first}, after {metrics['steps']} steps {trained}"
    yield f"final model: the {metrics['final']} one ({accuracies})"


def find_better_step(run: Training, metrics: dict[str, Any]) -> dict[str, Any]:
    """The best validation, if the final weights are worse by more than two standard errors."""
    val, progress = metrics.get("val", {}), run.progress
    if "top1" not in val or run.config.patience or progress.best_step is None:
        return {}
    standard_error = math.sqrt(val["top1"] * (1 - val["top1"]) / val["images"])
    if progress.best <= val["top1"] + 2 * standard_error:
        return {}
    return {"better_before": {"step": progress.best_step, "top1": progress.best}}


def evaluate_splits(run: Training, model: ViT | ResNet, splits: Splits) -> tuple[dict[str, Any], list[Sample]]:
    """Metrics of each split; a card and samples of the test images, or of the validation images without these."""
    metrics: dict[str, Any] = {}
    samples: list[Sample] = []
    predictor = make_predictor(run.config, model, run.world.device, run.folder.path)
    test = open_evaluation_set(run.config, splits.test, run.world) if splits.test else None
    for name, evaluation_set in (("val", run.validation), ("test", test)):
        if not evaluation_set:
            continue
        result = classify(predictor, evaluation_set)
        metrics[name] = result.summary()
        if run.world.is_main:
            labels = align(evaluation_set.source, predictor.classes, evaluation_set.source.classes)
            samples = choose_samples(labels, result)
            card = make_card(predictor, labels, result, run.world)
            card.model["steps"] = run.progress.step  # status.json is written later
            write_card(card, run.folder.path, labels, result)
    return metrics, samples


def make_predictor(config: Config, model: ViT | ResNet, device: str, folder: Path) -> Predictor:
    precision = "bf16" if config.precision == "fp8" else config.precision  # the model itself uses fp8
    predictor = Predictor(model, device=device, precision=precision)
    predictor.source = str(folder)
    return predictor


def open_evaluation_set(config: Config, source: Source, world: World, *, keep: bool = True) -> EvaluationSet:
    """A split, preprocessed as the run's model needs it."""
    assert config.model
    assert config.preprocess
    return EvaluationSet(
        source,
        config.model.image_size,
        config.preprocess,
        batch=min(config.batch, 512),
        workers=None if config.workers < 0 else config.workers,
        world=world,
        keep=keep,
    )


def make_trained_model(run: Training) -> ViT | ResNet:
    """The last weights, or with --patience those of the best validation; averaged with --ema."""
    best = run.progress.best_step
    if run.config.patience and best is not None and best != run.progress.step:
        progress = run.progress
        run.restore(*run.checkpoints.read(best))
        run.progress = progress
    return copy_model(run)


def copy_model(run: Training) -> ViT | ResNet:
    """The model as it is now, averaged with --ema, as a plain model: gathered, in eval mode."""
    trained = run.objective.model
    model = build(trained.config).to(run.loader.device)
    with averaged_weights(trained, run.average):
        model.load_state_dict({name: full_tensor(tensor) for name, tensor in trained.state_dict().items()})
    model.about = trained.about
    return model.eval()
