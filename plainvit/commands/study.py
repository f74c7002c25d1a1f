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
    from plainvit.studies import page

    rows = page.listed(out)
    print_result(rows, None if json else page.table(rows, out))


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
    """Test a claim of the paper with small runs: reproduced, not reproduced, or not decided.

    The arms of a study differ in one setting, have several seeds and are compared on held-out training images; the
    decision rule is in the study's file. OUT/NAME holds the table, figure and verdict, OUT.md a report of all studies.
    Finished runs in OUT/runs are reused unless plainvit's code changed, so the same command resumes an interrupted
    study. Exit code 4 if runs failed.

    Args:
        names: Names from `plainvit study list`, all, or FILE.py:STUDY for your own (the file is executed)
        budget: Size of the runs: cpu: two minutes on two cores; gpu: minutes on a large GPU
        out: Folder of the runs and verdicts
        seeds: Number of seeds per arm; default: 3 (fewer cannot decide)
        at_once: Number of parallel runs; default: 2 on cpu, 4 on gpu
        data_root: Folder with the known datasets (not needed for cpu)
        json: Print JSON instead of a table
    """
    for flag, value in (("--seeds", seeds), ("--at-once", at_once)):
        if value < 0:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    chosen = _find_studies(names)
    from plainvit.studies.runs import Workers

    runs = at_once or {"cpu": min(2, os.cpu_count() or 1), "gpu": 4}[budget]
    try:
        with Workers(runs) as workers:
            failed = _run_studies(chosen, budget, out, workers, quiet=json, seeds=seeds, data_root=data_root)
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
    from plainvit.studies.page import titles

    if not names:
        raise ValueError("no study given, for example: plainvit study positions (`plainvit study list` lists them)")
    known = [title.name for title in titles()]
    built_in = [name for name in names if not in_file(name)]
    for name in built_in:
        if name not in (*known, "all"):
            raise ValueError(f"unknown study {name!r}; {nearest(name, known)}; `plainvit study list` lists all")
    from plainvit.studies.registry import own_study, studies

    own = [own_study(name) for name in dict.fromkeys(names) if in_file(name)]
    return [one for name, one in studies().items() if name in built_in or "all" in built_in] + own


def _run_studies(
    chosen: "list[Study]", budget: Budget, out: Path, workers: "Workers", *, quiet: bool, **settings: Any
) -> dict[str, Exception]:
    """Run one study after the other and return those that failed; the report is written after each."""
    from plainvit.studies.page import write_page
    from plainvit.studies.study import NoDeviceError, run_study

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
        write_page(out)
        if len(chosen) > 1 and not quiet:  # for a single study the summary has it
            print(f"{one.name}: {verdict.outcome}", file=sys.stderr)
    return failed


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _print_verdicts(chosen: "list[Study]", out: Path, json: bool) -> None:
    """Print the verdicts on the chosen studies and the path of the report."""
    from plainvit.studies import page

    found = page.verdicts(out)
    verdicts = [found[one.name] for one in chosen if one.name in found]
    if verdicts or json:
        print_result(verdicts, None if json else page.summary(verdicts, out))
