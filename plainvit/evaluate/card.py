"""Cards: the results of one evaluation with everything needed to repeat and compare it.

    card = make_card(predictor, labels, result, world)
    write_card(card, Path("evaluations/pets"), labels, result)     card.json and images.parquet
    read_card(Path("evaluations/pets"))

    plainvit compare evaluations/pets evaluations/bit

images.parquet has a hash of each image's content, by which `compare` finds the images that two cards share. Cards of
another version are an error: the meaning of a number may have changed.
"""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from plainvit.config import to_json
from plainvit.data.columns import map_file, write_table
from plainvit.data.content_hash import CARD_SAMPLE, sample_hash
from plainvit.data.decode import DataError
from plainvit.data.known import official_split
from plainvit.disk import make_folder, read_json, run_folder, run_settings, write_together
from plainvit.errors import first_line
from plainvit.evaluate.labels import Labels
from plainvit.evaluate.metrics import Result
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.checkpoint import hash_tensors
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import describe_environment, replace_non_finite

VERSION = 2
CARD, IMAGES = "card.json", "images.parquet"
# Texts that `compare` and `paper` read
REQUIRED = (("data", "split"), ("data", "rule"), ("data", "spec"), ("model", "weights"), ("preprocess", "hash"))


@dataclass(frozen=True)
class Card:
    """One evaluation of one model on one split."""

    metrics: dict[str, float]  # top1, top5, nll, ece; precision, recall and f1 as means over the classes
    counts: dict[str, int]  # correct images: top1, top5
    intervals: dict[str, list[float]]  # 95 %: Wilson's for top1 and top5, 1.96 standard errors for nll
    images: int  # scored
    unreadable: int
    data: dict[str, Any]  # spec, split, fingerprint, content, classes, rule, labels, left_out
    model: dict[str, Any]  # source, family, weights (sha256 of the tensors), parameters, config, steps of its run
    preprocess: dict[str, Any]  # settings, image_size, hash
    precision: str
    environment: dict[str, Any]  # versions, device, processes, command, date, commit
    card: int = VERSION

    @property
    def name(self) -> str:
        """Name of the model for a table."""
        return str(self.model.get("source") or self.model.get("family") or "model")

    def identity(self) -> str:
        """Hash of weights, data, preprocessing and precision."""
        values = [self.model["weights"], self.model["config"], self.data, self.preprocess["hash"], self.precision]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def make_card(predictor: Predictor, labels: Labels, result: Result, world: World) -> Card:
    """The card of an evaluation."""
    return Card(
        metrics=_compute_metrics(result, labels),
        counts={"top1": int(result.correct.sum()), "top5": int(result.hits.any(1).sum())},
        intervals={name: list(ends) for name, ends in result.intervals.items()},
        images=len(result.labels),
        unreadable=result.unreadable,
        data=_describe_data(labels),
        model=_describe_model(predictor),
        preprocess=_describe_preprocess(predictor),
        precision={torch.float32: "fp32", torch.bfloat16: "bf16"}[predictor.dtype],
        environment=describe_environment(world.device) | {"processes": world.size},
    )


def _compute_metrics(result: Result, labels: Labels) -> dict[str, float]:
    metrics = {
        "top1": result.top1,
        "top5": result.top5,
        "nll": float(result.nll.mean()),
        "ece": result.calibration_error,
    }
    if not labels.single:
        return metrics
    table = result.by_class()
    occurs = table["images"] + table["predicted"] > 0  # as scikit-learn's macro mean: over classes that occur
    return metrics | {name: float(table[name][occurs].mean()) for name in ("precision", "recall", "f1")}


def _describe_data(labels: Labels) -> dict[str, Any]:
    source = labels.source
    return {
        "spec": source.spec,
        "split": official_split(source.spec, source.split),
        "fingerprint": source.fingerprint(),
        "content": sample_hash(source, CARD_SAMPLE),
        "classes": len(source.classes),
        "rule": labels.rule,
        "labels": labels.fingerprint(),
        "left_out": labels.left_out,
    }


def _describe_model(predictor: Predictor) -> dict[str, Any]:
    model = predictor.model
    return {
        "source": str(predictor.source),
        "family": model.about.family,
        "weights": hash_tensors(model.state_dict()),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "config": to_json(model.config),
        **_find_steps(predictor.source),
    }


def _describe_preprocess(predictor: Predictor) -> dict[str, Any]:
    """Settings and their hash; without the crop where none is made."""
    settings, config = asdict(predictor.preprocess), predictor.model.config
    if settings["resize"] == "squash":
        del settings["crop"]
    described = {"settings": settings, "image_size": list(predictor.size)}
    described |= {"mean": list(config.mean), "std": list(config.std)}
    return described | {"hash": hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]}


def read_run_settings(path: Path, card: Card) -> dict[str, Any]:
    """Settings of the run that the card or its weights belong to, with the steps really taken; {} if there is none."""
    settings = run_settings(path) or run_settings(card.name)
    return settings | ({"steps": card.model["steps"]} if settings and "steps" in card.model else {})


def _find_steps(source: str | Path) -> dict[str, int]:
    """The steps that a run really took: --hours or an interruption may have cut it."""
    is_run = bool(source) and bool(run_settings(source))
    step = read_json(run_folder(source) / "status.json").get("step") if is_run else None
    return {"steps": step} if isinstance(step, int) else {}


# Files ----------------------------------------------------------------------------------------------------------------


def write_card(card: Card, folder: Path, labels: Labels, result: Result) -> None:
    """Writes card.json and images.parquet together, so that they always agree."""
    make_folder(folder)
    rows = _make_rows(labels, result)
    text = json.dumps(replace_non_finite(asdict(card)), indent=1, ensure_ascii=False) + "\n"
    write_card_file = functools.partial(Path.write_text, data=text, encoding="utf-8")
    write_together({folder / IMAGES: functools.partial(write_table, rows), folder / CARD: write_card_file})


def _make_rows(labels: Labels, result: Result) -> pa.Table:
    """One row per scored image. Classes are numbers; their names, which may repeat, are in the metadata."""
    source, positions = labels.source, result.index.tolist()
    hashes = (hashlib.blake2b(source.identify(position), digest_size=12) for position in positions)
    columns = {
        "name": pa.array([source.name(position).encode("utf-8", "replace").decode() for position in positions]),
        "content": pa.array([digest.hexdigest() for digest in hashes]),
        "label": pa.array(result.labels, pa.int32()),
        "prediction": pa.array(result.predictions[:, 0], pa.int32()),
        "probability": pa.array(result.probabilities),
        "nll": pa.array(result.nll),
        "right": pa.array(result.correct),
        "right5": pa.array(result.hits.any(1)),
    }
    class_names = {"label": list(labels.source.classes), "prediction": list(labels.class_names)}
    return pa.table(columns).replace_schema_metadata({key: json.dumps(value) for key, value in class_names.items()})


def read_card(path: Path) -> Card:
    """Reads a card from its file or from the folder that contains it."""
    file = path / CARD if path.is_dir() else path
    if not file.is_file():
        problem = f"{path} has no {CARD}" if path.is_dir() else f"there is no {path}"
        raise DataError(f"{problem}: give a run with a test result, or a folder that `plainvit evaluate` wrote")
    try:
        stored = read_json(file)
    except ValueError as error:
        raise DataError(first_line(error)) from error
    if stored.get("card") != VERSION:
        version = stored.get("card", "unknown")
        raise DataError(f"{file} has card version {version}, but {VERSION} is required: run `plainvit evaluate` again")
    fault = next(_find_faults(stored), None)
    if fault:
        raise DataError(f"{file} is not a valid card: {fault}; run `plainvit evaluate` again")
    return Card(**{field.name: stored[field.name] for field in dataclasses.fields(Card)})


def _find_faults(card: dict[str, Any]) -> Iterator[str]:
    """What makes a stored card unusable in a comparison."""
    for field in dataclasses.fields(Card):
        if not isinstance(card.get(field.name), get_origin(field.type) or field.type):  # pyright: ignore[reportArgumentType]
            yield f"{field.name} is missing or invalid"
    for part, key in REQUIRED:
        if not isinstance(card[part].get(key), str):
            yield f"{part}.{key} is missing or invalid"
    config = card["model"].get("config")
    if not isinstance(config, dict) or not isinstance(config.get("classes"), int):
        yield "model.config is missing or invalid"
    for name in ("top1", "top5"):
        count, images = card["counts"].get(name), card["images"]
        if not isinstance(count, int) or images < 1 or card["metrics"].get(name) != count / images:
            yield f"{name} is not {count} of {images} images"


@dataclass(frozen=True)
class Rows:
    """Results per image, for paired comparisons."""

    content: np.ndarray  # [N], hashes of the images
    truth: np.ndarray  # [N], names of their labels
    correct: np.ndarray
    correct_top5: np.ndarray
    nll: np.ndarray


def read_rows(path: Path, card: Card) -> Rows:
    """Reads images.parquet next to a card. Raises DataError if it is absent, damaged or contradicts the card."""
    file = (path if path.is_dir() else path.parent) / IMAGES
    if not file.is_file():
        raise DataError(f"there is no {file}: run `plainvit evaluate` again to write it")
    try:
        table = pq.ParquetFile(map_file(file)).read(["content", "label", "right", "right5", "nll"])
        classes = np.array(json.loads((table.schema.metadata or {})[b"label"]), object)
        columns = [table[name].to_numpy() for name in ("right", "right5", "nll")]
        rows = Rows(np.array(table["content"].to_pylist()), classes[table["label"].to_numpy()], *columns)
    except (pa.ArrowException, OSError, LookupError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {first_line(error)}") from error
    if len(table) != card.images:
        raise DataError(f"{file} has {len(table):,} rows, but its card has {card.images:,} images")
    for name, correct in (("top1", rows.correct), ("top5", rows.correct_top5)):
        if correct.sum() != card.counts[name]:
            counts = f"{correct.sum()} and {card.counts[name]}"
            raise DataError(f"{file} is from another evaluation than its card: {name} has {counts} correct images")
    return rows


def match_images(a: Rows, b: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the images that both have; copies of an image are matched in their order."""
    _, in_a, in_b = np.intersect1d(_number_copies(a), _number_copies(b), assume_unique=True, return_indices=True)
    return in_a, in_b


def _number_copies(rows: Rows) -> list[str]:
    """Hashes with numbers that make copies different: the second copy of an image gets a 2."""
    counts: Counter[str] = Counter()
    numbered = []
    for digest in rows.content:
        counts[digest] += 1
        numbered.append(f"{digest} {counts[digest]}")
    return numbered
