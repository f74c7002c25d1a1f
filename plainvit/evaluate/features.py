"""Features of a source, computed once and cached on disk.

    train = extract(Predictor("runs/photos"), open_source("photos/", "train"))
    train.features, train.labels, train.index

The cache key is a hash of weights, config, preprocessing, image size, precision and data: names, labels and classes,
size and modification time of every file, and the bytes of 64 images. Like make and rsync it misses an edit that keeps
size and time. The files are safetensors with a checksum; damaged ones are computed again.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plainvit.data.content_hash import content_stamp
from plainvit.data.decode import DataError
from plainvit.data.loader import evaluation_batches
from plainvit.data.sources import Source
from plainvit.device import cache_folder
from plainvit.disk import make_folder, write_atomically
from plainvit.errors import first_line
from plainvit.evaluate.predictor import Predictor
from plainvit.models.inference import check_finite
from plainvit.runtime.checkpoint import hash_tensors
from plainvit.runtime.display import Display

log = logging.getLogger("plainvit")
SCHEMA = 1  # version of the files


@dataclass
class Features:
    """Input of the model's last layer for each readable image, in the order of the source."""

    features: Tensor  # [N, D] fp32
    labels: Tensor  # [N]
    index: Tensor  # [N], positions in the source
    unreadable: int
    cached: bool = False  # read from disk, not computed


def default_cache() -> Path:
    return cache_folder() / "features"


def extract(
    predictor: Predictor, source: Source, *, cache: Path | None = None, workers: int | None = 0, quiet: bool = False
) -> Features:
    """Features of every image, read from or written to the folder `cache`, if given."""
    if cache:
        make_folder(cache)
    path = cache / f"{features_key(predictor, source)}.safetensors" if cache else None
    cached = _read(path) if path else None
    result = cached or _compute(predictor, source, workers, quiet)
    check_finite(result.features, lambda row: source.name(int(result.index[row])), "features", predictor.dtype)
    if path and not cached:
        _write(path, result)
    return result


def features_key(predictor: Predictor, source: Source) -> str:
    """Cache key: equal only for equal features."""
    settings: dict[str, Any] = {
        "schema": SCHEMA,
        "predictor": predictor.describe(),
        "data": source.fingerprint(),
        "content": content_stamp(source),
        "split": source.split,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _compute(predictor: Predictor, source: Source, workers: int | None, quiet: bool) -> Features:
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    unreadable, done = 0, 0
    batches = evaluation_batches(
        source,
        batch=predictor.batch,
        size=predictor.size,
        preprocess=predictor.preprocess,
        workers=workers,
        device=predictor.device,
    )
    with Display(f"features of {source.spec} {source.split}".replace("  ", " "), len(source), quiet=quiet) as display:
        for batch in batches:
            readable = batch.readable
            if readable.any():
                features = predictor.features(batch.images[readable]).cpu()
                parts.append((features, batch.labels.cpu()[readable], torch.from_numpy(batch.index)[readable]))
            unreadable, done = unreadable + len(batch.bad), done + len(readable)
            display.advance(done, "images")
    if not parts:
        raise DataError(f"no image of the {source.split} split of {source.spec} can be read")
    features, labels, index = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Features(features.contiguous(), labels, index, unreadable)


def _write(path: Path, result: Features) -> None:
    tensors = {"features": result.features, "labels": result.labels, "index": result.index}
    about = {"plainvit": json.dumps({"unreadable": result.unreadable, "hash": hash_tensors(tensors)})}
    write_atomically(path, lambda temporary: safetensors.torch.save_file(tensors, temporary, about))


def _read(path: Path) -> Features | None:
    """Cached features; None if the file is absent or damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["plainvit"])
            tensors = {name: file.get_tensor(name) for name in ("features", "labels", "index")}
        if about["hash"] != hash_tensors(tensors):
            raise ValueError("its checksum does not match")
        return Features(**tensors, unreadable=int(about["unreadable"]), cached=True)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        log.warning("%s is damaged (%s): features are computed again", path, first_line(error))
        return None
