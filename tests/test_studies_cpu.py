"""Studies from the command to the report: one with runs that learn, and every study with runs of two steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
from in_process import InProcess
from PIL import Image

from plainvit.cli import main
from plainvit.config import Augment, Optim
from plainvit.studies import report
from plainvit.studies.execute import Settings, run_study
from plainvit.studies.registry import studies
from plainvit.studies.study import Arm, Study

LARGEST = 150_000  # bytes of a figure that is committed


def check_output(name: str, out: Path) -> dict[str, Any]:
    """What every study writes, and that no test image was read for it."""
    folder = out / name
    assert {file.name for file in folder.iterdir()} == {"figure.png", "verdict.json"}
    record = report.read_verdict(folder / "verdict.json")
    with Image.open(folder / "figure.png") as figure:
        assert min(figure.size) >= 300
    assert (folder / "figure.png").stat().st_size < LARGEST
    for file in out.glob("runs/*/results.json"):
        assert "test" not in json.loads(file.read_text()), file
    text = report.write_report(out).read_text()
    assert f"## {record['number']}. {name}\n" in text
    assert f"({out.name}/{name}/figure.png)" in text
    return record


@pytest.mark.slow
def test_a_study_from_the_command_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that learns against one of which hardly the head does."""
    plain = {"model": runs.MODEL, "ema": 0.0, "augment": Augment(crop="none", flip=0.0), "save_every": 0}
    learns = runs.config(steps=150, batch=64, evaluations=1, holdout=0.3, optim=Optim(lr=1e-2, warmup=0.1), **plain)
    arms = {"still": Arm(learns.replace(optim=learns.optim.replace(lr=1e-9))), "learns": Arm(learns)}
    fields = {"number": 99, "claim": "Learning needs a learning rate.", "source": "s", "rule": "learns > still"}
    criteria = lambda results: [results.above("learns", "still")]  # noqa: E731
    made = Study(name="rate", arms=lambda _: arms, criteria=criteria, runs=3, **fields)
    for module in ("claims", "report"):
        monkeypatch.setattr(f"plainvit.studies.{module}.read_claims", lambda: {"rate": fields})
    monkeypatch.setattr("plainvit.studies.registry.studies", lambda: {"rate": made})
    main(["study", "rate", "--out", str(tmp_path / "found"), "--json"])
    assert check_output("rate", tmp_path / "found")["outcome"] == "supported"


def shorten(arm: Arm) -> Arm:
    if not arm.is_trained:
        return arm
    return replace(arm, config=arm.config.replace(steps=2, epochs=0.0, evaluations=1, patience=0, device="cpu"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that they share their runs."""
    return tmp_path_factory.mktemp("studies") / "found"


@pytest.mark.slow
@pytest.mark.parametrize("name", studies())
def test_every_study_runs_at_the_cpus_budget(name: str, out: Path) -> None:
    study = studies()[name]
    short = replace(study, arms=lambda budget: {arm: shorten(one) for arm, one in study.arms(budget).items()})
    verdict = run_study(short, Settings("cpu", out, runs=1, quiet=True), InProcess())  # pyright: ignore[reportArgumentType]
    record = check_output(name, out)
    assert (verdict.outcome, record["outcome"], record["seeds"]) == ("inconclusive", "inconclusive", 1)
