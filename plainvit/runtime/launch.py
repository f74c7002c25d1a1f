"""One command -> as many processes on this machine, by torchrun's agent: `plainvit train ... --devices 8`.

Whatever ends them, the exit code and status.json of the run say the same.
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plainvit.device import choose_device
from plainvit.runtime.distributed import what_follows
from plainvit.runtime.folder import NOTE, say_instead


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
            follows = what_follows(self.made, self.allowed)
            self.said = f"rank {rank} was ended by {signal.Signals(-code).name}; {follows}"
            print(f"plainvit: {self.said}", file=sys.stderr)


@contextlib.contextmanager
def environment_set(settings: dict[str, str]) -> Iterator[None]:
    """Environment variables while this lasts, and what they were before again."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


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
    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // processes, 1))
    with (
        tempfile.TemporaryDirectory() as place,
        environment_set({NOTE: str(Path(place) / "folders"), "OMP_NUM_THREADS": threads}),
    ):
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
