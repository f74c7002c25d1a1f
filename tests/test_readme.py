"""The commands, code, links and tables of the documentation, compared with the package."""

import contextlib
import io
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

import plainvit
from plainvit.cli import COMMANDS, main
from plainvit.commands.flags import list_flags

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if not {"_build", "studies"} & {*path.relative_to(DOCS).parts}]
PAGES += [README, ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page in one language; "" is what has none, such as printed output."""
    parts = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
    return [code for word, code in parts if word == language]


EXAMPLES = [
    line.split("#")[0].strip()
    for block in blocks(README, "sh")
    for line in block.splitlines()
    if line.startswith("plainvit ")
]
PLACES = ("hf:", "WEIGHTS", "DIR", "my.py", "runs/")  # commands that name what the reader has are not run here


@pytest.mark.parametrize("command", [c for c in EXAMPLES if not any(word in c for word in PLACES)])
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """In an empty folder, as someone who has just installed plainvit would."""
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command)[1:])
    assert capsys.readouterr().out.strip()


# Code -----------------------------------------------------------------------------------------------------------------


def run_blocks(page: Path, **names: object) -> dict[str, object]:
    """One after the other, as a reader would type them."""
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    return names


def test_code_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = run_blocks(README)["model"]
    assert isinstance(model, plainvit.models.ViT)
    assert model.config.classes == 5
    assert model.config.image_size == (256, 256)


@pytest.mark.parametrize(
    "name",
    ["coming-from", "data", "howto", "production", "python", "questions", "quickstart", "reference/files", "weights"],
)
def test_code_of_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These pages assert what they say; coming-from.md compares with timm, transformers and torchvision."""
    monkeypatch.chdir(tmp_path)
    assert run_blocks(DOCS / f"{name}.md", __name__="snippet")


def test_recipes_page_is_up_to_date() -> None:
    page, printed = DOCS / "recipes.md", io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_blocks(page)
    assert page.read_text().endswith(printed.getvalue()), "run the block of docs/recipes.md, and paste what it prints"
    listed = re.findall(r"^\| `([^`]+)` \|", printed.getvalue(), re.M)
    assert sorted(listed) == sorted(plainvit.list_recipes())


# Commands that are not run --------------------------------------------------------------------------------------------


def shown(page: Path) -> list[str]:
    """Every command of a page: lines of sh blocks and cells, and lines after a $ in printed output."""
    cells = re.findall(r"^%%sh\n(.*?)^```", page.read_text(), re.S | re.M)
    lines = [line for block in (*blocks(page, "sh"), *cells) for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for block in blocks(page, "") for line in block.splitlines() if line.startswith("$ ")]
    calls = (re.search(r"(?:^|\| |-m )plainvit (.+)", line.split(" #")[0]) for line in lines)
    return [call[1].split(" | ")[0].strip() for call in calls if call]


@cache
def flags(command: str) -> frozenset[str]:
    """The flags of a command."""
    return frozenset({"--help", "--help-all", *(flag.option for flag in list_flags(COMMANDS[command]))})


WRONG = {"--optim.lrr"}  # shown for its error


@every_page
def test_shown_commands_and_flags_exist(page: Path) -> None:
    for line in shown(page):
        words = line.split()
        command = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
        assert command, f"{page.name}: no command in {line!r}"
        for flag in re.findall(r"(?<=\s)--[a-z0-9][\w.-]*", line):
            assert flag in flags(command) | WRONG, f"{page.name}: {command} has no {flag}"


def test_every_command_is_documented() -> None:
    page = (DOCS / "commands.md").read_text()
    assert [name for name in COMMANDS if f"`{name}`" not in page] == []
    documented = {call.split()[0] for path in PAGES for call in shown(path)}
    assert {name.split()[0] for name in COMMANDS} <= documented


def test_the_chinese_readme_has_the_same_commands_code_and_numbers() -> None:
    pages = (README, ROOT / "README.zh-CN.md")
    english, chinese = ([*shown(page), *list_code(page)] for page in pages)
    assert chinese == english
    english, chinese = (
        [
            sorted(re.findall(r"\d[\d,.]*\d|\d", line))
            for line in page.read_text().splitlines()
            if "`" in line and line[0] == "|"
        ]
        for page in pages
    )
    assert chinese
    assert chinese == english[-len(chinese) :]


def list_code(page: Path) -> list[str]:
    """Lines of Python without comments."""
    return [line.split("  #")[0] for line in "\n".join(blocks(page, "python")).splitlines()]


# Links, targets, versions ---------------------------------------------------------------------------------------------


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", "\n".join(blocks(README, "sh")), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists() or path.name in ("cli.md", "config.md"), target  # generated by `make docs`
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_one_version() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert plainvit.__version__ == declared
    assert f"\nversion: {declared}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {declared}\n" in (ROOT / "CHANGELOG.md").read_text()
