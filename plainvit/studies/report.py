"""Lists studies and writes one report of all verdicts in a folder.

    plainvit study list --out docs/studies
    write_report(Path("docs/studies"))          docs/studies.md, from every docs/studies/NAME/verdict.json

Listing does not load torch. A verdict that was made under another rule than the current one is shown as history.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.config import pluralize
from plainvit.data.decode import DataError
from plainvit.disk import read_json, write_text
from plainvit.runtime.display import format_duration
from plainvit.studies.claims import BUDGETS, METRIC_TITLES, PERCENT, read_claims
from plainvit.studies.verdict import describe_effect

OLD_OUTCOMES = ("reproduced", "not reproduced", "not decided")  # outcomes of 0.1
COLORS = {"supported": "green", "contradicted": "red", "inconclusive": "yellow"}
NEEDED = ("study", "number", "claim", "source", "rule", "budget", "outcome", "why", "metric", "values", "command")
NEEDED += ("seconds", "environment")
UNNUMBERED = "Number 29, the VTAB groups (Figure 2), has no decision rule: see `plainvit vtab`."

METHOD = """\
Each criterion of a rule compares the means of arms (a difference or another weighted sum) and has a 95 % confidence
interval (Welch). It is tested at 5 % (two-sided), with Holm's correction over the criteria of the claim. Criteria of
equality use two one-sided tests (TOST) with a margin fixed before the runs. Supported: all criteria hold.
Contradicted: at least one is ruled out. Inconclusive: anything else, or an arm has fewer than three runs. Learning
rates are chosen on separate runs and separate held-out images."""
INTRODUCTION = f"""\
# The paper's claims, tested

This page tests claims of [An Image is Worth 16x16 Words](https://arxiv.org/abs/2010.11929) and three later claims
about the same models. Each study compares runs (arms) that differ in one setting, with several independent seeds, on
held-out training images; test images are not used. The rule is written before the runs. These runs are small: a
result on 80,000 images does not settle a claim about 300 million.

{METHOD}

`plainvit study list` lists the studies. `plainvit study NAME --budget cpu|gpu` runs one, on a laptop in minutes or on
one large GPU, and writes this page. {UNNUMBERED}"""
OWN_INTRODUCTION = f"""\
# Studies

Your own claims. The arms and the rule of each study are in the file that its command names.

{METHOD}"""
HISTORY = """\
## History

Verdicts under earlier rules, with the commits of their runs. They are not evidence under the current rules: version
0.1 paired runs by seed and used two standard errors over three seeds, which cover only 82 %."""
MEANINGS = {
    "supported": "Every criterion of the rule holds in these small runs.",
    "contradicted": "The claim does not hold in these small runs: {criterion} is {effect}; the rule requires {need}.",
    "inconclusive": "These runs do not decide the claim: {criterion} is {effect}; {need} is not shown or ruled out.",
}


def read_verdicts(out: Path) -> dict[str, dict[str, Any]]:
    """Every verdict.json in the subfolders, by study name; the user's own, without a number, come last."""
    records = [read_verdict(file) for file in sorted(out.glob("*/verdict.json"))]
    return {record["study"]: record for record in sorted(records, key=lambda record: record["number"] or math.inf)}


def read_verdict(file: Path) -> dict[str, Any]:
    try:
        record = read_json(file)
    except ValueError as error:
        raise DataError(str(error).splitlines()[0]) from error
    missing = [name for name in NEEDED if name not in record]
    if missing or record["outcome"] not in (*COLORS, *OLD_OUTCOMES) or record["study"] != file.parent.name:
        problem = f"{missing[0]!r} is missing" if missing else "wrong study name or unknown outcome"
        raise DataError(f"{file} is not a valid verdict ({problem}): remove {file.parent} and run the study again")
    return record


def is_current(record: Mapping[str, Any]) -> bool:
    """Whether the verdict was made under the current rule."""
    return "parts" in record and record["rule"] == read_claims().get(record["study"], record)["rule"]


def count_runs(record: Mapping[str, Any]) -> str:
    """The largest number of runs of an arm, in words."""
    count = max((len(rows) for rows in record["values"].values()), default=0)
    return f"{pluralize(count, 'run')} per arm"


# Terminal -------------------------------------------------------------------------------------------------------------


def list_verdicts(out: Path) -> list[dict[str, Any]]:
    """All studies with their current verdicts in `out` by budget."""
    verdicts = {name: record for name, record in read_verdicts(out).items() if is_current(record)}
    rows: list[dict[str, Any]] = []
    for name, claim in read_claims().items():
        record = verdicts.get(name, {})
        outcomes = {budget: record["outcome"] if record.get("budget") == budget else None for budget in BUDGETS}
        rows.append({"number": claim["number"], "name": name, "claim": claim["claim"], "verdicts": outcomes})
    return rows


def render_list(rows: Sequence[Mapping[str, Any]], out: Path) -> Group:
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


def render_summary(records: Sequence[Mapping[str, Any]], out: Path) -> Group:
    """Verdicts with a line for each criterion, and the path of the report."""
    lines: list[Text] = []
    for record in records:
        head = (f"{record['study']}: ", "bold"), (record["outcome"], COLORS.get(record["outcome"], ""))
        lines.append(Text.assemble(*head, f", {count_runs(record)}"))
        lines += [
            Text(f"  {name} {effect} ({need}), {holds}") for name, effect, need, *_, holds in _criterion_rows(record)
        ]
    legend = Text("[95 % interval by Welch]; decided at 5 % after Holm's correction over the criteria", style="dim")
    return Group(*lines, legend, Text(f"report: {report_path(out)}"))


# Report ---------------------------------------------------------------------------------------------------------------


def report_path(out: Path) -> Path:
    """OUT.md, next to the folder."""
    named = out if out.name not in ("", "..") else out.resolve()
    return named.with_name(f"{named.name}.md")


def write_report(out: Path) -> Path:
    """Writes the report of all verdicts."""
    path = report_path(out)
    write_text(path, make_report(out))
    return path


def make_report(out: Path) -> str:
    records, claims, introduction = read_verdicts(out), read_claims(), INTRODUCTION
    if records and not claims.keys() & records.keys():
        claims, introduction = {}, OWN_INTRODUCTION
    paragraphs = [introduction, _summary(records, len(claims | records)), _overview(records, claims)]
    for record in records.values():
        if is_current(record):
            paragraphs += _section(record, out)
    return "\n\n".join([*paragraphs, *_history(records)]) + "\n"


def _summary(records: Mapping[str, Mapping[str, Any]], count: int) -> str:
    counts = Counter(record["outcome"] for record in records.values() if is_current(record))
    summary = f"{counts.total()} of {count} studies have a verdict under the current rules"
    if counts:
        summary += ": " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in COLORS if counts[outcome])
    return f"**{summary}.**"


def _overview(records: dict[str, dict[str, Any]], claims: dict[str, dict[str, Any]]) -> str:
    """One row for each study: claim, verdict, deciding effect, data and number of runs."""
    rows: list[tuple[object, ...]] = []
    own = {name: record for name, record in records.items() if name not in claims}
    for name, claim in (claims | own).items():
        record = records.get(name, {})
        about = claim["number"] or "", claim["claim"]
        if record and is_current(record):
            criterion = find_deciding_criterion(record)
            link = f"[{record['outcome']}](#{_heading(record).lower().replace('. ', '-')})"
            effect = f"{criterion['name']}: {describe_effect(criterion)}"
            rows.append((*about, link, effect, ", ".join(record.get("data", ())), record["runs"]["count"] or ""))
        else:
            rows.append((*about, "not run", "", "", ""))
    return markdown_table(("no.", "claim", "verdict", "effect, 95 % interval", "data", "runs"), rows)


def find_deciding_criterion(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The criterion that the outcome rests on: the least certain, or of a contradicted claim the most certain one."""
    sought = {"supported": "yes", "contradicted": "no", "inconclusive": "open"}[record["outcome"]]
    criteria = [criterion for criterion in record["parts"] if criterion["holds"] == sought] or record["parts"]
    criteria = [criterion for criterion in criteria if criterion["runs"]] or criteria  # with an interval
    choose = min if sought == "no" else max
    return choose(criteria, key=lambda criterion: criterion["p"])


def _section(record: Mapping[str, Any], out: Path) -> Iterator[str]:
    """Claim, rule, verdict, meaning, figure, criteria, arms and commits of a study."""
    name, folder = record["study"], out / record["study"]
    yield f"## {_heading(record)}"
    claim = read_claims().get(name, record)
    yield f"{claim['claim']} *{claim['source']}.* {claim.get('paper', '')}".rstrip()
    yield f"Rule: {claim['rule'].rstrip('.')}."
    criterion = find_deciding_criterion(record)
    meaning = MEANINGS[record["outcome"]].format(
        criterion=criterion["name"], effect=describe_effect(criterion), need=criterion["need"]
    )
    limits = f" Limits: {claim['limits']}" if claim.get("limits") else ""
    yield f"**{record['outcome']}**, {count_runs(record)}. {meaning}{limits}"
    if (folder / "figure.png").is_file():
        yield f"![{name}: {_cell(claim['claim'])}]({_link(out, name, 'figure.png')})"
    heads = ("criterion", "effect, 95 % interval", "needed", "runs", "p (Holm)", "holds")
    yield markdown_table(heads, _criterion_rows(record))
    yield markdown_table(("arm", str(METRIC_TITLES.get(record["metric"], record["metric"])), "runs"), _arm_rows(record))
    yield _describe_runs(record, out)


def _history(records: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Verdicts under earlier rules."""
    present = [(name, record) for name, record in records.items() if not is_current(record)]
    present += [(name, old) for name, record in records.items() for old in record.get("history", ())]
    rows = [
        (
            old["number"] or "",
            name,
            old["outcome"],
            f"{old['budget']}, {count_runs(old)}",
            old["why"],
            ", ".join(_commits(old)),
        )
        for name, old in sorted(present, key=lambda item: item[1]["number"] or math.inf)
    ]
    if rows:
        yield HISTORY
        yield markdown_table(("no.", "study", "verdict", "budget", "why", "commits"), rows)


def _criterion_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            criterion["name"],
            describe_effect(criterion),
            criterion["need"],
            str(criterion["runs"] or ""),
            f"{criterion['p']:.2g}",
            criterion["holds"],
        )
        for criterion in record["parts"]
    ]


def _arm_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Mean and standard deviation of each arm."""
    scale, rows = 100 if record["metric"] in PERCENT else 1, []
    for arm, runs in record["values"].items():
        values = [math.nan if run[record["metric"]] is None else scale * run[record["metric"]] for run in runs]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        rows.append((arm, f"{statistics.fmean(values):.2f}{spread}", str(len(values))))
    return rows


def _commits(record: Mapping[str, Any]) -> list[str]:
    return record.get("runs", {}).get("commits") or [record["environment"].get("commit") or "unknown"]


def _describe_runs(record: Mapping[str, Any], out: Path) -> str:
    """The command, and time, devices and commits of the runs."""
    runs = record["runs"]
    devices = runs["devices"] or [record["environment"].get("device") or "unknown"]
    time = f"measured in {format_duration(record['seconds'])}"
    if runs["count"]:
        time = f"{runs['count']} runs, {format_duration(runs['seconds'])} in total"
    rule = f"rule of commit {record['rule_commit']}, " if record.get("rule_commit") else ""
    details = [time, *devices, f"{rule}runs of commit {', '.join(_commits(record))}"]
    link = _link(out, record["study"], "verdict.json")
    return f"`{record['command']}`: {'; '.join(details)}; [verdict.json]({link})."


def _link(out: Path, study: str, file: str) -> str:
    """The address of a study's file in the report, which is next to the folder."""
    return quote(f"{report_path(out).stem}/{study}/{file}")


def _heading(record: Mapping[str, Any]) -> str:
    return f"{record['number']}. {record['study']}" if record["number"] else record["study"]


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(str(cell)) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
