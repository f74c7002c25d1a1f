"""Gradient checkpointing, attached to a model from outside: less memory in training for a third more compute.

recompute_activations(model)              # after accelerate(model), where that is wanted
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plainvit.models.resnet import Body
from plainvit.models.trace import Trace
from plainvit.models.vit import ViT

M = TypeVar("M", bound=nn.Module)


class Recomputed(nn.Module):
    """Mixin: the module runs again in the backward pass and keeps its input alone (gradient checkpointing)."""

    def forward(self, x: Tensor, trace: Trace | None = None, **options: Any) -> Tensor:
        plain_forward: Callable[..., Tensor] = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if trace is not None:
            return plain_forward(x, trace=trace, **options)
        if not torch.is_grad_enabled():
            return plain_forward(x, **options)
        return checkpoint(plain_forward, x, use_reentrant=False, **options)  # pyright: ignore[reportReturnType]


def recompute_activations(model: M) -> M:
    """Every block of a ViT and every stage of a ResNet recomputes its activations in the backward pass, in place."""
    for module in list(model.modules()):
        if isinstance(module, ViT):
            _recompute(module.blocks)
        elif isinstance(module, Body):
            _recompute(module.stages)
    return model


def _recompute(parts: nn.ModuleList) -> None:
    for part in parts:
        if not isinstance(part, Recomputed):
            part.__class__ = type(f"Recomputed{type(part).__name__}", (Recomputed, type(part)), {})
