"""Every study from its runs, of two steps, to the report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import run_study
from PIL import Image

from plainvit.studies import report
from plainvit.studies.execute import Settings
from plainvit.studies.registry import studies
from plainvit.studies.study import Arm


def shorten(arm: Arm) -> Arm:
    if not arm.is_trained:
        return arm
    return replace(arm, config=arm.config.replace(steps=2, epochs=0.0, evaluations=1, patience=0, device="cpu"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that they share their runs."""
    return tmp_path_factory.mktemp("studies") / "found"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in studies() if not name.endswith("-published")])  # minutes each
def test_every_study_runs_at_the_cpus_budget(name: str, out: Path) -> None:
    study = studies()[name]
    short = replace(study, arms=lambda budget: {arm: shorten(one) for arm, one in study.arms(budget).items()})
    verdict = run_study(short, Settings("cpu", out, runs=1, quiet=True))
    folder = out / name
    assert {file.name for file in folder.iterdir()} == {"figure.png", "verdict.json"}
    record = report.read_verdict(folder / "verdict.json")
    assert (verdict.outcome, record["outcome"], record["seeds"]) == ("inconclusive", "inconclusive", 1)
    with Image.open(folder / "figure.png") as figure:
        assert min(figure.size) >= 300
    assert (folder / "figure.png").stat().st_size < 150_000, "it is committed"
    for file in out.glob("runs/*/results.json"):
        assert "test" not in json.loads(file.read_text()), "no test image is read"
    assert f"## {record['number']}. {name}\n" in report.write_report(out).read_text()
