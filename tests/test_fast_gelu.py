"""The short GELU compared with float64 at every value of bf16, and the memory of a compiled MLP."""

from functools import partial
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from plainvit.models import ViT
from plainvit.models.fast import accelerate, mlp
from plainvit.models.fast.gelu import gelu, gelu_linear, gelu_tanh, linear_gelu, register_decompositions
from plainvit.models.recompute import recompute_activations

BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NUMBERS = BITS[BITS.isfinite()]
LARGE = NUMBERS.abs() < 6  # beyond, GELU is x or 0 to 1e-8


def gelu_in_float64(form: str) -> tuple[Tensor, Tensor]:
    """x Phi(x) and its slope."""
    x = NUMBERS.double()
    if form == "none":
        normal = torch.special.ndtr(x)
        return x * normal, normal + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    inner, slope = x + 0.044715 * x**3, 1 + 3 * 0.044715 * x**2
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * inner)
    return x * (1 + tanh) / 2, (1 + tanh) / 2 + x * (1 - tanh**2) * (2 / torch.pi) ** 0.5 * slope / 2


def evaluate(function: Any) -> tuple[Tensor, Tensor]:
    x = NUMBERS.clone().requires_grad_()
    y = function(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(("ours", "form"), [(gelu, "none"), (gelu_tanh, "tanh")])
def test_error_is_that_of_pytorch_in_bf16(ours: Any, form: str) -> None:
    """Of all bf16 numbers, as many as PyTorch's or more come out as float64 rounded to bf16; none is two steps off."""
    for actual, plain, expected in zip(
        evaluate(ours), evaluate(partial(F.gelu, approximate=form)), gelu_in_float64(form), strict=True
    ):
        right = (actual == expected.bfloat16()).double().mean()
        assert right > 0.998
        assert right >= (plain == expected.bfloat16()).double().mean()
        error = (actual.double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 2e-6)[LARGE].all()
        assert (error <= 2**-8 * expected.abs() + 1e-8)[~LARGE].all()


# With the product that follows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_linear_and_its_gradients_are_close_to_float64(tanh: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, 5, 24), "weight": (7, 24), "bias": (7,), "hidden_bias": (24,)}
    given = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    x, grad = given["x"], torch.randn(3, 5, 7, generator=generator)
    actual = gelu_linear(**given, tanh=tanh)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    without = wide["x"] - wide["hidden_bias"].detach()
    right = F.linear(
        F.gelu(without + wide["hidden_bias"], approximate="tanh" if tanh else "none"), wide["weight"], wide["bias"]
    )
    torch.testing.assert_close(actual.double(), right, rtol=0, atol=2e-5)
    mine = torch.autograd.grad(actual, list(given.values()), grad)
    theirs = torch.autograd.grad(right, list(wide.values()), grad.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=5e-5)
    flat = (x.detach().flatten(0, 1), *(tensor.detach() for tensor in list(given.values())[1:]), tanh)
    torch.library.opcheck(torch.ops.plainvit.gelu_linear.default, flat)
    torch.library.opcheck(torch.ops.plainvit.gelu_gradients.default, (flat[0], flat[0], tanh))


def test_linear_gelu_equals_gelu_of_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((3, 5, 24), (7, 24), (7,)))
    right = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    torch.testing.assert_close(linear_gelu(x, weight, bias).double(), right, rtol=0, atol=3e-5)
    torch.library.opcheck(torch.ops.plainvit.linear_gelu.default, (x.flatten(0, 1), weight, bias))


# In a model, compiled -------------------------------------------------------------------------------------------------


def compile_and_record(model: nn.Module, kept: list[Tensor]) -> Any:
    """By PyTorch's own choice of what to keep for the backward pass; run without the last step, which makes kernels."""

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        kept.extend(node.meta["val"] for node in outputs if node is not None and node.op != "placeholder")
        return graph.forward

    def partition(graph: torch.fx.GraphModule, inputs: Any, **how: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **how)

    options = {"partition_fn": partition, "decompositions": select_decomp_table()}
    backend = aot_autograd(fw_compiler=look, bw_compiler=lambda graph, _: graph.forward, **options)
    return torch.compile(model, backend=backend, fullgraph=True)


def compute_loss(model: Any, images: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(images).float().square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def hidden_dtypes(kept: list[Tensor], mlp_dim: int) -> list[torch.dtype]:
    """Of what is kept, all that is as wide as an MLP inside; not its weights."""
    return [
        x.dtype for x in kept if isinstance(x, Tensor) and x.ndim > 1 and x.shape[-1] == mlp_dim and x.shape[0] > 99
    ]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("by_kernel", tiny.mostly_slow((True, False), 2))
@pytest.mark.parametrize("activation", tiny.mostly_slow(("gelu", "gelu_tanh"), 2))
def test_compiled_training_keeps_one_hidden_tensor(
    monkeypatch: pytest.MonkeyPatch, activation: str, by_kernel: bool
) -> None:
    """With shortcuts; and its gradients are those of the eager model without, but for bf16's rounding."""
    torch._dynamo.reset()
    asked = mlp.trains_by_kernel if not by_kernel else lambda *_: torch.is_grad_enabled() and register_decompositions()
    monkeypatch.setattr(mlp, "trains_by_kernel", asked)  # as on a GPU
    changes = {"depth": 2, "mlp_dim": 96, "activation": activation, "pool": "average", "class_token": False}
    model = tiny.vit(torch.float32, **changes).train()
    assert isinstance(model, ViT)
    images, kept, plain = tiny.images(64, model.config.image_size, dtype=torch.float32, seed=0), [], []
    compute_loss(compile_and_record(model, plain), images).backward()
    expected = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    compute_loss(compile_and_record(accelerate(model), kept), images).backward()
    assert hidden_dtypes(kept, 96) == [torch.bfloat16] * 2
    assert len(hidden_dtypes(plain, 96)) == 4
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert (gradient - expected[name]).norm() <= 0.03 * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_recomputed_blocks_keep_no_hidden_tensor() -> None:
    torch._dynamo.reset()
    model = recompute_activations(accelerate(tiny.vit(torch.float32, depth=2, mlp_dim=96).train()))
    kept: list[Tensor] = []
    images = tiny.images(64, model.config.image_size, dtype=torch.float32, seed=0)
    compute_loss(compile_and_record(model, kept), images).backward()
    assert hidden_dtypes(kept, 96) == []
