"""Compiled models give the logits of the eager one, at every batch size."""

from typing import Any

import pytest
import tiny
import torch

MODELS: dict[str, Any] = {
    **{
        kind: lambda kind=kind: tiny.vit(torch.float32, posemb=kind, depth=1)
        for kind in ("none", "1d", "2d", "relative", "sincos2d")
    },
    "hybrid": lambda: tiny.hybrid(torch.float32, blocks=(1,), image_size=(16, 24), depth=1),
    "BiT": lambda: tiny.bit(torch.float32, blocks=(1,)),
}
BACKENDS = {"aot_eager": 1e-5, "inductor": 1e-4}  # and the tolerance
CASES = [
    pytest.param(name, backend, marks=() if (name, backend) == ("relative", "aot_eager") else pytest.mark.slow)
    for name in MODELS
    for backend in BACKENDS
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_compiled_models_equal_eager_ones(name: str, backend: str) -> None:
    """fullgraph: nothing in the model breaks the graph."""
    torch._dynamo.reset()
    model = MODELS[name]()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    size = (32, 48) if name == "BiT" else model.config.image_size
    with torch.inference_mode():
        for batch in (2, 5, 1):
            images = tiny.images(batch, size, dtype=torch.float32, seed=batch)
            assert tiny.difference(compiled(images), model(images)) <= BACKENDS[backend]
