"""Studies at the budget of a laptop, from the command to the page: one in the fast set, all of them in the slow one."""

import json
from pathlib import Path

import pytest
import small_runs as runs
from PIL import Image

from plainvit.cli import main
from plainvit.config import Augment, Optim
from plainvit.studies import page
from plainvit.studies.registry import studies
from plainvit.studies.study import Arm, Study

LARGEST = 150_000  # bytes of a figure that is committed


def check(name: str, out: Path) -> dict[str, object]:
    """What every study leaves, and that no test image was read for it."""
    folder = out / name
    assert {file.name for file in folder.iterdir()} == {"figure.png", "verdict.json"}
    said = page.read_verdict(folder / "verdict.json")
    assert said["outcome"] in ("supported", "contradicted", "inconclusive")
    assert said["budget"] == "cpu"
    with Image.open(folder / "figure.png") as figure:
        assert min(figure.size) >= 300
    assert (folder / "figure.png").stat().st_size < LARGEST
    for file in out.glob("runs/*/results.json"):
        assert "test" not in json.loads(file.read_text()), file
    text = page.page_of(out).read_text()
    assert f"## {said['number']}. {name}\n" in text
    assert f"({out.name}/{name}/figure.png)" in text
    assert f"| {name} |" not in text.partition("## Not run")[2]
    return said


def rate() -> Study:
    """A study as short as one can be: a model that learns against one of which hardly the head does."""
    plain = {"model": runs.MODEL, "ema": 0.0, "augment": Augment(crop="none", flip=0.0), "save_every": 0}
    made = runs.config(steps=150, batch=64, evaluations=1, holdout=0.3, optim=Optim(lr=1e-2, warmup=0.1), **plain)
    still = made.replace(optim=made.optim.replace(lr=1e-9))

    return Study(
        name="rate",
        number=99,
        claim="Learning needs a learning rate.",
        source="nobody",
        rule="it beats one that stands still",
        arms=lambda _: {"still": Arm(still), "learns": Arm(made)},
        parts=lambda found: [found.above("learns", "still")],
    )


@pytest.mark.slow
def test_a_study_from_the_command_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own: the shortest real one takes more than 25 seconds of a core."""
    made = rate()
    claims = {made.name: {"number": 99, "claim": made.claim, "rule": made.rule}}
    for module in ("claims", "page"):
        monkeypatch.setattr(f"plainvit.studies.{module}.read_claims", lambda: claims)
    monkeypatch.setattr("plainvit.studies.registry.studies", lambda: {made.name: made})
    main(["study", "rate", "--out", str(tmp_path / "found"), "--json"])
    said = check("rate", tmp_path / "found")
    assert said["outcome"] == "supported"
    assert "## Not run" not in (tmp_path / "found.md").read_text()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that they share their runs."""
    return tmp_path_factory.mktemp("studies") / "found"


@pytest.mark.slow
@pytest.mark.parametrize("name", studies())
def test_every_study_at_the_cpus_budget(name: str, out: Path) -> None:
    main(["study", name, "--budget", "cpu", "--out", str(out), "--json"])
    said = check(name, out)
    values = said["values"]
    assert isinstance(values, dict)
    assert {len(rows) for rows in values.values()} == {studies()[name].runs}
