"""The first result of fine-tuning: a linear classifier on frozen features, in seconds.

    plainvit finetune --init WEIGHTS --data photos/        --head linear is the default of this recipe

Logistic regression on the features of the pretrained model becomes its head, and training starts from there instead of
from zeros (`--head zero`, paper 3.2). The model with this head is saved as RUN/first/model.safetensors, and as
RUN/model.safetensors until the run ends. The final model is the better of the two on held-out images; if they are
equally good it is the first, which fits fewer weights to few images.
"""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plainvit.data.decode import DataError
from plainvit.data.sources import Source
from plainvit.data.splits import take_fraction
from plainvit.disk import make_folder
from plainvit.evaluate.classify import classify
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.probe import search_logistic
from plainvit.evaluate.statistics import describe_accuracy
from plainvit.runtime.display import Display, format_duration, print_line, show_activity
from plainvit.runtime.folder import check_metrics
from plainvit.runtime.parallel import release_gathered, shard_like
from plainvit.train.finalize import FIRST, FIRST_RESULTS, copy_model, make_predictor, open_evaluation_set
from plainvit.train.resume_check import has_valid_checksum
from plainvit.train.time_budget import average_over_processes
from plainvit.weights import load, save

if TYPE_CHECKING:
    from plainvit.train.state import Training

MAX_TIME = 1 / 3  # of --hours, for the features
MAX_WORK = 3e8  # images x features x classes of the regression: seconds to a minute
L2 = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # of the mean loss; the middle one where nothing can be chosen


def find_first(run: "Training", train: Source) -> dict[str, Any] | None:
    """Results of the first model: made before the first step, read again in a run that is resumed or starts over."""
    folder = run.folder.path / FIRST
    results = run.folder.read(FIRST_RESULTS)
    check_metrics(results, str(run.folder.path / FIRST_RESULTS))
    if not results or not has_valid_checksum(folder / "model.safetensors"):
        return make_first(run, train) if not run.progress.step else None
    if not run.progress.step:  # killed before its first checkpoint: it continues with the same bits
        head = load(folder).head
        assert head is not None
        set_head(run, head.weight.detach(), head.bias.detach())
    return results


def make_first(run: "Training", train: Source) -> dict[str, Any]:
    """Sets the head to a linear classifier of the training images, saves the model and evaluates it."""
    predictor = make_predictor(run.config, run.objective.model, run.world.device, run.folder.path)
    source = choose_images(run, train, predictor)
    features, labels = extract_features(run, source, predictor)
    with show_activity("fitting a linear head", quiet=run.quiet):
        set_head(run, *fit_head(run, features, labels))
    results: dict[str, Any] = {"images_fitted": len(features)}
    if run.validation:
        evaluation = classify(predictor, run.validation)
        results |= evaluation.summary()
        run.folder.rewind(-1)  # of a run that was killed here
        run.record({"step": 0, "val": evaluation.numbers()})
    results["seconds"] = round(run.seconds, 1)
    model = copy_model(run)  # all processes gather its shards
    if run.folder.writes:
        for folder in (run.folder.path / FIRST, run.folder.path):
            make_folder(folder)
            save(model, folder / "model.safetensors")
    run.folder.write(FIRST_RESULTS, results)
    run.world.barrier()  # nobody reads the files before they are written
    print_line(describe_first(results), quiet=run.quiet)
    return results


def describe_first(results: dict[str, Any]) -> str:
    when = f"after {format_duration(results['seconds'])}"
    if "top1" not in results:
        return f"first model saved {when}; no images are held out to evaluate it (--holdout 0.15)"
    accuracy = describe_accuracy(round(results["top1"] * results["images"]), results["images"])[0]
    return f"first result on held-out images: {accuracy}, {when}"


def choose_images(run: "Training", train: Source, predictor: Predictor) -> Source:
    """All training images, or as many of each class as fit into MAX_TIME."""
    batch = torch.zeros(8, 3, *predictor.size, dtype=torch.uint8)
    width = predictor.features(batch).shape[1]  # also warms up
    started = time.perf_counter()
    predictor.features(batch).sum().item()  # waits for the device
    seconds = average_over_processes(run, (time.perf_counter() - started,))[0] / (len(batch) * run.world.size)
    max_images = MAX_WORK / (width * len(train.classes))
    if run.config.hours:
        max_images = min(max_images, run.config.hours * 3600 * MAX_TIME / seconds)
    return take_fraction(train, max_images / len(train)) if max_images < len(train) else train


def extract_features(run: "Training", source: Source, predictor: Predictor) -> tuple[Tensor, Tensor]:
    """Features [N, D] and labels [N] of all readable images, in the same order for any number of processes."""
    world = run.world
    evaluation_set = open_evaluation_set(run.config, source, world, keep=False)
    rows: list[Tensor] = []
    index: list[Tensor] = []
    with Display("features", len(source), quiet=run.quiet) as display:
        for batch in evaluation_set.batches():
            unreadable = [position for position, _ in batch.bad]
            is_readable = torch.from_numpy(~np.isin(batch.index, unreadable))
            rows.append(predictor.features(batch.images)[is_readable.to(world.device)])
            index.append(torch.from_numpy(batch.index)[is_readable])
            display.advance(min(display.done + len(batch.index) * world.size, len(source)), "images")
        width = rows[0].shape[1] if rows else predictor.features(torch.zeros(1, 3, *evaluation_set.size)).shape[1]
        for _ in range(evaluation_set.rounds - len(rows)):  # sharded models need equally many forward passes in all
            predictor.features(torch.zeros(1, 3, *evaluation_set.size))
    empty = torch.zeros(0, width, device=world.device)
    features = world.gather_rows(torch.cat([empty, *rows])).cpu()
    positions = world.gather_rows(torch.cat([torch.zeros(0, dtype=torch.long), *index]).to(world.device)).cpu()
    if not len(positions):
        raise DataError(f"no training image of {run.config.data} can be read")
    order = positions.argsort()
    return features[order], torch.from_numpy(source.labels)[positions[order]].long()


def fit_head(run: "Training", features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [K, D] and bias [K] of logistic regression; its l2 is chosen on a fifth of the training images."""
    classes = run.objective.model.config.classes
    packed = torch.zeros(classes, features.shape[1] + 1, dtype=torch.float64)
    if run.world.is_main:
        can_hold_out = bool(torch.bincount(labels).max() > 1)
        l2s = L2 if can_hold_out else (L2[len(L2) // 2],)
        fitted = search_logistic(features, labels, classes, l2s)[0]
        packed[:, :-1] = (fitted.weights / fitted.std.unsqueeze(1)).T  # undo the standardization of the features
        packed[:, -1] = fitted.bias - (fitted.mean / fitted.std) @ fitted.weights
    packed = run.world.sum(packed.to(run.world.device)).float()  # the others contribute zeros
    return packed[:, :-1], packed[:, -1]


@torch.no_grad()
def set_head(run: "Training", weight: Tensor, bias: Tensor) -> None:
    """Copies a head into the model and its average; of DeiT's two heads, whose mean is used, into both."""
    release_gathered(run.objective.model)
    trained = run.objective.model.state_dict()
    averaged = run.average.weights if run.average else {}
    for part, value in (("weight", weight), ("bias", bias)):
        for name in (f"head.{part}", f"head_distillation.{part}"):
            for tensors in (trained, averaged):
                if name in tensors:
                    tensors[name].copy_(shard_like(value, tensors[name]))
