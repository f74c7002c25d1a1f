"""Lists studies and writes one page of all verdicts in a folder.

    plainvit study list --out docs/studies
    write_page(Path("docs/studies"))          docs/studies.md, from every docs/studies/NAME/verdict.json

Names and claims are parsed from the source files, so that listing does not load torch.
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
from plainvit.evaluate import statistics
from plainvit.runtime.display import readable
from plainvit.studies.registry import FILES

OUTCOMES = ("reproduced", "not reproduced", "not decided")
BUDGETS = ("cpu", "gpu")  # from the smallest
NEEDED = ("study", "number", "claim", "source", "rule", "budget", "outcome", "why", "command", "seconds", "environment")
PAPER = "[An Image is Worth 16x16 Words](https://arxiv.org/abs/2010.11929)"

UNNUMBERED = "Number 29, the VTAB groups (Figure 2), has no decision rule: see `plainvit vtab`."


@dataclass(frozen=True)
class Title:
    """A study in the list."""

    number: int
    name: str
    claim: str


def explain_uncertainty(seeds: Iterable[int]) -> str:
    """What ± and the intervals in tables and verdicts mean."""
    shares = [f"{100 * statistics.t_within(2.0, n - 1):.0f} % with {n} seeds" for n in sorted(set(seeds)) if n > 1]
    rules = f" Most rules use two standard errors, which cover {', '.join(shares)}." if shares else ""
    return (
        "In tables, ± is the standard deviation over seeds; in verdicts, the standard error over seeds, of paired "
        f"differences where two arms are compared. [95 % a to b] is Student's confidence interval.{rules}"
    )


def count_seeds(record: Mapping[str, Any]) -> int:
    """The largest number of seeds of an arm."""
    return max((len(rows) for rows in record.get("values", {}).values()), default=0)


def titles() -> list[Title]:
    """All studies, sorted by number."""
    return sorted((title for file in FILES for title in _read_titles(file)), key=lambda title: title.number)


def _read_titles(file: str) -> list[Title]:
    """From the Study(...) calls in the source; imports the file if one of them is not made of literals."""
    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Study"]
    found = [
        _parse_title({str(word.arg): getattr(word.value, "value", None) for word in call.keywords}) for call in calls
    ]
    complete = [title for title in found if title]
    if len(complete) == len(calls):
        return complete
    imported = importlib.import_module(f"plainvit.studies.{file}").STUDIES
    return [Title(study.number, study.name, study.claim) for study in imported]


def _parse_title(words: Mapping[str, object]) -> Title | None:
    match words:
        case {"number": int(number), "name": str(name), "claim": str(claim)}:
            return Title(number, name, claim)
    return None


def verdicts(out: Path) -> dict[str, dict[str, Any]]:
    """Every verdict.json in the subfolders, by study name; the user's own, without a number, come last."""
    records = [read_verdict(file) for file in sorted(out.glob("*/verdict.json"))]
    return {record["study"]: record for record in sorted(records, key=lambda record: record["number"] or math.inf)}


def read_verdict(file: Path) -> dict[str, Any]:
    try:
        record = read_json(file)
    except ValueError as error:
        raise DataError(str(error).splitlines()[0]) from error
    missing = [name for name in NEEDED if name not in record]
    if missing or record["outcome"] not in OUTCOMES or record["study"] != file.parent.name:
        problem = f"{missing[0]!r} is missing" if missing else "wrong study name or unknown outcome"
        raise DataError(f"{file} is not a valid verdict ({problem}): remove {file.parent} and run the study again")
    return record


def listed(out: Path) -> list[dict[str, Any]]:
    """All studies with their verdicts in `out` by budget."""
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
    """The list as a table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("no.", justify="right", no_wrap=True)
    shown.add_column("study", style="cyan", no_wrap=True)
    shown.add_column("claim", overflow="fold")
    shown.add_column("verdict", overflow="fold")
    for row in rows:
        outcomes = [f"{outcome} ({budget})" for budget, outcome in row["verdicts"].items() if outcome]
        shown.add_row(str(row["number"]), row["name"], Text(row["claim"]), ", ".join(outcomes) or "-")
    note = f"Verdicts in {out}. The project's own verdicts are in docs/studies.md. {UNNUMBERED}"
    return Group(shown, Text(f"\n{note}", style="dim"))


def summary(found: Sequence[Mapping[str, Any]], out: Path) -> Group:
    """Verdicts with their reasons, and the path of the page."""
    lines: list[Text] = []
    for record in found:
        colour = {"reproduced": "green", "not reproduced": "red"}.get(record["outcome"], "yellow")
        count = count_seeds(record)
        over = f", over {count} seed{'s' * (count > 1)}" if count else ""
        lines += [Text.assemble((f"{record['study']}: ", "bold"), (record["outcome"], colour), over)]
        lines += [Text(f"  {record['why']}")]
    seeds = [count_seeds(record) for record in found if "±" in record["why"]]
    legend = [Text(explain_uncertainty(seeds), style="dim")] if seeds else []
    return Group(*lines, *legend, Text(f"page: {page_of(out)}"))


# The page -------------------------------------------------------------------------------------------------------------


def page_of(out: Path) -> Path:
    """OUT.md, next to the folder."""
    named = out if out.name not in ("", "..") else out.resolve()
    return named.with_name(f"{named.name}.md")


def write_page(out: Path) -> Path:
    """Writes the page of all verdicts."""
    path = page_of(out)
    write_text(path, page(out))
    return path


def page(out: Path) -> str:
    found = verdicts(out)
    own = bool(found) and not any(record["number"] for record in found.values())
    rest = [title for title in titles() if title.name not in found and not own]
    parts = [*(_own_introduction(found) if own else _introduction(found, len(found) + len(rest))), *_overview(found)]
    for record in found.values():
        parts += _section(record, out)
    return "\n".join([*parts, *_list_not_run(rest)]).rstrip("\n") + "\n"


def _introduction(found: Mapping[str, Mapping[str, Any]], known: int) -> list[str]:
    outcomes = _count_outcomes(found)
    return [
        "# The paper's claims, tested",
        "",
        f"Claims of {PAPER}",
        "and three later claims about the same models. Each study compares runs (arms) that differ in one setting,",
        "with several seeds, on held-out training images; test images are not used. The decision rule was written",
        "before the runs; where it was changed afterwards, the page shows both. A claim about 300 million images may",
        "not hold on 80,000. Fewer than three seeds decide nothing.",
        "",
        *textwrap.wrap(explain_uncertainty(count_seeds(record) for record in found.values()), 110),
        "",
        "`plainvit study list` lists the studies. `plainvit study NAME --budget cpu|gpu` runs one, on a laptop in two",
        "minutes or on one large GPU, and writes this page.",
        "",
        f"**{len(found)} of {known} studies have a verdict{': ' + outcomes if outcomes else ''}.** {UNNUMBERED}",
        "",
    ]


def _own_introduction(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The introduction if all studies are the user's own."""
    return [
        "# Studies",
        "",
        "Your own claims. The arms and the decision rule of each study are in the file that its command names.",
        "",
        *textwrap.wrap(explain_uncertainty(count_seeds(record) for record in found.values()), 110),
        "",
        f"**{_count_outcomes(found)}.**",
        "",
    ]


def _count_outcomes(found: Mapping[str, Mapping[str, Any]]) -> str:
    counts = Counter(record["outcome"] for record in found.values())
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])


def _overview(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    rows = [
        f"| {record['number'] or ''} | {_cell(record['claim'])} | {_outcome(record)} | {record['budget']} | "
        f"[{record['study']}](#{_anchor(record)}) |"
        for record in found.values()
    ]
    return ["| no. | claim | outcome | budget | study |", "|---|---|---|---|---|", *rows, ""]


def _section(record: Mapping[str, Any], out: Path) -> Iterator[str]:
    """Claim, verdict, rule, table, figure and command of a study."""
    name, folder = record["study"], out / record["study"]
    yield from (
        f"## {_heading(record)}",
        "",
        f"{record['claim']} *{record['source']}.* {record.get('paper', '')}".rstrip(),
        "",
    )
    yield from (f"{_outcome(record)}: {record['why'].rstrip('.')}.", "", f"Rule: {record['rule'].rstrip('.')}.", "")
    if before := record.get("before"):
        old = f"This rule was written after the runs. The original rule, with the outcome {before['outcome']}"
        yield from (f"{old}: {before['rule'].rstrip('.')}.", "")
    yield from (*_read_table(folder / "table.md"), "")
    if (folder / "figure.png").is_file():
        yield from (f"![{name}: {_cell(record['claim'])}]({out.resolve().name}/{name}/figure.png)", "")
    yield from (_describe_runs(record, out), "")


def _read_table(file: Path) -> list[str]:
    """The rows of table.md."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line for line in lines if line.startswith("|")]


def _describe_runs(record: Mapping[str, Any], out: Path) -> str:
    """The command, and time, devices and commits of the runs."""
    runs, machine = record.get("runs", {}), record["environment"]
    commits = runs.get("commits") or [machine.get("commit") or "unknown"]
    devices = runs.get("devices") or [machine.get("device") or "unknown"]
    time = f"measured in {readable(record['seconds'])}"
    if count := runs.get("count"):
        time = f"{count} runs, {readable(runs['seconds'])} in total"
    words = [time, *devices, f"commit {', '.join(commits)}"]
    link = f"[verdict.json]({out.resolve().name}/{record['study']}/verdict.json)"
    return f"`{record['command']}`: {'; '.join(words)}; {link}."


def _list_not_run(rest: Sequence[Title]) -> list[str]:
    if not rest:
        return []
    rows = [f"| {title.number} | {_cell(title.claim)} | {title.name} |" for title in rest]
    return ["## Not run", "", "| no. | claim | study |", "|---|---|---|", *rows]


def _outcome(record: Mapping[str, Any]) -> str:
    return f"**{record['outcome']}**"


def _heading(record: Mapping[str, Any]) -> str:
    return f"{record['number']}. {record['study']}" if record["number"] else record["study"]


def _anchor(record: Mapping[str, Any]) -> str:
    """GitHub's anchor of the heading."""
    return f"{record['number']}-{record['study']}" if record["number"] else record["study"].lower()


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")
