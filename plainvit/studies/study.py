"""A claim, the runs that test it, and a rule that decides, written before they are run.

    plainvit study list
    plainvit study positions --budget cpu          reproduced, not reproduced, or not decided

Its arms are runs that differ in one thing; each is run with several seeds and compared on held-out training images, so
that test images are not read at all. An arm may begin from the weights of another of the same seed. Results go into
OUT/NAME/{table.md, figure.png, verdict.json}; runs lie in OUT/runs by the hashes of their config and of the code, so
that studies share them, and a finished one is run again only if the code changed. A study whose definition changed
since its verdict refuses to mix the two.
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
from plainvit.evaluate import chance
from plainvit.evaluate.grid import choose_best, warn_at_edge
from plainvit.models import ResNet, ViT
from plainvit.runtime.folder import environment, finite, read_results, run_seconds
from plainvit.studies.page import plus_minus
from plainvit.studies.runs import Workers, run_all, run_hash, run_name
from plainvit.weights import save as save_weights

Budget = Literal["cpu", "gpu"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)  # from the smallest
Outcome = Literal["reproduced", "not reproduced", "not decided"]
SEEDS = 3  # of each arm, where none are given
PERCENT = {  # measures that are shares, and their names in a table
    "top1": "held-out top-1, %",
    "few_shot": "5-shot top-1, %",
    "overfitting": "training less held-out top-1, points",
}
FEWEST = 3  # seeds below which a difference decides nothing


@dataclass(frozen=True)
class Arm:
    """One kind of run. `x` is its place on the figure's axis, `group` the curve that it belongs to."""

    config: Config
    x: float = math.nan
    group: str = ""
    after: str = ""  # the arm whose weights it begins from
    counts: bool = True  # whether it is compared, or only begun from
    trained: bool = True  # or measured without a run, by its config alone
    # Makes the weights that it begins from, of the folder of `after` and its own config: a part drawn anew
    edit: Callable[[Path, Config], ViT | ResNet] | None = None


@dataclass(frozen=True)
class Study:
    """A claim and how it is tested."""

    name: str
    claim: str  # in one sentence
    source: str  # where it is made
    rule: str  # what counts as reproduced, in words
    arms: Callable[[Budget], dict[str, Arm]]
    decide: Callable[["Found"], "Verdict"]
    draw: Callable[["Found"], Figure]
    # From a run's config and folder: what is measured of it, by name
    measure: Callable[[Config, Path], dict[str, float]] = field(default=lambda config, folder: held_out(config, folder))
    number: int = 0  # of the claim in the list that the page follows
    paper: str = ""  # what the paper found, in numbers
    metric: str = "top1"  # the one in the table
    given: str = ""  # FILE.py:STUDY, where it is one of the user's


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    why: str  # with the numbers it rests on


@dataclass(frozen=True)
class Found:
    """What came out: for each arm and seed the measurements, by name."""

    arms: dict[str, Arm]
    values: dict[str, list[dict[str, float]]]
    metric: str = "top1"

    def of(self, arm: str, metric: str = "") -> list[float]:
        return [one[metric or self.metric] for one in self.values[arm]]

    def mean(self, arm: str, metric: str = "") -> float:
        return statistics.fmean(self.of(arm, metric))

    def group(self, name: str) -> list[str]:
        """The arms of a curve, along its axis."""
        return sorted((arm for arm, one in self.arms.items() if one.group == name), key=lambda arm: self.arms[arm].x)


def best_rate(found: Found, arms: Sequence[str]) -> str:
    """Of arms that differ in the learning rate, the one with the best mean."""
    by_rate = {found.arms[name].config.optim.lr: name for name in arms}
    return by_rate[choose_best({rate: found.mean(name) for rate, name in by_rate.items()})]


def warn_of_rate(found: Found, best: str, arms: Sequence[str]) -> bool:
    """Whether the best of these arms has the lowest or the highest of their rates, which a line then says."""
    rates = [found.arms[name].config.optim.lr for name in arms]
    return warn_at_edge(found.arms[best].config.optim.lr, rates, f"{best}: lr", "give the study more rates")


def held_out(config: Config, folder: Path) -> dict[str, float]:  # noqa: ARG001
    """The last numbers on held-out training images, as shares; never the test set's."""
    val = read_results(folder).get("val", {})
    return {name: val[name] for name in ("top1", "nll", "loss") if name in val}


# Differences ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """The mean difference b - a of two arms, paired by seed, and its standard error."""

    mean: float
    error: float
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 where the difference is more than two standard errors from 0; with too few seeds always 0."""
        return 0 if self.seeds < FEWEST or abs(self.mean) <= 2 * self.error else int(math.copysign(1, self.mean))

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 %, which is wider than two standard errors where seeds are few."""
        half = chance.t_quantile(self.seeds - 1) * self.error if self.seeds > 1 else math.inf
        return self.mean - half, self.mean + half

    def told(self, unit: str = "", *, scale: float = 1.0, digits: int = 2, limit: float | None = None) -> str:
        """With its standard error and interval; where it is the distance from a limit, the value that is so far."""
        sign, start = ("+", 0.0) if limit is None else ("", limit)
        mean, low, high = (f"{scale * (start + one):{sign}.{digits}f}" for one in (self.mean, *self.interval))
        if self.seeds < 2:
            return f"{mean}{unit} of one seed"
        return f"{mean} ± {scale * self.error:.{digits}f}{unit} [95 % {low} to {high}]"

    def __str__(self) -> str:
        return self.told(" points", scale=100)


def gap(a: Sequence[float], b: Sequence[float]) -> Gap:
    """Runs of one seed share their order of images, so seeds are pairs."""
    apart = [y - x for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
    return Gap(statistics.fmean(apart), error, len(apart))


def non_inferior(found: Gap, margin: float) -> int:
    """1 where two standard errors rule out a loss of b above the margin, -1 where there is such a loss, else 0."""
    if found.seeds >= FEWEST and found.mean - 2 * found.error > -margin:
        return 1
    return -1 if found.sign < 0 and found.mean <= -margin else 0


def no_worse(found: Gap, margin: float = 0.01) -> int:
    """The same, but -1 for any loss of more than two standard errors."""
    return -1 if found.sign < 0 else non_inferior(found, margin)


def alike(found: Gap, margin: float = 0.01) -> int:
    """The same for a difference in either direction."""
    return min(non_inferior(found, margin), non_inferior(replace(found, mean=-found.mean), margin))


def settle(signs: Sequence[int], why: str) -> Verdict:
    """Of several differences that the claim expects to be positive: all, any against it, or not clear."""
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
    """Makes what runs are missing, measures, decides, and writes the study's folder."""
    if budget != "cpu" and not torch.cuda.is_available():
        raise NoDeviceError(f"budget {budget} needs a CUDA GPU, and there is none: --budget cpu runs anywhere")
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
    found = Found({arm: arms[arm] for arm in values}, values, study.metric)
    verdict = study.decide(found)
    how = {
        "seconds": round(time.monotonic() - started, 1),
        "runs": spent_on([config for arm in arms if arms[arm].trained for config in configs[arm]], out / "runs"),
        "folders": {arm: [f"runs/{run_name(config)}" for config in configs[arm]] for arm in arms if arms[arm].trained},
        "command": f"plainvit study {study.given or study.name} --budget {budget}"
        + f" --seeds {seeds}" * (seeds != SEEDS)
        + " --data-root DIR" * bool(data_root),
    }
    _write(study, budget, out / study.name, found, verdict, how)
    return verdict


def run_arms(arms: Mapping[str, Arm], runs: Path, seeds: int, workers: Workers, quiet: bool) -> dict[str, list[Config]]:
    """The config of each arm and seed, all of them run, each after the one that it begins from."""
    configs: dict[str, list[Config]] = {}
    for stage in stages(arms):
        for arm in stage:
            configs[arm] = [_config(arms[arm], seed, configs, runs) for seed in range(seeds)]
        due = {f"{arm}, seed {seed}": configs[arm][seed] for arm in stage for seed in range(seeds) if arms[arm].trained}
        run_all(due, runs, workers, quiet=quiet)
    return configs


def spent_on(configs: Sequence[Config], runs: Path) -> dict[str, Any]:
    """What the runs took and were made with; they may be older than the verdict, and shared with other studies."""
    folders = [runs / name for name in sorted({run_name(config) for config in configs})]
    made = [read_json(folder / "environment.json") for folder in folders]
    return {
        "count": len(made),
        "seconds": round(sum(map(run_seconds, folders)), 1),
        "commits": sorted({str(one.get("commit")) for one in made}),
        "devices": sorted({str(one.get("device")) for one in made}),
    }


def _config(arm: Arm, seed: int, configs: Mapping[str, list[Config]], runs: Path) -> Config:
    config = arm.config.replace(seed=seed)
    if not arm.after:
        return config
    before = runs / run_name(configs[arm.after][seed])
    return config.replace(init=str(_edited(arm, config, before) if arm.edit else before))


def _edited(arm: Arm, config: Config, before: Path) -> Path:
    """The folder of the weights that an arm makes of those before it; made once."""
    assert arm.edit
    code = hashlib.sha256(Path(inspect.getfile(arm.edit)).read_bytes()).hexdigest()[:8]
    folder = before.with_name(f"{before.name}-{arm.edit.__name__}-{code}-{run_hash(config)}")
    if not (folder / "model.safetensors").is_file():
        make_folder(folder)
        save_weights(arm.edit(before, config), folder / "model.safetensors")
    return folder


def stages(arms: Mapping[str, Arm]) -> list[list[str]]:
    """Arms in an order in which each comes after the one it begins from."""
    done: list[str] = []
    found: list[list[str]] = []
    while len(done) < len(arms):
        ready = [arm for arm, one in arms.items() if arm not in done and (not one.after or one.after in done)]
        assert ready, "arms begin from each other in a circle, or from one that is not there"
        found.append(ready)
        done += ready
    return found


def definition(arms: Mapping[str, Arm]) -> str:
    """A hash of all that decides the runs."""
    said = {name: [run_hash(arm.config), arm.after, arm.trained, *_words(arm)] for name, arm in arms.items()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _words(arm: Arm) -> list[str]:
    return [arm.edit.__name__] if arm.edit else []


def _check_definition(study: Study, budget: Budget, arms: Mapping[str, Arm], folder: Path) -> None:
    file = folder / "verdict.json"
    stored = read_json(file) if file.is_file() else {}
    if stored.get("budget") in BUDGETS[BUDGETS.index(budget) + 1 :]:
        raise ValueError(f"{folder} holds a verdict at budget {stored['budget']}, above {budget}: give another --out")
    if stored.get("budget") == budget and stored.get("definition") != definition(arms):
        raise ValueError(f"{folder} holds a verdict on other runs than {study.name} has now: give another --out")


def _check_data(arms: Mapping[str, Arm]) -> None:
    """Before the first run: what is not there, said once."""
    for config in {arm.config.data: arm.config for arm in arms.values() if arm.trained}.values():
        open_splits(config)


# Writing --------------------------------------------------------------------------------------------------------------


def _write(study: Study, budget: Budget, folder: Path, found: Found, verdict: Verdict, how: Mapping[str, Any]) -> None:
    made = environment("cpu" if budget == "cpu" else "cuda")
    said = {
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
        "definition": definition(study.arms(budget)),
        "metric": study.metric,
        "values": found.values,
        **how,
        "environment": {name: made[name] for name in ("plainvit", "commit", "python", "torch", "device")},
    }
    make_folder(folder)
    write_text(folder / "verdict.json", json.dumps(finite(said), indent=1) + "\n")
    write_text(folder / "table.md", table(study, found, verdict))
    save(study.draw(found), folder / "figure.png")


def decide_again(study: Study, folder: Path) -> Verdict:
    """What the stored values of a verdict say by the rule as it is now; the one that the runs were made for is kept."""
    said = read_json(folder / "verdict.json")
    arms = study.arms(said["budget"])
    if said["definition"] != definition(arms):
        raise ValueError(f"{folder} holds a verdict on other runs than {study.name} has now: run it again")
    values = {arm: [_restored(one) for one in rows] for arm, rows in said["values"].items()}
    found = Found({arm: arms[arm] for arm in values}, values, study.metric)
    verdict = study.decide(found)
    if said["rule"] != study.rule:
        said.setdefault("before", {"rule": said["rule"], "outcome": said["outcome"]})
    said |= {name: getattr(study, name) for name in ("claim", "source", "paper", "rule")}
    said |= {"outcome": verdict.outcome, "why": verdict.why}
    write_text(folder / "verdict.json", json.dumps(said, indent=1) + "\n")
    write_text(folder / "table.md", table(study, found, verdict))
    return verdict


def _restored(one: Mapping[str, Any]) -> dict[str, float]:
    """JSON has no number for what is not finite."""
    return {name: math.nan if value is None else value for name, value in one.items()}


def table(study: Study, found: Found, verdict: Verdict) -> str:
    """For people: the claim, a row for each arm, the rule and what it decides."""
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
            plus_minus({len(rows) for rows in found.values.values()}),
            "",
        ]
    )


def _cell(found: Found, arm: str) -> str:
    scale = 100 if found.metric in PERCENT else 1
    values = [scale * one for one in found.of(arm)]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
