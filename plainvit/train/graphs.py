"""A step as two CUDA graphs: the gradients, and the update. The host launches two things where it launched hundreds.

Small models on a fast GPU are bound by the host otherwise: on an H200 a step of the recipe cifar10 takes 11.6 ms by
graphs and 36.8 without. There are two graphs because the loop checks loss and norm in between, and skips the update if
they are not finite. Rates are on the device and dropout is seeded before each replay, so a replayed step equals the
step that it replaces.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plainvit.planning.cost import is_small

if TYPE_CHECKING:
    from plainvit.config import Config
    from plainvit.runtime.distributed import World
    from plainvit.train.optim import Optimizers

WARM = 2  # calls before one is captured: they compile, and give the optimiser its state
OPTIMIZERS = ("adamw", "sgd", "muon")  # LAMB's bias correction is computed on the host
log = logging.getLogger("plainvit")


def graphs_fit(config: "Config", world: "World") -> bool:
    """One GPU, steps so small that the host is the slower of the two, and nothing in them that must ask it."""
    small = config.model is not None and is_small(config.model, config.batch)
    wanted = config.graphs == "auto" and small and not config.recompute
    return wanted and world.size == 1 and world.device.startswith("cuda") and config.optim.name in OPTIMIZERS


class Graph:
    """A function of tensors in fixed places, captured at its third call and replayed from then on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls, self.refused = function, 0, False
        self.stream = torch.cuda.Stream()  # the first calls run where the capture will: autograd remembers streams
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.result: Any = None

    def __call__(self, *tensors: Tensor) -> Any:
        self.calls += 1
        if self.graph is None and self.calls > WARM and not self.refused:
            self._capture(tensors)
        if self.graph is None:
            return self._called(tensors)
        for place, tensor in zip(self.inputs, tensors, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return self.result

    def _called(self, tensors: tuple[Tensor, ...]) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.function(*tensors)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        """What cannot be captured stays as it is, and says so once."""
        inputs, graph = tuple(tensor.clone() for tensor in tensors), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what was cached cannot serve a graph, which has memory of its own
        try:
            # In other threads of this process memory may be pinned meanwhile
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.function(*inputs)
        except (RuntimeError, ValueError) as error:
            self.refused = True
            torch.cuda.synchronize()
            log.warning("steps run without CUDA graphs: %s", str(error).splitlines()[0])
            return
        self.inputs, self.graph = inputs, graph


class GraphedGradients(Graph):
    """Gradients lie in the graph's memory: they are hung onto the parameters again, which the loop clears."""

    def __init__(self, function: Callable[..., Tensor], optimizers: "Optimizers") -> None:
        def fresh(*tensors: Tensor) -> Tensor:
            optimizers.zero()  # so that the backward pass writes them, in place of adding to them
            return function(*tensors)

        super().__init__(fresh)
        self.optimizers = optimizers
        self.kept: list[tuple[torch.nn.Parameter, Tensor]] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        found = super().__call__(*tensors)
        if self.graph and not self.kept:
            self.kept = [(p, p.grad) for p in self.optimizers.parameters if p.grad is not None]
        for parameter, gradient in self.kept:
            parameter.grad = gradient
        return found
