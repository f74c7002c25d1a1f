"""torchvision's VisionTransformer, with old and new names of the MLP's layers; the new ones are written."""

from collections.abc import Iterator

from plainvit.config import VIT_NUMERICS, Preprocess, ViTConfig
from plainvit.weights.files import Tensors
from plainvit.weights.layout import DetectedModel, Layout, make_layout
from plainvit.weights.pixels import HALF, IMAGENET
from plainvit.weights.shapes import Hints, check_names, read_vit
from plainvit.weights.supported import ANY, list_unlike


def matches(tensors: Tensors) -> bool:
    return "encoder.pos_embedding" in tensors.shapes and any(name.startswith("conv_proj.") for name in tensors.shapes)


def detect(tensors: Tensors, hints: Hints) -> DetectedModel:
    check_names(tensors.shapes, {r"^conv_proj\.conv_bn": "a ViT with a convolutional stem"})
    layout = make_layout("torchvision", tensors.shapes)
    settings, sources = read_vit(layout, tensors.shapes, "torchvision", hints)
    config = ViTConfig(**settings | VIT_NUMERICS["torchvision"] | (IMAGENET if settings["channels"] == 3 else HALF))
    preprocess, sources["preprocess"] = _assume_preprocess(config)
    sources |= {
        "activation": "torchvision's code: exact GELU",
        "norm_eps": "torchvision's code: 1e-6",
        "mean": "torchvision's transforms",
    }
    return DetectedModel("torchvision", config, layout, sources, preprocess)


def _assume_preprocess(config: ViTConfig) -> tuple[Preprocess, str]:
    """(preprocessing, source): the SWAG weights (384 px and above, and H/14) resize to their own size with bicubic.

    The others resize to 256 pixels (L/16 to 242), then crop.
    """
    shape = (config.width, config.patch[0])
    if config.image_size[0] >= 384 or shape == (1280, 14):
        return Preprocess(resize="crop", interpolation="bicubic"), "assumed: that of torchvision's SWAG weights"
    # The weights do not show which of the two
    other = "; SWAG_LINEAR has crop 1.0, bicubic" if shape in ((768, 16), (1024, 16)) else ""
    crop = 224 / (242 if shape == (1024, 16) else 256)
    source = f"assumed: that of torchvision's IMAGENET1K_V1{other}"
    return Preprocess(resize="crop", crop=crop), source


def layout_for(_: ViTConfig) -> Layout:
    return make_layout("torchvision")


def list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what torchvision's ViT computes differently or does not have."""
    has = {"representation": ANY, "posemb_prefix": ("class", "all"), "activation": ("gelu",), "norm_eps": (1e-6,)}
    yield from list_unlike(config, "torchvision's ViT", **has)
    if config.image_size[0] != config.image_size[1] or config.patch[0] != config.patch[1]:
        yield "image_size", "torchvision's ViT takes square images and patches"
