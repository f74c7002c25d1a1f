"""Evaluation against scikit-learn, direct counts and authors' lists: numbers, label sets, processes, timm's models."""

import contextlib
import json
import logging
import os
import socket
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import small_runs
import tiny
import torch
from pictures import encode, jpeg, noise, photo, plant, plant_classes, png, real_data, write_parquet
from PIL import Image
from torch import Tensor, nn

import plainvit
from plainvit.analyse.evaluation import evaluate_model
from plainvit.analyse.subject import gather
from plainvit.cli import main
from plainvit.config import About, Preprocess
from plainvit.data.decode import DataError
from plainvit.data.known import SETS, real_labels
from plainvit.data.loader import evaluation_batches
from plainvit.data.sources import Source, open_source
from plainvit.data.splits import choose_split
from plainvit.evaluate.classify import Prepared, Result, classify
from plainvit.evaluate.labels import align, imagenet
from plainvit.evaluate.predictor import Predictor
from plainvit.evaluate.timm_models import PeerConfig, load_timm

Capture = pytest.CaptureFixture[str]


def saved(path: Path, names: tuple[str, ...] = (), **settings: Any) -> Path:
    """A small ViT on disk, with weights that give different guesses."""
    model = tiny.vit(torch.float32, **{"image_size": (16, 16)} | settings)
    model.about = About(class_names=names)
    plainvit.save(model, path)
    return path


def refused(capsys: Capture, *words: str, code: int = 3) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    out, err = capsys.readouterr()
    assert caught.value.code == code, err
    assert out == ""
    assert err.splitlines()[-1].startswith("plainvit: ")
    return err.splitlines()[-1]


# Numbers --------------------------------------------------------------------------------------------------------------


def scores(count: int = 400, classes: int = 7, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Result]:
    """Labels, probabilities [N, K], and the Result of them; one class is never right, one is never there."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes - 1, count)
    logits = rng.normal(size=(count, classes))
    logits[np.arange(count), labels] += np.where(labels == 2, -9, 1.5)
    given = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-given, axis=1)[:, :5]
    nll = -np.log(given[np.arange(count), labels])
    return labels, given, Result(labels, order, given.max(1), nll, np.arange(count), classes)


def test_metrics_equal_scikit_learns() -> None:
    from sklearn import metrics as sk  # here: the children of another test import this file too

    labels, given, result = scores()
    known = list(range(7))
    assert result.top1 == sk.accuracy_score(labels, given.argmax(1))
    assert result.top5 == sk.top_k_accuracy_score(labels, given, k=5, labels=known)
    assert result.numbers()["nll"] == pytest.approx(sk.log_loss(labels, given, labels=known), rel=1e-12)
    assert (result.confusion == sk.confusion_matrix(labels, given.argmax(1), labels=known)).all()
    found = result.by_class()
    expected = sk.precision_recall_fscore_support(labels, given.argmax(1), labels=known, zero_division=0)
    for name, column in zip(("precision", "recall", "f1", "images"), expected, strict=True):
        np.testing.assert_allclose(found[name], column, rtol=1e-12, err_msg=name)
    assert found["recall"][2] == 0
    assert found["images"][6] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_calibration_error_equals_that_of_scikit_learns_bins(seed: int) -> None:
    from sklearn.calibration import calibration_curve

    _, _, result = scores(seed=seed)
    result.probabilities[:6] = np.array([1 / 15, 2 / 15, 1.0, 0.2, 1 / 3, 0.0])  # some of them edges of bins
    accuracy, sure = calibration_curve(result.right, result.probabilities, n_bins=15, strategy="uniform")
    edges = np.linspace(0, 1, 16)
    counts = np.bincount(np.searchsorted(edges[1:-1], result.probabilities), minlength=15)
    weights = counts[counts > 0] / len(result.labels)
    assert result.calibration_error == pytest.approx((weights * np.abs(accuracy - sure)).sum(), rel=1e-12)


def test_a_calibrated_model_has_no_calibration_error() -> None:
    right = np.arange(1000) % 4 > 0  # three of four, at a probability of 0.75
    guesses = np.where(right, 1, 0)[:, None]
    ones = np.ones(1000, int)
    assert Result(ones, guesses, np.full(1000, 0.75), np.zeros(1000), ones, 2).calibration_error == pytest.approx(0)


# Every image once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 7, 13, 64])
def test_every_image_belongs_to_one_batch_of_one_process(batch: int, processes: int) -> None:
    source = open_source("shapes:size=8,count=31", "test")
    seen = [
        index
        for rank in range(processes)
        for made in evaluation_batches(
            source, batch=batch, size=(8, 8), preprocess=Preprocess(), rank=rank, world=processes
        )
        for index in made.index.tolist()
    ]
    assert sorted(seen) == list(range(len(source)))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_counts_are_the_same_for_any_batch(batch: int) -> None:
    model = tiny.vit(torch.float32, image_size=(8, 8), classes=10)
    source = open_source("digits", "test")
    predictor = Predictor(model, device="cpu")
    result = classify(predictor, Prepared(source, (8, 8), Preprocess(), batch=batch))
    logits = predictor.logits(predictor.stack(source.image(index) for index in range(len(source))))
    assert len(result.labels) == len(source)
    assert result.index.tolist() == list(range(len(source)))
    assert int(result.right.sum()) == int((logits.argmax(1).numpy() == source.labels).sum())


def work(model: Path, out: Path, rank: int, size: int, port: int, batch: int) -> None:
    """In a child: one of several processes of `plainvit evaluate`."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    words = ["evaluate", str(model), "--data", "digits", "--device", "cpu", "--out", str(out), "--batch", str(batch)]
    main([*words, "--json"])


@pytest.mark.parametrize(("processes", "batch"), [(2, 50), pytest.param(3, 7, marks=pytest.mark.slow)])
def test_several_processes_equal_one(processes: int, batch: int, tmp_path: Path, capsys: Capture) -> None:
    model = saved(tmp_path / "model.safetensors", image_size=(8, 8), classes=10)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = [
        small_runs.Child(work, model, tmp_path / "many", rank, processes, port, batch, log=tmp_path / f"{rank}.txt")
        for rank in range(processes)
    ]
    assert [child.wait(120) for child in children] == [0] * processes, children[0].said
    main(["evaluate", str(model), "--data", "digits", "--out", str(tmp_path / "one"), "--device", "cpu", "--json"])
    one = json.loads(capsys.readouterr().out)
    many = json.loads((tmp_path / "many" / "card.json").read_text())
    assert many["environment"]["processes"] == processes
    assert many["images"] == one["images"] == 360
    assert many["counts"] == one["counts"]
    assert many["metrics"]["nll"] == pytest.approx(one["metrics"]["nll"], rel=1e-6)
    rows = [pq.read_table(tmp_path / name / "images.parquet") for name in ("one", "many")]
    for column in ("name", "label", "guess", "right"):
        assert rows[0][column].to_pylist() == rows[1][column].to_pylist()
    assert "images" in children[0].said
    assert children[1].said == ""  # the first process speaks for all


# Label sets -----------------------------------------------------------------------------------------------------------


def info(name: str) -> list[str]:
    """A list that timm ships."""
    timm = pytest.importorskip("timm")
    return (Path(timm.__file__).parent / "data" / "_info" / name).read_text(encoding="utf-8").splitlines()


def test_the_classes_of_imagenet_and_its_subsets_equal_timms() -> None:
    lists = imagenet()
    assert lists["wnids"] == info("imagenet_synsets.txt")
    assert lists["imagenet-a"] == [int(one) for one in info("imagenet_a_indices.txt")]
    assert lists["imagenet-r"] == [int(one) for one in info("imagenet_r_indices.txt")]
    assert len(lists["imagenet-a"]) == len(lists["imagenet-r"]) == 200
    assert set(lists["sources"]) == set(lists) - {"sources"}


def test_objectnet_has_113_objects_of_imagenet() -> None:
    objects = imagenet()["objectnet"]
    numbers = [number for several in objects.values() for number in several]
    assert len(objects) == 113
    assert len(numbers) == len(set(numbers)) == 125
    words = dict(line.split("\t") for line in info("imagenet_synset_to_lemma.txt"))
    meant = {name: [words[imagenet()["wnids"][one]].split(",")[0] for one in objects[name]] for name in objects}
    named = [name for name in objects if set(name.replace("_", " ").split()) & set(" ".join(meant[name]).split())]
    assert len(named) > 75  # most share a word with their class; of the others, those with several classes by hand:
    assert meant["alarm_clock"] == ["analog clock", "digital clock"]
    assert meant["chair"] == ["barber chair", "folding chair", "rocking chair"]
    assert meant["still_camera"] == ["Polaroid camera", "reflex camera"]
    assert meant["wheel"] == ["car wheel", "paddlewheel"]
    assert meant["winter_glove"] == ["mitten"]
    assert meant["full_sized_towel"] == ["bath towel"]
    assert meant["drinking_cup"] == ["cup"]


class Told(nn.Module):
    """A model whose prediction is encoded in the pixel: red + 256 green."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.config = PeerConfig("told", classes, (1, 1), (0.0,), (1.0,))
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
        self.guesses, self.names, self.labels, self.classes = guesses, names, labels.astype(np.int32), classes
        self.spec, self.split = "imagenet-real", "val"

    def read(self, index: int) -> np.ndarray:
        guess = int(self.guesses[index])
        return np.array([[[guess % 256, guess // 256, 0]]], np.uint8)

    def name(self, index: int) -> str:
        return self.names[index]


class Counted(Pixels):
    """Black pixels; how often they are read is counted."""

    def __init__(self, images: int) -> None:
        super().__init__(np.zeros(images, int), [], np.zeros(images, int), ("black",))
        self.reads = 0

    def read(self, index: int) -> np.ndarray:
        self.reads += 1
        if self.reads > 9:
            raise ValueError("enough")
        return super().read(index)


def test_sets_below_two_gigabytes_are_prepared_once() -> None:
    for keep, reads in ((True, 4), (False, 8)):
        source = Counted(4)
        prepared = Prepared(source, (1, 1), Preprocess(), keep=keep)
        assert [len(batch.images) for _ in range(2) for batch in prepared.batches()] == [4, 4]
        assert source.reads == reads
    with pytest.raises(ValueError, match="enough"):  # 2.0 GB less 84,992 bytes: all are read
        Prepared(Counted(13_286), (224, 224), Preprocess(), batch=1).batches()
    source = Counted(13_287)
    next(iter(Prepared(source, (224, 224), Preprocess(), batch=1).batches()))
    assert source.reads == 1


def test_real_equals_a_direct_count_on_all_50_000_lists() -> None:
    root = real_data()
    lists = json.loads((root / "imagenet-real" / "real.json").read_text())
    rng = np.random.default_rng(0)
    order = rng.permutation(50_000)  # the files of class folders are not in the official order
    guesses = np.array([one[0] if one and rng.random() < 0.7 else rng.integers(1000) for one in lists])
    names = [f"n01440764/ILSVRC2012_val_{number + 1:08d}.JPEG" for number in order]
    source = Pixels(guesses[order], names, rng.integers(0, 1000, 50_000), tuple(imagenet()["wnids"]))
    labels = align(source, 1000, data_root=root)
    result = classify(
        Predictor(Told(1000), device="cpu"), Prepared(labels.source, (1, 1), Preprocess(), batch=4096), labels
    )
    right = [guess in answers for guess, answers in zip(guesses, lists, strict=True) if answers]
    assert len(result.labels) == len(right) == 46_837
    assert int(result.right.sum()) == sum(right)
    assert labels.left_out == 50_000 - 46_837
    # The probability of the right answers is the sum of theirs
    total = np.exp(3) + np.exp(2) + 998
    place = int(result.index[0])
    answers = set(lists[order[int(labels.source.indices[place])]])  # pyright: ignore[reportAttributeAccessIssue]
    given = {int(result.guesses[0, 0]): np.exp(3), (int(result.guesses[0, 0]) + 7) % 1000: np.exp(2)}
    share = sum(given.get(one, 1.0) for one in answers) / total
    assert result.nll[0] == pytest.approx(-np.log(share), rel=1e-9)


def empty_folders(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def card_and_rows(capsys: Capture, out: Path, *words: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    main(["evaluate", *words, "--out", str(out), "--device", "cpu", "--json"])
    card = json.loads(capsys.readouterr().out)
    return card, pq.read_table(out / "images.parquet").to_pydict()


def test_real_from_a_folder_of_images_to_a_card(tmp_path: Path, capsys: Capture) -> None:
    lists = [[one % 1000] for one in range(50_000)]
    lists[1], lists[2] = [], [5, 6, 7]
    plant(tmp_path, {"imagenet-real/real.json": json.dumps(lists).encode()})
    folder = empty_folders(tmp_path / "imagenet" / "val", imagenet()["wnids"])
    numbers = {0: "n01440764", 1: "n01440764", 2: "n15075141", 3: "n07860988"}
    images = {number: jpeg(number) for number in numbers}
    plant(folder, {f"{wnid}/ILSVRC2012_val_{at + 1:08d}.JPEG": images[at] for at, wnid in numbers.items()})
    model = saved(tmp_path / "model.safetensors", classes=1000)
    words = (str(model), "--data", "imagenet-real", "--data-root", str(tmp_path))
    card, rows = card_and_rows(capsys, tmp_path / "out", *words)
    predictor = Predictor(model, device="cpu")
    guesses = {at: int(predictor.logits(predictor.stack([data])).argmax()) for at, data in images.items()}
    expected = [guesses[at] in lists[at] for at in numbers if lists[at]]
    assert card["images"] == 3
    assert card["data"]["left_out"] == 1
    assert card["data"]["split"] == "val"
    assert set(card["metrics"]) == {"top1", "top5", "nll", "ece"}  # of several labels none is a row of its own
    assert card["counts"]["top1"] == sum(expected)
    by_number = {int(name[-13:-5]) - 1: guess for name, guess in zip(rows["name"], rows["guess"], strict=True)}
    assert by_number == {at: guesses[at] for at in numbers if lists[at]}
    (tmp_path / "imagenet-real" / "real.json").unlink()
    assert "real.json" in refused(capsys, "evaluate", *words)


def test_real_needs_the_official_names(tmp_path: Path) -> None:
    plant(tmp_path, {"imagenet-real/real.json": json.dumps([[0]] * 50_000).encode()})
    assert len(real_labels(tmp_path)) == 50_000
    for name in ("val-00.parquet#0", "a/ILSVRC2012_val_00000000.JPEG", "a/ILSVRC2012_val_00050001.JPEG"):
        source = Pixels(np.zeros(1), [name], np.zeros(1), tuple(imagenet()["wnids"]))
        with pytest.raises(DataError, match="ILSVRC2012_val_00000001"):
            align(source, 1000, data_root=tmp_path)
    source = Pixels(np.zeros(1), ["a/ILSVRC2012_val_00050000.JPEG"], np.zeros(1), source.classes)
    assert align(source, 1000, data_root=tmp_path).right.tolist() == [[0]]
    source = Pixels(np.zeros(2), ["a/ILSVRC2012_val_00000007.JPEG"] * 2, np.zeros(2), source.classes)
    with pytest.raises(DataError, match="same number"):
        align(source, 1000, data_root=tmp_path)


@pytest.mark.parametrize(
    ("spec", "folders", "words"),
    [
        ("imagenet-a", ("n01498041", "cat"), "'cat'"),
        ("imagenet-sketch", ("0",), "'0'"),
        ("imagenet-a", ("n01498041",), "200 classes"),
        ("objectnet", ("chair",), "objectnet has no folder"),
    ],
)
def test_wrong_folders_of_a_known_dataset_are_a_data_error(
    spec: str, folders: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = Pixels(np.zeros(1), ["a.jpg"], np.zeros(1), folders)
    source.spec = spec
    with pytest.raises(DataError, match=words):
        align(source, 1000, data_root=tmp_path)


FOLDERS = {  # known set -> three of its folders and their classes in ImageNet, and how many folders it has
    "imagenet-v2": ({"0": 0, "10": 10, "999": 999}, [str(one) for one in range(1000)]),
    "imagenet-sketch": ({"n01440764": 0, "n01443537": 1, "n15075141": 999}, None),
    "imagenet-a": ({"n01498041": 6, "n02119022": 277, "n12267677": 988}, "imagenet_a_synsets.txt"),
    "imagenet-r": ({"n01443537": 1, "n02119022": 277, "n12267677": 988}, "imagenet_r_synsets.txt"),
}


@pytest.mark.parametrize("name", tiny.mostly_slow(FOLDERS, 4))
def test_subsets_of_imagenet_are_scored_among_their_classes(name: str, tmp_path: Path, capsys: Capture) -> None:
    chosen, listed = FOLDERS[name]
    every = listed if isinstance(listed, list) else info(listed or "imagenet_synsets.txt")
    folder = empty_folders(tmp_path / name, every)
    plant(folder, {f"{one}/{at}.png": png(13 * label + at) for one, label in chosen.items() for at in range(4)})
    model = saved(tmp_path / "model.safetensors", classes=1000)
    card, rows = card_and_rows(capsys, tmp_path / "out", str(model), "--data", name, "--data-root", str(tmp_path))
    predictor = Predictor(model, device="cpu")
    wnids = info("imagenet_synsets.txt")
    allowed = [int(one) if one.isdecimal() else wnids.index(one) for one in every]  # columns, in the folders' order
    right = []
    for one, guess in zip(rows["name"], rows["guess"], strict=True):
        logits = predictor.logits(predictor.stack([folder / one]))[0]
        best = max(allowed, key=lambda at: float(logits[at]))
        assert best == (guess if name == "imagenet-v2" else wnids.index(sorted(every)[guess]))
        right.append(best == chosen[one.split("/")[0]])
    assert card["images"] == 12
    assert card["counts"]["top1"] == sum(right)
    assert card["data"]["classes"] == SETS[name].classes == len(every)
    assert (name in card["data"]["rule"]) == (len(every) == 200)


def test_objectnet_accepts_any_class_of_the_object(tmp_path: Path, capsys: Capture) -> None:
    others = [f"thing_{number}" for number in range(200)]
    folder = empty_folders(tmp_path / "objectnet" / "images", [*imagenet()["objectnet"], *others])
    model = saved(tmp_path / "model.safetensors", classes=1000)
    predictor = Predictor(model, device="cpu")
    inner = noise(12, 12, 3)
    guess = int(predictor.logits(predictor.stack([inner])).argmax())
    framed = np.zeros((16, 16, 3), np.uint8)  # the border must be cut off before the image is resized
    framed[..., 0], framed[2:-2, 2:-2] = 255, inner
    plant(folder, {f"{one}/a.png": encode(framed) for one in ("alarm_clock", "wok", "thing_3")})
    card, rows = card_and_rows(
        capsys, tmp_path / "out", str(model), "--data", "objectnet", "--data-root", str(tmp_path)
    )
    assert rows["guess"] == [guess, guess]
    assert card["images"] == 2
    assert card["data"]["left_out"] == 1
    assert card["data"]["classes"] == 313
    meant = {"alarm_clock": (409, 530), "wok": (909,)}
    assert card["counts"]["top1"] == sum(guess in several for several in meant.values())
    source = open_source("objectnet", "test", data_root=tmp_path)
    told = Predictor(Told(1000), device="cpu")
    labels = align(source, 1000)
    assert sorted(map(tuple, labels.right.tolist())) == [(409, 530), (909, -1)]
    planted = Pixels(np.array([530, 530]), ["a", "b"], labels.source.labels, labels.source.classes)
    result = classify(told, Prepared(planted, (1, 1), Preprocess()), labels)
    assert sorted(result.right.tolist()) == [False, True]


def test_subsets_of_imagenet_need_a_model_of_its_classes(tmp_path: Path, capsys: Capture) -> None:
    plant_classes(tmp_path / "imagenet-a", dict.fromkeys(info("imagenet_a_synsets.txt")[:3], 1))
    empty_folders(tmp_path / "imagenet-a", info("imagenet_a_synsets.txt")[3:])
    model = saved(tmp_path / "model.safetensors", classes=10)
    words = ("evaluate", str(model), "--data", "imagenet-a", "--data-root", str(tmp_path))
    assert "1,000 classes" in refused(capsys, *words)


# Classes by name ------------------------------------------------------------------------------------------------------


def test_classes_in_another_order_are_matched_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("ant", "bee", "cat", "dog", "elk")
    folder = plant_classes(tmp_path / "photos" / "test", dict.fromkeys(names, 5)).parent
    source = open_source(str(folder), "test")
    shuffled = ("dog", "ant", "elk", "cat", "bee")
    model = Predictor(saved(tmp_path / "model.safetensors", shuffled, classes=5), device="cpu")
    with caplog.at_level(logging.WARNING):
        labels = align(source, 5, model.class_names)
    assert "another order" in caplog.text
    result = classify(model, Prepared(source, model.size, model.preprocess), labels)
    guesses = model.logits(model.stack(source.image(index) for index in range(25))).argmax(1).tolist()
    said = [source.classes[one] for one in result.guesses[:, 0]]
    assert said == [shuffled[guess] for guess in guesses]
    assert len(set(said)) > 1
    assert result.right.tolist() == [
        shuffled[one] == names[label] for one, label in zip(guesses, source.labels, strict=True)
    ]


def test_other_names_are_matched_by_order_and_moved_ones_are_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant_classes(tmp_path / "photos" / "test", {"ant": 1, "bee": 1, "cat": 1}).parent
    source = open_source(str(folder), "test")
    with caplog.at_level(logging.WARNING):
        assert align(source, 3, ("un", "deux", "trois")).columns is None
    assert caplog.text.count("class names differ") == 1
    with pytest.raises(DataError, match="'bee'"):
        align(source, 3, ("bee", "cat", "dog"))
    assert align(source, 3, ()).columns is None


def test_numbered_folders_are_matched_by_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model without class names goes by number; one with names by name, in whatever order it learned them."""
    counts = dict.fromkeys(map(str, range(12)), 0) | {"2": 1, "10": 1}
    for name in counts:
        (tmp_path / "photos" / name).mkdir(parents=True)
    plant_classes(tmp_path / "photos", {"2": 1, "10": 1})
    source = open_source(str(tmp_path / "photos"))
    assert source.labels.tolist() == [2, 10]
    with caplog.at_level(logging.WARNING):
        assert align(source, 12, ()).columns is None
    assert len(caplog.records) == 1
    as_text = tuple(sorted(source.classes))  # as torchvision's ImageFolder orders them
    columns = align(source, 12, as_text).columns
    assert columns is not None
    assert [as_text[at] for at in columns] == list(source.classes)


def test_a_model_without_names_warns_of_the_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(str(plant_classes(tmp_path, {"ant": 1, "bee": 1})))
    with caplog.at_level(logging.WARNING):
        align(source, 2, ())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(DataError):
        align(source, 1000, ())


# Bad input ------------------------------------------------------------------------------------------------------------


def test_invalid_data_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    model = str(saved(tmp_path / "model.safetensors", classes=7))
    assert "7 classes" in refused(capsys, "evaluate", model, "--data", "digits")
    write_parquet(tmp_path / "bare" / "test-00.parquet", [png(1), png(2)], None)
    assert "2 of 2 images" in refused(capsys, "evaluate", model, "--data", str(tmp_path / "bare"))
    write_parquet(tmp_path / "half" / "test-00.parquet", [png(1), png(2)], [6, -1])
    assert "1 of 2 images" in refused(capsys, "evaluate", model, "--data", str(tmp_path / "half"))
    (tmp_path / "empty" / "test").mkdir(parents=True)
    refused(capsys, "evaluate", model, "--data", str(tmp_path / "empty"))
    plant_classes(tmp_path / "photos", {"ant": 1})
    assert "--split" in refused(capsys, "evaluate", model, "--data", str(tmp_path / "photos"), "--split", "test")


@pytest.mark.parametrize(
    ("verb", "error", "said"),
    [
        ("evaluate", torch.OutOfMemoryError("CUDA out of memory. Tried to get 20 GiB.\nmore"), "Tried to get 20 GiB."),
        ("probe", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator"),
        ("evaluate", MemoryError(), "MemoryError"),
    ],
)
def test_out_of_memory_is_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str, error: Exception, said: str
) -> None:
    def full(*_: object) -> None:
        raise error

    for method in ("logits", "features"):
        monkeypatch.setattr(Predictor, method, full)
    model = str(saved(tmp_path / "model.safetensors", classes=10))
    told = refused(capsys, verb, model, "--data", "digits", "--device", "cpu", code=5)
    assert told.startswith("plainvit: out of memory, reduce --batch: ")
    assert told.endswith(said) or said in told.split(": ")


def test_an_internal_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Predictor, "logits", wrong)
    model = str(saved(tmp_path / "model.safetensors", classes=10))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        main(["evaluate", model, "--data", "digits", "--device", "cpu"])


# Which images ---------------------------------------------------------------------------------------------------------


def test_a_folder_without_splits_is_evaluated_completely(tmp_path: Path) -> None:
    """By weights that know nothing of it; where it has validation images, these."""
    model = saved(tmp_path / "model.safetensors", ("ant", "bee"), classes=2)
    plant_classes(tmp_path / "photos", {"ant": 3, "bee": 4})
    done = evaluate_model(model, str(tmp_path / "photos"), out=tmp_path / "flat", device="cpu", quiet=True)
    assert done is not None
    assert (len(done.result.index), done.card.data["split"]) == (7, "train")
    for split, count in (("train", 3), ("val", 2)):
        plant_classes(tmp_path / "both" / split, {"ant": count, "bee": count}, start=10 * count)
    done = evaluate_model(model, str(tmp_path / "both"), out=tmp_path / "val", device="cpu", quiet=True)
    assert done is not None
    assert (len(done.result.index), done.card.data["split"]) == (4, "val")
    named = evaluate_model(
        model, str(tmp_path / "both"), split="validation", out=tmp_path / "named", device="cpu", quiet=True
    )
    assert named is not None
    assert named.card.data["split"] == "val"


def test_a_run_is_evaluated_on_its_held_out_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos = plant_classes(tmp_path / "photos", {"ant": 10, "bee": 10})
    config = small_runs.config(data=str(photos), holdout=0.2, steps=2, batch=4)
    run = plainvit.fit(config, tmp_path / "run", quiet=True)
    done = evaluate_model(tmp_path / "run", str(photos), out=tmp_path / "own", device="cpu", quiet=True)
    assert done is not None
    assert "3 that the run held out" in caplog.text
    assert len(done.result.index) == 3
    assert done.card.metrics["top1"] == pytest.approx(run.numbers["val"]["top1"])
    evaluate_model(tmp_path / "run", str(photos), split="train", out=tmp_path / "train", device="cpu", quiet=True)
    assert "trained on these images" in caplog.text
    weights = tmp_path / "run" / "model.safetensors"
    named = ((run.folder, f"{photos}/", ""), (weights, str(photos), ""), (run.folder, str(photos), "val"))
    assert [len(choose_split(*words, None)) for words in named] == [3, 3, 3]
    looked = gather(Predictor(run.folder, device="cpu"), str(photos), "", "", 128, run.folder)
    assert (len(looked.images), looked.which, looked.held_out) == (3, "held-out images of the run", True)


def test_a_run_finds_its_images_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by another path than when it learned, or moved, they were scored whole: most had been learned."""
    plant_classes(tmp_path / "photos", {"ant": 10, "bee": 10})
    monkeypatch.chdir(tmp_path)
    plainvit.fit(small_runs.config(data="photos", holdout=0.2, steps=2, batch=4), "run", quiet=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(choose_split("../run", "../photos", "", None)) == 3
    (tmp_path / "photos").rename(tmp_path / "moved")
    assert len(choose_split("../run", "../moved", "", None)) == 3
    plant_classes(tmp_path / "others", {"ant": 10, "bee": 10}, start=100)  # new images of the same names
    assert len(choose_split("../run", "../others", "", None)) == 20


def test_invalid_arguments_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    model = str(saved(tmp_path / "model.safetensors", classes=10))
    headless = str(saved(tmp_path / "headless.safetensors", classes=0))
    assert "batch" in refused(capsys, "evaluate", model, "--data", "digits", "--batch", "0", code=2)
    assert "crop" in refused(capsys, "evaluate", model, "--data", "digits", "--crop", "1.5", code=2)
    assert "head" in refused(capsys, "evaluate", headless, "--data", "digits", code=2)
    refused(capsys, "evaluate", str(tmp_path / "none.safetensors"), "--data", "digits", code=2)
    (tmp_path / "file").touch()
    refused(capsys, "evaluate", model, "--data", "digits", "--out", str(tmp_path / "file" / "x"), code=5)


def test_unreadable_images_are_counted_named_and_not_scored(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant_classes(tmp_path / "photos" / "test", {"ant": 4, "bee": 4})
    (folder / "ant" / "2.png").write_bytes(png(2)[:40])
    model = saved(tmp_path / "model.safetensors", ("ant", "bee"), classes=2)
    card, rows = card_and_rows(capsys, tmp_path / "out", str(model), "--data", str(tmp_path / "photos"))
    assert (card["images"], card["unreadable"]) == (7, 1)
    assert "ant/2.png" not in rows["name"]
    assert len(rows["name"]) == 7
    assert "ant/2.png" in caplog.text
    assert "1 image could not be read" in (tmp_path / "out" / "report.html").read_text()


def test_preprocessing_is_the_models_own_by_default(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    plant(folder / "test", {f"{one}/{at}.png": encode(photo(40, 90, at)) for one in ("ant", "bee") for at in range(3)})
    model = tiny.vit(torch.float32, image_size=(16, 16), classes=2)
    model.about = About(preprocess=Preprocess(resize="crop", crop=0.5, interpolation="bicubic"))
    plainvit.save(model, tmp_path / "model.safetensors")
    own = evaluate_model(tmp_path / "model.safetensors", str(folder), out=tmp_path / "own", device="cpu", quiet=True)
    told = evaluate_model(
        tmp_path / "model.safetensors",
        str(folder),
        out=tmp_path / "told",
        preprocess={"resize": "squash"},
        device="cpu",
        quiet=True,
    )
    assert own
    assert told
    assert own.card.preprocess["settings"]["crop"] == 0.5
    settings = {name: value for name, value in own.card.preprocess["settings"].items() if name != "crop"}
    assert told.card.preprocess["settings"] == settings | {"resize": "squash"}  # which crops nothing
    squashed = {"resize": "squash", "crop": 0.5}
    with pytest.raises(ValueError, match="--resize crop"):
        evaluate_model(
            tmp_path / "model.safetensors", str(folder), out=tmp_path / "odd", preprocess=squashed, quiet=True
        )
    assert own.card.preprocess["hash"] != told.card.preprocess["hash"]
    assert not np.allclose(own.result.nll, told.result.nll)


# timm's models --------------------------------------------------------------------------------------------------------

PEERS = {"vit_tiny_patch16_224": 64, "efficientnet_b0": 64, "resnetv2_50x1_bit": 64}


@pytest.mark.parametrize(
    ("name", "kind"),
    tiny.mostly_slow(
        [
            ("vit_tiny_patch16_224", "safetensors"),
            ("efficientnet_b0", "pth"),
            ("efficientnet_b0", "safetensors"),
            ("resnetv2_50x1_bit", "pth"),
        ],
        3,
    ),
)
def test_a_timm_model_has_timms_logits(name: str, kind: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    size = PEERS[name]
    options = {"img_size": size} if name.startswith("vit") else {}
    theirs = timm.create_model(name, num_classes=5, **options).eval()
    path = tmp_path / f"weights.{kind}"
    state = {key: value + 0.01 if value.is_floating_point() else value for key, value in theirs.state_dict().items()}
    theirs.load_state_dict(state)
    safetensors.torch.save_file(state, path) if kind == "safetensors" else torch.save({"state_dict": state}, path)
    predictor = Predictor(f"timm:{name}@{path}", device="cpu", image_size=size)
    images = predictor.stack([noise(70, 90, seed) for seed in range(3)])
    about = theirs.pretrained_cfg
    mean, std = (torch.tensor(about[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        pixels = (images / 255 - mean) / std
        expected = theirs(pixels)
        features = theirs.forward_head(theirs.forward_features(pixels), pre_logits=True)
    assert expected.std() > 1e-4
    torch.testing.assert_close(predictor.logits(images), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predictor.features(images), features.flatten(1), rtol=1e-6, atol=1e-6)
    assert predictor.classes == 5
    assert (predictor.preprocess.crop, predictor.preprocess.interpolation) == (
        about["crop_pct"],
        about["interpolation"],
    )


def test_a_timm_model_has_timms_preprocessing(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from PIL import Image

    model = timm.create_model("vit_tiny_patch16_224")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    predictor = Predictor(f"timm:vit_tiny_patch16_224@{tmp_path / 'w.safetensors'}", device="cpu")
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    picture = photo(300, 400)
    pixels = np.array(picture)
    expected = theirs(Image.fromarray(pixels)) * 0.5 + 0.5  # this model's mean and std are 0.5
    found = predictor.load_image(pixels) / 255
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1.5 / 255


def test_timms_names_and_files_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match="vit_tiny_patch16_224"):
        load_timm("vit_tiny_patch16_225")
    with pytest.raises(ValueError, match="augreg_in21k_ft_in1k"):
        load_timm("vit_tiny_patch16_224.mine")
    with pytest.raises(ValueError, match="there is no file"):
        load_timm(f"efficientnet_b0@{tmp_path / 'none.pth'}")
    (tmp_path / "bad.pth").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="neither safetensors"):
        load_timm(f"efficientnet_b0@{tmp_path / 'bad.pth'}")
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="timm model"):
        load_timm(f"efficientnet_b0@{tmp_path / 'other.pth'}")


def test_without_timm_the_install_command_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"pip install 'timm>="):
        load_timm("vit_tiny_patch16_224")


def test_unreachable_weights_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="@FOLDER/model") as caught:
        load_timm("vit_tiny_patch16_224")
    assert "\n" not in str(caught.value)


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
    assert not any(modes(plainvit.load(saved(tmp_path / "m.safetensors"), optimise=True)))


# One picture in several forms -----------------------------------------------------------------------------------------


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
