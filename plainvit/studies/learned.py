"""Claims 19 to 22: what a trained model has learned, compared with the same model untrained (Figures 7, 10 and 11).

    plainvit study learned-positions --budget cpu
    plainvit study learned-filters --budget cpu
    plainvit study attention-distance --budget cpu
    plainvit study hybrid-attention --budget cpu

On a GPU all studies but the hybrid share one run, the base. The untrained model has the initial weights of the run. The
measurements are those of `plainvit analyse`; attention is averaged over 128 held-out images, as in the paper.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plainvit.analyse import attention, embeddings
from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.config import Config, ResNetConfig
from plainvit.data.splits import open_splits
from plainvit.device import choose_device
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import rank_correlation
from plainvit.models import ViT, build
from plainvit.studies.bases import base, vit
from plainvit.studies.study import Arm, Budget, Difference, Results, Study, Verdict, decide_by_signs, paired_difference
from plainvit.weights import load

IMAGES = 128  # as in the paper
TWIN = {"trained": COLOURS["blue"], "untrained": COLOURS["grey"]}


def wide_patches(budget: Budget) -> Config:
    """The base; digits at twice the size, since patches of 2 pixels are too small for filters and a ResNet."""
    config = base(budget)
    if budget != "cpu":
        return config
    return config.replace(model=vit(config).replace(image_size=(16, 16), patch=(4, 4)))


def trained_and_untrained(config: Config) -> dict[str, Arm]:
    """A run, and its initial weights."""
    return {"trained": Arm(config), "untrained": Arm(untrained_config(config), trained=False)}


def untrained_config(config: Config) -> Config:
    return config.replace(steps=0, epochs=0.0)


def load_model(config: Config, folder: Path) -> ViT:
    """The final weights of a run, or the initial ones if it has no steps."""
    if config.steps or config.epochs:
        return attention.require_vit(load(folder))
    assert config.model
    model = build(config.model).initialise(torch.Generator().manual_seed(config.seed))
    return attention.require_vit(model).eval()


def difference_from(limit: float, values: Sequence[float]) -> Difference:
    """The difference of each seed from a fixed limit."""
    return paired_difference([limit] * len(values), values)


# 19: positions --------------------------------------------------------------------------------------------------------


def measure_positions(config: Config, folder: Path) -> dict[str, float]:
    """Structure of position similarity, and its mean at each offset for the figure."""
    similar = embeddings.similarity(load_model(config, folder))
    found, offsets = embeddings.structure(similar), mean_by_offset(similar)
    numbers = {"nearness": found.nearness, "beside": (found.row + found.column) / 2, "elsewhere": found.elsewhere}
    numbers["contrast"] = found.contrast
    return numbers | {f"offset {y},{x}": float(value) for (y, x), value in np.ndenumerate(offsets)}


def mean_by_offset(similar: np.ndarray) -> np.ndarray:
    """[h, w]: mean similarity of two positions by their distance in rows and columns."""
    h, w = similar.shape[:2]
    y, x = np.divmod(np.arange(h * w), w)
    place = (abs(y[:, None] - y) * w + abs(x[:, None] - x)).ravel()
    return (np.bincount(place, similar.ravel(), h * w) / np.bincount(place, minlength=h * w)).reshape(h, w)


def decide_positions(found: Results) -> Verdict:
    near = {arm: found.of(arm, "nearness") for arm in TWIN}
    beside = paired_difference(found.of("trained", "elsewhere"), found.of("trained", "beside"))
    more = paired_difference(found.of("untrained", "contrast"), found.of("trained", "contrast"))
    trained, not_yet = (
        difference_from(0.5, near["trained"]),
        paired_difference(near["untrained"], [0.5] * len(near["untrained"])),
    )
    why = (
        f"similarity follows nearness by {trained.describe(limit=0.5)} (untrained {0.5 - not_yet.mean:.2f}); same row "
        f"or column {beside.describe()} more similar than others, {more.describe()} more so than untrained"
    )
    return decide_by_signs([one.sign for one in (trained, beside, more, not_yet)], why)


@styled()
def draw_positions(found: Results) -> Figure:
    """Similarity at each offset, trained and untrained."""
    figure, axes = new_figure(1, 2, (3.4, 2.9))
    images = {arm: _offsets(found, arm) for arm in TWIN}
    limit = max(abs(image.ravel()[1:]).max() for image in images.values())  # without itself
    shown = None
    for panel, (arm, image) in zip(axes[0], images.items(), strict=True):
        shown = panel.imshow(image, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none")
        panel.set(title=f"{arm}: nearness {found.mean(arm, 'nearness'):.2f}", xlabel="columns apart")
        panel.set_ylabel("rows apart")
        panel.grid(visible=False)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    assert shown is not None
    figure.colorbar(shown, ax=list(axes[0]), shrink=0.85, label="mean cosine similarity", extend="max")
    return figure


def _offsets(found: Results, arm: str) -> np.ndarray:
    """[h, w], mean over seeds."""
    values = {
        tuple(map(int, name.removeprefix("offset ").split(","))): found.mean(arm, name)
        for name in found.values[arm][0]
        if name.startswith("offset ")
    }
    h, w = (max(place[axis] for place in values) + 1 for axis in (0, 1))
    return np.array([[values[y, x] for x in range(w)] for y in range(h)])


# 20: filters ----------------------------------------------------------------------------------------------------------


def measure_filters(config: Config, folder: Path) -> dict[str, float]:
    """Explained variance and smoothness of the first principal components of the patch projection."""
    model = load_model(config, folder)
    found, count = embeddings.filters(model), count_components(model)
    smooth = low_frequency_share(found.tiles)
    numbers = {
        "share": float(found.variance[:count].sum()),
        "smooth": float(smooth[:count].mean()),
        "count": float(count),
    }
    numbers |= {f"variance {at}": float(value) for at, value in enumerate(found.variance)}
    return numbers | {f"smooth {at}": float(value) for at, value in enumerate(smooth)}


def count_components(model: ViT) -> int:
    """The paper's 28, but at most an eighth of all components: twice the untrained share must be possible."""
    width, inputs = model.embedding.weight.shape
    return max(min(embeddings.TILES, min(width - 1, inputs) // 8), 1)


def low_frequency_share(tiles: np.ndarray) -> np.ndarray:
    """[n]: fraction of each tile's energy in the lower half of the frequencies along both axes; a quarter for noise.

    By the orthonormal cosine transform, which has no artefacts at the borders of a tile.
    """
    found = np.einsum("yi,nijc,xj->nyxc", _cosines(tiles.shape[1]), tiles, _cosines(tiles.shape[2])) ** 2
    low = found[:, : math.ceil(tiles.shape[1] / 2), : math.ceil(tiles.shape[2] / 2)]
    return low.sum((1, 2, 3)) / found.sum((1, 2, 3))


def _cosines(n: int) -> np.ndarray:
    """DCT-II as an orthogonal matrix [frequencies, positions]."""
    waves = np.cos(np.pi / n * np.outer(np.arange(n), np.arange(n) + 0.5)) * math.sqrt(2 / n)
    waves[0] /= math.sqrt(2)
    return waves


def decide_filters(found: Results) -> Verdict:
    share, smooth = {arm: found.mean(arm, "share") for arm in TWIN}, found.of("trained", "smooth")
    twice = paired_difference([2 * one for one in found.of("untrained", "share")], found.of("trained", "share"))
    low = difference_from(0.6, smooth)
    why = (
        f"the first {found.mean('trained', 'count'):.0f} components explain {share['trained']:.1%}, "
        f"{share['trained'] / share['untrained']:.2f} times the untrained {share['untrained']:.1%}; "
        f"{low.describe(limit=0.6)} of their energy is of low frequency "
        f"(untrained {found.mean('untrained', 'smooth'):.2f})"
    )
    return decide_by_signs([twice.sign, low.sign], why)


@styled()
def draw_filters(found: Results) -> Figure:
    """Cumulative explained variance, and smoothness of each component."""
    figure, axes = new_figure(1, 2, PANEL)
    explained, smooth = axes[0]
    for arm, colour in TWIN.items():
        for values in found.values[arm]:
            each = [value for name, value in values.items() if name.startswith("variance ")]
            low = [value for name, value in values.items() if name.startswith("smooth ")]
            at = np.arange(1, len(each) + 1)
            label = arm if values is found.values[arm][0] else None
            explained.plot(at, 100 * np.cumsum(each), color=colour, alpha=0.8, label=label)
            smooth.plot(at, 100 * np.array(low), color=colour, alpha=0.8, label=label)
    count = found.mean("trained", "count")
    explained.axvline(count, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    smooth.axhline(60, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    explained.set(title="cumulative explained variance, %", xlabel="components", ylim=(0, 103))
    smooth.set(title="low-frequency energy, %", xlabel="component", ylim=(0, 103))
    for panel in axes[0]:
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    explained.legend(loc="lower right")
    smooth.legend(loc="upper right")
    return figure


# 21 and 22: attention -------------------------------------------------------------------------------------------------


def measure_attention(config: Config, folder: Path) -> dict[str, float]:
    """Mean attention distance of every head in pixels, and the statistics that the rules use."""
    model = load_model(config, folder).to(choose_device("auto"))
    predictor = Predictor(model, precision="fp32")
    source = open_splits(config).val
    assert source is not None
    places = np.unique(np.linspace(0, len(source) - 1, IMAGES).astype(int))
    images = predictor.stack(source.image(int(place)) for place in places)
    return summarize_distances(attention.measure_heads(model, images).distance.numpy())


def summarize_distances(found: np.ndarray) -> dict[str, float]:
    """Statistics of distances [layers, heads] in pixels."""
    means, third = found.mean(1), max(len(found) // 3, 1)
    numbers = {
        "range": float(np.ptp(found[0])),  # of the first layer's heads
        "nearest": float(found[0].min()),
        "widest": float(found.max()),
        "early": float(means[:third].mean()),
        "late": float(means[-third:].mean()),
        "rise": rank_correlation(list(range(len(means))), means.tolist()),
    }
    return numbers | {f"layer {layer} head {head}": float(one) for (layer, head), one in np.ndenumerate(found)}


def decide_attention(found: Results) -> Verdict:
    half = paired_difference([one / 2 for one in found.of("trained", "widest")], found.of("trained", "range"))
    late = paired_difference(found.of("trained", "early"), found.of("trained", "late"))
    rise = difference_from(0.5, found.of("trained", "rise"))
    learned = paired_difference(found.of("untrained", "range"), found.of("trained", "range"))
    why = (
        f"heads of the first layer range over {found.mean('trained', 'range'):.1f} px, {half.describe(' px')} against "
        f"half of the widest head, {learned.describe(' px')} against untrained; the last third of the layers looks "
        f"{late.describe(' px')} further than the first; distance follows depth by "
        f"{rise.describe(limit=0.5)}"
    )
    return decide_by_signs([one.sign for one in (half, late, rise, learned)], why)


def decide_hybrid(found: Results) -> Verdict:
    further = paired_difference(found.of("ViT", "nearest"), found.of("hybrid", "nearest"))
    why = (
        f"the most local head of the first layer looks {found.mean('hybrid', 'nearest'):.1f} px far in the hybrid, "
        f"{found.mean('ViT', 'nearest'):.1f} px in the ViT: {further.describe(' px')}"
    )
    return decide_by_signs([further.sign], why)


@styled()
def draw_attention(found: Results) -> Figure:
    """A dot for each head of each seed by layer, and the mean of each layer (Figures 7 and 11)."""
    figure, axes = new_figure(1, len(found.values), PANEL)
    top = max(found.mean(arm, "widest") for arm in found.values)
    for panel, arm in zip(axes[0], found.values, strict=True):
        _draw_heads(panel, [_heads(values) for values in found.values[arm]])
        panel.set(title=f"{arm}: attention distance, px", xlabel="layer", ylim=(0, 1.12 * top))
        panel.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    return figure


def _draw_heads(panel: Axes, seeds: Sequence[np.ndarray]) -> None:
    """seeds: [layers, heads] each."""
    layers = np.arange(1, len(seeds[0]) + 1)
    for found in seeds:
        at = np.repeat(layers, found.shape[1])
        panel.scatter(at, found.ravel(), s=16, color=COLOURS["blue"], alpha=0.5, linewidths=0)
    panel.plot(layers, np.mean(seeds, (0, 2)), color=COLOURS["orange"], label="mean of layer")
    panel.legend(loc="lower right")


def _heads(values: dict[str, float]) -> np.ndarray:
    found = {name: value for name, value in values.items() if name.startswith("layer ")}
    layers = 1 + max(int(name.split()[1]) for name in found)
    return np.array(list(found.values())).reshape(layers, -1)


def hybrid_arms(budget: Budget) -> dict[str, Arm]:
    """The same Transformer with equally many tokens, from pixels or from a ResNet."""
    config = wide_patches(budget)
    model, blocks = vit(config), (1,) if budget == "cpu" else (1, 1)  # strides 4 and 8
    stem = ResNetConfig(blocks=blocks, classes=0, preactivation=False, padding="same", standardise="std+1e-5")
    hybrid = model.replace(stem=stem.replace(norm_eps=1e-6), patch=(1, 1))
    assert hybrid.grid == model.grid
    return {"ViT": Arm(config), "hybrid": Arm(config.replace(model=hybrid))}


STUDIES = (
    Study(
        number=19,
        name="learned-positions",
        claim="Learned positions that know nothing of the image's two dimensions come to know them.",
        source="ViT, Figures 7 (centre) and 10",
        paper="There, of ViT-L/32, nearer patches have more similar positions, and those of a row or column stand out.",
        rule="the rank correlation of the cosine of two positions with their nearness is above 0.5, and those of the "
        "same row or column are more similar than others, both by more than two standard errors; in the untrained twin "
        "the correlation is below 0.5, and row and column stand out less, by as much",
        metric="nearness",
        arms=lambda budget: trained_and_untrained(base(budget)),
        measure=measure_positions,
        decide=decide_positions,
        draw=draw_positions,
    ),
    Study(
        number=20,
        name="learned-filters",
        claim="The patch projection learns a basis of few, smooth filters.",
        source="ViT, Figure 7 (left)",
        paper="There, the first 28 components of ViT-L/32 look like plausible basis functions of low dimension.",
        rule="the first 28 principal components, or an eighth of all where that is fewer, explain more than twice the "
        "share that they do untrained, and on average more than 0.6 of their energy is in the lower half of "
        "frequencies along both axes; both by more than two standard errors",
        metric="share",
        arms=lambda budget: trained_and_untrained(wide_patches(budget)),
        measure=measure_filters,
        decide=decide_filters,
        draw=draw_filters,
    ),
    Study(
        number=21,
        name="attention-distance",
        claim="Early layers have both local and global heads, and late layers look far.",
        source="ViT, Figures 7 (right) and 11",
        paper="There, heads of ViT-L/16's first layers look 10 to 120 px far, and nearly all of its last ones far.",
        rule="the distances of the first layer's heads range over more than half of the widest head's, and over more "
        "than those of the untrained twin; the last third of the layers looks further than the first; the rank "
        "correlation of depth with a layer's mean is above 0.5; all by more than two standard errors",
        metric="range",
        arms=lambda budget: trained_and_untrained(base(budget)),
        measure=measure_attention,
        decide=decide_attention,
        draw=draw_attention,
    ),
    Study(
        number=22,
        name="hybrid-attention",
        claim="After a ResNet's layers, the first layer of attention is less local.",
        source="ViT, Figures 7 (right) and 11",
        paper="There, R50x1+ViT-L/16 has no heads as local as those of ViT-L/16's first layers.",
        rule="the most local head of the first layer looks further in the hybrid than in the ViT, by more than two "
        "standard errors",
        metric="nearest",
        arms=hybrid_arms,
        measure=measure_attention,
        decide=decide_hybrid,
        draw=draw_attention,
    ),
)
