"""A model sharded over a thousand ranks that do not exist: what one rank would hold, send and receive.

PyTorch's own FSDP does the sharding, over a process group that only counts; nothing is stored and nothing is sent.
"""

import json
import os
import subprocess
import sys
from typing import Any

from plainvit.config import Model, from_json, to_json

MOST_RANKS = 2048  # building 2,048 shards of H/14 takes seconds, ten times as many take minutes
_CHILD = (
    "import json, sys; from plainvit.planning import ranks; print(json.dumps(ranks.sharded_from(json.load(sys.stdin))))"
)


def simulated(model: Model, devices: int) -> dict[str, Any]:
    """`sharded` in a child process, which leaves this one without a process group."""
    if devices > MOST_RANKS:
        return {"left_out": f"only up to {MOST_RANKS:,} ranks are simulated"}
    given = json.dumps({"model": to_json(model), "devices": devices})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD],
            input=given,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return json.loads(child.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        return {"left_out": (error.stderr.strip().splitlines() or ["the child process failed"])[-1]}
    except subprocess.TimeoutExpired:
        return {"left_out": "it took longer than five minutes"}


def sharded_from(given: dict[str, Any]) -> dict[str, Any]:
    """What the child process does."""
    return sharded(from_json(given["model"]), given["devices"])


def sharded(model: Model, devices: int) -> dict[str, Any]:
    """The real model, sharded as training does, on ranks that do not exist: what one holds, sends and receives.

    No number is stored and nothing is sent. Every tensor is cut by rows, and each rank holds as many as the fullest,
    so at many ranks much of what is held is filling. Weights and gradients travel in fp32. The process must have no
    group, and has none afterwards.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from plainvit.models import build
    from plainvit.runtime.distributed import World
    from plainvit.runtime.sharding import shard

    if dist.is_initialized():
        raise ValueError("this process belongs to a process group: simulate in another")
    with torch.device("meta"):
        built = build(model)
    count = sum(p.numel() for p in built.parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        shard(built, World(rank=0, size=devices, device="cpu"))
        found: list[int] = []  # numbers of each group on a rank; those of the root, which comes first, last
        seen: set[int] = set()
        for module in reversed([module for module in built.modules() if isinstance(module, FSDPModule)]):
            own = [p for p in module.parameters() if id(p) not in seen]
            seen |= {id(p) for p in own}
            found.append(sum(p.to_local().numel() for p in own))  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        dist.destroy_process_group()
    return _messages(found, count, devices)


def _messages(held: list[int], count: int, devices: int) -> dict[str, Any]:
    """Of one step with one micro-batch: blocks are gathered for both passes, the root once; gradients go in fp32."""
    *blocks, root = held
    gathered = 2 * sum(blocks) + root
    return {
        "ranks": devices,
        "groups": len(held),
        "held_bytes": 4 * sum(held),
        "bytes_without_filling": 4 * count / devices,
        "filling": sum(held) * devices / count - 1,
        "all_gathers": 2 * len(blocks) + 1,
        "all_gather_bytes": 4 * gathered * (devices - 1),  # that each rank receives
        "reduce_scatters": len(held),
        "reduce_scatter_bytes": 4 * sum(held) * (devices - 1),  # that each rank sends
        "largest_gather_bytes": 4 * max(held) * devices,
    }
