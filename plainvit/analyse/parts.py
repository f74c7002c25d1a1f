"""The parts of an analysis: each takes a model and images, and gives figures, numbers and words on how to read them.

What does not apply to a model is a ValueError that says why; `understand` puts it into the page and goes on.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from plainvit.analyse import attention, drawings, embeddings, robust, tokens
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ViT

SHOWN = 6  # images with maps, and in the explorer
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)  # of the patches that are hidden


@dataclass
class Subject:
    """A model, and images as it sees them."""

    predictor: Predictor
    images: Tensor  # [n, 3, H, W] uint8
    names: list[str]
    labels: Tensor | None  # [n], where they are known and are the model's classes
    against: Predictor | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.predictor.model

    @property
    def grid(self) -> tuple[int, int]:
        return self.model.config.grid if isinstance(self.model, ViT) else (14, 14)

    def shown(self) -> Tensor:
        return self.images[:SHOWN]

    def some(self, count: int) -> tuple[Tensor, Tensor]:
        """Images with labels; the model's own answers where there are none."""
        images = self.images[:count]
        labels = self.labels
        return images, robust.logits(self.model, images).argmax(-1) if labels is None else labels[:count]


@dataclass
class Part:
    """One figure or more, with their numbers and a sentence on how to read them."""

    name: str
    title: str
    words: str
    figures: dict[str, Figure]
    numbers: Any
    raster: bool = False


Parts = Iterator[Part]


def filters(subject: Subject) -> Parts:
    """Filters."""
    found = embeddings.filters(subject.model)
    share = 100 * float(found.variance.sum())
    yield Part(
        "filters",
        "Embedding filters",
        f"The principal components of the first layer's {found.tiles.shape[1]} x {found.tiles.shape[2]} kernels, the "
        f"strongest first, with the share of the variance that each explains; together {share:.0f} %. A trained model "
        "shows smooth, wave-like patterns and colours, an untrained one noise.",
        {"": drawings.draw_filters(found)},
        {"variance": found.variance.tolist(), "tiles": found.tiles.round(5).tolist()},
        raster=True,
    )


def positions(subject: Subject) -> Parts:
    """Position similarity:"""
    model = attention.check(subject.model)
    similar = embeddings.similarity(model)
    structure = embeddings.structure(similar)
    figures = {"": drawings.draw_similarity(similar)}
    numbers = {
        "structure": asdict(structure) | {"contrast": structure.contrast},
        "similarity": similar.round(4).tolist(),
    }
    words = ""
    if model.config.posemb != "relative":
        h, w = model.config.grid
        larger = (math.ceil(1.5 * h), math.ceil(1.5 * w))
        resampled = embeddings.similarity(model, grid=larger)
        figures["resampled"] = drawings.draw_similarity(resampled)
        after = embeddings.structure(resampled)
        numbers["resampled"] = {"grid": larger} | asdict(after) | {"contrast": after.contrast}
        words = f" The second figure is the same after resampling to {larger[0]} x {larger[1]} patches."
    yield Part(
        "positions",
        "Position similarity",
        "Each tile belongs to one patch: how alike its position's vector is to that of every other patch. Near patches "
        f"alike: {structure.nearness:+.2f} (1 if the nearer is always the more similar). Same row {structure.row:.2f}, "
        f"same column {structure.column:.2f}, elsewhere {structure.elsewhere:.2f}.{words}",
        figures,
        numbers,
        raster=True,
    )


def heads(subject: Subject) -> Parts:
    """Attention distance:"""
    model = attention.check(subject.model)
    found = attention.heads(model, subject.images)
    numbers = {name: value.tolist() for name, value in vars(found).items()}
    distance, side = found.distance.numpy(), math.hypot(*model.config.image_size)
    yield Part(
        "attention-distance",
        "Attention distance",
        f"How far a head looks, in pixels: the mean distance between a patch and where it attends, over "
        f"{len(subject.images)} images of {model.config.image_size[1]} x {model.config.image_size[0]} pixels (diagonal "
        f"{side:.0f}). Low dots in the first layers are local heads, high ones see the whole image.",
        {"": drawings.draw_heads(distance, "mean attention distance, pixels")},
        numbers,
    )
    largest = math.log(model.config.tokens)
    yield Part(
        "attention-entropy",
        "Attention entropy",
        f"How widely a head spreads its attention: 0 if every patch looks at one token alone, {largest:.2f} nats if it "
        f"looks at all {model.config.tokens} alike. {100 * float(found.outside.mean()):.0f} % of the patches' "
        "attention "
        "goes to tokens that are no patches.",
        {"": drawings.draw_heads(found.entropy.numpy(), "entropy, nats", 1.05 * largest)},
        {"entropy": found.entropy.tolist()},
    )


def maps(subject: Subject) -> Parts:
    """Attention maps:"""
    model, images = attention.check(subject.model), subject.shown()
    looks = attention.looks(model, images)  # [B, L, H, h, w]
    made = {
        "rollout": attention.rollout(model, images),
        "rollout, no residual": attention.rollout(model, images, residual=False),
        "last layer": looks[:, -1].mean(1),
    }
    if model.head is not None:
        made["relevance"] = attention.relevance(model, images)
    pixels = images.permute(0, 2, 3, 1).numpy()
    yield Part(
        "attention-maps",
        "Attention maps",
        "What an answer may rest on, bright where a map is high. Rollout multiplies attention through the layers, with "
        "and without the residual connection; the last layer is what the head reads; relevance weighs attention by the "
        "gradient of the model's first answer. The curves under faithfulness tell which of them to believe.",
        {"": drawings.draw_maps(pixels, {name: one.numpy() for name, one in made.items()}, subject.names[:SHOWN])},
        {name: one.numpy().round(6).tolist() for name, one in made.items()},
        raster=True,
    )
    who = "the class token looks" if model.config.pool == "token" else "the patches look, on average"
    yield Part(
        "every-head",
        "Every head",
        f"Where {who} in each head of each layer, on the first image above.",
        {"": drawings.draw_looks(looks[0].numpy())},
        looks[0].numpy().round(6).tolist(),
        raster=True,
    )
    if model.head is not None:
        yield faithful(subject, made)


def faithful(subject: Subject, made: dict[str, Tensor]) -> Part:
    images = subject.shown()
    grid = next(iter(made.values())).shape[1:]
    random = torch.rand(len(images), *grid, generator=torch.Generator().manual_seed(0))
    found = {
        name: robust.faithfulness(subject.model, images, one) for name, one in (made | {"random order": random}).items()
    }
    base = found["random order"]
    better = [name for name, one in found.items() if one.deletion_area < base.deletion_area and one is not base]
    shares = [100 * share for share in base.shares]
    return Part(
        "faithfulness",
        "Faithfulness of the maps",
        f"Patches are hidden in the order of each map, the most important first, over {len(images)} images: the "
        "faster the "
        "probability of the answer falls (deletion), the truer the map; in the second figure they come back in that "
        "order "
        "(insertion): the faster it rises, the truer. A map no better than a random order explains nothing. "
        + (
            f"Better than random at deletion: {', '.join(better)}."
            if better
            else "None is better than random at deletion."
        ),
        {
            "": drawings.draw_lines(
                shares, {name: one.deletion for name, one in found.items()}, "patches hidden, %", "probability, %"
            ),
            "insertion": drawings.draw_lines(
                shares, {name: one.insertion for name, one in found.items()}, "patches shown, %", "probability, %"
            ),
        },
        {
            name: asdict(one) | {"deletion_area": one.deletion_area, "insertion_area": one.insertion_area}
            for name, one in found.items()
        },
    )


def outlying(subject: Subject) -> Parts:
    """Token norms:"""
    found = tokens.outliers(attention.check(subject.model), subject.images)
    median = float(found.norms.median())
    yield Part(
        "token-norms",
        "Token norms",
        f"The length of each patch's last token. {100 * found.share:.2f} % are longer than {tokens.OUTLYING:g} times "
        "the "
        f"median, in {100 * found.images:.0f} % of the images; the longest has {found.largest:.1f} medians. Such "
        "outliers "
        "are the artefacts that register tokens cure.",
        {
            "": drawings.draw_histogram(
                found.norms.numpy(), "length of the token", tokens.OUTLYING * median, f"{tokens.OUTLYING:g} medians"
            )
        },
        {"share": found.share, "images": found.images, "largest": found.largest, "median": median},
    )


def likeness(subject: Subject) -> Parts:
    """Similarity of layers:"""
    own = tokens.pooled(subject.model, subject.images)
    found = tokens.likeness(own, own).numpy()
    figures = {"": drawings.draw_matrix(found, "layer", "layer", "CKA")}
    numbers = {"own": found.round(4).tolist()}
    words = ""
    if subject.against:
        other = subject.against
        pictures = torch.nn.functional.interpolate(subject.images.float(), other.size, mode="bilinear", antialias=True)
        theirs = tokens.pooled(other.model, pictures.round().to(torch.uint8))
        between = tokens.likeness(own, theirs).numpy()
        figures["against"] = drawings.draw_matrix(between, "layer of this model", f"layer of {other.source}", "CKA")
        numbers["against"] = between.round(4).tolist()
        words = f" The second figure compares with {other.source}."
    yield Part(
        "layer-similarity",
        "Similarity of layers",
        "Linear CKA of the layers' mean tokens: 1 where two layers tell images apart in the same way, 0 where they "
        "have "
        f"nothing in common, over {len(subject.images)} images. Blocks of one colour are layers that do alike.{words}",
        figures,
        numbers,
    )


def removal(subject: Subject) -> Parts:
    """Removal:"""
    model = attention.check(subject.model)
    if model.head is None:
        raise ValueError("the model has no head, so there is no answer to lose")
    images, labels = subject.some(64)
    found = robust.removed(model, images, labels)
    lost = 100 * (found.whole - found.heads).numpy()
    layers = 100 * (found.whole - found.layers).numpy()
    yield Part(
        "removal",
        "What each head is worth",
        f"Points of accuracy that are lost without a head, over {len(images)} images (with all: "
        f"{100 * found.whole:.1f} %). The second figure removes whole layers. Red loses, blue gains.",
        {
            "": drawings.draw_matrix(-lost, "layer", "head", "change of accuracy, points", diverging=True),
            "layers": drawings.draw_matrix(-layers[None], "", "layer", "change, points", diverging=True),
        },
        {"whole": found.whole, "layers": found.layers.tolist(), "heads": found.heads.tolist()},
    )


def robustness(subject: Subject) -> Parts:
    """Hidden patches:"""
    if subject.model.head is None:
        raise ValueError("the model has no head, so there is no answer to lose")
    images, labels = subject.some(128)
    hidden = robust.occluded(subject.model, images, labels, subject.grid, SHARES)
    grids = [one for one in ((1, 1), (2, 2), (4, 4), subject.grid) if all(_divides(images, one))]
    mixed = robust.shuffled(subject.model, images, labels, grids)
    yield Part(
        "hidden-patches",
        "Hidden and shuffled patches",
        f"Accuracy over {len(images)} images when a share of the patches is replaced by the mean colour, at random; "
        "and "
        "in the second figure when the image is cut into a grid and its pieces are put back in a random order.",
        {
            "": drawings.draw_lines([100 * s for s in SHARES], {"hidden": hidden}, "patches hidden, %", "accuracy, %"),
            "shuffled": drawings.draw_lines(
                [a * b for a, b in grids], {"shuffled": mixed}, "pieces that are shuffled", "accuracy, %"
            ),
        },
        {"shares": SHARES, "hidden": hidden, "grids": grids, "shuffled": mixed},
    )


def _divides(images: Tensor, grid: tuple[int, int]) -> tuple[bool, bool]:
    return images.shape[2] % grid[0] == 0, images.shape[3] % grid[1] == 0


def shifts(subject: Subject) -> Parts:
    """Shifts:"""
    images, labels = subject.some(64) if subject.model.head is not None else (subject.images[:64], None)
    patch = subject.model.config.patch[0] if isinstance(subject.model, ViT) and not subject.model.stem else 16
    pixels = sorted({0, *np.unique(np.linspace(1, patch, min(patch, 8)).round().astype(int)).tolist()})
    found = {"this model": robust.shifted(subject.model, images, labels, pixels)}
    if subject.against and subject.against.size == subject.predictor.size:
        found[str(subject.against.source)] = robust.shifted(subject.against.model, images, None, pixels)
    yield Part(
        "shifts",
        "Shifted images",
        f"The image moves down and to the right by 1 to {patch} pixels. The cosine between the features before and "
        "after: a "
        "convolution's features move with the image and stay alike, a ViT cuts new patches until it has moved by a "
        "whole "
        "one. --against MODEL draws another model beside it.",
        {
            "": drawings.draw_lines(
                pixels,
                {name: one.cosine for name, one in found.items()},
                "shift, pixels",
                "cosine of features",
                share=False,
            ),
            "answers": drawings.draw_lines(
                pixels, {name: one.same for name, one in found.items()}, "shift, pixels", "answers that stay, %"
            ),
        },
        {name: asdict(one) for name, one in found.items()},
    )


PARTS: tuple[Callable[[Subject], Parts], ...] = (
    filters,
    positions,
    heads,
    maps,
    outlying,
    likeness,
    removal,
    robustness,
    shifts,
)
