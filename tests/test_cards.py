"""Cards: contents, validation, and the statistics of comparisons against SciPy and resampling."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from pictures import plant, plant_classes
from scipy import stats
from shell import Capture, fail, run, save_model
from sklearn.metrics import precision_recall_fscore_support

import plainvit
from plainvit.analyse.evaluation import Evaluation, evaluate_model
from plainvit.config import About, Config, Optim, to_json
from plainvit.data.content_hash import sample_hash
from plainvit.data.decode import DataError
from plainvit.data.sources import open_source
from plainvit.evaluate import statistics
from plainvit.evaluate.card import Card, _compute_metrics, read_card, read_rows
from plainvit.evaluate.compare import compare, find_published
from plainvit.evaluate.labels import align
from plainvit.evaluate.metrics import Result
from plainvit.runtime.checkpoint import hash_tensors

pytestmark = pytest.mark.usefixtures("no_report")
Both = tuple[Evaluation, Evaluation]


# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "images"), [(0, 10), (3, 10), (115, 1000), (125, 1000), (50_000, 50_000)])
def test_an_accuracy_has_wilsons_interval_and_a_warning_if_the_majority_class_is_in_it(right: int, images: int) -> None:
    ends = stats.binomtest(right, images).proportion_ci(method="wilson")
    assert statistics.wilson(right, images) == pytest.approx((ends.low, ends.high), abs=1e-12)
    summary, *warning = statistics.describe_accuracy(right, images, 0.1)
    low, high = (float(end) for end in re.findall(r"interval (\S+)-(\S+) %", summary)[0])
    assert (low, high) == pytest.approx((100 * ends.low, 100 * ends.high), abs=0.501 if images < 1000 else 0.0501)
    assert bool(warning) == (ends.low <= 0.1)


@pytest.mark.parametrize(
    ("right", "verdict"), [(390, "overconfident"), (730, "underconfident"), (690, "no significant")]
)
def test_confidence_is_significantly_wrong_outside_of_the_interval_of_accuracy(right: int, verdict: str) -> None:
    ends = stats.binomtest(right, 1000).proportion_ci(method="wilson")
    assert (ends.low <= 0.7 <= ends.high) == verdict.startswith("no")
    assert verdict in statistics.describe_confidence(0.7, right, 1000)


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 0), (5, 5), (12, 30), (300, 210), (4000, 4100)])
def test_mcnemar_equals_scipys_exact_binomial_test(a: int, b: int) -> None:
    expected = stats.binomtest(a, a + b).pvalue if a + b else 1.0
    assert statistics.mcnemar(a, b) == pytest.approx(expected, rel=1e-8)
    assert statistics.mcnemar(a, b) == statistics.mcnemar(b, a)


def test_the_paired_interval_equals_resampling_the_images() -> None:
    rng = np.random.default_rng(1)
    apart = rng.choice([-1, 0, 1], 500, p=[0.1, 0.75, 0.15])
    only_a, only_b = int((apart < 0).sum()), int((apart > 0).sum())
    drawn = apart[rng.integers(0, 500, (5000, 500))].mean(1)
    assert statistics.paired_bootstrap(only_a, only_b, 500) == pytest.approx(
        np.quantile(drawn, (0.025, 0.975)), abs=0.003
    )


def test_the_interval_of_the_nll_does_not_reach_below_0() -> None:
    labels = np.zeros(30, int)
    nll = np.array([3.0, *[0.01] * 29])  # one confident error
    result = Result(labels, labels[:, None], labels[:, None] == 0, np.exp(-nll), nll, labels, classes=2)
    assert result.intervals["nll"] == (0.0, pytest.approx(nll.mean() + 1.96 * stats.sem(nll), abs=1e-4))


def test_the_interval_of_a_mean_equals_scipys() -> None:
    values = np.random.default_rng(0).normal(3, 2, 100)
    expected = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert statistics.mean_interval(values) == pytest.approx(expected, rel=1e-9)


# Cards ----------------------------------------------------------------------------------------------------------------


def evaluate_digits(folder: Path, seed: int) -> Evaluation:
    """A small model of ten classes, evaluated on the digits."""
    model = tiny.vit(torch.float32, image_size=(8, 8), classes=10)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    model.about = About(class_names=tuple("0123456789"))
    source = plainvit.save(model, folder / f"model{seed}.safetensors")
    done = evaluate_model(source, "digits", out=folder / f"out{seed}", device="cpu", quiet=True)
    assert done
    return done


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("cards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plainvit.analyse.evaluation.write_evaluation", lambda *_: None)
        return evaluate_digits(folder, 0), evaluate_digits(folder, 1)


def test_a_card_has_metrics_data_model_and_environment(both: Both) -> None:
    done = both[0]
    card = read_card(done.folder)
    assert card == replace(done.card, intervals=card.intervals, model=card.model, preprocess=card.preprocess)
    rows = pq.read_table(done.folder / "images.parquet").to_pydict()
    assert card.images == len(rows["name"]) == 360
    source = open_source("digits", "test")
    assert rows["content"][7] == hashlib.blake2b(source.identify(7), digest_size=12).hexdigest()
    assert card.metrics["top1"] == sum(rows["right"]) / 360 == card.counts["top1"] / 360
    assert card.metrics["top5"] == sum(rows["right5"]) / 360
    assert card.metrics["nll"] == pytest.approx(np.mean(rows["nll"]), rel=1e-12)
    model = plainvit.load(card.model["source"])
    assert card.model["weights"] == hash_tensors(model.state_dict())
    assert card.model["config"] == json.loads(json.dumps(to_json(model.config)))
    data = {"spec": "digits", "fingerprint": source.fingerprint(), "content": sample_hash(source, 256)}
    assert card.data.items() >= data.items()
    assert card.precision == "fp32"
    assert {"plainvit", "torch", "python", "device", "command", "started", "commit"} <= card.environment.keys()
    assert json.loads((done.folder / "card.json").read_text())["card"] == 2


def test_macro_means_equal_scikit_learns() -> None:
    """Over the classes that occur: class 2 does not."""
    labels, predictions, ones = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0]), np.ones(5)
    predictions = predictions[:, None]
    result = Result(labels, predictions, predictions == labels[:, None], ones, ones, np.arange(5), classes=3)
    metrics = _compute_metrics(result, align(open_source("digits", "test"), 10))
    macro = precision_recall_fscore_support(labels, predictions, average="macro", zero_division=0)[:3]
    assert [metrics[name] for name in ("precision", "recall", "f1")] == pytest.approx(macro, rel=1e-12)


# Invalid files --------------------------------------------------------------------------------------------------------


COUNTS = [{"counts": {"top1": 1, "top5": 2}}, {"counts": {"top1": "many"}}, {"metrics": {"top1": float("nan")}}]


@pytest.mark.parametrize("change", [{"card": 1}, {"metrics": []}, {"images": 0}, {"data": {"spec": "digits"}}, *COUNTS])
def test_an_invalid_card_is_a_data_error(change: dict[str, Any], both: Both, tmp_path: Path, capsys: Capture) -> None:
    stored = json.loads((both[0].folder / "card.json").read_text()) | change
    (tmp_path / "card.json").write_text(json.dumps(stored))
    assert str(tmp_path) in fail(capsys, "compare", both[0].folder, tmp_path)


def write_card_alone(card: Card, folder: Path) -> None:
    plant(folder, {"card.json": json.dumps(asdict(card)).encode()})


def test_absent_or_damaged_files_are_data_errors(both: Both, tmp_path: Path) -> None:
    card = both[0].card
    with pytest.raises(DataError, match="no card"):
        read_card(tmp_path)
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_card(tmp_path)
    write_card_alone(card, tmp_path)
    with pytest.raises(DataError, match=r"no .*images\.parquet"):
        read_rows(tmp_path, card)
    rows = pq.read_table(both[0].folder / "images.parquet")
    for table, reason in (
        (None, "cannot be read"),
        (rows.drop_columns(["content"]), "cannot be read"),
        (rows.replace_schema_metadata({"label": "[]"}), "cannot be read"),
        (rows.slice(0, 9), "9 rows"),
        (pq.read_table(both[1].folder / "images.parquet"), "another evaluation"),
    ):
        (tmp_path / "images.parquet").write_bytes(b"PAR1")
        if table is not None:
            pq.write_table(table, tmp_path / "images.parquet")
        with pytest.raises(DataError, match=reason):
            read_rows(tmp_path, card)


# Comparison -----------------------------------------------------------------------------------------------------------


def test_cards_are_compared_image_by_image(both: Both, capsys: Capture) -> None:
    cards = compare([done.folder for done in both])["cards"]
    row = cards[1]["difference"]
    first, second = (done.result.correct for done in both)
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    assert row["shared"] == 360
    assert row["top1"]["difference"] == pytest.approx(second.mean() - first.mean(), abs=1e-12)
    assert (row["top1"]["only_first"], row["top1"]["only_this"]) == (only_first, only_second)
    assert row["top1"]["p"] == pytest.approx(stats.binomtest(only_first, only_first + only_second).pvalue)
    low, high = row["top1"]["interval"]
    assert low <= row["top1"]["difference"] <= high
    pair = stats.ttest_rel(both[1].result.nll, both[0].result.nll)
    assert row["nll"]["p"] == pytest.approx(2 * stats.norm.sf(abs(pair.statistic)), rel=1e-6)
    out = " ".join(run(capsys, "compare", *(done.folder for done in both))[1].split())
    assert f"only in {cards[1]['name']}: {only_second}, only in {cards[0]['name']}: {only_first}" in out


def copy_card(done: Evaluation, folder: Path, **changes: Any) -> Path:
    write_card_alone(replace(done.card, **changes), folder)
    shutil.copy(done.folder / "images.parquet", folder)
    return folder


def copy_rows(done: Evaluation, folder: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A card with other rows per image, which it agrees with."""
    rows = change(pq.read_table(done.folder / "images.parquet"))
    counts = {"top1": sum(rows["right"].to_pylist()), "top5": sum(rows["right5"].to_pylist())}
    metrics = done.card.metrics | {name: count / len(rows) for name, count in counts.items()}
    write_card_alone(replace(done.card, images=len(rows), counts=counts, metrics=metrics), folder)
    pq.write_table(rows, folder / "images.parquet")
    return folder


def set_column(rows: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    column = rows.schema.get_field_index(name)
    return rows.set_column(column, name, [pa.array(values, rows.schema.field(name).type)])


def test_cards_are_compared_on_the_images_that_they_share(both: Both, tmp_path: Path) -> None:
    """Found by their content, in any order and under any name; copies of an image are told apart."""
    other = copy_rows(both[0], tmp_path, lambda rows: rows.take(pa.array([*range(359, 2, -1), 100])))
    row = compare([both[0].folder, other])["cards"][1]
    assert (row["images"], row["difference"]["shared"]) == (358, 357)
    assert row["difference"]["top1"]["difference"] == 0


def test_cards_of_other_pixels_or_another_rule_cannot_be_compared(both: Both, tmp_path: Path) -> None:
    """Such as ImageNet-C, whose files are named as ImageNet's."""
    pixels = copy_rows(both[0], tmp_path / "a", lambda rows: set_column(rows, "content", list(map(str, range(360)))))
    rule = copy_card(both[1], tmp_path / "b", data=both[1].card.data | {"rule": "another"})
    for other, reason in ((pixels, "share 0 of 360"), (rule, "another")):
        with pytest.raises(ValueError, match=reason):
            compare([both[0].folder, other])


def test_what_may_explain_a_difference_is_a_remark(both: Both, tmp_path: Path) -> None:
    preprocess = both[1].card.preprocess | {"hash": "x", "image_size": [16, 16]}
    inputs = copy_card(both[1], tmp_path / "inputs", preprocess=preprocess, precision="bf16")
    labels = both[0].result.labels.copy()
    labels[:2] = (labels[:2] + 1) % 10
    relabeled = copy_rows(both[0], tmp_path / "labels", lambda rows: set_column(rows, "label", labels))
    rows = compare([both[0].folder, both[0].folder, inputs, relabeled])["cards"]
    assert rows[1]["remarks"] == ["the weights are the same"]
    same = {"difference": 0.0, "interval": [0.0, 0.0], "p": 1.0, "only_first": 0, "only_this": 0}
    assert rows[1]["difference"]["top1"] == same
    assert [remark.split()[0] for remark in rows[2]["remarks"]] == ["preprocessing", "precision"]
    assert rows[3]["remarks"][1] == "2 of the 360 shared images have different labels"


def test_few_classes_have_no_top_5_and_one_image_no_interval(tmp_path: Path, capsys: Capture) -> None:
    plant_classes(tmp_path / "photos", {"ant": 1, "bee": 1})
    (tmp_path / "photos" / "bee" / "0.png").write_bytes(b"unreadable")
    model = save_model(tmp_path / "model.safetensors", ("ant", "bee"), classes=2)
    tables = [run(capsys, "evaluate", model, "--data", tmp_path / "photos", "--out", tmp_path, "--device", "cpu")[1]]
    tables.append(run(capsys, "compare", tmp_path, tmp_path)[1])
    for table in tables:
        assert "NLL" in table
        assert "nan" not in table.replace(str(tmp_path), "")
        assert "top-5" not in table


# Runs -----------------------------------------------------------------------------------------------------------------


def plant_run(folder: Path, done: Evaluation, right: int, **settings: Any) -> Path:
    """A run of 360 images, of which the first `right` are correct."""
    ones = [True] * 360
    copy_rows(done, folder, lambda rows: set_column(set_column(rows, "right", np.arange(360) < right), "right5", ones))
    (folder / "config.json").write_text(json.dumps(to_json(Config(**settings))))
    return folder


def test_different_settings_are_listed(both: Both, tmp_path: Path) -> None:
    """All settings of runs that affect results; of cards without a run those of the model."""
    a = plant_run(tmp_path / "a", both[0], 300, optim=Optim(lr=0.001))
    b = plant_run(tmp_path / "b", both[0], 300, optim=Optim(lr=1.0), seed=1, workers=4, recipe="other")
    assert compare([a, b])["cards"][1]["settings"] == {"optim.lr": [0.001, 1.0], "seed": [0, 1]}
    model = both[0].card.model
    c = copy_card(both[0], tmp_path / "c", model=model | {"config": model["config"] | {"posemb": "none"}})
    assert compare([a, c])["cards"][1]["settings"] == {"model.posemb": ["1d", "none"]}


def test_runs_that_differ_only_in_the_seed_are_groups(both: Both, tmp_path: Path) -> None:
    """Paired by seed, in any order; compared with SciPy's paired t-test."""
    low, high = {0: 290, 1: 306, 2: 288}, {2: 295, 1: 304, 0: 310}
    runs = [
        plant_run(tmp_path / f"{name}-{seed}", both[0], right, seed=seed, optim=Optim(lr=lr))
        for name, lr, values in (("low", 1e-3, low), ("high", 1e-2, high))
        for seed, right in values.items()
    ]
    first, second = compare([*runs, runs[0]])["groups"]
    assert (first["name"], first["seeds"]) == (str(tmp_path / "low"), [0, 1, 2])
    assert first["mean"]["top1"] == pytest.approx(884 / 3 / 360)
    assert first["std"]["top1"] == pytest.approx(np.std(list(low.values()), ddof=1) / 360)
    expected = stats.ttest_rel([high[seed] / 360 for seed in low], [right / 360 for right in low.values()])
    change = second["difference"]["top1"]
    assert change["difference"] == pytest.approx(25 / 3 / 360)
    assert change["interval"] == pytest.approx(list(expected.confidence_interval(0.95)), abs=1e-9)
    other = plant_run(tmp_path / "other", both[0], 180, seed=7, optim=Optim(lr=1.0))
    assert compare([*runs[:2], other])["groups"][1]["difference"] is None, "no seed in common"
    assert compare([runs[0], runs[3], other])["groups"] == [], "no two differ only in the seed"


def test_eight_runs_fit_a_narrow_terminal(
    both: Both, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups first, then the runs by name; the run without a matching seed is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    runs = [
        plant_run(Path(f"p{patch}-{seed}"), both[0], 300 + 7 * seed + patch, seed=seed, optim=Optim(lr=patch))
        for patch in (2, 4)
        for seed in range(5 - patch // 4)
    ]
    lines = run(capsys, "compare", *runs)[1].splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2:4]] == ["p2", "p4"]
    assert "(no matching seed: p2-4)" in " ".join(" ".join(lines).split())
    assert {run.name for run in runs} <= {line.split()[0] for line in lines if line.strip()}


@pytest.mark.parametrize(
    ("spec", "name", "top1"),
    [
        ("imagenet", "vit_b16_orig_i21k_i1k_384", [84.21]),
        ("imagenet-real", "hf:timm/deit_base_patch16_224.fb_in1k", [86.83]),
        ("digits", "vit_b16_orig_i21k_i1k_384", []),
    ],
)
def test_published_results_are_found_by_weights(both: Both, spec: str, name: str, top1: list[float]) -> None:
    card = both[0].card
    named = replace(card, data=card.data | {"spec": spec}, model=card.model | {"source": name})
    assert [round(100 * result["top1"], 2) for result in find_published(named)] == top1
