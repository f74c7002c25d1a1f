"""Time of one training step by a roofline: each part's work over the share of the ceiling that it reaches.

Products and attention are counted in FLOPs, everything between them in bytes, communication by NCCL's own model less
what computing hides. The shares are those of `planning.devices`.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from plainvit.config import ResNetConfig, ViTConfig
from plainvit.planning import cost
from plainvit.planning.devices import Device
from plainvit.planning.memory import Step, groups, layers_of, trained_numbers


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, outer], for one image."""

    rows: int
    inner: int
    outer: int
    times: int = 1
    passes: int = 3  # forward, and backward by input and by weight
    block: bool = False  # made again where blocks are recomputed


def products(c: ViTConfig, shortcuts: bool = False) -> Iterator[Product]:
    """All of a ViT but attention; with shortcuts the last block has keys and values of all tokens, the rest of one."""
    (h, w), D, M, N, layers = c.grid, c.width, c.mlp_dim, c.tokens, layers_of(c)
    inputs = (c.stem.width if c.stem else c.channels) * c.patch[0] * c.patch[1]
    yield Product(h * w, inputs, D, passes=3 if c.stem else 2)  # images need no gradient
    last = shortcuts and c.reads_one_token
    for inner, outer in ((D, 3 * D), (D, D), (D, M), (M, D)):
        yield Product(N, inner, outer, layers - last, block=True)
    if last:
        yield Product(N, D, 2 * D, block=True)
        yield from (Product(1, D, D, 2), Product(1, D, M), Product(1, M, D))
    if c.posemb == "relative":
        yield Product(h * w * c.heads, D // c.heads, 2 * h * w - 1, layers, block=True)
    if c.pool == "attention":
        yield Product(h * w, D, 2 * D)
        yield from (Product(1, D, D, 2), Product(1, D, M), Product(1, M, D))
    if c.representation:
        yield Product(1, D, c.representation)
    yield Product(1, c.representation or D, c.classes)
    if c.distillation:
        yield Product(1, D, c.classes)


def attention_flops(c: ViTConfig, shortcuts: bool = False) -> int:
    """Forward, for an image, on the whole tiles that FlashAttention-2 computes, heads filled up to 32, 64, 96 ...

    Our own kernel has smaller tiles, and no heads to fill.
    """
    (h, w), d = c.grid, c.width // c.heads
    tile, wide = (128, 128 if d <= 64 else 64), _filled(d, 32)  # of queries and of keys, on A100 and H100
    if shortcuts and is_short(c):
        tile, wide = (64, 64), d
    sequences = ((h, w), (w, h)) if c.axial else ((1, c.tokens),)
    cells = sum(count * _filled(length, tile[0]) * _filled(length, tile[1]) for count, length in sequences)
    return (c.depth - (shortcuts and c.reads_one_token)) * c.heads * 4 * cells * wide


def is_short(c: ViTConfig) -> bool:
    """Whether our own attention takes it (models/short_attention.py)."""
    return c.tokens <= 288 and c.width // c.heads in (32, 64, 80) and c.posemb != "relative" and not c.axial


def _filled(length: int, tile: int) -> int:
    return -(-length // tile) * tile


def traffic(step: Step) -> float:
    """Bytes that everything between the products reads and writes for an image, forward and backward, well fused."""
    c, a, r = step.model, step.number, step.stream
    if isinstance(c, ResNetConfig):
        return 0.0  # is in the rate of convolutions
    N, D, M = c.tokens, c.width, c.mlp_dim
    forward = 2 * (2 * r + 2 * a) * N * D + 2 * a * N * M  # residual + norm, twice; GELU
    backward = 2 * (a + 3 * r) * N * D + (4 if step.lean else 3) * a * N * M  # its slope, and GELU again if not kept
    backward += 3 * a * N * D  # a bias' gradient
    backward += 0 if step.shortcuts and is_short(c) else 6 * a * N * D  # q, k and v put together
    if c.posemb == "relative":
        forward, backward = forward + 2 * a * c.heads * N * N, backward + 4 * a * c.heads * N * N
    masks = 2 * (N * M + 2 * N * D) if c.dropout else 0
    pixels = math.prod(c.image_size) * c.channels
    layers = layers_of(c) - (0.75 if step.shortcuts and c.reads_one_token else 0.0)  # the first norm is left
    blocks = layers * (forward * (2 if step.recompute else 1) + backward + masks)
    return blocks + (step.pixel + 2 * a) * pixels + 24 * c.classes


def ideal(step: Step, device: Device) -> dict[str, float]:
    """Seconds of a step's parts, were each at its ceiling."""
    c, rate, copy = step.model, _rate(step, device), device.copy * 1e12
    stem = c if isinstance(c, ResNetConfig) else c.stem.replace(image_size=c.image_size) if c.stem else None
    again = 1 if step.recompute else 0
    passes = 3 + (again if stem is c else 0)  # a hybrid's stem is not made again
    found = {"convolutions": 2 * passes * cost.macs(stem) * step.images / rate if stem else 0.0}
    if isinstance(c, ViTConfig):
        found["products"] = step.parts * sum(_product_seconds(one, step, device) for one in products(c, step.shortcuts))
        attention = attention_flops(c, step.shortcuts)
        found["attention"] = (3.5 + again) * attention * step.images / rate  # backward computes 2.5 times it
    casts = 6 * cost.parameters(c) * step.parts if step.number == 2 else 0  # of the weights, for each micro-batch
    found["pointwise"] = (traffic(step) * step.images + casts) / copy
    found["update"] = _update_bytes(step) / copy + _update_flops(step) / rate
    return found


def _rate(step: Step, device: Device) -> float:
    return (device.matmul if step.number == 2 else device.fp32) * 1e12


def _product_seconds(one: Product, step: Step, device: Device) -> float:
    """Of all its passes for one micro-batch; a thin one is bound by its operands' bytes."""
    rows = one.rows * step.size
    moved = step.number * (rows * one.inner + one.inner * one.outer + rows * one.outer)
    each = max(2 * rows * one.inner * one.outer / _rate(step, device), moved / (device.copy * 1e12))
    return one.times * (one.passes + (one.block and step.recompute)) * each


def _update_bytes(step: Step) -> float:
    """The optimiser reads and writes each number several times, LAMB many; so do clipping and averaging."""
    trained = trained_numbers(step.model, step.optim)[0]
    each = {"adamw": 28, "sgd": 20, "muon": 20, "lamb": 124}[step.optim.name] + 4 + (8 if step.optim.clip else 0)
    average = 12 * cost.parameters(step.model) if step.average else 0
    return (each * trained + average) / (step.devices if step.mode == "fsdp" else 1)


def _update_flops(step: Step) -> float:
    """Muon's five Newton-Schulz steps on each matrix [r, c] with r <= c: 4 r^2 c + 2 r^3 a step."""
    c = step.model
    if step.optim.name != "muon" or not isinstance(c, ViTConfig):
        return 0.0
    shapes = [(c.width, c.width)] * 4 + [(min(c.width, c.mlp_dim), max(c.width, c.mlp_dim))] * 2
    return layers_of(c) * 5 * sum(4 * r * r * n + 2 * r**3 for r, n in shapes)


def seconds(step: Step, device: Device) -> dict[str, float]:
    """Of a step by what takes them: their sum is the step. Communication is what computing does not hide."""
    short = step.shortcuts and isinstance(step.model, ViTConfig) and is_short(step.model)
    share = {
        "products": device.gemm,
        "attention": device.short_attention if short else device.attention,
        "pointwise": device.pointwise * (device.eager if step.eager else 1),
        "convolutions": device.convolution,
        "update": device.update,
    }
    parts = {name: value / share[name] for name, value in ideal(step, device).items()}
    computing = sum(parts.values()) - parts["update"]
    each = device.captured if step.graphs else device.launch
    parts["host"] = max(_launches(step) * each - computing, 0.0)
    parts["communication"] = exposed(step, device, computing + parts["host"]) if step.devices > 1 else 0.0
    return parts


def _launches(step: Step) -> int:
    """Layers times passes: what the host must start, whatever the number of images."""
    c = step.model
    stem = c if isinstance(c, ResNetConfig) else c.stem
    layers = (layers_of(c) if isinstance(c, ViTConfig) else 0) + (2 * sum(stem.blocks) if stem else 0)
    return layers * (4 if step.recompute else 3) * step.parts


# Communication --------------------------------------------------------------------------------------------------------

BUCKET = 25 * 2**20  # of DDP
# Seconds in NCCL's own model (nccl, src/graph/tuning.cc, protocol LL128): of the call; of a hop by NVLink, by network
CALL, RING, TREE = 14e-6, (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)


def exposed(step: Step, device: Device, computing: float) -> float:
    """Seconds that a device waits for others: what does not fit beside the pass that it runs along with."""
    forward, backward = computing / 3, computing * 2 / 3
    if step.mode == "ddp":  # gradients travel with the last micro-batch's backward pass; the last bucket has no cover
        trained = trained_numbers(step.model, step.optim)[0]
        buckets = max(math.ceil(4 * trained / BUCKET), 1)
        each = _all_reduce(4 * trained / buckets, step.devices, device)
        return max(buckets * each - backward / step.parts, each)
    parts = groups(step.model)
    gathers = [_ring(4 * part, step.devices, device) for part in parts]
    scatters = [_ring(4 * part, step.devices, device) for part in parts]
    early = step.parts * sum(gathers)
    late = step.parts * sum(gathers[:-1]) + sum(scatters)  # what is left at the end stays gathered after the forward
    return max(early - forward, gathers[-1]) + max(late - backward, scatters[-1])


def _bus(devices: int, device: Device) -> float:
    """Bytes a second of a ring: between nodes each device of a node has a port, and as many rings use them."""
    slowest = device.inside if devices <= device.per_node else min(device.inside, device.between * device.per_node)
    return slowest * device.network * 1e9


def _ring(size: float, devices: int, device: Device) -> float:
    """An all-gather or reduce-scatter of so many bytes in all: each device sends (n - 1) / n of them on."""
    nodes = math.ceil(devices / device.per_node)
    latency = CALL + (devices - nodes) * RING[0] + (nodes - 1) * RING[1]
    return latency + size * (devices - 1) / devices / _bus(devices, device)


def _all_reduce(size: float, devices: int, device: Device) -> float:
    """By ring, or over many nodes by tree, whose latency grows with their logarithm: 2 (n - 1) / n of the bytes."""
    nodes, inside = math.ceil(devices / device.per_node), min(devices, device.per_node)
    ring = 2 * ((devices - nodes) * RING[0] + (nodes - 1) * RING[1])
    tree = 2 * ((inside - 1) * TREE[0] + math.log2(nodes) * TREE[1])
    return CALL + min(ring, tree) + 2 * size * (devices - 1) / devices / _bus(devices, device)
