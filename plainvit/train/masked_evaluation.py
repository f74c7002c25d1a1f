"""Masked prediction on held-out images: the loss, and a figure for the report."""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from plainvit.analyse.masked import draw_masked
from plainvit.config import Preprocess
from plainvit.data.decode import DataError, ImageError
from plainvit.data.transforms import preprocess_image
from plainvit.evaluate.classify import Prepared
from plainvit.models.inference import NonFiniteError, eval_mode
from plainvit.train.masked import PredictPatches

if TYPE_CHECKING:
    from plainvit.runtime.folder import Folder

SHOWN = 6  # images in a figure


@torch.no_grad()
def evaluate_masked(
    objective: PredictPatches, prepared: Prepared, cast: Callable[[], AbstractContextManager]
) -> dict[str, float]:
    """The loss, and for target colour the accuracy, over all held-out images, split over the processes."""
    world = prepared.world
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # loss, correct, images, unreadable
    with eval_mode(objective):
        for batch in prepared.batches():
            good = ~np.isin(batch.index, [index for index, _ in batch.bad])
            images, count = batch.images[torch.from_numpy(good).to(batch.images.device)], int(good.sum())
            sums[3] += len(batch.bad)
            if count:
                with cast():
                    loss, correct = objective(*objective.prepare_held_out(images, batch.index[good]))
                sums[:3] += torch.stack((loss * count, correct, torch.full_like(loss, count))).double()
    loss, correct, images, unreadable = world.sum(sums).tolist()
    if not images:
        raise DataError(f"no image of the {prepared.source.split} split can be read")
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss on {int(images):,} held-out images is {loss:g}: lower --optim.lr")
    accuracy = {} if math.isnan(correct) else {"accuracy": correct / images}
    return {"loss": loss / images, **accuracy, "images": int(images), "unreadable": int(unreadable)}


def validate_masked(
    objective: PredictPatches,
    prepared: Prepared,
    cast: Callable[[], AbstractContextManager],
    folder: "Folder",
    step: int,
) -> dict[str, float]:
    """The metrics of a validation during training; also draws figures/."""
    metrics = evaluate_masked(objective, prepared, cast)
    if prepared.world.is_main and folder.writes:
        draw_predictions(objective, prepared, cast, folder.path, step)
    return {name: value for name, value in metrics.items() if name in ("loss", "accuracy")}


@torch.no_grad()
def draw_predictions(
    objective: PredictPatches, prepared: Prepared, cast: Callable[[], AbstractContextManager], folder: Path, step: int
) -> None:
    """Draws a few held-out images, evenly spaced and always the same."""
    preprocess: Preprocess = objective.model.about.preprocess
    images, index = [], []
    for one in np.unique(np.linspace(0, len(prepared.source) - 1, SHOWN).astype(int)):
        with contextlib.suppress(ImageError, OSError):
            images.append(preprocess_image(prepared.source.read(int(one)), preprocess, prepared.size))
            index.append(int(one))
    if images:
        batch = torch.stack(images).to(prepared.world.device)
        with eval_mode(objective), cast():
            shown = objective.show(objective.prepare_held_out(batch, np.array(index)))
        draw_masked(folder, step, [part.cpu().numpy() for part in shown])
