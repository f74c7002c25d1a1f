"""Classifiers on frozen features: probe."""

import json as _json
from pathlib import Path
from typing import Literal

from plainvit.commands.parsing import (
    Model,
    PixelFlags,
    given_pixel_flags,
    print_result,
    resolve_workers,
)


def probe(
    model: Model,
    /,
    *,
    data: tuple[str, ...],
    method: tuple[Literal["fewshot", "knn", "linear"], ...] = ("fewshot",),
    shots: tuple[int, ...] = (1, 5, 10, 25),
    seeds: int = 3,
    l2: float = 1024.0,
    k: tuple[int, ...] = (),
    temperature: float = 0.07,
    linear_l2: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0),
    per_class: int = 0,
    split: Literal["test", "val"] = "test",
    data_root: Path | None = None,
    image_size: int | None = None,
    pixels: PixelFlags = PixelFlags(),  # noqa: B008 - it is frozen
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    batch: int = 64,
    workers: int = -1,
    cache: Path | None = None,
    no_cache: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Evaluate frozen features: few-shot least squares (as big_vision), k-NN, linear probe.

    Features are computed once and cached on disk, so another method takes seconds.

    Args:
        model: Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`
        data: One or more folders, lists, shards, hf:org/dataset, known datasets, digits or shapes
        method: One or more of fewshot, knn, linear
        shots: Few-shot: training images per class (a class with fewer uses all)
        seeds: Few-shot: number of random draws of these images
        l2: Few-shot: regularization (big_vision: 2^10)
        k: k-NN: numbers of neighbours; default: 1 5 10 20 100 200, as far as there are images
        temperature: k-NN: votes are weighted by exp(cosine / temperature), as in DINO
        linear_l2: Linear probe: regularization; the best on a fifth of the training images is used
        per_class: Maximum training images per class; 0: all (big_vision on ImageNet: 65)
        split: Split to test on
        data_root: Folder with the known datasets, each in a folder of its name
        image_size: Resample the position embedding to this image size
        pixels: Preprocessing, if the file does not say it
        device: Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one
        precision: Precision of the computation; auto: bf16 on a GPU, else fp32
        batch: Images per forward pass
        workers: Number of processes that read images; -1 chooses by the number of cores
        cache: Folder of cached features; default: $XDG_CACHE_HOME/plainvit/features
        no_cache: Neither read nor write cached features
        out: Also write the cards to this file, as JSON
        json: Print JSON instead of tables
    """
    from plainvit.data.workers import default_workers
    from plainvit.disk import write_atomically
    from plainvit.evaluate import features, frozen
    from plainvit.evaluate.predictor import Predictor

    if no_cache and cache:
        raise ValueError("--cache and --no-cache cannot be combined: remove one of them")
    if batch < 1:
        raise ValueError(f"--batch must be at least 1, got {batch}")
    processes = resolve_workers(workers)
    if out and not out.parent.is_dir():
        raise ValueError(f"cannot write --out {out}: folder {out.parent} does not exist")
    settings = frozen.Settings(
        methods=method,
        shots=shots,
        seeds=seeds,
        l2=l2,
        k=k,
        temperature=temperature,
        linear_l2=linear_l2,
        per_class=per_class,
    )
    options = {"image_size": image_size, "batch": batch} | given_pixel_flags(pixels)
    predictor = Predictor(model, device=device, precision=precision, **options)
    if processes is None:  # on a CPU the model needs the cores itself
        processes = 0 if predictor.device == "cpu" else default_workers()
    folder = None if no_cache else cache or features.default_cache()
    cards = frozen.probe_sets(
        predictor, data, settings, split=split, data_root=data_root, cache=folder, workers=processes, quiet=json
    )
    if out:
        text = _json.dumps(cards, indent=2) + "\n"
        write_atomically(out, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    print_result(cards, None if json else frozen.table(cards))
