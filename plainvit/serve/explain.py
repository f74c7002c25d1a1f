"""What the page shows besides predictions: maps of attention and calibrated confidence.

    explainer = Explainer(Predictor("runs/photos"))
    explainer.explain(image)                  # a dict for JSON

Maps are those of plainvit/analyse/attention.py, as bytes scaled to the largest value of each map, in base64. They
explain the PyTorch model, whichever backend predicts.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import attention_maps, relevance, require_global_attention, rollout
from plainvit.disk import run_folder
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson

SIMILAR = 200  # evaluated photos of similar confidence, at most a fifth of all
MIN_EVALUATED = 50  # photos, for a statement about confidence


class Explainer:
    """Explains single images of one model."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.calibration = read_calibration(predictor.source)

    def explain(self, image: Tensor, label: int | None = None) -> dict[str, Any]:
        """Maps of one image, uint8 [3, H, W]; `label` is the class of the gradient-weighted map."""
        explanation: dict[str, Any] = {"image": encode_image(image)}
        model, batch = self.predictor.model, image[None].to(self.predictor.device)
        try:
            require_global_attention(model)
        except ValueError as error:
            return explanation | {"missing_maps": str(error)}
        maps = attention_maps(model, batch)[0]  # [L, H, h, w]
        with_mean = torch.cat((maps.mean(1, keepdim=True), maps), 1)  # [L, 1 + H, h, w]
        target = None if label is None else torch.tensor([label])
        return explanation | {
            "layers": maps.shape[0],
            "heads": maps.shape[1],
            "grid": list(maps.shape[2:]),
            "attention": pack_maps(with_mean),
            "rollout": pack_maps(rollout(model, batch)),
            "relevance": pack_maps(relevance(model, batch, target)) if self.predictor.classes else None,
        }

    def describe_confidence(self, probability: float) -> dict[str, Any] | None:
        """How often predictions of similar probability were right; None without evaluated photos."""
        if self.calibration is None:
            return None
        probabilities, right = self.calibration
        count = min(SIMILAR, max(len(right) // 5, MIN_EVALUATED // 2))
        start = max(int(np.searchsorted(probabilities, probability)) - count, 0)
        near = slice(start, start + 2 * count)  # has the nearest ones: sorting all photos would take milliseconds
        nearest = np.argsort(np.abs(probabilities[near] - probability), kind="stable")[:count]
        correct = int(right[near][nearest].sum())
        return {"right": correct, "of": count, "interval": wilson(correct, count)}


def read_calibration(source: str | Path) -> tuple[np.ndarray, np.ndarray] | None:
    """(probability, whether it was right) of the photos that `plainvit evaluate` scored, sorted; None without them."""
    path = run_folder(source) / "images.parquet"
    if not source or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            table = pq.read_table(file, columns=["probability", "right"]).sort_by("probability")
    except (pa.ArrowException, OSError):  # another program's file
        return None
    return (table["probability"].to_numpy(), table["right"].to_numpy()) if len(table) >= MIN_EVALUATED else None


def pack_maps(maps: Tensor) -> str:
    """[..., h, w] -> base64 of one byte per value; 255 is the largest value of its map."""
    largest = maps.amax((-2, -1), keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)
    scaled = (255 * maps.clamp(min=0) / largest).round().to(torch.uint8)
    return base64.b64encode(scaled.cpu().numpy().tobytes()).decode()


def encode_image(image: Tensor) -> str:
    """uint8 [3, H, W] as a data URL."""
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
