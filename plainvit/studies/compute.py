"""Accuracy against the compute of training: ViT, ResNet and hybrid, and whether more of it still helps.

    plainvit study compute --budget cpu
    plainvit study hybrids --budget cpu
    plainvit study saturation --budget cpu

ViT (arXiv 2010.11929), Figure 5 and Table 6; claims 10, 11 and 12. Three models of each kind, each of about twice the
multiply-adds of the one before, are trained alike for as many steps: by AdamW at the paper's rate for all, since Muon
is for a Transformer's matrices alone. They are compared on held-out images of the set itself, where the paper averages
over sets that it transfers to: that would double the runs. ResNets keep BiT's root, which divides a side by 4.
"""

import math
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from plainvit.analyse.figures import PANEL, new_figure, styled
from plainvit.config import STEM_NUMERICS, Config, Model, Optim, ResNetConfig
from plainvit.evaluate import paper
from plainvit.planning import cost
from plainvit.planning.datasets import CLASSES
from plainvit.studies.bases import base, vit
from plainvit.studies.drawings import SERIES, draw_line, set_log_ticks
from plainvit.studies.study import FEWEST, Arm, Budget, Results, Study, Verdict, decide_by_signs, paired_difference

KINDS = ("ViT", "ResNet", "hybrid")
COLOURS: dict[str, str] = dict(zip(KINDS, SERIES, strict=False))
STEPS: dict[Budget, int] = {"cpu": 120, "gpu": 2000}
SETS = ("ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers")  # of Table 6: ReaL is ImageNet's images once more


# Runs -----------------------------------------------------------------------------------------------------------------


def short_run(budget: Budget) -> Config:
    """The base by AdamW and in fewer steps, so that many models can be trained."""
    config = base(budget)
    if budget == "gpu":
        config = config.replace(optim=Optim(lr=1e-3, warmup=config.optim.warmup, weight_decay=0.1))
    return config.replace(steps=STEPS[budget])


def models(budget: Budget) -> dict[str, tuple[Model, ...]]:
    """By kind, from the smallest: about the same multiply-adds in each place. A hybrid's stem is the same in all."""
    plain = vit(base(budget))
    if budget == "cpu":  # larger copies of the digits leave a ResNet 3 x 3 cells after its root, a hybrid 4 x 4
        stem = plain.replace(image_size=(16, 16), patch=(1, 1), stem=_stem(()))
        return {
            "ViT": (plain.replace(width=48, mlp_dim=96), plain, plain.replace(depth=6)),
            "ResNet": tuple(resnet(blocks, 12) for blocks in ((1,), (2,), (2, 1))),
            "hybrid": tuple(stem.replace(width=w, depth=d, mlp_dim=2 * w) for w, d in ((32, 2), (64, 2), (64, 5))),
        }
    stem = plain.replace(patch=(1, 1), stem=_stem((1, 1)))
    sizes = {width: {"width": width, "heads": width // 64, "mlp_dim": 4 * width} for width in (128, 192, 256)}
    return {
        "ViT": tuple(plain.replace(depth=depth, **sizes[width]) for width, depth in ((128, 8), (192, 8), (256, 9))),
        "ResNet": tuple(resnet(blocks, 64) for blocks in ((1, 1, 1, 1), (2, 3, 4, 2), (3, 8, 10, 3))),
        "hybrid": tuple(stem.replace(depth=depth, **sizes[width]) for width, depth in ((128, 4), (192, 6), (256, 8))),
    }


def resnet(blocks: tuple[int, ...], side: int) -> ResNetConfig:
    return ResNetConfig(blocks=blocks, image_size=(side, side), classes=0)


def _stem(blocks: tuple[int, ...]) -> ResNetConfig:
    shape = ResNetConfig(blocks=blocks, classes=0, preactivation=False, padding="same")
    return shape.replace(**STEM_NUMERICS["google"])


def arms(budget: Budget, kinds: tuple[str, ...] = KINDS) -> dict[str, Arm]:
    """x is the training compute in exaFLOPs."""
    config, found = short_run(budget), models(budget)
    return {
        f"{kind} {size}": _arm(config.replace(model=model), kind)
        for kind in kinds
        for size, model in zip(("small", "medium", "large"), found[kind], strict=True)
    }


def _arm(config: Config, kind: str) -> Arm:
    return Arm(config, x=cost.training_exaflops(complete_model(config), config.steps * config.batch), group=kind)


def complete_model(config: Config) -> Model:
    """The model with the head for its dataset."""
    assert config.model is not None
    return config.model.replace(classes=config.model.classes or CLASSES.get(config.data, 0))


# Rules ----------------------------------------------------------------------------------------------------------------


def curves(found: Results, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Doublings of compute, and accuracy [seeds, models] along them."""
    names = found.group(kind)
    return np.log2([found.arms[name].x for name in names]), np.array([found.of(name) for name in names]).T


def slopes(found: Results, kind: str) -> list[float]:
    """Gain per doubling of compute for each seed, by least squares."""
    places, rows = curves(found, kind)
    return [float(np.polyfit(places, row, 1)[0]) for row in rows]


def lead_over_vit(found: Results, kind: str) -> np.ndarray:
    """[seeds, models]: how far each model is above a ViT of the same compute, between two of the ViTs where need be."""
    (at, ours), (known, vits) = curves(found, kind), curves(found, "ViT")
    return ours - np.array([np.interp(at, known, row) for row in vits])


def decide_slopes(found: Results) -> Verdict:
    """A doubling of compute brings a ViT more than a ResNet."""
    steep = {kind: slopes(found, kind) for kind in ("ResNet", "ViT")}
    difference = paired_difference(steep["ResNet"], steep["ViT"])
    rates = " and ".join(f"{kind} {100 * np.mean(steep[kind]):+.2f}" for kind in ("ViT", "ResNet"))
    level = -100 * lead_over_vit(found, "ResNet").mean()
    why = f"a doubling of compute brings {rates} points, a difference of {difference}; "
    return decide_by_signs(
        [difference.sign], why + f"at equal compute ViT is {abs(level):.2f} {'above' if level > 0 else 'below'}"
    )


def decide_hybrids(found: Results) -> Verdict:
    """A hybrid beats a ViT of the same compute where both are small, and by less where both are large."""
    difference = lead_over_vit(found, "hybrid")
    zero = [0.0] * len(difference)
    small, large = (
        paired_difference(zero, difference[:, 0].tolist()),
        paired_difference(zero, difference[:, -1].tolist()),
    )
    fall = paired_difference(difference[:, -1].tolist(), difference[:, 0].tolist())
    why = f"hybrid - ViT: the smallest {small}, the largest {large}; the former is larger by {fall}"
    return decide_by_signs([small.sign, fall.sign], why)


def decide_saturation(found: Results) -> Verdict:
    """The last step up in compute still brings more than one standard error."""
    *_, before, last = found.group("ViT")
    gain = paired_difference(found.of(before), found.of(last))
    times = found.arms[last].x / found.arms[before].x
    why = f"the last {times:.1f} times of compute bring {gain}"
    if gain.seeds < FEWEST or abs(gain.mean) <= gain.error:
        return Verdict("not decided", why)
    return Verdict("reproduced" if gain.mean > 0 else "not reproduced", why)


# Figures --------------------------------------------------------------------------------------------------------------


def table6(kind: str) -> list[tuple[float, float]]:
    """The paper's points of a kind: exaFLOPs, mean accuracy over five sets."""
    table, begins = paper.table(6), {"ViT": "ViT", "ResNet": "BiT", "hybrid": "R50x1+"}
    rows = [dict(zip(table.columns, cells, strict=True)) for name, cells in table.rows if name.startswith(begins[kind])]
    return sorted((row["exaFLOPs"], sum(row[name] for name in SETS) / len(SETS)) for row in rows)


@styled()
def draw(found: Results) -> Figure:
    """Our results next to Table 6, by compute on a logarithmic axis."""
    figure, axes = new_figure(1, 2, PANEL)
    kinds = list(dict.fromkeys(arm.group for arm in found.arms.values()))
    thousands, unit = flops_unit(max(arm.x for arm in found.arms.values()))
    for kind in kinds:
        draw_line(axes[0, 0], found, found.group(kind), COLOURS[kind], kind, 1000.0**thousands)
        axes[0, 1].plot(*zip(*table6(kind), strict=True), marker="o", markersize=4, color=COLOURS[kind], label=kind)
    axes[0, 0].set(title="plainvit, held-out top-1, %", xlabel=f"training compute, {unit}")
    axes[0, 1].set(title="paper, mean of five sets, %", xlabel="pre-training compute, exaFLOPs")
    set_log_ticks(axes[0, 0], [1000.0**thousands * found.arms[arm].x for arm in found.group("ViT")])
    set_log_ticks(axes[0, 1], [50, 200, 1000, 4000])
    for panel in axes[0]:
        panel.legend()
    return figure


def flops_unit(exaflops: float) -> tuple[int, str]:
    """(power of 1000 to multiply exaFLOPs by, name of the unit) for readable numbers."""
    names = ("exaFLOPs", "petaFLOPs", "teraFLOPs", "gigaFLOPs", "megaFLOPs")
    at = min(max(math.ceil(-math.log10(exaflops) / 3), 0), len(names) - 1)
    return at, names[at]


COMPUTE = Study(
    number=10,
    name="compute",
    claim="A ViT makes more of compute than a ResNet where data suffice.",
    source="ViT, Figure 5 and Table 6",
    paper="There, on JFT-300M, a ViT takes 2 to 4 times less compute than a ResNet of the same accuracy: 94 % for 224 "
    "exaFLOPs (B/16) and 563 (R152x2). It is not expected to hold below some ten million images.",
    rule="a doubling of training compute brings ViTs more held-out accuracy than ResNets, by more than two standard "
    "errors (least squares through three models of each kind, paired by seed)",
    arms=arms,
    decide=decide_slopes,
    draw=draw,
)

HYBRIDS = Study(
    number=11,
    name="hybrids",
    claim="A hybrid beats a ViT of the same compute where both are small, and by less where both are large.",
    source="ViT, Figure 5 and Table 6",
    paper="There, R50+B/32 reaches 94.3 % for 106 exaFLOPs, as ViT-L/32 does for 196; for 1,600 both reach 95.4 %.",
    rule="the smallest hybrid beats a ViT of the same compute by more than two standard errors, and the lead of the "
    "largest is smaller than this, again by more than two standard errors",
    arms=partial(arms, kinds=("ViT", "hybrid")),
    decide=decide_hybrids,
    draw=draw,
)

SATURATION = Study(
    number=12,
    name="saturation",
    claim="ViTs do not saturate: more compute still helps at the end of the range.",
    source="ViT, section 4.4 and Figure 5",
    paper="There, from L/16 (1,567 exaFLOPs) to H/14 (4,262) the mean of five sets still rises from 95.4 to 95.8 %.",
    rule="the largest ViT beats the one of half its compute by more than one standard error; not reproduced where it "
    "falls behind by as much",
    arms=partial(arms, kinds=("ViT",)),
    decide=decide_saturation,
    draw=draw,
)

STUDIES = (COMPUTE, HYBRIDS, SATURATION)
