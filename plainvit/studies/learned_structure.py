"""Claims 19 to 23: what a trained model has learned, compared with untrained models (Figures 6, 7, 10, 11 and 14).

    plainvit study learned-positions --budget cpu          also learned-filters, attention-distance, hybrid-attention,
                                                           rollout

Untrained models have the initial weights of other seeds. The measurements are those of `plainvit analyse`; attention is
averaged over 128 held-out images, as in the paper. On a GPU, 19 and 21 share runs of 3,000 steps with 12 heads on a
grid of 16 x 16 patches: a coarser grid has hardly any distances to learn. Rollout (23) is measured on `shapes`, where
the mask of every object is known: the fraction of the rollout on the object divided by its fraction of the area. That
model has timm's small initial weights, whose attention is uniform. Google's are larger, so that texture alone attracts
attention before any training.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import avg_pool2d

from plainvit.analyse import attention, embeddings
from plainvit.analyse.drawings import plot_heads
from plainvit.analyse.figures import PANEL, new_figure, styled
from plainvit.config import Augment, Config, Optim, ViTConfig
from plainvit.data.generated import Shapes, shapes
from plainvit.data.splits import open_splits
from plainvit.device import choose_device
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import mean_ranks, rank_correlation
from plainvit.models import ViT
from plainvit.studies.base_configs import base, vit
from plainvit.studies.compute import make_stem
from plainvit.studies.measures import limit_images, load_model, untrained_config
from plainvit.studies.study import Arm, Budget, Results, define
from plainvit.studies.verdict import Criterion, contrast, require_above

IMAGES = 128  # as in the paper
SHUFFLES = 199
OBJECTS = 200


def fine_grid(budget: Budget) -> Config:
    """Small patches and many heads, trained for long."""
    config = base(budget)
    if budget == "cpu":
        return config
    model = vit(config).replace(patch=(2, 2), width=192, mlp_dim=768, heads=12)
    return config.replace(model=model, steps=3000)


def wide_patches(budget: Budget) -> Config:
    """The base; digits at twice the size, since patches of 2 pixels are too small for filters and a ResNet."""
    config = base(budget)
    if budget != "cpu":
        return config
    return config.replace(model=vit(config).replace(image_size=(16, 16), patch=(4, 4)))


# 19: positions --------------------------------------------------------------------------------------------------------


def measure_positions(config: Config, folder: Path) -> dict[str, float]:
    """Structure of position similarity."""
    similar = embeddings.similarity(load_model(config, folder))
    structure = embeddings.structure(similar)
    return {"nearness": structure.nearness, "contrast": structure.contrast, "chance": chance_nearness(similar)}


def chance_nearness(similar: np.ndarray) -> float:
    """The nearness that only 5 % of random permutations of the positions exceed."""
    h, w = similar.shape[:2]
    y, x = np.divmod(np.arange(h * w), w)
    other = ~np.eye(h * w, dtype=bool)
    distance = np.hypot(y[:, None] - y, x[:, None] - x)
    near, alike = np.zeros((2, h * w, h * w))
    near[other] = mean_ranks(-distance[other])
    alike[other] = mean_ranks(similar.reshape(h * w, h * w)[other])
    random = np.random.default_rng(0)
    orders = [random.permutation(h * w) for _ in range(SHUFFLES)]
    values = [np.corrcoef(near[other], alike[np.ix_(order, order)][other])[0, 1] for order in orders]
    return float(np.quantile(values, 0.95))


def position_criteria(results: Results) -> list[Criterion]:
    trained = zip(results.samples("trained", "nearness"), results.samples("trained", "chance"), strict=True)
    excess = contrast([(1.0, [near - chance for near, chance in trained])])
    return [
        require_above("nearness - 95 % quantile of permuted positions", excess),
        results.above("trained", "untrained", metric="nearness"),
        results.contrast("row and column - elsewhere, trained", {"trained": 1.0}, metric="contrast"),
        results.contrast("row and column, trained - untrained", {"trained": 1.0, "untrained": -1.0}, metric="contrast"),
    ]


# 20: filters ----------------------------------------------------------------------------------------------------------


def measure_filters(config: Config, folder: Path) -> dict[str, float]:
    """Effective rank and low-frequency energy of the patch projection."""
    model = load_model(config, folder)
    filters = embeddings.filters(model, count=model.config.width)
    smooth = low_frequency_fraction(filters.tiles)
    return {"rank": effective_rank(filters.variance), "smooth": float(filters.variance @ smooth)}


def effective_rank(variance: np.ndarray) -> float:
    """The exponential of the entropy of the explained variances (Roy and Vetterli, 2007)."""
    p = variance[variance > 0] / variance.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def low_frequency_fraction(tiles: np.ndarray) -> np.ndarray:
    """[n]: fraction of each tile's energy in the lower half of the frequencies along both axes; a quarter for noise.

    By the orthonormal cosine transform, which has no artifacts at the borders of a tile.
    """
    energy = np.einsum("yi,nijc,xj->nyxc", _cosines(tiles.shape[1]), tiles, _cosines(tiles.shape[2])) ** 2
    low = energy[:, : math.ceil(tiles.shape[1] / 2), : math.ceil(tiles.shape[2] / 2)]
    return low.sum((1, 2, 3)) / energy.sum((1, 2, 3))


def _cosines(n: int) -> np.ndarray:
    """DCT-II as an orthogonal matrix [frequencies, positions]."""
    waves = np.cos(np.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5)) * math.sqrt(2 / n)
    waves[0] /= math.sqrt(2)
    return waves


def filter_criteria(results: Results) -> list[Criterion]:
    return [
        results.contrast("effective rank, untrained - trained", {"untrained": 1.0, "trained": -1.0}, metric="rank"),
        results.contrast(
            "low-frequency energy, trained - untrained", {"trained": 1.0, "untrained": -1.0}, metric="smooth"
        ),
    ]


# 21 and 22: attention -------------------------------------------------------------------------------------------------


def measure_attention(config: Config, folder: Path) -> dict[str, float]:
    """Mean attention distance of every head in pixels, and the statistics that the rules use."""
    model = load_model(config, folder).to(choose_device("auto"))
    predictor = Predictor(model, precision="fp32")
    source = open_splits(config).val
    assert source is not None
    chosen = limit_images(source, IMAGES)
    images = predictor.stack(chosen.image(index) for index in range(len(chosen)))
    return summarize_distances(attention.attention_distance(model, images).numpy())


def summarize_distances(distances: np.ndarray) -> dict[str, float]:
    """Statistics of attention distances [layers, heads] in pixels."""
    means, third = distances.mean(1), max(len(distances) // 3, 1)
    numbers = {
        "range": float(np.ptp(distances[0])),  # of the first layer's heads
        "nearest": float(distances[0].min()),
        "range_over_half": float(np.ptp(distances[0]) - distances.max() / 2),  # of the widest head
        "late_over_early": float(means[-third:].mean() - means[:third].mean()),
        "rise": rank_correlation(list(range(len(means))), means.tolist()),
    }
    return numbers | {f"head {layer} {head}": float(distance) for (layer, head), distance in np.ndenumerate(distances)}


def attention_criteria(results: Results) -> list[Criterion]:
    trained = {"trained": 1.0}
    return [
        results.contrast(
            "range of the first layer's heads - half of the widest, px", trained, metric="range_over_half"
        ),
        results.contrast("range, trained - untrained, px", {"trained": 1.0, "untrained": -1.0}, metric="range"),
        results.contrast("last third of the layers - first third, px", trained, metric="late_over_early"),
        results.contrast("rank correlation of distance with depth", trained, limit=0.5, metric="rise"),
    ]


@styled()
def draw_attention(results: Results) -> Figure:
    """A dot for each head of each run by layer, and the mean of each layer (Figures 7 and 11)."""
    figure, axes = new_figure(1, len(results.values), PANEL)
    for panel, arm in zip(axes[0], results.values, strict=True):
        heads = np.array([read_heads(row) for row in results.values[arm]])  # [runs, layers, heads]
        plot_heads(panel, heads, f"{arm}: attention distance, px")
        panel.set(ylim=(0, None))
        panel.legend(loc="lower right")
    return figure


def read_heads(values: dict[str, float]) -> np.ndarray:
    """[layers, heads], in the order of `summarize_distances`."""
    heads = {name: value for name, value in values.items() if name.startswith("head ")}
    layers = 1 + max(int(name.split()[1]) for name in heads)
    return np.array(list(heads.values())).reshape(layers, -1)


def hybrid_arms(budget: Budget) -> dict[str, Arm]:
    """The same Transformer with equally many tokens, from pixels or from a ResNet."""
    config = wide_patches(budget)
    model = vit(config)
    hybrid = model.replace(stem=make_stem((1,)), patch=(1, 1))  # stride 4
    assert hybrid.grid == model.grid
    return {"ViT": Arm(config), "hybrid": Arm(config.replace(model=hybrid))}


# 23: rollout ----------------------------------------------------------------------------------------------------------


def shapes_config(budget: Budget) -> Config:
    """Objects with a radius of 6 to 10 pixels, 8 x 8 patches."""
    model = ViTConfig(
        width=64, depth=4, heads=4, mlp_dim=128, patch=(4, 4), image_size=(32, 32), classes=0, init="timm"
    )
    data, steps, batch = "shapes:size=32,count=2000", 500, 64
    if budget != "cpu":
        model = model.replace(width=128, depth=6, heads=4, mlp_dim=512)
        data, steps, batch = "shapes:size=32,count=10000", 1500, 128
    optim, augment = Optim(lr=1e-3, warmup=0.2, weight_decay=0.05), Augment(crop="none")
    return Config(model=model, data=data, steps=steps, batch=batch, optim=optim, augment=augment, evaluations=1)


def measure_rollout(config: Config, folder: Path) -> dict[str, float]:
    """Mean ratio of rollout and area on the object, over images that are neither training nor test images."""
    model = load_model(config, folder).to(choose_device("auto"))
    source = shapes("val", f"size={model.config.image_size[0]},count={OBJECTS}")
    mass, area, _ = rollout_on_object(model, source, OBJECTS)
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


def rollout_criteria(results: Results) -> list[Criterion]:
    return [
        results.contrast("rollout on the object / its area, trained", {"trained": 1.0}, limit=1.0),
        results.above("trained", "untrained"),
    ]


def with_untrained(make: Callable[[Budget], Config]) -> Callable[[Budget], dict[str, Arm]]:
    """Arms of runs, and of initial weights of other seeds."""

    def arms(budget: Budget) -> dict[str, Arm]:
        config = make(budget)
        return {"trained": Arm(config), "untrained": Arm(untrained_config(config), is_trained=False)}

    return arms


STUDIES = (
    define(
        "learned-positions", with_untrained(fine_grid), position_criteria, measure=measure_positions, metric="nearness"
    ),
    define(
        "learned-filters", with_untrained(wide_patches), filter_criteria, measure=measure_filters, metric="rank", runs=8
    ),
    define(
        "attention-distance",
        with_untrained(fine_grid),
        attention_criteria,
        measure=measure_attention,
        metric="range",
        draw=draw_attention,
    ),
    define(
        "hybrid-attention",
        hybrid_arms,
        lambda results: [results.above("hybrid", "ViT")],
        measure=measure_attention,
        metric="nearest",
        draw=draw_attention,
        runs=8,
    ),
    define("rollout", with_untrained(shapes_config), rollout_criteria, measure=measure_rollout, metric="ratio", runs=8),
)
