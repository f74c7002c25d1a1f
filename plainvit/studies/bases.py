"""The base configs of the studies at each budget.

cpu      a ViT of 0.1 million parameters on handwritten digits: seconds per run on two cores
gpu      a ViT of 4 million parameters on Tiny-ImageNet: about a minute per run on one large GPU
"""

from plainvit.config import Augment, Config, Optim, ViTConfig
from plainvit.recipes import recipe
from plainvit.studies.study import Budget

# Datasets for fine-tuning, the largest first
DOWNSTREAM: dict[Budget, tuple[str, ...]] = {"cpu": ("digits:56789",), "gpu": ("cifar10", "oxford-pets", "flowers102")}


def base(budget: Budget) -> Config:
    """Training from scratch; no setting was tuned on the compared images."""
    match budget:
        case "cpu":
            digits = recipe("digits")
            return digits.replace(steps=300, epochs=0.0, holdout=0.3, evaluations=1, ema_window=0.0, recipe="")
        case "gpu":
            tiny = recipe("tiny-imagenet")
            assert isinstance(tiny.model, ViTConfig)
            model = tiny.model.replace(width=192, depth=8, heads=3, mlp_dim=768)
            augment = Augment(area=(0.25, 1.0), cutmix=1.0)
            optim = tiny.optim.replace(lr=2e-3)
            changes = {"steps": 3000, "batch": 256, "epochs": 0.0, "holdout": 0.1, "evaluations": 1, "recipe": ""}
            return tiny.replace(model=model, augment=augment, optim=optim, **changes)


def pretrain_config(budget: Budget) -> Config:
    """Pre-training for all fine-tunings: the base, on other classes."""
    return base(budget).replace(data="digits:01234") if budget == "cpu" else base(budget)


def finetune_config(budget: Budget, data: str) -> Config:
    """A short fine-tuning on one of DOWNSTREAM: a head of zeros, one rate, no weight decay.

    Arms from scratch use it with a model. The optimizer is that of the base: the paper's SGD trains a ViT poorly from
    scratch.
    """
    match budget:
        case "cpu":
            optim = Optim(lr=1e-3, warmup=0.1)
            augment = Augment(crop="none", flip=0.0)
            return Config(data=data, steps=60, batch=64, holdout=0.3, evaluations=1, optim=optim, augment=augment)
        case "gpu":
            optim = Optim(name="muon", lr=1e-3, momentum=0.95, warmup=0.1)
            augment = Augment(crop="random", resize=448 / 384)  # BiT's
            return Config(data=data, steps=1000, batch=256, holdout=0.2, evaluations=1, optim=optim, augment=augment)


def vit(config: Config) -> ViTConfig:
    assert isinstance(config.model, ViTConfig)
    return config.model
