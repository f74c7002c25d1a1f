"""The runs of a study: their configs, seeds and names, and which of them are missing.

    plan = Plan(study, study.arms("cpu"), count=5, folder=Path("studies/runs"))
    plan.missing(ledger)                             the runs to execute, by name
    plan.results(ledger)                            the values of all arms

The seeds of an arm follow from its config, so that arms are independent of each other and equal arms of two studies are
the same runs. Fine-tunings of the same pre-training share it run by run; such arms are positively correlated, which
makes Welch's intervals too wide, never too narrow.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from plainvit.config import Config
from plainvit.studies.estimate import estimate_run
from plainvit.studies.ledger import Ledger
from plainvit.studies.runs import Measure, is_done, run_hash, run_name
from plainvit.studies.study import Arm, Results, Study, families_at_edge, rate_name

EXTENSIONS = 2  # times that a grid of learning rates is extended


@dataclass
class Job:
    """A run of a study."""

    label: str
    config: Config
    seconds: float  # estimate
    measure: Measure | None  # None: it is only a start for other runs
    is_trained: bool
    parent: str  # the run that it starts from
    edit: Callable[..., Any] | None  # makes its initial weights from those of `source`
    source: Path

    @cached_property
    def run(self) -> str:
        return run_name(self.config)

    def values(self, ledger: Ledger) -> dict[str, float] | None:
        assert self.measure
        return ledger.find(self.run, self.measure.__name__)

    def is_missing(self, ledger: Ledger) -> bool:
        return self.measure is not None and self.values(ledger) is None


@dataclass
class Plan:
    """A study and its runs."""

    study: Study
    arms: dict[str, Arm]
    count: int  # runs of each arm
    folder: Path  # of all runs
    definition: str = ""
    extensions: int = 0
    jobs: dict[str, list[Job]] = field(default_factory=dict)  # by arm

    def __post_init__(self) -> None:
        if not any(arm.is_compared for arm in self.arms.values()):
            raise ValueError(f"study {self.study.name} compares nothing: its `arms` must return at least one arm")
        self.definition = hash_definition(self.arms)
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
        start = parent = self.folder / self.jobs[arm.parent][index].run if arm.parent else Path(config.init)
        if arm.edit:
            start = self.folder / f"{parent.name}-{arm.edit.__name__}-{run_hash(config)}"
        return Job(
            label=f"{self.study.name}: {name}, run {index + 1}",
            config=config.replace(init=str(start)) if arm.parent or arm.edit else config,
            seconds=seconds,
            measure=self.study.measure if arm.is_compared else None,
            is_trained=arm.is_trained,
            parent=parent.name if arm.parent else "",
            edit=arm.edit,
            source=parent,
        )

    def all_jobs(self) -> Iterator[Job]:
        return (job for jobs in self.jobs.values() for job in jobs)

    def missing(self, ledger: Ledger) -> dict[str, Job]:
        """The runs whose numbers are missing, and those that they start from, in order."""
        jobs = {job.run: job for job in self.all_jobs()}
        missing = [run for run, job in jobs.items() if job.is_missing(ledger)]
        for run in missing:  # which grows
            parent = jobs[run].parent
            if parent and parent not in missing and not is_done(self.folder / parent):
                missing.append(parent)
        return {run: job for run, job in jobs.items() if run in set(missing)}

    def results(self, ledger: Ledger) -> Results:
        compared = {name: arm for name, arm in self.arms.items() if arm.is_compared}
        values = {arm: [job.values(ledger) or {} for job in self.jobs[arm]] for arm in compared}
        return Results(compared, values, self.study.metric)

    def extend(self, ledger: Ledger, *, can_train: bool = True) -> bool:
        """Extend grids whose best rate is at the edge; without training only by runs that are finished."""
        if self.extensions == EXTENSIONS or not (more := extend_rates(self.arms, self.results(ledger))):
            return False
        self.extensions += 1
        self.arms |= more
        self.add_jobs()
        if can_train or not self.missing(ledger):
            return True
        for name in more:
            del self.arms[name], self.jobs[name]
        return False


def order_plans(plans: Iterable[Plan], ledger: Ledger) -> list[Plan]:
    """Next is always the study that needs the least time for runs which no earlier study needs."""
    rest = {plan.study.name: {run: job.seconds for run, job in plan.missing(ledger).items()} for plan in plans}
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
    missing = {run: job.seconds for plan in plans for run, job in plan.missing(ledger).items()}
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
    more: dict[str, Arm] = {}
    for family, name in families_at_edge(results).items():
        rates = [arms[arm].config.optim.lr for arm in results.families()[family]]
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
