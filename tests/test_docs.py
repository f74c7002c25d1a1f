"""The documentation site: links, generated pages, snippets next to other libraries, and the whole build (slow)."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import generate
import pytest
from test_readme import DOCS, PAGES

from plainvit.cli import COMMANDS, TASKS
from plainvit.commands.flags import list_flags
from plainvit.config import Config


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set()
    for index in (DOCS / "index.md", DOCS / "tutorials" / "index.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(), re.S | re.M):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {str((index.parent / name).relative_to(DOCS)) for name in names}
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES if path.is_relative_to(DOCS)}
    pages |= {"reference/cli", "reference/config"}
    assert listed == pages - {"index"}


def test_the_command_page_covers_every_command_and_flag() -> None:
    page = generate.make_cli_page()
    assert re.findall(r"^## (.+)$", page, re.M) == list(TASKS)
    sections = dict(re.findall(r"^### `plainvit ([\w ]+)`\n(.*?)(?=^##|\Z)", page, re.S | re.M))
    assert list(sections) == list(COMMANDS)
    for name, text in sections.items():
        flags = [flag for flag in list_flags(COMMANDS[name]) if not flag.is_setting and not flag.is_word]
        assert [flag.option for flag in flags if f"| `{flag.option}` |" not in text] == [], name


def test_the_config_page_covers_every_setting() -> None:
    page = generate.make_config_page()
    assert [name for name in (field.name for field in dataclasses.fields(Config)) if f"| `{name}` |" not in page] == []
    rows = re.findall(r"^\| `[^|]+\|[^|]+\|([^|]+)\|", page.replace("\\|", "/"), re.M)
    assert sum(not row.strip() for row in rows) <= 2  # optim and augment have tables of their own


def test_completion_offers_commands_and_flags() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "plainvit", "completion", "bash"], capture_output=True, text=True, check=True
    )
    ask = 'COMP_WORDS=(plainvit "$@"); COMP_CWORD=$#; _plainvit; echo "${COMPREPLY[@]}"'
    for words, expected in (
        (["da"], "data"),
        (["data", "info", "--data-r"], "--data-root"),
        (["train", "--optim.warm"], "--optim.warmup"),
    ):
        found = subprocess.run(
            ["bash", "-c", f"{script.stdout}\n{ask}", "bash", *words], capture_output=True, text=True, check=True
        )
        assert found.stdout.split() == [expected]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="pip install '.[docs]'")
    flags = ["-W", "--keep-going", "--quiet", "-D", "nb_execution_mode=off"]
    call = [sys.executable, "-m", "sphinx", *flags, str(DOCS), str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
