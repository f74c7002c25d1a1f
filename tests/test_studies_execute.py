"""Running a study: order and seeds of the arms, extension of rates, edited weights, verdicts kept as history."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_runs as runs
import torch
from in_process import InProcess, run_study
from verdicts import along, plant

import plainvit
from plainvit.config import Config
from plainvit.data.decode import DataError
from plainvit.studies import execute, report, transfer
from plainvit.studies.execute import NoDeviceError, Settings
from plainvit.studies.plans import Plan, extend_rates, first_seed, hash_definition, missing_time
from plainvit.studies.queue import Workers
from plainvit.studies.registry import studies
from plainvit.studies.runs import Ledger
from plainvit.studies.study import Arm, Study, families_at_edge
from plainvit.studies.verdict import fact
from plainvit.train.run import fit

POOLING = studies()["pooling"]


def config(**changes: Any) -> Config:
    return runs.config(steps=3, evaluations=1, device="cpu", holdout=0.3, **changes)


def make_study(arms: dict[str, Arm], name: str = "own", **fields: Any) -> Study:
    given = {"claim": "c", "source": "s", "rule": "r", "criteria": lambda _: [fact("f", 1.0, "1", True)]} | fields
    return Study(name=name, arms=lambda _: dict(arms), **given)


# Arms -----------------------------------------------------------------------------------------------------------------


def test_invalid_arms_raise_before_the_first_run() -> None:
    with pytest.raises(ValueError, match="`arms`"):
        Plan(make_study({}), {"a": Arm(config(), is_compared=False)}, 1, Path())
    with pytest.raises(ValueError, match="'a' starts from 'b'"):
        Plan(make_study({}), {"a": Arm(config(model=None), parent="b"), "b": Arm(config())}, 1, Path())


def test_seeds_differ_between_arms_and_are_the_same_in_all_studies() -> None:
    made = runs.config()
    arms = {
        "a": Arm(made),
        "b": Arm(made.replace(steps=99)),
        "c": Arm(made, parent="a"),
        "d": Arm(made, parent="b"),
        "e": Arm(made, parent="a", edit=transfer.redraw_positions),
    }
    seeds = {name: first_seed(arms, name) for name in arms}
    assert len(set(seeds.values())) == len(arms)
    assert first_seed({"other name": Arm(made.replace(seed=7, device="cpu"), x=3)}, "other name") == seeds["a"]


@pytest.mark.parametrize(("row", "rate"), [((0.6, 0.7, 0.8), 27.0), ((0.8, 0.7, 0.6), 1 / 3), ((0.6, 0.8, 0.7), None)])
def test_a_grid_is_extended_beyond_its_best_rate(row: tuple[float, ...], rate: float | None) -> None:
    arms = POOLING.arms("cpu")
    results = plant(POOLING, along(POOLING, {"class token": (0.6, 0.8, 0.7), "average": row}))
    more = extend_rates(arms, results)
    if rate is None:
        assert not more
        assert not families_at_edge(results)
        return
    ((name, arm),) = more.items()
    lowest = min(one.config.optim.lr for one in arms.values())
    assert arm.config.optim.lr == pytest.approx(rate * lowest)
    assert (arm.family, arm.x) == ("average", arm.config.optim.lr)
    assert name == f"average at {arm.x:.1e}"


def test_the_definition_covers_what_affects_the_runs() -> None:
    arms = {"a": Arm(config()), "b": Arm(config(model=None), parent="a")}
    assert hash_definition(arms) == hash_definition({**arms, "a": Arm(config(), x=3.0)})
    edited = {**arms, "b": replace(arms["b"], edit=transfer.redraw_positions)}
    assert len({hash_definition(one) for one in (arms, edited, {"a": arms["a"]})}) == 3


# Time ---------------------------------------------------------------------------------------------------------------


def test_shared_and_finished_runs_are_counted_once(tmp_path: Path) -> None:
    found, ledger = studies(), Ledger(tmp_path / "ledger.jsonl")
    plans = [Plan(found[name], found[name].arms("gpu"), 8, tmp_path) for name in ("positions", "position-places")]
    assert [missing_time([plan], ledger)[0] for plan in plans] == [32, 48]
    assert missing_time(plans, ledger)[0] == 32 + 48 - 16
    ledger.add({"run": plans[0].jobs["none"][0].run, "values": {"held_out": {"top1": 0.5}}})
    assert missing_time(plans[:1], ledger)[0] == 31


# A study --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_from_runs_to_a_verdict(tmp_path: Path) -> None:
    made = config(augment=runs.config().augment.replace(mixup=0.0))
    still = made.replace(optim=made.optim.replace(lr=1e-9))
    study = make_study(
        {"before": Arm(made, is_compared=False), "tuned": Arm(still, parent="before"), "scratch": Arm(still)}
    )
    verdict = run_study(study, Settings("cpu", tmp_path, runs=2, quiet=True), Workers(2))
    record = json.loads((tmp_path / "own" / "verdict.json").read_text())
    assert record["values"].keys() == {"tuned", "scratch"}
    seeds = {json.loads(file.read_text())["seed"] for file in tmp_path.glob("runs/*/config.json")}
    assert len(seeds) == 6, "independent"
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("model.safetensors")}
    assert len(before) == 6
    assert run_study(study, Settings("cpu", tmp_path, runs=2, quiet=True)) == verdict
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("model.safetensors")}
    assert after == before, "nothing is run again"


def store(folder: Path, outcome: str, rule: str, definition: str = "d") -> dict[str, Any]:
    kept = "parts", "values", "metric", "runs", "seconds", "command", "environment", "claim", "source", "budget"
    record = report.read_verdict(Path(__file__).parent.parent / "docs" / "studies" / "activation" / "verdict.json")
    changes = {"study": "activation", "number": 32, "outcome": outcome, "why": "w", "rule": rule}
    execute.store_verdict({**{name: record[name] for name in kept}, **changes, "definition": definition}, folder)
    return json.loads((folder / "verdict.json").read_text())


def test_a_verdict_under_another_rule_is_kept_as_history(tmp_path: Path) -> None:
    folder, rule = tmp_path / "activation", studies()["activation"].rule
    first = store(folder, "supported", "another rule")
    assert first.pop("history") == []
    assert store(folder, "contradicted", rule)["history"] == [first]
    assert store(folder, "contradicted", rule)["history"] == [first], "the same rule and arms replace a verdict"
    assert "| 32 | activation | supported |" in report.make_report(tmp_path).split("## History")[1]
    third = store(folder, "supported", rule, definition="other arms")
    assert [one["outcome"] for one in third["history"]] == ["contradicted", "supported"]


def test_verdicts_are_written_from_the_ledger_alone(tmp_path: Path) -> None:
    """The committed runs give the committed verdicts, without GPU and data; intervals are fields."""
    docs = Path(__file__).parent.parent / "docs" / "studies"
    shutil.copy(docs / "ledger.jsonl", tmp_path)
    verdict = run_study(studies()["activation"], Settings("gpu", tmp_path, quiet=True))
    record, committed = (report.read_verdict(out / "activation" / "verdict.json") for out in (tmp_path, docs))
    for name in ("rule", "definition", "budget", "outcome", "values", "seeds", "data"):
        assert record[name] == committed[name], name
    assert verdict.outcome == record["outcome"]
    (part,), (expected,) = record["parts"], committed["parts"]
    assert [part[name] for name in ("effect", "low", "high", "p")] == pytest.approx(
        [expected[name] for name in ("effect", "low", "high", "p")]
    )
    assert (part["runs"], part["holds"], record["seeds"]) == (16, "yes", 8)
    assert record["runs"] == {name: committed["runs"][name] for name in record["runs"]}


def test_an_error_in_a_rule_stops_only_its_study(tmp_path: Path) -> None:
    arms, ledger = {"a": Arm(config(), is_trained=False)}, Ledger(tmp_path / "ledger.jsonl")
    measure = lambda *_: {"top1": 0.5}  # noqa: E731
    bad = make_study(arms, "bad", criteria=lambda results: [results.above("a", "b")], measure=measure)
    good = make_study(arms, "good", measure=measure, spec="my.py:good")
    found = dict(execute.run_studies([bad, good], Settings("cpu", tmp_path, quiet=True), InProcess()))
    assert isinstance(found[bad], ValueError)
    assert found[good] == run_study(good, Settings("cpu", tmp_path, quiet=True))
    assert report.read_verdicts(tmp_path)["good"]["rule_commit"] is None, "its rule is not in claims.toml"
    runs = Ledger(ledger.file).runs.values()
    assert len(runs) == 5
    assert all(one["device"] for one in runs), "without training, too"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_data_or_weights_raise_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(NoDeviceError, match="--budget cpu"):
        run_study(POOLING, Settings("gpu", tmp_path))
    for arm in (Arm(config(data=str(tmp_path / "nowhere"))), Arm(config(model=None, init="nowhere/model.safetensors"))):
        with pytest.raises(DataError, match="nowhere"):
            run_study(make_study({"a": arm}), Settings("cpu", tmp_path, quiet=True))
    assert not list(tmp_path.iterdir())


def test_published_weights_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not below the data root, but in the hub's cache, which is empty here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    study = make_study({"a": Arm(config(model=None, init="vit_s16_augreg_i21k_i1k_224"))})
    with pytest.raises(ValueError, match="hf download"):
        run_study(study, Settings("cpu", tmp_path, quiet=True))


# Edited weights -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on five of the digits, with the paper's hidden layer in its head."""
    folder = tmp_path_factory.mktemp("runs") / "before"
    fit(config(model=runs.MODEL.replace(representation=16), data="digits:01234"), folder, quiet=True, bare=True)
    return folder


def test_new_positions_are_new_and_all_else_is_kept(before: Path) -> None:
    made = config(model=None, data="digits:56789", image_size=16, seed=1)
    new = transfer.redraw_positions(before, made)
    assert new.config.image_size == (16, 16)
    assert new.positions[0].table.shape == (17, 16)  # 16 patches and the class token
    assert float(new.positions[0].table.detach().std()) == pytest.approx(0.02, rel=0.15)
    resampled = plainvit.load(before, image_size=16).state_dict()
    same = [name for name, value in new.state_dict().items() if torch.equal(value, resampled[name])]
    assert set(resampled) - set(same) == {"positions.0.table"}
    again, other = (transfer.redraw_positions(before, made.replace(seed=seed)) for seed in (1, 2))
    assert torch.equal(again.positions[0].table, new.positions[0].table)
    assert not torch.equal(other.positions[0].table, new.positions[0].table)


def test_a_new_last_layer_keeps_the_hidden_one(before: Path) -> None:
    old = plainvit.load(before)
    new = transfer.redraw_last_layer(before, config(model=None, data="digits:56789", head="keep"))
    assert torch.equal(old.pre_logits.weight, new.pre_logits.weight)
    assert new.head.weight.shape == (5, 16)
    assert float(new.head.weight.detach().std()) == pytest.approx(16**-0.5, rel=0.25)
    assert not new.head.bias.any()


@pytest.mark.slow
def test_a_study_with_edited_weights(before: Path, tmp_path: Path) -> None:
    """Of a run of the study, and of published weights below the data root."""
    first = config(model=runs.MODEL, data="digits:01234")
    after = config(model=None, data="digits:56789", image_size=16)
    study = make_study(
        {
            "before": Arm(first, is_compared=False),
            "kept": Arm(after, parent="before"),
            "new": Arm(after, parent="before", edit=transfer.redraw_positions),
            "published": Arm(after.replace(init="before"), edit=transfer.redraw_positions),
        }
    )
    for _ in range(2):  # the second time nothing is made again
        run_study(study, Settings("cpu", tmp_path, 1, str(before.parent), quiet=True), Workers(2))
        folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
        assert len(folders) == 6
        assert sum("redraw_positions" in path.name for path in folders) == 2
