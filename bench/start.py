"""From the command to the predictions: `plainvit predict` on ten photos and a bare PyTorch script of the same model.

    python -m bench.start --data DIR [--repeats 7] [--json FILE]
    python -m bench.start --data DIR --steps                 to the first training step of finetune and train

DIR has imagenet-photos, oxford-pets and weights/vit_ti16_augreg.safetensors. Every measurement is a new process, in
turns with the others, with the same number of threads. The script is bench/bare.py; both must predict the same
probabilities. "torch alone" imports torch and ends. CPU seconds change less than wall time on a busy machine. The
target is a ratio of 1.5.

First steps: "import" is a process that imports the training code and ends; "compile" is what the first step takes
longer than the fourth; "data" is the rest until the end of the first step: reading the images, loading the weights and,
for finetune, fitting the linear head. "capture" is what the third step takes longer, in which small models on a GPU are
captured as CUDA graphs: it comes after the first step. "cold" has no bytecode, compiled kernels or other caches; the
files are in the page cache. train cifar10 needs a GPU, and DIR/cifar10.
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

import torch

from bench.measure import interleaved, make_parser, report, summary
from plainvit.data.sources import open_source
from plainvit.train.graphs import WARM

PLAINVIT, BARE = "plainvit predict", "bare script"
CAPTURED, ORDINARY = WARM + 1, WARM + 2  # steps: the one that is captured as CUDA graphs, and the next one
TOLERANCE = 0.02  # of a probability: the two resize with different code
LIMIT = 1.5


PARTS = ("import", "load", "predict")
# What each part runs, in one process
SPLIT = {
    PLAINVIT: (
        "from plainvit.evaluate import inputs, predict, predictor",
        "made = predictor.Predictor(WEIGHTS)",
        "list(predict.rows(predict.PredictionJob(made, 5), inputs.find([PHOTOS]), engine=predict.predict_locally))",
    ),
    BARE: (
        "import bare",
        "weights = bare.load_file(WEIGHTS)",
        "bare.predict(weights, bare.list_files(PHOTOS))",
    ),
}


def environment(threads: int) -> dict[str, str]:
    """Threads that wait are not counted as busy."""
    return os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def split(parts: Sequence[str], weights: str, photos: str, threads: int) -> list[float]:
    """Seconds of the three parts in one new process."""
    lines = [f"WEIGHTS, PHOTOS = {weights!r}, {photos!r}", "import time; marks = [time.perf_counter()]"]
    for part in parts:
        lines += [part, "marks.append(time.perf_counter())"]
    lines.append("print([b - a for a, b in zip(marks, marks[1:])])")
    folder = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    command, variables = [sys.executable, "-c", "\n".join(lines)], environment(threads) | {"PYTHONPATH": folder}
    child = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return json.loads(child.stdout)


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
    child = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(threads))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return child.stdout, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(ours: str, theirs: str) -> float:
    """The greatest difference of the probability of a photo's most probable class."""
    pairs = [(json.loads(a), json.loads(b)) for a, b in zip(ours.splitlines(), theirs.splitlines(), strict=True)]
    return max(abs(a["predictions"][0]["probability"] - b["probabilities"][0]) for a, b in pairs)


def measure(commands: dict[str, list[str]], files: tuple[str, str], repeats: int, threads: int) -> list[dict[str, Any]]:
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
    parts: dict[str, list[list[float]]] = {name: [] for name in SPLIT}
    for name in list(SPLIT) * repeats:
        parts[name].append(split(SPLIT[name], *files, threads))
    rows: list[dict[str, Any]] = []
    for unit, times in (("s", wall), ("CPU s", busy)):
        for name, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times[BARE], strict=True))
            rows.append({"what": name, "unit": unit, "ratio": ratio, "difference": difference, **summary(values)})
            rows[-1]["remark"] = f"{ratio:.2f}x the bare script" + (f" (limit {LIMIT})" if name == PLAINVIT else "")
    for name, found in parts.items():
        for at, part in enumerate(PARTS):
            rows.append({"what": f"{name}: {part}", "unit": "s", **summary([one[at] for one in found])})
    return rows


# First steps ----------------------------------------------------------------------------------------------------------


def write_pets(data: Path, folder: Path, classes: int, each: int) -> None:
    """A folder for each class with photos of Oxford Pets."""
    source = open_source(str(data / "oxford-pets"))
    for index in range(len(source)):
        label = int(source.labels[index])
        target = folder / f"{label:02d}"
        if label >= classes or (target.exists() and len(list(target.iterdir())) == each):
            continue
        pixels = source.read(index)
        assert isinstance(pixels, bytes)
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{index}.webp").write_bytes(pixels)


def time_first_step(words: Sequence[str], caches: Path, threads: int) -> dict[str, float]:
    """Seconds to the end of step 1 by part; the process is stopped after step 4, which is an ordinary one."""
    places = {"PYTHONPYCACHEPREFIX": "bytecode", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "other"}
    variables = environment(threads) | {name: str(caches / folder) for name, folder in places.items()}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import plainvit.train.run"], check=True, env=variables)
    imported = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "plainvit", *words, "--out", f"{out}/run"]
        started = time.time()
        child = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            lines = wait_for_steps(Path(out) / "run" / "metrics.jsonl", child, ORDINARY)
        finally:
            child.kill()
            child.communicate()
    total, ordinary = lines[1]["time"] - started, lines[ORDINARY]["seconds"]
    return {
        "total": total,
        "import": imported,
        "data": total - imported - lines[1]["seconds"],
        "compile": max(lines[1]["seconds"] - ordinary, 0.0),
        "capture": max(lines[CAPTURED]["seconds"] - ordinary, 0.0),
        "ordinary step": ordinary,
    }


def wait_for_steps(metrics: Path, child: "subprocess.Popen[str]", last: int) -> dict[int, Any]:
    """The lines of the first steps, by their number."""
    while True:
        ended = child.poll() is not None
        text = metrics.read_text() if metrics.exists() else ""
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        lines = {line["step"]: line for line in found if "seconds" in line}
        if last in lines:
            return lines
        if ended:
            raise SystemExit(f"the command ended before step {last}: {child.communicate()[1][-500:]}")
        time.sleep(0.02)


def measure_first_steps(data: Path, repeats: int, threads: int) -> list[dict[str, Any]]:
    """Each round: every command with empty caches, then with the caches that it left."""
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        write_pets(data, Path(place) / "pets", classes=8, each=40)
        weights = str(data / "weights" / "vit_ti16_augreg.safetensors")
        commands = {
            "finetune, 8 breeds x 40": ["finetune", "--init", weights, "--data", f"{place}/pets"],
            "train digits": ["train", "digits"],
        }
        if (data / "cifar10").is_dir() and torch.cuda.is_available():
            commands["train cifar10"] = ["train", "cifar10", "--data-root", str(data)]
        for number in range(repeats):
            for name, words in commands.items():
                with tempfile.TemporaryDirectory() as caches:
                    for state in ("cold", "warm"):
                        parts = time_first_step(words, Path(caches), threads)
                        found.setdefault(f"{name}, {state}", []).append(parts)
                        print(f"  round {number + 1}/{repeats}  {name}, {state}: {parts['total']:.1f}", file=sys.stderr)
    return [
        {"what": f"{name}: {part}", "unit": "s", **summary([parts[part] for parts in rounds])}
        for name, rounds in found.items()
        for part in ("total", "import", "data", "compile", "capture", "ordinary step")
    ]


def main() -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--data", type=Path, required=True, help="folder with imagenet-photos and weights")
    parser.add_argument("--photos", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", action="store_true", help="time to the first training step instead")
    words = parser.parse_args()
    if words.steps:
        rows = measure_first_steps(words.data, words.repeats, words.threads)
        report("bench.start", f"to the first training step, {words.threads} threads", rows, words.json)
        return
    weights = str(words.data / "weights" / "vit_ti16_augreg.safetensors")
    with tempfile.TemporaryDirectory() as place:
        photos = Path(place) / "photos"
        write_photos(words.data, photos, words.photos)
        commands = {
            PLAINVIT: [sys.executable, "-m", "plainvit", "predict", weights, str(photos), "--json"],
            BARE: [sys.executable, str(Path(__file__).with_name("bare.py")), weights, str(photos)],
            "torch alone": [sys.executable, "-c", "import torch"],
        }
        rows = measure(commands, (weights, str(photos)), words.repeats, words.threads)
    report("bench.start", f"{words.photos} photos, ViT-Ti/16, {words.threads} threads, new processes", rows, words.json)


if __name__ == "__main__":
    main()
