"""Frozen features: probe."""

import json as _json
from pathlib import Path
from typing import Annotated, Literal

from plainvit.verbs.words import UNSAID, Model, PixelFlags, PixelOptions, chosen_workers, given_pixels, show


def probe(
    model: Model,
    /,
    *,
    data: tuple[str, ...],
    method: tuple[Literal["fewshot", "knn", "linear"], ...] = ("fewshot",),
    shots: tuple[int, ...] = (1, 5, 10, 25),
    seeds: int = 3,
    l2: float = 1024.0,
    sweep: bool = False,
    k: Annotated[tuple[int, ...], UNSAID] = (),
    temperature: float = 0.07,
    linear_l2: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0),
    per_class: int = 0,
    split: Literal["test", "val"] = "test",
    data_root: Path | None = None,
    image_size: int | None = None,
    pixels: PixelOptions = PixelFlags(),  # noqa: B008 - it is frozen
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    batch: int = 64,
    workers: int = -1,
    cache: Path | None = None,
    no_cache: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """What a model's frozen features are worth: few-shot least squares (big_vision's table), k-NN, a linear probe.

    Each image goes through the model once; the features are kept on disk, so that another method costs seconds. With
    --sweep and several data sets, the l2 of each is also chosen on the others, as big_vision once did.

    Args:
        model: A run folder, weights of any library, hf:org/name, or a name from `plainvit weights`.
        data: One or more folders, lists, shards, hf:org/dataset, known sets, digits or shapes.
        method: fewshot, knn, linear, or several of them.
        shots: Training images of each class; a class that has fewer gives all.
        seeds: Draws of those images; mean and spread over them are given.
        l2: Of few-shot; big_vision's is 2^10.
        sweep: Few-shot with every l2 from 2^-10 to 2^19 too.
        k: Neighbours; without, 1 5 10 20 100 200 as far as there are training images.
        temperature: Of the weighted votes, exp(cosine / temperature); DINO's.
        linear_l2: Of the linear probe; where several, the best on a fifth of the training images is taken.
        per_class: At most so many training images of each class; 65 is big_vision's ImageNet. 0: all.
        split: What is tested on.
        data_root: Where known sets lie, each in a folder of its name.
        image_size: Resample the model's positions to this size first.
        pixels: What the file does not say of its images.
        device: cpu, cuda, cuda:1; auto: a GPU where there is one.
        precision: Of the model; auto: bf16 on a GPU.
        batch: Images at once.
        workers: Processes that read images; -1: as many as suit the machine.
        cache: Folder of the kept features; $XDG_CACHE_HOME/plainvit/features where not given.
        no_cache: Keep nothing, and read nothing that was kept.
        out: Write the cards to this file too, as JSON.
        json: Print JSON for machines instead of tables.
    """
    from plainvit.data.workers import default_workers
    from plainvit.disk import write_atomically
    from plainvit.evaluate import features, frozen
    from plainvit.evaluate.predictor import Predictor

    if no_cache and cache:
        raise ValueError("--cache and --no-cache contradict each other: give one of them")
    if batch < 1:
        raise ValueError(f"--batch is at least 1, got {batch}")
    processes = chosen_workers(workers)
    if out and not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: there is no folder {out.parent}")
    settings = frozen.Settings(
        methods=method,
        shots=shots,
        seeds=seeds,
        l2=l2,
        sweep=sweep,
        k=k,
        temperature=temperature,
        linear_l2=linear_l2,
        per_class=per_class,
    )
    told = given_pixels(pixels)
    predictor = Predictor(model, device=device, precision=precision, image_size=image_size, batch=batch, **told)
    if processes is None:  # on a CPU the model needs the cores more than they do
        processes = 0 if predictor.device == "cpu" else default_workers()
    home = None if no_cache else cache or features.default_cache()
    cards = frozen.probe_sets(
        predictor, data, settings, split=split, data_root=data_root, cache=home, workers=processes, quiet=json
    )
    if out:
        text = _json.dumps(cards, indent=2) + "\n"
        write_atomically(out, lambda beside: beside.write_text(text, encoding="utf-8"))
    show(cards, None if json else frozen.tables(cards))
