"""The first hour with one's own images: wrong folders give one clear line, messy folders work."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pictures import encode, jpeg, noise, photo, plant, plant_classes, png
from PIL import Image
from shell import Capture, run

from plainvit.config import Augment, Config
from plainvit.data.decode import DataError
from plainvit.data.loader import Loader
from plainvit.data.sources import open_source
from plainvit.data.splits import open_splits

# Wrong folders --------------------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Path], object]] = {
    "one class": lambda root: plant_classes(root, {"a": 5}),
    "one image per class": lambda root: plant_classes(root, {"a": 1, "b": 1, "c": 1}),
    "fewer images than classes": lambda root: (plant_classes(root, {"a": 1, "b": 1}), (root / "c").mkdir()),
    "a file": lambda root: root.write_bytes(jpeg()),
    "a broken link": lambda root: root.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_folder_is_one_line_and_exit_code_3(tmp_path: Path, capsys: Capture, kind: str) -> None:
    root = tmp_path / "photos"
    WRONG[kind](root)
    with pytest.raises(DataError):
        open_splits(Config(data=str(root), holdout=0.2))
    code, out, err = run(capsys, "train", "photos", "--data", root, "--holdout", 0.2, "--out", tmp_path / "run")
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert len(err) < 400
    assert not (tmp_path / "run").exists()


def test_few_images_can_be_trained_on_without_labels_or_holding_out(tmp_path: Path) -> None:
    one_class = plant_classes(tmp_path / "one", {"all": 5})
    assert len(open_splits(Config(data=str(one_class), objective="mae")).train) == 5
    one_each = plant_classes(tmp_path / "each", {"a": 1, "b": 1})
    assert len(open_splits(Config(data=str(one_each))).train) == 2


# Messy folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Photos as people have them, in classes named in three scripts."""
    exif = Image.Exif()
    exif[0x0112] = 6
    transparent = np.dstack([noise(24, 24), np.full((24, 24), 128, np.uint8)])
    whole = jpeg(5, 60, 60, quality=95)
    return plant(
        tmp_path / "photos",
        {
            "🐶/alpha.png": encode(transparent),
            "🐶/cmyk.jpg": encode(photo(30, 40).convert("CMYK"), "JPEG"),
            "🐶/turned.jpg": encode(photo(30, 40, 2), "JPEG", exif=exif),
            "🐶/same.png": png(3),
            "猫/same too.png": png(3),
            "猫/notes.txt": b"what the photos show",
            "猫/cut.jpg": whole[: len(whole) // 2],
            "猫/grey 🎉.png": encode(photo(20, 20, 4).convert("L"), "PNG"),
            "Füchse & Co/not an image.jpg": b"<html>404</html>",
            **{f"Füchse & Co/{i}.webp": encode(photo(20, 30, 10 + i), "WEBP") for i in range(4)},
        },
    )


def test_a_messy_folder_can_be_trained_on(messy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plainvit.data.workers.BAD_FRACTION", 0.5)  # 2 of 12 are many
    source = open_source(str(messy))
    assert source.classes == ("Füchse & Co", "猫", "🐶")
    for mode in ("streamed", "cached", "resident"):
        loader = Loader(source, batch=12, size=(16, 16), augment=Augment(), workers=0, mode=mode)
        seen = np.concatenate([batch.index for batch in loader.batches(0, 3)])
        assert {source.name(index) for index in loader.bad} == {"Füchse & Co/not an image.jpg", "猫/cut.jpg"}
        assert len(set(seen)) == 10
