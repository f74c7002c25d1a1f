"""Weights -> predictions: export to other runtimes, measure them, serve them over HTTP.

plainvit export runs/photos --format onnx openvino
plainvit bench runs/photos
plainvit serve runs/photos --port 8000
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

EXTRAS = {
    "export": "onnx onnxscript onnxruntime openvino",
    "serve": "starlette uvicorn prometheus-client",
    "ray": "'ray[serve]>=2.52'",
}


def require(extra: str, *modules: str) -> None:
    """Raises ValueError with the install command if a module is missing; keeps the modules from sending telemetry."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not installed: run `pip install {EXTRAS[extra]}`")
    # Without these, ONNX Runtime (1.31) reports to Microsoft, and `import openvino` (2026) to Google Analytics
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore - an import fails: openvino then sends nothing


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """A table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(columns[0], box=None, pad_edge=False, header_style="bold")
    for name in columns[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
