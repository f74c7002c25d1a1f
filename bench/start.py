"""From the command to the predictions: `plainvit predict` on ten photos and a bare PyTorch script of the same model.

    python -m bench.start --data DIR [--repeats 7] [--json FILE]

DIR has imagenet-photos and weights/vit_ti16_augreg.safetensors. Both are new processes, in turns, with the same number
of threads; the script is bench/bare.py. "torch alone" imports torch and ends. The probabilities of both must agree.
CPU seconds of all threads change less on a busy machine than those of the clock. The target is a ratio of 1.5.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import interleaved, make_parser, report, summary
from plainvit.data.sources import open_source

PLAINVIT, BARE = "plainvit predict", "bare script"
TOLERANCE = 0.02  # of a probability: the two resize with different code
LIMIT = 1.5


def write_photos(data: Path, folder: Path, count: int) -> None:
    source = open_source(str(data / "imagenet-photos"))
    folder.mkdir()
    for index in range(count):
        pixels = source.read(index)
        assert isinstance(pixels, bytes)
        (folder / f"{index:02d}.jpg").write_bytes(pixels)


def run(command: Sequence[str], threads: int) -> tuple[str, float, float]:
    """Output, seconds and CPU seconds of a new process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    child = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return child.stdout, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(ours: str, theirs: str) -> float:
    """The greatest difference of the probability of a photo's most probable class."""
    pairs = [(json.loads(a), json.loads(b)) for a, b in zip(ours.splitlines(), theirs.splitlines(), strict=True)]
    return max(abs(a["predictions"][0]["probability"] - b["probabilities"][0]) for a, b in pairs)


def measure(commands: dict[str, list[str]], repeats: int, threads: int) -> list[dict[str, Any]]:
    """Rows of seconds and CPU seconds; ratios are medians of those within a round."""
    difference = compare(*(run(commands[name], threads)[0] for name in (PLAINVIT, BARE)))  # fills the page cache too
    if difference > TOLERANCE:
        raise SystemExit(f"the predictions differ: a probability by {difference:.3f}")
    busy: dict[str, list[float]] = {name: [] for name in commands}

    def timed(name: str) -> float:
        _, seconds, cpu = run(commands[name], threads)
        busy[name].append(cpu)
        return seconds

    wall = interleaved({name: (lambda name=name: timed(name)) for name in commands}, repeats)
    rows: list[dict[str, Any]] = []
    for unit, times in (("s", wall), ("CPU s", busy)):
        for name, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times[BARE], strict=True))
            rows.append({"what": name, "unit": unit, "ratio": ratio, "difference": difference, **summary(values)})
            rows[-1]["remark"] = f"{ratio:.2f}x the bare script" + (f" (limit {LIMIT})" if name == PLAINVIT else "")
    return rows


def main() -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--data", type=Path, required=True, help="folder with imagenet-photos and weights")
    parser.add_argument("--photos", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    words = parser.parse_args()
    weights = str(words.data / "weights" / "vit_ti16_augreg.safetensors")
    with tempfile.TemporaryDirectory() as place:
        photos = Path(place) / "photos"
        write_photos(words.data, photos, words.photos)
        commands = {
            PLAINVIT: [sys.executable, "-m", "plainvit", "predict", weights, str(photos), "--json"],
            BARE: [sys.executable, str(Path(__file__).with_name("bare.py")), weights, str(photos)],
            "torch alone": [sys.executable, "-c", "import torch"],
        }
        rows = measure(commands, words.repeats, words.threads)
    report("bench.start", f"{words.photos} photos, ViT-Ti/16, {words.threads} threads, new processes", rows, words.json)


if __name__ == "__main__":
    main()
