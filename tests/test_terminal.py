"""What others wrote, such as names of classes and files, is shown on a terminal and never acts on it; the progress bar
at several terminal widths."""

import json
import logging
import re
from pathlib import Path

import pytest
import tiny
import torch
from pictures import plant, png
from shell import Capture, report, run

import plainvit
from plainvit.config import About, visible
from plainvit.model_config import UNPRINTABLE
from plainvit.runtime.display import Display, format_duration

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ex"  # sets the title, clears the screen, writes backwards
MARKUP = "[red]x[/red][/bold] :cat:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.vit(torch.float32, classes=2)
    made.about = About(class_names=(HOSTILE, MARKUP))
    return plainvit.save(made, tmp_path_factory.mktemp("model") / "m.safetensors")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, an image each and two that cannot be read, all with hostile names."""
    root = tmp_path_factory.mktemp("photos")
    plant(root, {f"{HOSTILE}/{HOSTILE}.png": png(1), "[red]x/[red]x.png": png(2)})
    return plant(root, {f"{HOSTILE}/bad{HOSTILE}.png": b"no", f"{HOSTILE}/[red]bad.png": HOSTILE.encode()})


COMMANDS = {
    "inspect": ("inspect", "MODEL"),
    "predict": ("predict", "MODEL", "PHOTOS", "--workers", "0"),
    "predict to a file": ("predict", "MODEL", "PHOTOS", "--workers", "0", "--out", "OUT.csv"),
    "evaluate": ("evaluate", "MODEL", "--data", "PHOTOS", "--workers", "0", "--out", "OUT"),
    "data info": ("data", "info", "PHOTOS"),
    "data check": ("data", "check", "PHOTOS"),
    "data pack": ("data", "pack", "PHOTOS", "OUT"),
    "no such file": ("predict", "MODEL", f"{HOSTILE}.png"),
    "no such data": ("data", "info", f"{HOSTILE}/"),
    "no such flag": ("data", "info", "PHOTOS", f"--{HOSTILE}"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_no_command_prints_what_acts_on_a_terminal(
    words: tuple[str, ...], model: Path, photos: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"MODEL": str(model), "PHOTOS": str(photos), "OUT": str(tmp_path / "out")}
    _, out, err = run(capsys, *(paths.get(word, word.replace("OUT", paths["OUT"])) for word in words))
    for text in (out, err, *caplog.messages):
        assert not UNPRINTABLE.search(text), text
    assert out + err


def test_markup_in_names_is_shown_and_not_interpreted(model: Path, photos: Path, capsys: Capture) -> None:
    out = " ".join(run(capsys, "inspect", model)[1].split())
    assert MARKUP in out
    assert f"{MARKUP} ..." not in out  # there are two classes
    code, out, _ = run(capsys, "data", "check", photos)
    assert code == 3
    assert "[red]bad" in out


def test_machines_get_names_as_they_are(model: Path, photos: Path, capsys: Capture) -> None:
    assert report(capsys, "inspect", model)["class_names"] == [HOSTILE, MARKUP]
    lines = run(capsys, "predict", model, photos, "--workers", "0", "--json")[1].splitlines()
    rows = [json.loads(line) for line in lines]
    assert f"{photos}/{HOSTILE}/{HOSTILE}.png" in {row["name"] for row in rows}
    assert {prediction["label"] for row in rows for prediction in row["predictions"]} == {HOSTILE, MARKUP}


def test_a_log_line_is_one_line(capsys: Capture, caplog: pytest.LogCaptureFixture) -> None:
    run(capsys, "--version")
    logging.getLogger("plainvit").warning("%s is bad", "a\nplainvit: all is well\x1b[2J")
    assert caplog.messages == ["a\\nplainvit: all is well\\x1b[2J is bad"]


def test_a_progress_line_shows_names_as_they_are(capsys: Capture) -> None:
    with Display(f"features of {HOSTILE}", 1) as display:
        display.advance(1, HOSTILE)
        display.print_line(f"{MARKUP} {HOSTILE}")
    text = capsys.readouterr().err
    assert not UNPRINTABLE.search(text)
    assert MARKUP in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, päö 日本語 🙂", "plain text, päö 日本語 🙂"),
        ("two\nlines", "two\nlines"),
        ("\x1b[31m\r\x07\x7f\x9b", "\\x1b[31m\\r\\x07\\x7f\\x9b"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("caf\udce9", "caf\\udce9"),
    ],
)
def test_what_is_shown_of_it(text: str, shown: str) -> None:
    assert visible(text) == shown


# The progress bar -----------------------------------------------------------------------------------------------------

WORDS = "epoch 8.6  loss 1.089  lr 0.00079  1,562 images/s  waiting for data 1%"


@pytest.mark.parametrize(("columns", "is_cut"), [(60, True), (80, True), (200, False)])
def test_a_narrow_terminal_shortens_the_text_only(
    columns: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with Display("digits", 10) as display:
        display.advance(6, WORDS)
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().err)
    last = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()][-1]
    assert len(last) <= columns
    match = re.fullmatch(r"digits \S+ +60% [\d:-]+ (epoch 8.6.*?)(…?)", last)
    assert match
    assert WORDS.startswith(match[1].rstrip())
    assert bool(match[2]) == is_cut


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.7, "1m00s"), (85, "1m25s"), (3599.8, "1h00m"), (7384, "2h03m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
