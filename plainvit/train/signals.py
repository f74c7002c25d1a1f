"""SIGINT and SIGTERM: the loop saves a checkpoint and stops; outside of the loop they end the run at once.

`loop.train` collects signals with `catch_signals`. step.py sums them over the processes, so that all stop at the same
step. Evaluation and report (run.py) run inside `raise_on_termination`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TOGETHER = 2.0  # seconds within which signals count as one


class InterruptedRunError(ValueError):
    """A signal ended the run after its state was saved; the exit code is 128 + the signal."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: saved at step {step}; run the same command to resume")
        self.exit_code, self.raised_by_all = 128 + number, True


class Terminated(SystemExit):
    """SIGTERM outside of the loop. Like KeyboardInterrupt it is not an Exception, so nobody catches it by accident."""

    exit_code = 128 + signal.SIGTERM

    def __str__(self) -> str:
        return "SIGTERM: run the same command to resume from the last checkpoint"


@contextlib.contextmanager
def handle_signals(handler: Callable[..., None], *numbers: signal.Signals) -> Iterator[None]:
    """Installs a signal handler inside the block; only the main thread can, elsewhere nothing changes."""
    old: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):
        old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM for the loop, which checks after each step. A later one ends the process at once.

    A scheduler signals every process of a job, and torchrun passes the signal on to the same processes: signals that
    arrive together count as one.
    """
    received: list[int] = []
    first = 0.0

    def handle(number: int, _: object) -> None:
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
        elif time.monotonic() - first > TOGETHER:
            os._exit(128 + number)  # safe: the checkpoint on disk is complete

    with handle_signals(handle, signal.SIGINT, signal.SIGTERM):
        yield received
    if received:  # after the last step that checks: as if it arrived now
        signal.raise_signal(received[0])


def raise_on_termination() -> contextlib.AbstractContextManager[None]:
    """Raises Terminated on SIGTERM inside the block, so that the end of the run is recorded."""

    def handle(*_: object) -> None:
        raise Terminated(Terminated.exit_code)

    return handle_signals(handle, signal.SIGTERM)


# Signals of all processes ---------------------------------------------------------------------------------------------


def encode_signal(received: Sequence[int], size: int) -> int:
    """A number whose sum over `size` processes tells whether any of them received a signal, and which."""
    if not received:
        return 0
    return 1 if received[0] == signal.SIGINT else size + 1


def decode_signal(total: float, size: int) -> int:
    """The signal that any process received, SIGTERM before SIGINT; 0 if none."""
    if not total:
        return 0
    return signal.SIGINT if total <= size else signal.SIGTERM
