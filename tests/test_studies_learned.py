"""Claims 19 to 23: rules on planted results, both ways; measurements against SciPy, NumPy and planted weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

import plainvit
from plainvit.analyse.figures import save
from plainvit.config import Config, ResNetConfig, ViTConfig, differences
from plainvit.data.generated import shapes
from plainvit.data.splits import open_splits
from plainvit.models import ViT, build
from plainvit.studies import learned, rollout
from plainvit.studies.bases import base
from plainvit.studies.study import BUDGETS, Results, Study, hash_definition
from plainvit.train.transfer import initial_model, resolve

POSITIONS, FILTERS, ATTENTION, HYBRID = learned.STUDIES
SMALL = ViTConfig(width=32, depth=3, heads=4, mlp_dim=32, patch=(4, 4), image_size=(24, 32), classes=0)
DIGITS = Config(model=SMALL, data="digits", holdout=0.3, steps=5)


def planted(study: Study, means: dict[str, dict[str, float]], spread: float = 0.001, seeds: int = 3) -> Results:
    """Seeds that lie about each mean, every other arm's the other way round: equal means differ by noise alone."""
    noise = spread * np.linspace(1, -1, seeds)
    values = {
        arm: [{name: mean + float(one) for name, mean in of.items()} for one in noise * (-1) ** at]
        for at, (arm, of) in enumerate(means.items())
    }
    return Results({arm: study.arms("cpu")[arm] for arm in means}, values, study.metric)


def decided(study: Study, means: dict[str, dict[str, float]]) -> str:
    """The outcome; the same numbers decide nothing with two seeds."""
    assert study.decide(planted(study, means, seeds=2)).outcome == "not decided"
    return study.decide(planted(study, means)).outcome


def delivered(model: ViT, folder: Path) -> Path:
    plainvit.save(model, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("study", [*learned.STUDIES, rollout.STUDY], ids=lambda study: study.name)
def test_arms_of_every_budget_are_models_that_build(study: Study) -> None:
    for budget in BUDGETS:
        arms = study.arms(budget)
        assert hash_definition(arms) == hash_definition(study.arms(budget))
        for arm in arms.values():
            assert arm.config.model
            with torch.device("meta"):
                model = build(arm.config.model)
            assert isinstance(model, ViT)
            assert model.config.posemb == "1d", "the positions are learned, and know of no second dimension"


def test_the_base_is_one_arm_of_all_at_gpu() -> None:
    for study, arm in ((POSITIONS, "trained"), (FILTERS, "trained"), (ATTENTION, "trained"), (HYBRID, "ViT")):
        assert study.arms("gpu")[arm].config == base("gpu")


# Twins ----------------------------------------------------------------------------------------------------------------


def test_untrained_model_has_the_initial_weights_of_the_run(tmp_path: Path) -> None:
    config = base("cpu").replace(seed=3)
    arms = learned.trained_and_untrained(config)
    assert not arms["untrained"].trained
    twin = learned.load_model(arms["untrained"].config, tmp_path).state_dict()
    splits = open_splits(config)
    start = initial_model(resolve(config, splits), splits).state_dict()
    assert set(start) - set(twin) == {"head.weight", "head.bias"}
    assert all(torch.equal(start[name], twin[name]) for name in twin)
    other = learned.load_model(learned.untrained_config(config.replace(seed=4)), tmp_path).state_dict()
    assert not torch.equal(other["embedding.weight"], twin["embedding.weight"])


def test_a_run_is_measured_by_its_final_weights(tmp_path: Path) -> None:
    model = build(SMALL)
    assert isinstance(model, ViT)
    found = learned.load_model(DIGITS, delivered(model, tmp_path))
    assert torch.equal(found.embedding.weight, model.embedding.weight)
    plainvit.save(build(ResNetConfig(blocks=(1,))), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no attention"):
        learned.load_model(DIGITS, tmp_path)


# 19 -------------------------------------------------------------------------------------------------------------------


def positions(near: float, beside: float, elsewhere: float = 0.1) -> dict[str, float]:
    grid = {f"offset {y},{x}": 1.0 if x + y == 0 else near / (1 + x + y) for y in range(3) for x in range(3)}
    return {"nearness": near, "beside": beside, "elsewhere": elsewhere, "contrast": beside - elsewhere} | grid


@pytest.mark.parametrize(
    ("trained", "untrained", "outcome"),
    [
        (positions(0.8, 0.4), positions(0.0, 0.1), "reproduced"),
        (positions(0.3, 0.4), positions(0.0, 0.1), "not reproduced"),  # the nearer are not more similar
        (positions(0.8, 0.0), positions(0.0, 0.1), "not reproduced"),  # rows and columns do not stand out
        (positions(0.8, 0.4), positions(0.6, 0.1), "not reproduced"),  # nothing was learned
        (positions(0.8, 0.4), positions(0.0, 0.5), "not reproduced"),
        (positions(0.5, 0.4), positions(0.0, 0.1), "not decided"),
    ],
)
def test_positions_are_decided_by_their_rule(
    trained: dict[str, float], untrained: dict[str, float], outcome: str
) -> None:
    assert decided(POSITIONS, {"trained": trained, "untrained": untrained}) == outcome


def test_similarity_by_offset() -> None:
    random = np.random.default_rng(0).normal(size=(3, 4, 3, 4))
    found = learned.mean_by_offset(random)
    for rows in range(3):
        for columns in range(4):
            pairs = [
                random[a, b, c, d]
                for a, b, c, d in np.ndindex(3, 4, 3, 4)
                if (abs(a - c), abs(b - d)) == (rows, columns)
            ]
            assert found[rows, columns] == pytest.approx(np.mean(pairs))


def test_planted_positions_are_found(tmp_path: Path) -> None:
    """Waves of the row and the column: near is similar, row and column stand out."""
    model = build(SMALL)
    assert isinstance(model, ViT)
    (h, w), width = SMALL.grid, SMALL.width // 4
    y, x = np.divmod(np.arange(h * w), w)
    waves = np.concatenate([f(np.outer(at, np.ones(width)) / 4) for at in (y, x) for f in (np.sin, np.cos)], 1)
    state = model.state_dict()
    name = next(name for name in state if name.startswith("positions") and state[name].shape[-1] == SMALL.width)
    state[name][..., -h * w :, :] = torch.from_numpy(waves).float()
    model.load_state_dict(state)
    found = learned.measure_positions(DIGITS, delivered(model, tmp_path))
    cosine = lambda rows, columns: (np.cos(rows / 4) + np.cos(columns / 4)) / 2  # noqa: E731
    assert found["nearness"] > 0.95
    assert found["contrast"] > 0.05
    assert found["offset 2,3"] == pytest.approx(cosine(2, 3), abs=1e-6)
    drawn = learned.measure_positions(learned.untrained_config(DIGITS), tmp_path)
    assert abs(drawn["nearness"]) < 0.3
    assert drawn["offset 0,0"] == pytest.approx(1)


# 20 -------------------------------------------------------------------------------------------------------------------


def kernels(share: float, smooth: float) -> dict[str, float]:
    each = {f"variance {at}": share / 4 for at in range(4)} | {f"smooth {at}": smooth for at in range(4)}
    return {"share": share, "smooth": smooth, "count": 4.0} | each


@pytest.mark.parametrize(
    ("trained", "untrained", "outcome"),
    [
        (kernels(0.9, 0.8), kernels(0.4, 0.25), "reproduced"),
        (kernels(0.7, 0.8), kernels(0.4, 0.25), "not reproduced"),  # less than twice
        (kernels(0.9, 0.5), kernels(0.4, 0.25), "not reproduced"),  # rough
        (kernels(0.9, 0.6), kernels(0.4, 0.25), "not decided"),
    ],
)
def test_filters_are_decided_by_their_rule(
    trained: dict[str, float], untrained: dict[str, float], outcome: str
) -> None:
    assert decided(FILTERS, {"trained": trained, "untrained": untrained}) == outcome


@pytest.mark.parametrize("side", [2, 5, 8])
def test_low_frequencies_are_those_of_the_cosine_transform(side: int) -> None:
    tiles = np.random.default_rng(0).normal(size=(400, side, side, 3))
    energy = np.asarray(dctn(tiles, axes=(1, 2), norm="ortho")) ** 2
    half = -(-side // 2)
    expected = energy[:, :half, :half].sum((1, 2, 3)) / (tiles**2).sum((1, 2, 3))
    assert learned.low_frequency_share(tiles) == pytest.approx(expected)
    assert learned.low_frequency_share(tiles).mean() == pytest.approx((half / side) ** 2, abs=0.02), "noise"
    even = np.ones((1, side, side, 3))
    assert learned.low_frequency_share(even) == pytest.approx([1])


def test_a_checkerboard_is_rough() -> None:
    board = np.indices((8, 8)).sum(0) % 2 * 2.0 - 1
    assert learned.low_frequency_share(board[None, :, :, None])[0] < 0.01


def test_how_many_components_count() -> None:
    wide = {"width": 1024, "patch": (16, 16), "image_size": (32, 32)}  # 28 of it, as in the paper
    for changes, count in (({}, 3), ({"width": 192, "patch": (8, 8)}, 23), ({"patch": (2, 2)}, 1), (wide, 28)):
        with torch.device("meta"):
            model = build(SMALL.replace(**changes))
        assert isinstance(model, ViT)
        assert learned.count_components(model) == count


def test_planted_filters_are_found(tmp_path: Path) -> None:
    """Kernels that are slopes along both axes: two smooth components explain all."""
    model = build(SMALL)
    assert isinstance(model, ViT)
    slope = torch.arange(4.0) - 1.5
    basis = torch.stack((slope[:, None].expand(4, 4), slope.expand(4, 4))).expand(3, 2, 4, 4).transpose(0, 1)
    weights = torch.randn(SMALL.width, 2, generator=torch.Generator().manual_seed(0)) @ basis.reshape(2, -1)
    model.embedding.weight.data.copy_(weights)
    found = learned.measure_filters(DIGITS, delivered(model, tmp_path))
    assert found["share"] == pytest.approx(1)
    assert found["variance 0"] + found["variance 1"] == pytest.approx(1)
    assert found["smooth 0"] > 0.9
    drawn = learned.measure_filters(learned.untrained_config(DIGITS), tmp_path)
    assert drawn["share"] < 0.4
    assert drawn["smooth"] == pytest.approx(0.25, abs=0.15)


# 21 and 22 ------------------------------------------------------------------------------------------------------------


def looks(first: tuple[float, float], last: tuple[float, float]) -> dict[str, float]:
    """Of four layers of two heads, from the first to the last."""
    return learned.summarize_distances(np.linspace(first, last, 4))


@pytest.mark.parametrize(
    ("trained", "untrained", "outcome"),
    [
        (looks((5, 28), (29, 30)), looks((25, 26), (25, 26)), "reproduced"),
        (looks((20, 28), (29, 30)), looks((25, 26), (25, 26)), "not reproduced"),  # the first heads are similar
        (looks((5, 28), (4, 20)), looks((25, 26), (25, 26)), "not reproduced"),  # the last do not look far
        (looks((5, 28), (29, 30)), looks((2, 29), (2, 29)), "not reproduced"),  # as it was before
    ],
)
def test_attention_is_decided_by_its_rule(trained: dict[str, float], untrained: dict[str, float], outcome: str) -> None:
    assert decided(ATTENTION, {"trained": trained, "untrained": untrained}) == outcome


def test_the_hybrid_is_decided_by_its_rule() -> None:
    near, far = looks((5, 28), (29, 30)), looks((15, 28), (29, 30))
    assert decided(HYBRID, {"ViT": near, "hybrid": far}) == "reproduced"
    assert decided(HYBRID, {"ViT": far, "hybrid": near}) == "not reproduced"
    assert HYBRID.decide(planted(HYBRID, {"ViT": near, "hybrid": near})).outcome == "not decided"


def test_the_hybrid_differs_in_its_stem_alone() -> None:
    for budget in BUDGETS:
        arms = HYBRID.arms(budget)
        changed = differences(arms["ViT"].config, arms["hybrid"].config)
        assert all(name.startswith("model.") for name in changed)
        assert {name.split(".")[1] for name in changed} <= {"stem", "patch"}


def test_statistics_of_distances() -> None:
    found = np.random.default_rng(0).uniform(0, 30, (7, 3))
    told = learned.summarize_distances(found)
    assert told["range"] == found[0].max() - found[0].min()
    assert told["nearest"] == min(found[0])
    assert told["widest"] == max(found.ravel())
    assert told["early"] == pytest.approx(found[:2].mean())
    assert told["late"] == pytest.approx(found[5:].mean())
    assert told["rise"] == pytest.approx(spearmanr(range(7), found.mean(1)).statistic)  # pyright: ignore[reportAttributeAccessIssue]
    assert told["layer 6 head 2"] == found[6, 2]
    assert np.array_equal(learned._heads(told), found)


def even(config: ViTConfig) -> ViT:
    """All queries are zero, so that each token looks at all others alike."""
    model = build(config)
    assert isinstance(model, ViT)
    for name, weight in model.named_parameters():
        if "qkv" in name:
            weight.data[: config.width] = 0
    return model.eval()


def test_uniform_attention_has_the_mean_patch_distance(tmp_path: Path) -> None:
    found = learned.measure_attention(DIGITS, delivered(even(SMALL), tmp_path))
    h, w = SMALL.grid
    places = [(4 * y, 4 * x) for y in range(h) for x in range(w)]
    assert found["widest"] == pytest.approx(cdist(places, places).mean(), rel=1e-4)
    assert found["nearest"] == pytest.approx(found["widest"], rel=1e-4)


# 23 -------------------------------------------------------------------------------------------------------------------


def on(ratio: float) -> dict[str, float]:
    maps = {f"map {image} {y},{x}": float(y == image) for image in range(3) for y in range(4) for x in range(4)}
    return {"ratio": ratio, "mass": ratio / 5, "area": 0.2} | maps


def test_rollout_is_decided_by_its_rule() -> None:
    assert decided(rollout.STUDY, {"trained": on(1.2), "untrained": on(1.0)}) == "reproduced"
    assert decided(rollout.STUDY, {"trained": on(0.9), "untrained": on(0.8)}) == "not reproduced"
    assert decided(rollout.STUDY, {"trained": on(1.2), "untrained": on(1.3)}) == "not reproduced"
    same = planted(rollout.STUDY, {"trained": on(1.2), "untrained": on(1.2)})
    assert rollout.STUDY.decide(same).outcome == "not decided"


def test_the_share_of_a_rollout_on_an_object() -> None:
    """Even attention gives an object its share of the area; any other what its pixels add up to."""
    config = SMALL.replace(image_size=(32, 32), heads=2)
    source = shapes("val", "size=32,count=6")
    mass, area, _ = rollout.rollout_on_object(even(config), source, 6)
    assert mass == pytest.approx(area, rel=1e-5)
    model = build(config.replace(init="google"))
    assert isinstance(model, ViT)
    model.initialise(torch.Generator().manual_seed(0)).embedding.weight.data.mul_(5)
    mass, _, maps = rollout.rollout_on_object(model.eval(), source, 6)
    for index, rolled in enumerate(maps):
        pixels = np.kron(rolled, np.ones((4, 4))) / 16
        assert mass[index] == pytest.approx(pixels[source.draw(index)[1]].sum())
    assert maps.std() > 1e-4


def test_maps_are_kept_of_the_first_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "IMAGES", 40)
    config = learned.untrained_config(rollout.shapes_config("cpu"))
    found = rollout.measure(config, tmp_path)
    assert found["ratio"] == pytest.approx(1, abs=0.03), "the untrained model has no favourite"
    maps = rollout.read_maps(found)
    assert maps.shape == (3, 8, 8)
    assert maps.sum((1, 2)) == pytest.approx([1, 1, 1])
    assert maps[2, 7, 1] == found["map 2 7,1"]
    assert set(rollout.measure(config.replace(seed=1), tmp_path)) == {"ratio", "mass", "area"}


def test_images_are_shaded_by_the_map() -> None:
    found = rollout.shade_by_map(np.full((8, 8, 3), 200, np.uint8), np.array([[0.0, 1.0], [0.5, 0.0]]))
    assert found[:4, :4].max() == 30
    assert found[:4, 4:].min() == 200
    assert np.unique(found[4:, :4]).tolist() == [115]


# Figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "means"),
    [
        (POSITIONS, {"trained": positions(0.8, 0.4), "untrained": positions(0.0, 0.1)}),
        (FILTERS, {"trained": kernels(0.9, 0.8), "untrained": kernels(0.4, 0.25)}),
        (ATTENTION, {"trained": looks((5, 28), (29, 30)), "untrained": looks((25, 26), (25, 26))}),
        (HYBRID, {"ViT": looks((5, 28), (29, 30)), "hybrid": looks((15, 26), (25, 26))}),
        (rollout.STUDY, {"trained": on(1.2), "untrained": on(1.0)}),
    ],
    ids=lambda value: value.name if isinstance(value, Study) else "",
)
def test_figures_draw(study: Study, means: dict[str, dict[str, float]], tmp_path: Path) -> None:
    save(study.draw(planted(study, means)), tmp_path / "figure.png")
    assert 5_000 < (tmp_path / "figure.png").stat().st_size < 150_000
