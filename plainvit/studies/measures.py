"""Measurements of a finished run that several studies share: halves of the held-out images, few-shot, overfitting."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from plainvit.analyse.attention import require_vit
from plainvit.config import Config, Optim, Probes
from plainvit.data.sources import Source, Subset
from plainvit.data.splits import open_splits
from plainvit.evaluate import probe, probe_sets
from plainvit.evaluate.card import read_card, read_rows
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.evaluate.features import extract
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT, build
from plainvit.studies.study import held_out
from plainvit.weights import load

SHOTS, DRAWS = 5, 10
SUPPORT, EVALUATED = 50, 2000  # images per class to draw shots from; largest number of held-out images
CLASSIFIED = 4096  # largest number of training images that are classified


def halves(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """`choice`: top-1 on every other held-out image, which chooses a rate; `top1`: on the rest, which decides."""
    correct = read_rows(folder, read_card(folder)).correct
    order = np.random.default_rng(0).permutation(len(correct))
    return {"choice": float(correct[order[::2]].mean()), "top1": float(correct[order[1::2]].mean())}


def overfitting(config: Config, folder: Path) -> dict[str, float]:
    """Accuracy on training images minus held-out images, both with evaluation preprocessing."""
    train = open_splits(config).train
    top1 = _top1(Predictor(folder, precision="fp32", batch=256), limit_images(train, CLASSIFIED))
    metrics = held_out(config, folder)
    return metrics | {"train": top1, "overfitting": top1 - metrics["top1"]}


def _top1(predictor: Predictor, source: Source) -> float:
    return classify(predictor, EvaluationSet(source, predictor.size, predictor.preprocess)).top1


def limit_images(source: Source, most: int) -> Source:
    """Evenly spaced images."""
    if len(source) <= most:
        return source
    return Subset(source, np.linspace(0, len(source) - 1, most).astype(int))


# Few-shot -------------------------------------------------------------------------------------------------------------


def with_few_shot(config: Config, folder: Path) -> dict[str, float]:
    """Top-1 after fine-tuning, and few-shot accuracy of its initial weights."""
    return held_out(config, folder) | {"few_shot": few_shot_before(config.replace(optim=Optim()))}


@cache
def few_shot_before(config: Config) -> float:
    """Cached for all rates: it does not depend on the optimizer."""
    start = config.init or load_model(untrained_config(config), Path())
    return few_shot(config, Predictor(start, precision="fp32", batch=256))


def few_shot(config: Config, predictor: Predictor) -> float:
    """5-shot top-1 on held-out images of the config's dataset, by least squares as in the paper (4.1).

    The mean of ten draws, which are the same for every model.
    """
    splits = open_splits(config)
    assert splits.val is not None
    count, labels = len(splits.classes), splits.train.labels
    support = Subset(splits.train, np.sort(probe.draw_shots(labels, count, (SUPPORT,), 0)[SUPPORT]))
    train, test = (extract(predictor, source, quiet=True) for source in (support, limit_images(splits.val, EVALUATED)))
    pair, settings = probe_sets.Pair(train, test, count), Probes(shots=(SHOTS,), seeds=DRAWS)
    return probe_sets.few_shot(pair, settings)[str(SHOTS)]["top1"]


# Untrained models -----------------------------------------------------------------------------------------------------


def untrained_config(config: Config) -> Config:
    return config.replace(steps=0, epochs=0.0)


def load_model(config: Config, folder: Path) -> ViT:
    """The final weights of a run, or the initial ones if it has no steps."""
    if config.steps or config.epochs:
        return require_vit(load(folder))
    assert config.model
    return require_vit(build(config.model).initialize(torch.Generator().manual_seed(config.seed))).eval()
