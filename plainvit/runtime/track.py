"""Metrics to TensorBoard and Weights & Biases, where they are installed: a function that takes each line of metrics."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plainvit.config import Config, to_json


def tracker(names: tuple[str, ...], folder: Path, config: Config) -> Callable[[dict[str, Any]], None]:
    """Sends a line to each tracker asked for."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    sends = [makers[name](folder, config) for name in names]

    def send(line: dict[str, Any]) -> None:
        for one in sends:
            one(line["step"], {f"{kind}/{name}": value for kind, name, value in _flat(line)})

    return send


def _flat(line: dict[str, Any]) -> list[tuple[str, str, float]]:
    inner = line.get("val")
    kind, values = ("val", inner) if isinstance(inner, dict) else ("train", line)
    return [(kind, name, value) for name, value in values.items() if name != "step" and isinstance(value, int | float)]


def _tensorboard(folder: Path, config: Config) -> Callable[[int, dict[str, float]], None]:  # noqa: ARG001
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--track tensorboard needs it: pip install 'tensorboard>=2.18'") from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def send(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return send


def _wandb(folder: Path, config: Config) -> Callable[[int, dict[str, float]], None]:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("--track wandb needs it: pip install 'wandb>=0.19'") from error
    key = re.sub(r"[^\w.-]", "-", folder.name)  # it allows no colon and the like in an id
    run = wandb.init(
        project="plainvit", name=folder.name, id=key, resume="allow", dir=str(folder), config=to_json(config)
    )
    return lambda step, values: run.log(values, step=step)
