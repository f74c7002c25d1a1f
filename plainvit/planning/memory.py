"""Memory of one training step on one device: weights, gradients, optimizer state, activations.

The tests compare it with what PyTorch's optimizers and its backward pass keep, and with steps measured on an H200.
Letters as in the models: N tokens, D width, M mlp_dim, H heads.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from plainvit.config import Model, Optim, ResNetConfig, ViTConfig
from plainvit.planning import cost
from plainvit.planning.devices import Device

GIB = 2**30
RESNET_RECOMPUTED = 0.6  # of the activations at the peak, R50 to R200: the outputs of the stages, and all of one stage


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step on one device: everything that its memory and its time depend on."""

    model: Model
    images: int  # on this device
    micro_batch: int = 0  # images of one forward and backward pass; 0: all
    optim: Optim = field(default_factory=Optim)
    element_bytes: int = 2  # of a value in matmuls and attention: 2 in bf16, 4 in fp32
    residual_bytes: int = 4  # of a value in the residual stream
    pixel_bytes: int = 1  # 1 for uint8 images, 4 for mixed ones
    fast_path: bool = False  # models/fast
    has_average: bool = False
    recompute: bool = False
    eager: bool = False
    graphs: bool = False
    fp8: bool = False
    parallel: Literal["single", "ddp", "fsdp"] = "single"
    devices: int = 1

    @property
    def size(self) -> int:
        """Images of a micro-batch."""
        return min(self.micro_batch or self.images, self.images)

    @property
    def micro_batches(self) -> int:
        return math.ceil(self.images / self.size)

    @property
    def shards(self) -> int:
        """Devices that share the weights, gradients and optimizer state."""
        return self.devices if self.parallel == "fsdp" else 1

    @property
    def recomputes_gelu(self) -> bool:
        """Compiled with the fast path, a GELU is computed again in the backward pass and its output is not saved."""
        relu = isinstance(self.model, ViTConfig) and self.model.activation == "relu"
        return self.fast_path and not self.eager and not relu


def memory(step: Step) -> dict[str, int]:
    """Bytes on one device by purpose, and `total`: the most that exists at the same time.

    Gradients grow while activations are freed, so with one micro-batch only the larger of the two counts; with several,
    gradients stay while the activations of the next one are computed.
    """
    count, shards = cost.parameters(step.model), step.shards
    sizes: dict[str, float] = {
        "weights": 4 * count / shards,
        "gradients": 4 * count / shards,
        "optimizer state": optimizer_bytes(step.model, step.optim) / shards,
        "averaged weights": 4 * count / shards if step.has_average else 0,
        "bf16 weights": 2 * count if step.element_bytes == 2 else 0,
        "gathered blocks": _gathered_bytes(step.model) if step.parallel == "fsdp" else 0,
        "DDP buckets": 4 * count if step.parallel == "ddp" else 0,
        "images": step.images * step.pixel_bytes * step.model.channels * math.prod(step.model.image_size),
        "activations": step.size * saved_bytes(step),
        "workspace": step.size * _workspace_bytes(step),
    }
    gradients, activations = sizes["gradients"], sizes["activations"] + sizes["workspace"]
    constant = sum(sizes.values()) - gradients - activations
    peak = activations + gradients if step.micro_batches > 1 else max(activations, gradients)
    return {name: round(value) for name, value in (sizes | {"total": constant + peak}).items()}


def checkpoint_bytes(step: Step) -> int:
    """Weights, averaged weights and optimizer state, in fp32."""
    return 4 * cost.parameters(step.model) * (1 + step.has_average) + optimizer_bytes(step.model, step.optim)


def largest_micro_batch(step: Step, device: Device) -> int:
    """Most images of a micro-batch that fit on the device next to accumulated gradients; 0: not even one."""
    single = memory(replace(step, images=max(step.images, 2), micro_batch=1))
    each = single["activations"] + single["workspace"]
    return max(int((device.usable_bytes - single["total"] + each) / each), 0)


# Weights --------------------------------------------------------------------------------------------------------------


def optimizer_bytes(model: Model, optim: Optim) -> int:
    """AdamW and LAMB keep two fp32 values for each weight, SGD one, Muon one for the matrices of the blocks."""
    count = cost.parameters(model)
    if optim.name == "sgd":
        return 4 * count if optim.momentum else 0
    matrices = 0
    if optim.name == "muon" and isinstance(model, ViTConfig):
        matrices = count_layers(model) * (4 * model.width**2 + 2 * model.width * model.mlp_dim)
    return 8 * count - 4 * matrices


def count_layers(model: ViTConfig) -> int:
    """An axial block has two."""
    return model.depth * (2 if model.axial else 1)


def _gathered_bytes(model: Model) -> int:
    """FSDP: two blocks in fp32, a block's gradients before and after the exchange, everything outside the blocks.

    The last stage of a ResNet has most of its weights, so all of them count as one block.
    """
    count = cost.parameters(model)
    if isinstance(model, ResNetConfig):
        return 16 * count
    one_more = cost.parameters(model.replace(depth=model.depth + 1)) - count
    return 16 * one_more * model.depth // count_layers(model) + 4 * (count - model.depth * one_more)


# Activations ----------------------------------------------------------------------------------------------------------


def saved_bytes(step: Step) -> float:
    """Bytes for each image that the forward pass saves for the backward pass."""
    model = step.model
    if isinstance(model, ResNetConfig):
        return _convolution_bytes(model, step) * (RESNET_RECOMPUTED if step.recompute else 1) + 8 * model.classes
    stem = _convolution_bytes(model.stem.replace(image_size=model.image_size), step) if model.stem else 0
    # Where only the class token is read, the fast path saves 0.3 of the last block: its keys and values
    layers = count_layers(model) - (0.7 if step.fast_path and model.reads_one_token else 0.0)
    block = step.residual_bytes * model.tokens * model.width if step.recompute else _block_bytes(model, step)
    return stem + layers * block + _other_bytes(model, step)


def _block_bytes(model: ViTConfig, step: Step) -> float:
    """Both norms save their input, matmuls theirs: LN outputs, qkv, heads, fc1 and its activation."""
    N, D, M, H, a = model.tokens, model.width, model.mlp_dim, model.heads, step.element_bytes
    norms = 2 * step.residual_bytes * N * D + 2 * 2 * 4 * N  # input; mean and deviation of each token
    saves_one = model.activation == "relu" or step.recomputes_gelu
    matmuls = 6 * a * N * D + (1 if saves_one else 2) * a * N * M
    attention = 4 * H * N  # logarithms of the softmax sums
    if model.posemb == "relative":  # its bias and the attention weights, as no fused kernel is used
        attention += 2 * a * H * N * N + a * N * D
    scale = 2 * a * N * D if model.layer_scale is not None else 0
    dropout_masks = N * M + 2 * N * D if model.dropout else 0
    return norms + matmuls + attention + scale + dropout_masks


def _other_bytes(model: ViTConfig, step: Step) -> float:
    """Patches, the final norm, pooling, logits and targets."""
    (h, w), D, a = model.grid, model.width, step.element_bytes
    patch = (model.stem.width if model.stem else model.channels) * math.prod(model.patch)
    norm = 0
    if model.norm == "pre" and not model.norm_pooled:
        norm = step.residual_bytes * model.tokens * D + 8 * model.tokens
    pool = a * (2 * h * w * D + 2 * model.mlp_dim + 6 * D) if model.pool == "attention" else 0
    return a * h * w * patch + norm + pool + a * model.representation + 8 * model.classes


def _convolution_bytes(model: ResNetConfig, step: Step) -> float:
    """Every output before its norm and after; "same" padding copies some."""
    outputs = sum(channels * cells for _, _, channels, cells, _ in cost.convolutions(model))
    return (2.25 if model.padding == "same" else 2.0) * step.element_bytes * outputs


def _workspace_bytes(step: Step) -> float:
    """Bytes for each image that the backward pass needs next to the activations: gradients, a recomputed block."""
    model = step.model
    if isinstance(model, ResNetConfig):
        outputs = max(channels * cells for _, _, channels, cells, _ in cost.convolutions(model))
        return 3 * step.element_bytes * outputs
    hidden = 3 if step.recomputes_gelu else 2  # gradients after and before the activation; the activation itself
    gradients = hidden * step.element_bytes * model.tokens * model.mlp_dim
    gradients += step.residual_bytes * model.tokens * model.width
    return gradients + (_block_bytes(model, step) if step.recompute else 0)
