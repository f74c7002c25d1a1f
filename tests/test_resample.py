"""Positions on another grid: against scipy's zoom, timm's resampling, a matrix in NumPy."""

from typing import Any

import numpy as np
import pytest
import reference
import scipy.ndimage
import tiny
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from plainvit.models.resample import METHODS, resample_table, resize

EXACT = 1e-10
Grid = tuple[int, int]
grids = st.tuples(st.integers(1, 12), st.integers(1, 12))


def random_table(grid: Grid, width: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(grid[0] * 100 + grid[1])
    return torch.randn(grid[0] * grid[1], width, generator=generator, dtype=torch.float64).to(dtype)


# Tables ---------------------------------------------------------------------------------------------------------------


@given(grids, st.sampled_from(list(METHODS)))
def test_same_grid_gives_the_same_table(grid: Grid, method: str) -> None:
    table = random_table(grid)
    assert torch.equal(resample_table(table, grid, grid, method), table)


def resizing_matrix(old: int, new: int) -> np.ndarray:
    """Bilinear resizing of one axis by half-pixel centers, as a matrix [new, old]."""
    matrix = np.zeros((new, old))
    for i in range(new):
        at = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
        low = int(np.floor(at))
        matrix[i, low] += 1 - (at - low)
        matrix[i, min(low + 1, old - 1)] += at - low
    return matrix


@given(grids, grids)
def test_bilinear_equals_a_matrix_in_numpy(old: Grid, new: Grid) -> None:
    matrix = np.kron(resizing_matrix(old[0], new[0]), resizing_matrix(old[1], new[1]))
    table = random_table(old)
    assert np.abs(resample_table(table, old, new, "bilinear").numpy() - matrix @ table.numpy()).max() < EXACT


def zoom(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Google's call on any grid. Its default mode gives 0 where round-off steps past the last cell, as in 28 to 14."""
    values = table.detach().view(*old, -1).numpy()
    zoomed = scipy.ndimage.zoom(values, (new[0] / old[0], new[1] / old[1], 1), order=1, mode="nearest")
    return torch.from_numpy(zoomed).flatten(0, 1)


@settings(max_examples=150)
@given(grids, grids)
@example((7, 7), (12, 12))
@example((14, 14), (24, 24))
@example((16, 16), (37, 37))
@example((24, 24), (14, 14))
def test_aligned_equals_scipy_zoom(old: Grid, new: Grid) -> None:
    table = random_table(old)
    assert (resample_table(table, old, new, "bilinear-aligned") - zoom(table, old, new)).abs().max() < EXACT


@settings(max_examples=150)
@given(grids, grids)
def test_bicubic_equals_timm(old: Grid, new: Grid) -> None:
    assume(old != new)
    table = random_table(old, dtype=torch.float32)
    peer = resample_abs_pos_embed(table.unsqueeze(0), list(new), list(old), num_prefix_tokens=0)[0]
    assert (resample_table(table, old, new, "bicubic-antialias") - peer).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_is_rounded_once(method: str, dtype: torch.dtype) -> None:
    table = random_table((4, 6), dtype=dtype)
    resampled = resample_table(table, (4, 6), (7, 5), method)
    assert torch.equal(resampled, resample_table(table.float(), (4, 6), (7, 5), method).to(dtype))


# Models ---------------------------------------------------------------------------------------------------------------

LARGER = {"size": (40, 32), "grid": (5, 4)}  # from 24 x 40 pixels, 3 x 5 patches


@pytest.mark.parametrize("at", ["stem", "every", "shared"])
@pytest.mark.parametrize(
    ("extra", "rows"),
    [
        ({}, 1),
        ({"registers": 2, "posemb_prefix": "all"}, 3),
        ({"registers": 2}, 1),
        ({"distillation": True}, 2),
        ({"posemb_prefix": "none"}, 0),
        ({"class_token": False, "pool": "average"}, 0),
    ],
)
def test_resize_resamples_patches_and_keeps_prefix_rows(at: str, extra: dict[str, Any], rows: int) -> None:
    model = tiny.vit(posemb_at=at, **extra)
    resized = resize(model, LARGER["size"])
    assert (resized.config.image_size, resized.config.grid) == (LARGER["size"], LARGER["grid"])
    assert len(resized.positions) == len(model.positions) == (3 if at == "every" else 1)
    for old, new in zip(model.positions, resized.positions, strict=True):
        assert torch.equal(new.table[:rows], old.table[:rows])
        assert tiny.difference(new.table[rows:], zoom(old.table[rows:], (3, 5), (5, 4))) < EXACT
    assert resized(tiny.images(size=LARGER["size"])).shape == (2, 7)


@pytest.mark.parametrize("at", ["stem", "every", "shared"])
def test_resize_of_2d_positions(at: str) -> None:
    model = tiny.vit(posemb="2d", posemb_at=at)
    resized = resize(model, LARGER["size"])
    for old, new in zip(model.positions, resized.positions, strict=True):
        assert tiny.difference(new.rows, zoom(old.rows, (3, 1), (5, 1))) < EXACT
        assert tiny.difference(new.columns, zoom(old.columns, (1, 5), (1, 4))) < EXACT


@pytest.mark.parametrize("method", METHODS)
def test_resize_uses_the_method(method: str) -> None:
    model = tiny.vit()
    table = resize(model, LARGER["size"], method=method).positions[0].table
    expected = resample_table(model.positions[0].table[1:], (3, 5), (5, 4), method)
    assert torch.equal(table[1:], expected)
    others = [resample_table(model.positions[0].table[1:], (3, 5), (5, 4), other) for other in METHODS]
    assert sum(torch.equal(expected, other) for other in others) == 1


def test_sincos_positions_are_computed_for_the_new_grid() -> None:
    resized = resize(tiny.vit(posemb="sincos2d"), LARGER["size"])
    table = resized.positions[0].grid_table()
    assert np.abs(table.numpy() - reference.sincos2d(5, 4, 48)).max() < EXACT


def test_resize_hybrid() -> None:
    model = tiny.hybrid()  # 48 x 80 pixels, 6 x 10 tokens
    resized = resize(model, (64, 32))
    new, old = resized.positions[0].table, model.positions[0].table
    assert torch.equal(new[:1], old[:1])
    assert tiny.difference(new[1:], zoom(old[1:], (6, 10), (8, 4))) < EXACT
    assert resized(tiny.images(size=(64, 32))).shape == (2, 7)
    assert resized.stem.root.weight is not None
    assert torch.equal(resized.stem.root.weight, model.stem.root.weight)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resize_keeps_mode_dtype_frozen_weights_and_the_old_model(training: bool, dtype: torch.dtype) -> None:
    model, images = tiny.vit(dtype).train(training), tiny.images(dtype=dtype)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    logits = model(images)
    resized = resize(model, LARGER["size"])
    assert all(module.training is training for module in resized.modules())
    assert {x.dtype for x in resized.state_dict().values()} == {dtype}
    assert torch.equal(resized.normalize.mean.value, model.normalize.mean.value)
    assert {name for name, p in resized.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    assert model.config.image_size == (24, 40)
    for unchanged in (model, resize(model, (24, 40))):
        assert torch.equal(unchanged(images), logits)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("bicubik.*nearest: bicubic", lambda: resize(tiny.vit(), 64, method="bicubik")),
        ("use image height 24 or 32", lambda: resize(tiny.vit(), (30, 40))),
        ("image_size", lambda: resize(tiny.vit(), 0)),
        ("15 positions", lambda: resample_table(random_table((3, 5)), (4, 4), (5, 5))),
        ("bicubik", lambda: resample_table(random_table((3, 5)), (3, 5), (5, 5), "bicubik")),
        ("relative", lambda: resize(tiny.vit(posemb="relative"), 64)),
        ("relative", lambda: resize(tiny.vit(posemb="relative"), (40, 24))),  # as many patches
    ],
)
def test_invalid_arguments_are_one_line_errors(words: str, call: Any) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
