"""Rates of devices, for `plainvit plan`: what was measured, what a data sheet says, what is assumed. All in one place.

python -m bench.plan --json FILE        python -m bench.plan --fit FILE
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device as a training step sees it: its ceilings, and the share of each that a step reaches.

    The shares are the calibration, and stand here alone: `python -m bench.plan --fit FILE` prints new ones.
    """

    origin: str
    # Ceilings
    matmul: float  # TFLOP/s of a large bf16 product
    fp32: float  # TFLOP/s in fp32, without TF32
    copy: float  # TB/s, bytes read and bytes written
    memory: float  # GiB
    inside: float  # GB/s to the other devices of a node, each way
    between: float  # GB/s to other nodes, each way, of each device
    per_node: int = 8
    # Shares of the ceilings. Of a B/16 step with batch 256 (64.8 ms: a plain fused ViT, compiled, bf16, AdamW) the
    # products took 36 ms, attention by cuDNN 9.7, GELU + LayerNorm + residual + permutes 18.4, AdamW 0.7
    gemm: float = 0.936  # of matmul
    # of matmul, on whole tiles: cuDNN reached 0.291 in that step. Flash took 1.38 ms where cuDNN took 0.99 (forward
    # and backward of 256 x 12 heads x 197 x 64)
    attention: float = 0.209
    short_attention: float = 0.414  # our own, 0.696 ms for the same
    pointwise: float = 0.544  # of copy
    update: float = 0.81  # of copy
    eager: float = 0.52  # of pointwise, without torch.compile: timm's B/16 made 2,746 images/s in place of 3,528
    kept: float = 1.0  # of the counted activations: the peaks of five steps (B, L, H; two code bases) come within 3 %
    launch: float = 0.265e-3  # seconds of the host for a layer and pass: compiled B/16 takes 3.18 ms for one image
    captured: float = 0.14e-3  # the least of a layer and pass in a CUDA graph: the recipe cifar10 takes 5.3 ms a step
    # Assumed, not measured here
    convolution: float = 0.1  # of matmul: ResNets are bound by traffic; about ResNet-50's published rates on an H100
    network: float = 0.75  # of inside and between
    usable: float = 0.92  # of memory: the context, the libraries' workspaces and fragmentation take the rest


# One H200, torch 2.11, random data: a bf16 product of 8192^3, a copy on the device. Links, fp32 and the peaks below are
# of NVIDIA's data sheets; 50 GB/s is one network port of 400 Gb/s for each device
H200 = Device(
    origin="measured on one H200; links between devices by their data sheets",
    matmul=766.0,
    fp32=60.0,
    copy=4.26,
    memory=139.0,
    inside=450.0,
    between=50.0,
)
PEAKS = {"h200": (989.0, 4.8), "h100": (989.0, 3.35), "a100-80": (312.0, 2.039)}  # dense bf16 TFLOP/s, TB/s


def _scaled(name: str, **own: float) -> Device:
    """The H200's measured numbers by the ratio of the published peaks."""
    (flops, copy), (top_flops, top_copy) = PEAKS[name], PEAKS["h200"]
    return replace(
        H200,
        origin="scaled from the H200 by the ratio of peak rates, not measured",
        matmul=H200.matmul * flops / top_flops,
        copy=H200.copy * copy / top_copy,
        **own,
    )


DEVICES: dict[str, Device] = {
    "h200": H200,
    "h100": _scaled("h100", memory=79.0),
    "a100-80": _scaled("a100-80", memory=79.0, fp32=17.0, inside=300.0, between=25.0),
}
