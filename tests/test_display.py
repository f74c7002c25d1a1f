"""The progress bar at several terminal widths."""

import re

import pytest

from plainvit.runtime.display import Display


@pytest.mark.parametrize(("columns", "bar", "cut"), [(60, 1, True), (80, 1, True), (108, 16, False), (200, 40, False)])
def test_a_narrow_terminal_shortens_the_bar_then_the_text(
    columns: int, bar: int, cut: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Percentage and time are visible at any width."""
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(columns), "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    words = "epoch 8.6  loss 1.089  lr 0.00079  1,562 images/s  waiting for data 1%"
    with Display("digits", 10) as display:
        display.advance(6, words)
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().err)
    last = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()][-1]
    assert len(last) <= columns
    found = re.fullmatch(r"digits (\S+) +60% [\d:-]+ (epoch 8.6.*?)(…?)", last)
    assert found
    assert len(found[1]) == bar
    assert words.startswith(found[2].rstrip())
    assert bool(found[3]) == cut
