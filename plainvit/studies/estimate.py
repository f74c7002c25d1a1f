"""How long a run of a study takes on a GPU that it shares with others.

An H200 takes about 1.3 ms for a step of the base (batches of 256), in proportion to the multiply-adds for other models
and at least 0.7 ms. With eight runs at once, start and evaluation add a second to each run.
"""

from collections.abc import Mapping

from plainvit.config import Config, Model, pair
from plainvit.planning.cost import macs
from plainvit.planning.datasets import count_training_images
from plainvit.studies.bases import base, complete_model
from plainvit.studies.published import published_model
from plainvit.studies.study import Arm

STEP, LEAST_STEP, START = 1.3e-3, 0.7e-3, 1.0  # seconds


def estimate_run(arms: Mapping[str, Arm], name: str) -> float:
    """Seconds of one run; early stopping is not counted."""
    config = arms[name].config
    steps = config.steps or config.epochs * (count_training_images(config) or 0) / config.batch
    small = base("gpu")
    share = macs(find_model(arms, name)) * config.batch / (macs(complete_model(small)) * small.batch)
    return START + steps * max(STEP * share, LEAST_STEP)


def find_model(arms: Mapping[str, Arm], name: str) -> Model:
    """The model of an arm, its own or that of the arm it starts from, at its image size."""
    config: Config = arms[name].config
    if config.model:
        return complete_model(config)
    model = find_model(arms, arms[name].parent) if arms[name].parent else published_model()
    return model.replace(image_size=pair(config.image_size)) if config.image_size else model
