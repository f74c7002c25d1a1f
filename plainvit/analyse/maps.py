"""Attention maps (Figures 6 and 14), and a test of which of them are faithful to the model.

measure_deletion(predict, images, maps)    probability of the predicted class as patches are hidden in a map's order
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from plainvit.analyse import attention, drawings
from plainvit.analyse.page import Html, element, embed_image, join, table
from plainvit.analyse.subject import Finding, Findings, Subject
from plainvit.evaluate.statistics import student_interval

SHOWN = 6  # images with maps
TESTED = 16  # images of the faithfulness test
FRACTIONS = (0.0, 0.1, 0.3, 0.6, 1.0)  # of the patches that it hides


def analyse_maps(subject: Subject) -> Findings:
    model = attention.require_global_attention(subject.model)
    images = subject.images[:TESTED]
    maps = {
        "rollout": attention.rollout(model, images),
        "rollout, no residual": attention.rollout(model, images, residual=False),
        "last layer": attention.attention_maps(model, images)[:, -1].mean(1),
    }
    if model.head is not None:
        maps["relevance"] = attention.relevance(model, images)
    yield _show_maps(subject, maps)
    if model.head is not None:
        yield _test_faithfulness(subject, maps)


def _show_maps(subject: Subject, maps: dict[str, Tensor]) -> Finding:
    images = subject.images[:SHOWN].permute(0, 2, 3, 1).numpy()
    arrays = {name: values[:SHOWN].float().numpy() for name, values in maps.items()}
    pairs = zip(subject.names, subject.describe_predictions(SHOWN), strict=False)
    captions = [f"{name}: {prediction}" if prediction else name for name, prediction in pairs]
    rounded = {name: values.round(decimals=6).tolist() for name, values in arrays.items()}
    gradient = "; relevance weights attention by the gradient of the predicted class" if "relevance" in maps else ""
    return Finding(
        "attention-maps",
        "Attention maps",
        "Which patches the prediction may depend on: yellow where a map is high, each map on its own scale. Rollout "
        "multiplies attention through the layers, with and without residual connections; the last layer is what the "
        f"head reads{gradient}.",
        drawings.draw_maps(images, arrays, captions),
        {"names": subject.names[:SHOWN]} | rounded,
        html=_map_table(images, arrays, captions),
    )


def _map_table(images: np.ndarray, maps: dict[str, np.ndarray], captions: list[str]) -> Html:
    """Images in rows under the names of the maps: sharper and smaller than one large figure."""
    rows = [element("div", *(element("b", name) for name in ("image", *maps)), class_="row")]
    for row, (image, caption) in enumerate(zip(images, captions, strict=True)):
        cells = [embed_image(image, caption)]
        for name, values in maps.items():
            cells.append(embed_image(drawings.overlay_heat(image, values[row]), f"{name} of {caption}"))
        rows.append(join((element("div", *cells, class_="row"), element("p", caption, class_="note"))))
    scale = element("p", "min ", element("span", class_="ramp heat"), " max of each map", class_="note")
    return element("div", *rows, scale, class_="maps", style=f"--columns:{len(maps) + 1}")


# Faithfulness ---------------------------------------------------------------------------------------------------------


def _test_faithfulness(subject: Subject, maps: dict[str, Tensor]) -> Finding:
    images = subject.images[:TESTED]
    order = torch.rand(len(images), *subject.model.config.grid, generator=torch.Generator().manual_seed(0))
    curves = {
        name: measure_deletion(subject.predict, images, values)
        for name, values in (maps | {drawings.RANDOM: order}).items()
    }
    base = curves[drawings.RANDOM]
    gains = {name: compute_gain(curve, base) for name, curve in curves.items() if name != drawings.RANDOM}
    rows = [
        (name, f"{verdict}: {100 * mean:+.1f} ± {100 * margin:.1f}") for name, (verdict, mean, margin) in gains.items()
    ]
    means = {name: curve.mean(0).tolist() for name, curve in curves.items()}
    return Finding(
        "faithfulness",
        "Faithfulness of the maps",
        f"Patches of {len(images)} images are replaced by the image's mean colour, those with the highest map value "
        "first: a faithful map makes the probability of the predicted class fall fast. The table shows how much lower "
        "the mean of the curve is than in random order, in percentage points with a 95 % confidence interval. A map "
        "that is no better than a random order explains nothing.",
        drawings.draw_deletion(FRACTIONS, means),
        {"images": len(images), "fractions": FRACTIONS, "probability": means, "gain": gains},
        table=table(("map", "compared with a random order"), rows),
    )


def measure_deletion(
    predict: Callable[[Tensor], Tensor], images: Tensor, maps: Tensor, fractions: Sequence[float] = FRACTIONS
) -> Tensor:
    """[n, fractions] for maps [n, h, w] of images [n, 3, H, W]; `predict` returns logits."""
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(1).view(-1, 1, *maps.shape[1:]).float()  # [n, 1, h, w]
    rank = torch.nn.functional.interpolate(rank, images.shape[2:])  # nearest: constant within a patch
    mean = images.float().mean((2, 3), keepdim=True).round().to(images.dtype)
    predicted = predict(images).argmax(-1, keepdim=True)
    counts = [round(fraction * order.shape[1]) for fraction in fractions]
    logits = torch.stack([predict(torch.where(rank < count, mean, images)) for count in counts], 1).double()
    return logits.softmax(-1).gather(2, predicted[:, None].expand(-1, len(counts), -1))[..., 0]


def compute_gain(curve: Tensor, base: Tensor) -> tuple[str, float, float]:
    """(verdict, mean, half of its 95 % interval) of the area between two curves [n, fractions]; by Student's t."""
    area = torch.trapezoid(base - curve, torch.tensor(FRACTIONS, dtype=curve.dtype))  # [n]
    low, high = student_interval(area.tolist()) if len(area) > 1 else (-1.0, 1.0)
    return "better" if low > 0 else "worse" if high < 0 else "no better", float(area.mean()), (high - low) / 2
