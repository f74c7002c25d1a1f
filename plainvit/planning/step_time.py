"""Seconds of one training step, from steps measured on one H200 (docs/results.md, "Planned and measured steps").

    step = matmuls / rate(width) + attention / rate + update of the weights

The rate of matmuls, everything between them included, grows with the model's width and is interpolated between the
measured models. A small step takes at least the time that the host needs to launch its kernels. Several devices add
the communication that computation does not hide: bytes / bandwidth.
"""

import numpy as np

from plainvit.config import ResNetConfig, ViTConfig
from plainvit.planning import cost
from plainvit.planning.devices import H200, Device
from plainvit.planning.memory import Step, count_layers

# Width: FLOP/s of the matmuls in steps of Ti/16, S/16, B/16, L/16 and H/14 on one H200 (224 px, bf16, compiled, AdamW,
# fast path), after subtracting the time of attention and update
MATMUL_RATES = {192: 234.1e12, 384: 386.9e12, 768: 494.4e12, 1024: 583.1e12, 1280: 563.46e12}
ATTENTION_RATE = 111e12  # FLOP/s; 106 to 117 in profiled steps of these five models
UPDATE = 9.3e-12  # seconds for each trained weight: AdamW takes 0.8 ms for B/16, 5.8 ms for H/14
WEIGHT_OVERHEAD = 10e-12  # seconds for each weight and micro-batch: bf16 copies, gradients; from batches of 32 to 256
LAUNCH, GRAPH_LAUNCH = 0.8e-3, 0.5e-3  # seconds of the host for each layer of a step; with CUDA graphs
# Measured factors of the rate: B/16, L/16, H/14 without the fast path; timm's B/16 not compiled; L/16, H/14 in fp8
NO_FAST_PATH, EAGER, FP8 = 0.85, 0.78, 1.09
CONVOLUTION_RATE = 77e12  # FLOP/s; assumed, not measured
FP32_EFFICIENCY = 0.8  # of the fp32 peak; assumed, not measured


def step_seconds(step: Step, device: Device) -> dict[str, float]:
    """Seconds of a step by part; `host` and `communication` are what computation does not hide."""
    matmuls, attention, convolutions = (6 * macs * step.images for macs in executed_macs(step))
    rate, passes = matmul_rate(step.model.width), 4 / 3 if step.recompute else 1
    factor = (1 if step.fast_path else NO_FAST_PATH) * (EAGER if step.eager else 1) * (FP8 if step.fp8 else 1)
    slowdown = passes * device.slowdown / factor
    if step.element_bytes == 4:
        slowdown = passes * rate / (FP32_EFFICIENCY * device.fp32_tflops * 1e12)
    parts = {
        "matmuls": slowdown * matmuls / rate,
        "attention": slowdown * attention / ATTENTION_RATE,
        "convolutions": slowdown * convolutions / CONVOLUTION_RATE,
        "update": update_seconds(step) * H200.bandwidth / device.bandwidth,
    }
    computation = sum(parts.values())
    launches = passes * _count_launches(step) * (GRAPH_LAUNCH if step.graphs else LAUNCH)
    parts["host"] = max(launches - computation, 0.0)
    parts["communication"] = exposed_communication(step, device, computation) if step.devices > 1 else 0.0
    return parts


def executed_macs(step: Step) -> tuple[float, float, float]:
    """Forward multiply-adds of one image in matmuls, attention and convolutions.

    Where only the class token is read, the fast path computes the last block for that token; the keys and values, a
    sixth of the block's matmuls, are still computed for all.
    """
    model = step.model
    if isinstance(model, ResNetConfig):
        return 0.0, 0.0, float(cost.macs(model))
    stem = cost.macs(model.stem.replace(image_size=model.image_size)) if model.stem else 0
    attention = 2.0 * model.tokens * (sum(model.grid) if model.axial else model.tokens) * model.width * model.depth
    matmuls = cost.macs(model) - stem - attention
    if step.fast_path and model.reads_one_token:
        block = model.tokens * (4 * model.width**2 + 2 * model.width * model.mlp_dim)
        matmuls, attention = matmuls - block * 5 / 6, attention * (1 - 1 / model.depth)
    return matmuls, attention, float(stem)


def matmul_rate(width: int) -> float:
    """FLOP/s of an H200, interpolated over log(width); below the measured widths it falls in proportion."""
    rate = np.interp(np.log(width), np.log(list(MATMUL_RATES)), list(MATMUL_RATES.values()))
    return float(rate) * min(width / min(MATMUL_RATES), 1)


def update_seconds(step: Step) -> float:
    """The optimizer on an H200, and what each micro-batch does once for each weight."""
    model, weights = step.model, cost.parameters(step.model)
    seconds = UPDATE * weights / step.shards + WEIGHT_OVERHEAD * weights * step.micro_batches
    if step.optim.name == "muon" and isinstance(model, ViTConfig):  # five Newton-Schulz iterations for each matrix
        flops = 5 * count_layers(model) * (28 * model.width**3 + 8 * model.width**2 * model.mlp_dim)
        seconds += flops / matmul_rate(model.width)
    return seconds


def _count_launches(step: Step) -> int:
    """Layers of all micro-batches; a unit of a ResNet counts as two."""
    model = step.model
    stem = model if isinstance(model, ResNetConfig) else model.stem
    layers = (count_layers(model) if isinstance(model, ViTConfig) else 0) + (2 * sum(stem.blocks) if stem else 0)
    return layers * step.micro_batches


def exposed_communication(step: Step, device: Device, computation: float) -> float:
    """Seconds spent waiting for other devices.

    DDP reduces the fp32 gradients during the backward pass of the last micro-batch. FSDP gathers the weights for both
    passes of each micro-batch and scatters the gradients, next to all of the computation.
    """
    copies, hidden = 2 * step.micro_batches + 1, computation
    if step.parallel == "ddp":
        copies, hidden = 2, computation * 2 / 3 / step.micro_batches
    sent = copies * 4 * cost.parameters(step.model) * (step.devices - 1) / step.devices
    return max(sent / device.collective_bandwidth(step.devices) - hidden, 0.0)
