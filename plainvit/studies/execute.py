"""Runs a study and writes its verdict.

    plainvit study positions --budget cpu          supported, contradicted or inconclusive

Results are OUT/NAME/{verdict.json, figure.png}. Runs are stored in OUT/runs by the hashes of config and code:
studies share them, and a finished run is repeated only if the code changed. The seeds of an arm follow from its config,
so that arms are independent of each other and equal arms of two studies are the same runs. Fine-tunings of the same
pre-training share it run by run; such arms are positively correlated, which makes Welch's intervals too wide, never too
narrow.
"""

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plainvit.analyse.figures import save
from plainvit.config import Config
from plainvit.data.decode import DataError
from plainvit.data.splits import open_splits
from plainvit.disk import make_folder, read_json, write_text
from plainvit.runtime.folder import environment, finite, run_seconds
from plainvit.studies.drawings import draw_study
from plainvit.studies.evidence import Verdict
from plainvit.studies.report import is_present
from plainvit.studies.runs import Workers, run_all, run_hash, run_name
from plainvit.studies.study import BUDGETS, Arm, Budget, Results, Study, families_at_edge, rate_name
from plainvit.weights import save as save_weights

log = logging.getLogger("plainvit")
EXTENSIONS = 2  # times that a grid of learning rates is extended


class NoDeviceError(ValueError):
    exit_code = 5


def run_study(
    study: Study,
    budget: Budget,
    out: Path,
    workers: Workers,
    *,
    runs: int = 0,
    data_root: str = "",
    quiet: bool = False,
) -> Verdict:
    """Runs what is missing, measures, decides, and writes the folder of the study."""
    started, runs = time.monotonic(), runs or study.runs
    check_budget(study, budget, out / study.name)
    arms = {name: _set_root(arm, data_root) for name, arm in study.arms(budget).items()}
    _check_data(arms)
    definition = hash_definition(arms)
    configs, found = _run_and_measure(study, arms, out / "runs", runs, workers, quiet)
    for _ in range(EXTENSIONS):
        if not (more := extend_rates(arms, found)):
            break
        arms |= more
        configs, found = _run_and_measure(study, arms, out / "runs", runs, workers, quiet)
    for family, arm in families_at_edge(found).items():
        log.warning("%s: the best rate of %s (%s) is at the edge of its grid", study.name, family, arm)
    verdict = study.decide(found)
    trained = {arm: configs[arm] for arm in arms if arms[arm].is_trained}
    run_info = {
        "definition": definition,
        "seconds": round(time.monotonic() - started, 1),
        "runs": summarize_runs([config for group in trained.values() for config in group], out / "runs"),
        "folders": {arm: [f"runs/{run_name(config)}" for config in group] for arm, group in trained.items()},
        "command": f"plainvit study {study.spec or study.name} --budget {budget}"
        + f" --seeds {runs}" * (runs != study.runs)
        + " --data-root DIR" * bool(data_root),
    }
    _write(study, budget, out / study.name, found, verdict, run_info)
    return verdict


def check_budget(study: Study, budget: Budget, folder: Path) -> None:
    """Fails if the budget cannot be run here, or if a verdict of a larger one would be replaced."""
    if budget != "cpu" and not torch.cuda.is_available():
        raise NoDeviceError(f"--budget {budget} needs a CUDA GPU and none was found: use --budget cpu")
    stored = read_verdict_file(folder)
    if stored.get("budget") in BUDGETS[BUDGETS.index(budget) + 1 :] and is_present(stored):
        larger = stored["budget"]
        raise ValueError(f"{folder} has the verdict of {study.name} for --budget {larger}: choose another --out")


def read_verdict_file(folder: Path) -> dict[str, Any]:
    file = folder / "verdict.json"
    return read_json(file) if file.is_file() else {}


def _set_root(arm: Arm, data_root: str) -> Arm:
    """Datasets and published weights are below it."""
    config = arm.config.replace(data_root=data_root)
    return replace(arm, config=config.replace(init=str(Path(data_root) / config.init)) if config.init else config)


def _check_data(arms: Mapping[str, Arm]) -> None:
    """Fails before the first run if data or published weights are missing."""
    for path in {arm.config.init for arm in arms.values() if arm.config.init}:
        if not Path(path).exists():
            raise DataError(f"{path} is missing: choose --data-root so that it has these weights")
    for config in {arm.config.data: arm.config for arm in arms.values() if arm.is_trained}.values():
        open_splits(config)


# Runs -----------------------------------------------------------------------------------------------------------------


def _run_and_measure(
    study: Study, arms: Mapping[str, Arm], folder: Path, runs: int, workers: Workers, quiet: bool
) -> tuple[dict[str, list[Config]], Results]:
    configs = run_arms(arms, folder, runs, workers, quiet)
    counted = {name: arm for name, arm in arms.items() if arm.is_compared}
    values = {arm: [study.measure(config, folder / run_name(config)) for config in configs[arm]] for arm in counted}
    return configs, Results(counted, values, study.metric)


def run_arms(
    arms: Mapping[str, Arm], folder: Path, runs: int, workers: Workers, quiet: bool
) -> dict[str, list[Config]]:
    """Runs all arms, each after the arm it starts from; returns their configs."""
    configs: dict[str, list[Config]] = {}
    for stage in order_stages(arms):
        for arm in stage:
            seed = first_seed(arms, arm)
            configs[arm] = [_run_config(arms[arm], seed, index, configs, folder) for index in range(runs)]
        pending = {
            f"{arm}, run {index + 1}": configs[arm][index]
            for arm in stage
            for index in range(runs)
            if arms[arm].is_trained
        }
        run_all(pending, folder, workers, quiet=quiet)
    return configs


def first_seed(arms: Mapping[str, Arm], name: str) -> int:
    """The seed of the first run of an arm; the others follow it. Only arms with equal runs have the same."""
    arm = arms[name]
    start = str(first_seed(arms, arm.parent)) if arm.parent else arm.config.init
    edited = f"{start}-{arm.edit.__name__}" if arm.edit else start
    return int(run_hash(arm.config.replace(seed=0, init=edited))[:12], 16)


def _run_config(arm: Arm, seed: int, index: int, configs: Mapping[str, list[Config]], folder: Path) -> Config:
    config = arm.config.replace(seed=seed + index)
    before = folder / run_name(configs[arm.parent][index]) if arm.parent else Path(config.init)
    if arm.edit:
        before = _edit_weights(arm, config, before, folder)
    return config.replace(init=str(before)) if arm.parent or arm.edit else config


def _edit_weights(arm: Arm, config: Config, before: Path, runs: Path) -> Path:
    """The folder of the edited initial weights of an arm; made once."""
    assert arm.edit
    code = hashlib.sha256(Path(inspect.getfile(arm.edit)).read_bytes()).hexdigest()[:8]
    folder = runs / f"{before.name}-{arm.edit.__name__}-{code}-{run_hash(config)}"
    if not (folder / "model.safetensors").is_file():
        make_folder(folder)
        save_weights(arm.edit(before, config), folder / "model.safetensors")
    return folder


def order_stages(arms: Mapping[str, Arm]) -> list[list[str]]:
    """Arms in stages; each comes after the arm it starts from."""
    done: list[str] = []
    ordered: list[list[str]] = []
    while len(done) < len(arms):
        ready = [arm for arm, one in arms.items() if arm not in done and (not one.parent or one.parent in done)]
        assert ready, "`after` of the arms is circular or names an unknown arm"
        ordered.append(ready)
        done += ready
    return ordered


def extend_rates(arms: Mapping[str, Arm], found: Results) -> dict[str, Arm]:
    """One more arm for each family whose best rate is at the edge of its grid, by the grid's own factor."""
    more: dict[str, Arm] = {}
    for family, name in families_at_edge(found).items():
        rates = [arms[one].config.optim.lr for one in found.families()[family]]
        lr = arms[name].config.optim.lr
        lr = rates[-1] ** 2 / rates[-2] if lr == rates[-1] else rates[0] ** 2 / rates[1]
        best = arms[name]
        config = best.config.replace(optim=best.config.optim.replace(lr=lr))
        more[rate_name(family, lr)] = replace(best, config=config, x=lr if best.x == best.config.optim.lr else best.x)
    return more


def hash_definition(arms: Mapping[str, Arm]) -> str:
    """A hash of everything that affects the runs."""
    record = {
        name: [run_hash(arm.config), arm.parent, arm.is_trained, *([arm.edit.__name__] if arm.edit else [])]
        for name, arm in arms.items()
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


# Writing --------------------------------------------------------------------------------------------------------------


def summarize_runs(configs: Sequence[Config], folder: Path) -> dict[str, Any]:
    """Number, time, commits and devices of the runs, which may be older than the verdict."""
    folders = [folder / name for name in sorted({run_name(config) for config in configs})]
    environments = [read_json(one / "environment.json") for one in folders]
    return {
        "count": len(environments),
        "seconds": round(sum(map(run_seconds, folders)), 1),
        "commits": sorted({str(one.get("commit")) for one in environments}),
        "devices": sorted({str(one.get("device")) for one in environments}),
    }


def _write(
    study: Study, budget: Budget, folder: Path, found: Results, verdict: Verdict, run_info: Mapping[str, Any]
) -> None:
    """Writes the folder; a verdict under another rule or with other arms is kept in `history`."""
    machine = environment("cpu" if budget == "cpu" else "cuda")
    stored = read_verdict_file(folder)
    history = stored.pop("history", [])
    if stored and (stored["rule"], stored.get("definition")) != (study.rule, run_info["definition"]):
        history = [stored, *history]
    record = {
        **{name: getattr(study, name) for name in ("number", "claim", "source", "paper", "rule", "metric")},
        "study": study.name,
        "budget": budget,
        "outcome": verdict.outcome,
        "why": verdict.why,
        "parts": verdict.parts,
        "seeds": max(map(len, found.values.values())),
        "values": found.values,
        **run_info,
        "environment": {name: machine[name] for name in ("plainvit", "commit", "python", "torch", "device")},
        "history": history,
    }
    make_folder(folder)
    write_text(folder / "verdict.json", json.dumps(finite(record), indent=1) + "\n")
    save(draw_study(study, found), folder / "figure.png")
