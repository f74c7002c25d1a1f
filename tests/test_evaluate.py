"""Evaluation against scikit-learn and direct counts: metrics, batches, processes, splits, errors."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import small_runs
import tiny
import torch
from pictures import encode, photo, plant, plant_classes, png, write_parquet
from shell import Capture, evaluate_to, fail, save_model

import plainvit
from plainvit.analyse import evaluation
from plainvit.analyse.evaluation import Evaluation, evaluate_model
from plainvit.analyse.subject import gather
from plainvit.cli import main
from plainvit.config import About, Preprocess
from plainvit.data.sources import Subset, open_source
from plainvit.data.splits import choose_split
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.evaluate.metrics import Result
from plainvit.evaluate.predictor import Predictor

# Metrics --------------------------------------------------------------------------------------------------------------


def scores(count: int = 400, classes: int = 7) -> tuple[np.ndarray, np.ndarray, Result]:
    """Labels, probabilities [N, K], and their Result; class 2 is never predicted correctly, class 6 is no label."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes - 1, count)
    logits = rng.normal(size=(count, classes))
    logits[np.arange(count), labels] += np.where(labels == 2, -9, 1.5)
    given = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-given, axis=1)[:, :5]
    nll = -np.log(given[np.arange(count), labels])
    return labels, given, Result(labels, order, order == labels[:, None], given.max(1), nll, np.arange(count), classes)


def test_metrics_equal_scikit_learns() -> None:
    from sklearn import metrics as sk  # not for the children of another test, which import this file

    labels, given, result = scores()
    known = list(range(7))
    assert result.top1 == sk.accuracy_score(labels, given.argmax(1))
    assert result.top5 == sk.top_k_accuracy_score(labels, given, k=5, labels=known)
    assert result.numbers()["nll"] == pytest.approx(sk.log_loss(labels, given, labels=known), rel=1e-12)
    assert (result.confusion == sk.confusion_matrix(labels, given.argmax(1), labels=known)).all()
    metrics = result.by_class()
    expected = sk.precision_recall_fscore_support(labels, given.argmax(1), labels=known, zero_division=0)
    for name, column in zip(("precision", "recall", "f1", "images"), expected, strict=True):
        np.testing.assert_allclose(metrics[name], column, rtol=1e-12, err_msg=name)
    assert (metrics["recall"][2], metrics["images"][6]) == (0, 0)


def test_the_calibration_error_equals_that_of_scikit_learns_bins() -> None:
    from sklearn.calibration import calibration_curve

    _, _, result = scores()
    result.probabilities[:6] = np.array([1 / 15, 2 / 15, 1.0, 0.2, 1 / 3, 0.0])  # some of them edges of bins
    accuracy, sure = calibration_curve(result.correct, result.probabilities, n_bins=15, strategy="uniform")
    edges = np.linspace(0, 1, 16)
    counts = np.bincount(np.searchsorted(edges[1:-1], result.probabilities), minlength=15)
    weights = counts[counts > 0] / len(result.labels)
    assert result.calibration_error == pytest.approx((weights * np.abs(accuracy - sure)).sum(), rel=1e-12)


# Every image once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [7, 400])
def test_counts_are_the_same_for_any_batch(batch: int) -> None:
    model = tiny.vit(torch.float32, image_size=(8, 8), classes=10)
    source = open_source("digits", "test")
    predictor = Predictor(model, device="cpu")
    result = classify(predictor, EvaluationSet(source, (8, 8), Preprocess(), batch=batch))
    logits = predictor.logits(predictor.stack(source.image(index) for index in range(len(source))))
    assert len(result.labels) == len(source)
    assert result.index.tolist() == list(range(len(source)))
    assert int(result.correct.sum()) == int((logits.argmax(1).numpy() == source.labels).sum())


def work(model: Path, out: Path, rank: int, size: int, port: int, batch: int) -> None:
    """In a child: one of several processes of `plainvit evaluate`."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "localhost"}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    evaluation.write_evaluation = lambda *_: None
    words = ["evaluate", str(model), "--data", "digits", "--device", "cpu", "--out", str(out), "--batch", str(batch)]
    main([*words, "--json"])


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(("processes", "batch"), [(2, 50), pytest.param(3, 7, marks=pytest.mark.slow)])
def test_several_processes_equal_one(processes: int, batch: int, tmp_path: Path, capsys: Capture) -> None:
    model = save_model(tmp_path / "model.safetensors", image_size=(8, 8), classes=10)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = [
        small_runs.Child(work, model, tmp_path / "many", rank, processes, port, batch, log=tmp_path / f"{rank}.txt")
        for rank in range(processes)
    ]
    assert [child.wait(120) for child in children] == [0] * processes, children[0].said
    one, rows = evaluate_to(capsys, tmp_path / "one", str(model), "--data", "digits")
    many = json.loads((tmp_path / "many" / "card.json").read_text())
    assert many["environment"]["processes"] == processes
    assert many["images"] == one["images"] == 360
    assert many["counts"] == one["counts"]
    assert many["metrics"]["nll"] == pytest.approx(one["metrics"]["nll"], rel=1e-6)
    table = pq.read_table(tmp_path / "many" / "images.parquet").to_pydict()
    assert all(table[column] == rows[column] for column in ("name", "label", "prediction", "right"))
    assert "images" in children[0].said
    assert children[1].said == ""  # only the main process reports


@pytest.mark.parametrize(("images", "keep", "reads"), [(4, True, 4), (4, False, 8), (5, True, 10)])
def test_small_sets_are_preprocessed_once(images: int, keep: bool, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plainvit.evaluate.classify.CACHE_BYTES", 3 * 8 * 8 * 4)
    source = Subset(open_source("digits", "test"), np.arange(images))
    read, seen = source.read, []
    monkeypatch.setattr(source, "read", lambda index: seen.append(index) or read(index))
    evaluation_set = EvaluationSet(source, (8, 8), Preprocess(), keep=keep)
    for _ in range(2):
        assert sum(len(batch.images) for batch in evaluation_set.batches()) == images
    assert len(seen) == reads


# Which images ---------------------------------------------------------------------------------------------------------


def evaluated(model: Path, data: Path, out: Path, **options: Any) -> Evaluation:
    done = evaluate_model(model, str(data), out=out, device="cpu", quiet=True, **options)
    assert done is not None
    return done


@pytest.mark.usefixtures("no_report")
def test_a_folder_without_splits_is_evaluated_completely(tmp_path: Path) -> None:
    """By weights without a run; if it has validation images, on these."""
    model = save_model(tmp_path / "model.safetensors", ("ant", "bee"), classes=2)
    plant_classes(tmp_path / "photos", {"ant": 3, "bee": 4})
    done = evaluated(model, tmp_path / "photos", tmp_path / "flat")
    assert (len(done.result.index), done.card.data["split"]) == (7, "all")
    for split, count in (("train", 3), ("val", 2)):
        plant_classes(tmp_path / "both" / split, {"ant": count, "bee": count}, start=10 * count)
    for split in ("", "validation"):
        done = evaluated(model, tmp_path / "both", tmp_path / "val", split=split)
        assert (len(done.result.index), done.card.data["split"]) == (4, "val")


@pytest.mark.usefixtures("no_report", "no_figures")
def test_a_run_is_evaluated_on_its_held_out_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known by their content, so the path of the data may be another one than in training."""
    plant_classes(tmp_path / "photos", {"ant": 10, "bee": 10})
    monkeypatch.chdir(tmp_path)
    config = small_runs.config(data="photos", holdout=0.2, steps=2, batch=4)
    run = plainvit.fit(config, tmp_path / "run", quiet=True)
    done = evaluated(run.folder, Path("photos"), tmp_path / "own")
    assert "3 that the run held out" in caplog.text
    assert len(done.result.index) == 3
    assert done.card.metrics["top1"] == pytest.approx(run.metrics["val"]["top1"])
    evaluated(run.folder, Path("photos"), tmp_path / "train", split="train")
    assert "trained on these images" in caplog.text
    subject = gather(Predictor(run.folder, device="cpu"), "photos", "", "", 128, run.folder)
    assert (len(subject.images), subject.description) == (3, "held-out images of the run")
    given = (
        (run.folder, "photos/", ""),
        (run.folder / "model.safetensors", "photos", ""),
        (run.folder, "photos", "val"),
    )
    assert [len(choose_split(*words, None)) for words in given] == [3, 3, 3]
    (tmp_path / "photos").rename(tmp_path / "moved")
    assert len(choose_split("run", "moved", "", None)) == 3
    plant_classes(tmp_path / "others", {"ant": 10, "bee": 10}, start=100)  # new images of the same names
    assert len(choose_split("run", "others", "", None)) == 20


# Bad input ------------------------------------------------------------------------------------------------------------


INVALID: dict[str, tuple[str, int, str]] = {  # name -> arguments after the model, exit code, part of the message
    "other classes": ("--data digits", 3, "7 classes"),
    "no labels": ("--data bare", 3, "2 of 2 images"),
    "a label is missing": ("--data half", 3, "1 of 2 images"),
    "no images": ("--data empty", 3, "empty"),
    "no such split": ("--data photos --split test", 3, "--split"),
    "batch": ("--data digits --batch 0", 2, "batch"),
    "crop": ("--data digits --crop 1.5", 2, "crop"),
    "out": ("--data digits --out file/x", 5, "file/x"),
    "the folder of a run": ("--data digits --out run", 2, "folder of a run"),
}


@pytest.mark.parametrize(("words", "code", "part"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_and_data_are_one_line(
    words: str, code: int, part: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_model(Path("model.safetensors"), classes=7)
    write_parquet(Path("bare/test-00.parquet"), [png(1), png(2)], None)
    write_parquet(Path("half/test-00.parquet"), [png(1), png(2)], [6, -1])
    Path("empty/test").mkdir(parents=True)
    plant_classes(Path("photos"), {"ant": 1})
    plant(Path(), {"file": b"", "run/config.json": b"{}"})
    assert part in fail(capsys, "evaluate", model, *words.split(), code=code)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("evaluate MODEL --data digits", torch.OutOfMemoryError("CUDA out of memory. Tried to get 20 GiB.\nmore")),
        ("probe MODEL --data digits", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")),
        ("predict MODEL digits --json", MemoryError()),
    ],
)
def test_out_of_memory_has_exit_code_5(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str, error: Exception
) -> None:
    for method in ("logits", "features"):
        monkeypatch.setattr(Predictor, method, small_runs.fail(error))
    model = str(save_model(tmp_path / "model.safetensors", classes=10))
    assert "--batch" in fail(capsys, *command.replace("MODEL", model).split(), "--device", "cpu", code=5)


def test_unreadable_images_are_counted_named_and_not_scored(
    tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plant_classes(tmp_path / "photos" / "test", {"ant": 4, "bee": 4})
    (folder / "ant" / "2.png").write_bytes(png(2)[:40])
    model = save_model(tmp_path / "model.safetensors", ("ant", "bee"), classes=2)
    card, rows = evaluate_to(capsys, tmp_path / "out", str(model), "--data", str(tmp_path / "photos"))
    assert (card["images"], card["unreadable"]) == (7, 1)
    assert "ant/2.png" not in rows["name"]
    assert len(rows["name"]) == 7
    assert "ant/2.png" in caplog.text
    assert "1 image could not be read" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.usefixtures("no_report")
def test_preprocessing_is_the_models_own_by_default(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    plant(folder / "test", {f"{one}/{at}.png": encode(photo(40, 90, at)) for one in ("ant", "bee") for at in range(3)})
    model = tiny.vit(torch.float32, image_size=(16, 16), classes=2)
    model.about = About(preprocess=Preprocess(resize="crop", crop=0.5, interpolation="bicubic"))
    weights = plainvit.save(model, tmp_path / "model.safetensors")
    own = evaluated(weights, folder, tmp_path / "own")
    changed = evaluated(weights, folder, tmp_path / "changed", preprocess={"resize": "squash"})
    settings = own.card.preprocess["settings"] | {"resize": "squash"}
    assert settings.pop("crop") == 0.5
    assert changed.card.preprocess["settings"] == settings  # nothing is cropped
    with pytest.raises(ValueError, match="--resize crop"):
        evaluated(weights, folder, tmp_path / "both", preprocess={"resize": "squash", "crop": 0.5})
    assert own.card.preprocess["hash"] != changed.card.preprocess["hash"]
    assert not np.allclose(own.result.nll, changed.result.nll)
