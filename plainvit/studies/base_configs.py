"""The base configs of the studies at each budget.

cpu      a ViT of 0.1 million parameters on handwritten digits: seconds per run on two cores
gpu      a ViT of 1.2 million parameters on CIFAR-10, for about 10 epochs: several runs share one large GPU
"""

from plainvit.config import Augment, Config, Model, Optim, ViTConfig
from plainvit.planning.datasets import CLASSES
from plainvit.recipes import recipe
from plainvit.studies.claims import Budget

# Datasets for fine-tuning, the largest first
DOWNSTREAM: dict[Budget, tuple[str, ...]] = {"cpu": ("digits:56789",), "gpu": ("cifar10", "flowers102")}


def base(budget: Budget) -> Config:
    """Training from scratch; no setting was tuned on the compared images."""
    match budget:
        case "cpu":
            digits = recipe("digits")
            return digits.replace(steps=300, epochs=0.0, holdout=0.3, evaluations=1, ema_window=0.0, recipe="")
        case "gpu":
            cifar = recipe("cifar10")
            model = vit(cifar).replace(width=128, depth=6, heads=2, mlp_dim=512, stochastic_depth=0.0)
            changes = {"steps": 1500, "epochs": 0.0, "holdout": 0.2, "evaluations": 1, "compile": "off", "recipe": ""}
            augment = Augment(crop="pad", pad=4, mixup=0.2, cutmix=1.0)
            return cifar.replace(model=model, augment=augment, ema_window=0.0, **changes)


def plain(budget: Budget) -> Config:
    """The base without mixing of images, averaged weights and stochastic depth."""
    config = base(budget)
    return config.replace(augment=config.augment.replace(mixup=0.0, cutmix=0.0), ema_window=0.0)


def by_adamw(budget: Budget) -> Config:
    """The base with AdamW, where models other than Transformers are compared or the literature speaks of it."""
    config = base(budget)
    if budget == "cpu":
        return config
    return config.replace(optim=Optim(lr=1e-3, warmup=config.optim.warmup, weight_decay=0.1))


def pretrain_config(budget: Budget) -> Config:
    """Pre-training for all fine-tunings: the base on other classes, on a GPU on Tiny-ImageNet at half its size."""
    if budget == "cpu":
        return base(budget).replace(data="digits:01234")
    config = base(budget)
    augment = config.augment.replace(crop="inception", area=(0.25, 1.0))
    return config.replace(data="tiny-imagenet", augment=augment, steps=2000)


def finetune_config(budget: Budget, data: str = "") -> Config:
    """A short fine-tuning, by default on the first of DOWNSTREAM: a head of zeros, one rate, no weight decay.

    Arms from scratch use it with a model. The optimizer is that of the base: the paper's SGD trains a ViT poorly from
    scratch.
    """
    data = data or DOWNSTREAM[budget][0]
    match budget:
        case "cpu":
            optim = Optim(lr=1e-3, warmup=0.1)
            augment = Augment(crop="none", flip=0.0)
            return Config(data=data, steps=60, batch=64, holdout=0.3, evaluations=1, optim=optim, augment=augment)
        case "gpu":
            optim = Optim(name="muon", lr=1e-3, momentum=0.95, warmup=0.1)
            augment = Augment(crop="random", resize=448 / 384)  # BiT's
            changes = {"steps": 400, "batch": 256, "holdout": 0.2, "evaluations": 1, "compile": "off"}
            return Config(data=data, optim=optim, augment=augment, **changes)


def finetune_rates(budget: Budget) -> tuple[float, ...]:
    """The fine-tuning's own and one to either side."""
    lr = finetune_config(budget).optim.lr
    return lr / 3, lr, 3 * lr


def vit(config: Config) -> ViTConfig:
    assert isinstance(config.model, ViTConfig)
    return config.model


def complete_model(config: Config) -> Model:
    """The model with the head for its dataset."""
    assert config.model is not None
    known = CLASSES | {"shapes": 10}
    return config.model.replace(classes=config.model.classes or known.get(config.data.partition(":")[0], 0))
