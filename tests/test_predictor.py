"""Predictor: images in several forms, the state of the caller's model, and timm's models."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from pictures import photo
from PIL import Image

from plainvit.config import Preprocess
from plainvit.data.decode import ImageError
from plainvit.evaluate.predictor import Prediction, Predictor

# The model stays the caller's -----------------------------------------------------------------------------------------


def test_an_option_that_needs_a_weights_file_is_an_error_for_a_model() -> None:
    with pytest.raises(ValueError, match="image_size, mean"):
        Predictor(tiny.vit(torch.float32), image_size=48, mean=0.1)


def test_a_predictor_leaves_the_model_on_its_device() -> None:
    model = tiny.vit(torch.float32).to("meta")
    predictor = Predictor(model)
    assert predictor.device == "meta"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    with pytest.raises(ValueError, match="meta"):
        Predictor(model, device="cpu")


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
    assert [type(prediction) for prediction in expected] == [Prediction] * 3
    assert sum(probability for _, probability in predictor(array, k=7)) == pytest.approx(1, abs=1e-5)
    for form in forms:
        assert predictor(form, k=3) == expected
        torch.testing.assert_close(predictor.features(form), predictor.features(forms[0]))
    labels = [[label for label, _ in predictions] for predictions in predictor(forms, k=3)]
    assert labels == [[label for label, _ in expected]] * len(forms)
    assert predictor.features(forms).shape == (6, *predictor.features(image).shape)
    assert predictor(iter(forms[:1]), k=3) == [expected]
    assert (len(predictor(array)), len(predictor(array, k=8))) == (5, 7)
    with pytest.raises(ValueError, match="k must"):
        predictor(array, k=0)
    assert predictor([]) == []
    with pytest.raises(ValueError, match="images is empty"):
        predictor.features([])


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


@pytest.mark.parametrize(
    "pixels",
    [
        *(np.zeros((5, 5), np.uint8), np.zeros((5, 5, 4), np.uint8), np.zeros((5, 5, 3))),
        torch.full((3, 60, 60), 200),  # integers would be read as if they were floats: as white
    ],
)
def test_pixels_of_another_type_or_shape_are_an_error(pixels: np.ndarray | torch.Tensor) -> None:
    with pytest.raises(ValueError, match="uint8"):
        Predictor(tiny.vit(torch.float32), device="cpu").load_image(pixels)
