"""Time from the command to the first predictions, and to the first training step.

    python -m bench.start --data DIR [--repeats 7] [--json FILE]
    python -m bench.start --data DIR --steps

Predictions: `plainvit predict` on ten photos compared with bench/bare.py, a plain PyTorch script of the same model.
Each measurement is a new process, in turns, with the same number of threads. Both must predict the same
probabilities. "torch alone" imports torch and ends. CPU seconds change less than seconds on a busy machine. Target:
1.5 times the script.

--steps: the time of `plainvit finetune` and `plainvit train` to the end of the first step. "import": a process that
only imports the training code. "compile": how much longer the first step takes than the fourth. "data": the rest,
which is reading images, loading weights and, for finetune, fitting the linear head. "capture": how much longer the
third step takes, in which small models on a GPU are captured as CUDA graphs; it is not part of the total. "cold" is
without bytecode, compiled kernels and other caches; the files are in the page cache. train cifar10 needs a GPU and
DIR/cifar10.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.measure import make_parser, report, run_interleaved, summarize
from bench.photos import BY_CLASS, select_per_class, write_images
from plainvit.data.sources import Subset, open_source
from plainvit.train.graphs import WARM

PLAINVIT, SCRIPT = "plainvit predict", "bare script"
PHOTOS, THREADS = 10, 2
CAPTURED, ORDINARY = WARM + 1, WARM + 2  # steps: the one that is captured as a CUDA graph, and the next one
TOLERANCE = 0.02  # of a probability: the two resize with different code
TARGET = 1.5


def make_environment() -> dict[str, str]:
    """With PASSIVE, waiting threads use no CPU time."""
    return os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE"}


# Predictions ----------------------------------------------------------------------------------------------------------


def run_process(command: Sequence[str]) -> tuple[str, float, float]:
    """Output, seconds and CPU seconds of a new process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = subprocess.run(command, check=True, capture_output=True, text=True, env=make_environment())
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return child.stdout, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_predictions(ours: str, theirs: str) -> float:
    """The largest difference of the probability of a photo's most probable class."""
    pairs = [(json.loads(a), json.loads(b)) for a, b in zip(ours.splitlines(), theirs.splitlines(), strict=True)]
    return max(abs(a["predictions"][0]["probability"] - b["probabilities"][0]) for a, b in pairs)


def measure_predictions(data: Path, repeats: int) -> list[dict[str, Any]]:
    """Rows of seconds and CPU seconds; ratios are medians of the ratios within a round."""
    weights = str(data / "weights" / "vit_ti16_augreg.safetensors")
    cpu_seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as photos:
        source = open_source(str(data / "imagenet-photos"))
        write_images(Subset(source, np.arange(PHOTOS)), Path(photos), "{index:02d}.jpg")
        commands = {
            PLAINVIT: [sys.executable, "-m", "plainvit", "predict", weights, photos, "--json"],
            SCRIPT: [sys.executable, str(Path(__file__).with_name("bare.py")), weights, photos],
            "torch alone": [sys.executable, "-c", "import torch"],
        }
        difference = compare_predictions(*(run_process(commands[name])[0] for name in (PLAINVIT, SCRIPT)))
        if difference > TOLERANCE:
            raise SystemExit(f"the predictions differ: a probability by {difference:.3f}")

        def measure(name: str) -> float:
            _, seconds, cpu = run_process(commands[name])
            cpu_seconds.setdefault(name, []).append(cpu)
            return seconds

        wall_seconds = run_interleaved({name: partial(measure, name) for name in commands}, repeats)
    rows: list[dict[str, Any]] = []
    for unit, times in (("s", wall_seconds), ("CPU s", cpu_seconds)):
        for name, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times[SCRIPT], strict=True))
            remark = f"{ratio:.2f}x the bare script" + (f" (target {TARGET})" if name == PLAINVIT else "")
            row = {"name": name, "unit": unit, "ratio": ratio, "remark": remark, "difference": difference}
            rows.append(row | summarize(values))
    return rows


# First steps ----------------------------------------------------------------------------------------------------------


def time_first_step(arguments: Sequence[str], caches: Path) -> dict[str, float]:
    """Seconds to the end of step 1, by part. The process is killed after step 4."""
    folders = {"PYTHONPYCACHEPREFIX": "bytecode", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "other"}
    environment = make_environment() | {name: str(caches / folder) for name, folder in folders.items()}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import plainvit.train.run"], check=True, env=environment)
    import_seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "plainvit", *arguments, "--out", f"{out}/run"]
        started = time.time()
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            lines = wait_for_step(Path(out) / "run" / "metrics.jsonl", child, ORDINARY)
        finally:
            child.kill()
            child.communicate()
    total, ordinary = lines[1]["time"] - started, lines[ORDINARY]["seconds"]
    return {
        "total": total,
        "import": import_seconds,
        "data": total - import_seconds - lines[1]["seconds"],
        "compile": max(lines[1]["seconds"] - ordinary, 0.0),
        "capture": max(lines[CAPTURED]["seconds"] - ordinary, 0.0),
        "ordinary step": ordinary,
    }


def wait_for_step(metrics: Path, child: "subprocess.Popen[str]", step: int) -> dict[int, Any]:
    """The lines of the first steps, by their number."""
    while True:
        has_ended = child.poll() is not None
        text = metrics.read_text() if metrics.exists() else ""
        entries = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        lines = {entry["step"]: entry for entry in entries if "seconds" in entry}
        if step in lines:
            return lines
        if has_ended:
            raise SystemExit(f"the command ended before step {step}: {child.communicate()[1][-500:]}")
        time.sleep(0.02)


def measure_first_steps(data: Path, repeats: int) -> list[dict[str, Any]]:
    """In each round, every command runs with empty caches, then with the caches that it left."""
    rounds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as pets:
        source = open_source("oxford-pets", data_root=data)
        write_images(select_per_class(source, 8, 40), Path(pets), f"{BY_CLASS}.webp")
        weights = str(data / "weights" / "vit_ti16_augreg.safetensors")
        commands = {
            "finetune, 8 breeds x 40": ["finetune", "--init", weights, "--data", pets],
            "train digits": ["train", "digits"],
        }
        if (data / "cifar10").is_dir() and torch.cuda.is_available():
            commands["train cifar10"] = ["train", "cifar10", "--data-root", str(data)]
        for number in range(repeats):
            for name, arguments in commands.items():
                with tempfile.TemporaryDirectory() as caches:
                    for state in ("cold", "warm"):
                        parts = time_first_step(arguments, Path(caches))
                        rounds.setdefault(f"{name}, {state}", []).append(parts)
                        print(f"  round {number + 1}/{repeats}  {name}, {state}: {parts['total']:.1f}", file=sys.stderr)
    return [
        {"name": f"{name}: {part}", "unit": "s", **summarize([values[part] for values in of_command])}
        for name, of_command in rounds.items()
        for part in of_command[0]
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=7, data="imagenet-photos and weights; with --steps also oxford-pets")
    parser.add_argument("--steps", action="store_true", help="Measure the time to the first training step instead")
    args = parser.parse_args(arguments)
    if args.steps:
        rows, title = measure_first_steps(args.data, args.repeats), "to the first training step"
    else:
        rows, title = measure_predictions(args.data, args.repeats), f"{PHOTOS} photos, ViT-Ti/16, new processes"
    report("bench.start", arguments, args.json, f"{title}, {THREADS} threads", rows)


if __name__ == "__main__":
    main()
