"""How long the missing runs of studies take on a GPU, before they start.

An H200 takes 2.9 ms for a step of the base (batches of 256), in proportion to the multiply-adds for other models and at
least 1 ms. Images that are drawn (`shapes`) take 25 us each on 16 cores, whatever the GPU does. With four runs at once,
start, compilation and evaluation add 5 s to each run (18 runs of `pooling` took 204 s).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from plainvit.config import Config, Model, pair
from plainvit.planning.cost import macs
from plainvit.planning.datasets import count_training_images
from plainvit.studies.bases import base, complete_model
from plainvit.studies.execute import first_seed
from plainvit.studies.published import published_model
from plainvit.studies.runs import is_done, run_name
from plainvit.studies.study import Arm, Budget, Study

STEP, LEAST_STEP, DRAWN, START = 2.9e-3, 1e-3, 25e-6, 5.0  # seconds


def estimate_seconds(studies: Iterable[Study], budget: Budget, folder: Path, runs: int = 0) -> tuple[int, float]:
    """(number of missing runs, seconds of a GPU); runs that studies share are counted once."""
    missing: dict[str, float] = {}
    for study in studies:
        arms = study.arms(budget)
        for name, arm in arms.items():
            if arm.is_trained:
                seconds = estimate_run(arms, name)
                seed = first_seed(arms, name)
                for index in range(runs or study.runs):
                    missing[f"{seed} {index}"] = 0.0 if _is_finished(arm, seed + index, folder) else seconds
    return sum(seconds > 0 for seconds in missing.values()), sum(missing.values())


def _is_finished(arm: Arm, seed: int, folder: Path) -> bool:
    """Only of runs that start from nothing: others are named after the run that they start from."""
    if arm.parent or arm.config.init:
        return False
    return is_done(folder / run_name(arm.config.replace(seed=seed)))


def estimate_run(arms: Mapping[str, Arm], name: str) -> float:
    """Seconds of one run; early stopping is not counted."""
    config = arms[name].config
    steps = config.steps or config.epochs * (count_training_images(config) or 0) / config.batch
    small = base("gpu")
    share = macs(find_model(arms, name)) * config.batch / (macs(complete_model(small)) * small.batch)
    drawn = DRAWN * config.batch if config.data.startswith("shapes") else 0.0
    return START + steps * max(STEP * share, LEAST_STEP, drawn)


def find_model(arms: Mapping[str, Arm], name: str) -> Model:
    """The model of an arm, its own or that of the arm it starts from, at its image size."""
    config: Config = arms[name].config
    if config.model:
        return complete_model(config)
    model = find_model(arms, arms[name].parent) if arms[name].parent else published_model()
    return model.replace(image_size=pair(config.image_size)) if config.image_size else model
