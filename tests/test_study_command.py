"""The command `study`: its list, its report, interruptions."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import run_study
from shell import Capture, fail, run

from plainvit.cli import main
from plainvit.data.decode import DataError
from plainvit.runtime.folder import replace_non_finite
from plainvit.studies import report
from plainvit.studies.claims import read_claims
from plainvit.studies.execute import Settings
from plainvit.studies.registry import own_study, studies
from plainvit.studies.study import Results
from plainvit.studies.verdict import decide, fact, require_above, welch

COMMAND = Path(sys.executable).with_name("plainvit")
DOCS = Path(__file__).parent.parent / "docs"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


PART = {"name": "a - b", "need": "> 0", "effect": 0.01, "low": 0.005, "high": 0.015, "runs": 10, "unit": "points"}
PART |= {"p": 0.01, "holds": "yes"}


def plant(out: Path, name: str, number: int, outcome: str = "supported", **changes: Any) -> Path:
    """A verdict as a study writes it: a committed one, with changes."""
    record = json.loads((DOCS / "studies" / "activation" / "verdict.json").read_text()) | {"history": []}
    record |= {"study": name, "number": number, "outcome": outcome, "budget": "cpu", "parts": [PART]}
    record["rule"] = read_claims().get(name, {"rule": "a > b"})["rule"]
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text(json.dumps(record | changes))
    (folder / "figure.png").write_bytes(b"png")
    return folder


# List -----------------------------------------------------------------------------------------------------------------


def test_claims_are_those_of_the_studies() -> None:
    found = [(claim["number"], name) for name, claim in read_claims().items()]
    assert found == [(study.number, study.name) for study in studies().values()]
    assert set(range(1, 33)) - {number for number, _ in found} == {29}


def test_listing_shows_verdicts_and_loads_no_torch(tmp_path: Path, capsys: Capture) -> None:
    plant(tmp_path, "positions", 1, "inconclusive", budget="gpu")
    plant(tmp_path, "axial", 18, "not decided", rule="an earlier rule")
    code = "import sys; from plainvit.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = ["study", "list", "--out", str(tmp_path)]
    rows = json.loads(subprocess.check_output([sys.executable, "-c", code, *words, "--json"]))
    assert [row["name"] for row in rows] == list(read_claims())
    assert [row["verdicts"] for row in rows if row["name"] == "positions"] == [{"cpu": None, "gpu": "inconclusive"}]
    assert {outcome for row in rows[1:] for outcome in row["verdicts"].values()} == {None}
    main(words)
    out = capsys.readouterr().out
    assert all(name in out for name in read_claims())
    assert out.count("(gpu)") == 1


# Report ---------------------------------------------------------------------------------------------------------------


def test_the_report_has_a_row_for_every_study(tmp_path: Path) -> None:
    out = tmp_path / "docs" / "studies"
    plant(out, "positions", 1)
    plant(out, "activation", 32, "contradicted", budget="gpu", parts=[PART | {"holds": "no"}])
    text = report.write_report(out).read_text()
    assert report.report_path(out) == tmp_path / "docs" / "studies.md"
    assert f"**2 of {len(read_claims())} studies have a verdict under the current rules" in text
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == ["1. positions", "32. activation"]
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}  # as GitHub does
    assert set(re.findall(r"\(#(.*?)\)", text)) == anchors
    for link in re.findall(r"\]\((?!https?:|#)(.*?)\)", text):
        assert (tmp_path / "docs" / link).is_file(), link
    claim = read_claims()["positions"]["claim"]
    effect = "a - b: +1.00 points [+0.50, +1.50]"
    assert f"| 1 | {claim} | [supported](#1-positions) | {effect} | cifar10 | 16 |" in text
    assert text.count("| not run |") == len(read_claims()) - 2


@pytest.mark.parametrize(
    ("outcome", "deciding"), [("supported", "weak"), ("inconclusive", "open"), ("contradicted", "far out")]
)
def test_the_outcome_rests_on_its_weakest_part(outcome: str, deciding: str) -> None:
    """Of a contradicted claim on the part that is ruled out most clearly."""
    p_values = {"strong": (0.001, "yes"), "weak": (0.04, "yes"), "open": (0.3, "open")}
    p_values |= {"out": (0.01, "no"), "far out": (0.001, "no")}
    parts = [PART | {"name": name, "p": p, "holds": holds} for name, (p, holds) in p_values.items()]
    assert report.find_deciding_criterion({"outcome": outcome, "parts": parts})["name"] == deciding


def test_links_of_the_report_lead_to_its_folder(tmp_path: Path) -> None:
    """Also where the folder is a link, and has spaces in its name."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "my studies").symlink_to(tmp_path / "elsewhere")
    plant(tmp_path / "my studies", "positions", 1)
    links = re.findall(r"\]\((?!https?:|#)(.*?)\)", report.write_report(tmp_path / "my studies").read_text())
    assert links == ["my%20studies/positions/figure.png", "my%20studies/positions/verdict.json"]


def test_numbers_that_are_nan_are_reported(tmp_path: Path) -> None:
    verdict = decide(
        [require_above("b - a", welch([0.0, 0.1, 0.0], [1.0, math.nan, 1.0])), fact("f", math.nan, "1", False)]
    )
    plant(tmp_path, "positions", 1, verdict.outcome, parts=replace_non_finite(verdict.criteria))
    text = report.make_report(tmp_path)
    assert "| b - a | ? [?, ?] | > 0 | 6 | 1 | open |" in text
    assert "| f | ? | 1 |  | 0 | no |" in text


def test_report_of_own_studies_lists_only_them(tmp_path: Path) -> None:
    plant(tmp_path, "rate", 0)
    text = report.make_report(tmp_path)
    assert text.startswith("# Studies\n")
    assert re.findall(r"^## (.*)$", text, re.M) == ["rate"]
    plant(tmp_path, "positions", 1)
    assert report.make_report(tmp_path).startswith("# The paper's claims, tested\n"), "one of them is"


def test_docs_report_is_up_to_date() -> None:
    again = "from plainvit.studies.report import *; write_report(Path('docs/studies'))"
    assert (DOCS / "studies.md").read_text() == report.make_report(DOCS / "studies"), f'python -c "{again}"'


@pytest.mark.parametrize("damage", ["{", "{}", {"outcome": "maybe"}])
def test_a_damaged_verdict_exits_with_3(damage: Any, tmp_path: Path, capsys: Capture) -> None:
    file = plant(tmp_path, "positions", 1) / "verdict.json"
    file.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(DataError, match="positions"):
        report.make_report(tmp_path)
    fail(capsys, "study", "list", "--out", tmp_path)


# Flags ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("positions", "positons"), "unknown study 'positons'; nearest: positions"),
        ((), "NAME"),
        (("positions", "--seeds", "-1"), "must be positive, got -1"),
        (("positions", "--budget", "tpu"), "invalid choice"),
    ],
)
def test_invalid_arguments_exit_with_2(words: tuple[str, ...], message: str, capsys: Capture, tmp_path: Path) -> None:
    assert message in fail(capsys, "study", *words, "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


@without_gpu
def test_the_plan_comes_before_the_gpu_is_needed(capsys: Capture, tmp_path: Path) -> None:
    words = "positions", "axial", "--out", str(tmp_path / "out"), "--budget", "gpu"
    main(["study", *words, "--dry-run"])
    plan = capsys.readouterr().err
    assert "positions: 32 runs, about " in plan
    assert "all 2 studies: 40 runs, about " in plan  # plain attention is one of the arms of both
    code, out, err = run(capsys, "study", *words)
    assert (code, out) == (5, "")
    assert err.startswith(plan)
    assert "needs a CUDA GPU" in fail(capsys, "study", *words, "--json", code=5)
    assert not list(tmp_path.glob("out/*"))


def test_the_plan_of_all_studies_reuses_the_committed_runs(capsys: Capture) -> None:
    main(["study", "all", "--budget", "gpu", "--out", str(DOCS / "studies"), "--dry-run"])
    lines = dict(line.split(": ") for line in capsys.readouterr().err.splitlines() if ": " in line)
    assert lines.keys() == {*studies(), f"all {len(studies())} studies"}
    decided = [name for name, one in report.read_verdicts(DOCS / "studies").items() if report.is_current(one)]
    assert decided
    assert all(lines[name].startswith("0 runs") for name in decided if name != "stochastic-depth")  # only on a CPU


def test_a_smaller_budget_does_not_replace_a_larger_ones_verdict(tmp_path: Path) -> None:
    plant(tmp_path, "positions", 1, budget="gpu")
    with pytest.raises(ValueError, match="--budget gpu"):
        run_study(studies()["positions"], Settings("cpu", tmp_path, quiet=True))


# Own studies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """The study that docs/analyse.md shows."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "analyse.md").read_text(), re.S)
    (code,) = (block for block in blocks if "STUDY" in block)
    file = tmp_path / "rate.py"
    file.write_text(code)
    return file


@pytest.mark.slow
def test_the_study_that_the_docs_show_runs(own_file: Path, capsys: Capture) -> None:
    out = own_file.with_name("out")
    own_file.write_text(own_file.read_text().replace("steps=300", "steps=2"))
    main(["study", f"{own_file}:STUDY", "--out", str(out), "--seeds", "1", "--at-once", "1", "--json"])
    (said,) = json.loads(capsys.readouterr().out)
    assert (said["study"], said["outcome"], said["runs"]["count"]) == ("rate", "inconclusive", 2)
    assert said["command"] == f"plainvit study {own_file}:STUDY --budget cpu --seeds 1"
    assert "[inconclusive](#rate)" in report.report_path(out).read_text()


def test_the_study_that_the_docs_show_decides(own_file: Path) -> None:
    study = own_study(f"{own_file}:STUDY")
    values = {"0.001": [{"top1": 0.8 + 0.01 * seed} for seed in range(3)], "0.004": [{"top1": 0.9}] * 3}
    assert study.decide(Results(study.arms("cpu"), values)).outcome == "supported"


def test_invalid_own_studies_exit_with_2(own_file: Path, capsys: Capture) -> None:
    code = own_file.read_text()
    assert "no.py" in fail(capsys, "study", f"{own_file.parent}/no.py:STUDY", code=2)
    assert "FILE.py:STUDY; it defines STUDY" in fail(capsys, "study", str(own_file), code=2)
    assert "no study 'base'" in fail(capsys, "study", f"{own_file}:base", code=2)
    for name in ("positions", "runs", "../rate"):
        own_file.write_text(code.replace('name="rate"', f'name="{name}"'))
        assert f"name '{name}'" in fail(capsys, "study", f"{own_file}:STUDY", code=2)
    own_file.write_text(code.replace("xlabel=", "measure=lambda *_: {}, xlabel="))
    assert "measure of STUDY" in fail(capsys, "study", f"{own_file}:STUDY", code=2)
    own_file.write_text("1 / 0")
    assert "ZeroDivisionError" in fail(capsys, "study", f"{own_file}:STUDY", code=2)


# Interruptions --------------------------------------------------------------------------------------------------------


def wait_until(condition: Any, process: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        assert process is None or process.poll() is None
        time.sleep(0.05)


def has_ended(group: int) -> bool:
    """Whether no process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
def test_an_interrupted_study_resumes(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    words = [COMMAND, "study", "positions", "--out", str(out), "--seeds", "1"]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: any(len(f.read_text().splitlines()) > 40 for f in out.glob("runs/*/metrics.jsonl")), first)
    if how == "ctrl-c":
        os.killpg(first.pid, signal.SIGINT)  # a terminal sends it to all processes
    else:
        first.kill()
    printed, said = first.communicate(timeout=120)
    if how == "ctrl-c":
        assert (first.returncode, printed) == (130, "")
        assert said.splitlines()[-1].startswith("plainvit: interrupted; run the same command to resume")
        assert "Traceback" not in said
    wait_until(lambda: has_ended(first.pid))
    saved = {file.parent: json.loads(file.read_text())["step"] for file in out.glob("runs/*/status.json")}
    assert max(saved.values()) >= 40
    assert not (out / "positions").exists()
    again = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)[0]["runs"]["count"] == 4
    for folder, step in saved.items():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 301)), f"it was stopped at {step}"
