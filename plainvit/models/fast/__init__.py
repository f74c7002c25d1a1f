"""Everything for speed, attached to a plain model from outside.

    model = accelerate(plainvit.create("ViT-B/16"))       # the same parameters and names, less work

`accelerate` replaces the classes of a model's modules in place, so parameters, names, checkpoints and conversions stay
those of the plain model. `modules.py` says what each replacement saves. Without this package plainvit works, slower.
"""

from typing import TypeVar

from torch import nn

from plainvit.models.fast.modules import FAST, FastViT

__all__ = ["accelerate"]

M = TypeVar("M", bound=nn.Module)


def accelerate(model: M, *, low_precision_residual: bool = False) -> M:
    """Replaces the modules of a model by their fast versions, in place.

    Results are equal up to rounding, except for stochastic depth in training (see `FastBlock`). A forward pass with a
    trace computes everything that the trace can see.

    Args:
        model: A ViT, or a module that holds one, such as a training objective.
        low_precision_residual: Under autocast, tokens between blocks stay in the autocast dtype instead of fp32.

    Returns:
        The same model.
    """
    for module in model.modules():
        if type(module) in FAST:
            module.__class__ = FAST[type(module)]
        if isinstance(module, FastViT):
            module.low_precision_residual = low_precision_residual
    return model
