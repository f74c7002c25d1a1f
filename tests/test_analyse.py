"""`plainvit analyse` on every kind of model: what it writes and omits, its warnings and its errors.

Rollout is compared with known masks: on `shapes`, that of a trained model lies on the object.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tiny
import torch
from pictures import plant, plant_classes, png
from PIL import Image
from shell import Capture, fail, report
from small_runs import config as small_config
from small_runs import fail as fail_with
from small_runs import without_figures
from subjects import make_subject, predictor
from tiny import filled, hybrid, vit

import plainvit
from plainvit.analyse.analysis import analyse_model, display_name, run_analyses
from plainvit.analyse.attention import NotApplicableError
from plainvit.analyse.explorer import explorer_section
from plainvit.analyse.findings import analyse_filters
from plainvit.analyse.subject import Subject, gather, open_images
from plainvit.config import About
from plainvit.data.decode import DataError
from plainvit.data.sources import open_source
from plainvit.models import ResNet, ViT
from plainvit.names import configure
from plainvit.runtime.display import Display
from plainvit.studies.learned_structure import rollout_on_object, shapes_config

ALONE = {"pool": "average", "class_token": False}
KINDS: dict[str, Any] = {
    "class token": lambda: vit(),
    "average": lambda: vit(**ALONE),
    "attention pool": lambda: vit(pool="attention", class_token=False),
    "registers": lambda: vit(registers=2),
    "distillation": lambda: vit(distillation=True),
    "relative": lambda: vit(posemb="relative"),
    "2d": lambda: vit(posemb="2d"),
    "sincos": lambda: vit(posemb="sincos2d", **ALONE),
    "no positions": lambda: vit(posemb="none"),
    "axial": lambda: vit(axial=True, **ALONE),
    "hybrid": lambda: hybrid(blocks=(1,), image_size=(16, 32)),
    "one layer": lambda: vit(depth=1),
    "one patch": lambda: vit(image_size=(8, 8)),
    "no head": lambda: vit(classes=0),
    "resnet": lambda: resnet(),
}


def resnet() -> ResNet:
    config = configure("BiT-R50x1", classes=7)
    return filled(config.replace(blocks=(1,), image_size=(32, 48)), torch.float32)


every_kind = pytest.mark.parametrize("kind", tiny.mostly_slow(KINDS, 7))


def run_all(subject: Subject) -> tuple[set[str], list[str]]:
    """(names of the findings, notes on those that are omitted)."""
    with Display("", 1, quiet=True) as display:
        names = {finding.name for finding in run_analyses(subject, display)}
    return names, subject.notes


ALL = {"filters", "positions", "attention-distance", "attention-maps"}
LACKS = {
    "no positions": {"positions"},
    "relative": {"positions"},
    "axial": {"attention-maps"},
    "resnet": ALL - {"filters"},
}


@every_kind
def test_each_model_kind_gets_the_applicable_figures(kind: str) -> None:
    subject = make_subject(KINDS[kind]())
    with torch.no_grad():
        before = subject.model(subject.images)
    names, notes = run_all(subject)
    assert names == ALL - LACKS.get(kind, set())
    assert len(notes) == (kind in LACKS)  # one for each reason
    with torch.no_grad():
        assert torch.equal(subject.model(subject.images), before)  # to the last bit, and no hook was left behind
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    if isinstance(subject.model, ViT) and not subject.model.config.axial:
        assert "explorer-data" in explorer_section(subject)[0].body


# What is written ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of seven classes, and a model for them."""
    root = tmp_path_factory.mktemp("analyse")
    plant_classes(root / "photos" / "test", {f"kind {number}": 2 for number in range(7)})
    model = vit(dtype=torch.float32)
    model.about = About(class_names=tuple(f"kind {number}" for number in range(7)))
    plainvit.save(model, root / "model.safetensors")
    return root


def test_analysis_writes_figures_data_and_page(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("--data", folder / "photos", "--out", tmp_path, "--count", 6, "--device", "cpu")
    printed = report(capsys, "analyse", folder / "model.safetensors", *words)
    assert Path(printed["report"]) == tmp_path / "analysis.html"
    assert {Path(path).stem for path in printed["figures"]} == ALL
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == ALL
    for path in printed["figures"]:
        with Image.open(path) as image:
            assert min(image.size) > 150
    model = plainvit.load(folder / "model.safetensors")
    data = {name: json.loads((tmp_path / "figures" / f"{name}.json").read_text()) for name in ALL}
    assert np.shape(data["attention-distance"]["distance"]) == (model.config.depth, model.config.heads)
    assert np.shape(data["positions"]["similarity"]) == (3, 5, 3, 5)
    assert set(data["attention-maps"]) == {"names", "rollout", "rollout, no residual", "last layer", "relevance"}
    assert np.shape(data["attention-maps"]["rollout"]) == (6, 3, 5)
    text = Path(printed["report"]).read_text()
    assert f"Analysis of {folder.name}" in text  # model.safetensors is not used as a name
    assert "3 layers, 4 heads, width 48 and 3 x 5 patches of 8 x 8 pixels" in text


@pytest.mark.slow
def test_a_run_folder_needs_no_data_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_figures(monkeypatch)
    plainvit.fit(small_config(steps=2, evaluations=1), tmp_path / "numerals", quiet=True)
    written = analyse_model(tmp_path / "numerals", count=4, device="cpu", quiet=True)
    assert written.report == tmp_path / "numerals" / "analysis.html"
    assert "Analysis of numerals" in written.report.read_text()
    assert not written.notes


# Warnings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "count", "labeled", "warned"),
    [(6, 40, True, True), (30, 40, True, False), (1, 8, True, False), (0, 40, False, False)],
)
def test_a_model_at_chance_level_is_warned_about(correct: int, count: int, labeled: bool, warned: bool) -> None:
    """Of seven classes; eight images are too few to tell."""
    subject = make_subject(vit(), count)
    predicted = subject.logits.argmax(-1)
    labels = torch.where(torch.arange(count) < correct, predicted, (predicted + 1) % 7)
    subject.labels = labels if labeled else None
    assert len(subject.find_warnings()) == warned


def test_display_names() -> None:
    assert display_name("hf:google/vit-base") == "vit-base"
    assert display_name("runs/photos/") == "photos"


# Errors ---------------------------------------------------------------------------------------------------------------


INVALID = [  # arguments after the model, exit code, part of the message
    ("", 2, "--data"),
    ("--data photos --count 0", 2, "--count"),
    ("--data photos --split tset", 2, "split 'tset' is unknown; nearest: test"),
    ("--data photos --out file", 5, "file"),
    ("--data no/such/folder", 3, "no folder or list"),
    ("--data tiny-imagnet", 2, "'tiny-imagnet' is neither"),
    ("--data broken", 3, "a.png: "),
]


@pytest.mark.parametrize(("words", "code", "part"), INVALID)
def test_invalid_input_is_one_line(
    words: str, code: int, part: str, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    plant(Path(), {"file": b"in the way", "broken/a.png": b"no picture", "broken/b.jpg": b"nor this"})
    assert part in fail(capsys, "analyse", "model.safetensors", *words.split(), "--device", "cpu", code=code)


def test_a_missing_model_comes_before_missing_data(capsys: Capture) -> None:
    assert "no file or folder runs/nope" in fail(capsys, "analyse", "runs/nope", code=2)
    assert "nor published weights" in fail(capsys, "analyse", "vit_nope", code=2)
    assert "--data is required" in fail(capsys, "analyse", "vit_s16_augreg_i21k_i1k_224", code=2)


def test_unavailable_published_weights_suggest_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = fail(capsys, "analyse", "vit_s16_augreg_i21k_i1k_224", "--data", "digits", code=2)
    assert "hf download" in message
    assert "plainvit train pixels" in message


def test_unreadable_images_are_skipped_and_counted(tmp_path: Path) -> None:
    plant(tmp_path, {"a.png": png(1), "b.png": b"broken", "c.png": png(2)})
    subject = gather(predictor(vit()), str(tmp_path), "", "", 8)
    assert sorted(Path(name).name for name in subject.names) == ["a.png", "c.png"]
    assert subject.labels is None
    assert any("1 of 3 images" in note for note in subject.notes)


def test_open_images_accepts_folders_globs_and_datasets(tmp_path: Path) -> None:
    plant(tmp_path, {"one.png": png(1), "two.png": png(2)})
    assert len(open_images(str(tmp_path), "", "")) == 2
    assert len(open_images(f"{tmp_path}/o*.png", "", "")) == 1
    assert len(open_images("shapes:size=16,count=5", "", "")) == 5
    with pytest.raises(DataError, match="data root"):
        open_images("tiny-imagenet", "", "")


def test_an_analysis_that_does_not_apply_keeps_its_earlier_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def analyse(subject: Subject) -> Any:
        yield from analyse_filters(subject)
        raise NotApplicableError("no more of it")

    monkeypatch.setattr("plainvit.analyse.analysis.ANALYSES", {"halves": analyse})
    assert run_all(make_subject(vit())) == ({"filters"}, ["Omitted: halves (no more of it)."])
    monkeypatch.setattr("plainvit.analyse.analysis.ANALYSES", {"broken": fail_with(ValueError("shapes differ"))})
    with pytest.raises(ValueError, match="shapes differ"):  # any other error is not a note
        run_all(make_subject(vit()))


# Rollout -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rollout_lies_on_the_object_of_a_trained_model_and_not_of_an_untrained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With timm's small initial weights, whose attention is nearly uniform.

    With Google's larger ones, texture alone draws attention to the object before any training.
    """
    without_figures(monkeypatch)
    made = shapes_config("cpu").replace(data="shapes:size=32,count=6000", steps=700, holdout=0.02, workers=0)
    plainvit.fit(made, tmp_path / "run", quiet=True)
    source = open_source("shapes:size=32,count=200", "test")
    model = plainvit.load(tmp_path / "run").eval()
    mass, area, _ = rollout_on_object(model, source, 200)
    assert scipy.stats.wilcoxon(mass, area, alternative="greater").pvalue < 0.01
    assert mass.mean() > 1.05 * area.mean()
    for seed in range(3):
        untrained = model.initialize(torch.Generator().manual_seed(seed))
        mass, area, _ = rollout_on_object(untrained, source, 200)
        assert scipy.stats.wilcoxon(mass, area, alternative="greater").pvalue > 0.01
        assert mass.mean() == pytest.approx(area.mean(), rel=0.02)
