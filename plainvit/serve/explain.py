"""What the page shows besides predictions: maps of attention, calibrated confidence, nearest training photos.

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
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from plainvit.analyse.attention import attention_maps, relevance, require_global_attention, rollout
from plainvit.data.decode import ImageError
from plainvit.data.sources import open_source
from plainvit.disk import run_folder
from plainvit.evaluate.features import default_cache, extract
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.statistics import wilson

SIMILAR = 200  # evaluated photos of similar confidence, at most a fifth of all
MIN_EVALUATED = 50  # photos, for a statement about confidence
NEIGHBORS, THUMBNAIL = 6, 128  # photos, and their height and width in pixels


class Explainer:
    """Explains single images of one model; `neighbors` is the data whose training photos are compared with them."""

    def __init__(self, predictor: Predictor, neighbors: str = "", data_root: str | Path | None = None) -> None:
        self.predictor = predictor
        self.calibration = read_calibration(predictor.source)
        self.training = None
        if neighbors:
            source = open_source(neighbors, "train", data_root=data_root)
            known = extract(predictor, source, cache=default_cache())
            known.features = F.normalize(known.features, dim=-1)
            self.training = source, known

    def explain(self, image: Tensor, label: int | None = None) -> dict[str, Any]:
        """Maps and neighbors of one image, uint8 [3, H, W]; `label` is the class of the gradient-weighted map."""
        explanation: dict[str, Any] = {"image": encode_image(image, "PNG"), "neighbors": self.find_neighbors(image)}
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

    def find_neighbors(self, image: Tensor) -> list[dict[str, Any]]:
        """The training photos with the most similar features (cosine), the most similar first."""
        if self.training is None:
            return []
        source, known = self.training
        query = F.normalize(self.predictor.features(image[None]).cpu(), dim=-1)[0]  # [D]
        nearest = (known.features @ query).topk(min(NEIGHBORS, len(known.features)))
        neighbors = []
        for similarity, row in zip(nearest.values.tolist(), nearest.indices.tolist(), strict=True):
            try:
                pixels = self.predictor.load_image(source.read(int(known.index[row])))
            except (ImageError, OSError):  # the file has changed since
                continue
            label = int(known.labels[row])
            name = source.classes[label] if 0 <= label < len(source.classes) else ""
            thumbnail = encode_image(pixels, "JPEG", THUMBNAIL)
            neighbors.append({"image": thumbnail, "label": name, "similarity": similarity})
        return neighbors


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


def encode_image(image: Tensor, format: str, size: int | None = None) -> str:  # noqa: A002 - as in Pillow
    """uint8 [3, H, W] as a data URL; `size` is its largest height and width."""
    shown, file = Image.fromarray(image.permute(1, 2, 0).cpu().numpy()), io.BytesIO()
    if size:
        shown.thumbnail((size, size))
    shown.save(file, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
