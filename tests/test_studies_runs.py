"""Many runs: the same numbers as one after the other, failures reported at the end, finished runs in the ledger."""

import json
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
from in_process import InProcess

from plainvit.config import Config, Optim
from plainvit.disk import read_json
from plainvit.studies.plans import Plan, order_plans
from plainvit.studies.queue import Queue, Workers
from plainvit.studies.runs import RESULTS_VERSION, Job, Ledger, list_changes, run_hash
from plainvit.studies.study import Arm, Study, held_out, rate_arms
from plainvit.studies.transfer import redraw_positions
from plainvit.studies.verdict import fact
from plainvit.train.run import fit


def config(**changes: Any) -> Config:
    return runs.config(**{"steps": 2, "evaluations": 1, "device": "cpu"} | changes)


def make_plan(name: str, arms: Mapping[str, Config | Arm], folder: Path, **fields: Any) -> Plan:
    made = {arm: one if isinstance(one, Arm) else Arm(one) for arm, one in arms.items()}
    criteria = lambda _: [fact("f", 1.0, "1", True)]  # noqa: E731
    study = Study(name=name, claim="c", source="s", rule="r", arms=lambda _: made, criteria=criteria, **fields)
    return Plan(study, dict(made), 1, folder)


def drain(plans: list[Plan], ledger: Ledger, workers: Any = None) -> dict[str, Exception | None]:
    queue = Queue(plans, ledger, workers or InProcess(), quiet=True)
    return {plan.study.name: error for plan, error in queue.run()}


# Workers --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_parallel_runs_equal_single_runs(tmp_path: Path, compiled: str) -> None:
    """Runs that follow another one in a worker, too."""
    jobs = [Job("", config(seed=seed, steps=4, compile=compiled), tmp_path, held_out) for seed in range(3)]
    found: dict[str, float] = {}
    with Workers(2) as workers:
        for job in jobs[:2]:
            workers.start(job)
        waiting = jobs[2:]
        while workers.running:
            found |= {job.run: done.result()["values"]["held_out"]["nll"] for job, done in workers.wait()}
            while waiting:
                workers.start(waiting.pop())
    for job in jobs:
        assert "test" not in read_json(job.folder / "results.json")
        alone = fit(job.config, tmp_path / "alone" / job.run, quiet=True).metrics
        assert found[job.run] == pytest.approx(alone["val"]["nll"], rel=1e-6)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_others_continue(tmp_path: Path) -> None:
    long, short = Job("", config(steps=100_000), tmp_path), Job("", config(), tmp_path, held_out)
    with Workers(2) as workers:
        workers.start(long)
        while not list(tmp_path.glob("*/metrics.jsonl")):
            time.sleep(0.1)
        (killed,) = multiprocessing.active_children()
        workers.start(short)
        killed.kill()
        ended: dict[str, Any] = {}
        while workers.running:
            ended |= {job.run: future.exception() for job, future in workers.wait()}
        assert isinstance(ended[long.run], BrokenProcessPool)
        assert ended[short.run] is None
        again = Job("", config(seed=1), tmp_path, held_out)
        for job in (again, short):  # one of them in the new worker
            workers.start(job)
        while workers.running:
            assert all(future.result()["values"] for _, future in workers.wait())


def test_run_hash_depends_on_settings_that_affect_the_result() -> None:
    config = runs.config()
    assert run_hash(config) == run_hash(config.replace(device="cuda", workers=3, data_root="elsewhere", recipe="mine"))
    assert run_hash(config.replace(init="a/1f")) == run_hash(config.replace(init="b/1f"))
    others = [
        config.replace(seed=1),
        config.replace(steps=13),
        config.replace(init="1f"),
        config.replace(train_fraction=0.5),
    ]
    assert len({run_hash(one) for one in (config, *others)}) == 5


def test_a_new_option_does_not_change_the_names_of_runs() -> None:
    """Settings at their defaults are not part of a name."""
    assert list_changes(Config(data="digits", optim=Optim(lr=1e-3, clip=2.0))) == {
        "kind": "Config",
        "data": "digits",
        "optim": {"kind": "Optim", "clip": 2.0},
    }


def test_the_results_version_belongs_to_the_golden_losses() -> None:
    """Where losses change, runs do too: raise RESULTS_VERSION, and write both numbers here."""
    golden = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text())
    assert (RESULTS_VERSION, golden["cifar10"][-1], golden["digits"][-1]) == (1, 2.282924, 2.050171)


# Ledger ---------------------------------------------------------------------------------------------------------------


def record(run: str, measurement: str, top1: float) -> dict[str, Any]:
    about = {"is_trained": True, "seconds": 1.0, "commit": None, "device": None}
    return {"run": run, "values": {measurement: {"top1": top1, "choice": top1}}, **about}


def test_a_ledger_is_read_back_merged_and_cut_lines_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ledger.jsonl"
    Ledger(file).add(record("a", "halves", 0.5))
    with file.open("a") as cut:
        cut.write('{"run": "b", "val')
    again = Ledger(file)
    again.add(record("a", "held_out", 0.75))
    again.add(record("c", "halves", 0.25))
    file.write_bytes(2 * file.read_bytes())  # as by `cat`
    last = Ledger(file)
    assert [last.find("a", name) for name in ("halves", "held_out")] == [
        {"top1": 0.5, "choice": 0.5},
        {"top1": 0.75, "choice": 0.75},
    ]
    assert (last.find("b", "halves"), last.find("c", "halves")) == (None, {"top1": 0.25, "choice": 0.25})


# Queue ----------------------------------------------------------------------------------------------------------------


def test_runs_are_shared_and_their_numbers_suffice_on_another_machine(tmp_path: Path) -> None:
    first, ledger = tmp_path / "first", Ledger(tmp_path / "ledger.jsonl")
    arms = {"a": config(), "b": Arm(config(model=None, steps=3), parent="a")}
    plans = [make_plan("one", arms, first), make_plan("two", {"other name": config()}, first)]
    workers = InProcess(count=2)
    assert drain(plans, ledger, workers) == {"one": None, "two": None}
    assert len(workers.started) == 2
    before = plans[0].results(ledger).values
    elsewhere = make_plan("one", arms, tmp_path / "second")
    assert not elsewhere.missing(Ledger(ledger.file))
    assert elsewhere.results(Ledger(ledger.file)).values == before
    more = make_plan("more", {"a": arms["a"], "c": Arm(config(model=None, steps=1), parent="a")}, tmp_path / "second")
    assert [job.config.steps for job in more.missing(ledger)] == [2, 1], "a start is made again where it is absent"


def test_a_failed_run_stops_only_what_needs_it(tmp_path: Path) -> None:
    bad = config(data=str(tmp_path / "nowhere"))
    arms = {"bad": Arm(bad), "child": Arm(config(model=None), parent="bad"), "good": Arm(config())}
    plans = [make_plan("one", arms, tmp_path / "runs"), make_plan("two", {"good": config()}, tmp_path / "runs")]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    found = drain(plans, ledger)
    assert found["two"] is None
    assert "2 of 3 runs failed; the first one: one: bad, run 1: " in str(found["one"])
    assert len(ledger.runs) == 1


def test_studies_that_need_the_least_time_come_first(tmp_path: Path) -> None:
    """A study comes earlier if another one before it has made some of its runs."""
    short, shared, long = (config(steps=steps) for steps in (1000, 5000, 9000))
    plans = [
        make_plan("long", {"a": long}, tmp_path),
        make_plan("both", {"a": shared, "b": short}, tmp_path),
        make_plan("shared", {"a": shared}, tmp_path),
    ]
    assert [plan.study.name for plan in order_plans(plans, Ledger(tmp_path / "no"))] == ["shared", "both", "long"]


def test_runs_of_an_extended_grid_come_before_those_of_other_studies(tmp_path: Path) -> None:
    """The highest rate is the best one, so that the grid is extended twice."""
    arms = rate_arms("a", config(), (0.1, 0.2))
    rates = {f"a at {lr:.1e}": lr for lr in (0.1, 0.2, 0.4, 0.8)}
    others = {str(seed): config(train_fraction=seed / 10) for seed in range(1, 9)}
    plans = [make_plan("grid", arms, tmp_path), make_plan("others", others, tmp_path)]
    workers = InProcess()
    workers.execute = lambda job: record(job.run, "held_out", job.config.optim.lr)
    drain(plans, Ledger(tmp_path / "ledger.jsonl"), workers)
    assert list(plans[0].arms) == list(rates)
    assert {job.run for job in plans[0].all_jobs()} <= {job.run for job in workers.started[:6]}


def test_a_measure_without_the_metric_that_chooses_a_rate_fails_its_study_only(tmp_path: Path) -> None:
    plans = [
        make_plan("rates", rate_arms("a", config(), (0.1, 0.2)), tmp_path),
        make_plan("b", {"b": config()}, tmp_path),
    ]
    found = drain(plans, Ledger(tmp_path / "ledger.jsonl"))
    assert "'choice'" in str(found["rates"])
    assert found["b"] is None


def test_weights_that_cannot_be_edited_fail_their_study_only(tmp_path: Path) -> None:
    arms = {"edited": Arm(config(model=None, init="nowhere"), edit=redraw_positions)}
    plans = [make_plan("edited", arms, tmp_path), make_plan("other", {"a": config()}, tmp_path)]
    found = drain(plans, Ledger(tmp_path / "ledger.jsonl"))
    assert "nowhere" in str(found["edited"])
    assert found["other"] is None


def test_own_measurements_are_made_in_this_process(tmp_path: Path) -> None:
    """Functions of a user's file are unknown to the workers, also where a study of the project has the same run."""
    own = make_plan("own", {"a": config()}, tmp_path, measure=lambda *_: {"top1": 0.5}, spec="my.py:STUDY")
    other = make_plan("other", {"b": config()}, tmp_path)
    ledger, workers = Ledger(tmp_path / "ledger.jsonl"), InProcess()
    assert drain([own, other], ledger, workers) == {"own": None, "other": None}
    assert [job.measure for job in workers.started] == [None, held_out]
    assert own.results(ledger).samples("a") == [0.5]
    assert len(ledger.runs) == 1
