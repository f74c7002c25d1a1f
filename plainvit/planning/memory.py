"""Memory of one training step on one device, by arithmetic: weights, what optimisers keep, activations.

The tests hold it against what PyTorch's optimisers and its backward pass really keep. Letters as in the models:
N tokens, D width, M mlp_dim, H heads, K classes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

from plainvit.config import Model, Optim, ResNetConfig, ViTConfig
from plainvit.planning import cost
from plainvit.planning.devices import Device

GIB = 2**30
MATRICES = ("weight", "down", "up")  # ends of their names
Mode = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on one device: all that its memory and its time follow from."""

    model: Model
    images: int  # on this device
    micro_batch: int = 0  # of them at once; 0: all
    optim: Optim = field(default_factory=Optim)
    number: int = 2  # bytes of a number in products and attention: 2 in bf16, 4 in fp32
    stream: int = 4  # bytes of a number in the residual stream: the weights' fp32 under autocast, or as the products'
    shortcuts: bool = False  # our kernels, and of the last block what the class token needs
    pixel: int = 1  # bytes of a number in the images: uint8, or floats once mixed
    average: bool = False
    recompute: bool = False
    eager: bool = False
    graphs: bool = False  # a step's kernels are started at once
    mode: Mode = "single"
    devices: int = 1

    @property
    def size(self) -> int:
        return min(self.micro_batch or self.images, self.images)

    @property
    def lean(self) -> bool:
        """Whether an MLP's activation is computed again and not kept; of a ReLU what it makes is enough."""
        relu = isinstance(self.model, ViTConfig) and self.model.activation == "relu"
        return self.shortcuts and not self.eager and not relu

    @property
    def parts(self) -> int:
        """Micro-batches."""
        return math.ceil(self.images / self.size)


def memory(step: Step, kept: float = 1.0) -> dict[str, int]:
    """Bytes of one device by purpose, and the greatest sum of them that stands at one time.

    Gradients grow while activations are given back, so of one micro-batch only the larger of the two counts; with
    several, gradients wait while the next one's activations are made.
    """
    count, (trained, matrices) = cost.parameters(step.model), trained_numbers(step.model, step.optim)
    share = step.devices if step.mode == "fsdp" else 1
    found: dict[str, float] = {
        "weights": 4 * count / share,
        "gradients": 4 * trained / share,
        "optimiser": optimiser_bytes(step.optim, trained, matrices) / share,
        "averaged weights": 4 * count / share if step.average else 0,
        "bf16 weights": 2 * count if step.number == 2 else 0,
        "gathered blocks": _gathered(step) if step.mode == "fsdp" else 0,
        "DDP's buckets": 4 * trained if step.mode == "ddp" else 0,
        "images": step.images * step.pixel * step.model.channels * math.prod(step.model.image_size),
        "activations": kept * step.size * stored(step),
        "working": kept * step.size * _working(step),
    }
    late = found["gradients"]
    early = found["activations"] + found["working"] + (late if step.parts > 1 else 0)
    total = sum(found.values()) - late - found["activations"] - found["working"] + max(early, late)
    return {name: round(value) for name, value in (found | {"total": total}).items()}


def checkpoint_bytes(step: Step) -> int:
    """Weights, averaged weights and the optimiser, as fp32: what a run goes on from."""
    count, (trained, matrices) = cost.parameters(step.model), trained_numbers(step.model, step.optim)
    return 4 * count * (2 if step.average else 1) + optimiser_bytes(step.optim, trained, matrices)


def largest_micro_batch(step: Step, device: Device) -> int:
    """Images at once that the device has room for, gradients of earlier ones beside them; 0: not one."""
    one = memory(replace(step, images=max(step.images, 2), micro_batch=1), device.kept)
    each = one["activations"] + one["working"]
    return max(int((device.memory * device.usable * GIB - one["total"] + each) / each), 0)


def optimiser_bytes(optim: Optim, trained: int, matrices: int) -> int:
    """AdamW and LAMB keep two fp32 numbers for each, SGD one, Muon one for the blocks' matrices."""
    match optim.name:
        case "sgd":
            return 4 * trained if optim.momentum else 0
        case "muon":
            return 4 * matrices + 8 * (trained - matrices)
        case _:
            return 8 * trained


def trained_numbers(model: Model, optim: Optim) -> tuple[int, int]:
    """(numbers that training changes, of which in matrices of the blocks)."""
    count, matrices = cost.parameters(model), 0
    if isinstance(model, ViTConfig):
        D, M = model.width, model.mlp_dim
        matrices = layers_of(model) * (4 * D * D + 2 * D * M)
    if optim.frozen or optim.lora:
        return _unfrozen(model, optim)
    return count, matrices


def _unfrozen(model: Model, optim: Optim) -> tuple[int, int]:
    """The same by the names of the built model, which holds no numbers."""
    import torch

    from plainvit.models import build

    with torch.device("meta"):
        named = {name: tuple(p.shape) for name, p in build(model).named_parameters()}
    named = dict(_low_rank(named, optim.lora)) if optim.lora else named
    left = {n: shape for n, shape in named.items() if not any(fnmatchcase(n, pattern) for pattern in optim.frozen)}
    ours = [shape for n, shape in left.items() if "blocks." in n and n.endswith(MATRICES) and len(shape) == 2]
    return sum(map(math.prod, left.values())), sum(map(math.prod, ours))


def _low_rank(named: Mapping[str, tuple[int, ...]], rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What LoRA trains: the head, and a pair of thin matrices for each of the blocks'."""
    for name, shape in named.items():
        if name.startswith("head"):
            yield name, shape
        elif name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2:
            pair = f"{name.removesuffix('weight')}parametrizations.weight.0"
            yield from ((f"{pair}.down", (rank, shape[1])), (f"{pair}.up", (shape[0], rank)))


def layers_of(c: ViTConfig) -> int:
    return c.depth * (2 if c.axial else 1)


def stored(step: Step) -> float:
    """Bytes an image that the forward pass keeps for the backward pass."""
    model = step.model
    if isinstance(model, ResNetConfig):
        stages = _stored_by_stage(model, step)
        borders = step.number * sum(_stage_outputs(model))
        return stages[0] + (borders if step.recompute else sum(stages[1:])) + 8 * model.classes
    stem = sum(_stored_by_stage(model.stem.replace(image_size=model.image_size), step)) if model.stem else 0
    layers = layers_of(model) - (0.7 if step.shortcuts and model.reads_one_token else 0.0)  # keys and values are left
    blocks = layers * (step.stream * model.tokens * model.width if step.recompute else _stored_by_block(step))
    return stem + blocks + _stored_outside(model, step)


def _stored_by_block(step: Step) -> float:
    """Both norms keep their input, the rest what its products need: LN outputs, qkv, heads, fc1 and its activation.

    With shortcuts compiled code computes the activation again (models/vit.py, Mlp).
    """
    c, a = step.model, step.number
    assert isinstance(c, ViTConfig)
    N, D, M, H = c.tokens, c.width, c.mlp_dim, c.heads
    norms = 2 * step.stream * N * D + 2 * 2 * 4 * N  # input; mean and deviation of each token
    products = 6 * a * N * D + (1 if c.activation == "relu" or step.lean else 2) * a * N * M
    attention = 4 * H * N  # logarithms of the softmax's sums
    if c.posemb == "relative":  # its bias, and the weights, which no fused kernel hides then
        attention += 2 * a * H * N * N + a * N * D
    scale = 2 * a * N * D if c.layer_scale is not None else 0
    masks = N * M + 2 * N * D if c.dropout else 0
    return norms + products + attention + scale + masks


def _stored_outside(c: ViTConfig, step: Step) -> float:
    """Patches, the final norm, pooling, and logits beside their targets."""
    (h, w), D, a = c.grid, c.width, step.number
    inputs = (c.stem.width if c.stem else c.channels) * c.patch[0] * c.patch[1]
    norm = 0
    if c.norm == "pre" and not c.norm_pooled:
        norm = step.stream * c.tokens * D + 8 * c.tokens
        norm += 4 * c.tokens * D if a == 4 and c.pool == "token" else 0  # in fp32 the head keeps a view of its output
    pool = a * (2 * h * w * D + 2 * c.mlp_dim + 6 * D) if c.pool == "attention" else 0
    mask = c.tokens * D if c.dropout else 0
    return a * h * w * inputs + norm + pool + mask + a * c.representation + 8 * c.classes


def _stored_by_stage(c: ResNetConfig, step: Step) -> list[float]:
    """Of the root, then of each stage: every output before its norm and after; TensorFlow's padding copies some."""
    sums = [_outputs(c.replace(blocks=c.blocks[:count])) for count in range(len(c.blocks) + 1)]
    each = (2.25 if c.padding == "same" else 2.0) * step.number
    return [each * (now - before) for before, now in zip([0, *sums], sums, strict=False)]


def _outputs(c: ResNetConfig) -> int:
    """Numbers that the convolutions give for an image."""
    return sum(o * cells for _, _, o, cells, _ in cost._convolutions(c))


def _stage_outputs(c: ResNetConfig) -> list[int]:
    """Numbers that go from stage to stage."""
    sides = [[-(-side // (4 * 2**stage)) for side in c.image_size] for stage in range(len(c.blocks))]
    return [256 * c.widen * 2**stage * math.prod(side) for stage, side in enumerate(sides)]


def _working(step: Step) -> float:
    """Bytes an image that the backward pass needs beside the activations: an MLP's gradients, a block run again."""
    model = step.model
    if isinstance(model, ResNetConfig):
        again = max(_stored_by_stage(model, step)[1:], default=0.0) if step.recompute else 0.0
        return 3 * step.number * max(o * cells for _, _, o, cells, _ in cost._convolutions(model)) + again
    hidden = 3 if step.lean else 2  # gradients after and before the activation, and that again
    gradients = hidden * step.number * model.tokens * model.mlp_dim + step.stream * model.tokens * model.width
    return gradients + (_stored_by_block(step) if step.recompute else 0)


def groups(model: Model) -> list[int]:
    """Numbers in each part that FSDP gathers by itself: blocks or stages, and last what is left."""
    count = cost.parameters(model)
    if isinstance(model, ViTConfig):
        parts = [_block_parameters(model)] * layers_of(model)
    else:
        some = [model.replace(blocks=model.blocks[:count], classes=0) for count in range(len(model.blocks) + 1)]
        bare = [cost.parameters(one) for one in some]
        parts = [now - before for before, now in pairwise(bare)]
    return [*parts, count - sum(parts)]


def _block_parameters(c: ViTConfig) -> int:
    (h, w), D, M = c.grid, c.width, c.mlp_dim
    relative = (2 * h * w - 1) * (D // c.heads) if c.posemb == "relative" else 0
    return 4 * D * D + 2 * D * M + 9 * D + M + relative + (2 * D if c.layer_scale is not None else 0)


def _gathered(step: Step) -> int:
    """FSDP: this block and the next in fp32, the rest for the whole step, a block's gradients before and after."""
    *parts, rest = groups(step.model)
    most = max(parts, default=0)
    return 4 * (2 * most + rest) + 8 * most
