"""Child processes for what must be set before a library is loaded."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def in_child(code: str, *arguments: str, **environment: str | None) -> str:
    """What the code prints; the tests' own modules are there to import. A variable given as None is not set."""
    settings = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))} | environment
    settings = {name: value for name, value in settings.items() if value is not None}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
