"""Many runs: the same numbers as one after the other, finished ones kept, failures told at the end."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import small_runs as runs

import plainvit
from plainvit.config import Config
from plainvit.disk import read_json
from plainvit.studies.runs import (
    FailedRunsError,
    RunsDisplay,
    Workers,
    code_hash,
    compile_key,
    run_all,
    run_hash,
    run_name,
)
from plainvit.train.run import fit


@pytest.mark.slow
def test_parallel_runs_equal_single_runs(tmp_path: Path) -> None:
    configs = {f"seed {seed}": runs.config(seed=seed, steps=4, evaluations=1) for seed in (2, 0, 1)}
    configs["seed 0 again"] = configs["seed 0"]
    found = run_all(configs, tmp_path / "many", Workers(2), quiet=True)
    assert list(found) == list(configs)
    for name, config in configs.items():
        numbers = read_json(found[name] / "results.json")
        alone = fit(config, tmp_path / "alone" / name, quiet=True).numbers
        assert "test" not in numbers
        assert numbers["val"]["confusion"] == alone["val"]["confusion"]
        assert numbers["val"]["nll"] == pytest.approx(alone["val"]["nll"], rel=1e-7)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "many").rglob("model.safetensors")}
    assert len(before) == 3
    assert run_all(configs, tmp_path / "many", Workers(), quiet=True) == found
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.slow
def test_compiled_code_is_reused_by_the_next_run(tmp_path: Path) -> None:
    """One worker makes both; the second must not differ from the same run in a process of its own."""
    first, second = (runs.config(seed=seed, steps=4, evaluations=1, compile="on") for seed in (0, 1))
    with Workers() as workers:
        together = run_all({"first": first, "second": second}, tmp_path / "one", workers, quiet=True)
    with Workers() as workers:
        alone = run_all({"second": second}, tmp_path / "other", workers, quiet=True)
    both = [read_json(found["second"] / "results.json")["val"] for found in (together, alone)]
    assert both[0]["nll"] == both[1]["nll"]
    assert both[0]["confusion"] == both[1]["confusion"]


@pytest.mark.slow
def test_one_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    good, bad = runs.config(steps=2, evaluations=1), runs.config(data=str(tmp_path / "nowhere"))
    with pytest.raises(FailedRunsError, match=r"1 of 2 runs failed.*bad: .*nowhere"):
        run_all({"bad": bad, "good": good}, tmp_path, Workers(), quiet=True)
    assert (tmp_path / run_name(good) / "results.json").is_file()


def test_remaining_time_follows_finished_runs(tmp_path: Path) -> None:
    """100 seconds each, three to go and two at a time; nothing is said before one is done, nor after the last."""
    paths = [tmp_path / str(at) for at in range(5)]
    for path in paths[:3]:
        path.mkdir()
        (path / "status.json").write_text('{"state": "done"}')
        (path / "environment.json").write_text('{"seconds": 100.0}')
    assert RunsDisplay(set(paths), set(paths), 2, quiet=True).left() == ""
    display = RunsDisplay(set(paths), set(paths[1:]), 2, quiet=True)
    assert display.left() == "3m20s left", "runs of an earlier call count"
    display.finish(paths[1], "second")
    assert display.left() == "2m30s left"
    display.finish(paths[3], "one that failed")
    assert display.left() == "1m40s left"


def test_runs_of_one_kind_share_compiled_code() -> None:
    config = runs.config()
    assert compile_key(config) == compile_key(config.replace(seed=3, init="a/1f", optim=config.optim.replace(lr=0.5)))
    assert compile_key(config) != compile_key(config.replace(batch=2 * config.batch))


def test_run_hash_depends_on_settings_that_affect_the_result() -> None:
    config = runs.config()
    assert run_hash(config) == run_hash(config.replace(device="cuda", workers=3, data_root="elsewhere", recipe="mine"))
    assert run_hash(config.replace(init="a/1f")) == run_hash(config.replace(init="b/1f"))
    others = [
        config.replace(seed=1),
        config.replace(steps=13),
        config.replace(init="1f"),
        config.replace(train_fraction=0.5),
    ]
    assert len({run_hash(one) for one in (config, *others)}) == 5


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("train/optim.py", True),
        ("models/vit.py", True),
        ("config.py", True),
        ("data/new.py", True),
        ("commands/parsing.py", False),
        ("studies/report.py", False),
        ("notes.txt", False),
    ],
)
def test_code_hash_covers_executed_files(tmp_path: Path, file: str, counts: bool) -> None:
    package = tmp_path / "plainvit"
    shutil.copytree(Path(plainvit.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_hash.__wrapped__(package)
    assert before == code_hash()
    with (package / file).open("a") as changed:
        changed.write("x = 1\n")
    assert (code_hash.__wrapped__(package) != before) == counts


class Due:
    """Workers that only note what they are given, and say that it is done."""

    free = (None,)

    def finished(self, configs: Mapping[Path, Config]) -> Iterator[Any]:
        self.paths = list(configs)
        for path in configs:
            path.mkdir()
            (path / "status.json").write_text('{"state": "done"}')
        yield from ()


def test_runs_of_other_code_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configs, workers = {"a": runs.config(), "b": runs.config(seed=1)}, Due()
    first = run_all(configs, tmp_path, workers, quiet=True)  # pyright: ignore
    assert workers.paths == list(first.values())
    assert run_all(configs, tmp_path, workers, quiet=True) == first  # pyright: ignore
    assert workers.paths == []
    assert not caplog.records
    monkeypatch.setattr("plainvit.studies.runs.code_hash", lambda: "other")
    second = run_all(configs, tmp_path, workers, quiet=True)  # pyright: ignore
    assert workers.paths == list(second.values())
    assert not set(second.values()) & set(first.values())
    assert len(caplog.records) == 1
