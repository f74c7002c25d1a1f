"""Runs a study: a published claim, the runs that test it, and a decision rule written before the runs.

    plainvit study list
    plainvit study positions --budget cpu          reproduced, not reproduced, or not decided

The arms of a study are runs that differ in one setting. Each arm is run with several seeds and compared on held-out
training images; test images are not used. An arm can start from the weights of another arm with the same seed. Results
are OUT/NAME/{table.md, figure.png, verdict.json}. Runs are stored in OUT/runs by the hashes of config and code: studies
share them, and a finished run is repeated only if the code changed.
"""

import hashlib
import inspect
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from matplotlib.figure import Figure

from plainvit.analyse.figures import save
from plainvit.config import Config
from plainvit.data.splits import open_splits
from plainvit.disk import make_folder, read_json, write_text
from plainvit.evaluate.grid import choose_best, warn_at_edge
from plainvit.evaluate.statistics import t_quantile
from plainvit.models import ResNet, ViT
from plainvit.runtime.folder import environment, finite, read_results, run_seconds
from plainvit.studies.page import explain_uncertainty
from plainvit.studies.runs import Workers, run_all, run_hash, run_name
from plainvit.weights import save as save_weights

Budget = Literal["cpu", "gpu"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)  # from the smallest
Outcome = Literal["reproduced", "not reproduced", "not decided"]
SEEDS = 3  # default seeds of each arm
PERCENT = {  # metrics in percent, with their table headings
    "top1": "held-out top-1, %",
    "few_shot": "5-shot top-1, %",
    "overfitting": "training - held-out top-1, points",
}
FEWEST = 3  # seeds needed for a decision


@dataclass(frozen=True)
class Arm:
    """One kind of run. `x` is its position on the x axis of the figure, `group` its curve."""

    config: Config
    x: float = math.nan
    group: str = ""
    after: str = ""  # the arm whose weights it starts from
    counts: bool = True  # False: only a start for other arms, not compared
    trained: bool = True  # False: measured from its config, without a run
    # Makes the initial weights from the folder of `after` and the config, such as with new positions
    edit: Callable[[Path, Config], ViT | ResNet] | None = None


@dataclass(frozen=True)
class Study:
    """A claim and its test."""

    name: str
    claim: str  # one sentence
    source: str  # paper, section, table
    rule: str  # what counts as reproduced
    arms: Callable[[Budget], dict[str, Arm]]
    decide: Callable[["Results"], "Verdict"]
    draw: Callable[["Results"], Figure]
    # Metrics of a run from its config and folder
    measure: Callable[[Config, Path], dict[str, float]] = field(default=lambda config, folder: held_out(config, folder))
    number: int = 0  # of the claim on the page of all studies
    paper: str = ""  # the paper's numbers
    metric: str = "top1"  # shown in the table
    given: str = ""  # FILE.py:STUDY of a user's own study


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    why: str  # with numbers


@dataclass(frozen=True)
class Results:
    """The results of a study: metrics of each arm and seed."""

    arms: dict[str, Arm]
    values: dict[str, list[dict[str, float]]]
    metric: str = "top1"

    def of(self, arm: str, metric: str = "") -> list[float]:
        """The metric of each seed of an arm."""
        return [values[metric or self.metric] for values in self.values[arm]]

    def mean(self, arm: str, metric: str = "") -> float:
        return statistics.fmean(self.of(arm, metric))

    def differences(self, first: str, second: str) -> list[float]:
        """second - first for each seed."""
        return [b - a for a, b in zip(self.of(first), self.of(second), strict=True)]

    def group(self, name: str) -> list[str]:
        """The arms of a curve, sorted by x."""
        return sorted((arm for arm, one in self.arms.items() if one.group == name), key=lambda arm: self.arms[arm].x)


def best_rate(found: Results, arms: Sequence[str]) -> str:
    """The arm with the best mean among arms that differ in learning rate."""
    by_rate = {found.arms[name].config.optim.lr: name for name in arms}
    return by_rate[choose_best({rate: found.mean(name) for rate, name in by_rate.items()})]


def warn_if_rate_at_edge(found: Results, best: str, arms: Sequence[str]) -> bool:
    """Whether the best rate is the lowest or highest one; logs a warning if so."""
    rates = [found.arms[name].config.optim.lr for name in arms]
    return warn_at_edge(found.arms[best].config.optim.lr, rates, f"{best}: lr", "add more rates to the study")


def held_out(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """Final metrics on held-out training images."""
    val = read_results(folder).get("val", {})
    return {name: val[name] for name in ("top1", "nll", "loss") if name in val}


# Statistics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Mean difference b - a of two arms, paired by seed, with its standard error."""

    mean: float
    error: float
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 if the difference is more than two standard errors from 0, else 0; 0 with too few seeds."""
        return 0 if self.seeds < FEWEST or abs(self.mean) <= 2 * self.error else int(math.copysign(1, self.mean))

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % confidence interval; wider than two standard errors for few seeds."""
        half = t_quantile(self.seeds - 1) * self.error if self.seeds > 1 else math.inf
        return self.mean - half, self.mean + half

    def describe(self, unit: str = "", *, scale: float = 1.0, digits: int = 2, limit: float | None = None) -> str:
        """Mean, standard error and interval; with `limit`, of limit + difference."""
        sign, start = ("+", 0.0) if limit is None else ("", limit)
        mean, low, high = (f"{scale * (start + one):{sign}.{digits}f}" for one in (self.mean, *self.interval))
        if self.seeds < 2:
            return f"{mean}{unit} of one seed"
        return f"{mean} ± {scale * self.error:.{digits}f}{unit} [95 % {low} to {high}]"

    def __str__(self) -> str:
        return self.describe(" points", scale=100)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Paired by seed: runs of one seed share their data order."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return Difference(statistics.fmean(differences), error, len(differences))


def check_non_inferior(found: Difference, margin: float) -> int:
    """1 if two standard errors rule out that b is worse by more than the margin, -1 if b is, 0 if undecided."""
    if found.seeds >= FEWEST and found.mean - 2 * found.error > -margin:
        return 1
    return -1 if found.sign < 0 and found.mean <= -margin else 0


def check_no_worse(found: Difference, margin: float = 0.01) -> int:
    """As `check_non_inferior`, but -1 if b is worse by more than two standard errors."""
    return -1 if found.sign < 0 else check_non_inferior(found, margin)


def check_equivalent(found: Difference, margin: float = 0.01) -> int:
    """As `check_non_inferior`, for a difference in either direction."""
    return min(check_non_inferior(found, margin), check_non_inferior(replace(found, mean=-found.mean), margin))


def decide_by_signs(signs: Sequence[int], why: str) -> Verdict:
    """Reproduced if all signs are positive, not reproduced if any is negative, otherwise not decided."""
    if any(sign < 0 for sign in signs):
        return Verdict("not reproduced", why)
    return Verdict("reproduced" if all(sign > 0 for sign in signs) else "not decided", why)


# Running --------------------------------------------------------------------------------------------------------------


class NoDeviceError(ValueError):
    exit_code = 5


def run_study(
    study: Study,
    budget: Budget,
    out: Path,
    workers: Workers,
    *,
    seeds: int = 0,
    data_root: str = "",
    quiet: bool = False,
) -> Verdict:
    """Runs what is missing, measures, decides, and writes the folder of the study."""
    if budget != "cpu" and not torch.cuda.is_available():
        raise NoDeviceError(f"--budget {budget} needs a CUDA GPU and none was found: use --budget cpu")
    started, seeds = time.monotonic(), seeds or SEEDS
    arms = {
        name: replace(arm, config=arm.config.replace(data_root=data_root)) for name, arm in study.arms(budget).items()
    }
    _check_definition(study, budget, arms, out / study.name)
    _check_data(arms)
    configs = run_arms(arms, out / "runs", seeds, workers, quiet)
    values = {
        arm: [study.measure(config, out / "runs" / run_name(config)) for config in configs[arm]]
        for arm in arms
        if arms[arm].counts
    }
    found = Results({arm: arms[arm] for arm in values}, values, study.metric)
    verdict = study.decide(found)
    run_info = {
        "seconds": round(time.monotonic() - started, 1),
        "runs": summarize_runs([config for arm in arms if arms[arm].trained for config in configs[arm]], out / "runs"),
        "folders": {arm: [f"runs/{run_name(config)}" for config in configs[arm]] for arm in arms if arms[arm].trained},
        "command": f"plainvit study {study.given or study.name} --budget {budget}"
        + f" --seeds {seeds}" * (seeds != SEEDS)
        + " --data-root DIR" * bool(data_root),
    }
    _write(study, budget, out / study.name, found, verdict, run_info)
    return verdict


def run_arms(arms: Mapping[str, Arm], runs: Path, seeds: int, workers: Workers, quiet: bool) -> dict[str, list[Config]]:
    """Runs all arms and seeds, each after the arm it starts from; returns their configs."""
    configs: dict[str, list[Config]] = {}
    for stage in order_stages(arms):
        for arm in stage:
            configs[arm] = [_seed_config(arms[arm], seed, configs, runs) for seed in range(seeds)]
        pending = {
            f"{arm}, seed {seed}": configs[arm][seed] for arm in stage for seed in range(seeds) if arms[arm].trained
        }
        run_all(pending, runs, workers, quiet=quiet)
    return configs


def summarize_runs(configs: Sequence[Config], runs: Path) -> dict[str, Any]:
    """Number, time, commits and devices of the runs, which may be older than the verdict."""
    folders = [runs / name for name in sorted({run_name(config) for config in configs})]
    environments = [read_json(folder / "environment.json") for folder in folders]
    return {
        "count": len(environments),
        "seconds": round(sum(map(run_seconds, folders)), 1),
        "commits": sorted({str(one.get("commit")) for one in environments}),
        "devices": sorted({str(one.get("device")) for one in environments}),
    }


def _seed_config(arm: Arm, seed: int, configs: Mapping[str, list[Config]], runs: Path) -> Config:
    config = arm.config.replace(seed=seed)
    if not arm.after:
        return config
    before = runs / run_name(configs[arm.after][seed])
    return config.replace(init=str(_edit_weights(arm, config, before) if arm.edit else before))


def _edit_weights(arm: Arm, config: Config, before: Path) -> Path:
    """The folder of the edited initial weights of an arm; made once."""
    assert arm.edit
    code = hashlib.sha256(Path(inspect.getfile(arm.edit)).read_bytes()).hexdigest()[:8]
    folder = before.with_name(f"{before.name}-{arm.edit.__name__}-{code}-{run_hash(config)}")
    if not (folder / "model.safetensors").is_file():
        make_folder(folder)
        save_weights(arm.edit(before, config), folder / "model.safetensors")
    return folder


def order_stages(arms: Mapping[str, Arm]) -> list[list[str]]:
    """Arms in stages; each comes after the arm it starts from."""
    done: list[str] = []
    ordered: list[list[str]] = []
    while len(done) < len(arms):
        ready = [arm for arm, one in arms.items() if arm not in done and (not one.after or one.after in done)]
        assert ready, "`after` of the arms is circular or names an unknown arm"
        ordered.append(ready)
        done += ready
    return ordered


def hash_definition(arms: Mapping[str, Arm]) -> str:
    """A hash of everything that affects the runs."""
    record = {
        name: [run_hash(arm.config), arm.after, arm.trained, *([arm.edit.__name__] if arm.edit else [])]
        for name, arm in arms.items()
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _check_definition(study: Study, budget: Budget, arms: Mapping[str, Arm], folder: Path) -> None:
    file = folder / "verdict.json"
    stored = read_json(file) if file.is_file() else {}
    if stored.get("budget") in BUDGETS[BUDGETS.index(budget) + 1 :]:
        raise ValueError(f"{folder} has a verdict for --budget {stored['budget']}, not {budget}: choose another --out")
    if stored.get("budget") == budget and stored.get("definition") != hash_definition(arms):
        raise ValueError(f"the arms of {study.name} have changed since the verdict in {folder}: choose another --out")


def _check_data(arms: Mapping[str, Arm]) -> None:
    """Fails before the first run if data is missing."""
    for config in {arm.config.data: arm.config for arm in arms.values() if arm.trained}.values():
        open_splits(config)


# Writing --------------------------------------------------------------------------------------------------------------


def _write(
    study: Study, budget: Budget, folder: Path, found: Results, verdict: Verdict, run_info: Mapping[str, Any]
) -> None:
    machine = environment("cpu" if budget == "cpu" else "cuda")
    record = {
        "study": study.name,
        "number": study.number,
        "claim": study.claim,
        "source": study.source,
        "paper": study.paper,
        "rule": study.rule,
        "budget": budget,
        "outcome": verdict.outcome,
        "why": verdict.why,
        "seeds": max(map(len, found.values.values())),
        "definition": hash_definition(study.arms(budget)),
        "metric": study.metric,
        "values": found.values,
        **run_info,
        "environment": {name: machine[name] for name in ("plainvit", "commit", "python", "torch", "device")},
    }
    make_folder(folder)
    write_text(folder / "verdict.json", json.dumps(finite(record), indent=1) + "\n")
    write_text(folder / "table.md", table(study, found, verdict))
    save(study.draw(found), folder / "figure.png")


def decide_again(study: Study, folder: Path) -> Verdict:
    """Applies the current rule to the stored values of a verdict; the rule before the runs is kept with it."""
    record = read_json(folder / "verdict.json")
    arms = study.arms(record["budget"])
    if record["definition"] != hash_definition(arms):
        raise ValueError(f"the arms of {study.name} have changed since the verdict in {folder}: run the study again")
    values = {arm: [_restore_nan(row) for row in rows] for arm, rows in record["values"].items()}
    found = Results({arm: arms[arm] for arm in values}, values, study.metric)
    verdict = study.decide(found)
    if record["rule"] != study.rule:
        record.setdefault("before", {"rule": record["rule"], "outcome": record["outcome"]})
    record |= {name: getattr(study, name) for name in ("claim", "source", "paper", "rule")}
    record |= {"outcome": verdict.outcome, "why": verdict.why}
    write_text(folder / "verdict.json", json.dumps(record, indent=1) + "\n")
    write_text(folder / "table.md", table(study, found, verdict))
    return verdict


def _restore_nan(row: Mapping[str, Any]) -> dict[str, float]:
    """JSON stores NaN and Inf as null."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def table(study: Study, found: Results, verdict: Verdict) -> str:
    """Markdown: the claim, a row for each arm, the rule and the verdict."""
    rows = [f"| {arm} | {_cell(found, arm)} | {len(found.values[arm])} |" for arm in found.values]
    return "\n".join(
        [
            f"# {study.claim}",
            "",
            f"{study.source}. {study.paper}".strip(),
            "",
            f"| arm | {PERCENT.get(study.metric, study.metric)} | seeds |",
            "|---|---|---|",
            *rows,
            "",
            f"Rule: {study.rule}",
            "",
            f"**{verdict.outcome}**: {verdict.why}",
            "",
            explain_uncertainty({len(rows) for rows in found.values.values()}),
            "",
        ]
    )


def _cell(found: Results, arm: str) -> str:
    scale = 100 if found.metric in PERCENT else 1
    values = [scale * value for value in found.of(arm)]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
