"""The report of a training run: report.html and figures/ in the run folder.

from plainvit.analyse.report import Sample, write_report
write_report(Path("runs/digits"), samples)   # runs/digits/report.html

It shows what the folder contains.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plainvit.analyse import html
from plainvit.analyse.confusion import class_section, confusion_section
from plainvit.analyse.curves import Table, curves_section, tabulate
from plainvit.analyse.figures import number, printable
from plainvit.analyse.gallery import Sample, predictions_section
from plainvit.analyse.headline import make_facts, make_headline
from plainvit.analyse.html import Html, Section
from plainvit.analyse.masked import read_masked_figures
from plainvit.config import Config, flatten, to_json
from plainvit.disk import read_json, write_text
from plainvit.evaluate.metrics import class_metrics
from plainvit.runtime.display import format_duration
from plainvit.runtime.folder import read_metrics

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


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; files that do not exist yet are empty."""

    folder: Path
    config: dict[str, Any]
    data: dict[str, Any]
    results: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    curves: Table

    @property
    def split(self) -> str:
        """The split that the report shows: test if there is one."""
        return next((split for split in html.SPLIT if split in self.results), "")

    def result(self, split: str) -> dict[str, Any]:
        return self.results.get(split, {})

    def images(self, split: str) -> float:
        return number(self.data.get("splits", {}).get(split, {}).get("images"))

    @property
    def classes(self) -> list[str]:
        return list(map(printable, self.data.get("classes", [])))


def read_run(folder: Path) -> Run:
    names = "config", "data", "results", "environment", "status"
    parts = {name: read_json(folder / f"{name}.json") for name in names}
    return Run(folder, **parts, curves=tabulate(read_metrics(folder)))


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
        predictions_section(samples, totals=_count_errors(run)),
        _command_section(run),
        _settings_section(run),
        _machine_section(run),
    ]
    title = printable(run.config.get("recipe") or folder.resolve().name)
    subtitle = "Training run", folder.resolve().name, printable(run.environment.get("started") or "")[:10]
    write_text(folder / "report.html", html.render_page(title, _summarize(run), sections, subtitle=subtitle))
    return folder / "report.html"


# Summary --------------------------------------------------------------------------------------------------------------


def _summarize(run: Run) -> Html:
    rows = [html.element("dl", *facts, class_="facts") for facts in (_headline(run), _facts(run)) if facts]
    return html.join([html.element("p", _describe_training(run), class_="lead"), *rows, *_notices(run)])


def _describe_training(run: Run) -> str:
    """Model, initialization, objective and data."""
    init, data = run.config.get("init"), run.config.get("data")
    text = _describe_model(run.config.get("model") or {}, init)
    text += f", fine-tuned from {init}" if init else ", trained from scratch"
    text += OBJECTIVES.get(str(run.config.get("objective")), "") + (f" on {data}" if data else "")
    sizes = [html.pluralize(run.images("train"), "training image")] if "splits" in run.data else []
    sizes += [html.pluralize(len(run.classes), "class", "classes")] if run.classes else []
    return f"{text}: {' of '.join(sizes)}." if sizes else f"{text}."


def _describe_model(model: Mapping[str, Any], init: object) -> str:
    kind = {"vit": "A Vision Transformer", "resnet": "A ResNet"}.get(str(model.get("kind")))
    if not kind:
        return "The model of its initial weights" if init else "A model"
    kind = "A hybrid ResNet and Vision Transformer" if model.get("stem") else kind
    texts = []
    for name in ("depth", "width", "heads", "blocks", "patch", "image_size"):
        if name in model:
            sides = model[name] if isinstance(model[name], list) else [model[name]]
            texts.append(f"{name.replace('_', ' ')} {' x '.join(map(str, sides))}")
    return f"{kind} ({', '.join(texts)})"


def _headline(run: Run) -> list[Html]:
    """The main result: on test images, else validation images, else the last validation during training."""
    if result := run.result(run.split):
        return [make_headline(result, html.SPLIT[run.split])]
    rows = np.flatnonzero(np.isfinite(run.curves["val_top1"]))
    if not len(rows):
        return []
    step, top1 = (float(run.curves[column][rows[-1]]) for column in ("step", "val_top1"))
    note = f"last of {html.pluralize(len(rows), 'validation')} during training, at step {step:,.0f}"
    return [html.fact("validation top-1 accuracy", html.percent(top1), note, is_headline=True)]


def _facts(run: Run) -> list[Html]:
    facts, val = _first_result_facts(run), run.result("val")
    if run.split == "test" and val:
        note = "optimistic, see below" if run.results.get("chosen_on_val") else ""
        top1 = html.percent(number(val.get("top1")), number(val.get("images")))
        facts.append(html.fact("validation top-1", top1, note))
    seconds, device = number(run.environment.get("seconds")), run.environment.get("device")
    if not math.isnan(seconds):
        note = f"on {printable(device, 40)}" if device else ""
        facts.append(html.fact("training time", format_duration(seconds), note))
    return [*facts, *_step_facts(run), *make_facts(run.result(run.split), html.SPLIT.get(run.split, ""))]


def _first_result_facts(run: Run) -> list[Html]:
    """The linear head from which fine-tuning started, if there was one."""
    first = run.result("first")
    if not first:
        return []
    note = f"{html.pluralize(first['images'], 'held-out image')}, after {format_duration(first['seconds'])}"
    return [html.fact("first result", html.percent(first["top1"]), "linear head on frozen features", note)]


def _step_facts(run: Run) -> list[Html]:
    """Steps that were taken; next to them the steps asked for, if --hours allowed fewer."""
    if not len(run.curves["step"]):
        return []
    taken = run.results.get("steps", run.curves["step"][-1])
    planned, hours = run.results.get("steps_planned", taken), run.config.get("hours")
    limited = f"of {planned:,}: limited by --hours {hours:g}" if planned > taken and hours else ""
    epochs = np.nanmax(run.curves["epoch"], initial=0)
    return [html.fact("steps", f"{taken:,.0f}", limited, f"{epochs:,.1f} epochs")]


def _notices(run: Run) -> Iterable[Html]:
    yield from _state_notices(run)
    for split, name in html.SPLIT.items():
        unreadable = number(run.result(split).get("unreadable"))
        if unreadable > 0:
            yield html.notice(html.describe_unreadable(unreadable, f"{name} image"), warning=True)
    trained = run.result("trained")
    if run.results.get("final") == "first" and trained:
        reached = html.percent(trained["top1"], run.images("val"))
        compared = "as many as" if trained["top1"] == run.result("first")["top1"] else "fewer than"
        text = f"{compared} the first result, which is kept because it fits fewer weights"
        yield html.notice(f"After training, {reached} of the held-out images were correct, {text}.")
    if run.results.get("chosen_on_val") or run.result("val").get("chosen_on_val"):
        yield html.notice(_describe_selection_bias(run))
    if better := run.result("better_before"):
        top1 = html.percent(better["top1"], run.images("val"))
        text = f"Step {better['step']:,} had a higher validation accuracy, {top1}: use --patience N to keep the best"
        yield html.notice(f"The final weights are those of the last step. {text} weights.")


def _state_notices(run: Run) -> Iterable[Html]:
    """Why the run ended early, and the steps without an update."""
    state, reason = run.status.get("state"), run.status.get("reason")
    if state in STATES:
        where = f"at step {run.status['step']:,} of {run.status['steps']:,}"
        where = f"{where}: {reason}" if reason else where
        yield html.notice(html.element("b", STATES[state]), f" {where}.", warning=True)
    if skipped := int((run.curves["skipped"] > 0).sum()):
        yield html.notice(f"{html.pluralize(skipped, 'step')} skipped: loss or gradient was NaN or Inf.", warning=True)


def _describe_selection_bias(run: Run) -> str:
    bias = "The weights were selected by validation accuracy, so the validation result is optimistic"
    if run.result("test"):
        return f"{bias}; the test images were not used for the selection."
    return f"{bias}: expect less on new images. There is no test split to measure the difference."


# Sections -------------------------------------------------------------------------------------------------------------


def _masked_section(run: Run) -> Section | None:
    """Figures of masked prediction, if the run made any."""
    parts: list[Html] = []
    for step, pixels in read_masked_figures(run.folder):
        label = f"Images, masked images and predictions at step {step}"
        image = html.embed_image(pixels, label, max(pixels.shape[:2]))
        parts += [html.element("h3", f"Step {step:,}"), html.element("div", image, class_="scroll")]
    note = "From top to bottom: held-out images, model input (masked patches in gray), predictions."
    if run.config.get("masked", {}).get("normalize"):
        note += " Mean and contrast of each patch are taken from the image: they are not predicted."
    return html.make_section("Masked prediction", note, *parts) if parts else None


def _count_errors(run: Run) -> tuple[int, int] | None:
    """(errors, images) of the split whose predictions are shown."""
    images, top1 = (number(run.result(run.split).get(name)) for name in ("images", "top1"))
    return None if math.isnan(images * top1) else (round(images - top1 * images), round(images))


def _confusion_sections(run: Run) -> list[Section]:
    counts = run.result(run.split).get("confusion")
    if not counts:
        return []
    matrix = np.array(counts, float)  # rows are true classes
    section = confusion_section(matrix, run.classes, f"{html.SPLIT[run.split]} images", run.folder)
    metrics = class_metrics(np.diag(matrix), matrix.sum(1), matrix.sum(0))
    return [section, class_section(metrics, run.classes)]


def _command_section(run: Run) -> Section | None:
    parts: list[str] = []
    if command := run.environment.get("command"):
        parts += ["Run it again:", html.code_block(str(command))]
    if run.status.get("state") == "done" or (run.folder / "model.safetensors").exists():
        folder = shlex.quote(str(run.folder))
        parts += ["Show what the model has learned:", html.code_block(f"plainvit analyse {folder}")]
        parts += ["Fine-tune it on your photos:", html.code_block(f"plainvit finetune --init {folder} --data DIR")]
    return html.make_section("Commands", *parts) if parts else None


def _settings_section(run: Run) -> Section | None:
    if not run.config:
        return None
    defaults = flatten(to_json(Config()))
    changed = {key: _format_value(value) for key, value in flatten(run.config).items() if defaults.get(key) != value}
    summary = html.element("summary", f"{html.pluralize(len(changed), 'setting')} that differ from the defaults")
    return html.make_section("Settings", _data_table(run), html.element("details", summary, html.pairs(changed)))


def _data_table(run: Run) -> Html:
    """The number of images of each split, and the fingerprint of their names and labels."""
    values = {}
    for name, part in run.data.get("splits", {}).items():
        values[html.SPLIT[name]] = f"{html.pluralize(part['images'], 'image')}, fingerprint {part['fingerprint']}"
    return html.pairs(values) if values else Html("")


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_format_value, value)) or html.NONE
    if isinstance(value, float):
        return f"{value:.10g}" if math.isfinite(value) else html.NONE
    return html.NONE if value is None or value == "" else str(value)


def _machine_section(run: Run) -> Section | None:
    values = {key: _format_value(value) for key, value in flatten(run.environment).items() if key != "command"}
    return html.make_section("Machine", html.pairs(values)) if values else None
