"""Figures of an analysis show the numbers that they are given."""

import numpy as np
import pytest

from plainvit.analyse import drawings
from plainvit.analyse.embeddings import Filters


def test_heads_are_dots_with_the_mean_of_their_layer() -> None:
    values = np.array([[1.0, 3.0], [5.0, 7.0]])  # layers, heads
    axes = drawings.draw_heads(values, "distance", uniform=6.0).axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[1, 1], [1, 3], [2, 5], [2, 7]]
    uniform, mean = axes.lines
    assert uniform.get_ydata() == [6, 6]
    assert mean.get_xydata().tolist() == [[1, 2], [2, 6]]


def test_similarity_has_a_tile_for_each_position() -> None:
    similar = np.random.default_rng(0).uniform(-1, 1, (2, 3, 2, 3))
    canvas = np.asarray(drawings.draw_similarity(similar, "").axes[0].images[0].get_array().filled(np.nan))
    assert canvas.shape == (2 * 2 + 1, 3 * 3 + 2)  # gaps of one
    np.testing.assert_array_equal(canvas[3:5, 4:7], similar[1, 1])
    assert np.isnan(canvas[2]).all()


def test_matrix_has_a_square_for_each_pair() -> None:
    (image,) = drawings.draw_matrix(np.array([[1.0, 0.5]]), "", "layer", "layer", "CKA").axes[0].images
    assert image.get_array().tolist() == [[1, 0.5]]
    assert image.get_clim() == (0, 1)


def test_lines_are_percentages_on_the_given_axis() -> None:
    axes = drawings.draw_lines([1, 4, 196], {"a": [1, 0.5, 0], drawings.RANDOM: [0.1, 0.1, 0.1]}, "", "").axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[1, 100], [4, 50], [196, 0]]
    assert axes.lines[1].get_linestyle() == "--"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "196"]


def test_bars_show_accuracy_without_each_layer() -> None:
    axes = drawings.draw_removed_layers(0.9, [0.5, 0.25]).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [50, 25]
    assert axes.lines[0].get_ydata() == [90, 90]


def test_histogram_counts_every_norm() -> None:
    axes = drawings.draw_norms(np.array([[1.0, 1.1], [0.9, 8.0]]), 3.0).axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == 4
    assert axes.lines[0].get_xdata() == [3, 3]


def test_filters_are_drawn_with_their_variance() -> None:
    tiles = np.random.default_rng(0).normal(size=(9, 4, 4, 3))
    axes = drawings.draw_filters(Filters(tiles, np.arange(9) / 100)).axes[0]
    assert len(axes.images) == 9
    assert [text.get_text() for text in axes.texts] == [f"{share}.0 %" for share in range(9)]


@pytest.mark.parametrize("shape", [(2, 2), (4, 4)])
def test_heat_is_yellow_at_the_maximum_and_blue_at_the_minimum(shape: tuple[int, int]) -> None:
    values = np.zeros(shape)
    values[0, 0] = 1
    heat = drawings.overlay_heat(np.zeros((8, 8, 3), np.uint8), values)
    red, green, blue = heat[0, 0].tolist()
    assert min(red, green) > 3 * blue
    red, green, blue = heat[-1, -1].tolist()
    assert blue > 3 * max(red, green)


def test_a_constant_map_is_drawn() -> None:
    heat = drawings.overlay_heat(np.zeros((4, 4, 3), np.uint8), np.ones((2, 2)))
    assert (heat == heat[0, 0]).all()


def test_maps_have_a_row_for_each_image_and_a_column_for_each_map() -> None:
    images = np.zeros((2, 4, 6, 3), np.uint8)
    axes = drawings.draw_maps(images, {"rollout": np.ones((2, 2, 3)), "last": np.ones((2, 2, 3))}, ["a", "b"]).axes[0]
    assert len(axes.images) == 2 * 3
    assert [text.get_text() for text in axes.texts] == ["a", "b", "image", "rollout", "last"]
