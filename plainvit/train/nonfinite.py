"""Steps whose loss or gradient is NaN or Inf: such a step changes no weight, and too many of them end the run.

`loop.take_step` calls `skip_step` in place of the update, `loop.train` raises DivergedError after more than
--max-skipped-steps. `plainvit replay` (replay.py) repeats the steps that are saved here.
"""

import math
from typing import TYPE_CHECKING

import torch

from plainvit.runtime.checkpoint import Checkpoints

if TYPE_CHECKING:
    from plainvit.data.loader import Batch
    from plainvit.runtime.display import Display
    from plainvit.train.state import Training


class DivergedError(ValueError):
    """Too many steps had non-finite values; the command ends with exit code 4."""

    exit_code, raised_by_all = 4, True  # all processes of a run raise it


def is_finite_step(loss: float, norm: float) -> bool:
    """Whether the weights may be updated: NaN or Inf in any gradient makes the norm NaN or Inf."""
    return math.isfinite(loss) and math.isfinite(norm)


def skip_step(run: "Training", batch: "Batch", loss: float, norm: float, display: "Display") -> None:
    """Counts and saves a step whose loss or gradient is NaN or Inf; the loop leaves the weights as they are."""
    run.progress.skipped += 1
    capture(run, batch, loss, norm)
    step = run.progress.step + 1
    hint = f"run `plainvit replay {run.folder.path} --step {step}` to find the layer"
    display.print_line(f"step {step} skipped: loss {loss:.4g}, gradient norm {norm:.4g} ({hint})")


def capture(run: "Training", batch: "Batch", loss: float, norm: float) -> None:
    """Saves what `plainvit replay` needs to repeat a step with non-finite values."""
    non_finite = [
        name
        for name, p in run.objective.named_parameters()
        if p.grad is not None and not bool(torch.isfinite(p.grad).all())
    ]
    captures = Checkpoints(run.folder.path / "captures", run.config.max_skipped_steps + 1, run.world)
    weights = {name: tensor for name, tensor in run.tensors().items() if name.startswith("model.")}
    state = {"loss": repr(loss), "norm": repr(norm), "gradients": non_finite, "images": batch.index.tolist()}
    captures.save(run.progress.step + 1, weights, state | {"micro_batch": run.progress.micro_batch})
    captures.wait()


def describe_divergence(run: "Training") -> str:
    count, last = run.progress.skipped, run.progress.step
    hint = f"lower --optim.lr, or run `plainvit replay {run.folder.path}`"
    return f"training diverged: {count} steps had a non-finite loss or gradient, the last one step {last}; {hint}"
