"""torchvision's VisionTransformer, with old and new names of the MLP's layers; the new ones are written."""

from collections.abc import Iterator

from plainvit.config import ViTConfig
from plainvit.weights.files import Tensors
from plainvit.weights.grids import Hints, count_layers, read_grid, read_heads, unsupported_model
from plainvit.weights.layout import LEADING_AXIS, PATCHES, DetectedModel, Layout, entry, linear, list_assumptions
from plainvit.weights.limits import ANY, list_unlike
from plainvit.weights.timm import IMAGENET_MEAN, IMAGENET_STD

BLOCK = "encoder.layers.encoder_layer_{i}."


def vit_layout(*, old: bool = False) -> Layout:
    attention = f"{BLOCK}self_attention."
    return {
        **linear("embedding", "conv_proj.", conversion=PATCHES),
        "class_token": entry("class_token", conversion=LEADING_AXIS),
        "positions.0.table": entry("encoder.pos_embedding", conversion=LEADING_AXIS),
        **linear("blocks.{i}.norm1", f"{BLOCK}ln_1."),
        **linear("blocks.{i}.attention.qkv", attention, kernel="in_proj_weight", bias="in_proj_bias"),
        **linear("blocks.{i}.attention.out", f"{attention}out_proj."),
        **linear("blocks.{i}.norm2", f"{BLOCK}ln_2."),
        **linear("blocks.{i}.mlp.fc1", f"{BLOCK}mlp.{'linear_1' if old else '0'}."),
        **linear("blocks.{i}.mlp.fc2", f"{BLOCK}mlp.{'linear_2' if old else '3'}."),
        **linear("norm", "encoder.ln."),
        **linear("pre_logits", "heads.pre_logits."),
        **linear("head", "heads.head."),
    }


def matches(tensors: Tensors) -> bool:
    return "encoder.pos_embedding" in tensors.shapes and any(name.startswith("conv_proj.") for name in tensors.shapes)


def detect(tensors: Tensors, hints: Hints) -> DetectedModel:
    shapes = tensors.shapes
    if any(name.startswith("conv_proj.conv_bn") for name in shapes):
        raise unsupported_model("a ViT with a convolutional stem", "conv_proj.conv_bn_relu")
    first = BLOCK.format(i=0)
    old = f"{first}mlp.linear_1.weight" in shapes
    fc1 = shapes.get(f"{first}mlp.{'linear_1' if old else '0'}.weight", ())
    if len(shapes.get("conv_proj.weight", ())) != 4 or len(fc1) != 2:
        raise ValueError("this torchvision file has no valid conv_proj or first layer: it is incomplete")
    width, channels, *patch = shapes["conv_proj.weight"]
    size = read_grid(shapes["encoder.pos_embedding"][1], (patch[0], patch[1]), (1,), hints)
    heads, heads_source = read_heads(width, hints, "torchvision")
    config = ViTConfig(
        width=width,
        depth=count_layers(shapes, r"encoder\.layers\.encoder_layer_(\d+)\."),
        heads=heads,
        mlp_dim=fc1[0],
        patch=(patch[0], patch[1]),
        image_size=size.image_size,
        channels=channels,
        classes=shapes.get("heads.head.weight", (0,))[0],
        representation=shapes.get("heads.pre_logits.weight", (0,))[0],
        norm_eps=1e-6,
        activation="gelu",
        mean=IMAGENET_MEAN if channels == 3 else (0.5,),
        std=IMAGENET_STD if channels == 3 else (0.5,),
    )
    sources = {
        "activation": "torchvision's code: exact GELU",
        "norm_eps": "torchvision's code: 1e-6",
        "heads": heads_source,
        "image_size": size.source,
        "mean": "torchvision's transforms",
    }
    # The SWAG weights (384 px and above, and H/14) resize to their own size with bicubic; the others to 256, then crop
    shape = (width, patch[0])
    swag = config.image_size[0] >= 384 or shape == (1280, 14)
    short = 242 if shape == (1024, 16) else 256  # L/16 resizes to 242
    preprocess = {
        "resize": "crop",
        "crop": 1.0 if swag else 224 / short,
        "interpolation": "bicubic" if swag else "bilinear",
    }
    if swag:
        sources["preprocess"] = "assumed: that of torchvision's SWAG weights"
    elif shape in ((768, 16), (1024, 16)):  # the weights do not show which of the two
        other = "SWAG_LINEAR has crop 1.0, bicubic"
        sources["preprocess"] = f"assumed: that of torchvision's IMAGENET1K_V1; {other}"
    else:
        sources["preprocess"] = "assumed: that of torchvision's IMAGENET1K_V1"
    notes = list_assumptions(sources)
    return DetectedModel("torchvision", config, vit_layout(old=old), sources, {"preprocess": preprocess}, notes=notes)


def layout_for(_: ViTConfig) -> Layout:
    return vit_layout()


def list_unsupported(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """(part, reason) for what torchvision's ViT computes differently or does not have."""
    has = {"representation": ANY, "posemb_prefix": ("class", "all"), "activation": ("gelu",), "norm_eps": (1e-6,)}
    yield from list_unlike(config, "torchvision's ViT", **has)
    if config.image_size[0] != config.image_size[1] or config.patch[0] != config.patch[1]:
        yield "image_size", "torchvision's ViT takes square images and patches"
