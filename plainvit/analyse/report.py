"""The report of a training run: report.html and figures/ in the run folder.

from plainvit.analyse.report import Sample, write_report
write_report(Path("runs/digits"), samples)   # runs/digits/report.html

It shows what the folder contains and lists what is missing.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse.confusion import class_section, confusion_section, measure_classes
from plainvit.analyse.curves import curves_section
from plainvit.analyse.figures import number, printable
from plainvit.analyse.gallery import Sample, predictions_section
from plainvit.analyse.masked import read_masked_figures
from plainvit.analyse.page import (
    NONE,
    SPLIT,
    Html,
    Section,
    code_block,
    describe_unreadable,
    element,
    embed_image,
    fact,
    format_duration,
    join,
    notice,
    pairs,
    percent,
    pluralize,
    points,
    table,
    write_page,
)
from plainvit.analyse.run import Run, as_dict, read_run
from plainvit.config import Config, to_json
from plainvit.evaluate.statistics import FEW, describe_confidence

OBJECTIVES = {
    "masked": " without labels, by masked patch prediction",
    "mae": " without labels, as a masked autoencoder",
}
STATES = {
    "running": "This run is not finished",
    "interrupted": "This run was interrupted",
    "diverged": "This run diverged",
    "failed": "This run failed",
}


def write_report(folder: Path, samples: Sequence[Sample] = (), state: str = "") -> Path:
    """Writes report.html and figures/ into a run folder.

    state: overrides the state in status.json, which becomes "done" only after the report is written.
    """
    run = read_run(folder)
    if state:
        run.status["state"] = state
    (folder / "figures").mkdir(exist_ok=True)
    sections = [
        curves_section(run.curves, folder),
        _masked_section(run),
        *_confusion_sections(run),
        predictions_section(samples, folder, totals=_count_errors(run)),
        _command_section(run),
        _settings_section(run),
        _machine_section(run),
    ]
    title = printable(run.config.get("recipe") or folder.resolve().name)
    above = "Training run", folder.resolve().name, printable(run.environment.get("started") or "")[:10]
    return write_page(folder / "report.html", title, _summary(run), sections, above)


# Summary --------------------------------------------------------------------------------------------------------------


def _summary(run: Run) -> Html:
    rows = [element("dl", *facts, class_="facts") for facts in (_headline(run), _facts(run)) if facts]
    return join([element("p", _describe_training(run), class_="lead"), *rows, *_notices(run)])


def _describe_training(run: Run) -> str:
    """Model, initialisation, objective and data."""
    words = [_describe_model(as_dict(run.config.get("model")), run.config.get("init"))]
    words.append(f", fine-tuned from {run.config['init']}" if run.config.get("init") else ", trained from scratch")
    words.append(OBJECTIVES.get(str(run.config.get("objective")), ""))
    if run.config.get("data"):
        words.append(f" on {run.config['data']}")
    images, names = run.images("train"), run.data.get("classes")
    sizes = [] if math.isnan(images) else [pluralize(images, "training image")]
    sizes += [pluralize(len(names), "class", "classes")] if isinstance(names, list) else []
    words.append(f": {' of '.join(sizes)}" if sizes else "")
    return "".join(words) + "."


def _describe_model(model: Mapping[str, Any], init: object) -> str:
    kind = {"vit": "A Vision Transformer", "resnet": "A ResNet"}.get(str(model.get("kind")))
    if not kind:
        return "The model of its initial weights" if init else "A model"
    kind = "A hybrid ResNet and Vision Transformer" if model.get("stem") else kind
    formats = {"depth": "depth {}", "width": "width {}", "heads": "{} heads", "blocks": "blocks {}"}
    formats |= {"patch": "patch size {}", "image_size": "image size {}"}
    values = {name: " x ".join(map(str, one)) if isinstance(one, list) else one for name, one in model.items()}
    shown = [text.format(values[name]) for name, text in formats.items() if name in values]
    return f"{kind} ({', '.join(shown)})"


def _headline(run: Run) -> list[Html]:
    """The main result: on test images, else validation images, else the last validation during training."""
    result, split = run.result(run.split), SPLIT.get(run.split, "")
    images, top1, majority = (number(result.get(name)) for name in ("images", "top1", "majority_accuracy"))
    if "top1" not in result and "loss" in result:
        accuracy = number(result.get("accuracy"))
        under = "on masked pixels" if math.isnan(accuracy) else f"{percent(accuracy)} of the masked colours correct"
        return [fact(f"{split} loss", f"{number(result['loss']):.4f}", under, chief=True)]
    if result:
        correct = "" if math.isnan(top1 * images) else f"{top1 * images:,.0f} of {pluralize(images, 'image')} correct"
        under = " · ".join(filter(None, (_format_interval(result), correct)))
        chance = "" if math.isnan(majority) else f"chance level {percent(majority)}"
        return [fact(f"{split} top-1 accuracy", percent(top1, images), under, chance, chief=True)]
    for column, name in (("val_top1", ""), ("val_ema_top1", " of the averaged weights")):
        rows = np.flatnonzero(np.isfinite(run.curves[column]))
        if len(rows):
            step, top1 = float(run.curves["step"][rows[-1]]), float(run.curves[column][rows[-1]])
            under = f"last of {pluralize(len(rows), 'validation')} during training, at step {step:,.0f}"
            return [fact(f"validation top-1 accuracy{name}", percent(top1), under, chief=True)]
    return []


def _format_interval(result: Mapping[str, Any]) -> str:
    ends = result.get("interval")
    ends = [percent(number(end), number(result.get("images"))) for end in ends] if isinstance(ends, list) else []
    return f"95 % interval {ends[0]} to {ends[1]}" if len(ends) == 2 and NONE not in ends else ""


def _facts(run: Run) -> list[Html]:
    facts: list[Html] = []
    result, val, split = run.result(run.split), run.result("val"), SPLIT.get(run.split, "")
    top5, nll, error = (number(result.get(name)) for name in ("top5", "nll", "ece"))
    facts += _first_result_facts(run)
    if run.split == "test" and val:
        biased = "optimistic, see below" if run.chosen_on_val else ""
        facts.append(fact("validation top-1", percent(number(val.get("top1")), number(val.get("images"))), biased))
    names = run.data.get("classes")
    if not math.isnan(top5) and not (isinstance(names, list) and len(names) <= FEW):
        facts.append(fact(f"{split} top-5", percent(top5, number(result.get("images")))))
    if not math.isnan(nll):
        facts.append(fact(f"{split} NLL", f"{nll:.3f}", "negative log-likelihood"))
    seconds, device = number(run.environment.get("seconds")), run.environment.get("device")
    if not math.isnan(seconds):
        facts.append(fact("training time", format_duration(seconds), f"on {printable(device, 40)}" if device else ""))
    facts += _step_facts(run)
    if not math.isnan(error):  # last: its note takes a row
        facts.append(fact(f"{split} calibration error", points(error), _describe_confidence(result)))
    return facts


def _first_result_facts(run: Run) -> list[Html]:
    first = run.first_result
    if not first:
        return []
    seconds, images, head = number(first.get("seconds")), number(first.get("images")), first.get("head") or "linear"
    counted = "" if math.isnan(images) else pluralize(images, "held-out image")
    after = "" if math.isnan(seconds) else f"after {format_duration(seconds)}"
    top1 = percent(number(first.get("top1")), images)
    return [fact("first result", top1, f"{head} head on frozen features", ", ".join(filter(None, (counted, after))))]


def _step_facts(run: Run) -> list[Html]:
    """Steps that were taken; next to them the steps asked for, if --hours allowed fewer."""
    recorded, epochs = run.curves["step"], run.curves["epoch"][np.isfinite(run.curves["epoch"])]
    taken, asked = number(run.results.get("steps")), number(run.results.get("steps_asked"))
    taken = float(recorded[-1]) if math.isnan(taken) and len(recorded) else taken
    if math.isnan(taken):
        return []
    hours = number(run.config.get("hours"))
    limited = f"of {asked:,.0f}: limited by --hours {hours:g}" if asked > taken and hours > 0 else ""
    passes = f"{epochs[-1]:,.1f} epochs".replace(".0 ", " ") if len(epochs) else ""
    return [fact("steps", f"{taken:,.0f}", limited, passes)]


def _describe_confidence(result: Mapping[str, Any]) -> str:
    """Mean confidence compared with accuracy, if the run recorded it."""
    images, top1, confidence = (number(result.get(name)) for name in ("images", "top1", "probability"))
    known = images >= 1 and 0 <= top1 <= 1 and 0 <= confidence <= 1
    return describe_confidence(confidence, round(top1 * images), int(images)) if known else ""


def _notices(run: Run) -> Iterable[Html]:
    state, reason = run.status.get("state"), run.status.get("reason")
    if state and state != "done":
        step, steps = number(run.status.get("step")), number(run.status.get("steps"))
        where = "" if math.isnan(step) else f" at step {step:,.0f}" + ("" if math.isnan(steps) else f" of {steps:,.0f}")
        words = STATES.get(str(state), f"This run ended with state {state!r}")
        yield notice(element("b", words), f"{where}{f': {reason}' if reason else ''}.", warning=True)
    if run.skipped:
        yield notice(f"{pluralize(run.skipped, 'step')} skipped: loss or gradient was NaN or Inf.", warning=True)
    for split, name in SPLIT.items():
        unreadable = number(run.result(split).get("unreadable"))
        if unreadable > 0:
            yield notice(describe_unreadable(unreadable, f"{name} image"), warning=True)
    first, trained = (number(as_dict(run.results.get(name)).get("top1")) for name in ("first", "trained"))
    if run.results.get("final") in ("first", "trained") and not math.isnan(first):
        scores = f"a linear head on frozen features {percent(first, run.images('val'))}"
        scores += "" if math.isnan(trained) else f", after training {percent(trained, run.images('val'))}"
        chosen = "trained" if run.results["final"] == "trained" else "first"
        yield notice(f"Held-out images: {scores}. The final model is the {chosen} one.")
    if run.chosen_on_val:
        yield notice(_describe_selection_bias(run))
    better = as_dict(run.results.get("better_before"))
    if better:
        top1, step = percent(number(better.get("top1")), run.images("val")), number(better.get("step"))
        text = f"Step {step:,.0f} had a higher validation accuracy, {top1}: use --patience N to keep the best weights."
        yield notice(f"The final weights are those of the last step. {text}")
    if run.problems:
        listed = [part for problem in run.problems for part in (", ", problem)][1:]
        yield notice("Missing files: ", *listed, ".")


def _describe_selection_bias(run: Run) -> str:
    words = "The weights were selected by validation accuracy, so the validation result is optimistic"
    if run.result("test"):
        return f"{words}; the test images were not used for the selection."
    return f"{words}: expect less on new images. There is no test split to measure the difference."


# Sections -------------------------------------------------------------------------------------------------------------


def _masked_section(run: Run) -> Section | None:
    """Figures of masked prediction, if the run made any."""
    parts: list[object] = []
    for step, pixels in read_masked_figures(run.folder):
        shown = embed_image(pixels, f"Images, masked images and predictions at step {step}", max(pixels.shape[:2]))
        parts += [element("h3", f"Step {step:,}"), element("div", shown, class_="wide-figure")]
    if not parts:
        return None
    note = "From top to bottom: held-out images, model input (masked patches in grey), predictions."
    if as_dict(run.config.get("masked")).get("normalise"):
        note += " Mean and contrast of each patch are taken from the image: they are not predicted."
    return Section("Masked prediction", join([element("p", note, class_="note"), *parts]))


def _count_errors(run: Run) -> tuple[int, int] | None:
    """(errors, images) of the split whose predictions are shown."""
    images, top1 = (number(run.result(run.split).get(name)) for name in ("images", "top1"))
    return None if math.isnan(images * top1) else (round(images - top1 * images), round(images))


def _confusion_sections(run: Run) -> list[Section]:
    matrix = run.confusion()
    if matrix is None:
        return []
    classes = run.classes(len(matrix))
    section = confusion_section(matrix, classes, SPLIT[run.split], run.folder)
    return [section, class_section(measure_classes(matrix), classes)]


def _command_section(run: Run) -> Section | None:
    parts: list[object] = []
    command = run.environment.get("command")
    if command:
        known = {"seed": run.config.get("seed"), "commit": run.environment.get("commit")}
        words = " and ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        parts += [element("p", "Run it again:"), code_block(str(command))]
        parts += [element("p", f"With {words}.", class_="note")] if words else []
    if run.status.get("state") == "done" or (run.folder / "model.safetensors").exists():
        folder, weights = (shlex.quote(str(path)) for path in (run.folder, run.folder / "model.safetensors"))
        data = {"--data": run.config.get("data"), "--data-root": run.config.get("data_root")}
        flags = "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in data.items() if value)
        parts += [element("p", "Inspect the weights:"), code_block(f"plainvit inspect {weights}")]
        parts += [element("p", "Fine-tune the weights:"), code_block(f"plainvit finetune --init {folder}{flags}")]
    return Section("Commands", join(parts)) if parts else None


def _settings_section(run: Run) -> Section | None:
    if not run.config:
        return None
    settings, defaults = flatten(run.config), flatten(to_json(Config()))
    changed = [key for key, value in settings.items() if key in defaults and defaults[key] != value]
    shown = {key: _format_value(value) for key, value in settings.items()}
    note = element("p", "Settings that differ from the defaults are bold.", class_="note")
    folded = element("details", element("summary", pluralize(len(shown), "setting")), note, pairs(shown, changed))
    return Section("Settings", join([_data_table(run), folded]))


def _data_table(run: Run) -> Html:
    splits = {name: as_dict(part) for name, part in as_dict(run.data.get("splits")).items()}
    counts = {name: number(part.get("images")) for name, part in splits.items()}
    rows = [
        (
            SPLIT.get(name, name),
            NONE if math.isnan(counts[name]) else f"{counts[name]:,.0f}",
            element("code", part.get("fingerprint", NONE)),
        )
        for name, part in splits.items()
    ]
    return table(["split", "images", "fingerprint of file names and labels"], rows, numbers=(1,)) if rows else Html("")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 0.001}} as {"optim.lr": 0.001}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif key != "kind" or prefix:
            flat[prefix + key] = value
    return flat


def _format_value(value: object) -> str:
    match value:
        case None | "":
            return NONE
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(_format_value, value)) or NONE
        case float():
            return f"{value:.10g}" if math.isfinite(value) else NONE
        case _:
            return str(value)


def _machine_section(run: Run) -> Section | None:
    shown = {key: _format_value(value) for key, value in flatten(run.environment).items() if key != "command"}
    seconds = number(run.environment.get("seconds"))
    if seconds >= 60:
        shown["seconds"] += f" ({format_duration(seconds)})"
    return Section("Machine", pairs(shown)) if shown else None
