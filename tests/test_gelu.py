"""The short GELU against float64, at every number that bf16 has; and that compiled code keeps one tensor of an MLP."""

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

from plainvit.models import ViT, vit
from plainvit.models.gelu import gelu, gelu_tanh

BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NUMBERS = BITS[BITS.isfinite()]
LARGE = NUMBERS.abs() < 6  # beyond, GELU is x or 0 to 1e-8


def exact(form: str) -> tuple[Tensor, Tensor]:
    """x Phi(x) and its slope."""
    x = NUMBERS.double()
    if form == "none":
        normal = torch.special.ndtr(x)
        return x * normal, normal + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    inner, slope = x + 0.044715 * x**3, 1 + 3 * 0.044715 * x**2
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * inner)
    return x * (1 + tanh) / 2, (1 + tanh) / 2 + x * (1 - tanh**2) * (2 / torch.pi) ** 0.5 * slope / 2


def of(function: Any) -> tuple[Tensor, Tensor]:
    x = NUMBERS.clone().requires_grad_()
    y = function(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize(("ours", "form"), [(gelu, "none"), (gelu_tanh, "tanh")])
def test_rounded_as_well_as_pytorchs(ours: Any, form: str) -> None:
    """Of all bf16 numbers, as many as PyTorch's or more come out as float64 rounded to bf16; none is two steps off."""
    for found, plain, expected in zip(of(ours), of(partial(F.gelu, approximate=form)), exact(form), strict=True):
        right = (found == expected.bfloat16()).double().mean()
        assert right > 0.998
        assert right >= (plain == expected.bfloat16()).double().mean()
        error = (found.double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 2e-6)[LARGE].all()
        assert (error <= 2**-8 * expected.abs() + 1e-8)[~LARGE].all()


def test_infinities_and_nothing() -> None:
    found = gelu(torch.tensor([float("inf"), 0.0, -0.0, float("nan")], dtype=torch.bfloat16))
    assert found[:3].tolist() == [float("inf"), 0.0, 0.0]
    assert found[3].isnan()
    assert gelu(torch.empty(0, 3, dtype=torch.bfloat16)).shape == (0, 3)


# In a model, compiled -------------------------------------------------------------------------------------------------


def compiled(model: nn.Module, kept: list[Tensor]) -> Any:
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


def trained(model: Any, images: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(images).float().square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def hidden(kept: list[Tensor], mlp_dim: int) -> list[torch.dtype]:
    """Of what is kept, all that is as wide as an MLP inside; not its weights."""
    return [
        x.dtype for x in kept if isinstance(x, Tensor) and x.ndim > 1 and x.shape[-1] == mlp_dim and x.shape[0] > 99
    ]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("activation", tiny.mostly_slow(("gelu", "gelu_tanh"), 2))
def test_compiled_training_keeps_one_tensor_of_an_mlp(activation: str) -> None:
    """With shortcuts; and its gradients are those of the eager model without, but for bf16's rounding."""
    torch._dynamo.reset()
    changes = {"depth": 3, "mlp_dim": 96, "activation": activation, "pool": "average", "class_token": False}
    model = tiny.vit(torch.float32, **changes).train()
    assert isinstance(model, ViT)
    images, kept, plain = tiny.images(64, model.config.image_size, dtype=torch.float32, seed=0), [], []
    trained(compiled(model.take_shortcuts(False), plain), images).backward()
    expected = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    trained(compiled(model.take_shortcuts(), kept), images).backward()
    assert hidden(kept, 96) == [torch.bfloat16] * 3
    assert len(hidden(plain, 96)) == 6
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() <= 0.03 * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_beside_recomputed_blocks() -> None:
    torch._dynamo.reset()
    model = tiny.vit(torch.float32, depth=2, mlp_dim=96).train().take_shortcuts()
    model.recompute = True
    kept: list[Tensor] = []
    images = tiny.images(64, model.config.image_size, dtype=torch.float32, seed=0)
    trained(compiled(model, kept), images).backward()
    assert hidden(kept, 96) == []


@pytest.mark.parametrize(("activation", "wanted"), [("gelu_tanh", True), ("gelu", False)])
def test_of_answers_the_compiler_sees_one_product_with_its_gelu(
    monkeypatch: pytest.MonkeyPatch, activation: str, wanted: bool
) -> None:
    """As it would on a GPU, in bf16: only where nothing is learned, and of the form with a tanh."""
    torch._dynamo.reset()
    monkeypatch.setattr(vit, "answers_by_cublas", lambda *_: not torch.is_grad_enabled())
    model, seen = tiny.vit(torch.float32, activation=activation).eval().take_shortcuts(), []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(any("_addmm_activation" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    for learning in (False, True):
        with torch.set_grad_enabled(learning):
            torch.compile(model, backend=look, fullgraph=True)(tiny.images(2, model.config.image_size, seed=0))
    assert seen == [wanted, False]
