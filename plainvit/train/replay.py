"""Repeat one step of a run, to find where values become NaN or Inf.

plainvit replay runs/photos --step 1234

The weights come from the capture of that step or from a checkpoint; batch, augmentation and dropout follow from the
seed. Nothing is updated.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor, nn

from plainvit.config import LOSSES, Config, from_json
from plainvit.data.splits import open_splits
from plainvit.disk import read_json
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.display import key_value_table
from plainvit.runtime.folder import Folder
from plainvit.train.setup import build_training
from plainvit.train.state import Training, copy_tensors, select
from plainvit.train.step import start_step


def replay(path: str | Path, step: int | None = None, data_root: str = "", device: str = "auto") -> dict[str, Any]:
    """Repeats one step without an update: its loss, gradient norm, and the modules and gradients with NaN or Inf."""
    path = Path(path)
    stored = read_json(path / "config.json")
    if not stored:
        raise ValueError(f"{path} is not a run folder: it has no config.json")
    config = from_json(stored, ("run",))
    assert isinstance(config, Config)
    if config.loss not in LOSSES:  # no file that a run folder names is executed
        raise ValueError(f"replay does not support a loss of your own, and {path} has {config.loss}")
    config = config.replace(
        device=device,
        compile="off",  # so that each module is called and seen
        graphs="off",
        track=(),
        data_root=data_root or config.data_root,
        optim=config.optim.replace(clip=0.0),  # gradients before clipping
    )
    tensors, state, steps_done = read_state(path, step)
    with Folder(path, writes=False) as folder:  # the run may still be training
        run = build_training(config, open_splits(config), folder, quiet=True)
        copy_tensors(select(tensors, "model."), run.objective.state_dict())
        run.progress.step = steps_done
        run.progress.micro_batch = state.get("progress", state)["micro_batch"]  # a capture has no progress
        return {"run": str(path), "step": steps_done + 1} | repeat_step(run)


def read_state(path: Path, step: int | None) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Weights before a step, which is counted from 1 as in the metrics; by default the last captured step."""
    captures = Checkpoints(path / "captures", 1)
    checkpoints = Checkpoints(path / "checkpoints", 1)
    if step is None:
        if not captures.steps():
            raise ValueError(
                f"{path} has no captured step, because no step had a NaN or Inf: "
                "give --step N, where N-1 is the step of a checkpoint"
            )
        step = captures.steps()[-1]
    if step in captures.steps():
        return *captures.read(step), step - 1
    if step - 1 in checkpoints.steps():
        return *checkpoints.read(step - 1), step - 1
    known = sorted({*captures.steps(), *(number + 1 for number in checkpoints.steps())})
    raise ValueError(f"{path} has no weights for --step {step}; it has those of {', '.join(map(str, known))}")


def repeat_step(run: Training) -> dict[str, Any]:
    """Forward and backward pass of the run's next step, with what they computed; changes no weights."""
    batch = next(run.loader.batches(run.progress.step, run.progress.step + 1))
    tensors = run.objective.make_inputs(batch, run.progress.step)
    run.objective.train()
    with record_non_finite(run.objective.model) as modules:
        loss, _, norm, _ = start_step(run, tensors).read()
    norms = {name: float(p.grad.norm()) for name, p in run.objective.named_parameters() if p.grad is not None}
    finite = {name: value for name, value in norms.items() if math.isfinite(value)}
    return {
        "loss": loss,
        "norm": norm,
        "modules_not_finite": modules,
        "gradients_not_finite": [name for name in norms if name not in finite],
        "largest_gradients": dict(sorted(finite.items(), key=lambda item: -item[1])[:8]),
        "images": [run.loader.source.name(int(index)) for index in batch.index],
    }


@contextlib.contextmanager
def record_non_finite(model: nn.Module) -> Iterator[list[str]]:
    """Names of the modules whose output has NaN or Inf, in the order of the forward pass."""
    names: list[str] = []

    def check(name: str, output: object) -> None:
        if name in names or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if not output.isfinite().all():
            names.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: check(name, output))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def table(report: dict[str, Any]) -> RenderableType:
    """The result of `replay` for the terminal."""
    rows = {"loss": f"{report['loss']:.6g}", "gradient norm": f"{report['norm']:.6g}"}
    modules, gradients = report["modules_not_finite"], report["gradients_not_finite"]
    rows["non-finite outputs"] = f"{len(modules)}, the first of {modules[0]}" if modules else "none"
    # The backward pass goes from the loss to the first layers, so it meets the last parameter in model order first
    rows["non-finite gradients"] = f"{len(gradients)}, nearest to the loss {gradients[-1]}" if gradients else "none"
    rows |= {f"|gradient| of {name}": f"{norm:.4g}" for name, norm in report["largest_gradients"].items()}
    title = Text(f"{report['run']}, step {report['step']}, {len(report['images'])} images")
    return Group(title, key_value_table(rows))
