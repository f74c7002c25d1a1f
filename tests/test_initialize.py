"""Initial weights: each tensor's distribution, by Kolmogorov-Smirnov tests at fixed seeds.

References: the distributions of the paper's code for `google` (JAX's definitions through scipy.stats), and models that
timm itself initialized for `timm`. A wrong scale of a few per cent shows in all but the smallest tensors.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import peer_models
import pytest
import torch
from scipy import stats
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

import plainvit
from plainvit.models import build
from plainvit.names import configure
from plainvit.weights.layout import to_format
from plainvit.weights.timm import layout_for

D, M, DEPTH = 96, 160, 2
SHAPE: dict[str, Any] = {"width": D, "mlp_dim": M, "depth": DEPTH, "heads": 3, "image_size": (32, 48)}
SURE = 1e-4  # probability of a false alarm per tensor


def follows(x: Tensor, expected: Any) -> bool:
    """Whether all of x lies within the distribution's bounds and looks drawn from it."""
    values = x.detach().double().flatten().numpy()
    low, high = expected.support()
    slack = 1 + 1e-6  # fp32
    inside = values.min() >= low * slack and values.max() <= high * slack
    some = values[:: len(values) // 50_000 + 1]  # enough for the shape: the test sorts them
    return bool(inside and stats.kstest(some, expected.cdf).pvalue > SURE and moments(values, expected))


def moments(values: np.ndarray, expected: Any) -> bool:
    """Mean and standard deviation within five standard errors."""
    n, std = len(values), expected.std()
    kurtosis = expected.stats(moments="k") + 3
    mean_error, std_error = 5 * std / n**0.5, 5 * std * ((kurtosis - 1) / (4 * n)) ** 0.5
    return abs(values.mean() - expected.mean()) < mean_error and abs(values.std() - std) < std_error


def uniform(bound: float) -> Any:
    return stats.uniform(-bound, 2 * bound)


def normal(std: float) -> Any:
    return stats.norm(0, std)


def cut_normal(std: float) -> Any:
    """A normal of that standard deviation before it is cut at two of them."""
    return stats.truncnorm(-2, 2, 0, std)


def lecun(fan_in: int) -> Any:
    """JAX's: cut at two, then widened again to a variance of 1 / fan_in."""
    unit = stats.truncnorm(-2, 2)
    return cut_normal((1 / fan_in) ** 0.5 / unit.std())


# Google ---------------------------------------------------------------------------------------------------------------

EXPECTED: tuple[tuple[str, Callable[[Any, Tensor], Any]], ...] = (  # of a config and a weight; the first match counts
    (r"stem.*norm3\.weight", lambda *_: 0),  # each unit starts as its shortcut
    (r"(.*\.)?norm\w*\.weight|(.*\.)?root_norm\.weight", lambda *_: 1),
    (r"(embedding|pre_logits|stem\..*|body\..*)\.weight", lambda _, weight: lecun(weight[0].numel())),
    (r".*\.(qkv|kv|q|out)\.weight", lambda c, _: uniform((3 / c.width) ** 0.5)),  # qkv and kv as D x D matrices
    (r".*\.fc[12]\.weight", lambda c, _: uniform((6 / (c.width + c.mlp_dim)) ** 0.5)),
    (r".*\.fc[12]\.bias|registers", lambda *_: normal(1e-6)),
    (r".*\.(table|rows|columns)", lambda *_: normal(0.02)),
    (r"pool\.probe", lambda c, _: uniform((6 / (1 + c.width)) ** 0.5)),  # as a 1 x D matrix
    (r"distillation_token", lambda *_: stats.truncnorm(-100, 100, 0, 0.02)),  # as DeiT draws it
    (r".*\.scale", lambda *_: 0.25),
    (r"class_token|head.*|.*\.bias", lambda *_: 0),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pre-training head": {"representation": 160},
    "2d at every layer": {"posemb": "2d", "posemb_at": "every", "width": 960},
    "2d shared": {"posemb": "2d", "posemb_at": "shared", "width": 960},
    "relative": {"posemb": "relative"},
    "attention pool": {"pool": "attention", "width": 960},
    "other papers": {"distillation": True, "registers": 4, "layer_scale": 0.25},
}


def check_google(model: nn.Module) -> None:
    """Every weight follows its distribution, or has its value."""
    for name, weight in model.named_parameters():
        expected = next(make for pattern, make in EXPECTED if re.fullmatch(pattern, name))(model.config, weight)
        if isinstance(expected, int | float):
            assert (weight == expected).all(), name
        else:
            for matrix in weight.split(weight.shape[1]) if "kv." in name else (weight,):
                assert follows(matrix, expected), name


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_google_scheme(settings: dict[str, Any]) -> None:
    check_google(plainvit.create("ViT-Ti/8", seed=0, **SHAPE | {"classes": 50} | settings))


def test_google_scheme_of_a_hybrid() -> None:
    base = configure("R50x1+ViT-B/16")
    torch.manual_seed(0)
    model = build(base.replace(stem=base.stem.replace(blocks=(2, 1)), **SHAPE))
    check_google(model)
    x = torch.rand(1, 256, 6, 6)
    assert torch.equal(model.stem.stages[0][1](x), x)


def test_google_scheme_of_bit() -> None:
    check_google(plainvit.create("BiT-R50x1", blocks=(2, 1), seed=0))


# timm -----------------------------------------------------------------------------------------------------------------

TIMM_SHAPE: dict[str, Any] = {"embed_dim": D, "depth": DEPTH, "num_heads": 3, "mlp_ratio": M / D, "num_classes": 50}


def make_timm(kind: Callable[..., nn.Module] = peer_models.timm_vit, **settings: Any) -> nn.Module:
    return kind(**TIMM_SHAPE | {"img_size": (32, 48)} | settings, drawn=False).float()


def our_vit(name: str = "ViT-Ti/8", **settings: Any) -> nn.Module:
    settings = SHAPE | {"classes": 50, "init": "timm", "seed": 0} | settings
    return plainvit.create(name, **settings)


def our_hybrid() -> nn.Module:
    base = configure("R50x1+ViT-B/16")
    stem = base.stem.replace(blocks=(2, 1))
    return build(base.replace(stem=stem, patch=1, init="timm", **SHAPE | {"classes": 50, "image_size": (32, 64)}))


HYBRID = partial(make_timm, peer_models.timm_hybrid, img_size=(32, 64))
CASES: dict[str, tuple[Any, Any]] = {
    "ViT": (
        partial(make_timm, reg_tokens=20, init_values=0.25),
        lambda: our_vit(registers=20, posemb_prefix="all", layer_scale=0.25),
    ),
    "map": (partial(make_timm, global_pool="map"), lambda: our_vit(pool="attention")),
    "distilled": (
        partial(make_timm, partial(peer_models.timm_vit, VisionTransformerDistilled)),
        lambda: our_vit(distillation=True),
    ),
    "hybrid": (partial(HYBRID, blocks=(2, 1), patch=1), our_hybrid),
    "hybrid of the root alone": (
        partial(HYBRID, blocks=(), patch=8),
        lambda: our_vit("R+ViT-Ti/16", image_size=(32, 64)),
    ),
    "BiT": (
        lambda: peer_models.timm_bit((2, 1), drawn=False).float(),
        lambda: plainvit.create("BiT-R50x1", 7, blocks=(2, 1), init="timm", seed=0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_timm_scheme_has_the_distributions_of_timm(case: str) -> None:
    """Constants are equal, and random tensors look drawn from one distribution."""
    make, ours = CASES[case]
    torch.manual_seed(0)
    theirs, model = make().state_dict(), ours()
    weights = to_format(layout_for(model.config), model.state_dict(), model.config)
    assert weights.keys() == theirs.keys()
    assert [name for name, x in weights.items() if not alike(x, theirs[name])] == []


def alike(ours: Tensor, theirs: Tensor) -> bool:
    if theirs.unique().numel() == 1:
        return torch.equal(ours.unique(), theirs.unique())
    same_scale = abs(ours.std() - theirs.std()) < 6 * theirs.std() * theirs.numel() ** -0.5
    return bool(same_scale) and stats.ks_2samp(ours.flatten().numpy(), theirs.flatten().numpy()).pvalue > SURE
