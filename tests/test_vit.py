"""The parts of the ViT against independent references: torch.nn's own layers and NumPy float64.

Whole models are compared with other libraries in test_weights_*.py.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
import torch.nn.functional as F
from peer_models import timm_vit
from peers import from_encoder_layer, normalize, scramble, write
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

import plainvit
from plainvit import Trace
from plainvit.models import ViT

EXACT = 1e-10
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_distilled_deit_equals_timm(tmp_path: Path) -> None:
    """Features, and in training each head's logits; tests/test_weights_parity.py compares all other logits."""
    peer = timm_vit(VisionTransformerDistilled)
    model = plainvit.load(write(peer.state_dict(), tmp_path / "m.safetensors"), heads=4, dtype=None)
    images = tiny.images(size=(32, 32))
    pixels = normalize(model, images)
    with torch.inference_mode():
        pooled = peer.forward_head(peer.forward_features(pixels), pre_logits=True)
        assert tiny.difference(model.features(images), pooled) < EXACT
        peer.set_distilled_training(True)
        for ours, theirs in zip(model.train()(images), peer.train()(pixels), strict=True):
            assert tiny.difference(ours, theirs) < EXACT


# Pixels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uint8_equals_floats(dtype: torch.dtype) -> None:
    model = tiny.vit(dtype, mean=IMAGENET[0], std=IMAGENET[1])
    bytes_ = (tiny.images() * 255).round().to(torch.uint8)
    assert torch.equal(model(bytes_), model(bytes_.float() / 255))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computed_buffers_are_not_cast(dtype: torch.dtype) -> None:
    model = tiny.vit(torch.float32, mean=IMAGENET[0], std=IMAGENET[1], posemb="sincos2d").to(dtype)
    for constant, values in ((model.normalize.mean, IMAGENET[0]), (model.normalize.std, IMAGENET[1])):
        assert constant.to(dtype) is constant  # cast by itself it is the same module, as any is
        assert torch.equal(constant.value.flatten(), torch.tensor(values, dtype=torch.float64))
    table = copy.deepcopy(model).float().positions[0].grid_table()
    assert np.abs(table.double().numpy() - reference.sincos2d(3, 5, 48)).max() < 1e-7


@pytest.mark.parametrize("settings", [{}, {"norm": "post"}, {"posemb": "relative"}, {"posemb_at": "every"}])
def test_autocast_keeps_the_residual_stream_in_fp32(settings: dict[str, Any]) -> None:
    model = tiny.vit(torch.float32, **settings)
    trace = Trace("patches", "embedded", "block*/tokens", "block0/values")
    with torch.autocast("cpu", torch.bfloat16):
        model(tiny.images(dtype=torch.float32), trace)
    assert trace.pop("block0/values").dtype is torch.bfloat16  # matmuls run in bf16
    assert len(trace) == 5
    assert {x.dtype for x in trace.values()} == {torch.float32}


def embed_patches(model: ViT) -> Tensor:
    trace = Trace("patches")
    model(tiny.images(), trace)
    return trace["patches"]


# Patches and positions ------------------------------------------------------------------------------------------------


D, DEPTH, HEADS, ROWS, COLUMNS = 48, 3, 4, 3, 5
PATCHES = ROWS * COLUMNS
TABLE_8: dict[tuple[str, str], int] = {  # positions' own parameters, by hand
    ("none", "stem"): 0,
    ("1d", "stem"): (1 + PATCHES) * D,
    ("1d", "every"): DEPTH * (1 + PATCHES) * D,
    ("1d", "shared"): (1 + PATCHES) * D,
    ("2d", "stem"): (ROWS + COLUMNS) * (D // 2),
    ("2d", "every"): DEPTH * (ROWS + COLUMNS) * (D // 2),
    ("2d", "shared"): (ROWS + COLUMNS) * (D // 2),
    ("relative", "stem"): DEPTH * (2 * PATCHES - 1) * (D // HEADS),
}


@pytest.mark.parametrize("cell", TABLE_8, ids=" ".join)
def test_positions_have_the_parameters_of_table_8_and_all_are_used(cell: tuple[str, str]) -> None:
    bare = tiny.vit(posemb="none", pool="average")
    model = tiny.vit(posemb=cell[0], posemb_at=cell[1], pool="average")
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in bare.parameters())
    assert extra == TABLE_8[cell]
    model(tiny.images()).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_sincos2d_positions() -> None:
    model = tiny.vit(posemb="sincos2d")
    tokens = torch.cat((model.class_token.expand(2, 1, D), embed_patches(model)), 1)
    expected = np.concatenate((np.zeros((1, D)), reference.sincos2d(ROWS, COLUMNS, D)))
    assert tiny.difference(model.embed(tiny.images()) - tokens, torch.from_numpy(expected).expand(2, -1, -1)) < EXACT
    assert not [name for name in model.state_dict() if name.startswith("positions")]


def test_relative_attention_equals_numpy() -> None:
    """With a class token and a register before the patches, which have no offset."""
    model = tiny.vit(posemb="relative", registers=1)
    x = torch.randn(2, 2 + PATCHES, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention = model.blocks[1].attention
    expected = reference.attention(x.numpy(), reference.weights_of(attention), HEADS, prefix=2)
    assert tiny.difference(attention(x, None, "block1"), torch.from_numpy(expected)) < EXACT


@pytest.mark.parametrize("kind", ["1d", "2d"])
@pytest.mark.parametrize("at", ["every", "shared"])
def test_positions_at_every_layer(kind: str, at: str) -> None:
    model = tiny.vit(posemb=kind, posemb_at=at)
    x = torch.cat((model.class_token.expand(2, 1, D), embed_patches(model)), 1)
    for layer, block in enumerate(model.blocks):
        positions = model.positions[layer if at == "every" else 0]
        if kind == "1d":
            table = positions.table
        else:
            places = [torch.cat((positions.columns[i % 5], positions.rows[i // 5])) for i in range(PATCHES)]
            table = torch.stack([torch.zeros(D), *places])
        x = block(x + table)
    assert tiny.difference(model(tiny.images()), model.head(model.norm(x)[:, 0])) < EXACT


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "activation"), [("post", "relu"), ("post", "gelu"), ("pre", "relu")])
def test_blocks_equal_torch_encoder_layers(norm: str, activation: str) -> None:
    settings = {"dropout": 0.0, "batch_first": True, "layer_norm_eps": 1e-6, "dtype": torch.float64}
    settings |= {"activation": activation, "norm_first": norm == "pre"}
    layers = [nn.TransformerEncoderLayer(D, HEADS, 96, **settings) for _ in range(DEPTH)]
    model = tiny.vit(norm=norm, activation=activation)
    x = model.embed(tiny.images())
    for seed, (layer, block) in enumerate(zip(layers, model.blocks, strict=True)):
        scramble(layer, seed)
        block.load_state_dict(from_encoder_layer(layer.state_dict()))
        x = layer(x)
    x = model.norm(x)[:, 0] if norm == "pre" else x[:, 0]  # a post-norm block ends with its norm
    assert tiny.difference(model(tiny.images()), F.linear(x, model.head.weight, model.head.bias)) < EXACT


AXIAL: dict[str, Any] = {"axial": True, "class_token": False, "pool": "average", "depth": 2}


def test_axial_blocks_equal_loops_over_rows_and_columns() -> None:
    model = tiny.vit(**AXIAL)
    assert len(model.blocks) == 4  # two in place of one
    trace = Trace("embedded", "block*/tokens")
    model(tiny.images(), trace)
    weights, x = reference.weights_of(model), trace["embedded"].detach().numpy()
    for layer in range(4):
        attend = reference.along(("row", "column")[layer % 2], (ROWS, COLUMNS))
        x = reference.block(x, reference.under(weights, f"blocks.{layer}."), HEADS, attend)
        assert tiny.difference(trace[f"block{layer}/tokens"], torch.from_numpy(x)) < EXACT


# Heads ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"representation": 20}, {"distillation": True}, {"classes": 0}])
def test_replace_head_attaches_one_layer_of_zeros(settings: dict[str, Any]) -> None:
    model = tiny.vit(**settings)
    body = {name: x.clone() for name, x in model.state_dict().items() if not name.startswith(("head", "pre_logits"))}
    assert model.replace_head(11) is model
    heads = ("head", "head_distillation") if "distillation" in settings else ("head",)
    shapes = {f"{head}.weight": (11, D) for head in heads} | {f"{head}.bias": (11,) for head in heads}
    new = {name: x for name, x in model.state_dict().items() if name not in body}
    assert {name: x.shape for name, x in new.items()} == shapes
    assert not any(x.any() for x in new.values())
    assert all(torch.equal(model.state_dict()[name], x) for name, x in body.items())
    assert model(tiny.images()).tolist() == [[0.0] * 11] * 2
    assert (model.config.classes, model.config.representation) == (11, 0)


# Regularization -------------------------------------------------------------------------------------------------------


def dropouts(model: ViT) -> list[tuple[Tensor, Tensor]]:
    """What went into and came out of each dropout, in order, and the logits last."""
    seen: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    logits = model(tiny.images())
    return [*seen, (logits, logits)]


def test_dropout_is_applied_where_the_paper_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """After positions, the attention's projection, the MLP's activation and its last layer; nowhere else.

    The training pass is repeated by hand with the recorded masks; another dropout, on attention weights or in the
    head, would change the logits.
    """
    calls = []
    monkeypatch.setattr(F, "dropout", lambda *a, original=F.dropout, **k: calls.append(a) or original(*a, **k))
    model = tiny.vit(dropout=0.4).train()
    torch.manual_seed(0)
    (before, x), *rest, (logits, _) = dropouts(model)
    assert len(calls) == 1 + 3 * DEPTH
    tokens = torch.cat((model.class_token.expand(2, 1, D), embed_patches(model.eval())), 1)
    assert tiny.difference(before, tokens + model.positions[0].table) < EXACT
    for layer, block in enumerate(model.blocks):
        weights = reference.weights_of(block)
        (attended, msa), (hidden, kept), (projected, mlp) = rest[3 * layer : 3 * layer + 3]
        by_hand = reference.attention(block.norm1(x).detach().numpy(), reference.under(weights, "attention."), HEADS)
        assert tiny.difference(attended, torch.from_numpy(by_hand)) < EXACT
        x = x + msa
        by_hand = reference.gelu_tanh(block.mlp.fc1(block.norm2(x)).detach().numpy())
        assert tiny.difference(hidden, torch.from_numpy(by_hand)) < EXACT
        assert tiny.difference(projected, block.mlp.fc2(kept)) < EXACT
        x = x + mlp
    assert tiny.difference(logits, model.head(model.norm(x)[:, 0])) < EXACT


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"depth": 1}, [0.0]),
        ({"depth": 3}, [0.0, 0.15, 0.3]),
        ({"depth": 4}, [0.0, 0.1, 0.2, 0.3]),
        (AXIAL, [0.0, 0.1, 0.2, 0.3]),
    ],
)
def test_stochastic_depth_drops_whole_samples_at_linear_rates(settings: dict[str, Any], rates: list[float]) -> None:
    model = tiny.vit(**settings | {"stochastic_depth": 0.3, "image_size": (8, 16)})
    samples, x = 4000, model.embed(tiny.images(1, (8, 16))).detach()
    torch.manual_seed(0)
    for block, rate in zip(model.blocks, rates, strict=True):
        trace, exact = Trace(f"{block.name}/m*"), Trace(f"{block.name}/m*")
        with torch.no_grad():
            block.eval()(x, exact)
            block.train()(x.expand(samples, -1, -1), trace)
        branch, whole = trace[f"{block.name}/msa"], exact[f"{block.name}/msa"]
        dropped = {name: (y == 0).flatten(1).all(1) for name, y in trace.items()}
        kept = branch[~dropped[f"{block.name}/msa"]]
        assert torch.allclose(kept, (whole / (1 - rate)).expand_as(kept), rtol=0, atol=1e-12)
        error = 5 * (rate * (1 - rate) / samples) ** 0.5
        for gone in dropped.values():
            assert abs(gone.double().mean().item() - rate) <= error
        assert (branch.mean(0) - whole[0]).abs().max() <= whole.abs().max() * error / (1 - rate) + 1e-12
        both = torch.stack(list(dropped.values())).all(0).double().mean().item()
        assert abs(both - rate**2) <= 5 * (rate**2 / samples) ** 0.5  # the two branches are dropped independently


# Seeds and places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "settings"), [("ViT-Ti/8", tiny.SHAPE), ("R+ViT-Ti/16", tiny.SHAPE), ("BiT-R50x1", {"blocks": (1, 1)})]
)
def test_seed_makes_weights_repeatable(name: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        return plainvit.create(name, image_size=32, seed=seed, dtype=dtype, **settings).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(x.dtype is dtype for x in first.values())
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key, x in first.items() if x.unique().numel() > 1]
    assert len(drawn) > 2
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("settings", [{"posemb": "relative"}, {"posemb": "sincos2d"}, {"activation": "gelu_sigmoid"}])
def test_model_can_be_copied_and_pickled(settings: dict[str, Any]) -> None:
    model, images = tiny.vit(torch.float32, **settings), tiny.images(dtype=torch.float32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), model(images))
