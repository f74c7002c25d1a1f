"""Training steps to be timed: plainvit's own, that of the training loop, and those of its peers, on the same batches.

    job = Job("B/16", configure("ViT-B/16"), 256, "cuda", compiled=True)
    draw(job)
    step, flops = make("plainvit", job)
    step()                                               one step; the loss

A further way of training with plainvit is a line in VARIANTS.
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

from bench.measure import step_flops
from bench.peers import RATE, PeerStep, cudnn_attention
from plainvit.config import Config, Masked, Optim, Preprocess, ViTConfig
from plainvit.data.loader import Batch
from plainvit.data.sources import Source
from plainvit.data.splits import Splits, open_splits
from plainvit.runtime.display import Display
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import Folder
from plainvit.train.loop import take_step
from plainvit.train.setup import build_training
from plainvit.train.step import Prefetcher
from plainvit.train.transfer import resolve

BATCHES, SEEN = 4, 16  # different batches, of so many classes: the loss must fall, for a loss that stays says nothing
OURS = "plainvit"


@dataclass(frozen=True)
class Variant:
    """A way of training with plainvit: changes of its config, and the FLOPs that it executes for an image."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    executed: Callable[[ViTConfig], float] = step_flops
    parity: float = 0.0  # its own limit in place of PARITY's, where it rounds more or has another loss
    model: Mapping[str, Any] = field(default_factory=dict)  # changes of its model


def without_last_tokens(model: ViTConfig) -> float:
    """FLOPs where the last block has its queries, its sum over heads and its MLP for the class token alone."""
    others, D = model.tokens - 1, model.width
    return step_flops(model) - 6 * others * (2 * D * D + 2 * D * model.mlp_dim + 2 * model.tokens * D)


MAE = {"objective": "mae", "masked": Masked(ratio=0.75, target="pixels", normalise=True)}
# The first is what everything is compared with; its models read the class token
VARIANTS = {
    OURS: Variant(executed=without_last_tokens),
    "plainvit, no graphs": Variant({"graphs": "off"}, without_last_tokens),
    "plainvit, plain": Variant({"graphs": "off", "fast_path": "off"}),
    "plainvit, fp8": Variant({"precision": "fp8"}, without_last_tokens, 0.02),
    # For the cost of MAE (a quarter of the patches, the published decoder) next to that of labels on every token
    "plainvit, every token": Variant(parity=math.inf, model={"pool": "average"}),
    "plainvit, MAE": Variant(MAE, parity=math.inf, model={"classes": 0, "posemb": "sincos2d"}),
}
FORMS = {"as shipped": False, "tuned": True}  # of a peer -> whether it is tuned


@dataclass
class Job:
    """One model and its batches: what every system is given alike."""

    name: str
    model: ViTConfig
    batch: int
    device: str
    compiled: bool
    mode: str = "default"
    pixels: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # images in uint8, and labels
    floats: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the same images as the peers take them
    weights: dict[str, Tensor] = field(default_factory=dict)  # plainvit's before its first step, on the host


def draw(job: Job) -> None:
    """Batches of noise over a colour that tells the class."""
    generator = torch.Generator(job.device).manual_seed(0)
    draw_ = partial(torch.randint, generator=generator, device=job.device)
    colours = draw_(0, 128, (SEEN, job.model.channels, 1, 1), dtype=torch.uint8)
    for _ in range(BATCHES):
        labels = draw_(0, min(SEEN, job.model.classes), (job.batch,))
        noise = draw_(0, 128, (job.batch, job.model.channels, *job.model.image_size), dtype=torch.uint8)
        job.pixels.append((noise + colours[labels], labels))
        job.floats.append((job.pixels[-1][0].float() / 127.5 - 1, labels))


class System(Protocol):
    """Whole training steps, one a call; the loss comes back, perhaps before the device has it."""

    around: Callable[[], Any]  # which attention backends may be used, for as long as it is entered

    def __call__(self) -> float | Tensor: ...

    def close(self) -> None: ...


class Noise(Source):
    """Stands for the training images: their number and classes; the batches themselves are given."""

    def __init__(self, images: int, classes: int) -> None:
        self.labels = np.zeros(images, np.int32)
        self.classes = tuple(map(str, range(classes)))

    def read(self, index: int) -> np.ndarray:  # noqa: ARG002
        return np.zeros((8, 8, 3), np.uint8)

    def name(self, index: int) -> str:
        return f"noise {index}"


class OurStep:
    """plainvit's own training step, on batches as they come."""

    def __init__(self, config: Config, batches: Iterator[Batch], classes: int = 1000) -> None:
        config = config.replace(micro_batch=config.batch, steps=10**6, preprocess=Preprocess(), workers=0)
        self.place = tempfile.TemporaryDirectory()  # nothing is written there while steps are finite
        folder, splits = Folder(Path(self.place.name), writes=False), Splits(Noise(config.batch, classes), None, None)
        self.run = build_training(config, splits, folder, quiet=True, world=World(device=config.device))
        self.run.objective.train()
        self.display = Display("bench", 1, quiet=True)
        self.supply = Prefetcher(self.run, batches)
        self.around: Callable[[], Any] = partial(cudnn_attention, False)

    def weights(self) -> dict[str, Tensor]:
        """On the host: a copy on the device would count as memory of the system."""
        own = self.run.objective.model.state_dict()
        return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in own.items()}

    def __call__(self) -> float:
        line, _ = take_step(self.run, self.supply, self.display)
        self.run.progress.step += 1
        if "skipped" in line:  # no update was made: its time is not that of a step
            raise FloatingPointError(f"step {line['step']} is not finite")
        return line["loss"]

    def close(self) -> None:
        self.place.cleanup()
        del self.run, self.supply


def forever(pixels: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    """The same batches in turn."""
    for images, labels in itertools.cycle(pixels):
        yield Batch(images, labels, np.arange(len(images)))


@contextlib.contextmanager
def steps_on_data(config: Config) -> Iterator[Callable[[], float]]:
    """A training step on the data of a config, its reading included: a function that returns its seconds."""
    splits = open_splits(config)
    splits.val = splits.test = None
    config = resolve(config, splits)
    with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder:
        run = build_training(config, splits, folder, quiet=True)
        run.objective.train()
        display = Display("steps", config.steps, quiet=True)
        with contextlib.closing(run.loader.batches(0, config.steps)) as batches:
            prefetcher = Prefetcher(run, batches)

            def step() -> float:
                line, _ = take_step(run, prefetcher, display)
                run.progress.step += 1
                return line["seconds"]

            yield step


def config_of(job: Job) -> Config:
    """What the peers do: AdamW at one rate, without decay or clipping."""
    return Config(
        model=job.model,
        batch=job.batch,
        optim=Optim(lr=RATE, schedule="constant", weight_decay=0.0, clip=0.0),
        device=job.device,
        compile="on" if job.compiled else "off",
    )


def make(name: str, job: Job) -> tuple[System, float]:
    """The system of a name, and the FLOPs that it executes for an image. plainvit's first weights become the job's."""
    if name in VARIANTS:
        one = VARIANTS[name]
        config = config_of(job).replace(model=job.model.replace(**one.model), **one.changes)
        ours = OurStep(config, forever(job.pixels), job.model.classes)
        job.weights = job.weights or ours.weights()
        return ours, one.executed(job.model)
    library, _, form = name.partition(", ")
    how = {"device": job.device, "tuned": FORMS[form], "compiled": job.compiled, "mode": job.mode}
    return PeerStep(library, job.model, job.weights, job.floats, **how), step_flops(job.model)
