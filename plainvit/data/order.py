"""Order and randomness as pure functions of (seed, epoch, position).

Any process can compute any sample and its random numbers, so resuming needs only the step, and results do not depend on
the number of workers or processes. The hash gives the same bits on CPU and GPU.
"""

import functools

import numpy as np
import torch
from torch import Tensor

# SplitMix64's increment and multipliers (Steele, Lea, Flood 2014), as signed 64-bit numbers
GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def scramble(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 (which wraps around): every input bit affects every output bit."""
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def uniforms(seed: int, epoch: Tensor, position: Tensor, count: int) -> Tensor:
    """Random numbers in [0, 1) for each (epoch, position): [B, count] in fp32, 24 bits each."""
    start = torch.full((), seed, dtype=torch.int64, device=epoch.device)  # torch.tensor would synchronize
    key = scramble(scramble(epoch.long() + scramble(start + GOLDEN)) ^ position.long())
    draws = torch.arange(1, count + 1, device=epoch.device) * GOLDEN
    return _shift(scramble(scramble(key.unsqueeze(1) + draws)), 40).float() * 2.0**-24


@functools.lru_cache(maxsize=2)  # a batch may cross into the next epoch
def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of one epoch: indices sorted by their hash, independent of library versions. Read-only."""
    salt = scramble(torch.tensor(epoch) + scramble(torch.tensor(seed) ^ GOLDEN))
    order = np.argsort(scramble(torch.arange(count) + salt).numpy(), kind="stable")
    order.flags.writeable = False
    return order


class Order:
    """Maps global positions to samples: an endless sequence of epochs, each a permutation.

    With repeats > 1 each sample occurs that many times in a row (repeated augmentation); an epoch still has as many
    positions as samples.
    """

    def __init__(self, count: int, seed: int, *, repeats: int = 1) -> None:
        self.count, self.seed, self.repeats = count, seed, repeats

    def epoch(self, position: np.ndarray) -> np.ndarray:
        return position // self.count

    def sample(self, position: np.ndarray) -> np.ndarray:
        """Indices into the source; positions may cross into the next epoch."""
        out = np.empty(len(position), np.int64)
        epochs = self.epoch(position)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            order = permutation(self.seed, int(epoch), self.count)
            out[in_epoch] = order[position[in_epoch] % self.count // self.repeats]
        return out
