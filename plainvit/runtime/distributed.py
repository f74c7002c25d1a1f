"""Processes of one run: rank and device, collectives, agreement on errors, detection of lost peers.

    torchrun --nproc-per-node 8 -m plainvit train vit-b16-i1k ...
    plainvit train vit-b16-i1k --devices 8

torchrun starts and restarts the processes. Without it there is one process, and every collective is a no-op.
parallel.py wraps the model in DDP or FSDP.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from plainvit.device import choose_device
from plainvit.errors import exit_code, first_line

log = logging.getLogger("plainvit")
T = TypeVar("T")
GRACE = 60.0  # seconds to save a checkpoint after the parent process is gone
RESUME_HINT = "run the same command to resume from the last checkpoint"


class DisagreementError(ValueError):
    """An error of one process, raised in all of them; only rank 0 prints it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code, self.raised_by_all = exit_code, True


@dataclass(frozen=True)
class World:
    """Rank, device and collectives of this process."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            self.sum(torch.zeros(1, device=self.device))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenates the rows of all processes in rank order; their numbers of rows may differ."""
        if self.size == 1:
            return rows
        counts = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=self.device))
        padded = torch.zeros((int(max(counts)), *rows.shape[1:]), dtype=rows.dtype, device=self.device)
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return torch.cat([part[: int(count)] for part, count in zip(gathered, counts, strict=True)])

    def gather_strings(self, text: str) -> list[str]:
        """Gathers one string from each process, in rank order."""
        if self.size == 1:
            return [text]
        gathered = [""] * self.size
        dist.all_gather_object(gathered, text)
        return gathered

    def run_on_all_ranks(self, make: Callable[[], T], same: Callable[[T], str] | None = None) -> T:
        """Calls `make()` in every process. Raises in all of them if it fails in one or if `same(result)` differs."""
        if self.size == 1:
            return make()
        result: Any = None
        error = ""
        try:
            result = make()
        except (ValueError, OSError) as failure:
            error = f"{exit_code(failure)} {first_line(failure)}"
        for rank, reported in enumerate(self.gather_strings(error)):
            if reported:
                code, _, message = reported.partition(" ")
                raise DisagreementError(f"rank {rank}: {message}" if rank else message, int(code))
        if same and len(set(self.gather_strings(same(result)))) > 1:
            raise DisagreementError("the processes have different configs or data: start all with the same command", 2)
        return result

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(device: str, timeout: float) -> World:
    """Joins the processes that torchrun started; without torchrun, a World of one."""
    if "RANK" not in os.environ:
        return World(device=choose_device(device))
    rank, size, local_rank, local_size = map(_read_number, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = choose_device(device, local_rank, local_size)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    is_cuda = device.startswith("cuda")
    if is_cuda:
        torch.cuda.set_device(device)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = _connect_store(rank, size, timedelta(seconds=timeout))
        options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
        dist.init_process_group("nccl" if is_cuda else "gloo", store=store, **options)
    except (RuntimeError, ValueError, LookupError) as error:
        message = f"rank {rank} cannot connect to MASTER_ADDR:MASTER_PORT {address}: {first_line(error)}"
        raise ValueError(message) from error
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0 and restarts != "0":
        most = os.environ["TORCHELASTIC_MAX_RESTARTS"]
        log.warning("a process failed: restart %s of %s from the last checkpoint", restarts, most)
    return World(rank, size, device)


def _read_number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ValueError(f"RANK is set, but {name} is not a number: unset RANK, or start with torchrun")
    return int(value)


def end_with_parent() -> None:
    parent = os.getppid()

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.05)  # short, so that all ranks end at about the same time

    end_after(wait_for_parent)


def end_after(wait: Callable[[], object]) -> None:
    """Ends this process once `wait` returns; without it, children of a killed process would keep the device busy."""
    name = "end with parent"

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)  # the training loop saves a checkpoint and exits
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    if not any(thread.name == name for thread in threading.enumerate()):
        threading.Thread(target=watch, name=name, daemon=True).start()


def _connect_store(rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """Connects to the key-value store.

    Unlike torch's own `env://`, keys have a prefix per restart: torchrun's store keeps the previous ones, with which
    a restarted process would wait for the others for ever.
    """
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, size, is_master=rank == 0 and not agent_serves, timeout=timeout)
    return PrefixStore(f"plainvit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class LostError(ValueError):
    """Another process of the run died or does not respond; the command ends with exit code 5."""

    exit_code = 5


def is_lost(error: RuntimeError) -> bool:
    """Whether a backend error means that a peer is gone. Gloo has no exception type for it."""
    phrases = ("connection reset", "connection closed", "timed out", "broken pipe", "connection refused", "nccl")
    return isinstance(error, dist.DistError) or any(phrase in str(error).lower() for phrase in phrases)


@contextlib.contextmanager
def raise_lost_peer(world: World) -> Iterator[None]:
    """Raises LostError in place of the backend's error when a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not is_lost(error):
            raise
        message = f"rank {world.rank} lost another process ({first_line(error)}); {RESUME_HINT}"
        raise LostError(message) from error


def wait_for_agent() -> None:
    """Gives torchrun's agent time to end this process and report the rank that died, which only the agent knows."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(1)
