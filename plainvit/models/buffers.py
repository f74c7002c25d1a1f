"""Tensors computed from the config: they move with the model but are never cast, so they keep full precision."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from plainvit import device


class ComputedBuffer(nn.Module):
    """Holds `compute()` on the model's device. Casting the model does not change it; leaving `meta` computes it."""

    value: Tensor

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("value", compute(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        self.move(fn(torch.empty(0, device=self.value.device)).device)
        return self

    def move(self, target: torch.device) -> None:
        if target != self.value.device:
            with torch.device("cpu"):
                self.value = self.compute().to(target)


def fill_buffers(model: nn.Module, target: torch.device | str) -> None:
    """Computes the buffers of a model that was built on the meta device, before its weights are assigned."""
    for module in model.modules():
        if isinstance(module, ComputedBuffer):
            module.move(torch.device(target))  # `to_empty` would import sympy, which takes a quarter of a second


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


class Normalize(nn.Module):
    """Pixels, uint8 or floats in [0, 1], to what the weights expect: (x - mean) / std, in fp32 or better."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self._is_cpu_bf16_unsafe = device.is_cpu_bf16_unsafe()  # on some CPUs bf16 kills the process
        self.channels = len(mean)
        self.mean, self.std = ComputedBuffer(partial(_per_channel, mean)), ComputedBuffer(partial(_per_channel, std))

    def convert(self, images: Tensor, weight: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Checks the images' shape, where a model needs one size, and normalizes them in the dtype of its weights."""
        expected = (self.channels, *(size or images.shape[2:]))
        if images.ndim != 4 or images.shape[1:] != expected:
            shape = ", ".join(map(str, (self.channels, *(size or ("height", "width")))))
            raise ValueError(f"images of shape {tuple(images.shape)} do not fit this model: use [batch, {shape}]")
        if self._is_cpu_bf16_unsafe:
            device.check_cpu_bf16(weight)
        return self(images).to(weight.dtype)

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype is torch.uint8:
            x = images.float() / 255
        elif images.is_floating_point():
            x = images.to(torch.promote_types(images.dtype, torch.float32))
        else:
            raise ValueError(f"images are uint8 or floats in [0, 1], got {images.dtype}")
        return (x - self.mean.value.to(x.dtype)) / self.std.value.to(x.dtype)
