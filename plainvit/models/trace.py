"""Looking inside a forward pass without changing it.

    trace = Trace("block*/attention", "encoded", heads=[0, 3])
    model(images, trace)
    trace["block5/attention"]                 # [B, heads asked for, N, N]

A trace keeps the live tensors that the pass computed, so gradients can be taken with respect to them; attention
weights alone are computed beside the fused kernel, which never forms them.
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
        """Every pattern must name something, before anything is computed."""
        if torch.compiler.is_compiling():
            _refuse_compiled()
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"nothing in this model is named {pattern!r}; {nearest(pattern, names)}")
        if self.heads is not None and not heads:
            raise ValueError("this model has no attention heads to choose among")
        if self.heads is not None and not all(0 <= head < heads for head in self.heads):
            raise ValueError(f"heads {list(self.heads)} are not all among this model's 0 to {heads - 1}")


def note(trace: Trace | None, name: str, x: Tensor) -> Tensor:
    """Passes x through, recording it where the trace asks for it."""
    if trace is not None and trace.wants(name):
        trace[name] = x
    return x


def assume_constant_result(function: Callable) -> Callable:
    """As torch.compiler.assume_constant_result, without importing the compiler: called once, while it traces."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@assume_constant_result
def _refuse_compiled() -> None:
    """A plain raise would be swallowed and the model silently run eagerly."""
    raise ValueError("a trace needs the eager model: call the model itself, not its torch.compile'd form")
