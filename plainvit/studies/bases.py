"""What the studies run at each budget, before an arm changes one thing of it.

cpu      a ViT of 0.1 million parameters on handwritten digits: seconds a run on two cores
gpu      a ViT of 4 million parameters on Tiny-ImageNet: about a minute a run on one large GPU
paper    ViT-B/16 on ImageNet-21k as in the paper's Table 3: thousands of core-days
"""

from plainvit.config import Augment, Config, ViTConfig
from plainvit.recipes import recipe
from plainvit.studies.study import Budget


def base(budget: Budget) -> Config:
    """A model from scratch; none of its settings was chosen on the images that the arms are compared on."""
    match budget:
        case "cpu":
            digits = recipe("digits")
            return digits.replace(steps=300, epochs=0.0, holdout=0.3, evaluations=1, ema_window=0.0, recipe="")
        case "gpu":
            tiny = recipe("tiny-imagenet")
            assert isinstance(tiny.model, ViTConfig)
            model = tiny.model.replace(width=192, depth=8, heads=3, mlp_dim=768)
            augment = Augment(area=(0.25, 1.0), cutmix=1.0)
            changes = {"steps": 4000, "epochs": 0.0, "holdout": 0.1, "evaluations": 1, "recipe": ""}
            return tiny.replace(model=model, augment=augment, **changes)
        case "paper":
            return recipe("vit-b16-i21k").replace(holdout=0.01)


def vit(config: Config) -> ViTConfig:
    assert isinstance(config.model, ViTConfig)
    return config.model
