"""A new user's path, timed: photos -> finetune -> predict -> analyse -> export -> serve -> page.

    python -m bench.new_user --data DIR [--hours 0.1] [--json FILE]

Runs the commands of the section "In 60 seconds" of README.md in an empty folder, word for word: only WEIGHTS becomes
DIR/weights/vit_ti16_augreg.safetensors, and the port is a free one. photos/ has 40 photos each of 8 pet breeds, new/
has 20 photos each that are in no training set. Each command is timed until it ends; also until the first model of
`finetune` is on disk, until `serve` is ready, and, where playwright and chromium are installed, until its page shows
the predictions and the map of a photo. The predictions of new/ are compared with the breeds.
"""

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.clients import find_port
from bench.measure import make_parser, publish, show
from plainvit.data.sources import open_source
from plainvit.evaluate.statistics import wilson

README = Path(__file__).parent.parent / "README.md"
BREEDS, PHOTOS, NEW = 8, 40, 20
FIRST = Path("runs/photos/first/model.safetensors")


def read_commands(weights: Path, hours: float) -> list[list[str]]:
    section = README.read_text().partition("## In 60 seconds")[2]
    block = re.findall(r"^```sh\n(.*?)^```", section, re.S | re.M)[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    words = {"WEIGHTS": str(weights), "0.1": str(hours)}
    return [[words.get(word, word) for word in line] for line in lines if line]


def write_photos(data: Path, folder: Path) -> None:
    train, test = (open_source("oxford-pets", split, data_root=data) for split in ("train", "test"))
    for breed in range(BREEDS):
        name = train.classes[breed]
        for at, index in enumerate(np.flatnonzero(train.labels == breed)[:PHOTOS]):
            write(folder / "photos" / name / f"{at}.webp", train.read(int(index)))
        for at, index in enumerate(np.flatnonzero(test.labels == breed)[:NEW]):
            write(folder / "new" / f"{name}-{at}.webp", test.read(int(index)))


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def run(command: Sequence[str], folder: Path, watched: Path | None = None) -> tuple[float, float | None]:
    """Seconds of a command, and until the watched file was there."""
    begun, seen = time.perf_counter(), None
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=log)
        while process.poll() is None:
            if watched and seen is None and watched.exists():
                seen = time.perf_counter() - begun
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return time.perf_counter() - begun, seen


def serve(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Seconds until the server is ready, and until its page shows the answer for a photo."""
    begun, port = time.perf_counter(), find_port()
    words = [sys.executable, "-m", *command, "--port", str(port)]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = threading.Timer(300, process.kill)
    limit.start()
    try:
        while not is_ready(f"http://127.0.0.1:{port}/readyz"):
            if process.poll() is not None:
                raise RuntimeError("the server did not start")
            time.sleep(0.05)
        rows = [{"step": shlex.join(command), "seconds": time.perf_counter() - begun, "remark": "until it is ready"}]
        return rows + open_page(f"http://127.0.0.1:{port}/", next((folder / "new").iterdir()))
    finally:
        limit.cancel()
        process.terminate()
        process.wait(60)


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def open_page(address: str, photo: Path) -> list[dict[str, Any]]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        return []
    begun = time.perf_counter()
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        opened = time.perf_counter()
        page.set_input_files("#files", str(photo))
        page.wait_for_selector("#predictions li")
        page.locator("#map-words", has_text="Where attention").wait_for()
        shown = time.perf_counter()
        browser.close()
    return [
        {"step": "the page opens", "seconds": opened - begun, "remark": "with the start of chromium"},
        {"step": "a photo is dropped on it", "seconds": shown - opened, "remark": "predictions and map"},
    ]


def count_right(path: Path) -> tuple[int, int]:
    with path.open() as file:
        rows = [list(row.values()) for row in csv.DictReader(file)]
    right = sum(Path(str(row[0])).name.rpartition("-")[0] == row[1] for row in rows)
    return right, len(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the data root, with oxford-pets and weights")
    parser.add_argument("--hours", type=float, default=0.1, help="of fine-tuning; README.md says 0.1")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # nothing was measured or compiled before
        write_photos(options.data, folder)
        weights = (options.data / "weights" / "vit_ti16_augreg.safetensors").resolve()
        for command in read_commands(weights, options.hours):
            shown = shlex.join(command).replace(str(weights), "WEIGHTS")
            print(f"  {shown}", file=sys.stderr, flush=True)
            if command[1] == "serve":
                rows += serve(command, folder)
                continue
            seconds, first = run(command, folder, folder / FIRST if command[1] == "finetune" else None)
            if first:
                rows.append({"step": "the first model", "seconds": first, "remark": "of the next line"})
            remark = ""
            if command[1] == "predict":
                right, images = count_right(folder / "predictions.csv")
                low, high = wilson(right, images)
                remark = f"{right} of {images} right ({100 * low:.1f}-{100 * high:.1f} %)"
            rows.append({"step": shown, "seconds": seconds, "remark": remark})
    total = sum(row["seconds"] for row in rows if row["step"] != "the first model")
    rows.append({"step": "in all", "seconds": total, "remark": ""})
    title = f"{BREEDS} x {PHOTOS} photos, ViT-Ti/16"
    shown = [[row["step"], f"{row['seconds']:.1f}", row["remark"]] for row in rows]
    show(title, ("step", "seconds", ""), shown, left=("step", ""))
    publish("bench.new_user", arguments, options.json, title=title, rows=rows)


if __name__ == "__main__":
    main()
