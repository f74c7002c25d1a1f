"""`plainvit analyse` on every kind of model: what it writes and omits, its warnings and its errors.

Rollout is compared with known masks: on `shapes`, that of a trained model lies on the object.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tiny
import torch
from pictures import plant, plant_classes, png, real_data
from PIL import Image
from scipy.stats import wilcoxon
from small_runs import without_figures
from tiny import filled, hybrid, vit

import plainvit
from plainvit.analyse import attention
from plainvit.analyse.analysis import ANALYSES, analyse_model, display_name, find_warnings, run_analyses
from plainvit.analyse.explorer import explorer, plan
from plainvit.analyse.findings import analyse_filters
from plainvit.analyse.maps import compute_gain
from plainvit.analyse.subject import WORK, Subject, gather, open_images
from plainvit.cli import main
from plainvit.config import About, Augment, Config, Optim, ViTConfig
from plainvit.data.decode import DataError
from plainvit.data.generated import Shapes
from plainvit.data.sources import open_source
from plainvit.evaluate.predictor import Predictor
from plainvit.models import ResNet, ViT
from plainvit.names import configure
from plainvit.runtime.display import Display

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


def predictor(model: Any) -> Predictor:
    return Predictor(model.float(), device="cpu", precision="fp32")


def subject(model: Any, count: int = 3) -> Subject:
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, *model.config.image_size)
    shown = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return Subject(predictor(model), shown, [f"{place}.png" for place in range(count)], None)


def run_all(looked: Subject) -> tuple[set[str], list[str]]:
    """(names of the findings, reasons for those that are omitted)."""
    names, reasons = set(), []
    for analyse in ANALYSES.values():
        try:
            names |= {finding.name for finding in analyse(looked)}
        except ValueError as error:
            reasons.append(str(error))
    return names, reasons


ALL = {
    *("filters", "positions", "attention-distance", "attention-entropy", "attention-maps"),
    *("faithfulness", "token-norms", "layer-similarity", "removal", "hidden-patches"),
}
LACKS = {
    "no positions": {"positions"},
    "axial": {"attention-maps", "faithfulness"},
    "no head": {"faithfulness", "removal", "hidden-patches"},
    "resnet": ALL - {"filters", "layer-similarity", "hidden-patches"},
}


@every_kind
def test_each_model_kind_gets_the_applicable_figures(kind: str) -> None:
    looked = subject(KINDS[kind]())
    with torch.no_grad():
        before = looked.model(looked.images)
    names, reasons = run_all(looked)
    assert names == ALL - LACKS.get(kind, set())
    assert bool(reasons) == (kind in LACKS)
    assert all("\n" not in reason and not reason.endswith(".") for reason in reasons)
    with torch.no_grad():
        assert torch.equal(looked.model(looked.images), before)  # to the last bit, and no hook was left behind
    assert all(parameter.grad is None for parameter in looked.model.parameters())
    if isinstance(looked.model, ViT) and not looked.model.config.axial:
        shown = [{"source": "", "name": name, "prediction": ""} for name in looked.names]
        assert "explorer-data" in explorer(looked.model, looked.images, shown, plan(looked.model, 3))[0]


def test_one_image_is_enough() -> None:
    assert run_all(subject(vit(), 1)) == (ALL, [])


def test_number_of_images_follows_the_compute_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = subject(vit(), 20)
    monkeypatch.setitem(WORK, "cpu", 1.0)
    assert looked.affordable_images(100, 64) == 16
    looked.thorough = True
    assert looked.affordable_images(100, 64) == 20


def test_a_map_is_better_only_if_significant() -> None:
    better, none, worse = (
        compute_gain(values, [0.0] * 4) for values in ([0.3, 0.2, 0.25, 0.3], [1, -1, 1, -1], [-1] * 4)
    )
    assert [one.verdict for one in (better, none, worse)] == ["better", "no better", "worse"]
    few = scipy.stats.ttest_1samp([0.3, 0.2, 0.25, 0.3], 0).confidence_interval(0.95)
    assert (better.low, better.high) == pytest.approx(tuple(few), abs=1e-5)
    assert compute_gain([0.3, 0.1], [0.0] * 2).verdict == "no better"  # 1.96 standard errors of two images are 70 %
    assert compute_gain([0.3], [0.1]).verdict == "no better"  # one image tells nothing


# What is written ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of seven classes, and models for them."""
    root = tmp_path_factory.mktemp("analyse")
    plant_classes(root / "photos" / "test", {f"kind {number}": 2 for number in range(7)})
    model = vit(dtype=torch.float32)
    model.about = About(class_names=tuple(f"kind {number}" for number in range(7)))
    plainvit.save(model, root / "model.safetensors")
    plainvit.save(resnet(), root / "bit.safetensors")
    return root


def test_analysis_writes_figures_data_and_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(folder / "photos"), "--out", str(tmp_path), "--count", "6", "--device", "cpu", "--json"]
    main(["analyse", str(folder / "model.safetensors"), *words, "--against", str(folder / "bit.safetensors")])
    found = json.loads(capsys.readouterr().out)
    assert Path(found["report"]) == tmp_path / "analysis.html"
    figures = {Path(path).stem for path in found["figures"]}
    assert figures >= ALL | {"layer-similarity-against", "faithfulness-insertion"}
    assert figures == {path.stem for path in (tmp_path / "figures").glob("*.png")}
    for path in found["figures"]:
        with Image.open(path) as image:
            assert min(image.size) > 150
        assert json.loads(Path(path).with_suffix(".json").read_text())
    text = Path(found["report"]).read_text()
    assert f"Analysis of {folder.name}" in text  # model.safetensors is not used as a name
    assert "3 layers, 4 heads, width 48 and 3 x 5 patches of 8 x 8 pixels" in text
    assert "accuracy is agreement" not in text  # these labels are the model's


@pytest.mark.slow
def test_a_run_folder_needs_no_data_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_figures(monkeypatch)
    model = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=(4, 4), image_size=(8, 8), classes=0)
    made = Config(model=model, data="digits", steps=2, batch=16, holdout=0.05, evaluations=1, workers=0,
                  augment=Augment(crop="none"))  # fmt: skip
    plainvit.fit(made, tmp_path / "numerals", quiet=True)
    written = analyse_model(tmp_path / "numerals", count=4, device="cpu", quiet=True)
    assert written.report == tmp_path / "numerals" / "analysis.html"
    assert "Analysis of numerals" in written.report.read_text()
    assert not written.notes


# Warnings -------------------------------------------------------------------------------------------------------------


def answering(right: int, count: int = 40) -> Subject:
    """A model of seven classes that gets so many of the images right."""
    looked = subject(vit(), count)
    own = looked.logits.argmax(-1)
    looked.labels = torch.where(torch.arange(count) < right, own, (own + 1) % 7)
    return looked


def test_a_model_at_chance_level_is_warned_about() -> None:
    (warning,) = find_warnings(answering(6))
    assert "15 %" in warning
    assert "chance (14 %)" in warning
    assert find_warnings(answering(30)) == []
    assert find_warnings(answering(1, 8)) == []  # too few images
    unlabelled = answering(0)
    unlabelled.labels = None
    assert find_warnings(unlabelled) == []


def test_display_names() -> None:
    assert display_name("weights/B_16.npz") == "B_16"
    assert display_name("hf:google/vit-base") == "vit-base"
    assert display_name("runs/photos/") == "photos"


# Errors ---------------------------------------------------------------------------------------------------------------


def fail(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["analyse", *words, "--device", "cpu"])
    message = capsys.readouterr().err.strip()
    assert ended.value.code == code
    assert len(message.splitlines()) == 1
    return message


def test_invalid_input_exits_with_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, photos = str(folder / "model.safetensors"), ["--data", str(folder / "photos")]
    assert "--data" in fail([model], capsys, 2)
    assert "--count" in fail([model, *photos, "--count", "0"], capsys, 2)
    assert "split 'tset' is unknown; nearest: test" in fail([model, *photos, "--split", "tset"], capsys, 2)
    assert "no train split" in fail([model, *photos, "--split", "train"], capsys, 3)
    assert "no folder or list" in fail([model, "--data", "no/such/folder"], capsys, 3)
    assert "'tiny-imagnet' is neither" in fail([model, "--data", "tiny-imagnet"], capsys, 2)
    (tmp_path / "empty").mkdir()
    assert "no images" in fail([model, "--data", str(tmp_path / "empty")], capsys, 3)
    plant(tmp_path / "broken", {"a.png": b"no picture", "b.jpg": b"nor this"})
    assert "a.png: " in fail([model, "--data", str(tmp_path / "broken")], capsys, 3)
    assert "--against" in fail([model, *photos, "--against", str(tmp_path / "empty")], capsys, 2)


def test_unavailable_published_weights_suggest_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = fail(["vit_s16_augreg_i21k_i1k_224", "--data", "digits"], capsys, 2)
    assert "hf download" in said
    assert "plainvit train pixels" in said


def test_out_that_is_a_file_exits_with_5(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    words = [str(folder / "model.safetensors"), "--data", str(folder / "photos"), "--out", str(tmp_path / "file")]
    assert str(tmp_path / "file") in fail(words, capsys, 5)


def test_unreadable_images_are_skipped_and_counted(tmp_path: Path) -> None:
    plant(tmp_path, {"a.png": png(1), "b.png": b"broken", "c.png": png(2)})
    looked = gather(predictor(vit()), str(tmp_path), "", "", 8)
    assert sorted(Path(name).name for name in looked.names) == ["a.png", "c.png"]
    assert looked.labels is None
    assert any("1 of 3 images" in note for note in looked.notes)


def test_open_images_accepts_folders_globs_and_datasets(tmp_path: Path) -> None:
    plant(tmp_path, {"one.png": png(1), "two.png": png(2)})
    assert len(open_images(str(tmp_path), "", "")) == 2
    assert len(open_images(f"{tmp_path}/o*.png", "", "")) == 1
    assert len(open_images("shapes:size=16,count=5", "", "")) == 5
    with pytest.raises(DataError, match="data root"):
        open_images("tiny-imagenet", "", "")


def test_an_analysis_that_raises_keeps_its_earlier_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def analyse(looked: Subject) -> Any:
        yield from analyse_filters(looked)
        raise ValueError("no more of it")

    monkeypatch.setattr("plainvit.analyse.analysis.ANALYSES", {"halves": analyse})
    looked = subject(vit())
    with Display("", 1, quiet=True) as display:
        assert [finding.name for finding in run_analyses(looked, display)] == ["filters"]
    assert looked.notes == ["Omitted: halves (no more of it)."]


def test_colours_of_grey_images_are_not_called_learned() -> None:
    looked = subject(vit())
    assert "patterns and colours are learned" in next(iter(analyse_filters(looked))).text
    looked.images = looked.images[:, :1].expand(-1, 3, -1, -1)
    assert "colours of grey images" in next(iter(analyse_filters(looked))).text


# Rollout -------------------------------------------------------------------------------------------------------------


def on_object(model: ViT, source: Shapes, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(share of rollout on the object, share of the area that it covers) of each image."""
    drawn = [source.draw(index) for index in range(count)]
    shown = torch.stack([torch.from_numpy(pixels).permute(2, 0, 1) for pixels, _, _ in drawn])
    masks = torch.stack([torch.from_numpy(mask) for _, mask, _ in drawn]).double()
    rolled = attention.rollout(model, shown).double()
    covered = torch.nn.functional.avg_pool2d(masks[:, None], model.config.patch)[:, 0]
    return ((rolled * covered).sum((1, 2)) / rolled.sum((1, 2))).numpy(), masks.mean((1, 2)).numpy()


@pytest.mark.slow
def test_rollout_lies_on_the_object_of_a_trained_model_and_not_of_an_untrained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With timm's small initial weights, whose attention is nearly uniform.

    With Google's larger ones, texture alone draws attention to the object before any training.
    """
    without_figures(monkeypatch)
    shape = ViTConfig(
        width=64, depth=4, heads=4, mlp_dim=128, patch=(4, 4), image_size=(32, 32), classes=0, init="timm"
    )
    optim, augment = Optim(lr=1e-3, warmup=0.2, weight_decay=0.05), Augment(crop="none")
    made = Config(model=shape, data="shapes:size=32,count=6000", steps=700, batch=64, holdout=0.02, optim=optim,
                  augment=augment, evaluations=1, workers=0)  # fmt: skip
    plainvit.fit(made, tmp_path / "run", quiet=True)
    source = open_source("shapes:size=32,count=200", "test")
    assert isinstance(source, Shapes)
    model = plainvit.load(tmp_path / "run").eval()
    mass, area = on_object(model, source, 200)
    assert wilcoxon(mass, area, alternative="greater").pvalue < 0.01
    assert mass.mean() > 1.05 * area.mean()
    for seed in range(3):
        mass, area = on_object(model.initialise(torch.Generator().manual_seed(seed)), source, 200)
        assert wilcoxon(mass, area, alternative="greater").pvalue > 0.01
        assert mass.mean() == pytest.approx(area.mean(), rel=0.02)


@pytest.mark.slow
def test_real_photos(tmp_path: Path) -> None:
    photos = real_data() / "imagenet-photos"
    plainvit.save(vit(dtype=torch.float32), tmp_path / "model.safetensors")
    words = ["analyse", str(tmp_path / "model.safetensors"), "--data", str(photos), "--out", str(tmp_path)]
    command = [sys.executable, "-m", "plainvit", *words, "--count", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "analysis.html").exists()
