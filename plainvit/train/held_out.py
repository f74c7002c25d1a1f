"""How well hidden patches are predicted on held-out images, and a figure of it for the report."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from plainvit.analyse.masked import draw_masked
from plainvit.data.decode import DataError, ImageError
from plainvit.data.transforms import preprocess_image
from plainvit.evaluate.classify import Prepared
from plainvit.models.inference import NonFiniteError, eval_mode
from plainvit.train.masked import PredictPatches

if TYPE_CHECKING:
    from plainvit.train.state import Training

SHOWN = 6  # images in a figure


@torch.no_grad()
def evaluate_masked(
    objective: PredictPatches, prepared: Prepared, cast: Callable[[], AbstractContextManager]
) -> dict[str, float]:
    """The loss, and with colours the accuracy, over all held-out images, divided among the processes."""
    world = prepared.world
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # loss, right, images, unreadable
    with eval_mode(objective):
        for batch in prepared.batches():
            good = ~np.isin(batch.index, [index for index, _ in batch.bad])
            images, count = batch.images[torch.from_numpy(good).to(batch.images.device)], int(good.sum())
            sums[3] += len(batch.bad)
            if count:
                with cast():
                    loss, right = objective(*objective.prepare_held_out(images, batch.index[good]))
                sums[:3] += torch.stack((loss * count, right, torch.full_like(loss, count))).double()
    loss, right, images, unreadable = world.sum(sums).tolist()
    if not images:
        raise DataError(f"no image of the {prepared.source.split} split can be read")
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss on {int(images):,} held-out images is {loss:g}: lower --optim.lr")
    colours = {} if right != right else {"accuracy": right / images}
    return {"loss": loss / images, **colours, "images": int(images), "unreadable": int(unreadable)}


def validate_masked(run: "Training", prepared: Prepared) -> dict[str, float]:
    """The metrics of a validation during training; and a figure in figures/."""
    objective = run.objective
    assert isinstance(objective, PredictPatches)
    found = evaluate_masked(objective, prepared, run.cast)
    if run.world.is_main and run.folder.writes:
        draw_predictions(run, objective, prepared)
    return {name: value for name, value in found.items() if name in ("loss", "accuracy")}


@torch.no_grad()
def draw_predictions(run: "Training", objective: PredictPatches, prepared: Prepared) -> None:
    """Some of the held-out images, spread over all of them and always the same."""
    assert run.config.preprocess
    images, index = [], []
    for one in np.unique(np.linspace(0, len(prepared.source) - 1, SHOWN).astype(int)):
        try:
            images.append(preprocess_image(prepared.source.read(int(one)), run.config.preprocess, prepared.size))
            index.append(int(one))
        except (ImageError, OSError):
            continue
    if images:
        batch = torch.stack(images).to(run.world.device)
        with eval_mode(objective), run.cast():
            shown = objective.show(objective.prepare_held_out(batch, np.array(index)))
        draw_masked(run.folder.path, run.progress.step, [part.cpu().numpy() for part in shown])
