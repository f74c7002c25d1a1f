"""Probes: least squares against NumPy and big_vision's formulas, k-NN and logistic regression against scikit-learn;
the feature cache; the command."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from pictures import plant_classes, png, write_parquet
from shell import Capture, fail, report, run
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

import plainvit
from plainvit.config import Preprocess, Probes
from plainvit.data.decode import DataError
from plainvit.data.sources import Source, Subset, open_source
from plainvit.evaluate import probe, probe_sets
from plainvit.evaluate.features import Features, extract, features_key
from plainvit.evaluate.predictor import Predictor


def clusters(count: int, width: int, classes: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Overlapping clusters in correlated features of different scales; every class occurs."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.cat((torch.arange(classes), torch.randint(classes, (count - classes,), generator=generator)))
    points = centers[labels] + spread * torch.randn(count, width, generator=generator)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(7)) / width**0.5
    return ((points @ mixing) * torch.logspace(-2, 2, width) + 3).float(), labels


# Few-shot -------------------------------------------------------------------------------------------------------------


def by_normal_equations(x: Tensor, y: Tensor, others: Tensor, classes: int, l2: float) -> np.ndarray:
    """The definition, solved as it stands: standardize, append 100, (X'X + l2 I) W = X'Y."""
    a, b = x.double().numpy(), others.double().numpy()
    mean, std = a.mean(0), a.std(0) + 1e-5
    a, b = (np.c_[(z - mean) / std, np.full(len(z), 100.0)] for z in (a, b))
    targets = np.where(np.arange(classes) == y.numpy()[:, None], 1.0, -1.0)
    return b @ np.linalg.solve(a.T @ a + l2 * np.eye(a.shape[1]), a.T @ targets)


@pytest.mark.parametrize(("count", "l2"), [(9, 1.0), (30, 2.0**10), (48, 2.0**-10), (49, 2.0**19), (400, 2.0**10)])
def test_least_squares_equal_numpys(count: int, l2: float) -> None:
    x, y = clusters(count, 48, 9)
    others, _ = clusters(300, 48, 9, seed=1)
    solved = probe.least_squares(x, y, 9, l2)
    expected = by_normal_equations(x, y, others, 9, l2)
    # the constant's square makes this system ill-conditioned, the more so the smaller l2 is
    close = np.ptp(expected) * (1e-4 if l2 < 1 else 1e-7)
    np.testing.assert_allclose(solved.scores(others).numpy(), expected, rtol=0, atol=close)
    assert solved.predict(others).tolist() == expected.argmax(1).tolist()


def test_a_constant_feature_and_a_class_without_images_are_allowed() -> None:
    x, y = clusters(60, 12, 5)
    x[:, 3] = 4.0
    others, _ = clusters(50, 12, 5, seed=1)
    others[:, 3] = 4.0
    expected = by_normal_equations(x, y, others, 7, 1024.0)  # classes 5 and 6 have no image
    found = probe.least_squares(x, y, 7, 1024.0)
    np.testing.assert_allclose(found.scores(others).numpy(), expected, atol=1e-9)
    assert set(found.predict(others).tolist()) <= set(range(5))


def test_shots_are_nested_and_balanced_and_equal_big_visions() -> None:
    labels = np.array([0, 1, 2] * 40 + [1] * 5)
    drawn = probe.draw_shots(labels, 3, (1, 5, 25, 1000), seed=4)
    assert set(drawn[1]) < set(drawn[5]) < set(drawn[25]) < set(drawn[1000])
    for shots in (1, 5, 25):
        assert np.bincount(labels[drawn[shots]]).tolist() == [shots] * 3
    assert np.bincount(labels[drawn[1000]]).tolist() == [40, 45, 40]  # as many as there are
    generator = np.random.default_rng(4)
    order = [generator.permutation(np.where(labels == label)[0]) for label in range(3)]
    assert drawn[5].tolist() == np.concatenate([members[:5] for members in order]).tolist()
    assert set(probe.draw_shots(labels, 3, (5,), seed=5)[5]) != set(drawn[5])


# Nearest neighbors ---------------------------------------------------------------------------------------------------


def test_neighbors_equal_scikit_learns() -> None:
    x, y = clusters(700, 24, 8)
    others, _ = clusters(1500, 24, 8, seed=1)
    x, others = x.double(), others.double()
    for k, found in probe.neighbors(x, y, 8, others, (1, 2, 20, 200)).items():
        peer = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
        )
        assert found.tolist() == peer.fit(x, y).predict(others).tolist()


def test_an_l2_cannot_be_chosen_without_held_out_images() -> None:
    x, y = clusters(2, 4, 2)
    with pytest.raises(ValueError, match="--linear-l2"):
        probe.search_logistic(x, y, 2, (1e-2, 1.0))


# Linear probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "l2"), [(60, 1e-1), (400, 1e-2), (2000, 1.0)])
def test_the_linear_probe_equals_scikit_learns(count: int, l2: float) -> None:
    """The same objective; softmax has one bias too many, so biases are compared without their mean."""
    x, y = clusters(count, 16, 5)
    found = probe.logistic(x, y, 5, l2, tolerance=1e-8)
    x64 = x.double().numpy()
    mean, std = x64.mean(0), x64.std(0) + 1e-5
    peer = LogisticRegression(C=1 / (l2 * count), tol=1e-10, max_iter=10_000).fit((x64 - mean) / std, y.numpy())
    assert found.converged
    np.testing.assert_allclose(found.weights.numpy(), peer.coef_.T, atol=2e-5)
    biases = [bias - bias.mean() for bias in (found.bias.numpy(), peer.intercept_)]
    np.testing.assert_allclose(*biases, atol=2e-5)
    others, _ = clusters(300, 16, 5, seed=1)
    assert found.predict(others).tolist() == peer.predict((others.double().numpy() - mean) / std).tolist()


def test_l2_of_the_linear_probe_is_chosen_on_held_out_images() -> None:
    x, y = clusters(300, 32, 4, spread=5.0)
    fitted, best, tried = probe.search_logistic(x, y, 4, (1e-4, 1e-2, 1e-1, 10.0))
    assert tried[best] == max(tried.values())
    separable, labels = clusters(300, 8, 4, spread=0.1)
    _, chosen, equal = probe.search_logistic(separable, labels, 4, (1e-6, 1e-4, 1e-2, 1.0))
    assert (chosen, set(equal.values())) == (1e-4, {1.0})
    assert len(set(tried.values())) > 1
    assert torch.allclose(fitted.weights, probe.logistic(x, y, 4, best).weights, atol=1e-3)
    inside, outside = probe._stratified_split(y.numpy(), 4)
    assert sorted((*inside.tolist(), *outside.tolist())) == list(range(300))
    expected = torch.bincount(y) * 0.2
    assert (torch.bincount(y[outside]) - expected).abs().max() <= 0.5


# Features and their cache ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    plainvit.save(tiny.vit(torch.float32, image_size=(8, 8), patch=4, classes=0, depth=1), path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, start in (("train", 0), ("test", 100)):
        plant_classes(tmp_path / "photos" / split, {"cat": 6, "dog": 5, "emu": 4}, start)
    return tmp_path / "photos"


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_features_equal_the_models_for_any_batch(weights: Path, photos: Path, batch: int) -> None:
    source = open_source(str(photos))
    found = extract(Predictor(weights, batch=batch, device="cpu"), source, quiet=True)
    assert found.index.tolist() == list(range(15))
    assert found.labels.tolist() == source.labels.tolist()
    model, one = plainvit.load(weights), Predictor(weights, device="cpu")
    expected = torch.cat([model.features(one.load_image(source.read(i))[None]) for i in range(15)])
    torch.testing.assert_close(found.features, expected, rtol=0, atol=2e-6)


def test_every_setting_changes_the_cache_key(weights: Path, photos: Path) -> None:
    source, predictor = open_source(str(photos)), Predictor(weights, device="cpu")
    changed = Predictor(weights, device="cpu")
    changed.model.load_state_dict({name: value + 1e-6 for name, value in changed.model.state_dict().items()})
    pairs: list[tuple[Predictor, Source]] = [
        (predictor, source),
        (predictor, open_source(str(photos), "test")),
        (predictor, Subset(source, np.arange(14))),
        (changed, source),
        (Predictor(weights, device="cpu", preprocess=Preprocess(resize="crop", crop=0.9)), source),
        (Predictor(weights, device="cpu", image_size=16), source),
        (Predictor(weights, device="cpu", precision="bf16"), source),
    ]
    assert len({features_key(*pair) for pair in pairs}) == 7


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_cache_file_is_computed_again(
    weights: Path, photos: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    predictor, source = Predictor(weights, device="cpu"), open_source(str(photos))
    first = extract(predictor, source, cache=tmp_path / "cache", quiet=True)
    (path,) = (tmp_path / "cache").iterdir()
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data if damage == "flipped" else data[:-9])
    with caplog.at_level(logging.WARNING, "plainvit"):
        again = extract(predictor, source, cache=tmp_path / "cache", quiet=True)
    assert not again.cached
    assert path.name in caplog.text
    assert torch.equal(first.features, again.features)
    assert extract(predictor, source, cache=tmp_path / "cache", quiet=True).cached
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_unreadable_images_are_no_neighbors(weights: Path, photos: Path, capsys: Capture) -> None:
    (photos / "train" / "cat" / "2.png").write_bytes(b"not an image")
    words = ("probe", weights, "--data", photos, "--no-cache", "--device", "cpu", "--method", "knn", "--k")
    assert list(report(capsys, *words, 14)[0]["results"]["knn"]) == ["14"]
    assert "--k 15" in fail(capsys, *words, 15, code=2)


def test_unreadable_images_are_left_out_and_counted(weights: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "train" / "cat" / "2.png").write_bytes(b"not an image")
    predictor, source = Predictor(weights, device="cpu", batch=1), open_source(str(photos))
    for _ in range(2):  # and the same from the cache
        found = extract(predictor, source, cache=tmp_path / "cache", quiet=True)
        assert found.unreadable == 1
        assert found.index.tolist() == [0, 1, *range(3, 15)]
        assert len(found.features) == len(found.labels) == 14
    assert found.cached
    for path in photos.glob("test/*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="test split"):
        extract(predictor, open_source(str(photos), "test"), quiet=True)


# The command ----------------------------------------------------------------------------------------------------------


def test_few_shot_results_equal_numpys() -> None:
    """Mean and sample standard deviation over the seeds, each solved here by NumPy."""
    train, test = (
        Features(x, y, torch.arange(len(y)), 0) for x, y in (clusters(200, 16, 4), clusters(150, 16, 4, seed=1))
    )
    pair = probe_sets.Pair(train, test, 4)
    results = probe_sets.few_shot(pair, Probes(shots=(2, 500), seeds=3, l2=8.0))
    for shots, support, fewer in ((2, 8, 0), (500, 200, 4)):
        tops = []
        for seed in range(3):
            chosen = probe.draw_shots(train.labels.numpy(), 4, (shots,), seed)[shots]
            scores = by_normal_equations(train.features[chosen], train.labels[chosen], test.features, 4, 8.0)
            tops.append((scores.argmax(1) == test.labels.numpy()).mean())
        result = results[str(shots)]
        assert result["seeds"] == pytest.approx(tops)
        assert result["top1"] == pytest.approx(np.mean(tops))
        assert result["sd"] == pytest.approx(np.std(tops, ddof=1), abs=1e-12)
        assert (result["support"], result["classes_with_fewer"]) == (support, fewer)


def test_the_command_writes_a_card_and_a_table(weights: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    words = (str(weights), "--data", str(photos), "--device", "cpu", "--cache", str(tmp_path / "cache"))
    methods = ("--method", "fewshot", "knn", "linear", "--shots", "1", "3")
    (card,) = report(capsys, "probe", *words, *methods, "--out", tmp_path / "cards.json")
    assert json.loads((tmp_path / "cards.json").read_text()) == [card]
    assert (card["n"], card["train"]["n"], card["classes"], card["split"]) == (15, 15, 3, "test")
    assert card["fingerprint"] == open_source(str(photos), "test").fingerprint()
    assert card["weights"] == Predictor(weights, device="cpu").weights_hash
    assert card["settings"]["l2"] == 1024
    assert list(card["results"]) == ["fewshot", "knn", "linear"]
    assert list(card["results"]["knn"]) == ["1", "5", "10"]  # of 15 training images
    assert not card["cached"]
    table = run(capsys, "probe", *words, *methods)[1]
    result = card["results"]["fewshot"]["3"]
    assert f"{100 * result['top1']:.2f} ± {100 * result['sd']:.2f}" in table
    assert f"{100 * card['results']['linear']['top1']:.2f}" in table
    for k, top1 in card["results"]["knn"].items():
        assert f"k-NN, k = {k} {100 * top1:.2f}" in " ".join(table.split())
    assert report(capsys, "probe", *words)[0]["cached"]


def test_a_folder_without_splits_holds_out_about_a_fifth(
    weights: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    photos = plant_classes(tmp_path / "photos", {"cat": 10, "dog": 15})
    words = (str(weights), "--data", str(photos), "--no-cache", "--device", "cpu", "--shots", "3")
    cards = [report(capsys, "probe", *words)[0] for _ in range(2)]
    held_out = cards[0]["n"]
    assert (held_out + cards[0]["train"]["n"], cards[0]["split"]) == (25, "val")
    assert 2 <= held_out <= 10  # by content: at least one of each class
    assert f"{held_out} of 25 images are held out" in caplog.text
    assert cards[0]["fingerprint"] == cards[1]["fingerprint"]  # the same images each time


def test_validation_images_are_tested_on_where_there_are_no_others(
    weights: Path, tmp_path: Path, capsys: Capture
) -> None:
    for split, count in (("train", 4), ("val", 3)):
        plant_classes(tmp_path / "photos" / split, {"cat": count, "dog": count}, 10 * count)
    words = (str(weights), "--data", str(tmp_path / "photos"), "--no-cache", "--device", "cpu", "--shots", "2")
    (card,) = report(capsys, "probe", *words)
    assert (card["n"], card["train"]["n"], card["split"]) == (6, 8, "val")


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (("--method", "knn", "--k", "16"), 2, "--k 16"),
        (("--shots", "0"), 2, "shots"),
        (("--l2", "0"), 2, "--l2"),
        (("--batch", "0"), 2, "--batch"),
        (("--cache", "x", "--no-cache"), 2, "--cache"),
        (("--out", "/no/such/folder/x.json"), 2, "/no/such/folder"),
        (("--out", "."), 2, "--out"),
        (("--cache", "/proc/version"), 5, "/proc/version"),
    ],
)
def test_invalid_arguments_are_one_line(
    weights: Path, photos: Path, capsys: Capture, words: tuple[str, ...], code: int, part: str
) -> None:
    cache = () if "--cache" in words else ("--no-cache",)
    assert part in fail(capsys, "probe", weights, "--data", photos, *cache, *words, code=code)


def test_invalid_data_is_one_line(weights: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    for path in (photos / "train" / "emu").iterdir():
        path.unlink()
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    for split in ("train", "test"):
        write_parquet(tmp_path / "bare" / f"{split}-0.parquet", [png()] * 3, None)
    for specs, code, part in (
        ((photos, photos), 2, "once"),
        (("nothing-like-it",), 2, "nothing-like-it"),
        ((photos,), 3, "'emu'"),
        ((tmp_path / "empty",), 3, "no images"),
        ((tmp_path / "bare",), 3, "no label"),
    ):
        assert part in fail(capsys, "probe", weights, "--no-cache", "--data", *specs, code=code)
