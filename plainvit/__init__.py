"""plainvit: Vision Transformers from raw images to an answer.

    import plainvit
    model = plainvit.create("ViT-B/16", classes=10)
    logits = model(images)                    # [B, 3, 224, 224], uint8 or floats in [0, 1]

    run = plainvit.fit(plainvit.recipe("digits"))
    run.metrics["test"]["top1"], run.folder

Importing this is cheap: torch is loaded when a name below is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plainvit.evaluate.predictor import Predictor
    from plainvit.models import Trace, create
    from plainvit.names import list_models
    from plainvit.recipes import list_recipes, recipe
    from plainvit.train.run import fit
    from plainvit.weights import load, save

__version__ = "0.2.0"
__all__ = [
    "Predictor",
    "Trace",
    "__version__",
    "create",
    "fit",
    "list_models",
    "list_recipes",
    "load",
    "recipe",
    "save",
]

_HOME = {
    "Predictor": "plainvit.evaluate.predictor",
    "Trace": "plainvit.models",
    "create": "plainvit.models",
    "fit": "plainvit.train.run",
    "list_models": "plainvit.names",
    "list_recipes": "plainvit.recipes",
    "load": "plainvit.weights",
    "recipe": "plainvit.recipes",
    "save": "plainvit.weights",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'plainvit' has no attribute {name!r}")
    import importlib

    from plainvit import device

    device.set_environment()  # must come before torch is loaded
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
