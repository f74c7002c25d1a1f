"""A run that stands still is ended, with a word on who is missing, instead of waiting for ever."""

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
from plainvit.runtime.folder import say_instead


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
