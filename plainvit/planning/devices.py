"""GPUs that `plainvit plan --on NAME` knows, from NVIDIA's data sheets: peak rates, memory and links.

Step times were measured on one H200 (step_time.py); other devices are scaled by their peak rates.
"""

from dataclasses import dataclass, replace

USABLE_MEMORY = 0.92  # assumed: the CUDA context, workspaces of libraries and fragmentation take the rest
LINK_EFFICIENCY = 0.75  # assumed: fraction of the data sheet's bandwidth that collectives reach
COMPUTE_FRACTION = 0.7  # of a B/16 step on an H200: matmuls and attention; memory bandwidth limits the rest


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU."""

    timing_source: str
    tflops: float  # peak dense bf16, TFLOP/s
    fp32_tflops: float  # without TF32
    bandwidth: float  # of its memory, TB/s
    memory: float  # GiB
    node_bandwidth: float  # to the other devices of a node, GB/s each way
    network_bandwidth: float  # to other nodes, GB/s each way for each device
    per_node: int = 8

    @property
    def usable_bytes(self) -> float:
        """Memory that a training step can fill."""
        return self.memory * USABLE_MEMORY * 2**30

    @property
    def slowdown(self) -> float:
        """Time of a step as a multiple of the H200's."""
        return COMPUTE_FRACTION * H200.tflops / self.tflops + (1 - COMPUTE_FRACTION) * H200.bandwidth / self.bandwidth

    def collective_bandwidth(self, devices: int) -> float:
        """Bytes per second of a collective; across nodes every device of a node uses its own network port."""
        across = min(self.node_bandwidth, self.network_bandwidth * self.per_node)
        return (self.node_bandwidth if devices <= self.per_node else across) * LINK_EFFICIENCY * 1e9


H200 = Device(
    timing_source="from training steps measured on one H200",
    tflops=989.0,
    fp32_tflops=60.0,
    bandwidth=4.8,
    memory=139.0,
    node_bandwidth=450.0,
    network_bandwidth=50.0,  # one port of 400 Gb/s
)
H100 = replace(H200, timing_source="scaled from the H200 by peak rates, not measured", bandwidth=3.35, memory=79.0)
A100 = replace(H100, tflops=312.0, fp32_tflops=17.0, bandwidth=2.039, node_bandwidth=300.0, network_bandwidth=25.0)
DEVICES: dict[str, Device] = {"h200": H200, "h100": H100, "a100": A100}
