"""Communication of training on up to 1,024 GPUs, without the GPUs: what FSDP and DDP send, and when compute hides it.

    python -m bench.scaling [--models L/16,H/14,G/14] [--ranks 8,64,1024] [--batch 64] [--json FILE]

recorded   a forward and backward pass of plainvit's sharded model (runtime/parallel.py) as rank 0 of a fake process
           group, on tensors without storage: all collectives, with the size after padding, and the size of a shard.
           DDP's C++ code needs storage, so its buckets come from the function that DDP calls.
measured   rates of training steps on one H200 (plainvit/planning/step_time.py); G/14 is extrapolated from H/14.
published  link rates of an H200 (plainvit/planning/devices.py).
assumed    the fraction of the link rates that collectives reach, and LATENCY; FSDP's collectives overlap with all of
           the computation, DDP's with the backward pass. Slow ranks and congestion are not modeled.

"GiB" is the peak of one rank: the recorded shard four times (weights, gradients, AdamW), the rest as in `plainvit
plan`. "hidden from" is the smallest batch per rank at which no rank waits, with its memory.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from bench.measure import GIB, make_parser, print_table, write_results
from plainvit.config import ViTConfig
from plainvit.models import build
from plainvit.models.buffers import fill_buffers
from plainvit.names import configure
from plainvit.planning.devices import H200
from plainvit.planning.memory import Step, memory
from plainvit.planning.step_time import step_seconds
from plainvit.runtime.distributed import World
from plainvit.runtime.parallel import shard

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes; DDP's defaults
LATENCY = 50e-6  # seconds per collective; assumed
MAX_BATCH = 4096  # images per rank
# Operator -> position of the full tensor in its arguments
COLLECTIVES = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}


@dataclass
class Traffic:
    """The collectives of one rank in a step, and the size of its shard."""

    collectives: list[tuple[str, int]] = field(default_factory=list)  # name, bytes of the full tensor
    shard_bytes: int = 0  # weights of one rank

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends with ring algorithms: an all-reduce is a reduce-scatter and an all-gather."""
        sizes = (2 * size if name == "all_reduce" else size for name, size in self.collectives)
        return sum(sizes) * (ranks - 1) / ranks

    def seconds(self, ranks: int) -> float:
        return self.sent(ranks) / H200.collective_bandwidth(ranks) + LATENCY * len(self.collectives)


class Recorder(TorchDispatchMode):
    """Records the collectives of FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name not in COLLECTIVES:
                raise RuntimeError(f"unknown collective {name}: add it to COLLECTIVES")
            full = args[COLLECTIVES[name]]
            self.collectives.append((name.removesuffix("base_").strip("_"), full.numel() * full.element_size()))
        return func(*args, **(kwargs or {}))


def record_fsdp(config: ViTConfig, ranks: int, images: int = 1) -> Traffic:
    """One training step of rank 0 in a fake process group, without computing or sending anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model, fake_mode = build_empty(config), FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            for module in model.modules():
                for name, weight in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(torch.empty(weight.shape)))
        shard(model, World(rank=0, size=ranks))  # outside of fake_mode: it reads the ranks of its mesh
        shard_bytes = sum(4 * weight.to_local().numel() for weight in model.parameters() if isinstance(weight, DTensor))
        with fake_mode, Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
            batch = torch.zeros((images, config.channels, *config.image_size), dtype=torch.uint8)
            model(batch).sum().backward()
    finally:
        dist.destroy_process_group()
    return Traffic(recorder.collectives, shard_bytes)


def build_empty(config: ViTConfig) -> nn.Module:
    """The model on the meta device, with real buffers."""
    with torch.device("meta"):
        model = build(config)
    fill_buffers(model, "cpu")
    return model


def list_ddp(config: ViTConfig) -> Traffic:
    """One all-reduce per bucket. Gradients of the last weights are ready first."""
    weights = list(build_empty(config).parameters())[::-1]
    buckets, _ = dist._compute_bucket_assignment_by_size(weights, [FIRST_BUCKET, BUCKET])
    sizes = [sum(4 * weights[index].numel() for index in bucket) for bucket in buckets]
    return Traffic([("all_reduce", size) for size in sizes], 4 * sum(weight.numel() for weight in weights))


def estimate(step: Step, traffic: Traffic) -> dict[str, float]:
    """Seconds of a step and of its communication, and peak bytes of one rank."""
    parts = step_seconds(step, H200)
    computation = sum(value for name, value in parts.items() if name != "communication")
    communication = traffic.seconds(step.devices)
    hidden = computation * (2 / 3 if step.parallel == "ddp" else 1)
    planned = memory(step)
    padding = 4 * traffic.shard_bytes - sum(planned[name] for name in ("weights", "gradients", "optimizer state"))
    exposed = max(communication - hidden, 0.0)
    seconds = {"computation": computation, "communication": communication, "exposed": exposed}
    return seconds | {"step": computation + exposed, "bytes": planned["total"] + max(padding, 0)}


def find_hiding_batch(model: ViTConfig, parallel: Any, ranks: int, traffic: Traffic) -> int | None:
    """The smallest batch per rank whose computation covers the communication; None above MAX_BATCH."""

    def is_exposed(images: int) -> bool:
        return estimate(make_step(model, parallel, ranks, images), traffic)["exposed"] > 0

    if is_exposed(MAX_BATCH):
        return None
    low, high = 0, MAX_BATCH  # exposed at low (no images), hidden at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_exposed(middle) else (low, middle)
    return high


def make_step(model: ViTConfig, parallel: Any, ranks: int, images: int) -> Step:
    return Step(model=model, images=images, fast_path=True, parallel=parallel, devices=ranks)


def measure(name: str, ranks: int, images: int) -> list[dict[str, Any]]:
    """A row for DDP and one for FSDP."""
    model = configure(f"ViT-{name}")
    assert isinstance(model, ViTConfig)
    rows: list[dict[str, Any]] = []
    for parallel in ("ddp", "fsdp"):
        traffic = record_fsdp(model, ranks) if parallel == "fsdp" else list_ddp(model)
        estimates = estimate(make_step(model, parallel, ranks, images), traffic)
        batch = find_hiding_batch(model, parallel, ranks, traffic)
        row: dict[str, Any] = {"model": f"ViT-{name}", "parallel": parallel, "ranks": ranks, "batch": images}
        row |= {"collectives": len(traffic.collectives), "sizes": traffic.collectives}
        row |= {"sent_bytes": traffic.sent(ranks), "shard_bytes": traffic.shard_bytes, **estimates}
        row |= {"images_per_second": ranks * images / estimates["step"], "hidden_from": batch}
        needed = estimate(make_step(model, parallel, ranks, batch), traffic)["bytes"] if batch else None
        rows.append(row | {"hidden_bytes": needed, "hidden_fits": needed is not None and needed <= H200.usable_bytes})
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    lines: list[list[Any]] = []
    for row in rows:
        numbers = [row["ranks"], row["collectives"], f"{row['sent_bytes'] / GIB:.2f}"]
        numbers += [f"{1000 * row[name]:,.0f}" for name in ("computation", "communication", "step")]
        numbers += [f"{row['images_per_second']:,.0f}", f"{row['bytes'] / GIB:.1f}"]
        smallest = (
            f"{row['hidden_from']} ({row['hidden_bytes'] / GIB:.0f} GiB)" if row["hidden_from"] else f"> {MAX_BATCH}"
        )
        limit = "" if row["hidden_fits"] or not row["hidden_from"] else ", does not fit"
        lines.append([row["model"], row["parallel"], *numbers, smallest + limit])
    recorded, computed = (
        ("collectives", "GiB sent"),
        ("compute ms", "comm ms", "step ms", "img/s", "GiB", "hidden from"),
    )
    title = f"one step, {rows[0]['batch']} images per rank, H200, bf16; collectives and GiB sent are recorded"
    print_table(title, ("model", "parallel", "ranks", *recorded, *computed), lines, left=("model", "parallel"))
    print("compute ms: from rates measured on one H200 (G/14 extrapolated); comm ms: from published link rates")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="L/16,H/14,G/14", help="Sizes, separated by commas")
    parser.add_argument("--ranks", default="8,64,1024", help="Sizes of the process group")
    parser.add_argument("--batch", type=int, default=64, help="Images per rank")
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        for ranks in map(int, args.ranks.split(",")):
            rows += measure(name, ranks, args.batch)
            print(f"  ViT-{name}, {ranks} ranks: recorded", file=sys.stderr, flush=True)
    print_rows(rows)
    write_results("bench.scaling", arguments, args.json, title="scaling", rows=rows)


if __name__ == "__main__":
    main()
