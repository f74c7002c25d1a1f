"""Cost of a model, computed from its config: parameters, multiply-adds, training FLOPs.

    plainvit models

The tests compare these counts with the parameters of the built model and with PyTorch's FLOP counter.
"""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from plainvit.config import Model, ResNetConfig, ViTConfig, pair
from plainvit.names import configure

SMALL_STEP = 1e14  # FLOPs


def parameters(config: Model) -> int:
    """Trainable values of the model."""
    return _vit_parameters(config) if isinstance(config, ViTConfig) else _resnet_parameters(config)


def macs(config: Model) -> int:
    """Multiply-adds of one image's forward pass in matmuls, convolutions and attention."""
    return _vit_macs(config) if isinstance(config, ViTConfig) else _resnet_macs(config)


def is_small(config: Model, images: int) -> bool:
    """Whether a training step is short enough for kernel launches to matter, so that CUDA graphs are worth it.

    An H200 needs at most 200 ms for such a step, of which launches cost 2 to 3 (L/16, batch 256).
    """
    return 6 * macs(config) * images < SMALL_STEP


def training_exaflops(config: Model, images: float) -> float:
    """Compute to train on that many images: 2 FLOPs per multiply-add, a backward pass of twice the forward pass."""
    return 3 * 2 * macs(config) * images / 1e18


def summary(name: str, image_size: int = 224) -> dict[str, Any]:
    """One row of `plainvit models`."""
    config = configure(name)
    stride = config.stride[0] if isinstance(config, ViTConfig) else 1
    if image_size % stride:  # one model that does not fit is a row of the table, not an error
        return {"name": name, "image_size": image_size, "does_not_fit": f"{image_size} px is not divisible by {stride}"}
    config = config.replace(image_size=pair(image_size))
    count = parameters(config)
    return {
        "name": name,
        "image_size": image_size,
        "tokens": config.tokens if isinstance(config, ViTConfig) else None,
        "parameters": count,
        "gmacs": macs(config) / 1e9,
        "weights_mib": count * 4 / 2**20,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `summary` as a table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("model", style="cyan", no_wrap=True)
    for title in ("tokens", "parameters", f"GMACs at {rows[0]['image_size']}", "fp32 weights"):
        shown.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        if "does_not_fit" in row:
            shown.add_row(row["name"], "-", "-", "does not fit", style="dim")
            continue
        cells = f"{row['parameters']:,}", f"{row['gmacs']:.2f}", f"{row['weights_mib']:,.0f} MiB"
        shown.add_row(row["name"], str(row["tokens"] or ""), *cells)
    return shown


def _vit_parameters(c: ViTConfig) -> int:
    (h, w), D = c.grid, c.width
    layers = c.depth * (2 if c.axial else 1)
    norm = _norm_parameters(c, D)
    table = {"1d": (c.prefix_rows + h * w) * D, "2d": (h + w) * D // 2}.get(c.posemb, 0)
    pool = D + 4 * D * D + 4 * D + 2 * D + 2 * D * c.mlp_dim + c.mlp_dim + D if c.pool == "attention" else 0
    return sum(
        (
            _resnet_parameters(c.stem) if c.stem else 0,
            _patch_size(c) * D + (D if c.embedding_bias else 0),
            norm if c.norm_embedding != "none" else 0,
            c.prefix * D,
            table * (layers if c.posemb_at == "every" else 1),
            layers * _block_parameters(c),
            norm if c.norm == "pre" and c.norm_final else 0,
            pool,
            D * c.representation + c.representation + D * c.projection,
            c.feature_width * c.classes + c.classes,
            D * c.classes + c.classes if c.distillation else 0,
        )
    )


def _block_parameters(c: ViTConfig) -> int:
    """Norms, attention with its positions, MLP and LayerScale of one block."""
    (h, w), D, M, d = c.grid, c.width, c.mlp_dim, c.width // c.heads
    hidden = 2 * M if c.gated else M
    biases = {"all": 4 * D + hidden + D, "no_k": 3 * D + hidden + D, "no_qkv": D + hidden + D, "none": 0}[c.block_bias]
    norms = 2 * _norm_parameters(c, D) + (2 * _norm_parameters(c, d) if c.qk_norm else 0)
    norms += {"none": 0, "mlp": _norm_parameters(c, M), "both": _norm_parameters(c, M + D)}[c.norm_inner]
    offsets = {"relative": (2 * h * w - 1) * d, "bias": ((2 * h - 1) * (2 * w - 1) + 3) * c.heads}.get(c.posemb, 0)
    scale = 2 * D if c.layer_scale is not None else 0
    return 4 * D * D + D * (hidden + M) + biases + norms + offsets + scale


def _norm_parameters(c: ViTConfig, width: int) -> int:
    return width if c.norm_kind == "rms" else 2 * width


def _vit_macs(c: ViTConfig) -> int:
    (h, w), D, M, N = c.grid, c.width, c.mlp_dim, c.tokens
    linear = N * (4 * D * D + (3 if c.gated else 2) * D * M)
    relative = h * w * (2 * h * w - 1) * D if c.posemb == "relative" else 0
    blocks = c.depth * (linear + 2 * N * N * D + relative)
    if c.axial:  # a row block and a column block in place of one
        blocks = c.depth * (2 * linear + 2 * N * (h + w) * D)
    pool = h * w * 2 * D * D + 2 * h * w * D + 2 * D * D + 2 * D * M if c.pool == "attention" else 0
    head = c.feature_width * c.classes + (D * c.classes if c.distillation else 0) + D * c.projection
    stem = _resnet_macs(c.stem.replace(image_size=c.image_size)) if c.stem else 0
    return stem + h * w * _patch_size(c) * D + blocks + pool + D * c.representation + head


def _patch_size(c: ViTConfig) -> int:
    return (c.stem.width if c.stem else c.channels) * c.patch[0] * c.patch[1]


def convolutions(c: ResNetConfig) -> Iterator[tuple[int, int, int, int, bool]]:
    """(kernel, channels in, channels out, output cells, whether a norm of c_out follows) of every convolution."""
    h, w = (-(-side // 2) for side in c.image_size)
    post = not c.preactivation
    yield 7, c.channels, 64 * c.widen, h * w, post
    h, w, c_in = -(-h // 2), -(-w // 2), 64 * c.widen
    for stage, count in enumerate(c.blocks):
        c_out = 256 * c.widen * 2**stage
        for unit in range(count):
            before = h * w
            if stage and not unit:
                h, w = -(-h // 2), -(-w // 2)
            yield 1, c_in, c_out // 4, before, True
            yield 3, c_out // 4, c_out // 4, h * w, True
            yield 1, c_out // 4, c_out, h * w, post
            if not unit:
                yield 1, c_in, c_out, h * w, post
            c_in = c_out


def _resnet_parameters(c: ResNetConfig) -> int:
    weights = sum(k * k * i * o + (2 * o if norm else 0) for k, i, o, _, norm in convolutions(c))
    # Pre-activation: each unit's first norm has the unit's input channels, and one norm follows the last stage
    inputs = [64 * c.widen] + [256 * c.widen * 2**stage for stage, count in enumerate(c.blocks) for _ in range(count)]
    norms = 2 * sum(inputs) if c.preactivation else 0
    return weights + norms + (c.width * c.classes + c.classes)


def _resnet_macs(c: ResNetConfig) -> int:
    return sum(k * k * i * o * cells for k, i, o, cells, _ in convolutions(c)) + c.width * c.classes
