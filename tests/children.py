"""Child processes for what must be set before a library is loaded, and a Triton that compiles for GPUs not here."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A driver that has no GPU but says which one to compile for; launches end at the compiler, in `made`
NO_GPU = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", {capability}, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
made = []
JITFunction.__getitem__ = lambda kernel, grid: lambda *a, **k: made.append(kernel.warmup(*a, grid=grid, **k))
"""


def in_child(code: str, *arguments: str, **environment: str | None) -> str:
    """What the code prints; the tests' own modules are there to import. A variable given as None is not set."""
    settings = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))} | environment
    settings = {name: value for name, value in settings.items() if value is not None}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
