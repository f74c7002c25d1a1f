"""Closed-form few-shot classification at ImageNet's size: 50,000 x 768 features, 1,000 classes.

    python -m bench.probe [--json FILE] [--repeats 3]

Compares `plainvit.evaluate.probe.solve` with scikit-learn's Ridge (Cholesky, float64), both with one l2: time, peak
memory and predictions of 50,000 test images. Each measurement is a process of its own, because of the peak memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.measure import make_parser, report, summarize
from plainvit.evaluate import probe

COUNT, WIDTH, CLASSES = 50_000, 768, 1_000
THREADS = 2


def make_features(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy clusters in correlated features, and labels."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (COUNT,), generator=generator)
    features = torch.randn(COUNT, WIDTH, generator=generator).mul_(4)
    for part, part_labels in zip(features.split(probe.ROWS), labels.split(probe.ROWS), strict=True):
        part.add_(centres[part_labels])
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
    scale = torch.arange(1, WIDTH + 1) ** -1.0  # a decaying spectrum, as that of real features
    return (features * scale) @ rotation, labels


def predict_with_solve(train: tuple[Any, Any], test: tuple[Any, Any]) -> torch.Tensor:
    return probe.solve(*train, CLASSES).predict(test[0])


def predict_with_ridge(train: tuple[Any, Any], test: tuple[Any, Any]) -> torch.Tensor:
    """The same problem in scikit-learn, with the bias as a constant feature as in big_vision."""
    from sklearn.linear_model import Ridge

    x, y = train[0].double().numpy(), -np.ones((COUNT, CLASSES))
    y[np.arange(COUNT), train[1].numpy()] = 1
    mean, std = x.mean(0), x.std(0) + probe.STD_EPS
    ridge = Ridge(alpha=probe.L2, fit_intercept=False, solver="cholesky")
    ridge.fit(np.c_[(x - mean) / std, np.full(COUNT, probe.BIAS)], y)
    del x, y
    test_features = np.c_[(test[0].double().numpy() - mean) / std, np.full(COUNT, probe.BIAS)]
    return torch.from_numpy(ridge.predict(test_features).argmax(1))


METHODS = {"solve": predict_with_solve, "ridge": predict_with_ridge}


def measure_method(name: str) -> dict[str, Any]:
    """Seconds without making the features, and peak memory of this process."""
    train, test = make_features(1), make_features(2)
    started, cpu_started = time.perf_counter(), time.process_time()
    predictions = METHODS[name](train, test)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    top1 = float((predictions == test[1]).double().mean())
    checksum = int((predictions * torch.arange(1, COUNT + 1)).sum())
    return {"seconds": seconds, "cpu": cpu, "gib": peak, "top1": top1, "checksum": checksum}


def run_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.probe", "--method", name]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # waiting threads use no CPU time
    child = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(child.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)  # in the process of a measurement
    args = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    if args.method:
        print(json.dumps(measure_method(args.method)))
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for number in range(args.repeats):  # in turns, so that other load affects both
        for name, results in runs.items():
            results.append(run_process(name))
            print(f"  round {number + 1}/{args.repeats}  {name}: {results[-1]['seconds']:.2f} s", file=sys.stderr)
    is_equal = len({run["checksum"] for results in runs.values() for run in results}) == 1
    remarks = {
        "solve": "target 10 s and 3 GiB",
        "ridge": f"scikit-learn; predictions {'equal' if is_equal else 'DIFFER'}",
    }
    rows = []
    for name, results in runs.items():
        texts = remarks[name], "of all threads", f"top-1 {results[0]['top1']:.4f}"
        for key, unit, remark in zip(("seconds", "cpu", "gib"), ("s", "CPU s", "GiB, peak"), texts, strict=True):
            rows.append({"name": name, "unit": unit, "remark": remark, **summarize([run[key] for run in results])})
    title = f"few-shot, {COUNT:,} x {WIDTH}, {CLASSES:,} classes, {THREADS} threads"
    report("bench.probe", arguments, args.json, title, rows)


if __name__ == "__main__":
    main()
