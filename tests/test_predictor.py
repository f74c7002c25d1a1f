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
from plainvit.evaluate.timm_models import load_timm
from torch import nn

import plainvit
from plainvit.config import Preprocess
from plainvit.data.decode import ImageError
from plainvit.evaluate.predictor import Prediction, Predictor

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
    images = torch.zeros(2, 1 if fails else 3, *predictor.size)
    for use in (predictor.logits, predictor.features):
        with pytest.raises((ValueError, RuntimeError)) if fails else contextlib.nullcontext():
            assert torch.equal(use(images), use(images))  # nothing is random: it was in eval mode
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


def test_one_image_gives_one_list_and_several_a_list_of_lists(tmp_path: Path) -> None:
    model = tiny.vit(torch.float32)
    predictor = Predictor(model, device="cpu", batch=2)
    image = Image.fromarray(np.array(photo(30, 50, 0)))
    image.save(tmp_path / "a.png")
    array = np.array(image)
    forms = [str(tmp_path / "a.png"), tmp_path / "a.png", (tmp_path / "a.png").read_bytes(), image, array]
    forms.append(torch.from_numpy(array).permute(2, 0, 1))
    expected = predictor(forms[0], k=3)
    assert [type(one) for one in expected] == [Prediction] * 3
    assert sum(one.probability for one in predictor(array, k=7)) == pytest.approx(1, abs=1e-5)
    for one in forms:
        assert predictor(one, k=3) == expected
        torch.testing.assert_close(predictor.features(one), predictor.features(forms[0]))
    labels = [[one.label for one in found] for found in predictor(forms, k=3)]
    assert labels == [[one.label for one in expected]] * len(forms)
    assert predictor.features(forms).shape == (6, *predictor.features(image).shape)
    assert predictor(iter(forms[:1]), k=3) == [expected]


def test_a_tensor_of_the_models_size_is_not_resized() -> None:
    predictor = Predictor(tiny.vit(torch.float32), device="cpu", preprocess=Preprocess(resize="crop", crop=0.5))
    batch = torch.rand(3, 3, *predictor.size)
    with torch.no_grad():
        logits, features = predictor.model(batch), predictor.model.features(batch)
    torch.testing.assert_close(predictor.features(batch), features)
    assert [found[0].label for found in predictor(batch)] == [str(at) for at in logits.argmax(1).tolist()]
    mixed = predictor.stack([batch[0], np.zeros((9, 9, 3), np.uint8)])
    assert torch.equal(mixed[0], batch[0])
    larger = torch.rand(3, 60, 60)
    as_bytes = larger.mul(255).round().byte().permute(1, 2, 0).numpy()
    assert torch.equal(predictor.load_image(larger), predictor.load_image(as_bytes))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(ImageError, match=r"notes\.txt"):
        Predictor(tiny.vit(torch.float32), device="cpu")(tmp_path / "notes.txt")


def test_class_names_are_the_models_the_callers_imagenets_or_numbers(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.vit(torch.float32, classes=3)
    assert Predictor(model).class_names == ("0", "1", "2")
    assert Predictor(model, class_names=["a", "b", "c"]).class_names == ("a", "b", "c")
    with pytest.raises(ValueError, match="2 names"):
        Predictor(model, class_names=["a", "b"])
    assert not caplog.records
    assert Predictor(tiny.vit(torch.float32, classes=1000)).class_names[:2] == ("tench", "goldfish")
    assert len(caplog.records) == 1


def test_assumptions_about_a_bare_file_are_one_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    Predictor(tmp_path / "m.safetensors", device="cpu")
    header, *lines = caplog.messages
    assert header == f"note: {tmp_path / 'm.safetensors'}"
    assert all(line.startswith("  ") for line in lines)
    assert sum("--mean" in line for line in lines) == 1
    caplog.clear()
    given = {"mean": 0.5, "std": 0.5, "resize": "crop", "crop": 0.9, "interpolation": "bicubic"}
    predictor = Predictor(tmp_path / "m.safetensors", device="cpu", **given)
    assert not any("--mean" in line for line in caplog.messages)
    assert predictor.preprocess.crop == 0.9


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
