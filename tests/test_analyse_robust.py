"""CKA, outliers, removals, hidden and shuffled patches, faithfulness: analytic cases and models with known answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import bit, vit
from torch import Tensor, nn

from plainvit.analyse import robust
from plainvit.analyse.attention import patch_distances
from plainvit.analyse.tokens import cka, cka_matrix, outliers, pool_tokens

GRID = (3, 5)


def images(count: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 24, 40), dtype=torch.uint8, generator=generator)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Likeness and length --------------------------------------------------------------------------------------------------


def test_cka_of_a_rotated_and_scaled_copy_is_one() -> None:
    x = random(50, 12)
    rotation, _ = torch.linalg.qr(random(12, 12, seed=1))
    assert cka(x, 7 * x @ rotation + 3) == pytest.approx(1, abs=1e-12)
    assert cka(x, x[:, :6]) < 1 - 1e-3
    assert cka(x, torch.zeros(50, 3).double()) == 0


def test_cka_by_its_definition() -> None:
    """HSIC with centring matrices, as in the paper's equation 3."""
    x, y = random(20, 5), random(20, 8, seed=1) + random(20, 1, seed=2)
    centre = torch.eye(20).double() - 1 / 20

    def hsic(k: Tensor, m: Tensor) -> Tensor:
        return torch.trace(k @ centre @ m @ centre) / 19**2

    k, m = x @ x.mT, y @ y.mT
    assert cka(x, y) == pytest.approx(float(hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt()), rel=1e-9)


def test_cka_of_a_layer_with_itself_is_one() -> None:
    layers = pool_tokens(vit(), images())
    assert [layer.shape for layer in layers] == [(6, 48)] * 3
    found = cka_matrix(layers, layers)
    torch.testing.assert_close(found.diagonal(), torch.ones(3))
    torch.testing.assert_close(found, found.mT)
    stages = pool_tokens(bit(), torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8))
    assert len(stages) == 3


def test_pooled_tokens_are_the_models_own() -> None:
    model = vit(registers=2)
    layers = pool_tokens(model, images())
    expected = model.features(images(), layers=[0, 1, 2])
    for found, tokens in zip(layers, expected, strict=True):
        torch.testing.assert_close(found, tokens[:, 3:].mean(1).detach())


def test_a_planted_outlier_is_found() -> None:
    """One position's vector is made huge, and the blocks do nothing."""
    model = vit()
    for block in model.blocks:
        for layer in (block.attention.out, block.mlp.fc2):
            nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    model.positions[0].table.data[1 + 7] += 1000
    found = outliers(model, images())
    assert found.norms.shape == (6, *GRID)
    assert found.norms[0].argmax() == 7
    assert found.share == pytest.approx(1 / 15)
    assert found.images == 1
    assert found.largest > 10


# Removal --------------------------------------------------------------------------------------------------------------


def test_a_skipped_layer_has_no_effect() -> None:
    """Compared with the same model without the block."""
    model, shown = vit(), images()
    shorter = vit()
    shorter.load_state_dict(model.state_dict())
    shorter.blocks = nn.ModuleList([shorter.blocks[0], shorter.blocks[2]])
    with robust.skip_layer(model, 1):
        torch.testing.assert_close(robust.logits(model, shown), robust.logits(shorter, shown))
    with torch.no_grad():
        torch.testing.assert_close(robust.logits(model, shown), model(shown).float())  # restored


def test_removal_finds_the_only_active_layer() -> None:
    """Only the last layer changes the tokens, and the labels are the model's predictions."""
    model, shown = vit(), images(24)
    for layer, block in enumerate(model.blocks):
        for linear in (block.mlp.fc2, block.attention.out):
            linear.weight.data *= 30 if layer == 2 else 0
            linear.bias.data *= 0
    found = robust.measure_removal(model, shown, robust.logits(model, shown).argmax(-1))
    assert (found.full, found.layers[:2]) == (1, [1, 1])
    assert found.layers[2] < 1
    lost = round(24 * (1 - found.layers[2]))
    assert found.p_values == pytest.approx([1, 1, min(1, 2 * 0.5**lost)])  # McNemar: all lost, none gained


def test_layers_out_of_range_raise() -> None:
    with pytest.raises(ValueError, match="layer 3"), robust.skip_layer(vit(), 3):
        pass
    with pytest.raises(ValueError, match="layer -1"):
        patch_distances(vit(), -1)


# Patches --------------------------------------------------------------------------------------------------------------


def test_split_and_join_patches_are_inverse() -> None:
    shown = images(2)
    patches = robust.split_patches(shown, GRID)
    assert torch.equal(patches[1, 5 + 2], shown[1, :, 8:16, 16:24])
    assert torch.equal(robust.join_patches(patches, GRID), shown)


def test_hidden_patches_have_the_mean_colour() -> None:
    shown = images(3)
    order, patches = robust.random_orders(3, 15, seed=4), robust.split_patches(shown, GRID)
    found = robust.split_patches(robust.hide_patches(shown, order, 6, GRID), GRID)
    for image in range(3):
        mean = shown[image].float().mean((1, 2)).round().to(torch.uint8)
        for rank, place in enumerate(order[image].tolist()):
            expected = mean[:, None, None].expand(3, 8, 8) if rank < 6 else patches[image, place]
            assert torch.equal(found[image, place], expected)
    assert torch.equal(robust.hide_patches(shown, order, 0, GRID), shown)


def test_shuffling_keeps_every_patch() -> None:
    shown = images(2)
    order = robust.random_orders(2, 15, seed=4)
    found = robust.split_patches(robust.shuffle_patches(shown, order, GRID), GRID)
    for place in range(15):
        assert torch.equal(found[1, place], robust.split_patches(shown, GRID)[1, int(order[1, place])])


def test_shuffling_does_not_affect_a_model_without_positions() -> None:
    """An average over patches without positions is the same in any order; with positions it is not."""
    shown = images(24)
    blind = vit(posemb="none", pool="average", class_token=False)
    labels = robust.logits(blind, shown).argmax(-1)
    assert robust.measure_shuffling(blind, shown, labels, [(1, 1), GRID]) == [1.0, 1.0]
    seeing = vit(pool="average", class_token=False)
    labels = robust.logits(seeing, shown).argmax(-1)
    assert robust.measure_shuffling(seeing, shown, labels, [(1, 1), GRID])[1] < 1


def test_full_occlusion_equals_flat_images() -> None:
    model, shown = vit(), images(20)
    labels = robust.logits(model, shown).argmax(-1)
    found = robust.measure_occlusion(model, shown, labels, GRID, [0, 0.5, 1])
    assert found[0] == 1
    flat = shown.float().mean((2, 3), keepdim=True).round().to(torch.uint8).expand_as(shown)
    assert found[2] == robust.accuracy(model, flat, labels)


# Faithfulness ---------------------------------------------------------------------------------------------------------


class Bright(nn.Module):
    """Knows one thing: how bright a patch is. Its answer's probability is known for every picture."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.scale = place, nn.Parameter(torch.tensor(8.0))

    def forward(self, shown: Tensor) -> Tensor:
        level = robust.split_patches(shown, GRID)[:, self.place].float().mean((1, 2, 3)) / 255
        return torch.stack((self.scale * (level - 0.75), torch.zeros_like(level)), 1)


def test_faithfulness_of_a_correct_and_an_inverted_map() -> None:
    shown = torch.zeros(2, 3, 24, 40, dtype=torch.uint8)
    shown[:, :, 8:16, 16:24] = 255  # patch 7 of 15
    model = Bright(7)
    right = torch.zeros(2, *GRID)
    right.view(2, -1)[:, 7] = 1
    true, false = (
        robust.faithfulness(model, shown, one, shares=[k / 15 for k in range(16)]) for one in (right, -right)
    )
    sure = float(torch.sigmoid(torch.tensor(2.0)))
    gone = float(torch.sigmoid(torch.tensor(8 * (17 / 255 - 0.75))))  # the mean level of 255 / 15
    np.testing.assert_allclose(true.deletion, [sure] + [gone] * 15, rtol=1e-5)
    np.testing.assert_allclose(true.insertion, [gone] + [sure] * 15, rtol=1e-5)
    np.testing.assert_allclose(false.deletion, [sure] * 15 + [gone], rtol=1e-5)
    np.testing.assert_allclose(false.insertion, [gone] * 15 + [sure], rtol=1e-5)
    assert np.mean(true.deletion_areas) == pytest.approx((0.5 * (sure + gone) + 14 * gone) / 15)
    assert np.mean(true.insertion_areas) > np.mean(false.insertion_areas)


def test_faithfulness_uses_the_predicted_class() -> None:
    model, shown = vit(), images(4)
    maps = torch.rand(4, *GRID, generator=torch.Generator().manual_seed(0))
    found = robust.faithfulness(model, shown, maps, shares=[0, 0.3, 1])
    first = F.softmax(robust.logits(model, shown), -1).amax(-1).double().mean()
    assert found.deletion[0] == found.insertion[-1] == pytest.approx(float(first))
    assert found.deletion[-1] == found.insertion[0]
    each = F.softmax(robust.logits(model, shown).double(), -1).amax(-1)
    assert len(found.deletion_areas) == 4
    assert np.mean(found.deletion_areas) == pytest.approx(np.trapezoid(found.deletion, [0, 0.3, 1]))
    assert each.mean() == pytest.approx(found.deletion[0])
    with pytest.raises(ValueError, match="start at 0"):
        robust.faithfulness(model, shown, maps, shares=[0.5, 1])
