"""The end of a run: the final weights, the metrics of each split, the report."""

import math
from typing import Any

from plainvit.analyse.evaluation import choose_samples
from plainvit.analyse.report import Sample, write_report
from plainvit.config import Config
from plainvit.data.sources import Source
from plainvit.data.splits import Splits
from plainvit.evaluate.card import make_card, write_card
from plainvit.evaluate.classify import Prepared, classify
from plainvit.evaluate.labels import align
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ResNet, ViT, build
from plainvit.models.inference import NonFiniteError
from plainvit.runtime.distributed import World
from plainvit.runtime.sharding import full_tensor
from plainvit.train.guards import DivergedError
from plainvit.train.held_out import evaluate_masked
from plainvit.train.masked import PredictPatches
from plainvit.train.optim import add_lora, merge_lora
from plainvit.train.state import Training, averaged_weights
from plainvit.weights import save


def finalize(run: Training, splits: Splits, *, report: bool = True) -> tuple[ViT | ResNet, dict[str, Any]]:
    """Writes model.safetensors, results.json, the card and report.html; doing it again gives the same result."""
    model, first = choose_final_model(run), run.world.is_main
    if first:
        save(model, run.folder.path / "model.safetensors")
    try:
        if isinstance(run.objective, PredictPatches):
            numbers, samples = evaluate_objective(run, run.objective), []
        else:
            numbers, samples = evaluate_splits(run, model, splits)
    except NonFiniteError as error:
        raise DivergedError(f"with the final weights, {error}") from error
    numbers["chosen_on_val"] = bool(run.config.patience and run.progress.best_step)
    numbers["skipped_steps"] = run.progress.skipped
    numbers |= find_better_step(run, numbers)
    run.folder.write("results.json", numbers)
    if first:  # one of an interruption must not be taken for the last
        (run.folder.path / "report.html").unlink(missing_ok=True)
    if first and report:
        write_report(run.folder.path, samples, state="done")
    run.folder.write_status("done", run.progress.step, run.steps)
    return model, numbers


def find_better_step(run: Training, numbers: dict[str, Any]) -> dict[str, Any]:
    """The best validation, if the final weights are worse by more than two standard errors."""
    val, progress = numbers.get("val", {}), run.progress
    if "top1" not in val or run.config.patience or progress.best_step is None:
        return {}
    error = math.sqrt(val["top1"] * (1 - val["top1"]) / val["images"])
    better = progress.best > val["top1"] + 2 * error
    return {"better_before": {"step": progress.best_step, "top1": progress.best}} if better else {}


def evaluate_objective(run: Training, objective: PredictPatches) -> dict[str, Any]:
    """Self-supervised training does not read test images."""
    return {"val": evaluate_masked(objective, run.validation, run.cast)} if run.validation else {}


def evaluate_splits(run: Training, model: ViT | ResNet, splits: Splits) -> tuple[dict[str, Any], list[Sample]]:
    """Metrics of each split; a card and samples of the test images, or of the validation images without these."""
    numbers: dict[str, Any] = {}
    samples: list[Sample] = []
    predictor = make_predictor(run, model)
    test = open_evaluation_set(run.config, splits.test, run.world) if splits.test else None
    for name, prepared in (("val", run.validation), ("test", test)):
        if not prepared:
            continue
        result = classify(predictor, prepared)
        numbers[name] = result.summary()
        if run.world.is_main:
            labels = align(prepared.source, predictor.classes, prepared.source.classes)
            samples = choose_samples(labels, result)
            write_card(make_card(predictor, labels, result, run.world), run.folder.path, labels, result)
    return numbers, samples


def make_predictor(run: Training, model: ViT | ResNet) -> Predictor:
    precision = "bf16" if run.config.precision == "fp8" else run.config.precision  # the model itself uses fp8
    found = Predictor(model, device=run.world.device, precision=precision)
    found.source = str(run.folder.path)
    return found


def open_evaluation_set(config: Config, source: Source, world: World) -> Prepared:
    """A split, preprocessed as the run's model needs it."""
    assert config.model
    assert config.preprocess
    batch, workers = min(config.batch, 512), None if config.workers < 0 else config.workers
    return Prepared(source, config.model.image_size, config.preprocess, batch=batch, workers=workers, world=world)


def choose_final_model(run: Training) -> ViT | ResNet:
    """The last weights, or with --patience those of the best validation; averaged with --ema."""
    best, trained = run.progress.best_step, run.objective.model
    if run.config.patience and best is not None and best != run.progress.step:
        progress = run.progress
        run.restore(*run.checkpoints.read(best))
        run.progress = progress
    model = build(trained.config).to(run.loader.device)
    if run.config.optim.lora and isinstance(model, ViT):
        add_lora(model, run.config.optim.lora, seed=0)
    with averaged_weights(trained, run.average):
        model.load_state_dict({name: full_tensor(tensor) for name, tensor in trained.state_dict().items()})
    merge_lora(model)
    model.about = trained.about
    return model.eval()
