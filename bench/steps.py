"""Training steps to time: those of plainvit's training loop and those of the peers, on the same batches.

    job = make_job("B/16", configure("ViT-B/16"), 256, "cuda", compiled=True)
    step, flops = build_step("plainvit", job)
    loss = step()

A further way to train with plainvit is a line in VARIANTS.
"""

import contextlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bench.measure import count_training_flops
from bench.peers import LEARNING_RATE, PeerStep, set_cudnn_attention
from plainvit.config import Config, Masked, Optim, Preprocess, ViTConfig
from plainvit.data.loader import Batch
from plainvit.data.sources import Source
from plainvit.data.splits import Splits, open_splits
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import Folder
from plainvit.train.loop import take_step
from plainvit.train.setup import build_training
from plainvit.train.state import Training
from plainvit.train.step import Prefetcher
from plainvit.train.transfer import complete_config

BATCHES, CLASSES = 4, 16  # few batches and classes: the loss falls, so that differences between systems show
BASELINE = "plainvit"
FORMS = {"default": False, "tuned": True}  # of a peer -> whether it is tuned


@dataclass(frozen=True)
class Variant:
    """A way to train with plainvit."""

    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config
    model: Mapping[str, Any] = field(default_factory=dict)  # changes of the model's config
    executed_flops: Callable[[ViTConfig], float] = count_training_flops  # of one image
    loss_limit: float | None = None  # largest relative difference of the loss from plainvit's; None: the default


def count_executed_flops(model: ViTConfig) -> float:
    """FLOPs of one image where the last block computes queries, attention and MLP for the class token only."""
    others, D = model.tokens - 1, model.width
    return count_training_flops(model) - 6 * others * (2 * D * D + 2 * D * model.mlp_dim + 2 * model.tokens * D)


MAE = {"objective": "mae", "masked": Masked(ratio=0.75, target="pixels", normalize=True)}
VARIANTS = {
    BASELINE: Variant(executed_flops=count_executed_flops),
    "plainvit, plain": Variant({"graphs": "off", "fast_path": "off"}),
    "plainvit, fp8": Variant({"precision": "fp8"}, executed_flops=count_executed_flops, loss_limit=0.02),
    # To compare the cost of MAE (a quarter of the patches, the published decoder) with training on labels
    "plainvit, every token": Variant(model={"pool": "average"}, loss_limit=math.inf),
    "plainvit, MAE": Variant(MAE, model={"classes": 0, "posemb": "sincos2d"}, loss_limit=math.inf),
}


@dataclass
class Job:
    """A model and its batches, the same for every system."""

    name: str
    model: ViTConfig
    batch: int
    device: str
    compiled: bool
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # uint8 images and labels, for plainvit
    normalized: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same as floats, for the peers
    weights: dict[str, Tensor] = field(default_factory=dict)  # plainvit's initial weights, on the host


def make_job(name: str, model: ViTConfig, batch: int, device: str, *, compiled: bool) -> Job:
    """Draws images of noise whose mean color depends on the class."""
    job = Job(name, model, batch, device, compiled)
    generator = torch.Generator(device).manual_seed(0)
    randint = partial(torch.randint, generator=generator, device=device)
    colors = randint(0, 128, (CLASSES, model.channels, 1, 1), dtype=torch.uint8)
    for _ in range(BATCHES):
        labels = randint(0, min(CLASSES, model.classes), (batch,))
        images = randint(0, 128, (batch, model.channels, *model.image_size), dtype=torch.uint8) + colors[labels]
        job.batches.append((images, labels))
        job.normalized.append((images.float() / 127.5 - 1, labels))
    return job


class TrainingStep(Protocol):
    """One training step per call. Returns the loss; a tensor may still be computed on the device."""

    attention_context: Callable[[], Any]  # a context in which to call it: the allowed attention backends

    def __call__(self) -> float | Tensor: ...

    def close(self) -> None: ...


class EmptySource(Source):
    """Number of images and classes for the setup of a training, whose batches come from elsewhere."""

    def __init__(self, images: int, classes: int) -> None:
        self.labels = np.zeros(images, np.int32)
        self.classes = tuple(map(str, range(classes)))

    def read(self, index: int) -> np.ndarray:  # noqa: ARG002
        return np.zeros((8, 8, 3), np.uint8)

    def name(self, index: int) -> str:
        return f"image {index}"


class LoopSteps:
    """Steps of plainvit's training loop on given batches."""

    def __init__(self, training: Training, batches: Iterator[Batch]) -> None:
        training.objective.train()
        self.training, self.prefetcher = training, Prefetcher(training, batches)
        self.display = Display("bench", 1, quiet=True)

    def take(self) -> dict[str, Any]:
        """The line of metrics of one step."""
        line, _ = take_step(self.training, self.prefetcher, self.display)
        self.training.progress.step += 1
        return line


class PlainvitStep:
    """Steps of plainvit on batches that are on the device already."""

    def __init__(self, config: Config, batches: Iterator[Batch], classes: int) -> None:
        config = config.replace(micro_batch=config.batch, steps=10**6, preprocess=Preprocess(), workers=0)
        self.folder = tempfile.TemporaryDirectory()  # stays empty unless a step is not finite
        splits = Splits(EmptySource(config.batch, classes), None, None)
        folder, world = Folder(Path(self.folder.name), writes=False), World(device=config.device)
        self.steps = LoopSteps(build_training(config, splits, folder, quiet=True, world=world), batches)
        self.attention_context: Callable[[], Any] = partial(set_cudnn_attention, False)

    def copy_weights(self) -> dict[str, Tensor]:
        """Copies to the host: on the device they would count as memory of the system."""
        state = self.steps.training.objective.model.state_dict()
        return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in state.items()}

    def __call__(self) -> float:
        line = self.steps.take()
        if "skipped" in line:  # without an update, the time is not that of a step
            raise FloatingPointError(f"the loss or a gradient of step {line['step']} is not finite")
        return line["loss"]

    def close(self) -> None:
        """Frees the memory."""
        self.folder.cleanup()
        del self.steps


def cycle_batches(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    for images, labels in itertools.cycle(batches):
        yield Batch(images, labels, np.arange(len(images)))


@contextlib.contextmanager
def open_steps(config: Config) -> Iterator[Callable[[], float]]:
    """A function that takes a training step on the data of a config, reading included, and returns its seconds."""
    splits = open_splits(config)
    splits.val = splits.test = None
    config = complete_config(config, splits)
    with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder:
        training = build_training(config, splits, folder, quiet=True)
        with contextlib.closing(training.loader.batches(0, config.steps)) as batches:
            steps = LoopSteps(training, batches)
            yield lambda: steps.take()["seconds"]


def build_step(name: str, job: Job) -> tuple[TrainingStep, float]:
    """The system of a name, and its executed FLOPs per image. The first one of plainvit sets the weights of the job."""
    if name not in VARIANTS:
        library, _, form = name.partition(", ")
        options = {"device": job.device, "tuned": FORMS[form], "compiled": job.compiled}
        return PeerStep(library, job.model, job.weights, job.normalized, **options), count_training_flops(job.model)
    variant = VARIANTS[name]
    config = Config(
        model=job.model.replace(**variant.model),
        batch=job.batch,
        optim=Optim(lr=LEARNING_RATE, schedule="constant", weight_decay=0.0, clip=0.0),  # as PeerStep
        device=job.device,
        compile="on" if job.compiled else "off",
        **variant.changes,
    )
    step = PlainvitStep(config, cycle_batches(job.batches), job.model.classes)
    job.weights = job.weights or step.copy_weights()
    return step, variant.executed_flops(job.model)
