"""Many processes as one: who this process is, sums and strings over all, and a watchdog that names who is missing.

    torchrun --nproc-per-node 8 -m plainvit train vit-b16-i1k ...
    plainvit train vit-b16-i1k --devices 8

torchrun starts the processes, joins them and restarts them; without it there is one, and everything here is a no-op.
"""

import contextlib
import faulthandler
import logging
import math
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from plainvit.runtime.folder import NOTE, say_instead

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
            error = f"{getattr(failure, 'exit_code', 2)} {str(failure).splitlines()[0]}"
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
        follows = _what_follows(made + 1, allowed)
        raise LostError(f"rank {world.rank} lost another process of the run: {reason}; {follows}") from error


def _what_follows(restart: int, allowed: int) -> str:
    again = f"all start again from the last checkpoint, restart {restart} of {allowed}"
    return again if restart <= allowed else "the same command goes on from the last checkpoint"


def let_the_agent_speak() -> None:
    """It knows who died, if that was on this machine, and ends this process, which knows less, in this time."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(1)


class Deaths(logging.Handler):
    """Names the process that a signal ended; torchrun's agent, which alone knows, says it in its log only."""

    def __init__(self, restarts: int) -> None:
        super().__init__(logging.ERROR)
        self.allowed, self.made, self.said = restarts, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        code, rank, *_ = record.args if isinstance(record.args, tuple) and len(record.args) > 1 else (0, 0)
        if "exitcode" not in record.msg or not isinstance(code, int):
            return
        self.made, self.said = self.made + 1, ""
        if code < 0:  # any other has told of itself
            follows = _what_follows(self.made, self.allowed)
            self.said = f"rank {rank} was ended by {signal.Signals(-code).name}; {follows}"
            print(f"plainvit: {self.said}", file=sys.stderr)


def choose_device(name: str, local: int = 0, beside: int = 1) -> str:
    """Of the name that was given, for one of the processes beside each other on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is unknown: cpu, cuda, cuda:1, or auto")
    if not name.startswith("cuda"):
        return name
    there = torch.cuda.device_count()
    if not there:
        raise ValueError(f"device {name!r} is not there: PyTorch finds no GPU on this machine; --device cpu")
    if beside > there:
        raise ValueError(f"{beside} processes on this machine, but it has {there} GPUs: one process a GPU")
    return name if ":" in name or beside == 1 else f"cuda:{local}"


def choose_precision(name: str, device: str) -> torch.dtype:
    """Of the arithmetic; weights are fp32. Auto is bf16 on a GPU; with fp8 all is bf16 but the blocks' products."""
    low = name in ("bf16", "fp8") or (name == "auto" and device.startswith("cuda"))
    return torch.bfloat16 if low else torch.float32


def launch(arguments: list[str], processes: int, restarts: int, device: str) -> int:
    """Runs `plainvit ARGUMENTS` in so many processes on this machine, by torchrun's agent; its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    choose_device(device, 0, processes)  # a clear word before anything is started
    for name in ("", ".agent.server.api"):  # which has a level of its own; of signals and deaths we tell ourselves
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    log_of_deaths = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    log_of_deaths.setLevel(logging.ERROR)
    log_of_deaths.propagate = False
    deaths = Deaths(restarts)
    log_of_deaths.handlers = [deaths]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=secrets.token_hex(4),
        max_restarts=restarts,
        monitor_interval=0.2,
        start_method="spawn",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    with tempfile.TemporaryDirectory() as place:
        os.environ[NOTE] = str(Path(place) / "folders")
        try:
            elastic_launch(config, sys.executable)("-m", "plainvit", *arguments)
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            code = code if code >= 0 else 128 - code
            unsaid = ("running", "failed") if deaths.said else ("running",)  # by one that lost it, and knows less
            _tell_of_end("failed", deaths.said or f"a process of the run ended with exit code {code}", code, unsaid)
            return code
        except SignalException as error:
            code = 128 + int(error.sigval)
            follows = "the same command goes on from the last checkpoint"
            _tell_of_end("interrupted", f"{signal.Signals(error.sigval).name}; {follows}", code, ("running",))
            return code
    return 0


def _tell_of_end(state: str, reason: str, code: int, unsaid: tuple[str, ...]) -> None:
    """For runs whose first process could not."""
    note = Path(os.environ[NOTE])
    for folder in note.read_text().splitlines() if note.is_file() else ():
        with contextlib.suppress(OSError, ValueError):  # of a full disk others have told
            say_instead(Path(folder), state, reason, code, unsaid)


class Watchdog:
    """Ends a process whose run stands still, and says which rank is behind, instead of waiting for ever.

    Each process tells the others, through torchrun's store, which step it is at. One that makes no step for `timeout`
    seconds writes its stacks beside the run, names the ranks that are furthest behind or silent, and exits.
    """

    def __init__(self, world: World, timeout: float, folder: Path) -> None:
        self.world, self.timeout, self.folder = world, timeout, folder
        self.step, self._moved, self._over = -1, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.world.size > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.world.size > 1:
            self._thread.join(10)  # a thread inside the store while the process ends would abort it

    def at(self, step: int) -> None:
        self.step, self._moved = step, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A validation may take longer than any step."""
        self._moved = math.inf
        try:
            yield
        finally:
            self._moved = time.monotonic()

    def _watch(self) -> None:
        store = PrefixStore(f"plainvit/{self.world.launch}", dist.distributed_c10d._get_default_store())
        beat = 0
        while not self._over.wait(min(1.0, self.timeout / 4)):
            beat += 1
            try:
                store.set(str(self.world.rank), f"{self.step} {beat}")
                if time.monotonic() - self._moved > self.timeout:
                    self._give_up(store)
            except RuntimeError:  # the store is gone: torchrun is ending everything
                return

    def _give_up(self, store: PrefixStore) -> None:
        before = self._seen(store)
        time.sleep(3)
        words = f"rank {self.world.rank} made no step for {self.timeout:.0f} s after step {self.step}; "
        words += _who_is_missing(self.world.rank, before, self._seen(store))
        try:
            with (self.folder / f"stalled-rank-{self.world.rank}.txt").open("w") as file:
                print(words, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            print(f"plainvit: {words}; stacks in {file.name}", file=sys.stderr, flush=True)
            say_instead(self.folder, "failed", words, LostError.exit_code)
        finally:
            os._exit(LostError.exit_code)

    def _seen(self, store: PrefixStore) -> list[tuple[int, int]]:
        """(step, heartbeats) of each rank; (-1, 0) of one that never spoke."""
        keys = [str(rank) for rank in range(self.world.size)]
        there = [key if store.check([key]) else "" for key in keys]
        found = [store.get(key).decode().split() if key else ("-1", "0") for key in there]
        return [(int(step), int(beat)) for step, beat in found]


def _who_is_missing(rank: int, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> str:
    """The ranks whose heart stands still; where all beat, those that are furthest behind."""
    steps = [step for step, _ in after]
    silent = [other for other in range(len(after)) if other != rank and before[other] == after[other]]
    if silent:
        heard = ("last heard of at step {}" if steps[other] >= 0 else "not heard of at any step" for other in silent)
        return ", ".join(
            f"rank {other} {words.format(steps[other])}" for other, words in zip(silent, heard, strict=True)
        )
    return ", ".join(
        f"rank {other} is behind, at step {step}" for other, step in enumerate(steps) if step == min(steps)
    )
