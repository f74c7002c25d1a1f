"""Records named intermediates of a forward pass without changing it.

    trace = Trace("block*/attention", "encoded", heads=[0, 3])
    model(images, trace)
    trace["block5/attention"]                 # [B, heads asked for, N, N]

A trace keeps the tensors that the pass computed, so gradients can be taken with respect to them. Attention weights are
computed in addition: the fused kernel never materializes them.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from plainvit.config import nearest


class Trace(dict[str, Tensor]):
    """The named intermediates of one forward pass; patterns are shell-style (`block*/tokens`)."""

    def __init__(self, *patterns: str, heads: Sequence[int] | None = None) -> None:
        super().__init__()
        self.patterns, self.heads = patterns, heads

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def check(self, names: Sequence[str], heads: int = 0) -> None:
        """Raises ValueError if a pattern matches nothing or a head does not exist."""
        if torch.compiler.is_compiling():
            _raise_compiled()
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"trace pattern {pattern!r} matches nothing in this model; {nearest(pattern, names)}")
        if self.heads is not None and not heads:
            raise ValueError("this model has no attention heads: create the Trace without heads=")
        if self.heads is not None and not all(0 <= head < heads for head in self.heads):
            raise ValueError(f"heads must be 0 to {heads - 1} for this model, got {list(self.heads)}")


def note(trace: Trace | None, name: str, x: Tensor) -> Tensor:
    """Returns x, and records it if the trace asks for it."""
    if trace is not None and trace.wants(name):
        trace[name] = x
    return x


def number_layers(layers: Sequence[int], depth: int) -> list[int]:
    """The chosen layers counted from 0; -1 is the last."""
    if not layers or not all(-depth <= layer < depth for layer in layers):
        raise ValueError(f"layers must be 0 to {depth - 1} for this model, got {list(layers)}")
    return [layer % depth for layer in layers]


def assume_constant_result(function: Callable) -> Callable:
    """As torch.compiler.assume_constant_result, without importing the compiler: called once, while it traces."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@assume_constant_result
def _raise_compiled() -> None:
    """Raised in a constant function, because the compiler would catch a plain raise and run the model eagerly."""
    raise ValueError("a trace does not work with a compiled model: call the model without torch.compile")
