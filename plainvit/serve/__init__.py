"""Weights -> answers: export to other runtimes, measure them, serve them over HTTP.

plainvit export runs/photos --format onnx openvino
plainvit bench runs/photos
plainvit serve runs/photos --port 8000
"""

import importlib.util

EXTRAS = {
    "export": "onnx onnxscript onnxruntime openvino",
    "serve": "starlette uvicorn prometheus-client",
    "ray": "'ray[serve]>=2.52'",
}


def require(extra: str, *modules: str) -> None:
    """Raises ValueError with the install command if a module of an optional dependency is missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not installed: run `pip install {EXTRAS[extra]}`")
