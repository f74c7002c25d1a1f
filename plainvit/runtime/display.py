"""What a person sees of a long job: a live line in a terminal, a plain line now and then elsewhere."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between plain lines


class Display:
    """Progress of one job; `tell` adds a line that stays."""

    def __init__(self, title: str, total: int, done: int = 0, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self.title, self.total, self.done = title, total, done
        self._start, self._first, self._last = time.monotonic(), done, 0.0
        self._bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            columns = TextColumn("[bold]{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, TextColumn("{task.fields[words]}"), console=self.console)
            self._task = self._bar.add_task(title, total=total, completed=done, words="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, done: int, words: str) -> None:
        self.done = done
        if self._bar:
            self._bar.update(self._task, completed=done, total=self.total, words=words)
        elif time.monotonic() - self._last > EVERY or done == self.total:
            self._last = time.monotonic()
            self.console.print(f"{self.title} {done}/{self.total}  {words}  {self.left()}", markup=False)

    def tell(self, words: str) -> None:
        self.console.print(words, markup=False)

    def left(self) -> str:
        """Time left at the pace so far."""
        if self.done <= self._first:
            return ""
        seconds = (time.monotonic() - self._start) / (self.done - self._first) * (self.total - self.done)
        return f"{readable(seconds)} left"


def readable(seconds: float) -> str:
    """85 -> 1m25s."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours}h{minutes % 60:02d}m" if hours else f"{minutes}m{int(seconds % 60):02d}s"
