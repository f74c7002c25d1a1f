"""Progress of a long job: a live bar in a terminal, a plain line every ten seconds elsewhere."""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from plainvit.config import visible

LINE_INTERVAL = 10.0  # seconds between plain lines
ACTIVITY_DELAY = 1.0  # seconds before work of unknown length is mentioned
BAR_WIDTH = 16  # characters, which leaves room for text in a terminal of 80


class StandardError:
    """sys.stderr that stays usable after its reader is gone: the work continues without output."""

    def __init__(self) -> None:
        self._file = sys.stderr

    def write(self, text: str) -> int:
        self._ignore_closed(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._ignore_closed(self._file.flush)

    def _ignore_closed(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # redirect for good: later prints of others go nowhere too
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def open_console(quiet: bool) -> Console:
    file = cast(IO[str], StandardError())
    return Console(file=file, quiet=quiet, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_line(text: str, *, quiet: bool = False) -> None:
    """Prints one line."""
    open_console(quiet).print(visible(text))


@contextlib.contextmanager
def show_activity(title: str, *, quiet: bool = False) -> Iterator[None]:
    """Shows that work of unknown length is running: a spinner in a terminal, elsewhere a line after a second."""
    console = open_console(quiet)
    if console.is_terminal and not quiet:
        with console.status(visible(title)):
            yield
        return
    timer = threading.Timer(ACTIVITY_DELAY, lambda: console.print(visible(f"{title} ...")))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def key_value_table(rows: Mapping[str, str]) -> Table:
    """Names in bold and their values, without borders."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table


class Display:
    """Progress of one job; `print_line` prints a permanent line above the bar."""

    def __init__(self, title: str, total: int, done: int = 0, *, quiet: bool = False) -> None:
        self.console = open_console(quiet)
        self.title, self.total, self.done = visible(title), total, done
        self._start, self._first, self._last = time.monotonic(), done, 0.0
        self._bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            name = TextColumn("{task.description}", "bold", markup=False)
            text = TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True), markup=False)
            columns = (name, BarColumn(BAR_WIDTH), TaskProgressColumn(), TimeRemainingColumn(), text)
            self._bar = Progress(*columns, console=self.console, expand=True)
            self._task = self._bar.add_task(self.title, total=total, completed=done, text="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, done: int, text: str) -> None:
        self.done = done
        if self._bar:
            self._bar.update(self._task, completed=done, total=self.total, text=visible(text))
        elif time.monotonic() - self._last > LINE_INTERVAL or done == self.total:
            self._last = time.monotonic()
            self.print_line(f"{self.title} {done}/{self.total}  {text}  {self.left()}")

    def print_line(self, text: str) -> None:
        self.console.print(visible(text))

    def left(self) -> str:
        """Estimated time left, such as "1m25s left"; empty before the first progress."""
        if self.done <= self._first:
            return ""
        seconds = (time.monotonic() - self._start) / (self.done - self._first) * (self.total - self.done)
        return f"{format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """A duration: 85 -> 1m25s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
