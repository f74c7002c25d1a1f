"""Predictor: images in several forms, the state of the caller's model, and timm's models."""

import contextlib
import json
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tiny
import torch
from pictures import noise, photo
from PIL import Image
from torch import nn

import plainvit
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.timm_models import load_timm

# The model stays the caller's -----------------------------------------------------------------------------------------


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_predictor_restores_the_mode_of_the_model(fails: bool) -> None:
    """Of each module: a part may be in another mode than the whole."""
    model = tiny.vit(torch.float32, dropout=0.5).train()
    model.blocks[0].eval()
    before = modes(model)
    predictor = Predictor(model)
    assert modes(model) == before
    images = torch.zeros(2, 3, *(1, 1) if fails else predictor.size)
    for ask in (predictor.logits, predictor.features):
        with pytest.raises(ValueError, match="do not fit") if fails else contextlib.nullcontext():
            assert torch.equal(ask(images), ask(images))  # nothing is random: it was in eval mode
        assert modes(model) == before


def test_threads_share_a_model_in_training_mode() -> None:
    model = tiny.vit(torch.float32, dropout=0.5).train()
    inside, seen = threading.Barrier(2), []
    first, second = threading.Event(), threading.Event()

    def record(module: nn.Module, _: object) -> None:
        inside.wait(10)  # both calls have begun
        (first if not seen else second).wait(10)
        seen.append(module.training)

    model.head.register_forward_pre_hook(record)  # pyright: ignore[reportOptionalMemberAccess]
    predictor = Predictor(model)
    images = torch.zeros(1, 3, *predictor.size)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(predictor.logits, images) for _ in range(2)]
        first.set()
        wait(calls, return_when=FIRST_COMPLETED)  # the other one goes on when this is over
        second.set()
        assert torch.equal(calls[0].result(), calls[1].result())
    assert seen == [False, False]
    assert all(modes(model))


def test_a_predictor_leaves_the_model_on_its_device() -> None:
    model = tiny.vit(torch.float32).to("meta")
    predictor = Predictor(model)
    assert predictor.device == "meta"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(ValueError, match="meta"):
        Predictor(model, device="cpu")


def test_an_optimised_model_is_in_eval_mode(tmp_path: Path) -> None:
    path = plainvit.save(tiny.vit(torch.float32), tmp_path / "m.safetensors")
    assert not any(modes(plainvit.load(path, optimise=True)))


# Images in several forms ----------------------------------------------------------------------------------------------


def test_pillow_images_equal_their_files(tmp_path: Path) -> None:
    """Turned as EXIF says, transparency on white, 16 bits as 8."""
    predictor = Predictor(tiny.vit(torch.float32), device="cpu")
    pixels = np.array(photo(30, 50, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    alpha = np.concatenate((pixels, np.full((30, 50, 1), 90, np.uint8)), 2)
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(alpha).save(tmp_path / "clear.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(pixels).convert("P").save(tmp_path / "palette.png")
    for file in sorted(tmp_path.iterdir()):
        with Image.open(file) as image:
            assert torch.equal(predictor.load_image(image), predictor.load_image(file)), file.name
    assert torch.equal(predictor.load_image(pixels), predictor.load_image(Image.fromarray(pixels)))


@pytest.mark.parametrize("pixels", [np.zeros((5, 5), np.uint8), np.zeros((5, 5, 4), np.uint8), np.zeros((5, 5, 3))])
def test_pixels_of_another_type_or_shape_are_an_error(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        Predictor(tiny.vit(torch.float32), device="cpu").load_image(pixels)


# timm's models --------------------------------------------------------------------------------------------------------


def save_timm(folder: Path, name: str, **options: object) -> tuple[nn.Module, str]:
    """A timm model of five classes, and the name of its folder for timm.create_model."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **options).eval()
    for parameter in model.parameters():
        parameter.data += 0.01
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    config = {"architecture": name, "num_classes": 5, "pretrained_cfg": model.pretrained_cfg, "model_args": options}
    (folder / "config.json").write_text(json.dumps(config))
    return model, f"timm:local-dir:{folder}"


@pytest.mark.parametrize("name", tiny.mostly_slow(["vit_tiny_patch16_224", "efficientnet_b0", "resnetv2_50x1_bit"], 2))
def test_a_timm_model_has_timms_logits_and_features(name: str, tmp_path: Path) -> None:
    theirs, source = save_timm(tmp_path, name)
    predictor = Predictor(source, device="cpu", image_size=64)
    images = predictor.stack([noise(70, 90, seed) for seed in range(3)])
    about = theirs.pretrained_cfg
    mean, std = (torch.tensor(about[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        if hasattr(theirs, "set_input_size"):
            theirs.set_input_size(img_size=(64, 64))
        pixels = (images / 255 - mean) / std
        expected = theirs(pixels)
        features = theirs.forward_head(theirs.forward_features(pixels), pre_logits=True)
    assert expected.std() > 1e-4
    torch.testing.assert_close(predictor.logits(images), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predictor.features(images), features.flatten(1), rtol=1e-5, atol=1e-6)
    assert predictor.classes == 5
    assert (predictor.preprocess.crop, predictor.preprocess.interpolation) == (
        about["crop_pct"],
        about["interpolation"],
    )


def test_a_timm_model_has_timms_preprocessing(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model, source = save_timm(tmp_path, "vit_tiny_patch16_224")
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    pixels = np.array(photo(300, 400))
    expected = theirs(Image.fromarray(pixels)) * 0.5 + 0.5  # this model's mean and std are 0.5
    found = Predictor(source, device="cpu").load_image(pixels) / 255
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1.5 / 255


@pytest.mark.parametrize("name", ["vit_tiny_patch16_225", "vit_tiny_patch16_224.mine", "local-dir:/no/such/folder"])
def test_an_unknown_timm_model_is_one_line(name: str) -> None:
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="timm cannot load") as caught:
        load_timm(name)
    assert "\n" not in str(caught.value)


def test_without_timm_the_install_command_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"pip install 'timm>="):
        load_timm("vit_tiny_patch16_224")
