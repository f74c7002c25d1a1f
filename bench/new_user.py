"""The path of a new user, timed: photos -> finetune -> predict -> analyse -> export -> serve -> page.

    python -m bench.new_user --data DIR [--hours 0.1] [--json FILE]

Runs the commands of the section "In 60 seconds" of README.md in an empty folder. Only WEIGHTS is replaced by
DIR/weights/vit_ti16_augreg.safetensors, and the port by a free one. photos/ has 40 photos each of 8 pet breeds, new/
has 20 photos each that are in no training set. Times are until a command ends, until the first model of `finetune` is
on disk, until `serve` is ready, and, if playwright and Chromium are installed, until its page shows the predictions
and the map of a photo. The predictions of new/ are compared with the breeds.
"""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.clients import find_port, start_server
from bench.measure import make_parser, print_table, write_results
from bench.photos import select_per_class, write_images
from plainvit.data.sources import open_source
from plainvit.evaluate.statistics import wilson

README = Path(__file__).parent.parent / "README.md"
BREEDS, PHOTOS, NEW_PHOTOS = 8, 40, 20
FIRST_MODEL = Path("runs/photos/first/model.safetensors")


def read_commands(weights: Path, hours: float) -> list[list[str]]:
    """The commands of README.md, with weights and hours replaced."""
    section = README.read_text().partition("## In 60 seconds")[2]
    block = re.findall(r"^```sh\n(.*?)^```", section, re.S | re.M)[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    replacements = {"WEIGHTS": str(weights), "0.1": str(hours)}
    return [[replacements.get(word, word) for word in line] for line in lines if line]


def write_photos(data: Path, folder: Path) -> None:
    train, test = (open_source("oxford-pets", split, data_root=data) for split in ("train", "test"))
    write_images(select_per_class(train, BREEDS, PHOTOS), folder / "photos", "breed{label}/{index}.webp")
    write_images(select_per_class(test, BREEDS, NEW_PHOTOS), folder / "new", "breed{label}-{index}.webp")


def run_command(command: Sequence[str], folder: Path, watched: Path | None = None) -> tuple[float, float | None]:
    """Seconds until the command ends, and until the watched file exists."""
    started, seen = time.perf_counter(), None
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            if watched and seen is None and watched.exists():
                seen = time.perf_counter() - started
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return time.perf_counter() - started, seen


def run_server(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Times until the server is ready and until its page shows the predictions of a photo."""
    started, port = time.perf_counter(), find_port()
    with start_server([sys.executable, "-m", *command, "--port", str(port)], port, folder=folder):
        row = {"step": shlex.join(command), "seconds": time.perf_counter() - started, "remark": "until it is ready"}
        return [row, *open_page(f"http://127.0.0.1:{port}/", next((folder / "new").iterdir()))]


def open_page(address: str, photo: Path) -> list[dict[str, Any]]:
    """No rows without playwright or Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        return []
    started = time.perf_counter()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        opened = time.perf_counter()
        page.set_input_files("#files", str(photo))
        page.wait_for_selector("#predictions li")
        page.locator("#map-words", has_text="Where attention").wait_for()
        shown = time.perf_counter()
        browser.close()
    return [
        {"step": "the page opens", "seconds": opened - started, "remark": "with the start of Chromium"},
        {"step": "a photo is dropped on it", "seconds": shown - opened, "remark": "predictions and map"},
    ]


def describe_accuracy(predictions: Path) -> str:
    """How many predictions are the breed in the name of the file, with the 95 % interval."""
    with predictions.open() as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    correct = sum(Path(str(row[0])).name.partition("-")[0] == row[1] for row in rows)
    low, high = wilson(correct, len(rows))
    return f"{correct} of {len(rows)} correct ({100 * low:.1f}-{100 * high:.1f} %)"


def measure(data: Path, hours: float, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    write_photos(data, folder)
    weights = (data / "weights" / "vit_ti16_augreg.safetensors").resolve()
    for command in read_commands(weights, hours):
        step = shlex.join(command).replace(str(weights), "WEIGHTS")
        print(f"  {step}", file=sys.stderr, flush=True)
        if command[1] == "serve":
            rows += run_server(command, folder)
            continue
        seconds, first = run_command(command, folder, folder / FIRST_MODEL if command[1] == "finetune" else None)
        remark = f"first model after {first:.1f} s" if first else ""
        remark = describe_accuracy(folder / "predictions.csv") if command[1] == "predict" else remark
        rows.append({"step": step, "seconds": seconds, "remark": remark})
    return [*rows, {"step": "total", "seconds": sum(row["seconds"] for row in rows), "remark": ""}]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, data="oxford-pets and weights")
    parser.add_argument("--hours", type=float, default=0.1, help="Duration of fine-tuning; README.md has 0.1")
    args = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # empty, as for a new user
        rows = measure(args.data, args.hours, Path(folder))
    title = f"{BREEDS} x {PHOTOS} photos, ViT-Ti/16"
    lines = [[row["step"], f"{row['seconds']:.1f}", row["remark"]] for row in rows]
    print_table(title, ("step", "seconds", ""), lines, left=("step", ""))
    write_results("bench.new_user", arguments, args.json, title=title, rows=rows)


if __name__ == "__main__":
    main()
