"""A sweep over settings of a recipe at equal time, with early stopping; then the winner with several seeds.

    python -m bench.sweep cifar10 --data-root DIR --table sweep.json --minutes 8
    python -m bench.sweep cifar10 --data-root DIR --table sweep.json --final --seeds 3 --minutes 4

Candidates are settings that replace those of the recipe (CANDIDATES, the most promising first; --candidates takes the
first ones, or a JSON file of the same form). Each has a process, and all are compiled at once. Then the steps of each
are timed while the others wait, and each is trained for as many steps as fit into --seconds of the device, --at-once
of them at a time. The best third, by accuracy on held-out training images, is trained again from the start for three
times as long, and so on. Test images are not read.

The table is written after every result. The same command continues from it, on another machine too if the device is
of the same name; so what does not fit into --minutes is left to the next call.

--final trains the best candidate of the longest round (or the one that --only names) in a new process per seed, for as
many steps as fit into --minutes with --overhead for start, compilation, validation, test and report, and reads the
test images once, at the end. With --at-once 3 the seeds share the device: their time is then computed, not measured.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench.measure import machine, make_parser, show, write_json
from bench.trials import Stages, Trial, configure, count_steps, train_stages
from plainvit.disk import read_json

FACTOR = 3  # a round keeps one candidate in so many, and gives it so many times the time
HOLDOUT = 0.1  # of the training images while candidates are compared

LARGE_BATCH = {"batch": 1024, "optim.lr": 4e-3, "model.init": "timm"}
WIDE = {"model.width": 384, "model.depth": 6, "model.heads": 6, "model.mlp_dim": 1536}  # as much time, 4/3 the FLOPs
LINEAR = {"optim.schedule": "linear"}
CANDIDATES: dict[str, Stages] = {
    "large batch": [LARGE_BATCH],
    "wide": [LARGE_BATCH | WIDE],
    "wide, linear decay": [LARGE_BATCH | WIDE | LINEAR],
    "linear decay": [LARGE_BATCH | LINEAR],
    "larger images at the end": [
        LARGE_BATCH | LINEAR | {"share": 0.6, "optim.lr_end": 1e-3},
        LARGE_BATCH | LINEAR | {"share": 0.4, "image_size": 1.5, "optim.lr": 1.5e-3},
    ],
    "smoothing": [LARGE_BATCH | {"augment.smoothing": 0.1}],
    "wide, higher rate": [LARGE_BATCH | WIDE | {"optim.lr": 6e-3}],
    "wide, batch 2048": [LARGE_BATCH | WIDE | {"batch": 2048, "optim.lr": 6e-3}],
    "CutMix alone": [LARGE_BATCH | {"augment.mixup": 0.0}],
    "stochastic depth 0.2": [LARGE_BATCH | {"model.stochastic_depth": 0.2}],
    "fixed positions": [LARGE_BATCH | {"model.posemb": "sincos2d"}],
    "longer average": [LARGE_BATCH | LINEAR | {"optim.lr_end": 4e-4, "ema_window": 0.15}],
    "no cooldown": [LARGE_BATCH | {"optim.schedule": "constant", "optim.cooldown": 0.3}],
    "recipe": [{}],
}


# The sweep ------------------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """Rounds of trials. `table` has, by name of the candidate: its stages, seconds of a step, results by seconds."""

    recipe: str
    candidates: Mapping[str, Stages]
    words: argparse.Namespace
    table: dict[str, Any]
    started: float

    def left(self) -> float:
        return 60 * self.words.minutes - (time.monotonic() - self.started)

    def run(self) -> None:
        names, seconds = list(self.candidates), self.words.seconds
        trials: dict[str, Trial] = {}
        for row in self.table["candidates"].values():  # what failed is tried again
            row.pop("error", None)
        try:
            while names:
                pending = [name for name in names if key(seconds) not in self.row(name)["results"]]
                pending = [name for name in pending if not self.row(name).get("error")]
                self.open(trials, pending)
                if not self.train(trials, pending, seconds):
                    return
                names = self.keep_best(names, seconds)
                names, seconds = names[: math.ceil(len(names) / FACTOR)], FACTOR * seconds
                if len(names) == 1:  # the winner
                    return
        finally:
            for trial in trials.values():
                trial.end()

    def row(self, name: str) -> dict[str, Any]:
        stages = self.candidates[name]
        row = self.table["candidates"].setdefault(name, {"stages": stages, "results": {}})
        if row["stages"] != stages:
            raise SystemExit(f"--table has other settings of {name!r}: give another file")
        return row

    def save(self) -> None:
        self.table["machine"] = machine()
        write_json(self.words.table, self.table, quiet=True)

    def open(self, trials: dict[str, Trial], names: Sequence[str]) -> None:
        """Starts the processes of these candidates, compiles all at once, and times each while the others wait."""
        new = [name for name in names if name not in trials]
        threads = max((os.cpu_count() or 1) // max(len(new), 1), 1)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        for name in new:
            stages = self.candidates[name]
            configs = [configure(self.recipe, one, self.words.data_root, self.words.device) for one in stages]
            trials[name] = Trial(name, [config.replace(holdout=HOLDOUT) for config in configs], threads)
        untimed = [name for name in new if not self.row(name).get("step_seconds")]
        for name in untimed:
            trials[name].ask("compile")
        for name in untimed:
            self.check(name, trials[name].answer())
        for name in untimed:
            if self.row(name).get("error"):
                continue
            trials[name].ask("time")
            times = self.check(name, trials[name].answer())
            self.row(name)["step_seconds"] = times
            print(f"  {name}: {', '.join(f'{1000 * one:.2f}' for one in times or ())} ms a step", file=sys.stderr)
        self.save()

    def check(self, name: str, answer: Any) -> Any:
        """The answer, or None if it is an error, which is kept."""
        if not isinstance(answer, str):
            return answer
        self.row(name)["error"] = answer
        print(f"  {name}: {answer}", file=sys.stderr)
        return None

    def train(self, trials: Mapping[str, Trial], names: Sequence[str], seconds: float) -> bool:
        """One round, some at a time; False if the time is over before all are done."""
        waiting = [name for name in names if not self.row(name).get("error")]
        running: dict[Connection, str] = {}
        if waiting and seconds * len(waiting) > self.left():
            print(f"left out: a round of {len(waiting)} x {seconds:g} s: {self.left():.0f} s are left (--minutes)")
            return False
        while waiting or running:
            while waiting and len(running) < self.words.at_once:
                name = waiting.pop(0)
                steps = count_steps(seconds, self.candidates[name], self.row(name)["step_seconds"])
                out = self.words.runs / f"{name.replace(' ', '-').replace(',', '')}-{key(seconds)}"
                trials[name].ask("train", steps, str(out))
                running[trials[name].connection] = name
            ready = wait(list(running), timeout=max(self.left(), 0.0))
            if not ready:
                print(f"stopped after --minutes {self.words.minutes:g}: {', '.join(running.values())} are not done")
                return False
            for connection in ready:
                name = running.pop(connection)  # pyright: ignore[reportArgumentType]
                result = self.check(name, trials[name].answer())
                if result:
                    self.row(name)["results"][key(seconds)] = result
                    print(f"  {name}, {seconds:g} s: {result['top1']:.2%}", file=sys.stderr, flush=True)
                self.save()
        return True

    def keep_best(self, names: Sequence[str], seconds: float) -> list[str]:
        scores = {name: self.row(name)["results"].get(key(seconds), {}).get("top1", -1.0) for name in names}
        return sorted((name for name in names if scores[name] >= 0), key=lambda name: -scores[name])


def key(seconds: float) -> str:
    return f"{seconds:g}s"


def rank(table: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(name, seconds of its longest run, top-1 of it): those that were trained longest first, the best first."""
    found = []
    for name, row in table["candidates"].items():
        if row["results"]:
            longest = max(row["results"], key=lambda one: float(one.removesuffix("s")))
            found.append((name, float(longest.removesuffix("s")), row["results"][longest]["top1"]))
    return sorted(found, key=lambda one: (-one[1], -one[2]))


def show_table(table: Mapping[str, Any]) -> None:
    rounds = sorted({r for row in table["candidates"].values() for r in row["results"]}, key=lambda r: float(r[:-1]))
    order = [name for name, *_ in rank(table)]
    order += [name for name in table["candidates"] if name not in order]
    rows = []
    for name in order:
        row = table["candidates"][name]
        times = " + ".join(f"{1000 * one:.2f}" for one in row.get("step_seconds") or ())
        scores = [f"{row['results'][r]['top1']:.2%}" if r in row["results"] else "" for r in rounds]
        rows.append((name, times, *scores, row.get("error", "")))
    columns = ("candidate", "ms a step", *(f"{r} of the device" for r in rounds), "error")
    show(f"{table['recipe']}: top-1 of held-out images", columns, rows, left=("candidate", "error"))


# The winner -----------------------------------------------------------------------------------------------------------


def train_seed(words: argparse.Namespace, stages: Stages, steps: Sequence[int]) -> None:
    """In a process of its own: one seed of the winner, test images and all."""
    configs = [configure(words.recipe, one, words.data_root, words.device).replace(seed=words.seed) for one in stages]
    results = train_stages(configs, steps, words.runs / f"final-{words.seed}", test=True)
    found = {split: {name: results[split][name] for name in ("top1", "images")} for split in ("val", "test")}
    write_json(words.runs / f"final-{words.seed}.json", found, quiet=True)


def run_final(words: argparse.Namespace, table: dict[str, Any]) -> None:
    """Rows of the seeds, in the table under "final"."""
    name = words.only or rank(table)[0][0]
    row = table["candidates"][name]
    steps = count_steps(60 * words.minutes - words.overhead, row["stages"], row["step_seconds"])
    computed = words.overhead + sum(n * one for n, one in zip(steps, row["step_seconds"], strict=True))
    print(f"{name}: {steps} steps of {row['step_seconds']} s, {row['stages']}")
    found = {"candidate": name, "minutes": words.minutes, "steps": steps, "computed_seconds": computed, "seeds": []}
    table.setdefault("final", []).append(found)
    seeds = list(range(words.first_seed, words.first_seed + words.seeds))
    running: dict[int, tuple[subprocess.Popen, float]] = {}
    while seeds or running:
        while seeds and len(running) < words.at_once:
            command = [sys.executable, "-m", "bench.sweep", *words.given, "--seed", str(seeds[0])]
            running[seeds.pop(0)] = subprocess.Popen(command), time.perf_counter()
        time.sleep(0.1)
        for seed, (process, started) in list(running.items()):
            if process.poll() is None:
                continue
            del running[seed]
            result = {"seed": seed, "seconds": time.perf_counter() - started, "code": process.returncode}
            file = words.runs / f"final-{seed}.json"
            result |= read_json(file) if file.exists() and not process.returncode else {}
            found["seeds"].append(result)
            table["machine"] = machine()
            write_json(words.table, table, quiet=True)
    show_final(found)


def show_final(found: Mapping[str, Any]) -> None:
    seeds = sorted(found["seeds"], key=lambda one: one["seed"])
    rows = [
        (one["seed"], f"{one['seconds']:.0f} s", *(f"{one[split]['top1']:.2%}" for split in ("val", "test")))
        for one in seeds
        if "test" in one
    ]
    show(f"{found['candidate']}: {found['minutes']:g} minutes", ("seed", "wall time", "held out", "test"), rows)
    scores = [100 * one["test"]["top1"] for one in seeds if "test" in one]
    if len(scores) > 1:
        print(f"test: mean {statistics.mean(scores):.2f} %, standard deviation {statistics.stdev(scores):.2f}")


def choose_candidates(given: str) -> dict[str, Stages]:
    """All, the first ones, or those of a file."""
    if not given or given.isdigit():
        return dict(list(CANDIDATES.items())[: int(given or len(CANDIDATES))])
    return read_json(Path(given))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--table", type=Path, required=True, help="JSON file of all results; continued if it exists")
    parser.add_argument("--data-root", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=Path, default=Path("runs/sweep"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the sweep; of each seed with --final")
    parser.add_argument("--seconds", type=float, default=25.0, help="device time of each candidate in the first round")
    parser.add_argument("--candidates", default="", help="number of candidates to take, or a JSON file")
    parser.add_argument("--at-once", type=int, default=0, help="runs at a time (default: 4; with --final 1)")
    parser.add_argument("--final", action="store_true", help="train the winner and read the test images")
    parser.add_argument("--only", default="", help="with --final: this candidate instead of the best")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--overhead", type=float, default=65.0, help="seconds of --minutes that are not training")
    parser.add_argument("--seed", type=int, default=-1, help=argparse.SUPPRESS)
    words = parser.parse_args(arguments)
    words.given = list(sys.argv[1:] if arguments is None else arguments)
    words.at_once = words.at_once or (1 if words.final else 4)
    table = read_json(words.table) if words.table.exists() else {"recipe": words.recipe, "candidates": {}}
    if table["recipe"] != words.recipe:
        parser.error(f"--table is of the recipe {table['recipe']}, not of {words.recipe}")
    if words.seed >= 0:
        final = table["candidates"][words.only or rank(table)[0][0]]
        seconds = 60 * words.minutes - words.overhead
        train_seed(words, final["stages"], count_steps(seconds, final["stages"], final["step_seconds"]))
    elif words.final:
        run_final(words, table)
    else:
        Sweep(words.recipe, choose_candidates(words.candidates), words, table, time.monotonic()).run()
        show_table(table)


if __name__ == "__main__":
    main()
