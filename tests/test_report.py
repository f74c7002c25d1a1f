"""The report of a run: numbers compared with ones computed here, hostile names, missing and damaged files."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from html_reader import Reader, check_harmless
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from plainvit.analyse import curves, figures
from plainvit.analyse.confusion import draw_confusion, find_frequent_confusions
from plainvit.analyse.evaluation_report import draw_calibration
from plainvit.analyse.gallery import Cell, Sample, draw_cells, truncate
from plainvit.analyse.html import Html, element, embed_image, make_section, render_page
from plainvit.analyse.report import write_report
from plainvit.config import Config, Optim, ViTConfig, to_json
from plainvit.evaluate.statistics import describe_confidence
from plainvit.runtime.folder import read_metrics

CLASSES = ["cat", "dog", "emu"]
COUNTS = [[17, 3, 0], [1, 28, 1], [5, 5, 40]]  # correct: 85 %, 93.3 %, 80 %; in all 85 of 100


def steps(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, "epoch": step / 10, "loss": 2.0 / step, **more} for step in range(1, count + 1)]


def result(counts: Any = COUNTS, **more: Any) -> dict[str, Any]:
    matrix = np.array(counts)
    top1 = float(np.trace(matrix) / matrix.sum())
    whole = {"images": int(matrix.sum()), "top1": top1, "top5": 0.97, "nll": 0.4567, "interval": [0.767, 0.907]}
    return whole | {"confusion": matrix.tolist(), "unreadable": 0} | more


def run_files() -> dict[str, Any]:
    model = ViTConfig(width=64, depth=3, heads=4, mlp_dim=128, patch=(2, 2), image_size=(8, 8), classes=3)
    config = Config(recipe="small/pets", data="pets", model=model, epochs=2, batch=32, optim=Optim(lr=0.003))
    part = {"images": 1437, "fingerprint": "00ff"}
    return {
        "config.json": to_json(config),
        "data.json": {"classes": CLASSES, "splits": {"train": part, "test": {"images": 100, "fingerprint": "11ee"}}},
        "metrics.jsonl": [*steps(20), {"step": 20, "val": {"top1": 0.83, "top5": 0.9, "nll": 0.5}}],
        "results.json": {"test": result(), "val": result(top1=0.91)},
        "environment.json": {"plainvit": "0.1", "device": "cpu", "command": "plainvit train x", "seconds": 192.4},
        "status.json": {"state": "done", "step": 20, "steps": 20, "reason": None},
    }


def write_run(folder: Path, **changes: Any) -> Path:
    """A run folder; a file whose change is None is omitted, text is written unchanged. Keys have no suffix."""
    folder.mkdir(exist_ok=True)
    for name, value in run_files().items():
        value = changes.get(name.partition(".")[0], value)
        if isinstance(value, list):
            value = "".join(json.dumps(line) + "\n" for line in value)
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def sample(
    truth: str = "cat", prediction: str = "cat", probability: float = 0.9, name: str = "a.jpg", side: int = 8
) -> Sample:
    pixels = np.random.default_rng(len(name)).integers(0, 256, (side, side + 4, 3), np.uint8)
    return Sample(pixels, truth, prediction, probability, name)


def read(folder: Path, samples: list[Sample] | None = None) -> Reader:
    reader = Reader(write_report(folder, samples or []).read_text(encoding="utf-8"))
    assert reader.unbalanced == []
    return reader


# The page -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reader]:
    folder = write_run(tmp_path_factory.mktemp("runs") / "whole")
    samples = [sample("cat"), sample("dog", "emu", 0.4, "b.png"), sample("emu", "cat", 0.8, "c.png", 100)]
    return folder, read(folder, samples)


def test_headline_shows_model_data_and_result(whole: tuple[Path, Reader]) -> None:
    text = whole[1].text
    assert "test top-1 accuracy 85.0 % 95 % interval 76.7 % to 90.7 % · 85 of 100 images correct" in text
    assert "validation top-1 91.0 %" in text
    assert "test NLL 0.457" in text
    assert "training time 3m12s" in text
    assert "trained from scratch on pets: 1,437 training images of 3 classes" in text
    assert "depth 3, width 64, heads 4, patch 2 x 2, image size 8 x 8" in text
    assert "steps 20 2.0 epochs" in text


def test_classes_are_sorted_by_recall(whole: tuple[Path, Reader]) -> None:
    rows = [row for row in whole[1].rows if len(row) == 5]
    assert rows == [  # recall, precision, F1
        ["emu", "80.0 %", f"{4000 / 41:.1f} %", f"{8000 / 91:.1f} %", "50"],
        ["cat", "85.0 %", f"{1700 / 23:.1f} %", f"{3400 / 43:.1f} %", "20"],
        ["dog", "93.3 %", f"{2800 / 36:.1f} %", f"{5600 / 66:.1f} %", "30"],
    ]
    assert f"{100 * (17 / 20 + 28 / 30 + 40 / 50) / 3:.1f} %" in whole[1].text


def test_confusion_table_lists_frequent_errors(whole: tuple[Path, Reader]) -> None:
    rows = [row for row in whole[1].rows if len(row) == 4]
    assert rows[0] == ["emu", "cat", "5 of 50", "10.0 %"]
    assert rows[2] == ["cat", "dog", "3 of 20", "15.0 %"]
    assert [row[:2] for row in rows[3:]] == [["dog", "cat"], ["dog", "emu"]]
    assert "15 errors in 100 test images" in whole[1].text


def test_errors_come_first_by_confidence(whole: tuple[Path, Reader]) -> None:
    images = [attributes for tag, attributes in whole[1].elements if tag == "img"]
    assert [one["alt"] for one in images] == ["emu, predicted cat", "dog, predicted emu", "cat, predicted cat"]
    assert [(one["src"] or "")[:16] for one in images] == ["data:image/jpeg;", "data:image/png;b", "data:image/png;b"]
    assert "Shown: 2 of 15 errors, the most confident first, and 1 of 85 correct predictions." in whole[1].text
    assert re.search(r"cat 80 % true: emu c\.png emu 40 % true: dog b\.png Correct 1 cat 90 % a\.jpg", whole[1].text)


def test_commands_and_changed_settings(whole: tuple[Path, Reader]) -> None:
    folder, reader = whole
    assert "plainvit train x" in reader.text
    assert f"plainvit finetune --init {folder} --data DIR" in reader.text
    assert ["model.patch", "2, 2"] in reader.rows
    names = {row[0] for row in reader.rows if len(row) == 2}
    assert {"recipe", "data", "epochs", "batch", "optim.lr"} <= names
    assert not {"seed", "ema", "optim.name"} & names  # defaults


def test_report_loads_nothing_and_has_unique_ids(whole: tuple[Path, Reader]) -> None:
    check_harmless(whole[1])
    ids = [attributes["id"] for _, attributes in whole[1].elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    anchors = [at["href"] for tag, at in whole[1].elements if tag == "a" and str(at["href"]).startswith("#")]
    assert anchors
    assert {str(one)[1:] for one in anchors} <= set(ids)


def test_figures_use_the_css_colors(whole: tuple[Path, Reader]) -> None:
    text = (whole[0] / "report.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) > 3
    for drawing in drawings:
        assert "var(--" in drawing
        assert not [color for color in figures.COLORS.values() if color in drawing]
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text


def test_a_run_without_results_shows_its_last_validation(tmp_path: Path) -> None:
    lines = [*steps(2), {"step": 20, "val": {"top1": 0.83}}]
    text = read(write_run(tmp_path / "run", metrics=lines, results=None, environment=None)).text
    assert "validation top-1 accuracy 83.0 % last of 1 validation during training, at step 20" in text
    assert "Training loss" in text
    assert "Confusion" not in text


def test_an_empty_folder_has_an_empty_report(tmp_path: Path) -> None:
    assert "A model, trained from scratch." in read(tmp_path).text


def test_non_finite_values_are_tolerated(tmp_path: Path) -> None:
    lines = steps(30, lr=0.1, norm=1.0)
    lines[4] |= {"loss": None, "norm": None, "skipped": True}
    lines[9] |= {"loss": math.nan, "lr": math.inf, "norm": -math.inf, "epoch": "x", "skipped": True}
    lines[11] |= {"loss": 10**400, "norm": 1e300}
    lines += [{"step": None, "loss": 1}, {"loss": 1}, {"step": 30, "val": None}, {"step": 30, "val": {"top1": None}}]
    lines.append({"step": 10**400, "loss": 1})
    whole = "".join(json.dumps(line) + "\n" for line in lines) + '[1]\n7\n\n{"step": 31, "lo'
    results = {"test": result(top1=None, nll=math.nan, interval=[None, 1]) | {"images": None, "top5": None}}
    folder = write_run(tmp_path / "run", metrics=whole, results=results, environment={"seconds": math.nan})
    text = read(folder, [sample(probability=math.nan)]).text
    assert "2 steps skipped" in text
    assert "interval" not in text
    assert "nan" not in text.replace("NaN or Inf", "").lower()
    table = curves.tabulate(read_metrics(folder))
    assert table["loss"][0] == 2
    assert np.isnan(table["loss"][[4, 9, 11]]).all()


def test_damaged_and_huge_figures_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "figures").mkdir()
    (folder / "figures" / "masked-0000001.png").write_bytes(b"damaged")
    Image.new("RGB", (8, 8)).save(folder / "figures" / "masked-0000002.png")
    assert "Step 2" in read(folder).text
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    assert "Masked prediction" not in read(folder).text


FIRST = {"top1": 0.979, "images": 48, "seconds": 21}
PASSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "one class": ({"data": {"classes": ["only"]}, "results": {"test": result([[5]])}}, "No errors on the test images"),
    "diverged": (
        {"status": {"state": "diverged", "step": 12, "steps": 1000, "reason": "loss is not finite"}},
        "This run diverged at step 12 of 1,000: loss is not finite.",
    ),
    "limited by hours": (
        {"results": {"steps": 40, "steps_planned": 200}, "config": {"hours": 0.1}, "metrics": steps(40)},
        "steps 40 of 200: limited by --hours 0.1",
    ),
    "first result": (
        {"results": {"val": result(), "first": FIRST}},
        "first result 97.9 % linear head on frozen features 48 held-out images, after 21s",
    ),
    "first result kept": (
        {"results": {"final": "first", "first": FIRST, "trained": {"top1": 0.95}}},
        "After training, 95.0 % of the held-out images were correct, fewer than",
    ),
    "chosen on val": (
        {"results": {"val": result(), "test": result(), "chosen_on_val": True}},
        "optimistic; the test images were not used",
    ),
    "no test": ({"results": {"val": result(), "chosen_on_val": True}}, "There is no test split"),
    "chance": ({"results": {"val": result(majority_accuracy=0.5)}}, "always the most frequent class: 50.0 %"),
    "unreadable": ({"results": {"val": result(unreadable=2)}}, "2 validation images could not be read"),
    "better before": (
        {"results": {"val": result(), "better_before": {"step": 1200, "top1": 0.875}}},
        "Step 1,200 had a higher validation accuracy, 87.5 %: use --patience N",
    ),
    "calibration": (
        {"results": {"test": result(ece=0.0734, probability=0.9234)}},
        f"test calibration error 7.3 points {describe_confidence(0.9234, 85, 100)}",
    ),
    "invalid calibration": (
        {"results": {"test": result(ece=0.0734, probability=1e9, images=-1)}},
        "test calibration error 7.3 points Confusion",
    ),
}


@pytest.mark.parametrize(("changes", "passage"), PASSAGES.values(), ids=PASSAGES)
def test_what_happened_in_a_run_is_reported(tmp_path: Path, changes: dict[str, Any], passage: str) -> None:
    assert passage in read(write_run(tmp_path / "run", **{"metrics": []} | changes)).text


def test_what_did_not_happen_is_not_reported(whole: tuple[Path, Reader]) -> None:
    for words in ("optimistic", "Missing", "calibration error", "first result", "--hours", "higher validation"):
        assert words not in whole[1].text


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "--><svg onload=alert(1)>",
    "]]></style></title><iframe src=//evil.example>",
    "$\\frac{1}{0}$ & 100% <b>",
    "javascript:alert(1)",
    "\udcff\x00\u202egnp\n\r\t" + "W" * 300,
    "猫 कुत्ता 🐈 \u200dx",
    "=cmd()",
    "",
]


def test_hostile_names_inject_nothing(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).integers(0, 9, (len(HOSTILE), len(HOSTILE)))
    files = run_files()
    config = files["config.json"] | dict(zip(["recipe", "data", "init", HOSTILE[1]], HOSTILE, strict=False))
    folder = write_run(
        tmp_path / 'run "><script>',
        config=config | {"model": {"kind": "vit", "width": HOSTILE[0]}},
        data={"classes": HOSTILE, "splits": {"train": {"images": 1, "fingerprint": HOSTILE[1]}}},
        results={"test": result(matrix)},
        environment={
            "command": HOSTILE[0],
            "device": HOSTILE[1],
            HOSTILE[2]: {"x": [HOSTILE[3]]},
            "started": HOSTILE[1],
        },
        status={"state": HOSTILE[0], "reason": HOSTILE[1]},
        metrics=[],
    )
    names = HOSTILE[:6] + HOSTILE[7:]
    reader = read(folder, [sample(name, HOSTILE[0], 0.5, f"{name}.jpg") for name in [*names, HOSTILE[6]]])
    check_harmless(reader)
    for name in names:
        assert " ".join(name.split()) in reader.text  # shown as it is, in words
    assert "\x00" not in reader.text
    assert "\u202e" not in reader.text


def test_many_classes_fit_into_a_small_report(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    matrix = generator.poisson(0.02, (300, 300)) + np.diag(generator.integers(1, 50, 300))
    matrix[7] = 0  # a class without images
    data = {"classes": [f"n{index:08} a name of some length" for index in range(300)], "splits": {}}
    folder = write_run(tmp_path / "run", data=data, results={"test": result(matrix)}, metrics=[])
    noise = [sample("cat", "dog", 0.5, f"{'x' * index}.jpg", 160) for index in range(48)]  # compresses worst
    reader = read(folder, noise)
    shown = [row for row in reader.rows if len(row) == 5]
    accuracy = {name: np.diag(matrix)[at] / max(matrix[at].sum(), 1) for at, name in enumerate(data["classes"])}
    assert len(shown) == 299
    assert "1 class without images" in reader.text
    assert [accuracy[row[0]] for row in shown] == sorted(accuracy[row[0]] for row in shown)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.partition("The other 279 classes")[0].count('<td class="number">') == 20 * 4 + 10 * 2
    assert len(text) < 2_000_000


def test_report_is_deterministic_and_writes_only_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = write_run(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = contents(tmp_path)
    settings = dict(matplotlib.rcParams)
    assert write_report(folder, [sample()]) == folder / "report.html"
    first = contents(tmp_path)
    names = "curves.png", "confusion.png", "confusion.csv"
    expected = {folder / "report.html", *(folder / "figures" / name for name in names)}
    assert first.keys() - before.keys() == expected
    assert {path: first[path] for path in before} == before
    write_report(folder, [sample()])
    assert contents(tmp_path) == first
    assert dict(matplotlib.rcParams) == settings
    for path in (folder / "figures").glob("*.png"):
        with Image.open(path) as image:
            image.load()
            assert min(image.size) > 100
        assert 1000 < path.stat().st_size < 300_000


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Its parts ------------------------------------------------------------------------------------------------------------


def test_page_escapes_text_but_not_html() -> None:
    text = render_page(
        "A < B", "plain & simple", [make_section("One & two", "a < b", element("p", "<i>", Html("<b>bold</b>")), "")]
    )
    reader = Reader(text)
    check_harmless(reader)
    assert "<p>a &lt; b</p><p>&lt;i&gt;<b>bold</b></p></section>" in text
    assert '<p class="lead">plain &amp; simple</p>' in text
    assert '<section id="one-two">' in text
    assert "<title>A &lt; B</title>" in text


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (1, 5000), (3000, 20), (300, 400)])
def test_images_of_any_shape_are_embedded(shape: tuple[int, int]) -> None:
    text = embed_image(np.zeros((*shape, 3), np.uint8), "x")
    assert len(text) < 20_000
    assert Reader(text).elements[0][0] == "img"


@given(st.lists(st.floats(-1e9, 1e9) | st.just(math.nan), max_size=300), st.integers(1, 20))
def test_summary_of_a_curve_keeps_mean_and_extremes(values: list[float], buckets: int) -> None:
    array = np.array(values, float)
    steps, mean, low, high = curves.summarize(np.arange(len(array)), array, buckets)
    finite = np.flatnonzero(~np.isnan(array))
    assert len(steps) == min(len(finite), buckets)
    if len(finite):
        assert steps[-1] == finite[-1]
        assert (low.min(), high.max()) == (np.nanmin(array), np.nanmax(array))
        sizes = np.array([len(part) for part in np.array_split(finite, len(steps))])
        np.testing.assert_allclose((mean * sizes).sum(), array[finite].sum(), rtol=1e-9, atol=1e-3)


def test_curves_draw_the_recorded_values() -> None:
    lines = [*steps(20, norm=1.0, lr=0.1), {"step": 10, "val": {"top1": 0.5}}, {"step": 20, "val": {"top1": 0.75}}]
    lines[4] |= {"loss": None, "skipped": True}
    figure = curves.draw_curves(curves.tabulate(lines))
    drawn = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.lines}
    assert list(drawn) == ["Training loss", "Top-1 accuracy, %", "Learning rate", "Gradient norm"]
    loss, skipped = drawn["Training loss"].lines
    expected = [2 / step for step in range(1, 21) if step != 5]
    assert loss.get_ydata().tolist() == pytest.approx(expected)
    assert skipped.get_xdata().tolist() == [5]
    assert drawn["Training loss"].get_yscale() == "log"  # from 2 to 0.1
    (validation,) = drawn["Top-1 accuracy, %"].lines
    assert validation.get_xydata().tolist() == [[10, 50], [20, 75]]


def test_confusion_csv_is_complete(whole: tuple[Path, Reader]) -> None:
    head, *rows = csv.reader(io.StringIO((whole[0] / "figures" / "confusion.csv").read_text(encoding="utf-8")))
    assert head[1:] == [row[0] for row in rows] == CLASSES
    assert [[int(cell) for cell in row[1:]] for row in rows] == COUNTS


def test_the_last_record_of_a_repeated_step_counts() -> None:
    lines = [*steps(4), {"step": 5, "loss": None, "skipped": True}, {"step": 3, "val": {"top1": 0.5}}]
    lines += [{"step": step, "loss": 9.0} for step in (4, 5, 6)]
    table = curves.tabulate(lines)
    assert table["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert table["loss"].tolist() == [2.0, 1.0, 2 / 3, 9.0, 9.0, 9.0]
    assert np.isnan(table["skipped"]).all()
    assert table["val_top1"][2] == 0.5


def test_frequent_confusions_are_sorted_by_count_then_share() -> None:
    matrix = np.array([[50, 2, 0], [2, 5, 4], [0, 0, 9]])
    assert find_frequent_confusions(matrix) == [(1, 2), (1, 0), (0, 1)]
    assert find_frequent_confusions(matrix, most=1) == [(1, 2)]
    assert find_frequent_confusions(np.eye(3)) == []


def test_confusion_figure_shows_percentages_of_rows() -> None:
    axes = draw_confusion(np.array(COUNTS), CLASSES).axes[0]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert shown == {(0, 0): "85", (1, 0): "15", (0, 1): "3", (1, 1): "93", (2, 1): "3"} | {
        (0, 2): "10",
        (1, 2): "10",
        (2, 2): "80",
    }
    assert [label.get_text() for label in axes.get_xticklabels()] == CLASSES


def test_contact_sheet_draws_images_labels_and_probabilities() -> None:
    pixels = np.full((4, 8, 3), 7, np.uint8)
    axes = draw_cells([Cell(pixels, "cat", "a.jpg", 0.25), Cell(None, "no prediction", "b.jpg")]).axes[0]
    assert [image.get_array().tolist() for image in axes.images] == [pixels.tolist()]
    assert [text.get_text() for text in axes.texts if text.get_text()] == [
        "cat",
        "a.jpg",
        "25%",
        "no prediction",
        "b.jpg",
    ]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([0.92, 0.92, 0.25 * 0.92, 0.92])  # background, full bar, bar; background


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short.jpg", "short.jpg"),
        ("long name of a photo 17.jpg", "long…7.jpg"),
        ("猫" * 9 + ".jpg", "猫猫….jpg"),
    ],
)
def test_names_are_shortened_by_their_width(text: str, shown: str) -> None:
    assert truncate(text, 11, 5) == shown


@pytest.mark.parametrize(
    "lines", [[], steps(1), [{"step": 7, "val": {"top1": 1.0, "nll": 0.0}}], steps(3, lr=0.0)], ids=range(4)
)
def test_curves_of_few_steps_are_drawn(lines: list[dict[str, Any]]) -> None:
    axes = curves.draw_curves(curves.tabulate(lines)).axes
    assert sum(bool(panel.lines) for panel in axes) == len(curves.list_panels(curves.tabulate(lines)))


def test_calibration_bars_have_the_accuracy_of_their_bin() -> None:
    bins = np.zeros((10, 3))
    bins[[6, 9]] = (4, 0.65, 0.5), (16, 0.95, 0.75)
    axes = draw_calibration(bins).axes[0]
    assert [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches] == [
        (pytest.approx(0.65), 0.5),
        (pytest.approx(0.95), 0.75),
    ]
    assert axes.patches[0].get_alpha() < axes.patches[1].get_alpha()  # fewer images
