"""What must be settled about the machine before a model runs on it: device, precision, attention backend, CPU quirks.

A leaf: it imports nothing of plainvit, and torch only where torch is already needed.
"""

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
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Some virtual CPUs advertise AMX (bf16 tiles) but die with SIGILL when oneDNN uses it. This cap keeps oneDNN below
# AMX; it is read once, when oneDNN is first used, so it must be set before torch is loaded to be sure.
ISA_VARIABLE, ISA_BELOW_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"

# Threads of PyTorch that have done their part spin until the others have: the fastest way on free cores. Where other
# work has a core, its thread waits to be let on, and all spin meanwhile: a step of the recipe digits then took 480 to
# 540 ms (two cores, load 7 to 9), and 24 to 40 with threads that sleep; on free cores 15, and 28 if they sleep.
WAIT_VARIABLE = "OMP_WAIT_POLICY"

_PROBE = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64).bfloat16())"


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's, PyTorch's on a CPU, or Python's."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or "can't allocate memory" in str(error)


def prepare() -> None:
    """Call before torch is loaded: caps oneDNN where its AMX kills the process; threads sleep on a crowded machine."""
    if "torch" in sys.modules:
        return
    if ISA_VARIABLE not in os.environ and cpu_bf16_kills():
        os.environ[ISA_VARIABLE] = ISA_BELOW_AMX
    if WAIT_VARIABLE not in os.environ and crowded():
        os.environ[WAIT_VARIABLE] = "passive"


def crowded(loadavg: Path = Path("/proc/loadavg")) -> bool:
    """Whether other work has had a core or more for a minute, and has it now."""
    if not hasattr(os, "getloadavg") or os.getloadavg()[0] < 1:
        return False
    running: list[int] = []
    try:
        for _ in range(9):
            time.sleep(0.002)  # "2.25 2.22 3.15 3/512 1234": three run at this moment, and one of them asks
            running.append(int(loadavg.read_text().split()[3].partition("/")[0]))
    except (OSError, ValueError, IndexError):  # not Linux
        return True
    return sorted(running)[4] > 1


@functools.cache
def cpu_bf16_refused() -> bool:
    """Whether bf16 on this CPU would kill the process, torch having been loaded before the cap could be set."""
    return ISA_VARIABLE not in os.environ and cpu_bf16_kills()


def check_cpu_bf16(weight: "Tensor") -> None:
    """Raises where a forward pass with this weight would run bf16 on a CPU that is refused it."""
    import torch

    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    if weight.device.type == "cpu" and (autocast or weight.dtype is torch.bfloat16):
        raise RuntimeError(
            "bf16 on this CPU would kill the process (it advertises AMX but cannot run it): import plainvit before "
            f"torch, or set {ISA_VARIABLE}={ISA_BELOW_AMX} before starting Python, or use fp32"
        )


def cpu_bf16_kills(cpuinfo: Path = Path("/proc/cpuinfo"), probe: str = _PROBE, cache: Path | None = None) -> bool:
    """Runs one bf16 product in a child process, once per CPU and torch, where AMX is advertised."""
    flags = _cpu_flags(cpuinfo)
    if "amx_bf16" not in flags.split():
        return False
    identity = "\n".join((flags, _torch_version(), probe))
    folder = cache or cache_folder()
    file = folder / f"cpu-bf16-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    try:
        return bool(json.loads(file.read_text())["kills"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    environment = {name: value for name, value in os.environ.items() if name != ISA_VARIABLE}
    command = [sys.executable, "-c", probe]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:  # too busy a machine to say anything about its CPU
        return False
    kills = child.returncode in (-signal.SIGILL, -signal.SIGSEGV, -signal.SIGBUS)
    if kills or child.returncode == 0:  # anything else says nothing about the CPU: ask again next time
        _remember(file, kills)
    return kills


def _cpu_flags(cpuinfo: Path) -> str:
    try:
        with cpuinfo.open() as lines:
            return next((line for line in lines if line.startswith("flags")), "")
    except OSError:  # not Linux
        return ""


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _remember(file: Path, kills: bool) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w") as out:
            json.dump({"kills": kills}, out)
        Path(name).replace(file)
    except OSError:  # a read-only home costs a probe per run, nothing else
        pass


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/plainvit, below ~/.cache where that is not set."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "plainvit"


def processor() -> str:
    """The CPU's name."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def choose_attention_backend() -> None:
    """The one place where fused attention is chosen: PyTorch's own order, without cuDNN.

    cuDNN's bf16 backward gave NaN gradients after 120-230 steps of ordinary training on an H200 (torch 2.11, cuDNN
    9.19). A context manager around the call is not always honoured by compiled code, so it is switched off globally.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def choose_device(name: str, local: int = 0, beside: int = 1) -> str:
    """Of the name that was given, for one of the processes beside each other on this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} is unknown: cpu, cuda, cuda:1, or auto")
    if not name.startswith("cuda"):
        return name
    if beside > 1 and ":" in name:
        words = f"--device {name} is one GPU, --devices {beside} needs {beside}"
        raise ValueError(f"{words}: use --device cuda (CUDA_VISIBLE_DEVICES selects which)")
    there = torch.cuda.device_count()
    if not there:
        raise ValueError(f"device {name!r} is not there: PyTorch finds no GPU on this machine; --device cpu")
    if beside > there:
        raise ValueError(f"{beside} processes on this machine, but it has {there} GPUs: one process a GPU")
    if ":" in name and int(name.partition(":")[2]) >= there:
        raise ValueError(f"--device {name} does not exist: this machine has {there} GPUs, numbered from 0")
    return f"cuda:{local}" if beside > 1 else name


def choose_precision(name: str, device: str) -> "torch.dtype":
    """Of the arithmetic; weights are fp32. Auto is bf16 on a GPU; with fp8 all is bf16 but the blocks' products."""
    import torch

    low = name in ("bf16", "fp8") or (name == "auto" and device.startswith("cuda"))
    return torch.bfloat16 if low else torch.float32
