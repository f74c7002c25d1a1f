"""On a CUDA device: the numbers of the CPU, in fp32 and bf16, eager, compiled, exported; never cuDNN attention.

python -m pytest -m gpu tests/test_gpu.py
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import plainvit
from plainvit.models.fast import accelerate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the compiler advises TF32, the profiler speaks of cycles
]

NAMES = ["ViT-S/16", "R26x1+ViT-S/32", "BiT-R26x1", "Axial-ViT-B/32"]


def random_model(name: str, **settings: object) -> torch.nn.Module:
    """Fresh weights with a head that is not zero, so that the logits say something."""
    torch.manual_seed(0)
    model = plainvit.create(name, classes=10, seed=0, **settings).eval()
    torch.nn.init.normal_(model.head.weight, std=0.05)
    return model


def images(batch: int = 4) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def exact_fp32() -> None:
    """TensorFloat-32 off, for the convolutions too."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", NAMES)
def test_fp32_equals_the_cpu(name: str) -> None:
    model = random_model(name)
    with torch.inference_mode():
        expected = model(images())
        found = model.cuda()(images().cuda()).cpu()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("posemb", ["none", "1d", "2d", "relative", "sincos2d"])
def test_gradients_equal_the_cpu(posemb: str) -> None:
    model = random_model("ViT-Ti/16", posemb=posemb, depth=3)
    model(images()).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.cuda()(images().cuda()).square().sum().backward()
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().clamp(min=1e-3)
        assert (parameter.grad.cpu() - expected[name]).abs().max() <= 2e-3 * scale, name


@pytest.mark.parametrize("name", NAMES)
def test_bf16_autocast_and_weights(name: str) -> None:
    model = random_model(name).cuda()
    with torch.inference_mode():
        expected = model(images().cuda())
        with torch.autocast("cuda", torch.bfloat16):
            mixed = model(images().cuda())
        pure = model.bfloat16()(images().cuda())
    for found in (mixed, pure):
        assert torch.nn.functional.cosine_similarity(found.float(), expected).min() > 0.99


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_exported(name: str) -> None:
    model = random_model(name).cuda()
    x = images().cuda()
    with torch.inference_mode():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(compiled, expected, atol=1e-3, rtol=1e-3)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    for batch in (1, 3, 7):
        with torch.no_grad():
            torch.testing.assert_close(
                program.module()(images(batch).cuda()), model(images(batch).cuda()), atol=1e-3, rtol=1e-3
            )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("posemb", ["1d", "relative"])
def test_attention_is_never_cudnn(compiled: bool, posemb: str) -> None:
    model = random_model("ViT-S/16", depth=2, posemb=posemb).cuda().train()
    run = torch.compile(model, fullgraph=True) if compiled else model
    with torch.autocast("cuda", torch.bfloat16):
        run(images().cuda()).sum().backward()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            run(images().cuda()).sum().backward()
    names = {event.key.lower() for event in seen.key_averages()}
    assert not [name for name in names if "cudnn" in name and ("attention" in name or "sdpa" in name or "fmha" in name)]
    fused = ("attention_forward",) if posemb == "1d" else ("flash", "efficient_attention", "fmha")  # the first is ours
    assert [name for name in names if any(word in name for word in fused)]


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_compiled_answers_have_their_own_gelu(activation: str) -> None:
    """Either as a part of the product before it. Seen by the mean where the two forms are furthest apart."""
    mlp = accelerate(random_model("ViT-S/16", depth=1, activation=activation)).blocks[0].mlp.cuda().bfloat16()
    torch.nn.init.normal_(mlp.fc1.weight, std=0.06)
    mlp.fc2.weight.data, mlp.fc2.bias.data = torch.eye(384, 1536).to(mlp.fc2.weight), torch.zeros_like(mlp.fc2.bias)
    x = torch.randn(128, 196, 384, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    compiled = torch.compile(mlp, fullgraph=True)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        found = compiled(x).double()
    inner = torch.nn.functional.linear(x.double(), mlp.fc1.weight.double(), mlp.fc1.bias.double())[..., :384]
    where = (inner > -2.6) & (inner < -1.8)
    forms = {form: torch.nn.functional.gelu(inner, approximate=form) for form in ("none", "tanh")}
    own, other = ("tanh", "none") if activation == "gelu_tanh" else ("none", "tanh")
    gap = (forms[other] - forms[own])[where].mean().abs()
    assert (found - forms[own])[where].mean().abs() < 0.3 * gap
    assert any("gelubias" in event.key for event in seen.key_averages()) == (activation == "gelu_tanh")
    ours = activation == "gelu" and torch.cuda.get_device_capability()[0] == 9
    assert any("linear_gelu" in event.key for event in seen.key_averages()) == ours


def test_trace_changes_nothing() -> None:
    model = random_model("ViT-S/16").cuda()
    trace = plainvit.Trace("block*/attention")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(model(images().cuda()), model(images().cuda(), trace))
    rows = trace["block0/attention"].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-5, rtol=0)


def test_random_numbers_equal_the_cpu() -> None:
    """The hash behind every augmentation gives the same bits on both."""
    from plainvit.data.order import uniforms

    epoch, position = torch.arange(64) // 7, torch.arange(64) * 12345
    assert torch.equal(uniforms(3, epoch, position, 50), uniforms(3, epoch.cuda(), position.cuda(), 50).cpu())
