"""Compiled models give the logits of the eager one, at every batch size."""

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

MODELS: dict[str, Any] = {
    **{
        kind: lambda kind=kind: tiny.vit(torch.float32, posemb=kind, depth=1)
        for kind in ("none", "1d", "2d", "relative", "sincos2d")
    },
    "hybrid": lambda: tiny.hybrid(torch.float32, blocks=(1,), image_size=(16, 24), depth=1),
    "BiT": lambda: tiny.bit(torch.float32, blocks=(1,)),
}
BATCHES = (2, 5, 1)
FAST = ("relative",)
every_model = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=() if name in FAST else pytest.mark.slow) for name, make in MODELS.items()],
    ids=MODELS,
)


def inputs(model: nn.Module, batch: int) -> Tensor:
    size = (32, 48) if type(model).__name__ == "ResNet" else model.config.image_size
    return tiny.images(batch, size, dtype=torch.float32, seed=batch)


def check(model: nn.Module, other: Any, tolerance: float) -> None:
    with torch.inference_mode():
        for batch in BATCHES:
            images = inputs(model, batch)
            assert tiny.difference(other(images), model(images)) <= tolerance


@every_model
def test_compiles_without_graph_breaks(make: Any) -> None:
    """fullgraph: nothing in the model breaks the graph."""
    torch._dynamo.reset()
    model = make()
    check(model, torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_compiled_by_inductor(make: Any) -> None:
    torch._dynamo.reset()
    model = make()
    check(model, torch.compile(model, fullgraph=True, backend="inductor", dynamic=True), 1e-4)
