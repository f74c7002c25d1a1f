"""Claims 6 and 7 from published weights: ViT-Ti/16 (AugReg), DATA_ROOT/weights/vit_ti16_augreg.safetensors.

    plainvit study transfer-published --data-root DIR          also resolution-published

The rules are those of `transfer` and `resolution`. On a CPU transfer is tested at 64 pixels and resolution on Pets with
20 steps, so that a run takes about a minute on one core.
"""

from plainvit.config import Config, ViTConfig, pair
from plainvit.names import configure
from plainvit.studies.bases import finetune_config, finetune_rates
from plainvit.studies.measures import halves
from plainvit.studies.study import Arm, Budget, define, rate_arms
from plainvit.studies.transfer import parts, resolution_parts, size_arms

SETS = ("cifar10", "oxford-pets", "flowers102")
WEIGHTS = "weights/vit_ti16_augreg.safetensors"
SIZES: dict[Budget, tuple[int, ...]] = {"cpu": (224, 256, 288), "gpu": (224, 288, 384)}  # the first: of pre-training
HOLDOUT = {"cifar10": 0.02, "oxford-pets": 0.2, "flowers102": 0.2}  # on a CPU: 1,000, 736 and 204 images


def published_model() -> ViTConfig:
    model = configure("ViT-Ti/16")
    assert isinstance(model, ViTConfig)
    return model.replace(classes=0, representation=0, image_size=pair(SIZES["gpu"][0]))


def arms(budget: Budget) -> dict[str, Arm]:
    """A group for each set."""
    found: dict[str, Arm] = {}
    for data in SETS:
        config, model = finetune_config("gpu", data), published_model()
        if budget == "cpu":
            config = config.replace(steps=60, batch=64, holdout=HOLDOUT[data], image_size=64)
            model = model.replace(image_size=pair(64))
        found[f"{data}, pre-trained"] = Arm(config.replace(init=WEIGHTS), group=data)
        scratch = config.replace(model=model, image_size=0)
        found |= rate_arms(f"{data}, scratch", scratch, finetune_rates("gpu"), group=data)
    return found


def resolution_arms(budget: Budget) -> dict[str, Arm]:
    config: Config = finetune_config("gpu", SETS[0])
    if budget == "cpu":
        config = finetune_config("gpu", "oxford-pets").replace(steps=20, batch=32)
    return size_arms(config.replace(init=WEIGHTS), SIZES[budget])


STUDIES = (
    define("transfer-published", arms, parts, measure=halves, bars=True, runs=8),
    define("resolution-published", resolution_arms, resolution_parts, xlabel="image side, pixels"),
)
