"""ImageNet-1k's class names against the libraries that publish them."""

import json
from pathlib import Path

import pytest
from pictures import plant_classes

from plainvit.cli import main
from plainvit.data.imagenet import class_names, readable_names, wordnet_ids
from plainvit.data.sources import open_source


def test_class_names_equal_torchvisions() -> None:
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    assert list(class_names()) == _IMAGENET_CATEGORIES
    assert len(set(class_names())) == len(set(wordnet_ids())) == 1000  # tests/test_labels.py has the ids


def test_wordnet_folders_are_in_imagenets_order_with_readable_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [999, 0, 517, 134, 7]
    root = plant_classes(tmp_path, {wordnet_ids()[label]: 1 for label in labels})
    source = open_source(str(root))
    assert source.classes == tuple(wordnet_ids()[label] for label in sorted(labels))
    assert readable_names(source.classes) == ("tench", "cock", "crane bird", "crane", "toilet tissue")
    main(["data", "info", str(root), "--json"])
    assert json.loads(capsys.readouterr().out)["class_names"] == list(readable_names(source.classes))


@pytest.mark.parametrize("classes", [(), ("cat", "dog"), ("n01440764", "cat"), ("n99999999",)])
def test_other_class_names_are_unchanged(classes: tuple[str, ...]) -> None:
    assert readable_names(classes) == classes
