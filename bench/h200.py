"""All measurements of one GPU in one call of under ten minutes: training, inference, start times.

    python -m bench.h200 --out DIR [--data DIR] [--limit 570]       DIR: $OUT if not given
    python -m bench.h200 --out DIR --device cpu --trial             tiny sizes: shows only that every part runs

Each part is a committed command of bench/ in a process of its own, which writes its JSON to DIR as soon as it ends, so
that a call that is cut off keeps what it has. A part that would start after --limit seconds is left out, with a line.
The order is that of importance. The summary of all parts is DIR/h200.json.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measure import machine, make_parser, show, write_json
from plainvit.disk import read_json

TRIAL = ["--image-size", "32", "--repeats", "1"]
TRAIN_TRIAL = ["--models", "Ti/16", "--batch", "2", "--steps", "1", "--parity", "2"]
INFER_TRIAL = ["--model", "Ti/16", "--batches", "2", "--seconds", "0.01", "--compile", "off"]


def list_parts(device: str, data: Path | None, trial: bool) -> dict[str, list[str]]:
    """Name of a part -> module and arguments."""
    at, systems = ["--device", device], ["--systems", "plainvit;timm"]
    parts: dict[str, list[str]] = {"gate": ["bench.gate", *at, *(TRIAL + TRAIN_TRIAL if trial else [])]}
    for model in () if trial else ("S/16", "L/16", "H/14"):
        parts[f"train-{model.replace('/', '')}"] = ["bench.train", *at, *systems, "--models", model, "--repeats", "5"]
    parts["infer"] = ["bench.infer", *at, "--systems", "plainvit,timm", *(TRIAL + INFER_TRIAL if trial else [])]
    if data:
        parts["start"] = ["bench.start", "--data", str(data), "--repeats", "1" if trial else "3"]
        if not trial:
            parts["first-steps"] = ["bench.start", "--data", str(data), "--repeats", "1", "--steps"]
    return parts


def run_part(name: str, words: Sequence[str], folder: Path, limit: float) -> dict[str, Any]:
    """Exit code and seconds; output goes to NAME.log. A part may use the time that is left and no more."""
    command = [sys.executable, "-m", *words, "--json", str(folder / f"{name}.json")]
    print(f"  {name}: {shlex.join(['python', '-m', *words])}", file=sys.stderr, flush=True)
    started, code = time.perf_counter(), None
    with (folder / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"left out: {name}: stopped after {limit:.0f} s (--limit)", file=sys.stderr)
    return {"part": name, "command": shlex.join(words), "code": code, "seconds": time.perf_counter() - started}


def summarise(name: str, found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Lines of a part: what, value, spread, ratio."""
    lines: list[tuple[str, str, str, str]] = []
    for row in found["rows"]:
        ratio = row.get("ratio")
        if "model" in row:
            what, spread = f"{row['model']}, {row['system']}", f"{row['least']:,.0f}-{row['most']:,.0f}"
            value = f"{row['images_per_second']:,.0f} img/s"
        elif "system" in row:
            what, spread = f"{row['system']}, batch {row['batch']}", f"{row['least_ms']:.3f}-{row['most_ms']:.3f}"
            value = f"{row['images_per_second']:,.0f} img/s, {row['ms']:.3f} ms"
        else:
            what, spread = row["what"], f"{row['least']:.2f}-{row['most']:.2f}"
            value = f"{row['median']:.2f} {row['unit']}"
        lines.append((f"{name}: {what}", value, spread, f"{ratio:.3f}" if ratio else ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for JSON and logs")
    parser.add_argument("--data", type=Path, help="folder with imagenet-photos, oxford-pets, weights and cifar10")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=570, help="seconds in all")
    parser.add_argument("--trial", action="store_true", help="tiny sizes")
    words = parser.parse_args(arguments)
    if not words.out:
        parser.error("give --out DIR, or set OUT")
    folder = Path(words.out)
    folder.mkdir(parents=True, exist_ok=True)
    started, done, lines = time.perf_counter(), [], []
    for name, command in list_parts(words.device, words.data, words.trial).items():
        left = words.limit - (time.perf_counter() - started)
        if left <= 0:
            print(f"left out: {name}: no time is left (--limit)", file=sys.stderr)
            continue
        done.append(run_part(name, command, folder, left))
        if (folder / f"{name}.json").exists():
            lines += summarise(name, read_json(folder / f"{name}.json"))
        write_json(folder / "h200.json", {"machine": machine(), "parts": done, "lines": lines})
    show("summary; ratio: to the fastest peer", ("what", "median", "spread", "ratio"), lines, left=("what",))
    failed = [part["part"] for part in done if part["code"]]
    sys.exit(f"failed: {', '.join(failed)} (see the logs in {folder})" if failed else 0)


if __name__ == "__main__":
    main()
