"""Send metrics to TensorBoard and Weights & Biases, where they are installed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plainvit.config import Config, to_json


def tracker(names: tuple[str, ...], folder: Path, config: Config) -> Callable[[dict[str, Any]], None]:
    """A function that sends a line of metrics to each of the named trackers."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    sends = [makers[name](folder, config) for name in names]

    def send(line: dict[str, Any]) -> None:
        values = {f"{kind}/{name}": value for kind, name, value in _flatten(line)}
        for send_values in sends:
            send_values(line["step"], values)

    return send


def _flatten(line: dict[str, Any]) -> list[tuple[str, str, float]]:
    inner = line.get("val")
    kind, values = ("val", inner) if isinstance(inner, dict) else ("train", line)
    return [(kind, name, value) for name, value in values.items() if name != "step" and isinstance(value, int | float)]


def _tensorboard(folder: Path, config: Config) -> Callable[[int, dict[str, float]], None]:  # noqa: ARG001
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--track tensorboard needs TensorBoard: pip install 'tensorboard>=2.18'") from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def send(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return send


def _wandb(folder: Path, config: Config) -> Callable[[int, dict[str, float]], None]:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("--track wandb needs Weights & Biases: pip install 'wandb>=0.19'") from error
    key = re.sub(r"[^\w.-]", "-", folder.name)  # an id allows no colon and the like
    run = wandb.init(
        project="plainvit", name=folder.name, id=key, resume="allow", dir=str(folder), config=to_json(config)
    )
    return lambda step, values: run.log(values, step=step)
