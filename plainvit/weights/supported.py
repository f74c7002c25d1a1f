"""What a format supports: the paper's ViT by default, and the values of each setting that a library has besides."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from plainvit.config import RESNET_NUMERICS, STEM_NUMERICS, Model, ResNetConfig, ViTConfig

# Fields that every library has with any value, or that say nothing of what a library computes
FREE = ("width", "depth", "heads", "mlp_dim", "patch", "image_size", "channels", "classes", "class_token")
FREE += ("activation", "norm_eps", "dropout", "stochastic_depth", "rotary_grid", "init", "mean", "std")
# The values of the paper's ViT, which every library has; False for parts that are absent (0 or None)
PLAIN: dict[str, Any] = {field.name: field.default or False for field in fields(ViTConfig) if field.name not in FREE}
# The names of parts in errors and in --drop
PARTS = {"representation": "pre_logits", "norm_pooled": "pool", "posemb_prefix": "posemb", "cosine_head": "head"}
ANY = object()  # every value is supported


def list_unlike(config: ViTConfig, library: str, **allowed: Any) -> Iterator[tuple[str, str]]:
    """(part, reason) for each setting that is not the paper's, nor among the `allowed` values of the library."""
    listed: set[str] = set()
    for name, values in ({name: (value,) for name, value in PLAIN.items()} | allowed).items():
        value, usual = getattr(config, name), PLAIN.get(name)
        value = (value is not None and value != 0) if isinstance(usual, bool) and not isinstance(value, bool) else value
        part = PARTS.get(name, name)
        has_no_effect = name == "posemb_prefix" and (config.posemb != "1d" or not config.prefix)
        if values is ANY or value in values or part in listed or has_no_effect:
            continue
        listed.add(part)
        supported = " or ".join(map(str, values))
        yield part, f"{library} has {name} {supported}, the model {value}"


def list_unlike_resnet(config: Model, library: str) -> Iterator[tuple[str, str]]:
    """(part, reason) if a library's BiT, or the stem of its hybrids, computes something else."""
    is_bit = isinstance(config, ResNetConfig)
    resnet, padding = (config, "symmetric") if is_bit else (config.stem, "same")
    numerics = (RESNET_NUMERICS if is_bit else STEM_NUMERICS)[library] | {"padding": padding}
    if resnet and any(getattr(resnet, name) != value for name, value in numerics.items()):
        values = ", ".join(f"{name} {value}" for name, value in numerics.items())
        yield "standardize", f"{library}'s {'BiT' if is_bit else 'hybrids'} have {values}"
