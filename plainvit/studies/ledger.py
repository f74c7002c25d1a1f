"""The numbers of finished runs in one file, by content, so that they can be used again on another machine.

    ledger = Ledger(Path("studies/ledger.jsonl"))
    ledger.find(run_name(config), "held_out")           {"top1": 0.71, ...}, or None

Each line is one run: its name (a hash of its settings, and RESULTS_VERSION), its values by measurement, and its time,
device and commit. Files may be concatenated.
"""

import json
from pathlib import Path
from typing import Any


class Ledger:
    """A file of finished runs, which is appended to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[str, dict[str, Any]] = {}
        for line in file.read_bytes().splitlines() if file.is_file() else ():
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
            file.write("\n" * self._ends_inside_line() + json.dumps(record) + "\n")

    def _ends_inside_line(self) -> bool:
        """Whether a process was killed while it wrote the last line."""
        with self.file.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            return file.read() not in (b"", b"\n")


def _parse(line: bytes) -> dict[str, Any]:
    """An incomplete line is no run."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and {"run", "values"} <= record.keys() else {}
