"""Compares settings of a recipe at equal device time, with early stopping, and trains the winner with several seeds.

    python -m bench.sweep cifar10 --data-root DIR --table sweep.json --minutes 8
    python -m bench.sweep cifar10 --data-root DIR --table sweep.json --final --seeds 3 --minutes 4

A candidate has settings that replace those of the recipe (CANDIDATES, the most promising first). Each has a
process. All are compiled at once, then the steps of each are timed while the others wait, and each is trained for as
many steps as fit into --seconds of the device. The best third, by accuracy on held-out training images, is trained
again from the start for three times as long, and so on. Test images are not read.

The table is written after every result. The same command continues from it, on another machine, too, if its device
has the same name. A round that does not fit into --minutes is left to the next call.

--final trains the best candidate of the longest round in a new process per seed, for as many steps as fit into
--minutes less --overhead for start, compilation, validation, test and report, and reads the test images once, at the
end.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bench.measure import describe_machine, make_parser, print_table, write_json
from bench.trials import Trial, configure, count_steps, train
from plainvit.disk import read_json

FACTOR = 3  # each round keeps a third of the candidates and trains them three times as long
HOLDOUT = 0.1  # fraction of the training images on which candidates are compared

LARGE_BATCH = {"batch": 1024, "optim.lr": 4e-3, "model.init": "timm"}
# 4/3 of the FLOPs at equal speed
WIDE = {"model.width": 384, "model.depth": 6, "model.heads": 6, "model.mlp_dim": 1536}
LINEAR = {"optim.schedule": "linear"}
CANDIDATES: dict[str, dict[str, Any]] = {
    "large batch": LARGE_BATCH,
    "wide": LARGE_BATCH | WIDE,
    "wide, linear decay": LARGE_BATCH | WIDE | LINEAR,
    "linear decay": LARGE_BATCH | LINEAR,
    "smoothing": LARGE_BATCH | {"augment.smoothing": 0.1},
    "wide, higher rate": LARGE_BATCH | WIDE | {"optim.lr": 6e-3},
    "wide, batch 2048": LARGE_BATCH | WIDE | {"batch": 2048, "optim.lr": 6e-3},
    "CutMix alone": LARGE_BATCH | {"augment.mixup": 0.0},
    "stochastic depth 0.2": LARGE_BATCH | {"model.stochastic_depth": 0.2},
    "fixed positions": LARGE_BATCH | {"model.posemb": "sincos2d"},
    "longer average": LARGE_BATCH | LINEAR | {"optim.lr_end": 4e-4, "ema_window": 0.15},
    "no cooldown": LARGE_BATCH | {"optim.schedule": "constant", "optim.cooldown": 0.3},
    "recipe": {},
}


# Rounds ---------------------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """The rounds. The table has for each candidate its settings, seconds per step, and results by training seconds."""

    candidates: Mapping[str, dict[str, Any]]
    args: argparse.Namespace
    table: dict[str, Any]
    deadline: float  # time.monotonic()

    def run(self) -> None:
        names, seconds = list(self.candidates), self.args.seconds
        trials: dict[str, Trial] = {}
        for row in self.table["candidates"].values():
            row.pop("error", None)  # try again
        try:
            while names:
                pending = [name for name in names if make_key(seconds) not in self.get_row(name)["results"]]
                pending = [name for name in pending if not self.get_row(name).get("error")]
                self.start_trials(trials, pending)
                if not self.train_round(trials, pending, seconds):
                    return
                names = self.rank_round(names, seconds)
                names, seconds = names[: math.ceil(len(names) / FACTOR)], FACTOR * seconds
                if len(names) == 1:  # the winner
                    return
        finally:
            for trial in trials.values():
                trial.end()

    def remaining_seconds(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def get_row(self, name: str) -> dict[str, Any]:
        settings = self.candidates[name]
        row = self.table["candidates"].setdefault(name, {"settings": settings, "results": {}})
        if row["settings"] != settings:
            raise SystemExit(f"--table has other settings of {name!r}: use another file")
        return row

    def start_trials(self, trials: dict[str, Trial], names: Sequence[str]) -> None:
        """Starts the processes, compiles all candidates at once, and times one after the other."""
        new = [name for name in names if name not in trials]
        threads = max((os.cpu_count() or 1) // max(len(new), 1), 1)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        for name in new:
            config = configure(self.args.recipe, self.candidates[name], self.args.data_root, self.args.device)
            trials[name] = Trial(config.replace(holdout=HOLDOUT), threads)
        untimed = [name for name in new if not self.get_row(name).get("step_seconds")]
        for name in untimed:
            trials[name].send("compile")
        for name in untimed:
            self.receive(name, trials[name])
        for name in untimed:
            if self.get_row(name).get("error"):
                continue
            trials[name].send("time")
            seconds = self.get_row(name)["step_seconds"] = self.receive(name, trials[name])
            print(f"  {name}: {1000 * (seconds or 0):.2f} ms per step", file=sys.stderr)
        write_table(self.args, self.table)

    def receive(self, name: str, trial: Trial) -> Any:
        """The result of a request; None if it is an error, which is kept in the table."""
        result = trial.receive()
        if not isinstance(result, str):
            return result
        self.get_row(name)["error"] = result
        print(f"  {name}: {result}", file=sys.stderr)
        return None

    def train_round(self, trials: Mapping[str, Trial], names: Sequence[str], seconds: float) -> bool:
        """Trains the candidates, --at-once at a time. False if the time is over before all are done."""
        waiting = [name for name in names if not self.get_row(name).get("error")]
        running: dict[Connection, str] = {}
        if waiting and seconds * len(waiting) > self.remaining_seconds():
            remaining = self.remaining_seconds()
            print(
                f"stopped: {len(waiting)} x {seconds:g} s do not fit into the remaining {remaining:.0f} s (--minutes)"
            )
            return False
        while waiting or running:
            while waiting and len(running) < self.args.at_once:
                name = waiting.pop(0)
                steps = count_steps(seconds, self.get_row(name)["step_seconds"])
                out = self.args.runs / f"{name.replace(' ', '-').replace(',', '')}-{make_key(seconds)}"
                trials[name].send("train", steps, str(out))
                running[trials[name].connection] = name
            ready = wait(list(running), timeout=self.remaining_seconds())
            if not ready:
                print(f"stopped after {self.args.minutes:g} minutes: {', '.join(running.values())} not finished")
                return False
            for connection in ready:
                name = running.pop(connection)  # pyright: ignore[reportArgumentType]
                result = self.receive(name, trials[name])
                if result:
                    self.get_row(name)["results"][make_key(seconds)] = result
                    print(f"  {name}, {seconds:g} s: {result['top1']:.2%}", file=sys.stderr, flush=True)
                write_table(self.args, self.table)
        return True

    def rank_round(self, names: Sequence[str], seconds: float) -> list[str]:
        """The candidates with a result, the best first."""
        results = {name: self.get_row(name)["results"].get(make_key(seconds)) for name in names}
        top1 = {name: result["top1"] for name, result in results.items() if result}
        return sorted(top1, key=lambda name: -top1[name])


def make_key(seconds: float) -> str:
    return f"{seconds:g}s"


def read_key(key: str) -> float:
    return float(key.removesuffix("s"))


def rank(table: Mapping[str, Any]) -> list[str]:
    """The candidates with results: longest training first, then highest accuracy."""
    scores: dict[str, tuple[float, float]] = {}
    for name, row in table["candidates"].items():
        if row["results"]:
            key = max(row["results"], key=read_key)
            scores[name] = (read_key(key), row["results"][key]["top1"])
    return sorted(scores, key=lambda name: scores[name], reverse=True)


def write_table(args: argparse.Namespace, table: dict[str, Any]) -> None:
    table["machine"] = describe_machine()
    write_json(args.table, table, quiet=True)


def print_results(table: Mapping[str, Any]) -> None:
    keys = sorted({key for row in table["candidates"].values() for key in row["results"]}, key=read_key)
    order = rank(table)
    rows = []
    for name in [*order, *(name for name in table["candidates"] if name not in order)]:
        row = table["candidates"][name]
        times = f"{1000 * row['step_seconds']:.2f}" if row.get("step_seconds") else ""
        top1 = [f"{row['results'][key]['top1']:.2%}" if key in row["results"] else "" for key in keys]
        rows.append((name, times, *top1, row.get("error", "")))
    columns = ("candidate", "ms per step", *(f"{key} of the device" for key in keys), "error")
    print_table(f"{table['recipe']}: top-1 on held-out images", columns, rows, left=("candidate", "error"))


# Winner ---------------------------------------------------------------------------------------------------------------


def train_seed(args: argparse.Namespace, settings: dict[str, Any], steps: int, seed: int) -> None:
    """Runs in its own process; writes the results to a file."""
    config = configure(args.recipe, settings, args.data_root, args.device).replace(seed=seed)
    results = train(config, steps, args.runs / f"final-{seed}", test=True)
    results = {split: {name: results[split][name] for name in ("top1", "images")} for split in ("val", "test")}
    write_json(args.runs / f"final-{seed}.json", results, quiet=True)


def train_winner(args: argparse.Namespace, table: dict[str, Any]) -> None:
    """Trains the seeds one after the other; their results are kept in the table under "final"."""
    name = rank(table)[0]
    settings, step_seconds = table["candidates"][name]["settings"], table["candidates"][name]["step_seconds"]
    steps = count_steps(60 * args.minutes - args.overhead, step_seconds)
    print(f"{name}: {steps} steps of {step_seconds} s, {settings}")
    final = {"candidate": name, "minutes": args.minutes, "steps": steps, "seeds": []}
    table.setdefault("final", []).append(final)
    for seed in range(args.seeds):
        started = time.perf_counter()
        process = multiprocessing.get_context("spawn").Process(target=train_seed, args=(args, settings, steps, seed))
        process.start()
        process.join()
        result = {"seed": seed, "seconds": time.perf_counter() - started, "exit_code": process.exitcode}
        if process.exitcode == 0:
            result |= read_json(args.runs / f"final-{seed}.json")
        final["seeds"].append(result)
        write_table(args, table)
    print_final(final)


def print_final(final: Mapping[str, Any]) -> None:
    results = [result for result in final["seeds"] if "test" in result]
    rows = [
        (r["seed"], f"{r['seconds']:.0f} s", f"{r['val']['top1']:.2%}", f"{r['test']['top1']:.2%}") for r in results
    ]
    print_table(f"{final['candidate']}: {final['minutes']:g} minutes", ("seed", "time", "held out", "test"), rows)
    top1 = [100 * result["test"]["top1"] for result in results]
    if len(top1) > 1:
        print(f"test: mean {statistics.mean(top1):.2f} %, standard deviation {statistics.stdev(top1):.2f}")


def select_candidates(argument: str) -> dict[str, dict[str, Any]]:
    """All candidates, the first ones, or those of a file."""
    if not argument or argument.isdigit():
        return dict(list(CANDIDATES.items())[: int(argument or len(CANDIDATES))])
    return read_json(Path(argument))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--table", type=Path, required=True, help="JSON file of all results; continued if it exists")
    parser.add_argument("--data-root", default="", help="Folder of known datasets")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=Path, default=Path("runs/sweep"), help="Folder of the runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="Time limit; with --final, of each seed")
    parser.add_argument("--seconds", type=float, default=25.0, help="Device time of each candidate in the first round")
    parser.add_argument("--candidates", default="", help="Number of candidates, or a JSON file; default: all")
    parser.add_argument("--at-once", type=int, default=4, help="Candidates that are trained at a time")
    parser.add_argument("--final", action="store_true", help="Train the winner and read the test images")
    parser.add_argument("--seeds", type=int, default=3, help="Number of seeds with --final")
    parser.add_argument("--overhead", type=float, default=65.0, help="Seconds of --minutes that are not training")
    args = parser.parse_args(arguments)
    table = read_json(args.table) if args.table.exists() else {"recipe": args.recipe, "candidates": {}}
    if table["recipe"] != args.recipe:
        parser.error(f"--table is of the recipe {table['recipe']}, not of {args.recipe}")
    if not args.final:
        Sweep(select_candidates(args.candidates), args, table, time.monotonic() + 60 * args.minutes).run()
        print_results(table)
    elif rank(table):
        train_winner(args, table)
    else:
        parser.error("--final needs a table with results: run the command without --final first")


if __name__ == "__main__":
    main()
