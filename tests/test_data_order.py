"""Order and randomness: against SplitMix64 in Python's own integers, and its published outputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plainvit.data.order import GOLDEN, Order, permutation, scramble, uniforms

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
seeds = st.integers(0, 2**63 - 1)


def finalize(x: int) -> int:
    """SplitMix64's output function as Steele, Lea and Flood print it."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def uniforms_by_hand(seed: int, epoch: int, position: int, count: int) -> list[float]:
    key = finalize(finalize((epoch + finalize((seed + STEP) & MASK)) & MASK) ^ position)
    return [(finalize(finalize((key + i * STEP) & MASK)) >> 40) / 2**24 for i in range(1, count + 1)]


def permutation_by_hand(seed: int, epoch: int, count: int) -> list[int]:
    salt = finalize((epoch + finalize(seed ^ STEP)) & MASK)
    return sorted(range(count), key=lambda i: signed(finalize((i + salt) & MASK)))


# The hash -------------------------------------------------------------------------------------------------------------


def test_scramble_equals_published_outputs() -> None:
    """The first numbers of SplitMix64 from 1234567, as its reference program prints them."""
    states = torch.tensor(1234567) + torch.arange(1, 6) * GOLDEN
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value & MASK for value in scramble(states).tolist()] == expected


@given(seeds, st.integers(0, 10**6), st.integers(0, 2**40), st.integers(1, 60))
def test_uniforms_equal_64_bit_arithmetic(seed: int, epoch: int, position: int, count: int) -> None:
    found = uniforms(seed, torch.tensor([epoch]), torch.tensor([position]), count)
    assert found.dtype is torch.float32
    assert found.tolist() == [uniforms_by_hand(seed, epoch, position, count)]


# Permutations ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(seeds, st.integers(0, 2**40), st.integers(1, 300))
def test_permutation_equals_64_bit_arithmetic(seed: int, epoch: int, count: int) -> None:
    assert permutation(seed, epoch, count).tolist() == permutation_by_hand(seed, epoch, count)


# Positions ------------------------------------------------------------------------------------------------------------


def sequence(order: Order, start: int, stop: int) -> list[int]:
    return order.sample(np.arange(start, stop)).tolist()


def test_epochs_are_consecutive_permutations() -> None:
    order = Order(10, seed=4)
    expected = [*permutation_by_hand(4, 0, 10), *permutation_by_hand(4, 1, 10), *permutation_by_hand(4, 2, 10)]
    assert sequence(order, 0, 30) == expected
    assert sequence(order, 7, 23) == expected[7:23]  # across both borders at once
    assert order.epoch(np.array([0, 9, 10, 99, 100])).tolist() == [0, 0, 1, 9, 10]
    assert sequence(Order(1, 0), 0, 5) == [0] * 5


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeats_are_consecutive_and_keep_the_epoch_length(repeats: int) -> None:
    order = Order(12, seed=2, repeats=repeats)
    for epoch in range(3):
        found = np.array(sequence(order, 12 * epoch, 12 * (epoch + 1))).reshape(-1, repeats)
        assert (found == found[:, :1]).all()
        assert found[:, 0].tolist() == permutation_by_hand(2, epoch, 12)[: 12 // repeats]
