"""Which predictions are correct: class names in any order, and the protocols of ImageNet's variants."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from pictures import encode, plant, plant_classes, png, real_data
from shell import Capture, evaluate_to, save_model
from torch import Tensor, nn

import plainvit
from plainvit.analyse.evaluation import evaluate_model
from plainvit.config import About, Preprocess
from plainvit.data.decode import DataError
from plainvit.data.imagenet import class_names, wordnet_ids
from plainvit.data.known import SETS, real_labels
from plainvit.data.sources import Source, Subset, open_source
from plainvit.evaluate.class_names import match_classes, read_class_names
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.evaluate.labels import align
from plainvit.evaluate.permuted_labels import find_permutation
from plainvit.evaluate.predictor import Predictor

pytestmark = pytest.mark.usefixtures("no_report")

# ImageNet's variants --------------------------------------------------------------------------------------------------


def info(name: str) -> list[str]:
    """A list that timm ships."""
    timm = importlib.util.find_spec("timm")  # importing it takes seconds
    if not timm or not timm.origin:
        pytest.skip("timm is not installed")
    return (Path(timm.origin).parent / "data" / "_info" / name).read_text(encoding="utf-8").splitlines()


def test_the_classes_of_imagenet_equal_timms() -> None:
    assert list(wordnet_ids()) == info("imagenet_synsets.txt")


class PixelModel(nn.Module):
    """A model whose predicted class is in the pixel: red + 256 green; the runner-up is 7 more."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(classes=classes, image_size=(1, 1))
        self.about = About()

    def forward(self, images: Tensor) -> Tensor:
        guess = images[:, 0, 0, 0].long() + 256 * images[:, 1, 0, 0].long()
        runner_up = (guess + 7) % self.config.classes
        logits = torch.zeros(len(images), self.config.classes)
        logits.scatter_(1, guess.unsqueeze(1), 3.0)
        return logits.scatter_(1, runner_up.unsqueeze(1), 2.0)


class Pixels(Source):
    """Images of one pixel, whatever their names."""

    def __init__(self, guesses: np.ndarray, names: list[str], labels: np.ndarray, classes: tuple[str, ...]) -> None:
        self.predictions, self.names, self.labels, self.classes = guesses, names, labels.astype(np.int32), classes
        self.spec, self.split = "imagenet-real", "val"

    def read(self, index: int) -> np.ndarray:
        guess = int(self.predictions[index])
        return np.array([[[guess % 256, guess // 256, 0]]], np.uint8)

    def name(self, index: int) -> str:
        return self.names[index]


def test_real_equals_a_direct_count() -> None:
    root = real_data()
    lists = json.loads((root / "imagenet-real" / "real.json").read_text())
    assert sum(map(bool, lists)) == 46_837
    rng = np.random.default_rng(0)
    order = rng.permutation(50_000)[:5000]  # the files of class folders are not in the official order
    guesses = np.array([one[0] if one and rng.random() < 0.7 else rng.integers(1000) for one in lists])
    names = [f"n01440764/ILSVRC2012_val_{number + 1:08d}.JPEG" for number in order]
    source = Pixels(guesses[order], names, rng.integers(0, 1000, 5000), wordnet_ids())
    labels = align(source, 1000, data_root=root)
    evaluation_set = EvaluationSet(labels.source, (1, 1), Preprocess(), batch=1000)
    result = classify(Predictor(PixelModel(1000), device="cpu"), evaluation_set, labels)
    right = [guesses[number] in lists[number] for number in order if lists[number]]
    assert result.correct.tolist() == right
    assert labels.left_out == 5000 - len(right) > 0
    # The probability of the correct classes is the sum of theirs
    first = next(number for number in order if lists[number])
    given = {guesses[first]: np.exp(3), (guesses[first] + 7) % 1000: np.exp(2)}
    probability = sum(given.get(one, 1.0) for one in lists[first]) / (np.exp(3) + np.exp(2) + 998)
    assert result.nll[0] == pytest.approx(-np.log(probability), rel=1e-9)


def empty_folders(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def test_real_needs_the_official_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(tmp_path, {"imagenet-real/real.json": json.dumps([[0]] * 50_000).encode()})
    assert len(real_labels(tmp_path)) == 50_000
    for name in ("val-00.parquet#0", "a/ILSVRC2012_val_00000000.JPEG", "a/ILSVRC2012_val_00050001.JPEG"):
        source = Pixels(np.zeros(1), [name], np.zeros(1), wordnet_ids())
        with pytest.raises(DataError, match="ILSVRC2012_val_00000001"):
            align(source, 1000, data_root=tmp_path)
    source = Pixels(np.zeros(1), ["a/ILSVRC2012_val_00050000.JPEG"], np.zeros(1), source.classes)
    assert align(source, 1000, class_names(), data_root=tmp_path).targets.tolist() == [[0]]
    assert not caplog.records
    assert align(source, 1000, tuple(reversed(class_names())), data_root=tmp_path).targets.tolist() == [[0]]
    assert "not ImageNet's" in caplog.text
    source = Pixels(np.zeros(2), ["a/ILSVRC2012_val_00000007.JPEG"] * 2, np.zeros(2), source.classes)
    with pytest.raises(DataError, match="same number"):
        align(source, 1000, data_root=tmp_path)


@pytest.mark.parametrize(("spec", "folder"), [("imagenet-a", "cat"), ("imagenet-sketch", "0")])
def test_a_folder_that_is_no_class_of_imagenet_is_a_data_error(spec: str, folder: str) -> None:
    source = Pixels(np.zeros(1), ["a.jpg"], np.zeros(1), (folder,))
    source.spec = spec
    with pytest.raises(DataError, match=folder):
        align(source, 1000)


FOLDERS = {  # known set -> three of its folders and their classes in ImageNet, and how many folders it has
    "imagenet-v2": ({"0": 0, "10": 10, "999": 999}, [str(one) for one in range(1000)]),
    "imagenet-sketch": ({"n01440764": 0, "n01443537": 1, "n15075141": 999}, None),
    "imagenet-a": ({"n01498041": 6, "n02119022": 277, "n12267677": 988}, "imagenet_a_synsets.txt"),
    "imagenet-r": ({"n01443537": 1, "n02119022": 277, "n12267677": 988}, "imagenet_r_synsets.txt"),
}


@pytest.mark.parametrize("name", tiny.mostly_slow(FOLDERS, 4))
def test_subsets_of_imagenet_are_scored_among_their_classes(name: str, tmp_path: Path) -> None:
    chosen, listed = FOLDERS[name]
    every = listed if isinstance(listed, list) else info(listed or "imagenet_synsets.txt")
    folder = empty_folders(tmp_path / name, every)
    plant(folder, {f"{one}/{at}.png": png(13 * label + at) for one, label in chosen.items() for at in range(4)})
    predictor = Predictor(save_model(tmp_path / "model.safetensors", classes=1000), device="cpu")
    labels = align(open_source(name, "test", data_root=tmp_path), 1000, predictor.class_names)
    result = classify(predictor, EvaluationSet(labels.source, predictor.size, predictor.preprocess), labels)
    wnids = wordnet_ids()
    allowed = [int(one) if one.isdecimal() else wnids.index(one) for one in every]  # columns, in the folders' order
    for at, (predicted, right) in enumerate(zip(result.predictions[:, 0], result.correct, strict=True)):
        logits = predictor.logits(predictor.stack([labels.source.read(at)]))[0]
        best = max(allowed, key=lambda column: float(logits[column]))
        assert best == (predicted if name == "imagenet-v2" else wnids.index(sorted(every)[predicted]))
        assert right == (best == chosen[labels.source.name(at).split("/")[0]])
    assert len(result.labels) == 12
    assert SETS[name].classes == len(every)
    assert (name in labels.rule) == (len(every) == 200)


# Classes by name ------------------------------------------------------------------------------------------------------


class Classes(Pixels):
    """Data with these classes: `count` images of each."""

    def __init__(self, names: tuple[str, ...], count: int = 1) -> None:
        labels = np.repeat(np.arange(len(names)), count)
        super().__init__(labels, list(map(str, range(len(labels)))), labels, names)
        self.spec = "photos"


ANIMALS = ("ant", "bee", "cat", "dog", "elk")


@pytest.mark.parametrize(
    ("data", "model", "expected", "warned"),
    [
        (ANIMALS, ANIMALS, [0, 1, 2, 3, 4], False),
        (ANIMALS, ("dog", "ant", "elk", "cat", "bee"), [1, 4, 3, 0, 2], True),
        (("Cat", "cat"), ("cat", "Cat"), [1, 0], True),  # exact names come first
        (("Golden_Retriever", "tench"), ("tench, Tinca tinca", "golden retriever"), [1, 0], True),
        (("elk", "bee"), ANIMALS, [4, 1], True),  # some of the model's classes
        (("0", "1", "10", "2"), (), [0, 1, 10, 2], True),
        (tuple("0123456789"), (), list(range(10)), False),  # one order, as numbers and as text
        (("n02099601", "n01440764"), class_names(), [207, 0], True),
        (("n02099601_golden", "tench"), class_names(), [207, 0], True),
        (("golden retriever", "great white shark"), wordnet_ids(), [207, 2], True),
        (("un", "deux"), ("ant", "bee"), [0, 1], True),  # no name in common: by order
        (("ant", "bee"), (), [0, 1], True),
        (("ant", "bees"), ("ant", "bee"), [0, 1], True),  # one spelled differently, in its place
        (("207",), class_names(), [207], True),
    ],
)
def test_classes_are_matched_by_name_else_by_number_else_by_order(
    data: tuple[str, ...],
    model: tuple[str, ...],
    expected: list[int],
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A match that may be wrong is reported."""
    classes = len(model) or max(len(data), 11 * ("10" in data))
    assert match_classes(Classes(data), classes, model).tolist() == expected
    assert bool(caplog.records) == warned


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (("ant", "bee", "cat"), ("bee", "cat", "dog")),  # moved, and one unknown
        (("ant", "wasp"), ANIMALS),
        (("un", "deux"), ANIMALS),  # none known, another number
        (("Ant", "ant"), ("ant", "bee")),  # two classes of the data are the same one
        (("7", "8"), ANIMALS),
        (ANIMALS, ("ant", "bee")),
    ],
)
def test_names_that_do_not_match_are_a_data_error(data: tuple[str, ...], model: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="--class-names"):
        match_classes(Classes(data), len(model), model)


def test_classes_of_neither_the_names_nor_the_numbers_of_the_model_are_named() -> None:
    with pytest.raises(
        DataError, match=r"classes '0', '1', '2', \.\.\., but not 'ant', 'bee', 'cat', \.\.\. of photos"
    ):
        match_classes(Classes(ANIMALS), 10, ())


def test_classes_in_another_order_are_scored_by_name(tmp_path: Path) -> None:
    source = open_source(str(plant_classes(tmp_path / "photos" / "test", dict.fromkeys(ANIMALS, 5)).parent), "test")
    shuffled = ("dog", "ant", "elk", "cat", "bee")
    model = Predictor(save_model(tmp_path / "model.safetensors", shuffled, classes=5), device="cpu")
    result = classify(model, EvaluationSet(source, model.size, model.preprocess), align(source, 5, model.class_names))
    predicted = model.logits(model.stack(source.image(index) for index in range(25))).argmax(1).tolist()
    assert [source.classes[one] for one in result.predictions[:, 0]] == [shuffled[one] for one in predicted]
    assert len(set(predicted)) > 1
    assert result.correct.tolist() == [
        shuffled[one] == ANIMALS[label] for one, label in zip(predicted, source.labels, strict=True)
    ]


def test_published_weights_know_the_names_of_real_photos(caplog: pytest.LogCaptureFixture) -> None:
    """48 photos of ImageNet, by its readable names; the weights have no names."""
    root = real_data()
    weights = root / "weights" / "vit_ti16_augreg.safetensors"
    source, predictor = open_source(str(root / "imagenet-photos")), Predictor(weights, device="cpu")
    labels = align(source, predictor.classes, predictor.class_names)
    paths = [image["path"] for image in pq.read_table(root / "imagenet-photos")["image"].to_pylist()]
    truth = [wordnet_ids().index(path.partition("_")[0]) for path in paths]  # n01675722_banded_gecko.JPEG
    assert labels.targets[:, 0].tolist() == truth
    assert "ImageNet-1k's are used" in caplog.text
    result = classify(
        predictor, EvaluationSet(Subset(source, np.arange(8)), predictor.size, predictor.preprocess), labels
    )
    assert result.correct.sum() > 5


# Names from a file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ant\nbee\n", ("ant", "bee")),
        ('["ant", "bee"]', ("ant", "bee")),
        ("\u00e4\nbee, or wasp", ("\u00e4", "bee, or wasp")),
        ("ant\nbee\ncat", None),
        ('["ant"', None),
        ('{"ant": 0, "bee": 1}', None),
        ("", None),
        (None, None),
    ],
)
def test_class_names_are_read_from_lines_or_json(text: str | None, expected: object, tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    if expected is not None:
        assert read_class_names(path, 2) == expected
        return
    with pytest.raises(ValueError, match=r"--class-names.*(no such file|one name per line|one name per class)"):
        read_class_names(path, 2)


def test_a_huge_file_of_class_names_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"  # given by mistake
    with path.open("wb") as file:
        file.truncate(2**40)  # it takes no space
    with pytest.raises(ValueError, match="16 MiB"):
        read_class_names(path, 2)


def test_class_names_of_a_file_replace_the_models(tmp_path: Path, capsys: Capture) -> None:
    photos = plant_classes(tmp_path / "photos", {"ant": 4, "bee": 4})
    model = str(save_model(tmp_path / "model.safetensors", ("x", "y"), classes=2))
    counts = []
    for order in ("ant\nbee", "bee\nant"):
        (tmp_path / "names.txt").write_text(order)
        words = (model, "--data", str(photos), "--class-names", str(tmp_path / "names.txt"))
        counts.append(evaluate_to(capsys, tmp_path / "out", *words)[0]["counts"]["top1"])
    assert sum(counts) == 8
    assert Predictor(model, class_names=tmp_path / "names.txt").class_names == ("bee", "ant")


# Permuted labels ------------------------------------------------------------------------------------------------------


def make_predictions(top1: float, classes: int, count: int, permutation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions that are permuted, `top1` of them in one way and the others at random."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), count)
    guessed = rng.integers(0, classes, len(labels))
    return labels, np.where(rng.random(len(labels)) < top1, permutation[labels], guessed)


def test_permuted_labels_are_found_with_their_mapping() -> None:
    permutation = np.roll(np.arange(1000), 1)
    labels, predicted = make_predictions(0.8, 1000, 6, permutation)
    found = find_permutation(labels, predicted)
    assert found is not None
    assert found.accuracy == pytest.approx(0.8, abs=0.05)
    assert np.mean([permutation[label] == prediction for label, prediction in found.mapping.items()]) > 0.95


@pytest.mark.parametrize(
    ("top1", "classes", "count", "kind"),
    [
        (0.8, 1000, 6, "identity"),
        (0.1, 10, 30, "identity"),
        (0.0, 1000, 6, "shifted"),  # random predictions
        (0.4, 10, 30, "shifted"),
        (1.0, 1000, 1, "shifted"),  # one image of each class proves nothing
        (1.0, 10, 30, "swapped"),  # two of ten
        (0.0, 2, 40, "shifted"),
    ],
)
def test_other_errors_are_not_called_permuted(top1: float, classes: int, count: int, kind: str) -> None:
    permutation = np.arange(classes)
    if kind == "shifted":
        permutation = np.roll(permutation, 1)
    elif kind == "swapped":
        permutation[:2] = 1, 0
    assert find_permutation(*make_predictions(top1, classes, count, permutation)) is None


def test_evaluate_warns_of_permuted_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is right about four shades of gray, evaluated on renamed folders."""
    names, renamed = ("black", "dark", "light", "white"), ("dark", "light", "white", "black")
    images = [np.full((16, 16, 3), 80 * at, np.uint8) for at in range(4)]
    predictor = Predictor(save_model(tmp_path / "model.safetensors", names, classes=4), device="cpu")
    head: Any = predictor.model.head
    features = torch.cat((predictor.features(images), torch.ones(4, 1)), 1)  # [4, D + 1]
    solved = torch.linalg.lstsq(features, 20 * torch.eye(4)).solution
    head.weight.data, head.bias.data = solved[:-1].T.contiguous(), solved[-1]
    model = plainvit.save(predictor.model, tmp_path / "model.safetensors")
    for folder, classes in (("right", names), ("wrong", renamed)):
        plant(tmp_path / folder, {f"{classes[at % 4]}/{at}.png": encode(images[at % 4]) for at in range(24)})
        done = evaluate_model(model, str(tmp_path / folder), out=tmp_path / "out", device="cpu", quiet=True)
        assert done
        assert done.card.metrics["top1"] == (folder == "right")
        assert ("permuted" in caplog.text) == (folder == "wrong")
    assert "'black' -> 'white'" in caplog.text
