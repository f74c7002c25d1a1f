"""Tests of the paper's claims: study, study list."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plainvit.commands.parsing import exit_with_error, print_result
from plainvit.config import visible
from plainvit.errors import first_line

if TYPE_CHECKING:
    from plainvit.studies.execute import Settings
    from plainvit.studies.queue import Workers
    from plainvit.studies.study import Study

Budget = Literal["cpu", "gpu"]


def list_studies(*, out: Path = Path("studies"), json: bool = False) -> None:
    """List the claims that can be tested, with the verdicts so far.

    Args:
        out: Folder of the verdicts, as given to `plainvit study`
        json: Print JSON instead of a table
    """
    from plainvit.studies import report

    rows = report.list_verdicts(out)
    print_result(rows, None if json else report.render_list(rows, out))


def study(
    names: tuple[str, ...],
    /,
    *,
    budget: Budget = "cpu",
    out: Path = Path("studies"),
    seeds: int = 0,
    at_once: int = 0,
    data_root: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Test a claim of the paper with small runs: supported, contradicted or inconclusive.

    The arms of a study differ in one setting, have several independent runs and are compared on held-out training
    images. OUT/NAME holds the table, figure and verdict, OUT.md a report of all studies.
    The number of runs and the GPU time are printed first, and the studies that cost least come first. Finished runs
    are reused, so the same command resumes an interrupted study. Exit code 4 if runs failed.

    Args:
        names: Names from `plainvit study list`, all, or FILE.py:STUDY for your own (the file is executed)
        budget: Size of the runs: cpu: minutes on two cores; gpu: minutes on a large GPU
        out: Folder of the runs and verdicts
        seeds: Number of runs per arm, each with its own seed; default: that of the study (fewer than 3 cannot decide)
        at_once: Number of parallel runs; default: 2 on cpu, 8 on gpu
        data_root: Folder with the known datasets and published weights (not needed for cpu)
        dry_run: Print the number of runs and the GPU time, and run nothing
        json: Print JSON instead of a table
    """
    for flag, value in (("--seeds", seeds), ("--at-once", at_once)):
        if value < 0:
            raise ValueError(f"{flag} must be positive, got {value}")
    chosen = _find_studies(names)
    from plainvit.studies import report
    from plainvit.studies.execute import Settings
    from plainvit.studies.queue import Workers

    settings = Settings(budget, out, seeds, data_root, quiet=json)
    if dry_run or not json:
        _print_plan(chosen, settings)
    if dry_run:
        return
    try:
        with Workers(at_once or {"cpu": min(2, os.cpu_count() or 1), "gpu": 8}[budget]) as workers:
            failed = _run_studies(chosen, settings, workers)
    except KeyboardInterrupt:
        exit_with_error(
            f"interrupted; run the same command to resume with the finished runs in {out / 'ledger.jsonl'}", 130
        )
    stored = report.read_verdicts(out)
    verdicts = [
        stored[study.name] for study in chosen if study.name in stored and report.is_current(stored[study.name])
    ]
    if verdicts or (json and not failed):
        print_result(verdicts, None if json else report.render_summary(verdicts, out))
    if failed:
        name, error = next(iter(failed.items()))
        prefix = f"{len(failed)} of {len(chosen)} studies failed, first " if len(chosen) > 1 else ""
        exit_with_error(f"{prefix}{name}: {first_line(error)}", getattr(error, "exit_code", 2))


def _find_studies(names: tuple[str, ...]) -> "list[Study]":
    """The studies by name. An unknown name is an error before anything heavy is loaded."""
    from plainvit.config import nearest
    from plainvit.recipes import is_user_file
    from plainvit.studies.claims import read_claims

    known = list(read_claims())
    built_in = [name for name in names if not is_user_file(name)]
    for name in built_in:
        if name not in (*known, "all"):
            raise ValueError(f"unknown study {name!r}; {nearest(name, known)}; `plainvit study list` lists all")
    from plainvit.studies.registry import own_study, studies

    own = [own_study(name) for name in dict.fromkeys(names) if is_user_file(name)]
    return [study for name, study in studies().items() if name in built_in or "all" in built_in] + own


def _print_plan(chosen: "list[Study]", settings: "Settings") -> None:
    """Print the number of missing runs and the GPU time of each study and of all."""
    from plainvit.runtime.display import format_duration
    from plainvit.studies.plans import Plan, missing_time

    known = settings.open_ledger()
    plans = [
        Plan(study, study.arms(settings.budget), settings.runs or study.runs, settings.out / "runs") for study in chosen
    ]
    for plan in plans:
        while not plan.missing(known) and plan.extend(known):
            pass
    groups = {plan.study.name: [plan] for plan in plans}
    if len(chosen) > 1:
        groups[f"all {len(chosen)} studies"] = plans
    for name, group in groups.items():
        count, seconds = missing_time(group, known)
        cost = f", about {format_duration(seconds)} of an H200" if settings.budget == "gpu" else ""
        print(f"{name}: {count} runs{cost}", file=sys.stderr)
    names = {job.run for plan in plans for job in plan.all_jobs()} & known.runs.keys()
    commits = ", ".join(sorted({known.runs[name]["commit"] or "unknown" for name in names}))
    if names:
        print(f"{len(names)} finished runs are reused, of commit {commits}", file=sys.stderr)


def _run_studies(chosen: "list[Study]", settings: "Settings", workers: "Workers") -> dict[str, Exception]:
    """Run the studies; the report is written after each. Returns those that failed."""
    from plainvit.studies.execute import NoDeviceError, run_studies
    from plainvit.studies.report import write_report

    failed: dict[str, Exception] = {}
    shows = len(chosen) > 1 and not settings.quiet  # for a single study the summary has it
    for study, result in run_studies(chosen, settings, workers):
        if isinstance(result, Exception):
            failed[study.name] = result
            text = visible(first_line(result))
        else:
            write_report(settings.out)
            text = result.outcome
        if shows and not isinstance(result, NoDeviceError):  # the same for all
            print(f"{study.name}: {text}", file=sys.stderr)
    return failed
