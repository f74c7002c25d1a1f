"""Runs studies and writes their verdicts.

    plainvit study positions --budget cpu          supported, contradicted or inconclusive

Results are OUT/NAME/{verdict.json, figure.png}. Runs are stored in OUT/runs by a hash of their settings, and their
numbers in a ledger: studies share them, and a finished run is not repeated.
"""

import json
import logging
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from plainvit.analyse.figures import save
from plainvit.data.decode import DataError
from plainvit.data.sources import open_source
from plainvit.disk import make_folder, read_json, write_text
from plainvit.runtime.folder import describe_environment, replace_non_finite
from plainvit.studies.claims import CLAIMS, Budget
from plainvit.studies.drawings import draw_study
from plainvit.studies.plans import Plan
from plainvit.studies.queue import Queue, Workers
from plainvit.studies.report import is_current
from plainvit.studies.runs import Ledger
from plainvit.studies.study import Arm, Study
from plainvit.studies.verdict import Verdict
from plainvit.weights.reading import locate_weights

log = logging.getLogger("plainvit")


class NoDeviceError(ValueError):
    exit_code = 5


@dataclass(frozen=True)
class Settings:
    """How studies are run."""

    budget: Budget
    out: Path
    runs: int = 0  # of each arm; 0: the study's own number
    data_root: str = ""
    quiet: bool = False

    def open_ledger(self) -> Ledger:
        return Ledger(self.out / "ledger.jsonl")

    @property
    def can_train(self) -> bool:
        return self.budget == "cpu" or torch.cuda.is_available()


def run_studies(
    studies: Sequence[Study], settings: Settings, workers: Workers
) -> Iterator[tuple[Study, Verdict | Exception]]:
    """Runs what is missing, and yields the verdict of each study as it is written, or the reason why there is none."""
    ledger, trained, untrained = settings.open_ledger(), [], []
    for study in studies:
        try:
            plan = plan_study(study, settings, ledger)
        except (ValueError, OSError) as error:
            yield study, error
            continue
        is_trained = any(arm.is_trained for arm in plan.arms.values())
        (trained if is_trained else untrained).append(plan)
    for plans, at_once in ((untrained, 1), (trained, 0)):  # measuring speed needs an idle machine
        queue = Queue(plans, ledger, workers, at_once=at_once, can_train=settings.can_train, quiet=settings.quiet)
        for plan, error in queue.run():
            yield plan.study, error or try_verdict(plan, ledger, settings)


def plan_study(study: Study, settings: Settings, ledger: Ledger) -> Plan:
    """Fails before the first run if the study cannot be run; if all runs are finished it needs neither GPU nor data."""
    stored = read_json(settings.out / study.name / "verdict.json")
    if (stored.get("budget"), settings.budget) == ("gpu", "cpu") and is_current(stored):
        raise ValueError(f"{settings.out} has the verdict of {study.name} for --budget gpu: choose another --out")
    arms = {name: _set_root(arm, settings.data_root) for name, arm in study.arms(settings.budget).items()}
    plan = Plan(study, arms, settings.runs or study.runs, settings.out / "runs")
    if plan.missing(ledger):
        if not settings.can_train:
            raise NoDeviceError("--budget gpu needs a CUDA GPU and none was found: use --budget cpu")
        _check_data(arms, settings.data_root)
    return plan


def try_verdict(plan: Plan, ledger: Ledger, settings: Settings) -> Verdict | Exception:
    """The verdict; an error in the rule or figure of a study does not stop the others."""
    try:
        return write_verdict(plan, ledger, settings)
    except Exception as error:
        log.warning("%s has no verdict", plan.study.name, exc_info=True)
        return error


def _set_root(arm: Arm, data_root: str) -> Arm:
    """Datasets are below it, and weights unless they are a published name or an address."""
    config = arm.config.replace(data_root=data_root)
    path = Path(data_root) / config.init
    return replace(arm, config=config.replace(init=str(path)) if config.init and path.exists() else config)


def _check_data(arms: Mapping[str, Arm], data_root: str) -> None:
    """Fails before the first run if data or published weights are missing."""
    for init in {arm.config.init for arm in arms.values() if arm.config.init}:
        if not locate_weights(init).exists():
            raise DataError(f"{Path(data_root) / init} is missing: choose --data-root so that it has these weights")
    for data in {arm.config.data for arm in arms.values() if arm.is_trained}:
        _check_set(data, data_root)


@cache
def _check_set(data: str, data_root: str) -> None:
    """Once for all studies."""
    open_source(data, "train", data_root=data_root or None)


# Writing --------------------------------------------------------------------------------------------------------------


def write_verdict(plan: Plan, ledger: Ledger, settings: Settings) -> Verdict:
    """Decides a study whose runs are all finished, and writes its folder."""
    study, results = plan.study, plan.results(ledger)
    verdict, runs = study.decide(results), summarize_runs(plan, ledger)
    command = f"plainvit study {study.spec or study.name} --budget {settings.budget}"
    if plan.count != study.runs:
        command += f" --seeds {plan.count}"
    if settings.data_root:
        command += " --data-root DIR"
    machine = describe_environment("cuda" if settings.budget != "cpu" and torch.cuda.is_available() else "cpu")
    record = {
        **{name: getattr(study, name) for name in ("number", "claim", "source", "paper", "limits", "rule", "metric")},
        "study": study.name,
        "budget": settings.budget,
        "outcome": verdict.outcome,
        "why": verdict.why,
        "parts": verdict.criteria,
        "seeds": plan.count,
        "values": results.values,
        "data": sorted({arm.config.data for arm in results.arms.values() if arm.config.data}),
        "rule_commit": None if study.spec else find_rule_commit(study),
        "definition": plan.definition,
        "seconds": runs["seconds"],
        "runs": runs,
        "command": command,
        "environment": {name: machine[name] for name in ("plainvit", "commit", "python", "torch", "device")},
    }
    store_verdict(record, settings.out / study.name)
    save(draw_study(study, results), settings.out / study.name / "figure.png")
    return verdict


def store_verdict(record: Mapping[str, Any], folder: Path) -> None:
    """Writes verdict.json; a verdict under another rule or with other arms is kept in `history`."""
    stored = read_json(folder / "verdict.json")
    history = stored.pop("history", [])
    if stored and (stored["rule"], stored.get("definition")) != (record["rule"], record["definition"]):
        history = [stored, *history]
    make_folder(folder)
    write_text(folder / "verdict.json", json.dumps(replace_non_finite({**record, "history": history}), indent=1) + "\n")


def summarize_runs(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """Number, time, commits and devices of the runs, which may be older than the verdict."""
    names = {job.run for job in plan.all_jobs()} & ledger.runs.keys()
    runs = [ledger.runs[name] for name in names]
    return {
        "count": sum(run["is_trained"] for run in runs),
        "seconds": round(math.fsum(run["seconds"] for run in runs), 1),
        "commits": sorted({run["commit"] for run in runs if run["commit"]}),
        "devices": sorted({run["device"] for run in runs if run["device"]}),
    }


def find_rule_commit(study: Study) -> str | None:
    """The commit that wrote the rule of one of the project's studies, in a checkout."""
    command = ["git", "log", "-1", "--format=%h", f"-S{study.rule}", "--", CLAIMS.name]
    try:
        output = subprocess.run(command, cwd=CLAIMS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.stdout.strip() or None
