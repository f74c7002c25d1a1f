"""End a run of several processes that makes no progress, and name the ranks it waits for."""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from plainvit.runtime.distributed import LostError, World
from plainvit.runtime.folder import write_status_for


class Watchdog:
    """Exits with code 5 if this process makes no step for `timeout` seconds.

    Each process publishes its step and a heartbeat in torchrun's store. Before it exits, the watchdog writes all
    stacks into the run folder and names the ranks without a heartbeat or, if all have one, those furthest behind.
    """

    def __init__(self, world: World, timeout: float, folder: Path) -> None:
        self.world, self.timeout, self.folder = world, timeout, folder
        self.step, self._last_step_time, self._stop = -1, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.world.size > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.world.size > 1:
            self._thread.join(10)  # a thread that is in a store call at exit would abort the process

    def at(self, step: int) -> None:
        self.step, self._last_step_time = step, time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No limit in this block: a validation may take longer than any step."""
        self._last_step_time = math.inf
        try:
            yield
        finally:
            self._last_step_time = time.monotonic()

    def _watch(self) -> None:
        store = PrefixStore(f"plainvit/{self.world.launch}", dist.distributed_c10d._get_default_store())
        heartbeat = 0
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            heartbeat += 1
            try:
                store.set(str(self.world.rank), f"{self.step} {heartbeat}")
                if time.monotonic() - self._last_step_time > self.timeout:
                    self._exit_stalled(store)
            except RuntimeError:  # the store is gone: torchrun is ending all processes
                return

    def _exit_stalled(self, store: PrefixStore) -> None:
        earlier = self._read_heartbeats(store)
        time.sleep(3)
        now = self._read_heartbeats(store)
        waiting = ", ".join(
            f"rank {rank} (last at step {now[rank][0]})" for rank in find_missing(self.world.rank, earlier, now)
        )
        reason = f"rank {self.world.rank} made no step for {self.timeout:.0f} s (--timeout) after step {self.step}"
        reason += f"; waiting for {waiting}"
        try:
            with (self.folder / f"stalled-rank-{self.world.rank}.txt").open("w") as file:
                print(reason, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            print(f"plainvit: {reason}; stacks in {file.name}", file=sys.stderr, flush=True)
            write_status_for(self.folder, "failed", reason, LostError.exit_code)
        finally:
            os._exit(LostError.exit_code)

    def _read_heartbeats(self, store: PrefixStore) -> list[tuple[int, int]]:
        """(step, heartbeats) of each rank; (-1, 0) of a rank that has published none."""
        keys = map(str, range(self.world.size))
        values = [store.get(key).decode().split() if store.check([key]) else ("-1", "0") for key in keys]
        return [(int(step), int(heartbeat)) for step, heartbeat in values]


def find_missing(own_rank: int, earlier: list[tuple[int, int]], now: list[tuple[int, int]]) -> list[int]:
    """The other ranks without a new heartbeat; if all have one, the ranks furthest behind."""
    silent = [rank for rank in range(len(now)) if rank != own_rank and earlier[rank] == now[rank]]
    slowest = min(step for step, _ in now)
    return silent or [rank for rank, (step, _) in enumerate(now) if step == slowest]
