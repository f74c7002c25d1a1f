"""The benchmarks of one GPU in one call of under ten minutes: training, inference, start times.

    python -m bench.h200 --out DIR [--data DIR] [--limit 570]       --out: $OUT if not given
    python -m bench.h200 --out DIR --device cpu --trial             tiny sizes, to check that every part runs

Each part is a command of bench/ in its own process, the most important first. It writes NAME.json and NAME.log to the
folder when it ends, so an interrupted call keeps what was measured. A part is skipped if --limit is over. h200.json has
the commands, exit codes and times of all parts.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import describe_machine, make_parser, write_json

TRIAL = ["--image-size", "32", "--repeats", "1"]
TRAIN_TRIAL = ["--models", "Ti/16", "--batch", "2", "--steps", "1", "--loss-steps", "2"]
INFER_TRIAL = ["--model", "Ti/16", "--batches", "2", "--seconds", "0.01", "--compile", "off"]


def list_parts(device: str, data: Path | None, trial: bool) -> dict[str, list[str]]:
    """Name of a part -> module and arguments."""
    device_flags, systems = ["--device", device], ["--systems", "plainvit;timm"]
    parts: dict[str, list[str]] = {"gate": ["bench.gate", *device_flags, *(TRIAL + TRAIN_TRIAL if trial else [])]}
    for model in () if trial else ("S/16", "L/16", "H/14"):
        parts[f"train-{model.replace('/', '')}"] = ["bench.train", *device_flags, *systems, "--models", model]
    infer = ["bench.infer", *device_flags, "--systems", "plainvit,timm"]
    parts["infer"] = [*infer, *(TRIAL + INFER_TRIAL if trial else [])]
    if data:
        parts["start"] = ["bench.start", "--data", str(data), "--repeats", "1" if trial else "3"]
        if not trial:
            parts["first-steps"] = ["bench.start", "--data", str(data), "--repeats", "1", "--steps"]
    return parts


def run_part(name: str, words: Sequence[str], folder: Path, limit: float) -> dict[str, Any]:
    """Runs a part for at most `limit` seconds, with its output in NAME.log, and prints that."""
    command = [sys.executable, "-m", *words, "--json", str(folder / f"{name}.json")]
    print(f"  {name}: {shlex.join(['python', '-m', *words])}", file=sys.stderr, flush=True)
    started, code, path = time.perf_counter(), None, folder / f"{name}.log"
    with path.open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"stopped: {name}: after {limit:.0f} s (--limit)", file=sys.stderr)
    print(path.read_text(), flush=True)
    return {"part": name, "command": shlex.join(words), "exit_code": code, "seconds": time.perf_counter() - started}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="Folder for JSON files and logs")
    parser.add_argument("--data", type=Path, help="Folder with imagenet-photos, oxford-pets, weights and cifar10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=570, help="Seconds in total")
    parser.add_argument("--trial", action="store_true", help="Tiny sizes")
    args = parser.parse_args(arguments)
    if not args.out:
        parser.error("give --out DIR or set OUT")
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    started, parts = time.perf_counter(), []
    for name, words in list_parts(args.device, args.data, args.trial).items():
        remaining = args.limit - (time.perf_counter() - started)
        if remaining <= 0:
            print(f"skipped: {name}: no time is left (--limit)", file=sys.stderr)
            continue
        parts.append(run_part(name, words, folder, remaining))
        write_json(folder / "h200.json", {"machine": describe_machine(), "parts": parts})
    failed = [part["part"] for part in parts if part["exit_code"]]
    sys.exit(f"failed: {', '.join(failed)} (see the logs in {folder})" if failed else 0)


if __name__ == "__main__":
    main()
