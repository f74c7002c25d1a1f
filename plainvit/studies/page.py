"""One page of all verdicts under a folder: what was claimed, what came out, with tables and figures.

    plainvit study list --out docs/studies
    write_page(Path("docs/studies"))          docs/studies.md, from every docs/studies/NAME/verdict.json

Names and claims are read from the files of the studies without running them, so that listing never loads torch.
"""

import ast
import importlib
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.data.decode import DataError
from plainvit.disk import read_json, write_text
from plainvit.evaluate import chance
from plainvit.runtime.display import readable
from plainvit.studies.book import FILES

OUTCOMES = ("reproduced", "not reproduced", "not decided")
BUDGETS = ("cpu", "gpu")  # from the smallest
NEEDED = ("study", "number", "claim", "source", "rule", "budget", "outcome", "why", "command", "seconds", "environment")
PAPER = "[An Image is Worth 16x16 Words](https://arxiv.org/abs/2010.11929)"

UNNUMBERED = "Number 29, how VTAB divides (Figure 2), has no rule to decide by: `plainvit vtab` reports it."


@dataclass(frozen=True)
class Title:
    """What a list says of a study."""

    number: int
    name: str
    claim: str


def plus_minus(seeds: Iterable[int]) -> str:
    """What the signs of a verdict over so many seeds mean."""
    shares = [f"{100 * chance.t_within(2.0, n - 1):.0f} % with {n} seeds" for n in sorted(set(seeds)) if n > 1]
    rules = f" Two standard errors, by which most rules decide, are {', '.join(shares)}, not 95 %." if shares else ""
    return (
        "± in a table is the standard deviation over seeds; in a verdict it is the standard error over seeds, of the "
        f"difference paired by seed where there are two; [95 % a to b] is Student's interval of it.{rules}"
    )


def seeds_of(said: Mapping[str, Any]) -> int:
    """The most that an arm has."""
    return max((len(rows) for rows in said.get("values", {}).values()), default=0)


def titles() -> list[Title]:
    """Of every study, in the order of the claims."""
    return sorted((title for file in FILES for title in _in_file(file)), key=lambda title: title.number)


def _in_file(file: str) -> list[Title]:
    """From the calls of Study in its source; where one of them does not say all in plain words, by importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Study"]
    found = [_title({str(word.arg): getattr(word.value, "value", None) for word in call.keywords}) for call in calls]
    plain = [title for title in found if title]
    if len(plain) == len(calls):
        return plain
    made = importlib.import_module(f"plainvit.studies.{file}").STUDIES
    return [Title(study.number, study.name, study.claim) for study in made]


def _title(words: Mapping[str, object]) -> Title | None:
    match words:
        case {"number": int(number), "name": str(name), "claim": str(claim)}:
            return Title(number, name, claim)
    return None


def verdicts(out: Path) -> dict[str, dict[str, Any]]:
    """Every verdict.json below a folder, by the study's name; those of the user's own, without a number, last."""
    found = [read_verdict(file) for file in sorted(out.glob("*/verdict.json"))]
    return {one["study"]: one for one in sorted(found, key=lambda one: one["number"] or math.inf)}


def read_verdict(file: Path) -> dict[str, Any]:
    try:
        said = read_json(file)
    except ValueError as error:
        raise DataError(str(error).splitlines()[0]) from error
    missing = [name for name in NEEDED if name not in said]
    if missing or said["outcome"] not in OUTCOMES or said["study"] != file.parent.name:
        fault = f"{missing[0]} is missing" if missing else "it is of another study, or of no known outcome"
        raise DataError(f"{file} is not a verdict: {fault}; remove {file.parent} to have it made again")
    return said


def listed(out: Path) -> list[dict[str, Any]]:
    """Every study, and the verdict on it at each budget that there is under `out`."""
    found = verdicts(out)
    return [
        {
            "number": title.number,
            "name": title.name,
            "claim": title.claim,
            "verdicts": {
                budget: found[title.name]["outcome"]
                if title.name in found and found[title.name]["budget"] == budget
                else None
                for budget in BUDGETS
            },
        }
        for title in titles()
    ]


def table(rows: Sequence[Mapping[str, Any]], out: Path) -> Group:
    """The list for people, and whose verdicts these are."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("", justify="right", no_wrap=True)
    shown.add_column("study", style="cyan", no_wrap=True)
    shown.add_column("claim", overflow="fold")
    shown.add_column("verdict", overflow="fold")
    for row in rows:
        there = [f"{outcome} ({budget})" for budget, outcome in row["verdicts"].items() if outcome]
        shown.add_row(str(row["number"]), row["name"], Text(row["claim"]), ", ".join(there) or "-")
    verdicts = f"Verdicts are those below {out}; the ones that come with plainvit are in docs/studies.md of its source."
    return Group(shown, Text(f"\n{verdicts} {UNNUMBERED}", style="dim"))


def summary(found: Sequence[Mapping[str, Any]], out: Path) -> Group:
    """Verdicts with their reasons, and where to read more."""
    lines: list[Text] = []
    for said in found:
        colour = {"reproduced": "green", "not reproduced": "red"}.get(said["outcome"], "yellow")
        count = seeds_of(said)
        over = f", over {count} seed{'s' * (count > 1)}" if count else ""
        lines += [Text.assemble((f"{said['study']}: ", "bold"), (said["outcome"], colour), over)]
        lines += [Text(f"  {said['why']}")]
    there = [seeds_of(said) for said in found if "±" in said["why"]]
    signs = [Text(plus_minus(there), style="dim")] if there else []
    return Group(*lines, *signs, Text(f"page: {page_of(out)}"))


# The page -------------------------------------------------------------------------------------------------------------


def page_of(out: Path) -> Path:
    """OUT.md, beside the folder."""
    named = out if out.name not in ("", "..") else out.resolve()
    return named.with_name(f"{named.name}.md")


def write_page(out: Path) -> Path:
    """The page of all verdicts that there are."""
    path, text = page_of(out), page(out)
    write_text(path, text)
    return path


def page(out: Path) -> str:
    found = verdicts(out)
    own = bool(found) and not any(said["number"] for said in found.values())
    rest = [title for title in titles() if title.name not in found and not own]
    parts = [*(_own_opening(found) if own else _opening(found, len(found) + len(rest))), *_overview(found)]
    for said in found.values():
        parts += _section(said, out)
    return "\n".join([*parts, *_not_run(rest)]).rstrip("\n") + "\n"


def _opening(found: Mapping[str, Mapping[str, Any]], known: int) -> list[str]:
    of = _counted(found)
    return [
        "# The paper's claims, tested",
        "",
        f"Claims of {PAPER},",
        "and three of later years about the same models, each tested by runs that differ in one thing. Every arm has",
        "several seeds and is compared on held-out training images; test images are not read. The rule that decides",
        "was written before the runs; where it was changed afterwards, both are told. What does not hold at this scale",
        "is said so: a claim about 300 million images need not show on 80,000. Fewer than three seeds decide nothing.",
        "",
        *textwrap.wrap(plus_minus(seeds_of(said) for said in found.values()), 110),
        "",
        "`plainvit study list` names the studies, `plainvit study NAME --budget cpu|gpu` runs one: on a laptop in two",
        "minutes, or on one large GPU. It writes this page.",
        "",
        f"**{len(found)} of {known} studies have a verdict{': ' + of if of else ''}.** {UNNUMBERED}",
        "",
    ]


def _own_opening(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where all are the user's own."""
    return [
        "# Studies",
        "",
        "Claims of one's own: the arms of each and the rule that decides are in the file that its command names.",
        "",
        *textwrap.wrap(plus_minus(seeds_of(said) for said in found.values()), 110),
        "",
        f"**{_counted(found)}.**",
        "",
    ]


def _counted(found: Mapping[str, Mapping[str, Any]]) -> str:
    counts = Counter(said["outcome"] for said in found.values())
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])


def _overview(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    rows = [
        f"| {said['number'] or ''} | {_cell(said['claim'])} | {_outcome(said)} | {said['budget']} | "
        f"[{said['study']}](#{_anchor(said)}) |"
        for said in found.values()
    ]
    return ["| | claim | outcome | budget | study |", "|---|---|---|---|---|", *rows, ""]


def _section(said: Mapping[str, Any], out: Path) -> Iterator[str]:
    """A study: what was claimed and found, by what rule, the numbers, the figure, and how to make it again."""
    name, folder = said["study"], out / said["study"]
    yield from (f"## {_heading(said)}", "", f"{said['claim']} *{said['source']}.* {said.get('paper', '')}".rstrip(), "")
    yield from (f"{_outcome(said)}: {said['why'].rstrip('.')}.", "", f"Rule: {said['rule'].rstrip('.')}.", "")
    if before := said.get("before"):
        old = f"This rule was written after the runs. The one before it, by which they were {before['outcome']}"
        yield from (f"{old}: {before['rule'].rstrip('.')}.", "")
    yield from (*_table_of(folder / "table.md"), "")
    if (folder / "figure.png").is_file():
        yield from (f"![{name}: {_cell(said['claim'])}]({out.resolve().name}/{name}/figure.png)", "")
    yield from (_made(said, out), "")


def _table_of(file: Path) -> list[str]:
    """The rows of the study's own table."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line for line in lines if line.startswith("|")]


def _made(said: Mapping[str, Any], out: Path) -> str:
    """The command, and what the runs were made with: these may be older than the verdict."""
    runs, made = said.get("runs", {}), said["environment"]
    commits = runs.get("commits") or [made.get("commit") or "unknown"]
    devices = runs.get("devices") or [made.get("device") or "unknown"]
    known = runs.get("count")
    took = f"{known} runs, {readable(runs['seconds'])} in all" if known else f"measured in {readable(said['seconds'])}"
    words = [took, *devices, f"commit {', '.join(commits)}"]
    link = f"[verdict.json]({out.resolve().name}/{said['study']}/verdict.json)"
    return f"`{said['command']}`: {'; '.join(words)}; {link}."


def _not_run(rest: Sequence[Title]) -> list[str]:
    if not rest:
        return []
    rows = [f"| {title.number} | {_cell(title.claim)} | {title.name} |" for title in rest]
    return ["## Not run", "", "| | claim | study |", "|---|---|---|", *rows]


def _outcome(said: Mapping[str, Any]) -> str:
    return f"**{said['outcome']}**"


def _heading(said: Mapping[str, Any]) -> str:
    return f"{said['number']}. {said['study']}" if said["number"] else said["study"]


def _anchor(said: Mapping[str, Any]) -> str:
    """As GitHub makes it of the heading."""
    return f"{said['number']}-{said['study']}" if said["number"] else said["study"].lower()


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")
