"""Known sets, digits and shapes: against published counts and names, scikit-learn's digits and frozen hashes."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import catch_error, plant, plant_classes, png, real_data, write_parquet
from shell import Capture, report
from sklearn.datasets import load_digits

from plainvit.data import generated, known
from plainvit.data.decode import DataError
from plainvit.data.imagenet import class_names, readable_names, wordnet_ids
from plainvit.data.sources import Source, open_source

# Known sets -----------------------------------------------------------------------------------------------------------

COUNTS = {
    ("cifar10", "train"): (50_000, 10),
    ("tiny-imagenet", "val"): (10_000, 200),
    ("oxford-pets", "test"): (3_669, 37),
    ("flowers102", "val"): (1_020, 102),
    ("flowers102", "test"): (6_149, 102),
}


@pytest.mark.parametrize(("name", "split"), COUNTS)
def test_known_sets_have_their_published_size(name: str, split: str) -> None:
    source = open_source(name, split, data_root=real_data())
    assert (len(source), len(source.classes)) == COUNTS[name, split]
    assert np.array_equal(np.unique(source.labels), np.arange(len(source.classes)))
    assert source.image(len(source) - 1).ndim == 3


def test_a_wrong_number_of_classes_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "cifar10" / "train-00.parquet", [png(i) for i in range(12)], list(range(12)))
    message = catch_error("cifar10", data_root=tmp_path)
    assert "10" in message
    assert "12" in message


@pytest.mark.parametrize("name", ["cifar10", "flowers102", "imagenet-a"])
def test_known_sets_are_read_from_the_documented_folders(name: str, tmp_path: Path) -> None:
    """As the errors and docs/data.md draw them."""
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    assert all(f"DIR/{known.describe_layout(one)}" in page for one in (*known.SETS,)[:12])
    one, splits = known.SETS[name], re.search(r"\{(.*)\}", known.describe_layout(name))
    for split in splits[1].split(",") if splits else ("",):
        place = known.describe_layout(name).replace(splits[0] if splits else "?", split).removesuffix("/CLASS")
        plant_classes(tmp_path / place, {f"{k:03d}": 1 + (split == "test") for k in range(one.classes)})
    assert len(open_source(name, "test", data_root=tmp_path)) == one.classes * (1 + bool(splits))


def test_imagenet_tests_on_its_validation_set(tmp_path: Path) -> None:
    for split, count in (("train", 1000), ("val", 1001)):
        images = [png(0, 2, 2)] * count
        write_parquet(tmp_path / "imagenet" / f"{split}-00.parquet", images, [i % 1000 for i in range(count)])
    assert len(open_source("imagenet", "test", data_root=tmp_path)) == 1001
    assert len(open_source("imagenet", "val", data_root=tmp_path)) == 1001
    assert len(open_source("imagenet-real", "val", data_root=tmp_path)) == 1001


LAST = ("", "not json", "{}", "null", [[1], [1]], [5], [[1000]], [[-1]], [["a"]], [[0.5]])  # in place of the last list


@pytest.mark.parametrize("last", LAST, ids=range(len(LAST)))
def test_an_invalid_or_missing_real_json_is_rejected(tmp_path: Path, last: Any) -> None:
    text = last if isinstance(last, str) else json.dumps([[1]] * 49_999 + last)
    plant(tmp_path, {"imagenet-real/real.json": text.encode()})
    with pytest.raises(DataError, match=r"real\.json"):
        known.real_labels(tmp_path)
    with pytest.raises(DataError, match=r"real\.json"):
        known.real_labels(tmp_path / "nowhere")


# ImageNet's classes ---------------------------------------------------------------------------------------------------


def test_class_names_equal_torchvisions() -> None:
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    assert list(class_names()) == _IMAGENET_CATEGORIES
    assert len(set(class_names())) == len(set(wordnet_ids())) == 1000  # tests/test_labels.py has the ids


def test_wordnet_folders_are_in_imagenets_order_with_readable_names(tmp_path: Path, capsys: Capture) -> None:
    labels = [999, 0, 517, 134, 7]
    root = plant_classes(tmp_path, {wordnet_ids()[label]: 1 for label in labels})
    source = open_source(str(root))
    assert source.classes == tuple(wordnet_ids()[label] for label in sorted(labels))
    assert readable_names(source.classes) == ("tench", "cock", "crane bird", "crane", "toilet tissue")
    assert report(capsys, "data", "info", root)["class_names"] == list(readable_names(source.classes))


# digits ---------------------------------------------------------------------------------------------------------------


def test_digits_equal_those_of_scikit_learn() -> None:
    reference = load_digits()
    gray = np.round(reference.images * 255 / 16).astype(np.uint8)
    numbers = np.arange(1797)
    for split, chosen in (("train", numbers % 5 != 0), ("test", numbers % 5 == 0)):
        source = open_source("digits", split)
        found = np.stack([source.image(i) for i in range(len(source))])
        assert np.array_equal(found, np.repeat(gray[chosen][..., None], 3, -1))
        assert np.array_equal(source.labels, reference.target[chosen])
        assert source.classes == tuple("0123456789")


# shapes ---------------------------------------------------------------------------------------------------------------


def digests(source: Source, indices: Sequence[int]) -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(source.read(i)).tobytes()).hexdigest() for i in indices]


# Frozen: a new NumPy must not change a set that results were reported on
GOLDEN_SHAPES = [
    "a5f3ec26ab8b7d5a4dc1600967b99c8aa51751423f84e33b095bfac01bf5dfd0",
    "1ee3f64e29ca5cf71358fc9dd5590c3fd4aa768015f3f322c91f0e00788d7c94",
]


def test_shapes_equal_golden_hashes() -> None:
    assert digests(open_source("shapes:size=32"), [0, 1234]) == GOLDEN_SHAPES


def test_shapes_do_not_depend_on_the_count_and_differ_between_splits() -> None:
    few, many = open_source("shapes:size=16,count=30"), open_source("shapes:size=16,count=100000")
    assert digests(few, range(30)) == digests(many, range(30))
    assert few.labels.tolist() == many.labels[:30].tolist()
    every = {
        digest
        for split in ("train", "val", "test")
        for digest in digests(open_source("shapes:size=16", split), range(30))
    }
    assert len(every) == 90
    assert np.bincount(open_source("shapes:size=8,count=90,classes=3").labels).tolist() == [30] * 3
    assert (len(open_source("shapes")), len(open_source("shapes", "test"))) == (10_000, 2_000)


def test_masks_have_the_stated_position_and_area() -> None:
    """Its pixels are within reach of the center, its area is the shape's, and circles are filled to their radius."""
    source = generated.shapes("train", "size=96,count=60")
    rows, columns = np.mgrid[:96, :96] + 0.5
    for index in range(60):
        pixels, mask, (row, column, radius) = source.draw(index)
        distance = np.hypot(rows - row, columns - column) / radius
        assert 0.18 * 96 <= radius <= 0.32 * 96
        assert distance[mask].max() < 1.15
        assert 0.2 < mask.sum() / (np.pi * radius**2) < 1.05
        assert np.array_equal(pixels, source.read(index))
        if source.classes[source.labels[index]] == "circle":
            assert np.array_equal(mask, distance < 1)


BAD_OPTIONS = ["sise=64", "size=x", "size=", "size=7", "size=4097", "size=-8", "classes=11", "classes=0", "count=0"]


@pytest.mark.parametrize("options", [*BAD_OPTIONS, f"count={10**18}"])
def test_invalid_options_of_shapes_are_rejected(options: str) -> None:
    with pytest.raises(ValueError, match="shapes") as caught:
        open_source(f"shapes:{options}")
    assert not isinstance(caught.value, DataError)
