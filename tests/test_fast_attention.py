"""Short attention: forward and gradients compared with an explicit softmax in float64.

On any machine the kernels run in Triton's interpreter, in a child process (TRITON_INTERPRET must be set before triton
is loaded), in fp32 and fp16: bf16 needs a GPU.

    python -m pytest tests/test_fast_attention.py
    python -m pytest -m gpu tests/test_fast_attention.py
"""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import on_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import plainvit
from plainvit.models.fast import accelerate, modules
from plainvit.models.fast import attention as ours
from plainvit.models.fast.attention import LARGE, Launch, explain_unfit, is_faster, short_attention, split

LENGTHS = (1, 5, 17, 64, 65, 129, 196, 197, 256, 257, 288)


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def reference(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Eqs. 5-8 in the dtype given, with nothing fused: tokens, and the natural logarithm of each softmax's sum."""
    B, N, packed = qkv.shape
    q, k, v = qkv.view(B, N, 3, heads, packed // (3 * heads)).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, d]
    logits = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    tokens = torch.einsum("bhij,bhjd->bihd", weights / weights.sum(-1, keepdim=True), v)
    return tokens.reshape(B, N, packed // 3), logits.logsumexp(-1)


def exact_gradients(qkv: Tensor, grad: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lse and d_qkv in float64."""
    given = qkv.detach().double().contiguous().requires_grad_()
    tokens, lse = reference(given, heads)
    (actual,) = torch.autograd.grad(tokens, given, grad.double())
    return tokens.detach(), lse.detach(), actual


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest value expected."""
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


# What the interpreter's child does ------------------------------------------------------------------------------------


def make_qkv(case: dict[str, Any]) -> Tensor:
    """The qkv of a case: plain, of other strides, or with logits far out."""
    B, N, columns = case.get("batch", 1), case["tokens"], 3 * case["heads"] * case["width"]
    dtype = getattr(torch, case.get("dtype", "float32"))
    plain = normal(B, N, columns, seed=N).to(dtype)
    q, k = plain[..., : columns // 3], plain[..., columns // 3 : 2 * columns // 3]
    match case.get("kind"):
        case "slice":  # of a longer and wider tensor whose rest is poison
            whole = torch.full((B, N + 40, columns + 16), float("nan"), dtype=dtype)
            whole[:, :N, :columns] = plain
            return whole[:, :N, :columns]
        case "tokens first":
            return plain.transpose(0, 1).contiguous().transpose(0, 1)
        case "every second column":
            return plain.repeat_interleave(2, -1)[..., ::2]
        case "one key":  # logits of some thousands: nearly all weight on one key
            q *= 60
            k *= 60
        case "far below zero":  # every logit near -7000: padded keys, at 0, would win
            q[:], k[:] = 30 + q, -30 - k
        case "far above zero":
            q[:], k[:] = 30 + q, 30 + k
        case "equal":
            k[:] = 1
    return plain


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Errors of one case by the operator."""
    qkv, heads = make_qkv(case), case["heads"]
    columns = qkv.shape[2] // 3
    grad = normal(*qkv.shape[:2], columns, seed=1).to(qkv.dtype)
    if case.get("grad") == "of a sum":
        grad = grad[:1, :1, :1].expand(*qkv.shape[:2], columns)  # strides of 0
    qkv.requires_grad_()
    bias = torch.full((qkv.shape[2],), float("nan"), dtype=torch.float64, requires_grad=True)  # its values are not used
    tokens, lse = torch.ops.plainvit.short_attention(qkv, heads, bias)
    assert torch.equal(tokens, short_attention(qkv, heads))
    actual, summed = torch.autograd.grad(tokens, (qkv, bias), grad)
    assert summed.dtype is bias.dtype
    expected = exact_gradients(qkv, grad, heads)
    right_sums, sizes = expected[2].sum((0, 1)), expected[2].abs().sum((0, 1)).max().clamp(min=1e-6)
    thirds = zip("qkv", actual.split(columns, -1), expected[2].split(columns, -1), strict=True)
    return {
        "finite": bool(tokens.isfinite().all() and lse.isfinite().all() and actual.isfinite().all()),
        "tokens": error(tokens, expected[0]),
        "lse": error(lse / ours.LOG2E, expected[1]),
        "sums": ((summed - right_sums).abs().max() / sizes).item(),
        "scale": expected[2].abs().max().item(),
        **{f"d{name}": (mine - right).abs().max().item() for name, mine, right in thirds},
    }


def keeps_padding(N: int, heads: int, d: int) -> bool:
    """Whether the memory after the last token's gradient keeps what was there."""
    qkv, grad = normal(1, N, 3 * heads * d), normal(1, N, heads * d, seed=1)
    tokens, lse = ours.run_forward(qkv, heads, ours.TILES[d].forward)
    room, delta = torch.full((1, N + 64, 3 * heads * d), 7.0), torch.full((1, heads, N + 64), 7.0)
    ours.run_queries(grad, qkv, tokens, lse, delta.view(-1), room[:, :N], heads, Launch(64, 64))
    ours.run_keys(grad, qkv, lse, delta.view(-1), room[:, :N], heads, Launch(32, 64))
    return bool((room[:, N:] == 7).all() and (delta.view(-1)[heads * N :] == 7).all())


def check_operator(N: int, heads: int, d: int) -> tuple[set[str], float, list[str]]:
    """PyTorch's own checks of a custom operator; the error and the operators of its export with any batch."""
    qkv = normal(2, N, 3 * heads * d).requires_grad_()
    checks = torch.library.opcheck(torch.ops.plainvit.short_attention.default, (qkv, heads, qkv[0, 0].detach()))

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return short_attention(x * 2, heads).sin()

    layer = Layer()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(layer, (qkv.detach(),), dynamic_shapes=({0: batch},))
    inputs = [normal(B, N, 3 * heads * d, seed=B) for B in (3, 1)]
    names = [node.target.__name__ for node in program.graph.nodes if node.op == "call_function"]
    return set(checks.values()), max(error(program.module()(x), layer(x).double()) for x in inputs), names


def compute_qkv_gradients(by_kernel: bool) -> dict[str, Tensor]:
    """The gradients of a model's q, k and v, by our kernels or without."""
    made = plainvit.create("ViT-Ti/16", 5, 32, depth=2, width=64, heads=2, mlp_dim=64, seed=0).train()
    torch.nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(0))
    modules.is_faster = lambda *_: by_kernel
    accelerate(made)(normal(3, 3, 32, 32)).square().sum().backward()
    return {name: parameter.grad.double() for name, parameter in made.named_parameters() if "qkv" in name}


Interpret = Callable[..., Any]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """Calls functions of this file in a child with the interpreter."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            child.submit(torch.set_num_threads, 1).result()  # starts it
        yield lambda function, *arguments: child.submit(function, *arguments).result()


def check(result: dict[str, Any], tolerance: float = 5e-6) -> None:
    assert result["finite"]
    assert result["tokens"] <= tolerance
    assert result["lse"] <= max(tolerance / 10, 1e-6)
    for name in ("dq", "dk", "dv"):
        assert result[name] <= tolerance * max(result["scale"], 1e-6), name
    assert result["sums"] <= tolerance


# In the interpreter ---------------------------------------------------------------------------------------------------

FAST = ((1, 64), (17, 64), (65, 80), (197, 64))
every_shape = pytest.mark.parametrize(
    ("tokens", "width"),
    [
        pytest.param(tokens, width, marks=() if (tokens, width) in FAST else pytest.mark.slow)
        for tokens, width in itertools.product(LENGTHS, (32, 64, 80))
    ],
)


@every_shape
def test_equals_explicit_softmax(interpret: Interpret, tokens: int, width: int) -> None:
    heads, batch = (3, 2) if tokens < 65 else (1, 1)
    check(interpret(compare, {"tokens": tokens, "width": width, "heads": heads, "batch": batch}))


SLOW = pytest.mark.slow
EXTREME = ("one key", "far below zero", "far above zero", "equal")  # nothing overflows, keys of padding weigh nothing
STRIDES = ("tokens first", "slice", "every second column")  # read in place; what lies beside the tensor is NaN


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        ({"tokens": 65, "dtype": "float16"}, 2e-3),  # P and dS are rounded to fp16 too, sums are not
        pytest.param({"tokens": 197, "dtype": "float16"}, 2e-3, marks=SLOW),
        ({"tokens": 33, "grad": "of a sum"}, 5e-6),
        *(({"tokens": 70, "batch": 2, "kind": kind}, 5e-6) for kind in STRIDES),
        *(({"tokens": 70, "kind": kind}, 5e-3) for kind in EXTREME),  # a logit of 7000 has an error of 4e-4 in fp32
        *(pytest.param({"tokens": 197, "kind": kind}, 5e-3, marks=SLOW) for kind in EXTREME),
    ],
    ids=str,
)
def test_dtypes_strides_and_extreme_logits(interpret: Interpret, case: dict[str, Any], tolerance: float) -> None:
    check(interpret(compare, case | {"width": 64, "heads": 2}), tolerance)


def test_nothing_is_written_past_the_tokens(interpret: Interpret) -> None:
    assert interpret(keeps_padding, 70, 2, 64)


@pytest.mark.slow
def test_operator_passes_pytorchs_checks_and_exports(interpret: Interpret) -> None:
    checks, difference, operators = interpret(check_operator, 9, 2, 32)
    assert checks == {"SUCCESS"}
    assert difference <= 1e-5
    assert "short_attention.default" in operators


# Without it -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widest", [16, 64, 128, 256])
def test_tiles_cover_a_length_with_less_than_16_rows_of_padding(widest: int) -> None:
    for length in range(1, ours.MAX_TOKENS + 1):
        tiles = split(length, widest)
        assert all(tile in (16, 32, 64, 128, 256) and tile <= widest for tile in tiles)
        assert list(tiles) == sorted(tiles, reverse=True)
        assert 0 <= sum(tiles) - length < 16
        assert sum(tiles[:-1]) < length, "a tile of padding alone"


def test_unfit_names_the_unsupported_property() -> None:
    """On fake CUDA tensors; the GPU itself is checked last."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    with FakeTensorMode(allow_non_fake_inputs=True):
        reasons = {
            "float32": explain_unfit(torch.empty(2, 197, 2304, device="cuda"), 12),
            "289 tokens": explain_unfit(torch.empty(2, 289, 2304, **half), 12),
            "0 tokens": explain_unfit(torch.empty(2, 0, 2304, **half), 12),
            "width 48": explain_unfit(torch.empty(2, 197, 3 * 48, **half), 1),
            "2305": explain_unfit(torch.empty(2, 197, 2305, **half), 12),
            "(197, 2304)": explain_unfit(torch.empty(197, 2304, **half), 12),
        }
    for words, reason in reasons.items():
        assert words in (reason or "")


def test_qkv_gradients_of_a_model(interpret: Interpret) -> None:
    actual, right = interpret(compute_qkv_gradients, True), interpret(compute_qkv_gradients, False)
    assert len(actual) == 4
    for name, gradient in actual.items():
        assert error(gradient, right[name]) < 2e-5, name
        assert right[name].abs().max() > 1e-3, name


def test_small_inputs_use_pytorch_unless_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "explain_unfit", lambda *_: None)  # as on a GPU
    small, large = torch.empty(1, 8, 192), torch.empty(LARGE // 192 + 1, 1, 192, device="meta")
    assert (is_faster(small, 1), is_faster(large, 1)) == (False, True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_faster(small, 1)
    monkeypatch.undo()
    assert not is_faster(large, 1)


def test_import_does_not_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files with kernels import it when they are loaded, and where it is absent no input fits."""
    files = [path for path in Path(ours.__file__).parent.glob("*.py") if not path.stem.endswith("_kernels")]
    assert len(files) > 5
    assert not any(re.search(r"^(import|from) triton", path.read_text(), re.M) for path in files)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not ours.device_ready(0)


# On a GPU -------------------------------------------------------------------------------------------------------------

gpu_shape = pytest.mark.parametrize(
    ("tokens", "width"), [(1, 64), (17, 64), (64, 64), (65, 64), (197, 64), (197, 32), (256, 64), (257, 80), (288, 80)]
)


def peer(qkv: Tensor, heads: int) -> Tensor:
    """PyTorch's flash attention."""
    B, N, columns = qkv.shape
    q, k, v = qkv.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, columns // 3)


def make_inputs(
    tokens: int, width: int, heads: int = 4, batch: int = 8, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    qkv = normal(batch, tokens, 3 * heads * width, device="cuda").to(dtype).requires_grad_()
    return qkv, normal(batch, tokens, heads * width, seed=1, device="cuda").to(dtype)


def rms(actual: Tensor, expected: Tensor) -> float:
    return (actual.double() - expected).square().mean().sqrt().item()


@on_gpu()
@gpu_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_error_is_at_most_1_5_times_flash_attention(tokens: int, width: int, dtype: torch.dtype) -> None:
    """Root mean square errors of tokens, dQ, dK and dV against float64: at most 1.5 times those of flash."""
    qkv, grad = make_inputs(tokens, width, dtype=dtype)
    assert explain_unfit(qkv, 4) is None
    expected = exact_gradients(qkv, grad, 4)
    errors = []
    for attend in (short_attention, peer):
        out = attend(qkv, 4)
        assert out.dtype is dtype
        (actual,) = torch.autograd.grad(out, qkv, grad)
        assert actual.isfinite().all()
        parts = zip(actual.chunk(3, -1), expected[2].chunk(3, -1), strict=True)
        errors.append([rms(out, expected[0]), *(rms(mine, right) for mine, right in parts)])
    for mine, theirs in zip(*errors, strict=True):
        assert mine <= 1.5 * theirs + 1e-6


@on_gpu()
@gpu_shape
def test_gpu_is_deterministic(tokens: int, width: int) -> None:
    qkv, grad = make_inputs(tokens, width, batch=64)
    first, second = ((out := short_attention(qkv, 4), *torch.autograd.grad(out, qkv, grad)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@on_gpu()
def test_gpu_extreme_logits_and_strides() -> None:
    for kind in EXTREME + STRIDES:
        case = {"tokens": 197, "heads": 2, "width": 64, "batch": 2, "kind": kind, "dtype": "bfloat16"}
        host = make_qkv(case)
        room = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="cuda")
        qkv = room.copy_(host).requires_grad_()
        grad = normal(2, 197, 128, seed=1, device="cuda").bfloat16()
        out = short_attention(qkv, 2)
        (actual,) = torch.autograd.grad(out, qkv, grad)
        expected = exact_gradients(qkv, grad, 2)
        assert out.isfinite().all(), kind
        assert actual.isfinite().all(), kind
        assert error(out, expected[0]) <= 3e-2, kind


@on_gpu()
def test_gpu_in_a_cuda_graph() -> None:
    """Captured on one input, replayed on another."""
    qkv, grad = make_inputs(197, 64)

    def both() -> tuple[Tensor, Tensor]:
        out = short_attention(qkv, 4)
        return out, *torch.autograd.grad(out, qkv, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled before the capture
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        qkv.copy_(normal(*qkv.shape, seed=9, device="cuda"))
    graph.replay()
    for mine, right in zip(captured, both(), strict=True):
        assert torch.equal(mine, right)


@on_gpu()
def test_gpu_tensors_beyond_32_bit_offsets() -> None:
    """Places beyond 32 bits: the last image of a huge batch is as it is alone."""
    images = 2**31 // (197 * 3 * 768) + 2
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB")
    alone, grad = make_inputs(197, 64, heads=12, batch=1)
    qkv = torch.zeros(images, 197, 2304, dtype=torch.bfloat16, device="cuda")
    qkv[-1] = alone[0].detach()
    qkv.requires_grad_()
    out = short_attention(qkv, 12)
    assert torch.equal(out[-1:], short_attention(alone, 12))
    (actual,) = torch.autograd.grad(out, qkv, grad.expand_as(out).contiguous())
    assert torch.equal(actual[-1:], torch.autograd.grad(short_attention(alone, 12), alone, grad)[0])
