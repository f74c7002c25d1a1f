"""The end of a run: the weights to keep, the numbers of each split, the report."""

import math
from typing import Any

import numpy as np

from plainvit.analyse.report import Sample, write_report
from plainvit.config import Config
from plainvit.data.sources import Source
from plainvit.data.transforms import resized
from plainvit.evaluate.classify import Prepared, Result, classify
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ResNet, ViT, build
from plainvit.runtime.distributed import World
from plainvit.runtime.sharding import whole
from plainvit.train.loop import Training, averaged
from plainvit.train.masked import PredictPatches, judge
from plainvit.train.optim import add_lora, merge_lora
from plainvit.train.splits import Splits
from plainvit.weights import save

SAMPLES = 48  # predictions shown in the report


def deliver(run: Training, splits: Splits) -> tuple[ViT | ResNet, dict[str, Any]]:
    """Writes model.safetensors, results.json and report.html; may be done again, with the same result."""
    model, first = chosen_model(run), run.world.first
    if first:
        save(model, run.folder.path / "model.safetensors")
    numbers: dict[str, Any] = {}
    samples: list[Sample] = []
    if isinstance(run.objective, PredictPatches):  # which has no business with the test images
        if splits.val:
            numbers["val"] = judge(run.objective, evaluation_set(run.config, splits.val, run.world), run.cast)
    else:
        for name, source in (("val", splits.val), ("test", splits.test)):
            if source:
                result = classify(predictor_of(run, model), evaluation_set(run.config, source, run.world))
                numbers[name] = result.summary()
                samples = choose_samples(result, source) if first else []
    numbers["chosen_on_val"] = bool(run.config.patience and run.progress.best_step)
    numbers["skipped_steps"] = run.progress.skipped
    run.folder.write("results.json", numbers)
    if first:  # that of an interruption must not pass for the last one
        (run.folder.path / "report.html").unlink(missing_ok=True)
    run.folder.say("done", run.progress.step, run.steps)
    if first:
        write_report(run.folder.path, samples)
    return model, numbers


def predictor_of(run: Training, model: ViT | ResNet) -> Predictor:
    return Predictor(model, device=run.world.device, precision=run.config.precision)


def evaluation_set(config: Config, source: Source, world: World) -> Prepared:
    """A split as the run's model evaluates it."""
    assert config.model
    assert config.preprocess
    batch, workers = min(config.batch, 512), max(config.workers, 0)
    return Prepared(source, config.model.image_size, config.preprocess, batch=batch, workers=workers, world=world)


def chosen_model(run: Training) -> ViT | ResNet:
    """The weights of the end, or with patience those of the best validation; averaged where that is asked for."""
    best, trained = run.progress.best_step, run.objective.model
    if run.config.patience and best is not None and best != run.progress.step:
        progress = run.progress
        run.restore(*run.checkpoints.read(best))
        run.progress = progress
    model = build(trained.config).to(run.loader.device)
    if run.config.optim.lora and isinstance(model, ViT):
        add_lora(model, run.config.optim.lora, seed=0)
    with averaged(trained, run.average):
        model.load_state_dict({name: whole(tensor) for name, tensor in trained.state_dict().items()})
    merge_lora(model)
    model.about = trained.about
    return model.eval()


def choose_samples(result: Result, source: Source) -> list[Sample]:
    """The surest mistakes, and right answers spread over the set."""
    wrong = np.flatnonzero(result.guesses[:, 0] != result.labels)
    wrong = wrong[np.argsort(-result.probabilities[wrong], kind="stable")][: SAMPLES // 2]
    right = np.flatnonzero(result.guesses[:, 0] == result.labels)
    right = right[np.unique(np.linspace(0, len(right) - 1, SAMPLES - len(wrong)).astype(int))] if len(right) else right
    return [_sample(result, source, int(place)) for place in (*wrong, *right)]


def _sample(result: Result, source: Source, place: int) -> Sample:
    index = int(result.index[place])
    return Sample(
        image=_thumbnail(source.image(index)),
        truth=source.classes[result.labels[place]],
        guess=source.classes[result.guesses[place, 0]],
        probability=float(result.probabilities[place]),
        name=source.name(index),
    )


def _thumbnail(pixels: np.ndarray, side: int = 160) -> np.ndarray:
    shrink = min(1.0, side / max(pixels.shape[:2]))
    size = tuple(max(math.floor(extent * shrink), 1) for extent in pixels.shape[:2])
    return resized(pixels, (size[0], size[1])).permute(1, 2, 0).numpy()
