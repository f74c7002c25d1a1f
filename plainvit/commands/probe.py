"""Classifiers on frozen features: probe."""

import json as _json
from pathlib import Path
from typing import Literal

from plainvit.commands.parsing import InferenceFlags, Model, check_output_file, collect_pixel_flags, print_result
from plainvit.config import Probes


def probe(
    model: Model,
    /,
    *,
    data: tuple[str, ...],
    probes: Probes,
    split: Literal["test", "val"] = "test",
    flags: InferenceFlags,
    cache: Path | None = None,
    no_cache: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Evaluate frozen features: few-shot least squares (as big_vision), k-NN, linear probe.

    Features are computed once and cached on disk, so another method takes seconds.

    Args:
        data: One or more folders, lists, shards, hf:org/dataset, known datasets, digits or shapes
        split: Split to test on
        cache: Folder of cached features; default: ~/.cache/plainvit/features
        no_cache: Neither read nor write cached features
        out: Also write the cards to this file, as JSON
        json: Print JSON instead of tables
    """
    from plainvit.disk import write_text
    from plainvit.evaluate import features, probe_sets
    from plainvit.evaluate.predictor import Predictor

    if no_cache and cache:
        raise ValueError("--cache and --no-cache cannot be combined: remove one of them")
    check_output_file("--out", out)
    options = {"image_size": flags.image_size, "batch": flags.batch} | collect_pixel_flags(flags)
    predictor = Predictor(model, device=flags.device, precision=flags.precision, **options)
    folder = None if no_cache else cache or features.default_cache()
    options = {"data_root": flags.data_root, "cache": folder, "workers": flags.processes, "quiet": json}
    cards = probe_sets.probe_sets(predictor, data, probes, split=split, **options)
    if out:
        write_text(out, _json.dumps(cards, indent=2) + "\n")
    print_result(cards, None if json else probe_sets.table(cards))
