"""The report of a training run: one self-contained page beside the run's files, and its pictures in figures/.

from plainvit.analyse.report import Sample, write_report
write_report(Path("runs/digits"), samples)   # runs/digits/report.html

The page is made of whatever the folder holds and says what it lacks.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse.confusion import by_class, mistakes
from plainvit.analyse.curves import learning_curves
from plainvit.analyse.figures import number, printable
from plainvit.analyse.gallery import Sample, predictions
from plainvit.analyse.masked import masked_pictures
from plainvit.analyse.page import (
    NONE,
    SPACE,
    SPLIT,
    Html,
    Section,
    command_line,
    counted,
    duration,
    element,
    fact,
    join,
    not_scored,
    notice,
    pairs,
    percent,
    picture,
    points,
    table,
    write_page,
)
from plainvit.analyse.run import Run, mapping, read_run
from plainvit.config import Config, to_json
from plainvit.evaluate.chance import FEW, sureness

TIMES = "\u00a0\u00d7\u00a0"  # no line breaks at it


def write_report(folder: Path, samples: Sequence[Sample] = (), state: str = "") -> Path:
    """Writes report.html and figures/ into the folder of a run, from what is there.

    `state` is that of a run whose status.json does not say it yet: done is said once the report is there.
    """
    run = read_run(folder)
    if state:
        run.status["state"] = state
    (folder / "figures").mkdir(exist_ok=True)
    sections = [
        learning_curves(run.curves, folder),
        _hidden(run),
        *_confusions(run),
        predictions(samples, folder, judged=_judged(run)),
        _repeat(run),
        _settings(run),
        _machine(run),
    ]
    title = printable(run.config.get("recipe") or folder.resolve().name)
    above = "Training run", folder.resolve().name, printable(run.environment.get("started") or "")[:10]
    return write_page(folder / "report.html", title, _head(run), sections, above)


# The head -------------------------------------------------------------------------------------------------------------


def _head(run: Run) -> Html:
    rows = [element("dl", *facts, class_="facts") for facts in (_chief(run), _facts(run)) if facts]
    notices = [notice(*words, warning=warning) for words, warning in _remarks(run) if words]
    return join([element("p", _story(run), class_="lead"), *rows, *notices])


OBJECTIVES = {
    "masked": " without labels, by masked patch prediction",
    "mae": " without labels, as a masked autoencoder",
    "simmim": " without labels, by SimMIM",
}


def _story(run: Run) -> str:
    """What was trained on what, from where, for how long."""
    words = [_model(mapping(run.config.get("model")), run.config.get("init"))]
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
    judged, val, split = run.result(run.judged), run.result("val"), SPLIT.get(run.judged, "")
    top5, nll, seconds = number(judged.get("top5")), number(judged.get("nll")), number(run.environment.get("seconds"))
    if run.judged == "test" and val:
        flattered = "flattered, see below" if run.chosen_on_val else ""
        facts.append(fact("validation top-1", percent(number(val.get("top1")), number(val.get("images"))), flattered))
    names = run.data.get("classes")
    if not math.isnan(top5) and not (isinstance(names, list) and len(names) <= FEW):
        facts.append(fact(f"{split} top-5", percent(top5, number(judged.get("images")))))
    if not math.isnan(nll):
        facts.append(fact(f"{split} NLL", f"{nll:.3f}", "negative log-likelihood"))
    if not math.isnan(seconds):
        device = run.environment.get("device")
        facts.append(fact("training time", duration(seconds), f"on {printable(device, 40)}" if device else ""))
    steps, epochs = run.curves["step"], run.curves["epoch"][np.isfinite(run.curves["epoch"])]
    if len(steps):
        under = f"{epochs[-1]:,.1f} epochs".replace(".0 ", " ") if len(epochs) else ""
        facts.append(fact("steps", f"{steps[-1]:,.0f}", under))
    error = number(judged.get("ece"))
    if not math.isnan(error):  # last: the words below it take a row
        facts.append(fact(f"{split} calibration error", points(error), _sureness(judged)))
    return facts


def _sureness(result: Mapping[str, Any]) -> str:
    """How sure it is beside how often it is right, where the run noted the former."""
    images, top1, said = (number(result.get(name)) for name in ("images", "top1", "probability"))
    known = images >= 1 and 0 <= top1 <= 1 and 0 <= said <= 1
    return sureness(said, round(top1 * images), int(images)) if known else ""


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
        guessing = number(result.get("guessing"))
        beside = "" if math.isnan(guessing) else f"guessing would get {percent(guessing)}"
        return [fact(f"{SPLIT[run.judged]} top-1 accuracy", percent(top1, images), under, beside, chief=True)]
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
            yield [not_scored(unreadable, f"{SPLIT[split]} image")], True
    if run.chosen_on_val:
        yield [_flattery(run)], False
    before = mapping(run.results.get("better_before"))
    if before:
        top1, step = percent(number(before.get("top1")), run.images("val")), number(before.get("step"))
        yield (
            [
                f"These are the weights of the last step. Step {step:,.0f} had {top1} of the validation images right: "
                "--patience N delivers the best."
            ],
            False,
        )
    if run.faults:
        listed = [part for fault in run.faults for part in (", ", fault)][1:]
        yield ["Missing in this folder: ", *listed, "."], False


def _flattery(run: Run) -> str:
    words = "These weights were chosen because they did best on the validation images, so that result is flattered"
    if run.result("test"):
        return f"{words}; the test images had no part in the choice."
    return f"{words}, and there is no test split to tell by how much: expect somewhat less on new images."


# The sections ---------------------------------------------------------------------------------------------------------


def _hidden(run: Run) -> Section | None:
    """Pictures of masked prediction, where the run made any."""
    parts: list[object] = []
    for step, pixels in masked_pictures(run.folder):
        shown = picture(pixels, f"Images, what was left of them, and predictions at step {step}", max(pixels.shape[:2]))
        parts += [element("h3", f"Step {step:,}"), element("div", shown, class_="picture")]
    if not parts:
        return None
    note = "From top to bottom: held-out images, what the model saw of them (grey: nothing), what it predicted there."
    scaled = mapping(run.config.get("masked")).get("normalise")
    note += " Each patch is shown with its own mean and contrast, which are not predicted." if scaled else ""
    return Section("Hidden patches", join([element("p", note, class_="note"), *parts]))


def _judged(run: Run) -> tuple[int, int] | None:
    """(mistakes, images) of the split whose predictions are shown."""
    result = run.result(run.judged)
    images, top1 = number(result.get("images")), number(result.get("top1"))
    return None if math.isnan(images * top1) else (round(images - top1 * images), round(images))


def _confusions(run: Run) -> list[Section]:
    matrix = run.confusion()
    if matrix is None:
        return []
    classes, split = run.classes(len(matrix)), SPLIT[run.judged]
    return [mistakes(matrix, classes, split, run.folder), by_class(matrix, classes, split)]


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
        command = f"plainvit finetune --init {place}{_data_flags(run)}"
        parts += [element("p", "To train on from these weights:"), command_line(command)]
    return Section("Repeat, go on", join(parts)) if parts else None


def _data_flags(run: Run) -> str:
    """The run's own data, as flags; the reader puts others in their place."""
    given = {"--data": run.config.get("data"), "--data-root": run.config.get("data_root")}
    return "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given.items() if value)


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
    splits = [(name, mapping(part)) for name, part in mapping(run.data.get("splits")).items()]
    if not splits:
        return Html("")
    rows = [
        (SPLIT.get(name, name), _count(part.get("images")), element("code", part.get("fingerprint", NONE)))
        for name, part in splits
    ]
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
