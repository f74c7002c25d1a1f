"""bench.sweep ranks candidates, continues from its table, and trains the winner."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import sweep

CANDIDATES: dict[str, Any] = {
    "plain": {},
    "bad": {"init": "missing.safetensors"},
    "larger batch": {"batch": 128},
}


def result(top1: float) -> dict[str, float]:
    return {"top1": top1, "nll": 1.0, "images": 100}


def make_table(**scores: dict[str, float]) -> dict[str, Any]:
    rows = {name: {"results": {key: result(top1) for key, top1 in found.items()}} for name, found in scores.items()}
    return {"recipe": "digits", "candidates": rows}


def test_longer_runs_rank_before_shorter_ones() -> None:
    table = make_table(a={"10s": 0.9}, b={"10s": 0.5, "30s": 0.6}, c={"10s": 0.4, "30s": 0.7}, d={})
    assert sweep.rank(table) == ["c", "b", "a"]


def test_finished_rounds_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = {name: {"seed": index} for index, name in enumerate("abcd")}
    table = make_table(a={"1s": 0.1}, b={"1s": 0.4}, c={"1s": 0.3}, d={"1s": 0.2})
    for name, row in table["candidates"].items():
        row["settings"] = candidates[name]
    trained: list[tuple[list[str], float]] = []

    def train_round(_: Any, __: Any, names: list[str], seconds: float) -> bool:
        trained.append((list(names), seconds))
        for name in names:
            table["candidates"][name]["results"][sweep.make_key(seconds)] = result(0.9 if name == "c" else 0.5)
        return True

    monkeypatch.setattr(sweep.Sweep, "start_trials", lambda *_: None)
    monkeypatch.setattr(sweep.Sweep, "train_round", train_round)
    args = argparse.Namespace(seconds=1.0)
    sweep.Sweep(candidates, args, table, 0.0).run()
    assert trained == [([], 1.0), (["b", "c"], 3.0)]  # the best third, rounded up
    assert sweep.rank(table)[0] == "c"


def test_every_candidate_is_a_valid_run() -> None:
    for settings in sweep.CANDIDATES.values():
        config = sweep.configure("cifar10", settings, "", "cpu")
        assert config.batch == settings.get("batch", config.batch)
        assert config.model.width == settings.get("model.width", config.model.width)


@pytest.mark.slow
def test_a_sweep_and_its_winner_on_digits(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "candidates.json").write_text(json.dumps(CANDIDATES))
    common = ["digits", "--table", str(tmp_path / "table.json"), "--device", "cpu", "--runs", str(tmp_path / "runs")]
    sweep.main([*common, "--candidates", str(tmp_path / "candidates.json"), "--seconds", "1", "--minutes", "3"])
    table = json.loads((tmp_path / "table.json").read_text())["candidates"]
    assert table["bad"]["error"].startswith("ValueError")
    assert all(table[name]["results"]["1s"]["images"] > 0 for name in ("plain", "larger batch"))
    sweep.main([*common, "--final", "--seeds", "2", "--minutes", "0.1", "--overhead", "4"])
    final = json.loads((tmp_path / "table.json").read_text())["final"][0]
    assert [result["exit_code"] for result in final["seeds"]] == [0, 0]
    assert all(result["test"]["images"] == 360 for result in final["seeds"])
    assert "standard deviation" in capsys.readouterr().out
