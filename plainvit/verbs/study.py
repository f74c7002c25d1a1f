"""The paper's claims, tested: study, study list."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from plainvit.config import visible
from plainvit.verbs.words import fail, show

if TYPE_CHECKING:
    from plainvit.studies.runs import Workers
    from plainvit.studies.study import Study

Names = Annotated[tuple[str, ...], Positional, arg(metavar="NAME ...", help_behavior_hint="(required)")]
Budget = Literal["cpu", "gpu"]


def listing(*, out: Path = Path("studies"), json: bool = False) -> None:
    """The claims that can be tested, and the verdicts that there are on them.

    Args:
        out: The folder of the verdicts, as given to `plainvit study`.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.studies import page

    rows = page.listed(out)
    show(rows, None if json else page.table(rows, out))


def study(
    names: Names,
    /,
    *,
    budget: Budget = "cpu",
    out: Path = Path("studies"),
    seeds: int = 0,
    at_once: int = 0,
    data_root: str = "",
    json: bool = False,
) -> None:
    """Tests a claim of the paper by runs of its own: reproduced, not reproduced, or not decided.

    `plainvit study list` names them. Arms differ in one thing, have several seeds and are compared on held-out training
    images; the rule that decides is in the study's file. OUT/NAME has the table, the figure and the verdict, OUT.md is
    a page of all of them. Finished runs in OUT/runs are not run again unless plainvit's code changed, so an interrupted
    study goes on with the same command. Exit code 4 if runs of it failed, by divergence or otherwise.

    Args:
        names: Of studies, such as positions; or all; or FILE.py:STUDY, one of your own in a file that you trust.
        budget: cpu: two minutes on two cores; gpu: minutes on a large GPU.
        out: Folder of the runs and verdicts.
        seeds: Of each arm; 3 where not given, and fewer decide nothing.
        at_once: Runs side by side; where not given 2 on cpu, 4 on a gpu.
        data_root: Where known sets lie, each in a folder of its name; cpu needs none.
        json: Print JSON for machines instead of a table.
    """
    if seeds < 0 or at_once < 0:
        raise ValueError(f"--seeds and --at-once are at least 1, got {seeds or at_once}")
    chosen = _chosen(names)
    from plainvit.studies.runs import Workers

    runs = at_once or {"cpu": min(2, os.cpu_count() or 1), "gpu": 4}[budget]
    try:
        with Workers(runs) as workers:
            failed = _run(chosen, budget, out, workers, quiet=json, seeds=seeds, data_root=data_root)
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on with what {out / 'runs'} has", 130)
    _tell(chosen, out, json)
    if failed:
        first = next(iter(failed))
        many = f"{len(failed)} of {len(chosen)} studies failed, the first of them " if len(chosen) > 1 else ""
        fail(f"{many}{first}: {_line(failed[first])}", getattr(failed[first], "exit_code", 2))


def _chosen(names: tuple[str, ...]) -> "list[Study]":
    """By their names; an unknown one is told of before anything heavy is loaded."""
    from plainvit.config import nearest
    from plainvit.recipes import in_file
    from plainvit.studies.page import titles

    if not names:
        raise ValueError("which study? `plainvit study list` names them: plainvit study positions")
    known = [title.name for title in titles()]
    ours = [name for name in names if not in_file(name)]
    for name in ours:
        if name not in (*known, "all"):
            raise ValueError(f"there is no study {name!r}; {nearest(name, known)}; `plainvit study list` has them all")
    from plainvit.studies.book import own_study, studies

    own = [own_study(name) for name in dict.fromkeys(names) if in_file(name)]
    return [one for name, one in studies().items() if name in ours or "all" in ours] + own


def _run(
    chosen: "list[Study]", budget: Budget, out: Path, workers: "Workers", *, quiet: bool, **settings: Any
) -> dict[str, Exception]:
    """One after the other, the page after each; what failed, which does not keep the others from running."""
    from plainvit.studies.page import write_page
    from plainvit.studies.study import NoDeviceError, run_study

    failed: dict[str, Exception] = {}
    for number, one in enumerate(chosen, 1):
        if not quiet:
            print(f"{one.name}, {number} of {len(chosen)}: {one.claim}", file=sys.stderr)
        try:
            verdict = run_study(one, budget, out, workers, quiet=quiet, **settings)
        except NoDeviceError:  # the others would say the same
            raise
        except (ValueError, OSError) as error:
            failed[one.name] = error
            if len(chosen) > 1 and not quiet:
                print(f"{one.name}: {visible(_line(error))}", file=sys.stderr)
            continue
        write_page(out)
        if len(chosen) > 1 and not quiet:  # of a single one the summary says it
            print(f"{one.name}: {verdict.outcome}", file=sys.stderr)
    return failed


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tell(chosen: "list[Study]", out: Path, json: bool) -> None:
    """The verdicts of this call, and where the page is."""
    from plainvit.studies import page

    found = page.verdicts(out)
    there = [found[one.name] for one in chosen if one.name in found]
    if there or json:
        show(there, None if json else page.summary(there, out))
