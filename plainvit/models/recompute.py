"""Gradient checkpointing, attached to a model from outside: less memory in training for a third more compute.

recompute_activations(model)              # after accelerate(model), where that is wanted
"""

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
        if trace is not None or not torch.is_grad_enabled():
            options |= {} if trace is None else {"trace": trace}
            return super().forward(x, **options)  # pyright: ignore[reportAttributeAccessIssue]
        return checkpoint(super().forward, x, use_reentrant=False, **options)  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


def recompute_activations(model: M) -> M:
    """Every block of a ViT and every stage of a ResNet recomputes its activations in the backward pass, in place."""
    for module in list(model.modules()):
        for part in module.blocks if isinstance(module, ViT) else module.stages if isinstance(module, Body) else ():
            if not isinstance(part, Recomputed):
                part.__class__ = type(f"Recomputed{type(part).__name__}", (Recomputed, type(part)), {})
    return model
