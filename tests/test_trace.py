"""Traces and features: what they record against explicit NumPy attention, and that looking changes nothing.

Independent references: softmax attention written out in NumPy, and the same model run without a trace.
"""

import re
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from torch import Tensor

from plainvit import Trace
from plainvit.models import ResNet, ViT

AXIAL = {"axial": True, "class_token": False, "pool": "average", "depth": 1}
MODELS: dict[str, Any] = {
    "plain": lambda: tiny.vit(torch.float32),
    "relative, registers": lambda: tiny.vit(torch.float32, posemb="relative", registers=2),
    "post-norm, every": lambda: tiny.vit(torch.float32, norm="post", posemb_at="every"),
    "map": lambda: tiny.vit(torch.float32, pool="attention", layer_scale=0.1),
    "pre-training head": lambda: tiny.vit(torch.float32, representation=20),
    "distilled": lambda: tiny.vit(torch.float32, distillation=True),
    "fc_norm": lambda: tiny.vit(torch.float32, pool="average", norm_pooled=True),
    "axial": lambda: tiny.vit(torch.float32, **AXIAL),
    "headless": lambda: tiny.vit(torch.float32, classes=0),
    "hybrid": lambda: tiny.hybrid(torch.float32),
    "BiT": lambda: tiny.bit(torch.float32),
    "headless BiT": lambda: tiny.bit(torch.float32).replace_head(0),
}
TOKENS = ["plain", "relative, registers", "post-norm, every", "map", "pre-training head", "distilled", "hybrid"]
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def images_for(model: ViT | ResNet) -> Tensor:
    size = model.config.image_size if isinstance(model, ViT) else (48, 40)
    return tiny.images(size=size, dtype=torch.float32)


@every_model
@pytest.mark.parametrize("training", [False, True])
def test_full_trace_records_exactly_the_listed_names(make: Any, training: bool) -> None:
    model, trace = make().train(training), Trace("*")
    model(images_for(model), trace)
    assert list(trace) == model.trace_names()  # in the order of computation
    selected = Trace("p*", "e*d")
    model(images_for(model), selected)
    assert list(selected) == [name for name in trace if re.fullmatch(r"p.*|e.*d", name)]


@every_model
def test_trace_changes_neither_logits_nor_gradients(make: Any) -> None:
    model = make()
    results = []
    for trace in (None, Trace("*")):
        model.zero_grad()
        logits = model(images_for(model), trace)
        logits.square().sum().backward()
        results.append((logits, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (logits, gradients), (logits_traced, gradients_traced) = results
    assert torch.equal(logits, logits_traced)
    assert all(torch.equal(gradients[name], gradients_traced[name]) for name in gradients)


def test_trace_does_not_change_dropout() -> None:
    model = tiny.vit(torch.float32, dropout=0.3, stochastic_depth=0.3).train()
    logits = []
    for trace in (None, Trace("*")):
        torch.manual_seed(0)
        logits.append(model(images_for(model), trace))
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", TOKENS)
def test_attention_weights_equal_the_softmax(name: str) -> None:
    """Every layer's weights, from its own input in NumPy float64, to fp32's precision; and they make the heads."""
    model, trace = MODELS[name](), Trace("*")
    model(images_for(model), trace)
    before = trace["embedded"]
    for layer, block in enumerate(model.blocks):
        x = before + model.positions[layer].table if model.config.posemb_at == "every" else before
        x = block.norm1(x) if model.config.norm == "pre" else x
        weights = reference.weights_of(block.attention)
        expected = reference.attention_weights(x.detach().double().numpy(), weights, 4, model.config.prefix)
        A = trace[f"block{layer}/attention"]
        assert A.dtype is torch.float32
        assert np.abs(A.detach().numpy() - expected).max() < 1e-5
        heads = expected @ trace[f"block{layer}/values"].detach().numpy()
        assert np.abs(trace[f"block{layer}/heads"].detach().numpy() - heads).max() < 1e-4
        before = trace[f"block{layer}/tokens"]


@pytest.mark.parametrize("autocast", [False, True])
def test_attention_weights_of_a_bf16_pass_are_fp32(autocast: bool) -> None:
    """From the bf16 queries and keys of the pass, but with no more rounding, as the fused kernel has none either."""
    model, seen = tiny.vit(torch.float32 if autocast else torch.bfloat16), []
    model.blocks[0].attention.qkv.register_forward_hook(lambda _, __, qkv: seen.append(qkv.double()))
    trace = Trace("block0/attention")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(images_for(model), trace)
    q, k, _ = seen[0].view(2, 16, 3, 4, 12).permute(2, 0, 3, 1, 4)
    exact = (q @ k.mT * 12**-0.5).softmax(-1)
    assert trace["block0/attention"].dtype is torch.float32
    assert tiny.difference(trace["block0/attention"].double(), exact) < 1e-5


@pytest.mark.parametrize("heads", [[0], [3, 1], (2,), range(1, 3)])
@pytest.mark.parametrize("posemb", ["1d", "relative"])
def test_heads_can_be_chosen(heads: Any, posemb: str) -> None:
    model = tiny.vit(torch.float32, posemb=posemb)
    whole, chosen = Trace("block1/attention"), Trace("block1/attention", "block1/values", heads=heads)
    for trace in (whole, chosen):
        model(images_for(model), trace)
    expected = whole["block1/attention"][:, list(heads)]
    assert tiny.difference(chosen["block1/attention"], expected) < 1e-6
    assert chosen["block1/values"].shape[1] == 4  # only attention weights are restricted to the chosen heads


def test_recorded_tensors_have_gradients() -> None:
    """The gradient with respect to a recorded tensor is that of the pass itself: checked by finite differences."""
    model, trace = tiny.vit(), Trace("block0/heads", "block0/attention", "encoded")
    images = tiny.images()
    score = model(images, trace)[:, 3].sum()
    (gradient,) = torch.autograd.grad(score, trace["block0/heads"])
    step = torch.randn(gradient.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out, heads = model.blocks[0].attention.out, trace["block0/heads"].detach()
    scores = []
    for size in (1e-5, -1e-5):
        moved = (heads + size * step).transpose(1, 2).flatten(2)
        hook = out.register_forward_pre_hook(lambda _, __, moved=moved: (moved,))
        scores.append(model(images)[:, 3].sum().item())
        hook.remove()
    assert abs((scores[0] - scores[1]) / 2e-5 - (gradient * step).sum().item()) < 1e-6
    assert trace["block0/attention"].grad_fn is not None


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (Trace("pooled", "blok0/attention"), "blok0/attention.*nearest: .*block0/attention"),
        (Trace("pooled", "block3/tokens"), "block3/tokens.*nearest: .*block0/tokens"),
        (Trace("logit"), "logit.*nearest: .*logits"),
        (Trace("block0/attention", heads=[4]), "0 to 3"),
        (Trace("block0/attention", heads=[0, -1]), "0 to 3"),
    ],
)
def test_invalid_trace_is_an_error_before_the_forward_pass(trace: Trace, words: str) -> None:
    model = tiny.vit(torch.float32)
    model.embedding.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=words):
        model(images_for(model), trace)


def test_resnet_has_no_heads_to_choose() -> None:
    model = tiny.bit(torch.float32)
    with pytest.raises(ValueError, match="no attention heads"):
        model(images_for(model), Trace("*", heads=[0]))


@pytest.mark.parametrize("make", [MODELS["plain"], MODELS["BiT"]], ids=["ViT", "BiT"])
@pytest.mark.parametrize("compile_", [True, False, None], ids=["fullgraph", "graph breaks", "in place"])
def test_trace_of_a_compiled_model_is_an_error(make: Any, compile_: bool | None) -> None:
    torch._dynamo.reset()
    model = make()
    compiled = model
    if compile_ is None:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, fullgraph=compile_, backend="eager")
    with pytest.raises(Exception, match=r"trace.*torch\.compile"):
        compiled(images_for(model), Trace("*"))


# Features -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if name != "distilled"])
def test_features_are_what_the_head_reads(name: str) -> None:
    model = MODELS[name]()
    images = images_for(model)
    features = model.features(images)
    read = features if model.head is None else features @ model.head.weight.T + model.head.bias
    assert features.ndim == 2
    assert tiny.difference(read, model(images)) < 1e-5


@every_model
def test_features_of_chosen_layers_are_those_of_the_trace(make: Any) -> None:
    """Blocks of a ViT, stages of a ResNet."""
    model = make()
    images, trace = images_for(model), Trace("stage*" if isinstance(model, ResNet) else "block*/tokens")
    model(images, trace)
    layers = list(trace.values())
    last, first, again = model.features(images, layers=(-1, 0, 0))
    assert torch.equal(last, layers[-1])
    assert torch.equal(first, layers[0])
    assert torch.equal(again, layers[0])


@pytest.mark.parametrize("layers", [(), (3,), (-4,), (0, 7)])
@pytest.mark.parametrize("make", [tiny.vit, tiny.bit])
def test_features_of_missing_layers_are_errors(make: Any, layers: tuple[int, ...]) -> None:
    model = make(torch.float32)
    with pytest.raises(ValueError, match="0 to 2"):
        model.features(images_for(model), layers=layers)
