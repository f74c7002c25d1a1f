"""Measurements of studies against SciPy, NumPy, scikit-learn and planted weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import small_runs as runs
import torch
from scipy.fft import dctn
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import plainvit
from plainvit.config import Config, ViTConfig
from plainvit.data.generated import shapes
from plainvit.data.sources import open_source
from plainvit.data.splits import open_splits
from plainvit.models import ViT, build
from plainvit.studies import learned_structure, measures
from plainvit.studies.base_configs import base
from plainvit.studies.study import held_out
from plainvit.train.run import fit
from plainvit.train.transfer import complete_config, make_initial_model

SMALL = ViTConfig(width=32, depth=3, heads=4, mlp_dim=32, patch=(4, 4), image_size=(24, 32), classes=0)
DIGITS = Config(model=SMALL, data="digits", holdout=0.3, steps=5)
MODEL = ViTConfig(width=24, depth=1, heads=2, mlp_dim=24, patch=(4, 4), image_size=(8, 8), classes=0)
TUNED = Config(data="digits", holdout=0.3, steps=5, model=MODEL)


def saved(model: ViT, folder: Path) -> Path:
    plainvit.save(model, folder / "model.safetensors")
    return folder


# Accuracy -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A short run on half of the training images."""
    config = runs.config(steps=40, batch=32, train_fraction=0.5, evaluations=1, device="cpu")
    folder = tmp_path_factory.mktemp("runs") / "run"
    fit(config, folder, quiet=True, bare=True)
    return config, folder


def test_overfitting_is_measured_on_the_training_images(run: tuple[Config, Path]) -> None:
    """Against scikit-learn's copy of the digits and a plain forward pass."""
    config, folder = run
    found = measures.overfitting(config, folder)
    train = open_splits(config).train
    numbers = [int(train.name(index).removeprefix("digits-")) for index in range(len(train))]
    assert len(numbers) == pytest.approx(0.5 * 0.95 * 1437, abs=10)
    digits = load_digits()
    pixels = (digits.images[numbers] * (255 / 16)).round().astype(np.uint8)
    images = torch.from_numpy(pixels)[:, None].repeat(1, 3, 1, 1)
    with torch.no_grad():
        predictions = plainvit.load(folder).eval()(images).argmax(1).numpy()
    right = float((predictions == digits.target[numbers]).mean())
    assert found["train"] == pytest.approx(right, abs=2 / len(numbers))
    assert found["overfitting"] == pytest.approx(found["train"] - found["top1"])


def test_halves_of_the_held_out_images_make_up_the_whole(run: tuple[Config, Path]) -> None:
    config, folder = run
    found, val = measures.halves(config, folder), open_splits(config).val
    sizes = {"choice": (len(val) + 1) // 2, "top1": len(val) // 2}
    right = sum(found[name] * size for name, size in sizes.items())
    assert right == pytest.approx(held_out(config, folder)["top1"] * len(val), abs=1.01)


def test_few_shot_is_measured_on_the_initial_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    (after / "results.json").write_text(json.dumps({"val": {"top1": 0.75, "nll": 1.0, "images": 100}}))
    plainvit.save(build(MODEL).initialize(torch.Generator().manual_seed(5)), before / "model.safetensors")
    monkeypatch.setattr(measures, "EVALUATED", 100)
    found = measures.with_few_shot(TUNED.replace(model=None, init=str(before)), after)
    assert found["top1"] == 0.75
    scratch = measures.with_few_shot(TUNED.replace(seed=5), after)
    assert scratch["few_shot"] == found["few_shot"], "from scratch it is the weights of its seed"
    assert measures.with_few_shot(TUNED.replace(seed=6), after)["few_shot"] != found["few_shot"]


# Models ---------------------------------------------------------------------------------------------------------------


def test_untrained_model_has_the_initial_weights_of_its_seed(tmp_path: Path) -> None:
    config = base("cpu").replace(seed=3)
    twin = measures.load_model(measures.untrained_config(config), tmp_path).state_dict()
    splits = open_splits(config)
    start = make_initial_model(complete_config(config, splits), splits).state_dict()
    assert set(start) - set(twin) == {"head.weight", "head.bias"}
    assert all(torch.equal(start[name], twin[name]) for name in twin)


def test_planted_positions_are_found(tmp_path: Path) -> None:
    """Waves of the row and the column: near is similar, row and column stand out."""
    model = build(SMALL)
    (h, w), width = SMALL.grid, SMALL.width // 4
    y, x = np.divmod(np.arange(h * w), w)
    waves = np.concatenate([f(np.outer(at, np.ones(width)) / 4) for at in (y, x) for f in (np.sin, np.cos)], 1)
    state = model.state_dict()
    name = next(name for name in state if name.startswith("positions") and state[name].shape[-1] == SMALL.width)
    state[name][..., -h * w :, :] = torch.from_numpy(waves).float()
    model.load_state_dict(state)
    found = learned_structure.measure_positions(DIGITS, saved(model, tmp_path))
    assert found["nearness"] > 0.95 > found["chance"]
    assert found["contrast"] > 0.05
    drawn = learned_structure.measure_positions(measures.untrained_config(DIGITS), tmp_path)
    assert abs(drawn["nearness"]) < 0.3
    assert 0 < drawn["chance"] < 0.2


@pytest.mark.parametrize("side", [2, 5, 8])
def test_low_frequencies_are_those_of_the_cosine_transform(side: int) -> None:
    tiles = np.random.default_rng(0).normal(size=(400, side, side, 3))
    energy = np.asarray(dctn(tiles, axes=(1, 2), norm="ortho")) ** 2
    half = -(-side // 2)
    expected = energy[:, :half, :half].sum((1, 2, 3)) / (tiles**2).sum((1, 2, 3))
    assert learned_structure.low_frequency_fraction(tiles) == pytest.approx(expected)
    assert learned_structure.low_frequency_fraction(np.ones((1, side, side, 3))) == pytest.approx([1])


def test_effective_rank() -> None:
    assert learned_structure.effective_rank(np.array([0.25] * 4 + [0.0])) == pytest.approx(4)
    assert learned_structure.effective_rank(np.array([1.0, 0.0])) == pytest.approx(1)


def test_planted_filters_are_found(tmp_path: Path) -> None:
    """Kernels that are slopes along both axes: of rank two and smooth."""
    model = build(SMALL)
    slope = torch.arange(4.0) - 1.5
    basis = torch.stack((slope[:, None].expand(4, 4), slope.expand(4, 4))).expand(3, 2, 4, 4).transpose(0, 1)
    weights = torch.randn(SMALL.width, 2, generator=torch.Generator().manual_seed(0)) @ basis.reshape(2, -1)
    model.embedding.weight.data.copy_(weights)
    found = learned_structure.measure_filters(DIGITS, saved(model, tmp_path))
    assert 1 < found["rank"] <= 2.0001
    assert found["smooth"] > 0.9
    drawn = learned_structure.measure_filters(measures.untrained_config(DIGITS), tmp_path)
    assert drawn["rank"] > 15
    assert drawn["smooth"] == pytest.approx(0.25, abs=0.1)


def test_statistics_of_distances() -> None:
    found = np.random.default_rng(0).uniform(0, 30, (7, 3))
    numbers = learned_structure.summarize_distances(found)
    assert numbers["range"] == found[0].max() - found[0].min()
    assert numbers["nearest"] == min(found[0])
    assert numbers["range_over_half"] == pytest.approx(np.ptp(found[0]) - found.max() / 2)
    assert numbers["late_over_early"] == pytest.approx(found[5:].mean() - found[:2].mean())
    assert numbers["rise"] == pytest.approx(spearmanr(range(7), found.mean(1)).statistic)
    assert np.array_equal(learned_structure.read_heads(numbers), found)


def even(config: ViTConfig) -> ViT:
    """All queries are zero, so that each token attends to all others equally."""
    model = build(config)
    for name, weight in model.named_parameters():
        if "qkv" in name:
            weight.data[: config.width] = 0
    return model.eval()


def test_uniform_attention_has_the_mean_patch_distance(tmp_path: Path) -> None:
    found = learned_structure.measure_attention(DIGITS, saved(even(SMALL), tmp_path))
    h, w = SMALL.grid
    places = [(4 * y, 4 * x) for y in range(h) for x in range(w)]
    assert found["nearest"] == pytest.approx(cdist(places, places).mean(), rel=1e-4)
    assert found["range"] == pytest.approx(0, abs=1e-3)


def test_the_share_of_a_rollout_on_an_object() -> None:
    """Uniform attention gives an object its share of the area; any other what its pixels add up to."""
    config = SMALL.replace(image_size=(32, 32), heads=2)
    source = shapes("val", "size=32,count=6")
    mass, area, _ = learned_structure.rollout_on_object(even(config), source, 6)
    assert mass == pytest.approx(area, rel=1e-5)
    model = build(config.replace(init="google"))
    model.initialize(torch.Generator().manual_seed(0)).embedding.weight.data.mul_(5)
    mass, _, maps = learned_structure.rollout_on_object(model.eval(), source, 6)
    for index, rolled in enumerate(maps):
        pixels = np.kron(rolled, np.ones((4, 4))) / 16
        assert mass[index] == pytest.approx(pixels[source.draw(index)[1]].sum())
    assert maps.std() > 1e-4


def test_an_untrained_model_has_no_favorite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_structure, "OBJECTS", 40)
    config = measures.untrained_config(learned_structure.shapes_config("cpu"))
    assert learned_structure.measure_rollout(config, tmp_path)["ratio"] == pytest.approx(1, abs=0.03)


# Data -----------------------------------------------------------------------------------------------------------------


def test_some_classes_of_digits() -> None:
    """Against scikit-learn's copy: the images of these digits alone, labeled by their place."""
    reference = load_digits()
    for split in ("train", "test"):
        source = open_source("digits:7905", split)
        assert source.classes == ("7", "9", "0", "5")
        numbers = [int(source.name(index).rpartition("-")[2]) for index in range(len(source))]
        assert [int(source.classes[label]) for label in source.labels] == reference.target[numbers].tolist()
        wanted = [n for n in range(1797) if (n % 5 == 0) == (split == "test") and reference.target[n] in (7, 9, 0, 5)]
        assert numbers == wanted
    for bad in ("digits:0a", "digits:00"):
        with pytest.raises(ValueError, match="digits:01234"):
            open_source(bad, "train")
