"""Tests of the paper's claims: study, study list."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plainvit.commands.parsing import exit_with_error, print_result
from plainvit.config import visible

if TYPE_CHECKING:
    from plainvit.studies.runs import Workers
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
    json: bool = False,
) -> None:
    """Test a claim of the paper with small runs: supported, contradicted or inconclusive.

    The arms of a study differ in one setting, have several independent runs and are compared on held-out training
    images. OUT/NAME holds the table, figure and verdict, OUT.md a report of all studies.
    The number of runs and the GPU time are printed first. Finished runs in OUT/runs are reused unless plainvit's code
    changed, so the same command resumes an interrupted study. Exit code 4 if runs failed.

    Args:
        names: Names from `plainvit study list`, all, or FILE.py:STUDY for your own (the file is executed)
        budget: Size of the runs: cpu: minutes on two cores; gpu: minutes on a large GPU
        out: Folder of the runs and verdicts
        seeds: Number of runs per arm, each with its own seed; default: that of the study (fewer than 3 cannot decide)
        at_once: Number of parallel runs; default: 2 on cpu, 4 on gpu
        data_root: Folder with the known datasets and published weights (not needed for cpu)
        json: Print JSON instead of a table
    """
    for flag, value in (("--seeds", seeds), ("--at-once", at_once)):
        if value < 0:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    chosen = _find_studies(names)
    from plainvit.studies.runs import Workers

    if not json:
        _print_plan(chosen, budget, out, seeds)
    processes = at_once or {"cpu": min(2, os.cpu_count() or 1), "gpu": 4}[budget]
    try:
        with Workers(processes) as workers:
            failed = _run_studies(chosen, budget, out, workers, quiet=json, runs=seeds, data_root=data_root)
    except KeyboardInterrupt:
        exit_with_error(f"interrupted; run the same command to resume with the finished runs in {out / 'runs'}", 130)
    _print_verdicts(chosen, out, json)
    if failed:
        first = next(iter(failed))
        prefix = f"{len(failed)} of {len(chosen)} studies failed, first " if len(chosen) > 1 else ""
        exit_with_error(f"{prefix}{first}: {_first_line(failed[first])}", getattr(failed[first], "exit_code", 2))


def _find_studies(names: tuple[str, ...]) -> "list[Study]":
    """The studies by name. An unknown name is an error before anything heavy is loaded."""
    from plainvit.config import nearest
    from plainvit.recipes import in_file
    from plainvit.studies.claims import read_claims

    known = list(read_claims())
    built_in = [name for name in names if not in_file(name)]
    for name in built_in:
        if name not in (*known, "all"):
            raise ValueError(f"unknown study {name!r}; {nearest(name, known)}; `plainvit study list` lists all")
    from plainvit.studies.registry import own_study, studies

    own = [own_study(name) for name in dict.fromkeys(names) if in_file(name)]
    return [one for name, one in studies().items() if name in built_in or "all" in built_in] + own


def _print_plan(chosen: "list[Study]", budget: Budget, out: Path, seeds: int) -> None:
    """Print the number of missing runs and the GPU time of each study and of all."""
    from plainvit.runtime.display import readable
    from plainvit.studies.estimate import estimate_seconds

    plans = {one.name: [one] for one in chosen} | ({f"all {len(chosen)} studies": chosen} if len(chosen) > 1 else {})
    for name, group in plans.items():
        count, seconds = estimate_seconds(group, budget, out / "runs", seeds)
        time = f", about {readable(seconds)} of an H200" if budget == "gpu" else ""
        print(f"{name}: {count} runs{time}", file=sys.stderr)


def _run_studies(
    chosen: "list[Study]", budget: Budget, out: Path, workers: "Workers", *, quiet: bool, **settings: Any
) -> dict[str, Exception]:
    """Run one study after the other and return those that failed; the report is written after each."""
    from plainvit.studies.execute import NoDeviceError, run_study
    from plainvit.studies.report import write_report

    failed: dict[str, Exception] = {}
    for number, one in enumerate(chosen, 1):
        if not quiet:
            print(f"{one.name}, {number} of {len(chosen)}: {one.claim}", file=sys.stderr)
        try:
            verdict = run_study(one, budget, out, workers, quiet=quiet, **settings)
        except NoDeviceError:  # would fail every study
            raise
        except (ValueError, OSError) as error:
            failed[one.name] = error
            if len(chosen) > 1 and not quiet:
                print(f"{one.name}: {visible(_first_line(error))}", file=sys.stderr)
            continue
        write_report(out)
        if len(chosen) > 1 and not quiet:  # for a single study the summary has it
            print(f"{one.name}: {verdict.outcome}", file=sys.stderr)
    return failed


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _print_verdicts(chosen: "list[Study]", out: Path, json: bool) -> None:
    """Print the verdicts on the chosen studies and the path of the report."""
    from plainvit.studies import report

    found = report.read_verdicts(out)
    verdicts = [found[one.name] for one in chosen if one.name in found]
    if verdicts or json:
        print_result(verdicts, None if json else report.render_summary(verdicts, out))
