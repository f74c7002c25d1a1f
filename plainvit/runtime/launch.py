"""Start several processes on this machine with torchrun's agent: `plainvit train ... --devices 8`.

The exit code is that of the first process that failed; status.json of the run says the same.
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
from plainvit.runtime.distributed import RESUME_HINT
from plainvit.runtime.folder import NOTE, write_status_for


@contextlib.contextmanager
def environment_set(settings: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, and restores their old values at the end of the block."""
    old_values = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in old_values.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def launch(arguments: list[str], processes: int, restarts: int, device: str) -> int:
    """Runs `plainvit ARGUMENTS` in this many processes and returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    choose_device(device, 0, processes)  # report an unusable device before anything starts
    for name in ("", ".agent.server.api", ".multiprocessing.api"):  # failures are reported below
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
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
        tempfile.TemporaryDirectory() as temporary,
        environment_set({NOTE: str(Path(temporary) / "folders"), "OMP_NUM_THREADS": threads}),
    ):
        try:
            elastic_launch(config, sys.executable)("-m", "plainvit", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _record_failure(rank, failure.exitcode)
        except SignalException as error:
            code = 128 + int(error.sigval)
            _record_end("interrupted", f"{signal.Signals(error.sigval).name}; {RESUME_HINT}", code)
            return code
    return 0


def _record_failure(rank: int, exit_code: int) -> int:
    """Records that a rank failed, and returns the exit code as a shell counts it: 128 + N for signal N."""
    if exit_code >= 0:  # the process has printed its own error
        _record_end("failed", f"rank {rank} ended with exit code {exit_code}", exit_code)
        return exit_code
    reason = f"rank {rank} was killed by {signal.Signals(-exit_code).name}; {RESUME_HINT}"
    print(f"plainvit: {reason}", file=sys.stderr)
    # replaces "failed" too: the other ranks only saw that a connection was lost
    _record_end("failed", reason, 128 - exit_code, replace=("running", "failed"))
    return 128 - exit_code


def _record_end(state: str, reason: str, code: int, replace: tuple[str, ...] = ("running",)) -> None:
    """Writes how the run ended into status.json of each run folder whose main process could not."""
    note = Path(os.environ[NOTE])
    for folder in note.read_text().splitlines() if note.is_file() else ():
        with contextlib.suppress(OSError, ValueError):  # a full disk was reported where it was met
            write_status_for(Path(folder), state, reason, code, replace)
