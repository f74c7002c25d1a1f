"""Figures of an analysis show the numbers that they are given."""

import numpy as np

from plainvit.analyse import drawings


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


def test_heat_is_yellow_at_the_maximum_and_blue_at_the_minimum() -> None:
    values = np.zeros((2, 2))
    values[0, 0] = 1
    heat = drawings.overlay_heat(np.zeros((8, 8, 3), np.uint8), values).astype(int)
    red, green, blue = heat[0, 0]
    assert min(red, green) > 3 * blue
    red, green, blue = heat[-1, -1]
    assert blue > 3 * max(red, green)
    constant = drawings.overlay_heat(np.zeros((4, 4, 3), np.uint8), np.ones((2, 2)))
    assert (constant == constant[0, 0]).all()
