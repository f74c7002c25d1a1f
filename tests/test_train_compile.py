"""`--compile auto`: a run is compiled if it is long enough to win the time back."""

from typing import Any

import pytest

from plainvit.config import Config
from plainvit.names import configure
from plainvit.recipes import recipe
from plainvit.train.compile_choice import COMPILE_SECONDS, choose_compile, is_worth_compiling

B16 = Config(model=configure("ViT-B/16"), batch=256)
SMALL = Config(model=configure("ViT-Ti/4", 10, 32), batch=256)
CIFAR = recipe("cifar10")  # measured at batch 512: 11.6 ms compiled, 20.5 not, so 4,000 steps save 36 s


def test_compiling_is_worth_it_where_the_steps_save_more_than_it_takes() -> None:
    assert not is_worth_compiling(steps=99, seconds=0.5, gain=1.2, cost=10.0)  # saves 9.9 s
    assert is_worth_compiling(steps=101, seconds=0.5, gain=1.2, cost=10.0)
    assert not is_worth_compiling(steps=10**9, seconds=0.5, gain=1.0)


@pytest.mark.parametrize(
    ("config", "changes", "compiles"),
    [
        (B16, {"steps": 10_000}, True),
        (B16, {"steps": 200}, False),
        (B16, {"steps": 10_000, "hours": 0.01}, False),
        (B16, {"steps": 10_000, "hours": 1.0}, True),
        (SMALL, {"steps": 500}, False),
        (SMALL, {"steps": 30_000}, True),
        (CIFAR, {"steps": 12_000, "batch": 512}, True),
        (CIFAR, {"steps": 2_000, "batch": 512}, False),
    ],
)
def test_auto_compiles_long_runs_on_a_gpu(config: Config, changes: dict[str, Any], compiles: bool) -> None:
    chosen = choose_compile(config.replace(**changes), "cuda:0")
    assert chosen.compiles == compiles
    assert bool(chosen.note) == (not compiles)


def test_the_line_has_the_estimate_and_the_flag() -> None:
    """A step of B/16 takes 256 / 4,304 s: 200 of them save 3 s."""
    note = choose_compile(B16.replace(steps=200), "cuda").note
    assert "200 steps" in note
    assert "about 3s" in note
    assert f"{COMPILE_SECONDS:.0f}s" in note
    assert "--compile on" in note


@pytest.mark.parametrize(
    ("value", "device", "compiles"),
    [("on", "cpu", True), ("on", "cuda", True), ("off", "cuda", False), ("auto", "cpu", False)],
)
def test_the_flag_decides_and_a_cpu_never_compiles_by_itself(value: Any, device: str, compiles: bool) -> None:
    assert choose_compile(B16.replace(compile=value, steps=10), device) == (compiles, "")
