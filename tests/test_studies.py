"""Studies: rules on planted results, both ways; differences against SciPy; runs in order; old runs are not mixed in."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_runs as runs
import torch
from scipy.stats import spearmanr, t, ttest_rel

from plainvit.data.decode import DataError
from plainvit.evaluate.statistics import rank_correlation
from plainvit.studies import page, positions
from plainvit.studies.runs import Workers
from plainvit.studies.study import (
    Arm,
    NoDeviceError,
    Results,
    Study,
    Verdict,
    _write,
    decide_again,
    decide_by_signs,
    order_stages,
    paired_difference,
    run_study,
    table,
)


def planted(study: Study, means: dict[str, float], spread: float = 0.001, seeds: int = 3) -> Results:
    noise = np.random.default_rng(0).normal(0, spread, (len(means), seeds))
    values = {arm: [{"top1": mean + one} for one in row] for (arm, mean), row in zip(means.items(), noise, strict=True)}
    return Results({arm: study.arms("cpu")[arm] for arm in means}, values)


def test_a_gap_is_the_paired_difference() -> None:
    a, b = [0.70, 0.72, 0.69, 0.75], [0.73, 0.74, 0.73, 0.77]
    found = paired_difference(a, b)
    assert found.mean / found.error == pytest.approx(ttest_rel(b, a).statistic)
    assert found.sign == 1
    assert paired_difference(b, a).sign == -1
    assert paired_difference(a, [0.80, 0.62, 0.79, 0.68]).sign == 0
    assert paired_difference(a[:2], b[:2]).sign == 0, "two seeds decide nothing"
    assert math.isinf(paired_difference([0.5], [0.9]).error)
    assert str(paired_difference([0.5], [0.75])) == "+25.00 points of one seed"
    assert str(paired_difference([0.5, 0.5], [0.75, 0.75])) == "+25.00 ± 0.00 points [95 % +25.00 to +25.00]"
    assert found.interval == pytest.approx(tuple(ttest_rel(b, a).confidence_interval(0.95)))
    low, high = (100 * end for end in found.interval)
    assert str(found).endswith(f"[95 % {low:+.2f} to {high:+.2f}]")
    level = paired_difference([0.7] * 4, b)
    assert level.describe(limit=0.7).startswith(f"{np.mean(b):.2f} ± ")


def test_two_standard_errors_are_what_student_says() -> None:
    for seeds in (2, 3, 5, 20):
        within = 100 * (t.cdf(2, seeds - 1) - t.cdf(-2, seeds - 1))
        assert f"cover {within:.0f} % with {seeds} seeds" in page.explain_uncertainty([seeds])
    assert "82 % with 3 seeds, 88 % with 5 seeds" in page.explain_uncertainty([5, 3, 3, 1])
    assert "two standard errors" not in page.explain_uncertainty([1])


def test_verdict_from_signs() -> None:
    assert decide_by_signs([1, 1], "").outcome == "reproduced"
    assert decide_by_signs([1, 0], "").outcome == "not decided"
    assert decide_by_signs([1, -1], "").outcome == "not reproduced"


def test_rank_correlation() -> None:
    a, b = [3.0, 1.0, 2.0, 8.0, 5.0], [0.1, 0.3, 0.2, 0.9, 0.7]
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)  # pyright: ignore[reportAttributeAccessIssue]
    assert rank_correlation(a[:2], b[:2]) == 0


@pytest.mark.parametrize(
    ("means", "outcome"),
    [
        ({"none": 0.60, "1-D": 0.70, "2-D": 0.71, "relative": 0.705}, "reproduced"),
        ({"none": 0.60, "1-D": 0.70, "2-D": 0.65, "relative": 0.705}, "not reproduced"),  # the kinds matter
        ({"none": 0.60, "1-D": 0.70, "2-D": 0.71, "relative": 0.55}, "not reproduced"),
    ],
)
def test_positions_are_decided_by_their_rule(means: dict[str, float], outcome: str) -> None:
    found = planted(positions.STUDY, means)
    assert positions.STUDY.decide(found).outcome == outcome
    assert positions.STUDY.decide(planted(positions.STUDY, means, seeds=2)).outcome != "reproduced"
    words = table(positions.STUDY, found, positions.STUDY.decide(found))
    assert f"**{outcome}**" in words
    assert words.count("± 0.") >= 4
    assert words.count(" points [95 % ") == 3, "of each kind, less none"
    assert "82 % with 3 seeds" in words
    assert positions.STUDY.draw(found)


def test_noise_is_not_decided() -> None:
    """Seeds that disagree about the sign."""
    rows = {"none": (0.60, 0.66, 0.57), "1-D": (0.64, 0.60, 0.62)}
    values = {arm: [{"top1": one} for one in rows.get(arm, rows["1-D"])] for arm in positions.KINDS}
    found = Results(positions.STUDY.arms("cpu"), values)
    assert positions.STUDY.decide(found).outcome == "not decided"


def test_arms_run_after_their_initial_weights_exist() -> None:
    made = runs.config()
    arms = {"c": Arm(made, after="b"), "b": Arm(made, after="a"), "a": Arm(made), "d": Arm(made)}
    assert order_stages(arms) == [["a", "d"], ["b"], ["c"]]
    with pytest.raises(AssertionError, match="circular"):
        order_stages({"a": Arm(made, after="b"), "b": Arm(made, after="a")})


def transfer(steps: int = 3) -> Study:
    """Pre-training, and fine-tuning from it and from scratch."""
    made = runs.config(steps=steps, evaluations=1, augment=runs.config().augment.replace(mixup=0.0))
    return Study(
        name="transfer",
        claim="c",
        source="s",
        rule="r",
        arms=lambda _: {
            "before": Arm(made, counts=False),
            "transferred": Arm(made.replace(optim=made.optim.replace(lr=1e-9)), after="before"),
            "scratch": Arm(made.replace(optim=made.optim.replace(lr=1e-9))),
        },
        decide=lambda found: Verdict("not decided", f"{sorted(found.values)}"),
        draw=lambda found: positions.draw_arms(found, "arm", {}, ""),
    )


@pytest.mark.slow
def test_a_study_from_runs_to_a_verdict(tmp_path: Path) -> None:
    verdict = run_study(transfer(), "cpu", tmp_path, Workers(2), seeds=2, quiet=True)
    assert verdict.why == "['scratch', 'transferred']"
    assert {file.name for file in (tmp_path / "transfer").iterdir()} == {"figure.png", "table.md", "verdict.json"}
    said = json.loads((tmp_path / "transfer" / "verdict.json").read_text())
    assert said["seeds"] == 2
    assert {arm: len(folders) for arm, folders in said["folders"].items()} == {
        "before": 2,
        "transferred": 2,
        "scratch": 2,
    }
    for seed, folder in enumerate(said["folders"]["transferred"]):
        assert json.loads((tmp_path / folder / "config.json").read_text())["seed"] == seed
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("model.safetensors")}
    assert len(before) == 6
    assert run_study(transfer(), "cpu", tmp_path, Workers(), seeds=2, quiet=True) == verdict
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("model.safetensors")}
    assert after == before, "nothing is run again"
    with pytest.raises(ValueError, match="--out"):
        run_study(transfer(steps=4), "cpu", tmp_path, Workers(), seeds=2, quiet=True)


def test_stored_values_are_decided_again_by_a_rule_that_changed(tmp_path: Path) -> None:
    """The values stay, and the rule that the runs were made for is told with what it decided."""
    means = {"none": 0.60, "1-D": 0.70, "2-D": 0.71, "relative": 0.705}
    found, study = planted(positions.STUDY, means), positions.STUDY
    before = replace(study, rule="another", decide=lambda _: Verdict("not decided", "so"))
    _write(before, "cpu", tmp_path / study.name, found, before.decide(found), {"command": "c", "seconds": 1.0})
    file = tmp_path / study.name / "verdict.json"
    was = json.loads(file.read_text())
    for _ in range(2):
        assert decide_again(study, file.parent) == study.decide(found)
        said = json.loads(file.read_text())
        assert said["before"] == {"rule": "another", "outcome": "not decided"}
    assert (said["outcome"], said["rule"]) == ("reproduced", study.rule)
    kept = was.keys() - {"rule", "outcome", "why"}
    assert {name: said[name] for name in kept} == {name: was[name] for name in kept}
    assert "with the outcome not decided: another." in page.page(tmp_path)
    assert "**reproduced**" in (file.parent / "table.md").read_text()
    with pytest.raises(ValueError, match="have changed"):
        decide_again(replace(study, arms=lambda _: {"none": Arm(runs.config())}), file.parent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_or_data_raises(tmp_path: Path) -> None:
    with pytest.raises(NoDeviceError, match="--budget cpu"):
        run_study(positions.STUDY, "gpu", tmp_path, Workers())
    absent = replace(transfer(), arms=lambda _: {"a": Arm(runs.config(data=str(tmp_path / "nowhere")))})
    with pytest.raises(DataError, match="nowhere"):
        run_study(absent, "cpu", tmp_path, Workers(), quiet=True)
    assert not list(tmp_path.iterdir())
