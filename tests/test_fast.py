"""accelerate() and recompute_activations(): equal results with less work, on any device."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from children import in_child
from torch import Tensor

from plainvit import Trace
from plainvit.models.fast import accelerate
from plainvit.models.fast.modules import FastBlock, drop_path
from plainvit.models.recompute import Recomputed, recompute_activations
from plainvit.models.vit import Residual

READS_ONE_TOKEN: list[dict[str, Any]] = [
    {},
    {"representation": 9},
    {"registers": 2},
    {"layer_scale": 0.3},
    {"norm_pooled": True},
    {"posemb_at": "every"},
]
READS_ALL_TOKENS: list[dict[str, Any]] = [
    {"pool": "average"},
    {"distillation": True},
    {"norm": "post"},
    {"posemb": "relative"},
]


def run(model: Any, images: Tensor) -> list[Tensor]:
    """Logits, features and all gradients."""
    logits = model(images)
    logits.square().sum().backward()
    return [logits, model.features(images), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("settings", READS_ONE_TOKEN + READS_ALL_TOKENS)
@pytest.mark.parametrize("recompute", [False, True])
def test_results_equal_the_plain_model(settings: dict[str, Any], recompute: bool) -> None:
    """In float64; and the last block computes one token where only the class token is read."""
    plain, images = tiny.vit(**settings), tiny.images()
    fast = accelerate(copy.deepcopy(plain))
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert isinstance(fast, type(plain))
    if recompute:
        recompute_activations(fast)
        assert all(isinstance(block, Recomputed) and isinstance(block, FastBlock) for block in fast.blocks)
    tokens: list[int] = []
    fast.blocks[-1].mlp.register_forward_pre_hook(lambda _, given: tokens.append(given[0].shape[1]))
    expected, actual = run(plain, images), run(fast, images)
    assert len(actual) == len(expected)
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
    assert tokens[0] == (1 if settings in READS_ONE_TOKEN else fast.config.tokens)
    trace = Trace("block*/tokens")
    torch.testing.assert_close(fast(images, trace), expected[0])
    assert trace["block2/tokens"].shape[1] == fast.config.tokens, "a trace sees every token of the last block"


@pytest.mark.parametrize(
    "settings", [{"registers": 2}, {"pool": "average"}, {"posemb_at": "every"}, {"posemb": "sincos2d"}]
)
def test_low_precision_residual(settings: dict[str, Any]) -> None:
    """Tokens between blocks are bf16 under autocast, results equal up to that; a pass in fp32 does not change."""
    plain, images = tiny.vit(torch.float32, **settings), tiny.images(dtype=torch.float32)
    fast = accelerate(copy.deepcopy(plain), low_precision_residual=True)
    dtypes: list[torch.dtype] = []
    for block in fast.blocks:
        block.register_forward_hook(lambda _, __, x: dtypes.append(x.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(images), plain(images), rtol=0, atol=0.05)
    assert set(dtypes) == {torch.bfloat16}
    torch.testing.assert_close(fast(images), plain(images), rtol=0, atol=1e-6)


def test_dropped_branches_are_not_computed() -> None:
    """At rate 0.3 each branch of a block in training sees seven of ten images."""
    block = accelerate(tiny.vit(depth=3, stochastic_depth=0.3)).blocks[2].train()
    computed: list[int] = []
    for branch in (block.attention, block.mlp):
        branch.register_forward_pre_hook(lambda _, given: computed.append(len(given[0])))
    block(torch.rand(10, 15, 48, dtype=torch.float64))
    assert computed == [7, 7]


@pytest.mark.parametrize("images", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rate", [0.2, 0.3, 0.5, 0.9])
def test_drop_path_keeps_every_image_at_the_exact_rate(images: int, rate: float) -> None:
    """In micro-batches of any size: B (1 - rate) images, rounded up or down, each scaled by 1 / (1 - rate)."""
    residual = Residual(tiny.vit().config, rate).train()
    x, draws = torch.ones(images, 1, 1, dtype=torch.float64), 2000
    torch.manual_seed(0)
    added = torch.stack([drop_path(x, residual, lambda some: some) - x for _ in range(draws)]).flatten(1)
    kept = added != 0
    assert torch.allclose(added[kept], torch.tensor(1 / (1 - rate), dtype=torch.float64), rtol=1e-12)
    assert set(kept.sum(1).tolist()) <= {math.floor(images * (1 - rate) + 1e-9), math.ceil(images * (1 - rate) - 1e-9)}
    error = 5 * (rate * (1 - rate) / draws) ** 0.5
    assert (kept.double().mean(0) - (1 - rate)).abs().max() < error  # of each place in the batch


def test_recomputed_resnet_has_the_same_gradients() -> None:
    plain = tiny.bit()
    again = recompute_activations(copy.deepcopy(plain))
    images = tiny.images(2, (32, 32))
    for mine, right in zip(run(again, images), run(plain, images), strict=True):
        assert torch.equal(mine, right)


WITHOUT = """
import sys
sys.modules["plainvit.models.fast"] = None  # any import of it fails
import plainvit, plainvit.analyse.report, torch
done = plainvit.fit(plainvit.recipe("digits").replace(steps=2), sys.argv[1], quiet=True, bare=True)
model = plainvit.load(done.folder)
torch.testing.assert_close(model(torch.zeros(1, 3, 8, 8)), done.model(torch.zeros(1, 3, 8, 8)))
print(plainvit.Predictor(done.folder).logits(torch.zeros(2, 3, 8, 8)).shape)
"""


def test_package_works_without_models_fast(tmp_path: Path) -> None:
    """It trains, saves, loads and predicts."""
    assert "torch.Size([2, 10])" in in_child(WITHOUT, str(tmp_path), OMP_NUM_THREADS="1")
