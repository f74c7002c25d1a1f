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
    supported = {name: (value,) for name, value in PLAIN.items()} | allowed
    if config.posemb != "1d" or not config.prefix:
        del supported["posemb_prefix"]  # it has no effect
    listed: set[str] = set()
    for name, values in supported.items():
        value, part = getattr(config, name), PARTS.get(name, name)
        if PLAIN.get(name) is False:  # only whether the model has the part counts
            value = value not in (None, 0)
        if values is not ANY and value not in values and part not in listed:
            listed.add(part)
            yield part, f"{library} has {name} {' or '.join(map(str, values))}, the model {value}"


def list_unlike_resnet(config: Model, library: str) -> Iterator[tuple[str, str]]:
    """(part, reason) if a library's BiT, or the stem of its hybrids, computes something else."""
    if isinstance(config, ResNetConfig):
        resnet, models, numerics = config, "BiT", RESNET_NUMERICS[library] | {"padding": "symmetric"}
    else:
        resnet, models, numerics = config.stem, "hybrids", STEM_NUMERICS[library] | {"padding": "same"}
    if resnet and any(getattr(resnet, name) != value for name, value in numerics.items()):
        values = ", ".join(f"{name} {value}" for name, value in numerics.items())
        yield "standardize", f"{library}'s {models} have {values}"
