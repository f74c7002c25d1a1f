"""Mean, std, resize, crop and interpolation: kept by every file that we write, reported where a file does not say."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_weights_load as loading
import tiny
import torch

import plainvit
from plainvit.config import About, Preprocess
from plainvit.weights.reading import inspect_weights

PIXELS: dict[str, Any] = {"mean": 0.25, "std": (0.5, 0.25, 0.125), "resize": "crop", "crop": 0.75}
PIXELS |= {"interpolation": "lanczos", "antialias": True}
# Files that do not say how photos are prepared
SILENT = ("DeiT", "PyTorch", "timm", "torchvision", "transformers", "transformers without a processor", "google", "BiT")


def pixel_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines about the pixels, among those about heads and the like."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return [line for line in lines if " mean " in line or "interpolation" in line]


@pytest.mark.parametrize("name", SILENT)
def test_assumed_preprocessing_is_reported_in_one_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the values that were taken and the flag for each; what the caller gives is no assumption."""
    path = loading.FILES[name](tmp_path)
    model = plainvit.load(path, heads=4)
    (line,) = pixel_lines(caplog)
    assert "\n" not in line
    prepared = model.about.preprocess
    values = [f"{model.config.mean[0]}", f"{model.config.std[0]}", prepared.resize, prepared.interpolation]
    assert all(value in line for value in (*values, "--mean", "--std", "--resize", "--interpolation"))
    loaded = plainvit.load(path, heads=4, **PIXELS)
    assert pixel_lines(caplog) == []
    assert (loaded.config.mean, loaded.config.std) == ((0.25,) * 3, (0.5, 0.25, 0.125))
    assert loaded.about.preprocess == Preprocess(resize="crop", crop=0.75, interpolation="lanczos", antialias=True)
    some = plainvit.load(path, heads=4, mean=0.25)
    (line,) = pixel_lines(caplog)
    assert ("--mean" in line, "--std" in line) == (False, True)
    assert some.config.std == model.config.std


@pytest.mark.parametrize(
    "given", [{"crop": 0.5, "resize": "squash"}, {"std": 0.0}, {"mean": (0.5, 0.5)}, {"crop": 2.0}]
)
def test_invalid_preprocessing_is_an_error(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        plainvit.load(loading.FILES["timm"](tmp_path), heads=4, **given)


def test_unknown_argument_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="interpolation"):
        plainvit.load(loading.FILES["timm"](tmp_path), heads=4, interpolatoin="bicubic")  # type: ignore[call-arg]


# What every format must bring back: (name of the file, format, arithmetic)
WRITTEN = [
    ("m.safetensors", "plainvit", "google"),
    ("m.npz", "google", "google"),
    ("m", "timm", "google"),
    ("m.safetensors", "timm", "timm"),
    ("m.pth", "timm", "timm"),
    ("m", "transformers", "transformers"),
    ("m.safetensors", "torchvision", "torchvision"),
    ("m.pth", "torchvision", "torchvision"),
]


@pytest.mark.parametrize(("name", "format_", "numerics"), WRITTEN)
def test_every_written_file_keeps_preprocessing(
    tmp_path: Path, name: str, format_: str, numerics: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the heads, which no convention would give, and the class names; a line would mean that one was assumed."""
    pixels = {} if format_ == "google" else {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.25, 0.125)}
    size = (32, 32) if format_ == "torchvision" else (16, 64)  # 2 x 8 positions are as many as 4 x 4
    model = tiny.vit(torch.float32, numerics=numerics, image_size=size, classes=3, **pixels)
    prepared = Preprocess(resize="crop", crop=0.75, interpolation="lanczos", antialias=False)
    model.about = About(family="mine", preprocess=prepared, class_names=("a", "b", "c"), sources={"mean": "my data"})
    path = plainvit.save(model, tmp_path / name, format=format_)
    caplog.clear()
    loaded = plainvit.load(path)
    assert pixel_lines(caplog) == []
    assert (loaded.config, loaded.about) == (model.config, model.about)
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in loaded.state_dict().items())


def test_commands_accept_preprocessing_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from plainvit.cli import main

    source, target = str(loading.FILES["DeiT"](tmp_path)), tmp_path / "fixed.safetensors"
    flags = ["--mean", "0.25", "--std", "0.5", "0.25", "0.125", "--resize", "crop", "--crop", "0.75"]
    main(["inspect", source, "--heads", "4", *flags, "--interpolation", "nearest", "--json"])
    described = json.loads(capsys.readouterr().out)
    assert (described["settings"]["mean"], described["settings"]["std"]) == ([0.25] * 3, [0.5, 0.25, 0.125])
    assert {described["sources"][name] for name in ("mean", "std")} == {"given by the caller"}
    main(["convert", source, str(target), "--format", "plainvit", "--heads", "4", *flags])
    config, prepared = inspect_weights(target)[0].config, inspect_weights(target)[0].preprocess
    assert (config.mean, config.std, prepared.resize, prepared.crop) == ((0.25,) * 3, (0.5, 0.25, 0.125), "crop", 0.75)
    photo = tmp_path / "a.png"
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)).save(photo)
    capsys.readouterr()
    rows = []
    for model, more in ((target, []), (target, ["--mean", "0.5"])):
        main(["predict", str(model), str(photo), *more, "--json"])
        rows.append(json.loads(capsys.readouterr().out)["predictions"])
    assert rows[0] != rows[1]
