"""The README's own commands and code, run as they stand there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plainvit.cli import main

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


COMMANDS = [
    line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines() if line.startswith("plainvit ")
]
PLACES = ("hf:", "WEIGHTS", "DIR", "my.py", "runs/")  # commands that name what the reader has are not run here


def test_there_are_commands_and_code() -> None:
    assert len(COMMANDS) >= 3
    assert blocks("python")


@pytest.mark.parametrize("command", [c for c in COMMANDS if not any(word in c for word in PLACES)])
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """In an empty folder, as someone who has just installed plainvit would."""
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command)[1:])
    assert capsys.readouterr().out.strip()


def test_the_installed_command(tmp_path: Path) -> None:
    run = subprocess.run(
        [Path(sys.executable).with_name("plainvit"), "models", "ViT-B*"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "86,567,656" in run.stdout or "86.6" in run.stdout


def test_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names = {"images": torch.rand(2, 3, 192, 256)}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    assert names["model"].config.classes == 5
    assert names["model"].config.image_size == (256, 256)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
