"""Closed-form few-shot at ImageNet's size: 50,000 x 768 features, 1,000 classes, seconds and peak memory.

    python -m bench.probe [--json FILE] [--repeats 3] [--threads 2]

Each measurement is a process of its own, so that its peak memory is its own too. `solve` learns from 50,000 images and
names the classes of 50,000 others with one l2. scikit-learn's Ridge (Cholesky, float64, one l2) is measured with it,
and its predictions are compared.
"""

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.measure import make_parser, report, summary
from plainvit.evaluate import probe

COUNT, WIDTH, CLASSES = 50_000, 768, 1_000


def planted(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy clusters in correlated features."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (COUNT,), generator=generator)
    features = torch.randn(COUNT, WIDTH, generator=generator).mul_(4)
    for part, part_labels in zip(features.split(probe.ROWS), labels.split(probe.ROWS), strict=True):
        part.add_(centres[part_labels])
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
    scale = torch.arange(1, WIDTH + 1) ** -1.0  # a spectrum that decays, as that of real features
    return (features * scale) @ turn, labels


def solve(train: tuple[Any, Any], test: tuple[Any, Any]) -> torch.Tensor:
    return probe.solve(*train, CLASSES).predict(test[0])


def ridge(train: tuple[Any, Any], test: tuple[Any, Any]) -> torch.Tensor:
    """The same problem by scikit-learn; the constant feature is a column as in big_vision."""
    from sklearn.linear_model import Ridge

    x, y = train[0].double().numpy(), -np.ones((COUNT, CLASSES))
    y[np.arange(COUNT), train[1].numpy()] = 1
    mean, std = x.mean(0), x.std(0) + probe.STD_EPS
    fitted = Ridge(alpha=probe.L2, fit_intercept=False, solver="cholesky")
    fitted.fit(np.c_[(x - mean) / std, np.full(COUNT, probe.BIAS)], y)
    del x, y
    others = np.c_[(test[0].double().numpy() - mean) / std, np.full(COUNT, probe.BIAS)]
    return torch.from_numpy(fitted.predict(others).argmax(1))


RUNS = {"solve": solve, "ridge": ridge}


def measured(name: str) -> dict[str, Any]:
    """In a child: seconds without making the features, and the whole process's peak memory."""
    train, test = planted(1), planted(2)
    start, busy = time.perf_counter(), time.process_time()
    predictions = RUNS[name](train, test)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    top1 = float((predictions == test[1]).double().mean())
    digest = int((predictions * torch.arange(1, COUNT + 1)).sum())
    return {"seconds": seconds, "cpu": busy, "gib": peak, "top1": top1, "digest": digest}


def in_child(name: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.probe", "--only", name, "--threads", str(threads)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait are not counted as busy
    child = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(child.stdout)


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=RUNS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.only:
        print(json.dumps(measured(given.only)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for number in range(given.repeats):  # interleaved, so that a busy machine is busy for all
        for name, runs in found.items():
            runs.append(in_child(name, given.threads))
            print(f"  round {number + 1}/{given.repeats}  {name}: {runs[-1]['seconds']:.2f} s", file=sys.stderr)
    same = len({run["digest"] for runs in found.values() for run in runs}) == 1
    remarks = {
        "solve": "at most 10 s and 3 GiB",
        "ridge": f"scikit-learn, one l2; predictions {'equal' if same else 'DIFFER'}",
    }
    rows = []
    for name, runs in found.items():
        texts = remarks[name], "of all threads: what a busy machine does not change", f"top-1 {runs[0]['top1']:.4f}"
        for key, unit, remark in zip(("seconds", "cpu", "gib"), ("s", "CPU s", "GiB at most"), texts, strict=True):
            rows.append({"what": name, "unit": unit, "remark": remark, **summary([run[key] for run in runs])})
    title = f"few-shot, {COUNT:,} x {WIDTH}, {CLASSES:,} classes, {given.threads} threads"
    report("bench.probe", title, rows, given.json)


if __name__ == "__main__":
    main()
