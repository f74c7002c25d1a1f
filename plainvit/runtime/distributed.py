"""Many processes as one: who this process is, sums and strings over all, and whom it lost.

    torchrun --nproc-per-node 8 -m plainvit train vit-b16-i1k ...
    plainvit train vit-b16-i1k --devices 8

torchrun starts the processes, joins them and restarts them; without it there is one, and everything here is a no-op.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from plainvit.device import choose_device
from plainvit.disk import exit_code_of

log = logging.getLogger("plainvit")
T = TypeVar("T")
GRACE = 60.0  # seconds to save a run in, once nobody waits for it any more


class DisagreementError(ValueError):
    """What one process found wrong, raised in all: the first tells of it."""

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code, self.agreed = exit_code, True


@dataclass(frozen=True)
class World:
    """This process among all of a run."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    launch: str = ""  # the same word in all processes of one start, another in the next

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.size > 1:
            self.sum(torch.zeros(1, device=self.device))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all processes, which may have different numbers of them, one process after the other."""
        if self.size == 1:
            return rows
        counts = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=self.device))
        most = int(max(counts))
        padded = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype, device=self.device)
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded)
        return torch.cat([part[: int(count)] for part, count in zip(found, counts, strict=True)])

    def gather_words(self, words: str) -> list[str]:
        """A string from each process, in their order."""
        if self.size == 1:
            return [words]
        mine = torch.tensor(list(words.encode()), dtype=torch.uint8, device=self.device)
        sizes = self.gather_rows(torch.tensor([len(mine)], device=self.device)).tolist()
        everyone = bytes(self.gather_rows(mine).tolist())
        ends = [sum(sizes[: at + 1]) for at in range(self.size)]
        return [everyone[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]

    def agree(self, make: Callable[[], T], same: Callable[[T], str] | None = None) -> T:
        """`make()` in every process; an error in one is raised in all, and so is a result that is not the same."""
        made, error = None, ""
        try:
            made = make()
        except (ValueError, OSError) as failure:
            if self.size == 1:
                raise
            error = f"{exit_code_of(failure)} {str(failure).splitlines()[0]}"
        for rank, found in enumerate(self.gather_words(error)):
            if found:
                code, _, words = found.partition(" ")
                raise DisagreementError(f"rank {rank}: {words}" if rank else words, int(code))
        assert made is not None
        if self.size > 1 and same and len(set(self.gather_words(same(made)))) > 1:
            raise DisagreementError("the processes of this run differ in their config or data: start all alike", 2)
        return made

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(device: str, timeout: float) -> World:
    """The processes that torchrun started, met; or a process by itself."""
    if "RANK" not in os.environ:
        return World(device=choose_device(device))
    try:
        rank, size, local, beside = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"the environment of torchrun is not whole: {error}; start with torchrun or --devices"
        ) from error
    device = choose_device(device, local, beside)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_agent()
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = _store(rank, size, timedelta(seconds=timeout))
        late = timedelta(seconds=2 * timeout + 20)  # the watchdog, which knows more, speaks before a collective does
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=late)
    except (RuntimeError, ValueError, LookupError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"rank {rank} cannot meet the others at {where}: {reason}") from error
    word = World(rank, size, device).gather_words(secrets.token_hex(4) if rank == 0 else "")[0]
    return World(rank, size, device, word)


def _end_with_agent() -> None:
    agent = os.getppid()

    def gone() -> None:
        while os.getppid() == agent:
            time.sleep(0.05)  # all of them at about the same time

    end_after(gone)


def end_after(gone: Callable[[], object]) -> None:
    """Ends this process once `gone` returns: who is killed cannot stop what it began, which would hold the device."""
    name = "ends with its parent"

    def watch() -> None:
        gone()
        os.kill(os.getpid(), signal.SIGTERM)  # the loop saves and ends
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    if not any(thread.name == name for thread in threading.enumerate()):
        threading.Thread(target=watch, name=name, daemon=True).start()


def _store(rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """Where the processes meet. Each restart has keys of its own: torchrun's store still holds those of the last."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, size, is_master=rank == 0 and not served, timeout=timeout)
    return PrefixStore(f"plainvit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class LostError(ValueError):
    """Another process of the run is gone, or does not answer; the command ends with exit code 5."""

    exit_code = 5


def is_lost(error: RuntimeError) -> bool:
    """Whether an error of the backend says that a peer is gone; there is no type for it."""
    words = ("connection reset", "connection closed", "timed out", "broken pipe", "connection refused", "nccl")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


@contextlib.contextmanager
def losses_told(world: World) -> Iterator[None]:
    """The backend's error at the death of a peer as a line for people, without the place in PyTorch's source."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not is_lost(error):
            raise
        reason = re.sub(r"\[?/\S+:\d+\]?,? *", "", str(error).splitlines()[0])
        made, allowed = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        follows = what_follows(made + 1, allowed)
        raise LostError(f"rank {world.rank} lost another process of the run: {reason}; {follows}") from error


def what_follows(restart: int, allowed: int) -> str:
    again = f"all start again from the last checkpoint, restart {restart} of {allowed}"
    return again if restart <= allowed else "the same command goes on from the last checkpoint"


def let_the_agent_speak() -> None:
    """It knows who died, if that was on this machine, and ends this process, which knows less, in this time."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(1)
