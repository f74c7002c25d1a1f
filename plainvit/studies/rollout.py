"""Claim 23: attention rollout highlights the object (Figures 6 and 14).

plainvit study rollout --budget cpu

On `shapes`, where the mask of every object is known: the fraction of the rollout on the object divided by its fraction
of the area. The model has timm's small initial weights, whose attention is uniform. Google's are larger, so that
texture alone attracts attention before any training.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import avg_pool2d

from plainvit.analyse import attention
from plainvit.config import Augment, Config, Optim, ViTConfig
from plainvit.data.generated import Shapes, shapes
from plainvit.device import choose_device
from plainvit.models import ViT
from plainvit.studies.evidence import Part
from plainvit.studies.measures import load_model, trained_and_untrained
from plainvit.studies.study import Budget, Results, define

IMAGES = 200


def shapes_config(budget: Budget) -> Config:
    """Objects with a radius of 6 to 10 pixels, 8 x 8 patches."""
    model = ViTConfig(
        width=64, depth=4, heads=4, mlp_dim=128, patch=(4, 4), image_size=(32, 32), classes=0, init="timm"
    )
    data, steps, batch = "shapes:size=32,count=2000", 500, 64
    if budget != "cpu":
        model = model.replace(width=192, depth=8, heads=3, mlp_dim=768)
        data, steps, batch = "shapes:size=32", 2000, 256
    optim, augment = Optim(lr=1e-3, warmup=0.2, weight_decay=0.05), Augment(crop="none")
    return Config(model=model, data=data, steps=steps, batch=batch, optim=optim, augment=augment, evaluations=1)


# Measurement ----------------------------------------------------------------------------------------------------------


def measure(config: Config, folder: Path) -> dict[str, float]:
    """Mean ratio of rollout and area on the object, over images that are neither training nor test images."""
    model = load_model(config, folder).to(choose_device("auto"))
    source = shapes("val", f"size={model.config.image_size[0]},count={IMAGES}")
    mass, area, _ = rollout_on_object(model, source, IMAGES)
    return {"ratio": float((mass / area).mean())}


def rollout_on_object(model: ViT, source: Shapes, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(fraction of the rollout on the object [N], fraction of the area [N], rollouts [N, h, w])."""
    drawn = [source.draw(index) for index in range(count)]
    images = torch.stack([torch.from_numpy(pixels).permute(2, 0, 1) for pixels, _, _ in drawn])
    masks = torch.stack([torch.from_numpy(mask) for _, mask, _ in drawn]).double()
    maps = attention.rollout(model, images).double()
    maps = maps / maps.sum((1, 2), keepdim=True)
    covered = avg_pool2d(masks[:, None], model.config.stride)[:, 0]  # [N, h, w]
    return (maps * covered).sum((1, 2)).numpy(), masks.mean((1, 2)).numpy(), maps.numpy()


def parts(found: Results) -> list[Part]:
    return [
        found.contrast("rollout on the object / its area, trained", {"trained": 1.0}, limit=1.0),
        found.above("trained", "untrained"),
    ]


STUDIES = (
    define(
        "rollout",
        lambda budget: trained_and_untrained(shapes_config(budget)),
        parts,
        measure=measure,
        metric="ratio",
        xlabel="rollout on the object / its share of the area",
        runs=8,
    ),
)
