"""ImageNet-1k's class names against the libraries that publish them."""

import pytest

from plainvit.data.imagenet import class_names, wordnet_ids


def test_wordnet_ids_equal_timms():
    info = pytest.importorskip("timm.data").ImageNetInfo("imagenet-1k")
    assert list(wordnet_ids()) == [info.index_to_label_name(label) for label in range(1000)]


def test_class_names_equal_torchvisions():
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    assert list(class_names()) == _IMAGENET_CATEGORIES


def test_class_names_are_among_the_lemmas_of_their_wordnet_id():
    info = pytest.importorskip("timm.data").ImageNetInfo("imagenet-1k")
    others = {"crane bird": "crane", "maillot tank suit": "maillot, tank suit"}  # torchvision's, so that names differ
    for wordnet_id, name in zip(wordnet_ids(), class_names(), strict=True):
        lemmas = info.label_name_to_description(wordnet_id)
        assert name.lower() in [*lemmas.lower().split(", ")] or others[name] == lemmas


def test_class_names_are_unique():
    assert len(set(class_names())) == len(set(wordnet_ids())) == 1000
