"""The operators that compiled blocks call on a GPU, checked without one: tensors are fake.

test_fast_gelu, test_fast_attention and test_gpu check that the operators compute the same.
"""

from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plainvit.config import Config
from plainvit.models import ViT, build
from plainvit.models.fast import accelerate, attention, gelu, mlp
from plainvit.models.fast.fp8 import use_fp8
from plainvit.models.trace import assume_constant_result
from plainvit.names import configure
from plainvit.train.setup import choose_compiler_options

OURS = {f"plainvit.{name}" for name in ("short_attention", "gelu_linear", "linear_gelu", "gelu")}
OURS.add("aten._addmm_activation")


@assume_constant_result
def gpu_is_ready(index: int) -> bool:
    return index == 0


def replace_by_fake_cuda(model: ViT, dtype: torch.dtype) -> None:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    low = dtype if tensor.is_floating_point() else tensor.dtype
                    made = torch.empty(tensor.shape, dtype=low, device="cuda")
                    table[name] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made  # pyright: ignore


def operators(monkeypatch: pytest.MonkeyPatch, *, learning: bool, dtype: torch.dtype, **changes: Any) -> set[str]:
    """The operators of `OURS` that an accelerated model calls."""
    torch._dynamo.reset()
    monkeypatch.setattr(mlp, "device_ready", gpu_is_ready)
    monkeypatch.setattr(attention, "device_ready", gpu_is_ready)
    monkeypatch.setattr(gelu, "copies_tiles", gpu_is_ready)
    fp8, batch = changes.pop("fp8", False), changes.pop("batch", 4)
    model = build(configure("ViT-Ti/16", 10, 64, depth=2, **changes))
    assert isinstance(model, ViT)
    seen: set[str] = set()

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.update(str(node.target).removesuffix(".default") for node in graph.graph.nodes)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(learning):
        replace_by_fake_cuda(model, dtype)
        made = use_fp8(model) if fp8 else model
        run = torch.compile(accelerate(made.train(learning)), backend=look, fullgraph=True, dynamic=False)
        run(torch.empty(batch, 3, 64, 64, dtype=torch.uint8, device="cuda"))
    return {name for name in OURS if name in seen} | {"checkpoint" for name in seen if "checkpoint" in name}


@pytest.mark.parametrize(
    ("changes", "expected"),
    tiny.mostly_slow(
        [
            ({}, {"plainvit.short_attention", "plainvit.gelu_linear"}),
            ({"activation": "gelu"}, {"plainvit.short_attention", "plainvit.gelu_linear"}),
            ({"activation": "relu"}, {"plainvit.short_attention"}),
            ({"activation": "gelu_sigmoid"}, {"plainvit.short_attention", "checkpoint"}),
            ({"dropout": 0.1}, {"plainvit.short_attention", "checkpoint"}),
            ({"posemb": "relative"}, {"plainvit.gelu_linear"}),
        ],
        3,
    ),
)
def test_training_in_bf16(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: set[str]) -> None:
    assert operators(monkeypatch, learning=True, dtype=torch.bfloat16, **changes) == expected


def test_training_in_fp8_uses_fp8_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = operators(monkeypatch, learning=True, dtype=torch.bfloat16, fp8=True)
    assert actual == {"plainvit.short_attention", "checkpoint"}


@pytest.mark.slow
def test_training_in_fp32_uses_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operators(monkeypatch, learning=True, dtype=torch.float32) == {"checkpoint"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    tiny.mostly_slow(
        [
            ({"activation": "gelu_tanh"}, {"aten._addmm_activation"}),
            ({"activation": "gelu"}, {"plainvit.gelu"}),
            ({"activation": "relu"}, set()),
            # the last block computes one token: too few rows
            ({"activation": "gelu", "batch": 4096}, {"plainvit.linear_gelu", "plainvit.gelu"}),
            # rows are not aligned to 16 bytes
            ({"activation": "gelu", "batch": 4096, "mlp_dim": 764}, {"plainvit.gelu"}),
            ({"activation": "gelu_tanh", "batch": 4096}, {"aten._addmm_activation"}),
        ],
        3,
    ),
)
def test_inference_in_bf16(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: set[str]) -> None:
    actual = operators(monkeypatch, learning=False, dtype=torch.bfloat16, **changes)
    assert actual == {"plainvit.short_attention", *expected}


def test_compiler_has_the_options_used() -> None:
    options = choose_compiler_options(Config(model=configure("ViT-L/16", 10)))
    assert options
    assert set(options) <= set(torch._inductor.list_options())
    for other in ("ViT-H/14", "BiT-R50x1"):  # rows too wide for what shared memory holds, and no LayerNorm
        assert choose_compiler_options(Config(model=configure(other, 10))) is None
    assert choose_compiler_options(Config(model=configure("ViT-L/16", 10), fast_path="off")) is None
