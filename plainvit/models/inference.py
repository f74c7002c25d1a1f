"""Evaluation mode as a context, and a check that outputs are finite.

with eval_mode(model):
    logits = model(images)
check_finite(logits, lambda at: names[at])
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from plainvit.errors import NonFiniteError

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every module, also after an exception: parts of a model may be in different modes."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def in_eval_mode(function: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """Decorates a function whose first argument is a model: it runs in `eval_mode`."""

    @functools.wraps(function)
    def run(model: M, *args: P.args, **kwargs: P.kwargs) -> T:
        with eval_mode(model):
            return function(model, *args, **kwargs)

    return run


def check_finite(
    outputs: Tensor, name: Callable[[int], str], what: str = "logits", computed_in: torch.dtype = torch.float32
) -> None:
    """Raises NonFiniteError with the number of rows [N, ...] that hold NaN or Inf, and the name of the first."""
    bad = torch.nonzero(~outputs.isfinite().flatten(1).all(1)).flatten().tolist()
    if bad:
        advice = "use other weights" if computed_in is torch.float32 else "use --precision fp32 or other weights"
        raise NonFiniteError(
            f"the model's {what} are NaN or Inf for {len(bad):,} of {len(outputs):,} images (first: {name(bad[0])}): "
            f"its training diverged, or its weights overflow; {advice}",
            len(bad),
        )
