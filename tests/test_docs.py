"""The documentation site: links, generated pages, snippets next to other libraries, and the whole build (slow)."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_readme import ROOT, anchors, blocks, run_blocks, shown

from plainvit.cli import COMMANDS, TASKS
from plainvit.commands.flags import list_flags
from plainvit.config import Config

DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if not {"_build", "studies"} & {*path.relative_to(DOCS).parts}]
GENERATED = {"cli.md": "make_cli_page", "config.md": "make_config_page"}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_of_the_site_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists() or path.name in GENERATED, target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set()
    for index in (DOCS / "index.md", DOCS / "tutorials" / "index.md"):
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(), re.S | re.M):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {str((index.parent / name).relative_to(DOCS)) for name in names}
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES} | {"reference/cli", "reference/config"}
    assert listed == pages - {"index"}


@pytest.mark.parametrize("page", ["quickstart", "coming-from", "howto", "reference/files"])
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of coming-from.md compare with timm, transformers and torchvision."""
    monkeypatch.chdir(tmp_path)
    assert run_blocks(DOCS / f"{page}.md", __name__="snippet")


def test_commands_of_tutorials_exist() -> None:
    cells = [cell for page in PAGES for cell in re.findall(r"^%%sh\n(.*?)^```", page.read_text(), re.S | re.M)]
    assert cells
    for line in "".join(cells).splitlines():
        command = next(name for name in COMMANDS if line.startswith(f"plainvit {name} "))
        flags = {flag.option for flag in list_flags(COMMANDS[command])}
        assert set(re.findall(r"(?<=\s)--[a-z][\w.-]*", line)) <= flags, line


def test_the_command_page_covers_every_command_and_flag(generate: ModuleType) -> None:
    page = generate.make_cli_page()
    assert re.findall(r"^## (.+)$", page, re.M) == list(TASKS)
    sections = dict(re.findall(r"^### `plainvit ([\w ]+)`\n(.*?)(?=^##|\Z)", page, re.S | re.M))
    assert list(sections) == list(COMMANDS)
    for name, text in sections.items():
        flags = [flag for flag in list_flags(COMMANDS[name]) if not flag.is_setting and not flag.is_word]
        assert [flag.option for flag in flags if f"| `{flag.option}` |" not in text] == [], name


def test_the_config_page_covers_every_setting(generate: ModuleType) -> None:
    page = generate.make_config_page()
    assert [name for name in (field.name for field in dataclasses.fields(Config)) if f"| `{name}` |" not in page] == []
    rows = re.findall(r"^\| `[^|]+\|[^|]+\|([^|]+)\|", page.replace("\\|", "/"), re.M)
    assert sum(not row.strip() for row in rows) <= 2  # optim and augment have tables of their own


def test_the_chinese_readme_has_the_same_commands_code_and_numbers() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    assert shown(chinese) == shown(english)
    code = [
        [line.split("  #")[0] for line in "\n".join(blocks(page, "python")).splitlines()] for page in (english, chinese)
    ]
    assert code[0] == code[1]
    tables = [page.read_text().partition("`make demo` |\n")[0].count("\n") for page in (english, chinese)]
    assert all(tables)
    rows = [
        [
            re.findall(r"\d[\d,.]*\d|\d", line)
            for line in page.read_text().splitlines()
            if line.startswith("| ") and "`" in line
        ]
        for page in (english, chinese)
    ]
    assert rows[1]
    assert [sorted(row) for row in rows[1]] == [sorted(row) for row in rows[0][-len(rows[1]) :]]
    for link in re.findall(r"\]\((?!https?:)([^)#\s]*)", chinese.read_text()):
        assert (ROOT / link).exists(), link


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
    call = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "--quiet",
        "-D",
        "nb_execution_mode=off",
        str(DOCS),
        str(tmp_path),
    ]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
