"""Filters and positions against planted tables, scikit-learn's PCA and SciPy's rank correlation."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.decomposition import PCA
from tiny import bit, hybrid, vit

from plainvit.analyse.attention import NotApplicableError
from plainvit.analyse.embeddings import filters, filters_to_rgb, position_vectors, similarity, structure


def test_filters_are_the_principal_components() -> None:
    model = vit()
    found = filters(model, 7)
    points = model.embedding.weight.detach().numpy()
    peer = PCA(7, svd_solver="full").fit(points)
    tiles = peer.components_.reshape(7, 3, 8, 8).transpose(0, 2, 3, 1)
    for ours, theirs in zip(found.tiles, tiles, strict=True):
        np.testing.assert_allclose(ours, theirs * np.sign((ours * theirs).sum()), atol=1e-9)
        assert ours.flat[abs(ours).argmax()] > 0
    np.testing.assert_allclose(found.variance, peer.explained_variance_ratio_, rtol=1e-9)


@pytest.mark.parametrize("make", [hybrid, bit])
def test_filters_of_hybrids_and_resnets_are_those_of_the_root(make: Any) -> None:
    model = make()
    found = filters(model, 5)
    root = (model.stem if make is hybrid else model.body).root
    kernels = root.weight.detach().flatten(1)
    kernels = (kernels - kernels.mean(1, keepdim=True)) / kernels.std(1, correction=0, keepdim=True)
    peer = PCA(5, svd_solver="full").fit(kernels.numpy())
    np.testing.assert_allclose(found.variance, peer.explained_variance_ratio_, rtol=1e-4)
    assert found.tiles.shape == (5, *root.kernel_size, 3)


def test_zero_is_gray_in_filter_images() -> None:
    tiles = np.zeros((2, 4, 4, 3))
    tiles[0, 1, 2] = 0.5, -0.25, 0
    images = filters_to_rgb(tiles)
    assert images.dtype == np.uint8
    assert images[0, 1, 2].tolist() == [255, 64, 128]
    assert (images[1] == 128).all()


def test_sinusoids_have_their_analytic_similarity() -> None:
    """Of sines and cosines over x and y, the cosine depends on the offset alone: a mean of cosines."""
    model = vit(posemb="sincos2d")
    found, (h, w) = similarity(model), model.config.grid
    frequencies = 10_000.0 ** -(np.arange(12) / 11)
    for y, x, v, u in np.ndindex(h, w, h, w):
        expected = (np.cos((x - u) * frequencies).mean() + np.cos((y - v) * frequencies).mean()) / 2
        assert found[y, x, v, u] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("at", ["stem", "every", "shared"])
def test_a_planted_table_gives_its_cosines(at: str) -> None:
    model = vit(posemb="2d", posemb_at=at)
    found, (h, w) = similarity(model), model.config.grid
    rows, columns = model.positions[0].rows.detach(), model.positions[0].columns.detach()
    for y, x, v, u in [(0, 0, 0, 0), (1, 2, 0, 4), (2, 1, 2, 3)]:
        one, other = torch.cat((columns[x], rows[y])), torch.cat((columns[u], rows[v]))
        assert found[y, x, v, u] == pytest.approx(float(torch.cosine_similarity(one, other, 0)), abs=1e-9)
    assert found.shape == (h, w, h, w)


def test_position_vectors_exclude_the_class_token() -> None:
    model = vit()
    table = model.positions[0].table.detach()
    assert torch.equal(position_vectors(model), table[1:].view(*model.config.grid, -1))


def test_structure_of_planted_similarities() -> None:
    h, w = 3, 4
    y, x = np.divmod(np.arange(h * w), w)
    by_row = (y[:, None] == y).astype(float).reshape(h, w, h, w)
    found = structure(by_row)
    assert (found.row, found.column, found.elsewhere) == (1, 0, 0)
    assert found.contrast == 0.5
    near = -np.hypot(y[:, None] - y, x[:, None] - x).reshape(h, w, h, w)
    assert structure(near).nearness == pytest.approx(1)
    noise = np.random.default_rng(0).normal(size=(h, w, h, w))
    flat, apart = noise.reshape(h * w, -1), -near.reshape(h * w, -1)
    others = ~np.eye(h * w, dtype=bool)
    assert structure(noise).nearness == pytest.approx(spearmanr(-apart[others], flat[others]).statistic)
    assert structure(np.ones((1, 1, 1, 1))).contrast == 0


@pytest.mark.parametrize("posemb", ["none", "relative"])
def test_models_without_position_embeddings_raise(posemb: str) -> None:
    with pytest.raises(NotApplicableError, match=posemb):
        similarity(vit(posemb=posemb))
