"""Start several processes on this machine with torchrun's agent: `plainvit train ... --devices 8`.

The exit code is that of the first process that failed, which prints its own error and writes status.json.
"""

import logging
import os
import secrets
import signal
import sys

from plainvit.device import choose_device
from plainvit.runtime.distributed import RESUME_HINT


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
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))
    try:
        elastic_launch(config, sys.executable)("-m", "plainvit", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        reason = f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}"
        print(f"plainvit: {reason}; {RESUME_HINT}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
