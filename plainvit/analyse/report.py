"""The report of a training run: one self-contained page beside the run's files, and its pictures in figures/.

from plainvit.analyse.report import Sample, write_report
write_report(Path("runs/digits"), samples)   # runs/digits/report.html

The page is made of whatever the folder holds and says what it lacks.
"""

import contextlib
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse import figures
from plainvit.analyse.figures import number, printable
from plainvit.analyse.masked import masked_pictures
from plainvit.analyse.page import (
    NONE,
    SPACE,
    Html,
    Section,
    bar,
    counted,
    duration,
    element,
    join,
    notice,
    page,
    pairs,
    percent,
    picture,
    table,
)
from plainvit.config import Config, to_json
from plainvit.disk import read_json, write_atomically

WORST = 20  # classes shown before the rest is folded
TIMES = "\u00a0\u00d7\u00a0"  # no line breaks at it


@dataclass(frozen=True)
class Sample:
    """One prediction to show."""

    image: np.ndarray  # uint8 [h, w, 3]
    truth: str
    guess: str
    probability: float  # of the guess
    name: str  # of the file

    def __post_init__(self) -> None:
        if self.image.dtype != np.uint8 or self.image.ndim != 3 or self.image.shape[2] != 3 or not self.image.size:
            raise ValueError(f"{self.name}: an image is uint8 [h, w, 3], got {self.image.dtype} {self.image.shape}")


# A run ----------------------------------------------------------------------------------------------------------------

FILES = {
    "config.json": "the settings",
    "data.json": "the names of the classes and the number of images",
    "metrics.jsonl": "the learning curves",
    "results.json": "the evaluation of the finished weights",
    "environment.json": "the machine, the versions and the command",
    "status.json": "how the run ended",
}
SPLIT = {"test": "test", "val": "validation", "train": "training"}  # the first there is, is the one to judge by


@dataclass(frozen=True)
class Run:
    """What a run folder says about its run; a part that is absent is empty."""

    folder: Path
    config: dict[str, Any]
    data: dict[str, Any]
    results: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    curves: figures.Table  # thinned out
    skipped: int  # steps that did not move the weights
    faults: tuple[Html, ...]  # what is missing or cannot be read

    @property
    def judged(self) -> str:
        """The split whose confusions are shown: test where there is one."""
        return next((split for split in SPLIT if _mapping(self.results.get(split))), "")

    @property
    def chosen_on_val(self) -> bool:
        return bool(self.results.get("chosen_on_val") or _mapping(self.results.get("val")).get("chosen_on_val"))

    def result(self, split: str) -> dict[str, Any]:
        return _mapping(self.results.get(split))

    def images(self, split: str) -> float:
        return number(_mapping(_mapping(self.data.get("splits")).get(split)).get("images"))

    def classes(self, count: int) -> list[str]:
        """So many names; a number where there is no name."""
        names = self.data.get("classes")
        names = [printable(name) for name in names] if isinstance(names, list) else []
        return names[:count] + [f"class {index}" for index in range(len(names), count)]


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run")
    found: dict[str, Any] = {}
    faults: list[Html] = []
    for name, meaning in FILES.items():
        read = read_metrics if name == "metrics.jsonl" else read_json
        try:
            found[name.partition(".")[0]] = read(folder / name)
            fault = "" if (folder / name).is_file() else f" ({meaning})"
        except (OSError, ValueError) as error:
            fault = f" ({meaning}) cannot be read: {error}"
        if fault:
            faults.append(join([element("code", name), fault]))
    metrics = found.pop("metrics", figures.tabulate([]))
    skipped = int((metrics["skipped"] > 0).sum())
    parts = {key: found.get(key, {}) for key in ("config", "data", "results", "environment", "status")}
    return Run(folder=folder, curves=figures.thin_table(metrics), skipped=skipped, faults=tuple(faults), **parts)


def read_metrics(path: Path) -> figures.Table:
    """The columns of metrics.jsonl; none where there is no such file."""
    if not path.is_file():
        return figures.tabulate([])
    with path.open(encoding="utf-8", errors="replace") as file:
        return figures.tabulate(_objects(file))


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One object per line; a line that was cut short when the machine stopped is passed over."""
    for line in lines:
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
        if isinstance(value, dict):
            yield value


def write_report(folder: Path, samples: Sequence[Sample] = ()) -> Path:
    """Writes report.html and figures/ into the folder of a run, from what is there."""
    run = read_run(folder)
    (folder / "figures").mkdir(exist_ok=True)
    sections = [
        _curves(run),
        _hidden(run),
        mistakes(run),
        _classes(run),
        predictions(run, samples),
        _repeat(run),
        _settings(run),
        _machine(run),
    ]
    title = printable(run.config.get("recipe") or folder.resolve().name)
    text = page(title, _head(run), [one for one in sections if one], eyebrow=_eyebrow(run))
    path = folder / "report.html"
    write_atomically(path, lambda target: target.write_text(text, encoding="utf-8"))
    return path


def _eyebrow(run: Run) -> str:
    day = printable(run.environment.get("started") or "")[:10]
    return " · ".join(word for word in ("Training run", run.folder.resolve().name, day) if word)


# The head -------------------------------------------------------------------------------------------------------------


def fact(name: str, value: str, *under: object, chief: bool = False) -> Html:
    below = [element("dd", line, class_="under") for line in under if line]
    digits, space, unit = value.partition(SPACE)
    large = element("dd", digits, space, element("small", unit) if unit else "")
    return element("div", element("dt", name), large, *below, class_="fact chief" if chief else "fact")


def _head(run: Run) -> Html:
    rows = [element("dl", *facts, class_="facts") for facts in (_chief(run), _facts(run)) if facts]
    return join([element("p", _story(run), class_="lead"), *rows, *_notices(run)])


OBJECTIVES = {
    "masked": " without labels, by masked patch prediction",
    "mae": " without labels, as a masked autoencoder",
    "simmim": " without labels, by SimMIM",
}


def _story(run: Run) -> str:
    """What was trained on what, from where, for how long."""
    words = [_model(_mapping(run.config.get("model")), run.config.get("init"))]
    words.append(f", fine-tuned from {run.config['init']}" if run.config.get("init") else ", trained from scratch")
    words.append(OBJECTIVES.get(str(run.config.get("objective")), ""))
    if run.config.get("data"):
        words.append(f" on {run.config['data']}")
    images = run.images("train")
    sizes = [] if math.isnan(images) else [counted(images, "training image")]
    names = run.data.get("classes")
    sizes += [counted(len(names), "class", "classes")] if isinstance(names, list) else []
    words.append(f": {' of '.join(sizes)}" if sizes else "")
    return "".join(words) + "."


def _model(model: Mapping[str, Any], init: object) -> str:
    kind = {"vit": "A Vision Transformer", "resnet": "A ResNet"}.get(str(model.get("kind")))
    if not kind:
        return "The model of the weights it began with" if init else "A model"
    kind = "A hybrid of ResNet and Vision Transformer" if model.get("stem") else kind
    ways = {"depth": "depth {}", "width": "width {}", "heads": "{} heads", "blocks": "blocks {}"}
    ways |= {"patch": "patches of {}", "image_size": "images of {}"}
    shown = [way.format(_sides(model[name])) for name, way in ways.items() if name in model]
    return f"{kind} ({', '.join(shown)})"


def _sides(value: object) -> str:
    return TIMES.join(map(str, value)) if isinstance(value, list) else str(value)


def _facts(run: Run) -> list[Html]:
    facts: list[Html] = []
    judged = run.result(run.judged)
    if run.judged == "test" and run.result("val"):
        val = run.result("val")
        flattered = "flattered, see below" if run.chosen_on_val else ""
        facts.append(fact("validation top-1", percent(number(val.get("top1")), number(val.get("images"))), flattered))
    for name, label in (("top5", "top-5"), ("nll", "NLL")):
        value = number(judged.get(name))
        if not math.isnan(value):
            shown = percent(value, number(judged.get("images"))) if name == "top5" else f"{value:.3f}"
            under = "negative log-likelihood" if name == "nll" else ""
            facts.append(fact(f"{SPLIT[run.judged]} {label}", shown, under))
    seconds = number(run.environment.get("seconds"))
    if not math.isnan(seconds):
        facts.append(fact("training time", duration(seconds), _device(run)))
    steps = run.curves["step"]
    if len(steps):
        epochs = run.curves["epoch"][np.isfinite(run.curves["epoch"])]
        under = f"{epochs[-1]:,.1f} epochs".replace(".0 ", " ") if len(epochs) else ""
        facts.append(fact("steps", f"{steps[-1]:,.0f}", under))
    return facts


def _device(run: Run) -> str:
    device = run.environment.get("device")
    return f"on {printable(device, 40)}" if device else ""


def _chief(run: Run) -> list[Html]:
    """The result in big figures: test, else validation, else the last validation while training."""
    result = run.result(run.judged)
    if "top1" not in result and "loss" in result:
        right = number(result.get("accuracy"))
        under = "of hidden pixels" if math.isnan(right) else f"{percent(right)} of the hidden colours are right"
        return [fact(f"{SPLIT[run.judged]} loss", f"{number(result['loss']):.4f}", under, chief=True)]
    if result:
        images, top1 = number(result.get("images")), number(result.get("top1"))
        under = " · ".join(word for word in (_interval(result), _score(top1, images)) if word)
        return [fact(f"{SPLIT[run.judged]} top-1 accuracy", percent(top1, images), under, chief=True)]
    for column, name in (("val_top1", ""), ("val_ema_top1", " of the averaged weights")):
        rows = np.flatnonzero(np.isfinite(run.curves[column]))
        if len(rows):
            step, top1 = float(run.curves["step"][rows[-1]]), float(run.curves[column][rows[-1]])
            under = f"the last of {counted(len(rows), 'validation')} while training, at step {step:,.0f}"
            return [fact(f"validation top-1 accuracy{name}", percent(top1), under, chief=True)]
    return []


def _interval(result: Mapping[str, Any]) -> str:
    ends = result.get("interval")
    ends = [number(end) for end in ends] if isinstance(ends, list) and len(ends) == 2 else [math.nan]
    if any(map(math.isnan, ends)):
        return ""
    low, high = (percent(end, number(result.get("images"))) for end in ends)
    return f"95{SPACE}% interval {low.removesuffix(f'{SPACE}%')} {NONE} {high}"


def _score(top1: float, images: float) -> str:
    if math.isnan(top1) or math.isnan(images):
        return ""
    return f"{top1 * images:,.0f} of {counted(images, 'image')} right"


def _notices(run: Run) -> list[Html]:
    return [notice(*words, warning=warning) for words, warning in _remarks(run) if words]


def _remarks(run: Run) -> Iterable[tuple[list[object], bool]]:
    """What a reader must know before believing the numbers: (words, whether it is a warning)."""
    state, reason = run.status.get("state"), run.status.get("reason")
    if state and state != "done":
        step, steps = number(run.status.get("step")), number(run.status.get("steps"))
        ended = {"running": "This run is not finished", "interrupted": "This run was interrupted"}
        ended |= {"diverged": "This run diverged", "failed": "This run failed"}
        where = "" if math.isnan(step) else f" at step {step:,.0f}" + ("" if math.isnan(steps) else f" of {steps:,.0f}")
        words = ended.get(str(state), f"This run ended as {state!r}")
        yield [element("b", words), f"{where}{f': {reason}' if reason else ''}."], True
    if run.skipped:
        yield [f"{counted(run.skipped, 'step')} did not move the weights: loss or gradient was not finite."], True
    for split in SPLIT:
        unreadable = number(run.result(split).get("unreadable"))
        if unreadable > 0:
            images = counted(unreadable, f"{SPLIT[split]} image")
            yield [f"{images} could not be read and {'is' if unreadable == 1 else 'are'} not scored."], True
    if run.chosen_on_val:
        yield [_flattery(run)], False
    if run.faults:
        listed = [part for fault in run.faults for part in (", ", fault)][1:]
        yield ["Missing in this folder: ", *listed, "."], False


def _flattery(run: Run) -> str:
    words = "These weights were chosen because they did best on the validation images, so that result is flattered"
    if run.result("test"):
        return f"{words}; the test images had no part in the choice."
    return f"{words}, and there is no test split to tell by how much: expect somewhat less on new images."


# The sections ---------------------------------------------------------------------------------------------------------


def drawing(figure: figures.Figure, label: str) -> Html:
    return Html(figures.svg(figure, label))  # its own text is escaped by matplotlib


def _curves(run: Run) -> Section | None:
    names = figures.panels(run.curves)
    if not names:
        return None
    target = run.folder / "figures"
    figures.save(figures.draw_curves(run.curves), target / "curves.png")
    figures.write_curves(run.curves, target / "curves.csv")
    drawn = [drawing(figures.draw_curve(run.curves, name), f"Curve of {name} by step") for name in names]
    body = join([element("div", *(element("div", one) for one in drawn), class_="panels"), _numbers("curves")])
    return Section("Learning curves", body)


def _hidden(run: Run) -> Section | None:
    """Pictures of masked prediction, where the run made any."""
    parts: list[object] = []
    for step, pixels in masked_pictures(run.folder):
        shown = picture(pixels, f"Images, what was left of them, and predictions at step {step}", max(pixels.shape[:2]))
        parts += [element("h3", f"Step {step:,}"), element("div", shown, class_="picture")]
    if not parts:
        return None
    note = "From top to bottom: held-out images, what the model saw of them (grey: nothing), what it predicted there."
    scaled = _mapping(run.config.get("masked")).get("normalise")
    note += " Each patch is shown with its own mean and contrast, which are not predicted." if scaled else ""
    return Section("Hidden patches", join([element("p", note, class_="note"), *parts]))


def _numbers(name: str) -> Html:
    links = [element("a", f"figures/{name}.{kind}", href=f"figures/{name}.{kind}") for kind in ("csv", "png")]
    return element("p", "The numbers are in ", links[0], ", the picture in ", links[1], ".", class_="note")


def _matrix(run: Run) -> np.ndarray | None:
    """Counts [truth, guess] of the judged split, where they are whole and square."""
    rows = run.result(run.judged).get("confusion")
    try:
        matrix = np.array(rows, float)
    except (TypeError, ValueError):
        return None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        return None
    matrix = np.nan_to_num(matrix, nan=0, posinf=0, neginf=0).clip(0)
    return matrix if matrix.any() else None


def mistakes(run: Run) -> Section | None:
    matrix = _matrix(run)
    if matrix is None:
        return None
    classes = run.classes(len(matrix))
    figure, target = figures.confusion(matrix, classes), run.folder / "figures"
    figures.save(figure, target / "confusion.png")
    figures.write_confusion(matrix, classes, target / "confusion.csv")
    picture_of = drawing(figure, "Confusion matrix")
    wide = f"min-width:{min(figure.get_figwidth() * 72, 620):.0f}px;max-width:{figure.get_figwidth() * 110:.0f}px"
    note = "Each row is a class, each column a guess: blue where they agree, orange where not, deeper where more often."
    numbers = " Numbers are per cent of the row." if len(matrix) <= figures.NUMBERED else ""
    words = _confusions(matrix, classes, SPLIT[run.judged])
    shown = element("div", element("div", picture_of, style=wide), class_="picture")
    drawn = join([shown, element("p", note + numbers, class_="note")])
    beside = "beside" if len(matrix) <= 12 else None  # a larger matrix needs the width
    body = element("div", element("div", words), element("div", drawn), class_=beside)
    return Section("What is taken for what", join([body, _numbers("confusion")]))


def frequent_confusions(matrix: np.ndarray, most: int = 10) -> list[tuple[int, int]]:
    """(truth, guess) of the mistakes made most often; of equals, the one that is a larger share of its class first."""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    wrong = np.argwhere((matrix > 0) & ~np.eye(len(matrix), dtype=bool))
    found = [(truth, guess) for truth, guess in wrong.tolist()]
    return sorted(found, key=lambda at: (-matrix[at], -shares[at], at))[:most]


def _confusions(matrix: np.ndarray, classes: Sequence[str], split: str) -> Html:
    found = frequent_confusions(matrix)
    if not found:
        return element("p", f"No {split} image was taken for another class.")
    totals, mistakes = matrix.sum(1), matrix.sum() - np.trace(matrix)
    first = f"{counted(mistakes, 'mistake')} among {counted(matrix.sum(), f'{split} image')}."
    rows = [
        (
            join([element("b", classes[truth]), " taken for ", element("b", classes[guess])]),
            f"{matrix[truth, guess]:,.0f} of {totals[truth]:,.0f}",
            percent(matrix[truth, guess] / totals[truth]),
        )
        for truth, guess in found
    ]
    return join([element("p", first), table(["most often", "images", "of the class"], rows, numbers=(1, 2))])


def _classes(run: Run) -> Section | None:
    matrix = _matrix(run)
    if matrix is None:
        return None
    classes, totals = run.classes(len(matrix)), matrix.sum(1)
    seen = np.flatnonzero(totals > 0)
    shares = np.diag(matrix)[seen] / totals[seen]
    order = seen[np.lexsort((seen, -totals[seen], shares))]  # worst first; of equals, the one with more images
    rows = [_class_row(matrix, classes, int(one)) for one in order]
    mean = f"Averaged over classes, {percent(shares.mean())} of the {SPLIT[run.judged]} images are recognised."
    unseen = len(matrix) - len(seen)
    note = f" {counted(unseen, 'class', 'classes')} had no image." if unseen else ""
    parts = [element("p", mean + note), _class_table(rows[:WORST])]
    if rows[WORST:]:
        rest = element("summary", f"The other {counted(len(rows) - WORST, 'class', 'classes')}")
        parts.append(element("details", rest, _class_table(rows[WORST:])))
    return Section("Accuracy by class", join(parts))


def _class_row(matrix: np.ndarray, classes: Sequence[str], one: int) -> tuple[object, ...]:
    row, total = matrix[one], matrix[one].sum()
    others = row.copy()
    others[one] = 0
    guess = int(others.argmax())
    taken = f"{classes[guess]} ({others[guess]:,.0f})" if others[guess] else ""
    share = row[one] / total
    measure = element("td", bar(share), class_="measure")
    return classes[one], measure, percent(share), f"{row[one]:,.0f} / {total:,.0f}", taken


def _class_table(rows: Sequence[Sequence[object]]) -> Html:
    titles = ["class", element("th", class_="measure"), "accuracy", "right / images", "most often taken for"]
    return table(titles, rows, numbers=(2, 3))


def predictions(run: Run, samples: Sequence[Sample]) -> Section | None:
    if not samples:
        return None
    target, ordered = run.folder / "figures", figures.wrong_first(samples)
    figures.save(figures.gallery(samples), target / "gallery.png")
    figures.write_gallery(samples, target / "gallery.csv")
    wrong = [one for one in ordered if one.guess != one.truth]
    note = f"{len(wrong)} wrong among {counted(len(ordered), 'image')}" if wrong else "All of these are right"
    parts: list[object] = [
        element("p", f"{note}. They are a choice, so the share of mistakes here is not the accuracy.", class_="note")
    ]
    for title, shown in (("Wrong", wrong), ("Right", ordered[len(wrong) :])):
        if shown:
            parts.append(element("h3", title, " ", element("span", len(shown), class_="quiet")))
            parts.append(element("div", *map(_card, shown), class_="samples"))
    return Section("Predictions", join([*parts, _numbers("gallery")]))


def _card(sample: Sample) -> Html:
    right, share = sample.guess == sample.truth, number(sample.probability)
    sure = NONE if math.isnan(share) else f"{100 * share:.0f}{SPACE}%"
    words = [
        element("div", element("b", sample.guess), element("span", sure, class_="quiet"), class_="line"),
        "" if right else element("div", element("span", "truth: ", class_="quiet"), sample.truth),
        element("div", sample.name, class_="file", title=sample.name),
    ]
    shown = picture(sample.image, f"{sample.truth}, guessed {sample.guess}")
    return element(
        "figure",
        shown,
        bar(share),
        element("figcaption", *words),
        class_="sample right" if right else "sample wrong",
    )


def _repeat(run: Run) -> Section | None:
    parts: list[object] = []
    command = run.environment.get("command")
    if command:
        parts += [element("p", "The same run again:"), command_line(str(command))]
        commit, seed = run.environment.get("commit"), run.config.get("seed")
        known = [f"seed {seed}" if seed is not None else "", f"commit {commit}" if commit else ""]
        if any(known):
            parts.append(element("p", f"With {' and '.join(word for word in known if word)}.", class_="note"))
    if run.status.get("state") == "done" or (run.folder / "model.safetensors").exists():
        place = shlex.quote(str(run.folder))
        weights = shlex.quote(str(run.folder / "model.safetensors"))
        parts += [element("p", "What the weights hold and mean:"), command_line(f"plainvit inspect {weights}")]
        parts += [element("p", "To train on from these weights:"), command_line(f"plainvit finetune --init {place}")]
    return Section("Repeat, go on", join(parts)) if parts else None


def command_line(line: str) -> Html:
    return element("pre", element("code", line))


def _settings(run: Run) -> Section | None:
    if not run.config:
        return None
    settings, defaults = flatten(run.config), flatten(to_json(Config()))
    changed = [key for key, value in settings.items() if key in defaults and defaults[key] != value]
    shown = {key: _value(value) for key, value in settings.items()}
    note = element("p", "Those that differ from the defaults are bold.", class_="note")
    folded = element("details", element("summary", counted(len(shown), "setting")), note, pairs(shown, changed))
    return Section("Settings", join([_data_table(run), folded]))


def _data_table(run: Run) -> Html:
    splits = [(name, _mapping(part)) for name, part in _mapping(run.data.get("splits")).items()]
    if not splits:
        return Html("")
    rows = [
        (
            SPLIT.get(name, "training" if name == "train" else name),
            _count(part.get("images")),
            part.get("fingerprint", NONE),
        )
        for name, part in splits
    ]
    rows = [(name, images, element("code", fingerprint)) for name, images, fingerprint in rows]
    return table(["split", "images", "fingerprint of names and labels"], rows, numbers=(1,))


def _count(value: object) -> str:
    return NONE if math.isnan(number(value)) else f"{number(value):,.0f}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 0.001}} as {"optim.lr": 0.001}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif key != "kind" or prefix:
            flat[prefix + key] = value
    return flat


def _value(value: object) -> str:
    match value:
        case None | "":
            return NONE
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(_value, value)) or NONE
        case float():
            return f"{value:.10g}" if math.isfinite(value) else NONE
        case _:
            return str(value)


def _machine(run: Run) -> Section | None:
    shown = {key: _value(value) for key, value in flatten(run.environment).items() if key != "command"}
    seconds = number(run.environment.get("seconds"))
    if seconds >= 60:
        shown["seconds"] += f" ({duration(seconds)})"
    return Section("Machine", pairs(shown)) if shown else None
