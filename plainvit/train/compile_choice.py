"""`--compile auto`: compile the model where the run is long enough to win the time back.

    is_worth_compiling(steps=2000, seconds=0.017)       # 10 s saved, 30 s spent: False

The time of a compiled step is estimated as by `plainvit plan --on h200`. A slower GPU saves more, so a run that is
worth compiling by this estimate is worth it on any other GPU too.
"""

from typing import NamedTuple

from plainvit.config import Config
from plainvit.planning.devices import H200
from plainvit.planning.plan import describe_step
from plainvit.planning.step_time import EAGER, step_seconds
from plainvit.runtime.display import readable

# Measured on an H200 (docs/results.md)
COMPILE_SECONDS = 30.0  # without compiled code in the cache
GAIN = 1 / EAGER  # how much faster compiled steps of B/16 are
# Narrow models gain more: timm's Ti/16 1.48, the recipe cifar10 at batch 512 1.77 (20.5 and 11.6 ms)
NARROW, NARROW_GAIN = 256, 1.48


class CompileChoice(NamedTuple):
    """Whether the model is compiled, and a line that says why not."""

    compiles: bool
    note: str = ""


def is_worth_compiling(steps: float, seconds: float, gain: float = GAIN, cost: float = COMPILE_SECONDS) -> bool:
    """Whether so many compiled steps of `seconds`, which take `gain` times as long otherwise, save more than `cost`."""
    return steps * seconds * (gain - 1) > cost


def choose_compile(config: Config, device: str, processes: int = 1) -> CompileChoice:
    """on and off are kept; auto is off on a CPU, and on a GPU by the length of the run."""
    if config.compile != "auto" or not device.startswith("cuda"):
        return CompileChoice(config.compile == "on")
    assert config.model
    seconds = sum(step_seconds(describe_step(config, config.model, processes), H200).values())
    steps = min(config.steps, 3600 * config.hours / seconds) if config.hours else config.steps
    gain = NARROW_GAIN if config.model.width <= NARROW else GAIN
    if is_worth_compiling(steps, seconds, gain):
        return CompileChoice(True)
    saved = f"{steps:,.0f} steps would save about {readable(steps * seconds * (gain - 1))}"
    words = f"not compiled: {saved}, compiling takes about {readable(COMPILE_SECONDS)} (--compile on compiles anyway)"
    return CompileChoice(False, words)
