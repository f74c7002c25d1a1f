"""Claims 24 and 25: masked patch prediction beats no pre-training but not labels; its returns diminish.

    plainvit study masked --budget cpu
    plainvit study masked-steps --budget cpu

The same model is pre-trained on the same images for the same steps, with labels or by masked prediction, and then
fine-tuned on another dataset with the same settings. Few-shot accuracy is that of the pre-trained weights on the
downstream dataset: 5 images per class, mean of 10 draws, least squares as in the paper (4.1).
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plainvit.analyse.figures import COLOURS, PANEL, new_figure, styled
from plainvit.config import Config, Masked, Optim
from plainvit.data.sources import Source, Subset
from plainvit.data.splits import open_splits
from plainvit.evaluate import frozen, probe
from plainvit.evaluate.features import extract
from plainvit.evaluate.predictor import Predictor
from plainvit.studies.bases import DOWNSTREAM, finetune_config, pretrain_config
from plainvit.studies.drawings import draw_dots, draw_mean
from plainvit.studies.learned import load_model, untrained_config
from plainvit.studies.study import (
    Arm,
    Budget,
    Results,
    Study,
    Verdict,
    best_rate,
    decide_by_signs,
    held_out,
    paired_difference,
    warn_if_rate_at_edge,
)
from plainvit.studies.transfer import rates, scratch_model, set_rate

SHOTS, DRAWS = 5, 10
SUPPORT, EVALUATED = 50, 2000  # images per class to draw shots from; largest number of held-out images
SHORTER = (64, 16, 4, 1)  # divisors of the pre-training steps


# Arms -----------------------------------------------------------------------------------------------------------------


def masked_config(budget: Budget, *, target: str = "colour", ratio: float = 0.5, shorter: int = 1) -> Config:
    """Masked patch prediction instead of labels: the same model, images, crops, optimizer and steps."""
    config = pretrain_config(budget)
    config = config.replace(augment=config.augment.replace(mixup=0.0, cutmix=0.0), ema_window=0.0)
    hidden = Masked(ratio=ratio).replace(target=target)
    return divide_steps(config.replace(objective="masked", masked=hidden), shorter)


def divide_steps(config: Config, by: int) -> Config:
    return config if by == 1 else config.replace(steps=config.steps // by, epochs=config.epochs / by)


def downstream(budget: Budget) -> str:
    """The dataset for fine-tuning."""
    return DOWNSTREAM[budget][0]


def fine_tunings(budget: Budget, upstream: Mapping[str, Config]) -> dict[str, Arm]:
    """Each pre-training, and a fine-tuning under its name that is compared."""
    config = finetune_config(budget, downstream(budget))
    after = {name: Arm(config, x=at, after=f"{name}, before") for at, name in enumerate(upstream)}
    return _upstream_arms(upstream) | after


def rate_arms(budget: Budget, upstream: Mapping[str, Config]) -> dict[str, Arm]:
    """Fine-tunings at several learning rates for each pre-training, as in the paper."""
    data = downstream(budget)
    found, config = _upstream_arms(upstream), finetune_config(budget, data)
    for name in upstream:
        for lr in rates(budget, data):
            found[f"{name} at {lr:.1e}"] = Arm(set_rate(config, lr), after=f"{name}, before")
    return found


def _upstream_arms(upstream: Mapping[str, Config]) -> dict[str, Arm]:
    return {f"{name}, before": Arm(config, counts=False) for name, config in upstream.items()}


def from_scratch(budget: Budget) -> Config:
    """The fine-tuning without pre-training."""
    config = finetune_config(budget, downstream(budget))
    return config.replace(model=scratch_model(budget, config))


def arms(budget: Budget) -> dict[str, Arm]:
    starts = {"masked": masked_config(budget), "supervised": pretrain_config(budget)}
    rated = {lr: set_rate(from_scratch(budget), lr) for lr in rates(budget, downstream(budget))}
    scratch = {f"scratch at {lr:.1e}": Arm(config) for lr, config in rated.items()}
    others = {"pixels": masked_config(budget, target="pixels"), "15 %": masked_config(budget, ratio=0.15)}
    return scratch | rate_arms(budget, starts) | fine_tunings(budget, others)


def step_arms(budget: Budget) -> dict[str, Arm]:
    upstream = {f"{count_steps(budget, by):,} steps": masked_config(budget, shorter=by) for by in SHORTER}
    return {"scratch": Arm(from_scratch(budget))} | fine_tunings(budget, upstream)


def count_steps(budget: Budget, shorter: int) -> int:
    return masked_config(budget, shorter=shorter).steps


# Measurement ----------------------------------------------------------------------------------------------------------


def measure(config: Config, folder: Path) -> dict[str, float]:
    """Top-1 after fine-tuning, and few-shot accuracy of its initial weights."""
    return held_out(config, folder) | {"few_shot": few_shot_before(config.replace(optim=Optim()))}


@cache
def few_shot_before(config: Config) -> float:
    """Cached for all rates: it does not depend on the optimizer."""
    start = config.init or load_model(untrained_config(config), Path())
    return few_shot(config, Predictor(start, precision="fp32", batch=256))


def few_shot(config: Config, predictor: Predictor) -> float:
    """5-shot top-1 on held-out images of the config's dataset; the draws are the same for every model."""
    splits = open_splits(config)
    assert splits.val is not None
    count, labels = len(splits.classes), splits.train.labels
    support = Subset(splits.train, np.sort(probe.draw_shots(labels, count, (SUPPORT,), 0)[SUPPORT]))
    pair = frozen.Pair(_features(predictor, support), _features(predictor, _limit_images(splits.val)), count)
    return frozen.few_shot(pair, frozen.Settings(shots=(SHOTS,), seeds=DRAWS))[str(SHOTS)]["top1"]


def _features(predictor: Predictor, source: Source) -> frozen.Features:
    return extract(predictor, source, quiet=True)


def _limit_images(source: Source) -> Source:
    if len(source) <= EVALUATED:
        return source
    return Subset(source, np.linspace(0, len(source) - 1, EVALUATED).astype(int))


# Rules ----------------------------------------------------------------------------------------------------------------


def best(found: Results, start: str) -> str:
    """The arm with the best mean rate, chosen on the compared images for every start."""
    return best_rate(found, arms_by_rate(found, start))


def arms_by_rate(found: Results, start: str) -> list[str]:
    return [name for name in found.values if name.startswith(f"{start} at ")]


def decide(found: Results) -> Verdict:
    """scratch < masked < supervised, and neither other masking is better in few-shot."""
    starts = ("scratch", "masked", "supervised")
    scratch, masked, supervised = (best(found, start) for start in starts)
    for start in starts:
        warn_if_rate_at_edge(found, best(found, start), arms_by_rate(found, start))
    helps, below = (
        paired_difference(found.of(scratch), found.of(masked)),
        paired_difference(found.of(masked), found.of(supervised)),
    )
    others = {
        name: paired_difference(found.of(name, "few_shot"), found.of(masked, "few_shot")) for name in ("pixels", "15 %")
    }
    why = f"{masked} - {scratch} {helps}, {supervised} - {masked} {below}; few-shot, "
    why += ", ".join(f"masked - {name} {one}" for name, one in others.items())
    verdict = decide_by_signs([helps.sign, below.sign], why)
    if any(one.sign < 0 for one in others.values()):
        return Verdict("not reproduced", why)
    return verdict


def decide_steps(found: Results) -> Verdict:
    """The longest is better than the shortest, and the last factor of four gains less than the first."""
    rows = np.array([found.of(name) for name in lengths(found)])  # [lengths, seeds]
    total, first, last = paired_difference(rows[0], rows[-1]), rows[1] - rows[0], rows[-1] - rows[-2]
    falls = paired_difference(last, first)
    why = (
        f"64 times the steps gain {total}; the first fourfold {100 * first.mean():+.2f}, the last "
        f"{100 * last.mean():+.2f} points: first - last {falls}"
    )
    return decide_by_signs([total.sign, falls.sign], why)


def lengths(found: Results) -> list[str]:
    """Arms from the shortest pre-training."""
    return [name for name in found.values if not name.startswith("scratch")]


# Figures --------------------------------------------------------------------------------------------------------------

PAPER = {"scratch": 77.91, "masked": 79.9, "supervised": 84.15}  # ViT-B/16, fine-tuned ImageNet; labels of JFT


@styled()
def draw(found: Results) -> Figure:
    """Accuracy after fine-tuning, few-shot before it, and the paper's values."""
    figure, axes = new_figure(1, 3, (3.5, 2.7))
    three = {start: best(found, start) for start in PAPER}
    five = {"15 %": "15 %", "pixels": "pixels"} | three  # compared in few-shot only
    for panel, metric, names, title in (
        (axes[0, 0], "top1", three, "fine-tuned, held-out top-1, %"),
        (axes[0, 1], "few_shot", five, "5-shot before fine-tuning, %"),
    ):
        for at, name in enumerate(names.values()):
            draw_mean(panel, at, 100 * np.array(found.of(name, metric)), COLOURS["blue"])
        _set_names(panel, list(names), title)
    for at, value in enumerate(PAPER.values()):
        draw_mean(axes[0, 2], at, [value], COLOURS["orange"])
    _set_names(axes[0, 2], list(PAPER), "paper: ImageNet, ViT-B/16, %")
    return figure


def _set_names(panel: Axes, names: list[str], title: str) -> None:
    panel.set_xticks(range(len(names)), names, fontsize=7.5)
    panel.set(title=title, xlim=(-0.6, len(names) - 0.4))


@styled()
def draw_steps(found: Results) -> Figure:
    """Accuracy after fine-tuning by pre-training steps; dashed: without pre-training."""
    figure, axes = new_figure(1, 1, PANEL)
    panel: Axes = axes[0, 0]
    names = lengths(found)
    steps = [int(name.split()[0].replace(",", "")) for name in names]
    panel.plot(steps, [100 * found.mean(name) for name in names], color=COLOURS["blue"], label="masked prediction")
    for at, name in zip(steps, names, strict=True):
        draw_dots(panel, at, 100 * np.array(found.of(name)), COLOURS["blue"])
    panel.axhline(100 * found.mean("scratch"), color=COLOURS["muted"], linestyle="--", linewidth=1.2, label="scratch")
    panel.set(title="fine-tuned, held-out top-1, %", xlabel="pre-training steps", xscale="log")
    panel.set_xticks(steps, [f"{one:,}" for one in steps])
    panel.minorticks_off()
    panel.legend(loc="best")
    return figure


STUDIES = (
    Study(
        number=24,
        name="masked",
        claim="Masked patch prediction is better than no pre-training, and not as good as pre-training with labels.",
        source="ViT, 4.6 and B.1.2",
        paper="There, ViT-B/16 reaches 79.9 % of ImageNet, 2 points above scratch and 4 below labels; predicting "
        "pixels, or hiding 15 %, is slightly worse in few-shot.",
        rule="after the same fine-tuning, each at the best of its rates, scratch < masked < supervised, each by more "
        "than two standard errors; and in few-shot neither predicting pixels in place of mean colours nor hiding 15 % "
        "in place of 50 % is better by as much",
        arms=arms,
        measure=measure,
        decide=decide,
        draw=draw,
    ),
    Study(
        number=25,
        name="masked-steps",
        claim="The returns of masked patch prediction diminish with its steps.",
        source="ViT, B.1.2",
        paper="There, little is gained downstream after 100,000 of a million steps.",
        rule="of four lengths, each four times the one before, the longest is better after fine-tuning than the "
        "shortest, and the last fourfold gains less than the first, both by more than two standard errors",
        arms=step_arms,
        decide=decide_steps,
        draw=draw_steps,
    ),
)
