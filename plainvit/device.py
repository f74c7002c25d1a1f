"""Choose device, precision and attention backend; measure bf16 on this CPU; avoid CPU bugs before torch is loaded.

Imports only disk of plainvit, and torch only inside the functions that need it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plainvit import disk

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Some virtual CPUs advertise AMX (bf16 tiles) but raise SIGILL when oneDNN uses it. This variable limits oneDNN to
# instructions below AMX; it is read once, when oneDNN is first used, so set it before torch is loaded.
ISA_VARIABLE, ISA_BELOW_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"

# OpenMP threads spin while they wait for each other, which is fastest on idle cores. On a busy machine one thread waits
# for a core while the others spin: a step of the recipe digits took 480 to 540 ms (two cores, load 7 to 9) with
# spinning threads and 24 to 40 ms with sleeping ones; on idle cores 15 and 28 ms.
WAIT_VARIABLE = "OMP_WAIT_POLICY"

_PROBE = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64).bfloat16())"
# Seconds of a training step of one block of ViT-Ti/16 in fp32 and in bf16: the fastest of 7, in turns. The time of one
# thread on the CPU, which other work on the machine does not change.
_TIMED_STEPS = """
import json, time, torch
torch.set_num_threads(1)
block = torch.nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
tokens, times = torch.randn(8, 197, 192), {"fp32": [], "bf16": []}
for _ in range(7):
    for name, values in times.items():
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
            loss = block(tokens).float().square().mean()
        loss.backward()
        values.append(time.process_time() - started)
print(json.dumps({name: min(values) for name, values in times.items()}))
"""
CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)
MIN_GAIN = 1.2  # how much faster than fp32 bf16 must be on a CPU to be chosen


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is an out-of-memory error of CUDA, of PyTorch on a CPU, or of Python."""
    has_type = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return has_type or "can't allocate memory" in str(error)


def set_environment() -> None:
    """Set environment variables before torch is loaded: no AMX where it crashes, sleeping threads on a busy machine."""
    if "torch" in sys.modules:
        return
    if ISA_VARIABLE not in os.environ and crashes_in_bf16():
        os.environ[ISA_VARIABLE] = ISA_BELOW_AMX
    if WAIT_VARIABLE not in os.environ and is_busy():
        os.environ[WAIT_VARIABLE] = "passive"


def is_busy(loadavg: Path = Path("/proc/loadavg")) -> bool:
    """Whether other processes have used a core or more for a minute, and still do."""
    if not hasattr(os, "getloadavg") or os.getloadavg()[0] < 1:
        return False
    running: list[int] = []
    try:
        for _ in range(9):
            time.sleep(0.002)  # "2.25 2.22 3.15 3/512 1234": three processes run now, this one included
            running.append(int(loadavg.read_text().split()[3].partition("/")[0]))
    except (OSError, ValueError, IndexError):  # not Linux
        return True
    return sorted(running)[4] > 1


@functools.cache
def is_cpu_bf16_unsafe() -> bool:
    """Whether bf16 on this CPU would crash the process, because torch was loaded before AMX could be disabled."""
    return ISA_VARIABLE not in os.environ and crashes_in_bf16()


def check_cpu_bf16(weight: "Tensor") -> None:
    """Raise if a forward pass with this weight would run bf16 on a CPU where it crashes."""
    import torch

    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    if weight.device.type == "cpu" and (autocast or weight.dtype is torch.bfloat16):
        raise RuntimeError(
            "bf16 on this CPU would crash the process (it advertises AMX but cannot run it): import plainvit before "
            f"torch, or set {ISA_VARIABLE}={ISA_BELOW_AMX} before starting Python, or use fp32"
        )


def crashes_in_bf16(cpuinfo: Path = Path("/proc/cpuinfo"), probe: str = _PROBE, cache: Path | None = None) -> bool:
    """Whether bf16 crashes on this CPU unless AMX is disabled: one matmul in a child process."""
    flags = _read_cpuinfo("flags", cpuinfo)
    if "amx_bf16" not in flags.split():
        return False
    environment = {name: value for name, value in os.environ.items() if name != ISA_VARIABLE}
    return bool(_run_probe(probe, flags, environment, cache).get("crash"))


@dataclass(frozen=True)
class CpuSpeed:
    """Seconds of a small training step on this CPU in each precision; 0 where it was not measured."""

    fp32: float = 0.0
    bf16: float = 0.0
    crash: str = ""  # name of the signal by which bf16 ends the process

    @property
    def gain(self) -> float:
        """How many times as fast as fp32 bf16 is."""
        return self.fp32 / self.bf16 if self.bf16 else 0.0

    @property
    def prefers_bf16(self) -> bool:
        return not self.crash and self.gain >= MIN_GAIN


@functools.cache
def measure_cpu(probe: str = _TIMED_STEPS, cache: Path | None = None) -> CpuSpeed:
    """Times fp32 and bf16 in a child process, which may crash; once for each CPU and torch version."""
    flags = _read_cpuinfo("flags") + os.environ.get(ISA_VARIABLE, "")
    result = _run_probe(probe, flags, dict(os.environ), cache)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return CpuSpeed(float(result["fp32"]), float(result["bf16"]))
    return CpuSpeed(crash=str(result.get("crash", "")))


def _run_probe(probe: str, cpu: str, environment: dict[str, str], cache: Path | None) -> dict[str, Any]:
    """Runs Python code in a child process and returns the JSON that it prints, or the signal by which it crashed.

    The result is cached per CPU, torch version and code. Another failure is not about the CPU: {}, and not cached.
    """
    folder = cache or cache_folder()
    identity = "\n".join((cpu, importlib.metadata.version("torch"), probe))
    file = folder / f"cpu-bf16-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError):  # damaged
        known = disk.read_json(file)
        if "crash" in known:
            return known
    command = [sys.executable, "-c", probe]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:  # a busy machine
        return {}
    crash = signal.Signals(-child.returncode).name if -child.returncode in CRASHES else ""
    if child.returncode and not crash:
        return {}
    result = {"crash": crash} | (json.loads(child.stdout) if child.stdout.strip() else {})
    with contextlib.suppress(OSError):  # read-only home folder: the CPU is probed in every run
        disk.make_folder(folder)
        disk.write_text(file, json.dumps(result))
    return result


def _read_cpuinfo(field: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The value of a field, of the first CPU; "" if there is none."""
    try:
        with cpuinfo.open() as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
    except OSError:  # not Linux
        return ""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/plainvit, or ~/.cache/plainvit."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "plainvit"


def processor() -> str:
    """The CPU's name."""
    return _read_cpuinfo("model name") or platform.processor() or platform.machine()


def choose_attention_backend() -> None:
    """Disable cuDNN attention; PyTorch chooses among the other fused kernels.

    cuDNN's bf16 backward gave NaN gradients after 120-230 steps of ordinary training on an H200 (torch 2.11, cuDNN
    9.19). Compiled code does not always respect a context manager around the call, so it is disabled globally.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def choose_device(name: str, local: int = 0, processes: int = 1) -> str:
    """Resolve `name` (cpu, cuda, cuda:N, auto) for process `local` of the `processes` on this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"unknown device {name!r}: --device takes cpu, cuda, cuda:N or auto")
    if not name.startswith("cuda"):
        return name
    if processes > 1 and ":" in name:
        problem = f"--device {name} is one GPU, but --devices {processes} needs {processes}"
        raise ValueError(f"{problem}: use --device cuda (CUDA_VISIBLE_DEVICES selects which)")
    count = torch.cuda.device_count()
    if not count:
        raise ValueError(f"--device {name} is not available: PyTorch finds no GPU on this machine; use --device cpu")
    if processes > count:
        raise ValueError(f"{processes} processes on this machine, but it has {count} GPUs: one process a GPU")
    if ":" in name and int(name.partition(":")[2]) >= count:
        raise ValueError(f"--device {name} does not exist: this machine has {count} GPUs, numbered from 0")
    return f"cuda:{local}" if processes > 1 else name


def choose_precision(name: str, device: str) -> "torch.dtype":
    """The dtype of the computation (weights stay fp32). auto is bf16 on a GPU, where it is always faster, and fp32 on a
    CPU, where it may be slower or crash (`measure_cpu`); fp8 uses bf16 outside the matmuls.
    """
    import torch

    use_bf16 = name in ("bf16", "fp8") or (name == "auto" and device.startswith("cuda"))
    return torch.bfloat16 if use_bf16 else torch.float32
