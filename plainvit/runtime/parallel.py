"""A model on several devices: replicated (DDP) or sharded (FSDP2); full tensors from shards and back."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from plainvit.runtime.distributed import World

if TYPE_CHECKING:
    from plainvit.models import ResNet, ViT


def shard(model: "ViT | ResNet", world: World) -> None:
    """Applies FSDP2 in place, one unit per block.

    Weights are gathered in fp32 and autocast rounds them on use, as on one device, so that results agree.
    """
    mesh = init_device_mesh(torch.device(world.device).type, (world.size,))
    for unit in model.body.stages if hasattr(model, "body") else model.blocks:  # pyright: ignore
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "features")  # gathers the weights as `forward` does


def release_gathered(model: nn.Module) -> None:
    """Frees the weights that a forward pass of FSDP left gathered, so that changes go to the shards."""
    if isinstance(model, FSDPModule):
        model.reshard()


def replicate(objective: nn.Module, world: World) -> nn.Module:
    """Wraps in DDP, which averages gradients during the backward pass."""
    cuda = world.device.startswith("cuda")
    return DistributedDataParallel(objective, device_ids=[torch.device(world.device)] if cuda else None)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from its shards. All processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(full: Tensor, example: Tensor) -> Tensor:
    """Shards a full tensor as `example` is sharded. Nothing is sent: every process has the full tensor."""
    full = full.to(example.device)
    if not isinstance(example, DTensor) or full.shape != example.shape:
        return full
    return distribute_tensor(full, example.device_mesh, example.placements, src_data_rank=None)
