"""Send metrics to TensorBoard and Weights & Biases, where they are installed."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plainvit.config import Config, to_json

Log = Callable[[int, dict[str, float]], None]


class Tracker:
    """Sends lines of metrics to each of the named trackers."""

    def __init__(self, names: tuple[str, ...], folder: Path, config: Config) -> None:
        self._opened = [{"tensorboard": open_tensorboard, "wandb": open_wandb}[name](folder, config) for name in names]

    def send(self, line: dict[str, Any]) -> None:
        kind, metrics = ("val", line["val"]) if "val" in line else ("train", line)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}
        for log, _ in self._opened:
            log(line["step"], {f"{kind}/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        """Sends what is still buffered. Without it, wandb would log the next run of this process as this one."""
        for _, close in self._opened:
            close()


def open_tensorboard(folder: Path, _: Config) -> tuple[Log, Callable[[], None]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--track tensorboard needs TensorBoard: pip install 'tensorboard>=2.18'") from error
    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def open_wandb(folder: Path, config: Config) -> tuple[Log, Callable[[], None]]:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("--track wandb needs Weights & Biases: pip install 'wandb>=0.19'") from error
    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]  # folders of one name are different runs
    options = {"project": "plainvit", "name": folder.name, "id": key, "resume": "allow", "dir": str(folder)}
    run = wandb.init(**options, config=to_json(config))
    return lambda step, values: run.log(values, step=step), run.finish
