"""One step of a run made again, to see where numbers stop being finite.

plainvit replay runs/photos --step 1234

The weights come from the capture of that step, or from a checkpoint of it; batch, augmentation and dropout follow from
the seed. Nothing is updated.
"""

from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from plainvit.config import Config, from_json
from plainvit.data.splits import open_splits
from plainvit.disk import read_json
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.folder import Folder, shorten_repr
from plainvit.train.guards import tensor_fault
from plainvit.train.setup import build_training
from plainvit.train.state import Training
from plainvit.train.step import compute_gradients, launch


def replay(path: str | Path, step: int | None = None, data_root: str = "", device: str = "auto") -> dict[str, Any]:
    """Loss, gradient norm, and the first of the modules and gradients that are not finite."""
    path = Path(path)
    stored = read_json(path / "config.json")
    if not stored:
        raise ValueError(f"{path} is no run folder: there is no config.json in it")
    config = from_json(stored, ("run",))
    assert isinstance(config, Config)
    config = config.replace(
        device=device,
        compile="off",  # modules one by one
        track=(),
        data_root=data_root or config.data_root,
        optim=config.optim.replace(clip=0.0),  # gradients as they are
    )
    tensors, state, number = _state(path, step)
    with Folder(path, writes=False) as folder:  # the run may be alive
        run = build_training(config, open_splits(config), folder, quiet=True)
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        size = state.get("micro_batch", 0)
        if isinstance(progress := state.get("progress"), dict):
            size = progress.get("micro_batch", 0)
        fault = tensor_fault(run.objective.state_dict(), weights)
        if not fault and (type(size) is not int or not 0 <= size <= config.batch):
            fault = f"micro_batch is {shorten_repr(size)}"
        if fault:
            raise ValueError(f"what {path} keeps of step {number + 1} does not fit its config.json: {fault}")
        run.objective.load_state_dict(weights)
        run.progress.step, run.progress.micro_batch = number, size
        return {"run": str(path), "step": number + 1} | repeat_step(run)


def _state(path: Path, step: int | None) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Weights before the step, which is counted from 1 as in the metrics; without one, the last that was captured."""
    captures, checkpoints = Checkpoints(path / "captures", 1), Checkpoints(path / "checkpoints", 1)
    if step is None:
        if not captures.steps():
            raise ValueError(f"{path} has no captured step: every step was finite; --step N takes one of a checkpoint")
        step = captures.steps()[-1]
    if step in captures.steps():
        return *captures.read(step), step - 1
    if step - 1 in checkpoints.steps():
        return *checkpoints.read(step - 1), step - 1
    known = sorted({*captures.steps(), *(number + 1 for number in checkpoints.steps())})
    raise ValueError(f"{path} keeps the weights of no step {step}; it has those before: {', '.join(map(str, known))}")


def repeat_step(run: Training) -> dict[str, Any]:
    batch = next(run.loader.batches(run.progress.step, run.progress.step + 1))
    tensors = run.objective.prepare(batch, run.progress.step)
    spoilt: list[str] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: _look(name, out, spoilt))
        for name, module in run.objective.model.named_modules()
        if not any(module.children())
    ]
    run.objective.train()
    run.gradients = lambda *tensors: compute_gradients(run, tensors, run.objective)
    loss, _, norm, _ = launch(run, tensors).read()
    for hook in hooks:
        hook.remove()
    norms = {name: float(p.grad.norm()) for name, p in run.objective.named_parameters() if p.grad is not None}
    return {
        "loss": loss,
        "norm": norm,
        "modules_not_finite": spoilt,
        "gradients_not_finite": [name for name, norm in norms.items() if not norm < float("inf")],
        "largest_gradients": dict(sorted(norms.items(), key=lambda item: -item[1])[:8]),
        "images": [run.loader.source.name(int(index)) for index in batch.index],
    }


def _look(name: str, out: object, spoilt: list[str]) -> None:
    if (
        isinstance(out, Tensor)
        and out.is_floating_point()
        and not bool(torch.isfinite(out).all())
        and name not in spoilt
    ):
        spoilt.append(name)


def table(found: dict[str, Any]) -> RenderableType:
    """For people."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_row("loss", f"{found['loss']:.6g}")
    shown.add_row("gradient norm", f"{found['norm']:.6g}")
    for key, words in (("modules_not_finite", "output"), ("gradients_not_finite", "gradient")):
        names = found[key]
        first = f"{names[0]} (first of {len(names)})" if names else "none"
        shown.add_row(f"{words} not finite", first)
    for name, norm in found["largest_gradients"].items():
        shown.add_row(f"|gradient| of {name}", f"{norm:.4g}")
    words = f", step {found['step']}, {len(found['images'])} images"
    return Group(Text.assemble((found["run"], "bold"), words), shown)
