"""The verb `study`: its list, its page, interruptions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
import torch
from rich.console import Console

from plainvit.cli import main
from plainvit.data.decode import DataError
from plainvit.studies import page, positions
from plainvit.studies.registry import own_study, studies
from plainvit.studies.runs import Workers
from plainvit.studies.study import Arm, Results, Study, Verdict, run_study

Capture = pytest.CaptureFixture[str]
COMMAND = Path(sys.executable).with_name("plainvit")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def refused(capsys: Capture, *words: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["study", *words])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (code, "")
    return err


def plant(out: Path, name: str, number: int, outcome: str = "reproduced", **changes: Any) -> Path:
    """A verdict as a study writes it."""
    folder = out / name
    folder.mkdir(parents=True)
    said = {
        "study": name,
        "number": number,
        "claim": f"The claim of {name}.",
        "source": "ViT, Table 8",
        "paper": "There it is so.",
        "rule": "a > b",
        "budget": "cpu",
        "outcome": outcome,
        "why": "a - b +1.00 ± 0.10 points",
        "metric": "top1",
        "values": {"a": [{"top1": 0.5}]},
        "seconds": 85.0,
        "runs": {"count": 6, "seconds": 150.0, "commits": ["c0ffee"], "devices": ["A GPU"]},
        "command": f"plainvit study {name} --budget cpu",
        "environment": {"commit": "later", "device": "A CPU"},
    }
    (folder / "verdict.json").write_text(json.dumps(said | changes))
    (folder / "table.md").write_text("# title\n\n| arm | top-1 |\n|---|---|\n| a | 50.00 |\n\nRule: a > b\n")
    (folder / "figure.png").write_bytes(b"png")
    return folder


# The list -------------------------------------------------------------------------------------------------------------


def test_titles_match_the_studies() -> None:
    """Read from the syntax of their files, so held against the objects."""
    found = [(title.number, title.name, title.claim) for title in page.titles()]
    assert found == [(study.number, study.name, study.claim) for study in studies().values()]
    assert len({name for _, name, _ in found}) == len(found)


def test_list_names_the_verdict_folder_and_missing_number(tmp_path: Path, capsys: Capture) -> None:
    assert set(range(1, 33)) - {title.number for title in page.titles()} == {29}
    main(["study", "list", "--out", str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert "docs/studies.md" in out
    assert "Number 29" in out


def test_titles_that_are_not_literals_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_parse_title", lambda words: None)  # noqa: ARG005
    assert [title.name for title in page._read_titles("positions")] == [study.name for study in positions.STUDIES]


def test_listing_loads_no_torch(tmp_path: Path) -> None:
    plant(tmp_path, "positions", 1, "not decided", budget="gpu")
    code = "import sys; from plainvit.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = [sys.executable, "-c", code, "study", "list", "--out", str(tmp_path), "--json"]
    said = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert [one["name"] for one in said] == [title.name for title in page.titles()]
    first = next(one for one in said if one["name"] == "positions")
    assert first["verdicts"] == {"cpu": None, "gpu": "not decided"}
    assert {outcome for one in said if one != first for outcome in one["verdicts"].values()} == {None}


def test_list_as_a_table(tmp_path: Path, capsys: Capture) -> None:
    plant(tmp_path, "positions", 1)
    main(["study", "list", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert all(title.name in out for title in page.titles())
    assert out.count("(cpu)") == 1


# The page -------------------------------------------------------------------------------------------------------------


def test_the_page_has_every_verdict_and_every_study_without_one(tmp_path: Path) -> None:
    out = tmp_path / "docs" / "studies"
    plant(out, "positions", 1)
    plant(out, "activation", 32, "not reproduced", budget="gpu", claim="A | B.")
    text = page.write_page(out).read_text()
    assert page.page_of(out) == tmp_path / "docs" / "studies.md"
    known = {title.name for title in page.titles()}
    assert f"**2 of {len(known)} studies have a verdict: 1 reproduced, 1 not reproduced.**" in text
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == ["1. positions", "32. activation", "Not run"]
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}  # as GitHub does
    assert set(re.findall(r"\(#(.*?)\)", text)) <= anchors
    for link in re.findall(r"\]\((?!https?:|#)(.*?)\)", text):
        assert (tmp_path / "docs" / link).is_file(), link
    rest = text.split("## Not run")[1]
    assert set(re.findall(r"\| ([\w-]+) \|$", rest, re.M)) - {"study"} == known - {"positions", "activation"}


def test_a_section_shows_how_it_was_run(tmp_path: Path) -> None:
    plant(tmp_path, "positions", 1)
    section = page.page(tmp_path).split("## 1. positions")[1].split("## Not run")[0]
    for words in (
        "The claim of positions. *ViT, Table 8.* There it is so.",
        "**reproduced**: a - b +1.00 ± 0.10 points.",
        "Rule: a > b.",
        "| a | 50.00 |",
        "`plainvit study positions --budget cpu`: 6 runs, 2m30s in total; A GPU; commit c0ffee; [",
    ):
        assert words in section
    assert "later" not in section, "runs are told of by the commit that made them"


def test_page_of_own_studies_lists_only_them(tmp_path: Path) -> None:
    plant(tmp_path, "rate", 0, claim="It wants a rate.")
    text = page.page(tmp_path)
    assert text.startswith("# Studies\n")
    assert re.findall(r"^## (.*)$", text, re.M) == ["rate"]
    assert "**1 reproduced.**" in text
    assert "paper's claims" not in text
    plant(tmp_path, "positions", 1)
    assert page.page(tmp_path).startswith("# The paper's claims, tested\n"), "one of them is"


def test_summary_shows_the_number_of_seeds(tmp_path: Path, capsys: Capture) -> None:
    plant(tmp_path, "positions", 1, values={"a": [{"top1": 0.5}] * 5, "b": [{"top1": 0.5}] * 5})
    Console(width=300).print(page.summary(list(page.verdicts(tmp_path).values()), tmp_path))
    out = capsys.readouterr().out
    assert out.startswith("positions: reproduced, over 5 seeds\n  a - b +1.00 ± 0.10 points\n")
    assert "88 % with 5 seeds" in out


def test_a_page_without_verdicts(tmp_path: Path) -> None:
    text = page.page(tmp_path / "nowhere")
    assert f"**0 of {len(page.titles())} studies have a verdict.**" in text
    assert "## Not run" in text


def test_docs_page_is_up_to_date() -> None:
    out = Path(__file__).parent.parent / "docs" / "studies"
    again = "from plainvit.studies.page import *; write_page(Path('docs/studies'))"
    assert page.page_of(out).read_text() == page.page(out), f'python -c "{again}"'


def test_stored_verdicts_are_as_the_readme_summarises_them() -> None:
    found = page.verdicts(Path(__file__).parent.parent / "docs" / "studies")
    assert sum(not one["source"].startswith("ViT") for one in found.values()) == 3
    assert {len(rows) for one in found.values() for rows in one["values"].values()} == {3}
    assert 0 < sum(one["budget"] == "gpu" for one in found.values()) < len(found) / 2
    assert 0 < sum(one["outcome"] == "reproduced" for one in found.values()) < len(found) / 2


def test_a_damaged_verdict_exits_with_3(tmp_path: Path, capsys: Capture) -> None:
    folder = plant(tmp_path, "positions", 1)
    for text, words in (
        ("{", "not valid JSON"),
        ("{}", "'study' is missing"),
        (json.dumps(json.loads((folder / "verdict.json").read_text()) | {"outcome": "maybe"}), "unknown outcome"),
    ):
        (folder / "verdict.json").write_text(text)
        with pytest.raises(DataError, match=words):
            page.page(tmp_path)
    err = refused(capsys, "list", "--out", str(tmp_path), code=3)
    assert err.count("\n") == 1


# The words ------------------------------------------------------------------------------------------------------------


def test_invalid_arguments_exit_with_2(capsys: Capture, tmp_path: Path) -> None:
    out = "--out", str(tmp_path / "out")
    assert "unknown study 'positons'; nearest: positions" in refused(capsys, "positions", "positons", *out)
    assert "no study given" in refused(capsys, *out)
    assert "at least 1, got -1" in refused(capsys, "positions", "--seeds", "-1", *out)
    assert "invalid choice" in refused(capsys, "positions", "--budget", "tpu", *out)
    assert not (tmp_path / "out").exists()


@without_gpu
def test_missing_gpu_exits_with_5(capsys: Capture, tmp_path: Path) -> None:
    err = refused(capsys, "positions", "--out", str(tmp_path / "out"), "--json", "--budget", "gpu", code=5)
    assert err.count("\n") == 1
    assert "needs a CUDA GPU" in err
    assert not (tmp_path / "out").exists()


def tiny(name: str, data: str = "digits", steps: int = 2) -> Study:
    made = runs.config(steps=steps, evaluations=1, data=data)
    return Study(
        name=name,
        number=90,
        claim=f"Of {name}.",
        source="s",
        rule="r",
        arms=lambda _: {"a": Arm(made)},
        decide=lambda found: Verdict("not decided", f"{sorted(found.values)}"),
        draw=lambda found: positions.draw_arms(found, "arm", {}, ""),
    )


def put(patch: pytest.MonkeyPatch, *made: Study) -> None:
    """These in place of the real studies."""
    found = [page.Title(one.number, one.name, one.claim) for one in made]
    patch.setattr("plainvit.studies.page.titles", lambda: found)
    patch.setattr("plainvit.studies.registry.studies", lambda: {one.name: one for one in made})


@pytest.mark.slow
def test_a_failed_study_does_not_stop_the_others(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, tiny("absent", str(tmp_path / "nowhere")), tiny("there"))
    with pytest.raises(SystemExit) as caught:
        main(["study", "all", "--out", str(tmp_path / "out"), "--seeds", "1", "--json"])
    out, err = capsys.readouterr()
    assert caught.value.code == 3
    assert "1 of 2 studies failed, first absent: " in err
    (said,) = json.loads(out)
    assert (said["study"], said["outcome"]) == ("there", "not decided")
    assert said["command"] == "plainvit study there --budget cpu --seeds 1"
    assert said["runs"]["count"] == 1
    assert (tmp_path / "out.md").read_text().count("| 90 |") == 2


@without_gpu
def test_a_smaller_budget_does_not_replace_a_larger_ones_verdict(tmp_path: Path) -> None:
    plant(tmp_path, "tiny", 90, budget="gpu")
    with pytest.raises(ValueError, match="--budget gpu"):
        run_study(tiny("tiny"), "cpu", tmp_path, Workers(), quiet=True)


# One's own ------------------------------------------------------------------------------------------------------------


def shown_in_docs() -> str:
    text = (Path(__file__).parent.parent / "docs" / "analyse.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "STUDY" in block)
    return code


@pytest.mark.slow
def test_the_study_that_the_docs_show_runs(tmp_path: Path, capsys: Capture) -> None:
    file, out = tmp_path / "rate.py", tmp_path / "out"
    file.write_text(shown_in_docs().replace("steps=300", "steps=2"))
    main(["study", f"{file}:STUDY", "--out", str(out), "--seeds", "1", "--at-once", "1", "--json"])
    (said,) = json.loads(capsys.readouterr().out)
    assert (said["study"], said["outcome"], said["runs"]["count"]) == ("rate", "not decided", 2)
    assert said["command"] == f"plainvit study {file}:STUDY --budget cpu --seeds 1"
    text = page.page_of(out).read_text()
    assert "\n## rate\n" in text
    assert "[rate](#rate)" in text


def test_the_study_that_the_docs_show_decides(tmp_path: Path) -> None:
    file = tmp_path / "rate.py"
    file.write_text(shown_in_docs())
    made = own_study(f"{file}:STUDY")
    arms = made.arms("cpu")
    for high, outcome in ((0.9, "reproduced"), (0.7, "not reproduced")):
        values = {"0.001": [{"top1": 0.8 + 0.01 * seed} for seed in range(3)], "0.004": [{"top1": high}] * 3}
        assert made.decide(Results(arms, values)).outcome == outcome
    assert {arm.config.optim.lr for arm in arms.values()} == {0.001, 0.004}


def test_invalid_own_studies_exit_with_2(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "rate.py"
    file.write_text(shown_in_docs())
    assert f"{tmp_path}/no.py" in refused(capsys, f"{tmp_path}/no.py:STUDY")
    assert "FILE.py:STUDY; it defines STUDY" in refused(capsys, str(file))
    assert "no study 'base'" in refused(capsys, f"{file}:base")
    for name in ("positions", "runs", "../rate"):
        file.write_text(shown_in_docs().replace('name="rate"', f'name="{name}"'))
        assert f"name '{name}'" in refused(capsys, f"{file}:STUDY")
    file.write_text("1 / 0")
    assert "ZeroDivisionError" in refused(capsys, f"{file}:STUDY")


# Interruptions --------------------------------------------------------------------------------------------------------


def begun(out: Path, steps: int) -> bool:
    return any(len(file.read_text().splitlines()) > steps for file in out.glob("runs/*/metrics.jsonl"))


def left(group: int) -> bool:
    """Whether any process of the group is still there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
def test_an_interrupted_study_resumes(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    words = [COMMAND, "study", "positions", "--out", str(out), "--seeds", "1"]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 200
    while not begun(out, 40):
        assert first.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    if how == "ctrl-c":
        os.killpg(first.pid, signal.SIGINT)  # a terminal sends it to all processes
    else:
        first.kill()
    printed, said = first.communicate(timeout=120)
    if how == "ctrl-c":
        assert (first.returncode, printed) == (130, "")
        assert said.splitlines()[-1].startswith("plainvit: interrupted; run the same command to resume")
        assert "Traceback" not in said
    while left(first.pid):
        assert time.monotonic() < end + 100, "workers outlive the command"
        time.sleep(0.2)
    saved = {file.parent: json.loads(file.read_text())["step"] for file in out.glob("runs/*/status.json")}
    assert max(saved.values()) >= 40
    assert not (out / "positions").exists()
    again = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)[0]["runs"]["count"] == 4
    for folder, step in saved.items():
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 301)), f"it was stopped at {step}"
