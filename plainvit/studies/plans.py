"""The runs of a study: their configs, seeds and names, and which of them are missing.

    plan = Plan(study, study.arms("cpu"), count=5, folder=Path("studies/runs"))
    plan.missing(ledger)                            the runs to execute
    plan.results(ledger)                            the values of all arms

The seeds of an arm follow from its config, so that arms are independent of each other and equal arms of two studies are
the same runs. Fine-tunings of the same pre-training share it run by run; such arms are positively correlated, which
makes Welch's intervals too wide, never too narrow.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from plainvit.studies.estimate import estimate_run
from plainvit.studies.runs import Job, Ledger, run_hash
from plainvit.studies.study import Arm, Results, Study, families_at_edge, rate_name

EXTENSIONS = 2  # times that a grid of learning rates is extended


class Plan:
    """A study and its runs.

    Args:
        arms: Those of the study, which `extend` adds to
        count: Runs of each arm
        folder: Folder of all runs
    """

    def __init__(self, study: Study, arms: dict[str, Arm], count: int, folder: Path) -> None:
        if not any(arm.is_compared for arm in arms.values()):
            raise ValueError(f"study {study.name} compares nothing: its `arms` must return at least one arm")
        self.study, self.arms, self.count, self.folder = study, arms, count, folder
        self.definition = hash_definition(arms)
        self.jobs: dict[str, list[Job]] = {}  # by arm
        self.extensions = 0
        self.add_jobs()

    def add_jobs(self) -> None:
        """Jobs of the arms that have none."""
        for name, arm in self.arms.items():
            if arm.parent and arm.parent not in self.jobs:
                raise ValueError(f"arm {name!r} starts from {arm.parent!r}: define that arm first")
            if name not in self.jobs:
                seed, seconds = first_seed(self.arms, name), estimate_run(self.arms, name)
                self.jobs[name] = [self._make_job(name, index, seed + index, seconds) for index in range(self.count)]

    def _make_job(self, name: str, index: int, seed: int, seconds: float) -> Job:
        arm = self.arms[name]
        config = arm.config.replace(seed=seed)
        parent = self.jobs[arm.parent][index].run if arm.parent else ""
        start = source = self.folder / parent if parent else Path(config.init)
        if arm.edit:
            start = self.folder / f"{source.name}-{arm.edit.__name__}-{run_hash(config)}"
        return Job(
            label=f"{self.study.name}: {name}, run {index + 1}",
            config=config.replace(init=str(start)) if parent or arm.edit else config,
            runs=self.folder,
            measure=self.study.measure if arm.is_compared else None,
            is_trained=arm.is_trained,
            parent=parent,
            edit=arm.edit,
            source=source,
            seconds=seconds,
        )

    def all_jobs(self) -> list[Job]:
        """Each after the one that it starts from."""
        return [job for jobs in self.jobs.values() for job in jobs]

    def missing(self, ledger: Ledger) -> list[Job]:
        """The jobs whose numbers are missing, and those that they start from, in order."""
        missing: dict[tuple[str, str], Job] = {}
        needed: set[str] = set()  # runs that missing ones start from
        for job in reversed(self.all_jobs()):
            if job.is_missing(ledger) or (job.run in needed and not job.is_done):
                missing[job.key] = job
                needed.add(job.parent)
        return list(reversed(missing.values()))

    def results(self, ledger: Ledger) -> Results:
        compared = {name: arm for name, arm in self.arms.items() if arm.is_compared}
        values = {arm: [ledger.find(*job.key) or {} for job in self.jobs[arm]] for arm in compared}
        return Results(compared, values, self.study.metric)

    def extend(self, ledger: Ledger, *, can_train: bool = True) -> bool:
        """Extend grids whose best rate is at the edge; without training only by runs that are finished."""
        if self.extensions == EXTENSIONS:
            return False
        added = extend_rates(self.arms, self.results(ledger))
        if not added:
            return False
        self.extensions += 1
        self.arms |= added
        self.add_jobs()
        if can_train or not self.missing(ledger):
            return True
        for name in added:
            del self.arms[name], self.jobs[name]
        return False


def order_plans(plans: Iterable[Plan], ledger: Ledger) -> list[Plan]:
    """Next is always the study that needs the least time for runs which no earlier study needs."""
    rest = {plan.study.name: {job.run: job.seconds for job in plan.missing(ledger)} for plan in plans}
    by_name = {plan.study.name: plan for plan in plans}
    planned: set[str] = set()
    ordered: list[Plan] = []
    while rest:
        name = min(rest, key=lambda name: sum(time for run, time in rest[name].items() if run not in planned))
        planned |= rest.pop(name).keys()
        ordered.append(by_name[name])
    return ordered


def missing_time(plans: Iterable[Plan], ledger: Ledger) -> tuple[int, float]:
    """(number of missing runs, seconds of a GPU); runs that studies share are counted once."""
    missing = {job.run: job.seconds for plan in plans for job in plan.missing(ledger)}
    return len(missing), sum(missing.values())


# Arms -----------------------------------------------------------------------------------------------------------------


def first_seed(arms: Mapping[str, Arm], name: str) -> int:
    """The seed of the first run of an arm; the others follow it. Only arms with equal runs have the same."""
    arm = arms[name]
    start = str(first_seed(arms, arm.parent)) if arm.parent else arm.config.init
    edited = f"{start}-{arm.edit.__name__}" if arm.edit else start
    return int(run_hash(arm.config.replace(seed=0, init=edited))[:12], 16)


def extend_rates(arms: Mapping[str, Arm], results: Results) -> dict[str, Arm]:
    """One more arm for each family whose best rate is at the edge of its grid, by the grid's own factor."""
    added: dict[str, Arm] = {}
    for family, name in families_at_edge(results).items():
        rates = [arms[arm].config.optim.lr for arm in results.families()[family]]
        best, best_rate = arms[name], arms[name].config.optim.lr
        lr = rates[-1] ** 2 / rates[-2] if best_rate == rates[-1] else rates[0] ** 2 / rates[1]
        config = best.config.replace(optim=best.config.optim.replace(lr=lr))
        added[rate_name(family, lr)] = replace(best, config=config, x=lr if best.x == best_rate else best.x)
    return added


def hash_definition(arms: Mapping[str, Arm]) -> str:
    """A hash of everything that affects the runs."""
    record = {
        name: [run_hash(arm.config), arm.parent, arm.is_trained, *([arm.edit.__name__] if arm.edit else [])]
        for name, arm in arms.items()
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
