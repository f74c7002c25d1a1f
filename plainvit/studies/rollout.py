"""Claim 23: attention rollout highlights the object (Figures 6 and 14).

plainvit study rollout --budget cpu

On `shapes`, where the mask of every object is known: the fraction of the rollout on the object divided by its fraction
of the area. The model has timm's small initial weights, whose attention is uniform. Google's are larger, so that
texture alone attracts attention before any training.
"""

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.nn.functional import avg_pool2d

from plainvit.analyse import attention
from plainvit.analyse.figures import COLOURS, new_figure, styled
from plainvit.config import Augment, Config, Optim, ViTConfig
from plainvit.data.generated import Shapes, shapes
from plainvit.device import choose_device
from plainvit.models import ViT
from plainvit.studies.bases import vit
from plainvit.studies.drawings import draw_mean
from plainvit.studies.learned import difference_from, load_model, trained_and_untrained
from plainvit.studies.study import Arm, Budget, Results, Study, Verdict, decide_by_signs, paired_difference

IMAGES, SHOWN = 200, 3  # measured; shown in the figure


def arms(budget: Budget) -> dict[str, Arm]:
    return trained_and_untrained(shapes_config(budget))


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
    """Mean ratio of rollout and area on the object; some maps of the first seed."""
    model = load_model(config, folder).to(choose_device("auto"))
    source = validation_shapes(model.config.image_size[0])
    mass, area, maps = rollout_on_object(model, source, IMAGES)
    numbers = {"ratio": float((mass / area).mean()), "mass": float(mass.mean()), "area": float(area.mean())}
    shown = np.ndenumerate(maps[:SHOWN]) if config.seed == 0 else ()
    return numbers | {f"map {image} {y},{x}": float(value) for (image, y, x), value in shown}


def validation_shapes(side: int) -> Shapes:
    """Images that are neither training nor test images."""
    return shapes("val", f"size={side},count={IMAGES}")


def rollout_on_object(model: ViT, source: Shapes, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(fraction of the rollout on the object [N], fraction of the area [N], rollouts [N, h, w])."""
    drawn = [source.draw(index) for index in range(count)]
    images = torch.stack([torch.from_numpy(pixels).permute(2, 0, 1) for pixels, _, _ in drawn])
    masks = torch.stack([torch.from_numpy(mask) for _, mask, _ in drawn]).double()
    maps = attention.rollout(model, images).double()
    maps = maps / maps.sum((1, 2), keepdim=True)
    covered = avg_pool2d(masks[:, None], model.config.stride)[:, 0]  # [N, h, w]
    return (maps * covered).sum((1, 2)).numpy(), masks.mean((1, 2)).numpy(), maps.numpy()


# Rule and figure ------------------------------------------------------------------------------------------------------


def decide(found: Results) -> Verdict:
    over, more = (
        difference_from(1.0, found.of("trained")),
        paired_difference(found.of("untrained"), found.of("trained")),
    )
    why = (
        f"the object gets {over.describe(digits=3, limit=1.0)} times its share of the area, "
        f"{more.describe(digits=3)} against untrained"
    )
    return decide_by_signs([over.sign, more.sign], why)


@styled()
def draw(found: Results) -> Figure:
    """The ratio of each seed; next to it some images with the maps of the first seed."""
    figure, axes = new_figure(SHOWN, 4, (1.5, 1.25))
    grid = axes[0, 0].get_gridspec()
    for panel in axes[:, 0]:
        panel.remove()
    _draw_ratios(figure.add_subplot(grid[:, 0]), found)
    maps = {arm: read_maps(found.values[arm][0]) for arm in ("trained", "untrained")}
    source = validation_shapes(vit(found.arms["trained"].config).image_size[0])
    for row in range(SHOWN):
        image, top = source.draw(row)[0], max(float(each[row].max()) for each in maps.values())
        shown = {"image": image} | {arm: shade_by_map(image, each[row] / top) for arm, each in maps.items()}
        for panel, (name, picture) in zip(axes[row, 1:], shown.items(), strict=True):
            panel.imshow(picture, interpolation="nearest")
            panel.set_axis_off()
            if row == 0:
                panel.set_title(name, loc="center")
    return figure


def shade_by_map(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """An image [H, W, 3] with brightness proportional to the map [h, w]."""
    bright = np.kron(values, np.ones((image.shape[0] // len(values), image.shape[1] // values.shape[1])))
    return (image * (0.15 + 0.85 * bright[..., None])).round().astype(np.uint8)


def _draw_ratios(panel: Axes, found: Results) -> None:
    for at, (name, colour) in enumerate({"trained": COLOURS["blue"], "untrained": COLOURS["muted"]}.items()):
        draw_mean(panel, at, found.of(name), colour)
    panel.axhline(1, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    panel.set_xticks((0, 1), ("trained", "untrained"), fontsize=7)
    panel.set(xlim=(-0.6, 1.6))
    panel.set_title("rollout / area\nof the object")


def read_maps(values: dict[str, float]) -> np.ndarray:
    """[SHOWN, h, w]"""
    found = [value for name, value in values.items() if name.startswith("map ")]
    side = math.isqrt(len(found) // SHOWN)
    return np.array(found).reshape(SHOWN, side, side)


STUDY = Study(
    number=23,
    name="rollout",
    claim="The attention of a trained model lies on the object.",
    source="ViT, Figures 6 and 14",
    paper="There, maps of ViT-L/16 are bright where the object is; no number is given.",
    rule="rolled out through the layers, attention on the object is more than the object's share of the area, in the "
    "mean over images, by more than two standard errors over seeds; and more than in the untrained twin, by as much",
    metric="ratio",
    arms=arms,
    measure=measure,
    decide=decide,
    draw=draw,
)

STUDIES = (STUDY,)
