"""How long a run of a study takes on a GPU that it shares with others.

Fitted to 98 runs on an H200 with 16 cores, 12 at once: models as small as the base are limited by the number of their
kernels, 0.4 ms a step for each layer, and larger ones by their multiply-adds, 1.3 ms a step for those of the base.
"""

from collections.abc import Mapping
from functools import cache

from plainvit.config import Config, Model, ResNetConfig, pair
from plainvit.planning import memory
from plainvit.planning.cost import macs
from plainvit.planning.datasets import count_training_images
from plainvit.studies.base_configs import base, complete_model
from plainvit.studies.study import Arm
from plainvit.studies.transfer import published_model

START, STEP, LAYER = 1.0, 1.3e-3, 0.4e-3  # seconds


def estimate_run(arms: Mapping[str, Arm], name: str) -> float:
    """Seconds of one run, including start and evaluation; early stopping is not counted."""
    config, steps = arms[name].config, 0.0
    if arms[name].is_trained:
        steps = config.steps or config.epochs * (count_training_images(config) or 0) / config.batch
    model = find_model(arms, name)
    relative_macs = macs(model) * config.batch / count_base_macs()
    return START + steps * max(STEP * relative_macs, LAYER * count_layers(model))


@cache
def count_base_macs() -> int:
    """Multiply-adds of a batch of the base."""
    config = base("gpu")
    return macs(complete_model(config)) * config.batch


def count_layers(model: Model) -> int:
    if isinstance(model, ResNetConfig):
        return sum(model.blocks)
    stem_layers = sum(model.stem.blocks) if model.stem else 0
    return stem_layers + memory.count_layers(model)


def find_model(arms: Mapping[str, Arm], name: str) -> Model:
    """The model of an arm, its own or that of the arm it starts from, at its image size."""
    config: Config = arms[name].config
    if config.model:
        return complete_model(config)
    model = find_model(arms, arms[name].parent) if arms[name].parent else published_model()
    return model.replace(image_size=pair(config.image_size)) if config.image_size else model
