"""The run folder, the only interface between commands: config, data, metrics, status and environment of one run.

    runs/NAME/{config.json, data.json, metrics.jsonl, first/, first.json, checkpoints/, captures/, model.safetensors,
               results.json, environment.json, status.json, figures/, report.html}

One process owns it at a time. Files are replaced atomically. metrics.jsonl grows by one line per step; a resumed run
drops the lines after its checkpoint, so that no step is missing or repeated.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from plainvit.config import pluralize
from plainvit.device import processor
from plainvit.disk import DiskError, read_json, write_text

METRIC_RANGES = {
    "images": (1, 2**53),
    "top1": (0, 1.0),
    "top5": (0, 1.0),
    "majority_accuracy": (0, 1.0),
    "nll": (0, math.inf),
    "loss": (0, math.inf),
}


class Folder:
    """One run's folder, locked while it is open. Only the main process writes into it."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self._metrics, self._lock = None, None
        if writes:
            self._acquire_lock()
            self._delete_temporary_files()

    def _acquire_lock(self) -> None:
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise DiskError(f"cannot write into {path}: {error.strerror}") from error
        try:
            # lockf, not flock: data workers, which may outlive this process, must not inherit the lock
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            holder = self._lock.read(200).strip() or "another process"
            self._lock.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise DiskError(f"cannot lock {path}: {error.strerror}") from error
            raise ValueError(f"{holder} is training in {path}: wait for it, or use another --out") from error
        with contextlib.suppress(OSError):  # the first write that matters reports a full disk
            self._lock.truncate(0)
            os.write(self._lock.fileno(), f"process {os.getpid()} on {platform.node()}\n".encode())

    def _delete_temporary_files(self) -> None:
        """Deletes what a killed process left."""
        for pattern in (".*.tmp", "figures/.*.tmp", "captures/.tmp-*"):
            for path in self.path.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._metrics, self._lock):
            with contextlib.suppress(OSError):  # a full disk was reported where it was met
                if file:
                    file.close()  # closing the lock file releases the lock
        if self.writes and not self.path.is_dir():
            raise DiskError(f"the run folder {self.path} was deleted while it was in use")
        if self.writes and {entry.name for entry in self.path.iterdir()} == {".lock"}:
            shutil.rmtree(self.path, ignore_errors=True)  # nothing was written

    def write(self, name: str, value: Any) -> None:
        if not self.writes:
            return
        write_text(self.path / name, _to_json(replace_non_finite(value)))

    def read(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    def write_status(self, state: str, step: int, steps: int, reason: str = "", exit_code: int = 0) -> None:
        """Writes status.json. The state is running, done, interrupted, diverged or failed."""
        code = None if state == "running" else exit_code
        status = {"state": state, "step": step, "steps": steps, "reason": reason, "exit_code": code}
        process = {"host": platform.node(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self.write("status.json", status | process)

    def record(self, line: dict[str, Any]) -> None:
        """Appends a line to metrics.jsonl and flushes it, so that killing the process does not lose it."""
        if not self.writes:
            return
        try:
            if self._metrics is None:
                self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._metrics.write(json.dumps(replace_non_finite(line | {"time": round(time.time(), 3)})) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise DiskError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror}") from error

    def rewind(self, step: int) -> None:
        """Drops the metrics after this step, and an incomplete last line."""
        if not self.writes:
            return
        kept = [f"{json.dumps(line)}\n" for line in read_lines(self.path) if line["step"] <= step]
        write_text(self.path / "metrics.jsonl", "".join(kept))


def read_run_seconds(path: Path) -> float:
    """Training time of a run that ended, from environment.json. Raises ValueError if it is not a number."""
    seconds = read_json(path / "environment.json").get("seconds", 0.0)
    if type(seconds) not in (int, float) or not 0 <= seconds < 1e12:
        raise ValueError(f"{path / 'environment.json'}: seconds is {shorten_repr(seconds)}: correct or delete it")
    return float(seconds)


def read_results(path: Path) -> dict[str, Any]:
    """results.json of a finished run. Raises ValueError if its numbers are invalid."""
    results = read_json(path / "results.json")
    for split in ("val", "test", "first", "trained"):
        check_metrics(results.get(split, {}), f"{path / 'results.json'}: {split}")
    return results


def check_metrics(metrics: Any, name: str) -> None:
    """Raises ValueError for metrics of a split that no run writes, which is why they are not used."""
    if not isinstance(metrics, dict):
        raise ValueError(f"{name} is {shorten_repr(metrics)}, not an object: delete the file and repeat the command")
    for key, (minimum, maximum) in METRIC_RANGES.items():
        value = metrics.get(key)
        if key not in metrics or (value is None and key not in ("images", "top1")):  # null in place of NaN and Inf
            continue
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            problem = f"{name}.{key} is {shorten_repr(value)}, not a number from {minimum} to {maximum:g}"
            raise ValueError(f"{problem}: delete the file and repeat the command of the run")


def shorten_repr(value: object) -> str:
    """repr(value), shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl in order: steps and validations, without events."""
    return (line for line in read_lines(path) if "event" not in line)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All valid lines of metrics.jsonl."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # the incomplete last line of a killed process
                continue
            if isinstance(value, dict) and isinstance(value.get("step"), int):
                yield value


def _to_json(value: dict[str, Any]) -> str:
    """One line per key: indented JSON would give a confusion matrix a million lines."""
    lines = [f" {json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def replace_non_finite(value: Any) -> Any:
    """Replaces NaN and Inf by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_environment(device: str) -> dict[str, Any]:
    """Versions, device, commit and command of a run."""
    import torch

    from plainvit import __version__

    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    threads = torch.get_num_threads()
    cpu = f"{processor()}, {pluralize(threads, 'thread')}"
    return {
        "plainvit": __version__,
        "commit": read_commit(Path(__file__).parents[1]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": gpu or cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "command": describe_command(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def describe_command() -> str:
    """The command line of this process as `plainvit ...`; "" where plainvit is used from another program."""
    path = Path(sys.argv[0])
    ours = path.name == "plainvit" or path.parts[-2:] == ("plainvit", "__main__.py")
    return shlex.join(["plainvit", *sys.argv[1:]]) if ours else ""


def describe_changes(first: dict[str, Any], now: dict[str, Any]) -> str:
    """Changes of machine or torch since a run's first step, which change the last bits of results."""
    names = [name for name in ("torch", "device", "processes") if first.get(name, now[name]) != now[name]]
    return ", ".join(f"{name} {first[name]} -> {now[name]}" for name in names)


def read_commit(package: Path) -> str | None:
    """Commit of the repository that has this package, with "+" for uncommitted changes; None if there is none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails if the package is installed inside another repository
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
