"""Attention analyses against planted attention, explicit softmax attention and its autograd gradients."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from subjects import pixels
from tiny import hybrid, vit
from torch import Tensor

from plainvit.analyse.attention import (
    attention_distance,
    attention_maps,
    layer_distance,
    patch_distances,
    relevance,
    rollout,
)
from plainvit.models import ViT

SETTINGS: dict[str, dict[str, Any]] = {
    "class token": {},
    "average": {"pool": "average", "class_token": False},
    "registers": {"registers": 3},
    "two tokens": {"distillation": True},
    "attention pool": {"pool": "attention", "class_token": False},
    "relative": {"posemb": "relative"},
    "upright": {"image_size": (40, 24)},
}
every_kind = pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS.keys())


def model_of(**changes: Any) -> ViT:
    """Attention that is far from uniform."""
    model = vit(**changes)
    for block in model.blocks:
        block.attention.qkv.weight.data *= 3
    return model


@pytest.fixture
def explicit(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Attention by its formula, in place of the fused kernel; the weights of every layer, as leaves of autograd."""
    kept: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        weights = torch.softmax(logits if attn_mask is None else logits + attn_mask, -1)
        if weights.requires_grad:
            weights.retain_grad()
        if q.shape[2] == k.shape[2]:  # not the pooling head
            kept.append(weights)
        return weights @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return kept


def row_of(model: ViT, product: Tensor) -> Tensor:
    prefix, (h, w) = model.config.prefix, model.config.grid
    row = product[:, 0] if model.config.pool == "token" else product[:, prefix:].mean(1)
    row = (product[:, 0] + product[:, 1]) / 2 if model.config.distillation else row
    return row[:, prefix:].reshape(-1, h, w)


@every_kind
def test_maps_equal_explicit_attention(changes: dict[str, Any], explicit: list[Tensor]) -> None:
    model = model_of(**changes)
    images = pixels(model)
    with torch.no_grad():
        model(images)
    attentions = list(explicit)
    eye = torch.eye(model.config.tokens)
    plain, mixed = eye.double(), eye.double()
    for attention in attentions:
        plain, mixed = attention.mean(1) @ plain, (0.5 * attention.mean(1) + 0.5 * eye) @ mixed
    torch.testing.assert_close(rollout(model, images, residual=False), row_of(model, plain), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(rollout(model, images), row_of(model, mixed), atol=1e-9, rtol=1e-9)
    maps = attention_maps(model, images)  # [B, L, H, h, w]
    for layer, attention in enumerate(attentions):
        for head in range(model.config.heads):
            torch.testing.assert_close(maps[:, layer, head], row_of(model, attention[:, head]), atol=1e-9, rtol=1e-9)


@every_kind
def test_relevance_equals_autograd_through_explicit_attention(changes: dict[str, Any], explicit: list[Tensor]) -> None:
    model = model_of(**changes)
    images = pixels(model, 2)
    chosen = torch.tensor([4, 1])
    found = relevance(model, images, chosen)
    explicit.clear()
    for place in range(2):
        explicit.clear()
        model(images[place : place + 1])[0, chosen[place]].backward()
        product = torch.eye(model.config.tokens).double()
        for attention in explicit:
            product = product + (attention.grad * attention).clamp(min=0)[0].mean(0) @ product
        expected = row_of(model, (product - torch.eye(model.config.tokens))[None])[0]
        torch.testing.assert_close(found[place], expected.detach(), atol=1e-5, rtol=1e-5)


def test_uniform_attention_has_the_analytic_distance() -> None:
    """The mean distance of two points of a grid, by a double loop."""
    model = model_of()
    for block in model.blocks:
        block.attention.qkv.weight.data.zero_()
        block.attention.qkv.bias.data.zero_()
    (h, w), (p, q) = model.config.grid, model.config.patch
    places = [(p * y, q * x) for y in range(h) for x in range(w)]
    expected = sum(math.dist(a, b) for a in places for b in places) / len(places) ** 2
    distance = attention_distance(model, pixels(model))
    torch.testing.assert_close(distance, torch.full((model.config.depth, model.config.heads), expected).double())


def test_attention_to_the_neighbor_has_distance_of_one_patch() -> None:
    """Each patch looks at the one to its right, those of the last column to their left, and at the class token."""
    model = model_of(registers=1)
    (h, w), prefix, n = model.config.grid, model.config.prefix, model.config.tokens
    attention = torch.zeros(1, model.config.heads, n, n, dtype=torch.float64)
    for y in range(h):
        for x in range(w):
            neighbor = x + 1 if x + 1 < w else x - 1
            attention[:, :, prefix + y * w + x, prefix + y * w + neighbor] = 0.75
            attention[:, :, prefix + y * w + x, 0] = 0.25
    assert layer_distance(model, 0, attention).tolist() == [model.config.patch[1]] * model.config.heads


def test_hybrids_are_measured_in_pixels_of_the_image() -> None:
    model = hybrid()
    assert model.config.grid == (6, 10)
    assert patch_distances(model, 0).max() == pytest.approx(8 * math.hypot(5, 9))


def test_axial_layers_attend_along_one_axis() -> None:
    model = vit(axial=True, class_token=False, pool="average")
    (h, w), (p, q) = model.config.grid, model.config.patch
    assert patch_distances(model, 0).max() == q * (w - 1)
    assert patch_distances(model, 1).max() == p * (h - 1)
    assert attention_distance(model, pixels(model)).shape == (len(model.blocks), model.config.heads)
    with pytest.raises(ValueError, match="axial"):
        rollout(model, pixels(model))


def test_splitting_batches_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    images = pixels(model, 7)
    whole = attention_distance(model, images), rollout(model, images)
    monkeypatch.setattr("plainvit.analyse.attention.MAX_WEIGHTS", 3 * model.config.heads * model.config.tokens**2)
    torch.testing.assert_close(attention_distance(model, images), whole[0])
    torch.testing.assert_close(rollout(model, images), whole[1])
