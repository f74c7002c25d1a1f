"""Cards: contents, validation, and the statistics of comparisons against SciPy and resampling."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from pictures import plant_classes
from rich.console import Console
from scipy import stats

import plainvit
from plainvit.analyse.evaluation import Evaluation, default_name, evaluate_model, summary_table
from plainvit.cli import main
from plainvit.config import About, Config, Optim, Preprocess, to_json
from plainvit.data.content import sample_hash
from plainvit.data.decode import DataError
from plainvit.data.sources import open_source
from plainvit.evaluate import seeds, statistics
from plainvit.evaluate.card import Card, read_card, read_rows, write_card
from plainvit.evaluate.compare import compare, find_incompatibility, published, shape
from plainvit.models.inference import NonFiniteError
from plainvit.names import configure
from plainvit.runtime.checkpoint import tensor_hash

Capture = pytest.CaptureFixture[str]


# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "images"), [(0, 10), (3, 10), (115, 1000), (125, 1000), (970, 1000)])
def test_accuracy_in_words_warns_unless_its_interval_is_above_guessing(right: int, images: int) -> None:
    ends = stats.binomtest(right, images).proportion_ci(method="wilson")
    summary, *warning = statistics.describe_accuracy(right, images, 0.1)
    low, high = (float(end) for end in re.findall(r"interval (\S+)-(\S+) %", summary)[0])
    assert (low, high) == pytest.approx((100 * ends.low, 100 * ends.high), abs=0.501 if images < 1000 else 0.0501)
    assert "guessing would get 10 %" in summary
    assert bool(warning) == (ends.low <= 0.1)


@pytest.mark.parametrize(("right", "verdict"), [(390, "too sure"), (730, "less sure than"), (690, "no further apart")])
def test_confidence_is_called_wrong_only_outside_of_the_interval_of_accuracy(right: int, verdict: str) -> None:
    ends = stats.binomtest(right, 1000).proportion_ci(method="wilson")
    assert (ends.low <= 0.7 <= ends.high) == verdict.startswith("no")
    assert verdict in statistics.describe_confidence(0.7, right, 1000)


@pytest.mark.parametrize(("right", "images"), [(0, 10), (1, 10), (970, 1000), (50_000, 50_000)])
def test_wilson_equals_scipys(right: int, images: int) -> None:
    expected = stats.binomtest(right, images).proportion_ci(method="wilson")
    assert statistics.wilson(right, images) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (5, 5), (12, 30), (300, 210), (4000, 4100)])
def test_mcnemar_equals_scipys_exact_binomial_test(a: int, b: int) -> None:
    expected = stats.binomtest(a, a + b).pvalue if a + b else 1.0
    assert statistics.mcnemar(a, b) == pytest.approx(expected, rel=1e-8)
    assert statistics.mcnemar(a, b) == statistics.mcnemar(b, a)


def test_newcombe_equals_his_own_example() -> None:
    """56 of 70 against 48 of 80, Statistics in Medicine 17 (1998), Table II, method 10."""
    assert statistics.newcombe(48, 80, 56, 70) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_two_proportions_equal_the_chi_square_test() -> None:
    expected = stats.chi2_contingency([[56, 14], [48, 32]], correction=False).pvalue
    assert statistics.two_proportions(56, 70, 48, 80) == pytest.approx(expected, rel=1e-9)
    assert statistics.two_proportions(10, 10, 20, 20) == 1.0


def test_the_paired_interval_equals_resampling_the_images() -> None:
    rng = np.random.default_rng(1)
    apart = rng.choice([-1, 0, 1], 500, p=[0.1, 0.75, 0.15])
    only_a, only_b = int((apart < 0).sum()), int((apart > 0).sum())
    drawn = apart[rng.integers(0, 500, (5000, 500))].mean(1)
    assert statistics.paired_bootstrap(only_a, only_b, 500) == pytest.approx(
        np.quantile(drawn, (0.025, 0.975)), abs=0.003
    )


def test_the_interval_of_a_mean_equals_scipys() -> None:
    values = np.random.default_rng(0).normal(3, 2, 100)
    expected = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert statistics.mean_interval(values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 99])
def test_students_t_equals_scipys(freedom: int) -> None:
    assert statistics.t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-9)
    assert statistics.t_within(1.3, freedom) == pytest.approx(1 - 2 * stats.t.sf(1.3, freedom), abs=1e-12)


# Cards ----------------------------------------------------------------------------------------------------------------


def made(folder: Path, seed: int = 0, **options: Any) -> Evaluation:
    """A small model of ten classes, evaluated on the digits."""
    model = tiny.vit(torch.float32, image_size=(8, 8), classes=10)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    model.about = About(class_names=tuple("0123456789"))
    folder.mkdir(parents=True, exist_ok=True)
    plainvit.save(model, folder / f"model{seed}.safetensors")
    source = folder / f"model{seed}.safetensors"
    done = evaluate_model(source, "digits", out=folder / f"out{seed}", device="cpu", quiet=True, **options)
    assert done
    return done


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Evaluation]:
    folder = tmp_path_factory.mktemp("cards")
    return made(folder, 0), made(folder, 1)


def test_the_terminal_shows_the_metrics_of_the_card(both: tuple[Evaluation, Evaluation]) -> None:
    done, out = both[0], io.StringIO()
    Console(file=out, width=80).print(summary_table(done))
    told, (low, high) = out.getvalue(), done.card.intervals["top1"]
    assert "digits (test): 360 images" in told
    row = " ".join(next(line for line in told.splitlines() if line.startswith("top-1")).split())
    assert row.endswith(f"{100 * done.card.metrics['top1']:.2f} % {100 * low:.2f} % to {100 * high:.2f} %")
    assert str(done.folder / "report.html") in told.replace("\n", "")


def test_a_card_has_metrics_data_model_and_environment(both: tuple[Evaluation, Evaluation]) -> None:
    from sklearn.metrics import precision_recall_fscore_support

    done = both[0]
    card = read_card(done.folder)
    assert card == replace(done.card, intervals=card.intervals, model=card.model, preprocess=card.preprocess)
    rows = pq.read_table(done.folder / "images.parquet").to_pydict()
    assert card.images == len(rows["name"]) == 360
    assert card.metrics["top1"] == sum(rows["right"]) / 360 == card.counts["top1"] / 360
    assert card.metrics["top5"] == sum(rows["right5"]) / 360
    assert card.metrics["nll"] == pytest.approx(np.mean(rows["nll"]), rel=1e-12)
    macro = precision_recall_fscore_support(rows["label"], rows["guess"], average="macro", zero_division=0)[:3]
    assert [card.metrics[name] for name in ("precision", "recall", "f1")] == pytest.approx(macro, rel=1e-12)
    model = plainvit.load(card.model["source"])
    assert card.model["weights"] == tensor_hash(model.state_dict())
    assert card.model["config"] == json.loads(json.dumps(to_json(model.config)))
    assert card.data["fingerprint"]
    assert card.data["content"] == sample_hash(open_source("digits", "test"), 256)  # as in older cards
    assert card.data["spec"] == "digits"
    assert card.precision == "fp32"
    assert {"plainvit", "torch", "python", "device", "command", "started", "commit"} <= card.environment.keys()
    assert json.loads((done.folder / "card.json").read_text())["card"] == 1


def test_absent_classes_do_not_count_in_macro_means(tmp_path: Path) -> None:
    from sklearn.metrics import precision_recall_fscore_support

    plant_classes(tmp_path / "photos" / "test", {"ant": 8, "bee": 8})
    (tmp_path / "photos" / "test" / "cat").mkdir()
    model = tiny.vit(torch.float32, image_size=(16, 16), classes=3)
    with torch.no_grad():
        model.head.bias[2] = -1000.0  # never predicted
    plainvit.save(model, tmp_path / "model.safetensors")
    done = evaluate_model(
        tmp_path / "model.safetensors", str(tmp_path / "photos"), out=tmp_path, device="cpu", quiet=True
    )
    assert done
    guesses = done.result.guesses[:, 0]
    macro = precision_recall_fscore_support(done.result.labels, guesses, average="macro", zero_division=0)[:3]
    assert macro[2] > 0
    assert [done.card.metrics[name] for name in ("precision", "recall", "f1")] == pytest.approx(macro, rel=1e-12)
    page = (tmp_path / "report.html").read_text()
    assert "top-5" not in page  # of three classes it says nothing
    assert "chance level 50.0\u202f%" in page
    assert "on average it says" in page


def test_the_folder_has_report_figures_and_tables(both: tuple[Evaluation, Evaluation]) -> None:
    folder = both[0].folder
    page = (folder / "report.html").read_text()
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "").replace("http://www.w3.org", "")
    for words in (
        "top-1 accuracy",
        "top-5",
        "Metrics by class",
        "Most confident errors",
        "Calibration",
        both[0].card.model["weights"],
    ):
        assert words in page
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {f"figures/{name}.png" for name in ("confusion", "calibration", "gallery")} <= names
    assert len((folder / "classes.csv").read_text().splitlines()) == 11
    errors = (folder / "figures" / "gallery.csv").read_text().splitlines()[1:]
    sure = [float(line.rsplit(",", 1)[1]) for line in errors]
    assert sure == sorted(sure, reverse=True)
    wrong = both[0].result.probabilities[~both[0].result.right]
    assert sure[0] == pytest.approx(wrong.max())


def test_the_same_evaluation_has_the_same_folder_name(both: tuple[Evaluation, Evaluation]) -> None:
    first, second = (done.card for done in both)
    assert default_name(first) == default_name(replace(first, environment={}))
    assert default_name(first) != default_name(second)
    assert "/" not in default_name(first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"card": 2}, "version 2"),
        ({"card": None}, "version None"),
        ({"metrics": []}, "metrics"),
        ({"images": 0}, "images"),
        ({"counts": {"top1": 1, "top5": 2}}, "top1 is"),
        ({"counts": {"top1": "many"}}, "top1 is missing"),
        ({"metrics": {"top1": float("nan")}}, "top1 is missing"),
        ({"data": {"spec": "digits"}}, "data.fingerprint"),
    ],
)
def test_an_invalid_card_is_a_data_error(
    change: dict[str, Any], words: str, both: tuple[Evaluation, Evaluation], tmp_path: Path, capsys: Capture
) -> None:
    stored = json.loads((both[0].folder / "card.json").read_text()) | change
    (tmp_path / "card.json").write_text(json.dumps(stored))
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(both[0].folder), str(tmp_path)])
    assert caught.value.code == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


def test_absent_or_damaged_files_are_data_errors(both: tuple[Evaluation, Evaluation], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no card"):
        read_card(tmp_path)
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_card(tmp_path)
    write_card(both[0].card, tmp_path)
    assert read_rows(tmp_path, 360, both[0].card.counts) is None
    (tmp_path / "images.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path, 360, both[0].card.counts)
    pq.write_table(pq.read_table(both[0].folder / "images.parquet").slice(0, 9), tmp_path / "images.parquet")
    with pytest.raises(DataError, match="9 rows"):
        read_rows(tmp_path, 360, both[0].card.counts)


# Comparison -----------------------------------------------------------------------------------------------------------


def test_cards_with_results_are_compared_image_by_image(both: tuple[Evaluation, Evaluation], capsys: Capture) -> None:
    found = compare([done.folder for done in both])
    row = found["cards"][1]["difference"]
    first, second = (done.result.right for done in both)
    table = [[(first & second).sum(), (first & ~second).sum()], [(~first & second).sum(), (~first & ~second).sum()]]
    assert row["paired"]
    assert row["top1"]["difference"] == pytest.approx(second.mean() - first.mean(), abs=1e-12)
    assert (row["top1"]["only_first"], row["top1"]["only_this"]) == (table[0][1], table[1][0])
    assert row["top1"]["p"] == pytest.approx(stats.binomtest(int(table[0][1]), int(table[0][1] + table[1][0])).pvalue)
    low, high = row["top1"]["interval"]
    assert low <= row["top1"]["difference"] <= high
    pair = stats.ttest_rel(both[1].result.nll, both[0].result.nll)
    assert row["nll"]["p"] == pytest.approx(2 * stats.norm.sf(abs(pair.statistic)), rel=1e-6)
    main(["compare", *(str(done.folder) for done in both)])
    names = [one["name"] for one in found["cards"]]
    out = " ".join(capsys.readouterr().out.split())
    assert f"only in {names[1]}: {table[1][0]}, only in {names[0]}: {table[0][1]}" in out
    assert f"p {row['top1']['p']:.2g}: {'not ' * (row['top1']['p'] >= 0.05)}significant" in out


def test_cards_alone_are_compared_as_two_samples(both: tuple[Evaluation, Evaluation], tmp_path: Path) -> None:
    write_card(both[1].card, tmp_path)
    row = compare([both[0].folder, tmp_path / "card.json"])["cards"][1]["difference"]
    assert not row["paired"]
    counts = both[0].card.counts["top1"], 360, both[1].card.counts["top1"], 360
    assert row["top1"]["interval"] == list(statistics.newcombe(*counts))
    assert "only_this" not in row["top1"]
    spread = math.sqrt(sum(stats.sem(done.result.nll) ** 2 for done in both))
    apart = both[1].result.nll.mean() - both[0].result.nll.mean()
    assert row["nll"]["p"] == pytest.approx(2 * stats.norm.sf(abs(apart) / spread), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "0" * 16}, "the images"),
        ({"split": "val"}, "the split"),
        ({"rule": "another"}, "the rule"),
        ({"labels": "0" * 16}, "the correct classes"),
    ],
)
def test_cards_of_different_data_need_force(
    change: dict[str, str], words: str, both: tuple[Evaluation, Evaluation], tmp_path: Path, capsys: Capture
) -> None:
    card = both[1].card
    write_card(replace(card, data=card.data | change), tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(both[0].folder), str(tmp_path)])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert "--force" in err
    assert err.count("\n") == 1
    main(["compare", str(both[0].folder), str(tmp_path), "--force"])
    out = capsys.readouterr().out
    assert "not comparable" in out
    assert "top-1" in out


def test_another_number_of_images_is_an_error_and_other_preprocessing_a_remark(
    both: tuple[Evaluation, Evaluation], tmp_path: Path
) -> None:
    card = both[1].card
    counts = {"top1": 100, "top5": 300}
    fewer = replace(card, images=359, unreadable=1, counts=counts)
    assert re.search("359.*360", find_incompatibility(both[0].card, fewer))
    other = replace(card, preprocess=card.preprocess | {"hash": "x", "image_size": [16, 16]}, precision="bf16")
    write_card(other, tmp_path)
    row = compare([both[0].folder, tmp_path])["cards"][1]
    assert [remark.split()[0] for remark in row["remarks"]] == ["preprocessing", "precision"]


def test_the_same_card_twice_is_no_difference(both: tuple[Evaluation, Evaluation], capsys: Capture) -> None:
    main(["compare", str(both[0].folder), str(both[0].folder), "--json"])
    row = json.loads(capsys.readouterr().out)["cards"][1]
    same = {"difference": 0.0, "interval": [0.0, 0.0], "p": 1.0, "only_first": 0, "only_this": 0}
    assert row["difference"]["top1"] == same
    assert row["remarks"] == ["the weights are the same"]


def test_different_settings_are_listed(both: tuple[Evaluation, Evaluation], tmp_path: Path, capsys: Capture) -> None:
    """All settings of runs that affect results; of cards without a run those of the model."""
    runs = tmp_path / "a", tmp_path / "b"
    for folder, changes in zip(runs, ({}, {"seed": 1, "workers": 4, "recipe": "other"}), strict=True):
        write_card(both[0].card, folder)
        config = Config(optim=Optim(lr=1e-3 + changes.get("seed", 0)), **changes)
        (folder / "config.json").write_text(json.dumps(to_json(config)))
    main(["compare", *map(str, runs)])
    out = " ".join(capsys.readouterr().out.split())
    assert "settings that differ: optim.lr 0.001 -> 1.001, seed 0 -> 1" in out
    assert compare(runs)["cards"][1]["settings"] == {"optim.lr": [0.001, 1.001], "seed": [0, 1]}
    model = both[0].card.model
    other = replace(both[0].card, model=model | {"config": model["config"] | {"posemb": "none"}})
    write_card(other, tmp_path / "c")
    assert compare([runs[0], tmp_path / "c"])["cards"][1]["settings"] == {"model.posemb": ["1d", "none"]}
    assert compare([runs[0], runs[0]])["cards"][1]["settings"] == {}


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["token-0", "token-1"], "token"),
        (["token-seed0", "token-seed10"], "token"),
        (["p2-0", "p2-3"], "p2"),
        (["p2-10", "p2-11"], "p2"),
        (["ViT-B/16_0", "ViT-B/16_1"], "ViT-B/16"),
        (["run1", "run2"], "run"),
        (["lr-0.001"], "lr-0.001"),
    ],
)
def test_a_group_is_named_by_the_common_prefix(names: list[str], prefix: str) -> None:
    assert seeds._find_prefix(names) == prefix


def test_eight_runs_fit_a_narrow_terminal(
    both: tuple[Evaluation, Evaluation], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups first, no pair within a group, the runs by name, and the run without a matching seed."""
    monkeypatch.chdir(tmp_path)
    runs = [
        plant_run(Path(f"p{patch}-{seed}"), both[0].card, seed, 300 + 7 * seed + patch, patch)
        for patch in (2, 4)
        for seed in range(5 - patch // 4)
    ]
    main(["compare", *map(str, runs)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in "".join(lines)
    assert lines[1].split()[-2:] == ["p2", "p4"]
    assert " ".join(lines[6:8]).startswith("p4 - p2: +0.56 points of top-1")
    assert "p2-4)" in " ".join(lines[6:8])
    tables = [line.split() for line in lines if line.startswith("top-1, %")][1:]
    assert [value for row in tables for value in row[2:]] == [
        f"{(300 + 7 * int(run.name[3]) + int(run.name[1])) / 3.6:.2f}" for run in runs
    ]
    assert [line for line in lines if " - " in line and line[0] == "p"][1:] == ["p4-0 - p2-0, as two samples:"]


def plant_run(folder: Path, card: Card, seed: int, right: int, lr: float) -> Path:
    right_too = {"metrics": card.metrics | {"top1": right / 360, "top5": 1.0}, "counts": {"top1": right, "top5": 360}}
    write_card(replace(card, **right_too), folder)
    (folder / "config.json").write_text(json.dumps(to_json(Config(seed=seed, optim=Optim(lr=lr)))))
    return folder


def test_runs_that_differ_only_in_the_seed_are_groups(
    both: tuple[Evaluation, Evaluation], tmp_path: Path, capsys: Capture
) -> None:
    """Paired by seed, in any order; compared with SciPy's paired t-test."""
    low, high = {0: 290, 1: 306, 2: 288}, {2: 295, 1: 304, 0: 310}
    rows = [("low", 1e-3, low), ("high", 1e-2, high)]
    runs = [
        plant_run(tmp_path / f"{name}-{seed}", both[0].card, seed, right, lr)
        for name, lr, values in rows
        for seed, right in values.items()
    ]
    first, second = compare([*runs, runs[0]])["groups"]
    assert (first["name"], first["seeds"]) == (str(tmp_path / "low"), [0, 1, 2])
    assert first["mean"]["top1"] == pytest.approx(884 / 3 / 360)
    assert first["std"]["top1"] == pytest.approx(np.std(list(low.values()), ddof=1) / 360)
    expected = stats.ttest_rel([high[seed] / 360 for seed in low], [right / 360 for right in low.values()])
    apart = second["difference"]["top1"]
    assert apart["difference"] == pytest.approx(25 / 3 / 360)
    assert apart["interval"] == pytest.approx(list(expected.confidence_interval(0.95)), abs=1e-9)
    main(["compare", *map(str, runs)])
    out = " ".join(capsys.readouterr().out.split())
    low_end, high_end = (f"{100 * end:+.2f}" for end in apart["interval"])
    assert f"+2.31 points of top-1, 95 % {low_end} to {high_end} over 3 seeds" in out
    assert "mean ± standard deviation over seeds" in out
    other = plant_run(tmp_path / "other", both[0].card, 7, 180, 1.0)
    assert compare([*runs[:2], other])["groups"][1]["difference"] is None, "no seed in common"
    assert compare([runs[0], runs[3], other])["groups"] == [], "no two differ only in the seed"
    assert compare([done.folder for done in both])["groups"] == []


def test_one_card_cannot_be_compared(both: tuple[Evaluation, Evaluation]) -> None:
    with pytest.raises(ValueError, match="two cards"):
        compare([both[0].folder])


# Published numbers ----------------------------------------------------------------------------------------------------


def named(card: Card, spec: str, model: str, config: dict[str, Any]) -> Card:
    return replace(card, data=card.data | {"spec": spec}, model=card.model | {"source": model, "config": config})


def test_published_results_are_found_by_weights_and_architecture(both: tuple[Evaluation, Evaluation]) -> None:
    card = both[0].card
    assert published(card) == []
    base = to_json(configure("ViT-B/16"))
    found = published(named(card, "imagenet", "vit_b16_orig_i21k_i1k_384", base))
    assert [round(100 * one["top1"], 2) for one in found] == [84.21, 77.91, 83.97, 84.15]  # timm's, then Table 5
    timm = published(named(card, "imagenet-real", "timm:deit_base_patch16_224.fb_in1k", {}))
    assert [round(100 * one["top1"], 2) for one in timm] == [86.83]
    huge = published(named(card, "objectnet", "mine", to_json(configure("ViT-H/14"))))
    assert [round(100 * one["top1"], 1) for one in huge] == [61.7]
    pets = published(named(card, "oxford-pets", "runs/pets", to_json(configure("ViT-L/32"))))
    assert [round(100 * one["top1"], 2) for one in pets] == [91.35, 93.09, 95.83]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ViT-B/16", "B/16"), ("ViT-L/32", "L/32"), ("ViT-H/14", "H/14"), ("ViT-S/16", ""), ("R50x1+ViT-B/16", "")],
)
def test_the_papers_models_are_recognised_by_shape(
    name: str, expected: str, both: tuple[Evaluation, Evaluation]
) -> None:
    assert shape(named(both[0].card, "imagenet", "", to_json(configure(name)))) == expected


def test_a_peers_card_has_its_config(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    import safetensors.torch

    state = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32).state_dict()
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    source = f"timm:vit_tiny_patch16_224@{tmp_path / 'w.safetensors'}"
    done = evaluate_model(source, "digits", out=tmp_path / "out", image_size=32, device="cpu", quiet=True, batch=128)
    assert done
    card = read_card(tmp_path / "out")
    assert card.model["family"] == "timm"
    assert card.model["config"]["image_size"] == [32, 32]
    assert card.model["weights"] == tensor_hash({f"model.{name}": value for name, value in state.items()})
    assert card.preprocess["settings"] == {
        "resize": "crop",
        "crop": 0.9,
        "interpolation": "bicubic",
        "antialias": Preprocess().antialias,
    }


# Mistakes in the inputs -----------------------------------------------------------------------------------------------


def test_other_pixels_with_the_same_names_cannot_be_compared(tmp_path: Path) -> None:
    """As with ImageNet-C, whose files are named as ImageNet's."""
    for name, seed in (("clean", 0), ("same", 0), ("noisy", 100)):
        plant_classes(tmp_path / name / "test", {"ant": 5, "bee": 5}, seed)
    model = tiny.vit(torch.float32, image_size=(8, 8), classes=2)
    plainvit.save(model, tmp_path / "model.safetensors")
    cards = []
    for name in ("clean", "same", "noisy"):
        out = tmp_path / f"card-{name}"
        done = evaluate_model(tmp_path / "model.safetensors", str(tmp_path / name), out=out, device="cpu", quiet=True)
        assert done
        cards.append(done)
    assert len({one.card.data["fingerprint"] for one in cards}) == 1
    assert find_incompatibility(cards[0].card, cards[1].card) == ""
    with pytest.raises(ValueError, match="pixels"):
        compare([cards[0].folder, cards[2].folder])


def test_rows_of_another_evaluation_are_a_data_error(both: tuple[Evaluation, Evaluation], tmp_path: Path) -> None:
    assert both[0].card.counts != both[1].card.counts
    write_card(both[0].card, tmp_path)
    (tmp_path / "images.parquet").write_bytes((both[1].folder / "images.parquet").read_bytes())
    with pytest.raises(DataError, match="another evaluation"):
        compare([tmp_path, both[1].folder])


def test_the_folder_of_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="folder of a run"):
        evaluate_model("weights", "digits", out=tmp_path)


def test_non_finite_predictions_write_no_card(tmp_path: Path) -> None:
    model = tiny.vit(torch.float32, image_size=(8, 8), classes=10)
    model.head.weight.data.fill_(3e38)
    plainvit.save(model, tmp_path / "model.safetensors")
    with pytest.raises(NonFiniteError, match="360 of 360"):
        evaluate_model(tmp_path / "model.safetensors", "digits", out=tmp_path / "out", device="cpu", quiet=True)
    assert not (tmp_path / "out" / "card.json").exists()


def test_wilson_intervals_are_between_0_and_1() -> None:
    for images in range(1, 400):
        assert 0 <= statistics.wilson(0, images)[0] < 1e-12
        assert 1 - 1e-12 < statistics.wilson(images, images)[1] <= 1


def test_published_results_need_the_test_split(both: tuple[Evaluation, Evaluation]) -> None:
    config = to_json(configure("ViT-B/16", classes=10))
    card = replace(both[0].card, model={**both[0].card.model, "config": config})
    data = {**card.data, "spec": "cifar10"}
    assert published(replace(card, data={**data, "split": "test"}))
    assert not published(replace(card, data={**data, "split": "train"}))
