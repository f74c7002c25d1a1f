"""GELU with the layer after it: gradients against an MLP written out in float64.

The kernel runs in Triton's interpreter, in a child process, on any machine; a further child compiles it for GPUs that
are not there.

    python -m pytest tests/test_gelu_linear.py
    python -m pytest -m gpu tests/test_gelu_linear.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from children import NO_GPU, in_child
from torch import Tensor, nn

import plainvit
from plainvit.models import gelu_linear as ours
from plainvit.models.gelu_linear import gelu_linear

KINDS = {"gelu": "none", "gelu_tanh": "tanh"}


def drawn(tokens: int, width: int, hidden: int, device: str = "cpu") -> dict[str, Tensor]:
    """An MLP's input, weights and the gradient of its output; numbers far out on both sides among the hidden ones."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = {"x": (2, tokens, width), "w1": (hidden, width), "b1": (hidden,), "w2": (width, hidden), "b2": (width,)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["b1"] *= 5
    found["grad"] = torch.randn(2, tokens, width, generator=generator)
    return {name: x.to(device) for name, x in found.items()}


def plain(t: dict[str, Tensor], kind: str) -> Tensor:
    return F.linear(F.gelu(F.linear(t["x"], t["w1"], t["b1"]), approximate=KINDS[kind]), t["w2"], t["b2"])


def fused(t: dict[str, Tensor], kind: str) -> Tensor:
    h = F.linear(t["x"], t["w1"], t["b1"].detach())
    return gelu_linear(h, t["b1"], t["w2"], t["b2"], kind == "gelu_tanh")


def gradients(mlp: Callable[..., Tensor], t: dict[str, Tensor], kind: str) -> list[Tensor]:
    """Output, then the gradients of x, w1, b1, w2 and b2."""
    learned = {name: x.detach().requires_grad_() for name, x in t.items() if name != "grad"}
    out = mlp(learned, kind)
    return [out.detach(), *torch.autograd.grad(out, list(learned.values()), t["grad"].to(out.dtype))]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The largest difference of each, in units of the largest value expected."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]


def exact(t: dict[str, Tensor], kind: str) -> list[Tensor]:
    return gradients(plain, {name: x.double() for name, x in t.items()}, kind)


def child() -> None:
    found: dict[str, Any] = {}
    for kind in KINDS:
        for tokens, width, hidden in ((1, 8, 24), (9, 8, 256), (70, 16, 300)):
            t = drawn(tokens, width, hidden)
            found[f"{kind} {tokens} {hidden}"] = errors(gradients(fused, t, kind), exact(t, kind))
    ours.PROGRAMS = 4  # several tiles of rows to a program, and several programs
    t = drawn(70, 16, 300)
    found["few programs"] = errors(gradients(fused, t, "gelu"), exact(t, "gelu"))
    found["nothing"] = ours.run(torch.empty(0, 8), torch.empty(0, 8), False)[2].tolist()
    print(json.dumps(found | {"model": in_a_model()}))


def in_a_model() -> list[float]:
    """A whole ViT's gradients with the kernel in its blocks, beside those without."""
    model = plainvit.create("ViT-Ti/8", 5, 16, seed=0, width=32, depth=2, heads=2, mlp_dim=64, pool="average").train()
    assert isinstance(model, plainvit.models.ViT)
    images, found = torch.rand(3, 3, 16, 16), []
    nn.init.normal_(model.head.weight)  # pyright: ignore
    for wanted in (False, True):
        import plainvit.models.vit as module

        module.gelu_linear_pays = lambda _: True
        model.take_shortcuts(wanted).zero_grad()
        model(images).square().sum().backward()  # pyright: ignore
        found.append([p.grad.clone().double() for p in model.parameters() if p.grad is not None])
    return errors(found[1], found[0])


@pytest.mark.slow
def test_gradients_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    found = json.loads(in_child("import test_gelu_linear as t; t.child()", TRITON_INTERPRET="1"))
    assert found.pop("nothing") == [0] * 8
    assert len(found) == 2 * 3 + 2
    for name, some in found.items():
        assert max(some) < 2e-6, name


def test_a_cpu_is_refused_and_keeps_to_the_plain_path() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        torch.ops.plainvit.gelu_backward(torch.zeros(2, 8), torch.zeros(2, 8), False)
    assert not ours.pays(torch.zeros(1 << 24))


COMPILE = """
from plainvit.models import gelu_linear as ours
for tanh in (False, True):
    ours.run(*(torch.empty(50432, 3072, dtype=torch.bfloat16) for _ in range(2)), tanh)
print(len(made))
"""


@pytest.mark.slow
def test_it_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert in_child(NO_GPU.format(capability=90) + COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "2"


# On a GPU -------------------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def marked(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (*gpu, pytest.mark.filterwarnings("ignore::UserWarning")):
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_gpu_error_in_bf16_is_that_of_the_plain_path(kind: str, compiled: bool) -> None:
    t = drawn(197, 768, 3072, "cuda")
    t = {name: x.bfloat16() if name != "b1" else x.bfloat16().float() for name, x in t.items()}
    torch._dynamo.reset()

    def mine(t: dict[str, Tensor], kind: str) -> Tensor:
        h = F.linear(t["x"], t["w1"], t["b1"].detach().bfloat16())
        return gelu_linear(h, t["b1"], t["w2"], t["b2"], kind == "gelu_tanh")

    def theirs(t: dict[str, Tensor], kind: str) -> Tensor:
        return plain(t | {"b1": t["b1"].bfloat16()}, kind)

    run = torch.compile(mine, fullgraph=True) if compiled else mine
    expected = exact(t, kind)
    both = (errors(gradients(one, t, kind), expected) for one in (run, theirs))
    for found, right in zip(*both, strict=True):
        assert found <= 1.5 * right + 1e-4
