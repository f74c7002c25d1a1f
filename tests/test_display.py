"""The progress bar at several terminal widths, and durations."""

import re

import pytest

from plainvit.runtime.display import Display, readable

WORDS = "epoch 8.6  loss 1.089  lr 0.00079  1,562 images/s  waiting for data 1%"


@pytest.mark.parametrize(("columns", "is_cut"), [(60, True), (80, True), (200, False)])
def test_a_narrow_terminal_shortens_the_text_only(
    columns: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert readable(seconds) == text
