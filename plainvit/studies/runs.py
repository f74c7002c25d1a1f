"""The runs of studies: their names, how one is executed, and the file of their numbers.

    job = Job("rate: a, run 1", config, Path("studies/runs"), measure=held_out)
    ledger = Ledger(Path("studies/ledger.jsonl"))
    ledger.add(execute(job))
    ledger.find(job.run, "held_out")                {"top1": 0.71, ...}, or None

A run is named by a hash of its settings, so that studies share it and its numbers can be used on another machine. Each
line of the ledger is one run: its name, its values by measurement, and its time, device and commit. Files may be
concatenated.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from plainvit.config import Checked, Config
from plainvit.device import choose_device
from plainvit.disk import make_folder, read_json
from plainvit.models import ResNet, ViT
from plainvit.runtime.folder import describe_environment, read_run_seconds
from plainvit.train.run import fit
from plainvit.weights import save

RESULTS_VERSION = 1  # raise it if code or a default changes the results of runs: finished runs are then repeated
Measure = Callable[[Config, Path], dict[str, float]]  # metrics of a run from its config and folder
Edit = Callable[[Path, Config], ViT | ResNet]  # initial weights from a folder of weights and the config of the run


def run_name(config: Config) -> str:
    """The folder name of a run, and its name in the ledger."""
    return f"{run_hash(config)}-v{RESULTS_VERSION}"


def run_hash(config: Config) -> str:
    """A hash of all settings that affect the result; of `init`, only the name of the folder."""
    settings = list_changes(config) | {"init": Path(config.init).name}
    kept = {name: value for name, value in settings.items() if name not in Config.OPERATIONAL | {"recipe"}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


HASHED_NAMES = {"standardize": "standardise"}  # its name in 0.1: published verdicts name runs by hashes with it


def list_changes(config: Checked) -> dict[str, Any]:
    """The settings that differ from their defaults, so that a new option does not change the names of runs."""
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
    return {"kind": type(config).__name__} | {
        HASHED_NAMES.get(name, name): list_changes(value) if isinstance(value, Checked) else value
        for name, (value, default) in values.items()
        if value != default
    }


@dataclass(frozen=True)
class Job:
    """A run of a study, and what is measured of it."""

    label: str  # in messages
    config: Config
    runs: Path  # the folder of all runs
    measure: Measure | None = None  # None: it is only a start for other runs
    is_trained: bool = True
    parent: str = ""  # the run that it starts from
    edit: Edit | None = None  # makes its initial weights from those of `source`
    source: Path = Path()
    seconds: float = 0.0  # estimate

    @cached_property
    def run(self) -> str:
        return run_name(self.config)

    @property
    def folder(self) -> Path:
        return self.runs / self.run

    @property
    def measurement(self) -> str:
        return self.measure.__name__ if self.measure else ""

    @property
    def key(self) -> tuple[str, str]:
        return self.run, self.measurement

    @property
    def is_measured_here(self) -> bool:
        """Whether it is measured in the main process: workers do not know functions of a user's file."""
        return self.measure is not None and not self.measure.__module__.startswith("plainvit.")

    def for_worker(self) -> "Job":
        """The job without functions that a worker may not know."""
        return replace(self, edit=None, measure=None if self.is_measured_here else self.measure)

    @property
    def is_done(self) -> bool:
        return read_json(self.folder / "status.json").get("state") == "done"

    def is_missing(self, ledger: "Ledger") -> bool:
        return self.measure is not None and ledger.find(self.run, self.measurement) is None

    def edit_weights(self) -> None:
        """Make the edited initial weights, once."""
        file = Path(self.config.init) / "model.safetensors"
        if self.edit and not file.is_file():
            make_folder(file.parent)
            save(self.edit(self.source, self.config), file)


def execute(job: Job) -> dict[str, Any]:
    """Train unless the run is finished, and measure. Returns the record of the run for the ledger."""
    started = time.monotonic()
    try:
        if job.is_trained and not job.is_done:
            fit(job.config, job.folder, quiet=True, bare=True)
        values = {job.measurement: job.measure(job.config, job.folder)} if job.measure else {}
    finally:
        parent = multiprocessing.parent_process()
        if parent and not parent.is_alive():  # nobody is waiting for the result
            os._exit(143)
    if job.is_trained:
        machine, seconds = read_json(job.folder / "environment.json"), read_run_seconds(job.folder)
    else:
        machine, seconds = describe_environment(choose_device(job.config.device)), time.monotonic() - started
    return {
        "run": job.run,
        "values": values,
        "is_trained": job.is_trained,
        "seconds": round(seconds, 1),
        "commit": os.environ.get("PLAINVIT_COMMIT") or machine["commit"],  # set for a copy outside its repository
        "device": machine["device"],
    }


class Ledger:
    """A file of finished runs, which is appended to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[str, dict[str, Any]] = {}
        text = file.read_bytes() if file.is_file() else b""
        self._is_cut = bool(text) and not text.endswith(b"\n")  # a process was killed while it wrote the last line
        for line in text.splitlines():
            self._merge(_parse(line))

    def _merge(self, record: dict[str, Any]) -> None:
        if record:
            known = self.runs.get(record["run"], {"values": {}})
            self.runs[record["run"]] = {**record, "values": known["values"] | record["values"]}

    def find(self, run: str, measurement: str) -> dict[str, float] | None:
        return self.runs.get(run, {"values": {}})["values"].get(measurement)

    def add(self, record: dict[str, Any]) -> None:
        """Append a run, or further measurements of a run."""
        self._merge(record)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            if self._is_cut:
                file.write("\n")
            file.write(json.dumps(record) + "\n")
        self._is_cut = False


def _parse(line: bytes) -> dict[str, Any]:
    """An incomplete line is no run."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and {"run", "values"} <= record.keys() else {}
