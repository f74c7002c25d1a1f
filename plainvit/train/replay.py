"""Repeat one step of a run, to find where values become NaN or Inf.

plainvit replay runs/photos --step 1234

The weights come from the capture of that step or from a checkpoint; batch, augmentation and dropout follow from the
seed. Nothing is updated.
"""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from plainvit.config import Config, from_json
from plainvit.data.splits import open_splits
from plainvit.disk import read_json
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.folder import Folder
from plainvit.train.setup import build_training
from plainvit.train.state import Training, copy_tensors, select
from plainvit.train.step import launch


def replay(path: str | Path, step: int | None = None, data_root: str = "", device: str = "auto") -> dict[str, Any]:
    """Loss, gradient norm, and the modules and gradients with non-finite values."""
    path = Path(path)
    stored = read_json(path / "config.json")
    if not stored:
        raise ValueError(f"{path} is not a run folder: it has no config.json")
    config = from_json(stored, ("run",))
    assert isinstance(config, Config)
    config = config.replace(
        device=device,
        compile="off",  # so that each module is called and seen
        graphs="off",
        track=(),
        data_root=data_root or config.data_root,
        optim=config.optim.replace(clip=0.0),  # gradients before clipping
    )
    tensors, state, number = read_state(path, step)
    with Folder(path, writes=False) as folder:  # the run may still be training
        run = build_training(config, open_splits(config), folder, quiet=True)
        copy_tensors(select(tensors, "model."), run.objective.state_dict())
        run.progress.step, run.progress.micro_batch = number, state.get("progress", state)["micro_batch"]
        return {"run": str(path), "step": number + 1} | repeat_step(run)


def read_state(path: Path, step: int | None) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Weights before a step, which is counted from 1 as in the metrics; by default the last captured step."""
    captures, checkpoints = Checkpoints(path / "captures", 1), Checkpoints(path / "checkpoints", 1)
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
    batch = next(run.loader.batches(run.progress.step, run.progress.step + 1))
    tensors = run.objective.make_inputs(batch, run.progress.step)
    non_finite: list[str] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: note_non_finite(name, out, non_finite))
        for name, module in run.objective.model.named_modules()
        if not any(module.children())
    ]
    run.objective.train()
    loss, _, norm, _ = launch(run, tensors).read()
    for hook in hooks:
        hook.remove()
    norms = {name: float(p.grad.norm()) for name, p in run.objective.named_parameters() if p.grad is not None}
    return {
        "loss": loss,
        "norm": norm,
        "modules_not_finite": non_finite,
        "gradients_not_finite": [name for name, norm in norms.items() if not norm < float("inf")],
        "largest_gradients": dict(sorted(norms.items(), key=lambda item: -item[1])[:8]),
        "images": [run.loader.source.name(int(index)) for index in batch.index],
    }


def note_non_finite(name: str, out: object, names: list[str]) -> None:
    if isinstance(out, Tensor) and out.is_floating_point() and name not in names and not out.isfinite().all():
        names.append(name)


def table(report: dict[str, Any]) -> RenderableType:
    """The result of `replay` for the terminal."""
    rows = {"loss": f"{report['loss']:.6g}", "gradient norm": f"{report['norm']:.6g}"}
    for key, words in (("modules_not_finite", "output"), ("gradients_not_finite", "gradient")):
        names = report[key]
        rows[f"{words} not finite"] = f"{names[0]} (first of {len(names)})" if names else "none"
    rows |= {f"|gradient| of {name}": f"{norm:.4g}" for name, norm in report["largest_gradients"].items()}
    shown = Table(box=None, pad_edge=False, show_header=False)
    for row in rows.items():
        shown.add_row(*row)
    return Group(Text(f"{report['run']}, step {report['step']}, {len(report['images'])} images"), shown)
