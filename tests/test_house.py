"""The house keeps its plan: imports point down, forbidden names and calls are absent, importing stays cheap.

Read from the syntax trees of the files and from child processes, not from the package's word for it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "plainvit").rglob("*.py"))
COMMAND = Path(sys.executable).with_name("plainvit")

_LEAVES = {"config", "device", "disk", "errors", "hub"}
_MODELS = {*_LEAVES, "names", "models"}
_NUMBERS = {*_MODELS, "data", "weights", "runtime", "planning", "evaluate"}
# What each room may import besides itself (house.md, and the leaves below all rooms)
MAY_IMPORT: dict[str, set[str]] = {
    **{leaf: set() for leaf in _LEAVES},
    "names": {"config"},
    "recipes": {"config", "names"},
    "data": _LEAVES,
    "models": {*_LEAVES, "names"},
    "weights": _MODELS,
    "runtime": _MODELS,
    "planning": {*_MODELS, "data", "weights", "runtime"},
    "evaluate": _NUMBERS,
    "analyse": _NUMBERS,
    "serve": _NUMBERS,
    "train": {*_NUMBERS, "recipes", "analyse"},
    "studies": {*_NUMBERS, "recipes", "analyse", "train"},
    "__main__": {"cli"},
}


WORDS = ("cli", "verbs", "__init__")


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def room(file: Path) -> str:
    return file.relative_to(ROOT / "plainvit").parts[0].removesuffix(".py")


HOUSE = {home: [file for file in FILES if room(file) == home] for home in dict.fromkeys(map(room, FILES))}
every_room = pytest.mark.parametrize(("home", "files"), HOUSE.items(), ids=HOUSE)


def rooms_imported(node: ast.AST) -> Iterator[str]:
    """Rooms of plainvit that one import statement names; "" is the package itself, as in `from plainvit import x`."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide their room"
        modules = [node.module or ""]
        if node.module == "plainvit":
            modules = [f"plainvit.{alias.name}" for alias in node.names]
    else:
        return
    for module in modules:
        package, _, rest = module.partition(".")
        if package == "plainvit":
            yield rest.split(".")[0]


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not in functions, not for type checkers alone."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from at_import(statement.body)


def test_there_is_a_house() -> None:
    assert {"config", "device", "names", "models", "evaluate", "cli"} <= {room(file) for file in FILES}


@every_room
def test_imports_point_down(home: str, files: list[Path]) -> None:
    assert home in {*MAY_IMPORT, *WORDS}, f"{home} is a new room: give it its place in this plan"
    for file in files:
        if home in WORDS:
            ours = {name for statement in at_import(tree(file).body) for name in rooms_imported(statement)}
            assert ours <= {"__version__", "config", "verbs"}, f"{file}: words load rooms inside functions only"
        else:
            ours = {name for node in ast.walk(tree(file)) for name in rooms_imported(node)}
            assert ours - {home, "__version__"} <= MAY_IMPORT[home], file


@pytest.mark.parametrize("home", ["config", "device", "names", "cli", "__init__"])
def test_light_modules_load_no_torch_at_import(home: str) -> None:
    statements = list(at_import(tree(ROOT / "plainvit" / f"{home}.py").body))
    assert statements
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            assert "torch" not in ast.unparse(statement)


def test_no_room_for_everything() -> None:
    parts = {part.removesuffix(".py") for file in FILES for part in file.relative_to(ROOT / "plainvit").parts}
    assert not parts & {"utils", "util", "common", "core", "helpers", "manager", "engine", "base", "misc"}


def test_every_module_says_what_it_is() -> None:
    assert [file for file in FILES if len(ast.get_docstring(tree(file)) or "") <= 10] == []


@every_room
def test_development_peers_are_not_imported(home: str, files: list[Path]) -> None:
    """timm and transformers are for tests; evaluate/timm_models.py alone may load them, on use."""
    for file in files:
        names = {name.split(".")[0] for node in ast.walk(tree(file)) for name in modules_of(node)}
        strange = names & {"timm", "transformers", "sklearn", "scipy", "hypothesis", "pytest"}
        assert not strange or (home, file.name) == ("evaluate", "timm_models.py"), file


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@every_room
def test_nothing_dangerous_is_called(home: str, files: list[Path]) -> None:  # noqa: ARG001
    """No code from strings, no pickles but tensors by weights_only, no shell, no open YAML."""
    for node in (node for file in files for node in ast.walk(tree(file))):
        assert not set(modules_of(node)) & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        assert called not in {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load"}
        assert not called.startswith("pickle.")
        assert options.get("shell", "False") == "False"
        assert options.get("allow_pickle", "False") == "False"
        if called == "torch.load":
            assert options.get("weights_only") == "True"


# Cost of importing ----------------------------------------------------------------------------------------------------


def in_child(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_takes_less_than_a_tenth_of_a_second() -> None:
    code = "import time; t = time.perf_counter(); import plainvit; print(time.perf_counter() - t)"
    assert min(float(in_child(code)) for _ in range(5)) < 0.1


@pytest.mark.parametrize(
    "code",
    [
        "import plainvit",
        "import plainvit; plainvit.list_models()",
        "import plainvit; dir(plainvit)",
        "from plainvit.names import configure; configure('ViT-B/16')",
        "import plainvit.cli",
        "from plainvit.planning import cost; cost.summary('ViT-B/16')",
    ],
)
def test_torch_is_not_loaded_before_it_is_needed(code: str) -> None:
    assert in_child(f"{code}; import sys; print('torch' in sys.modules)") == "False"


def test_help_is_quick() -> None:
    code = f"""
import subprocess, time
times = []
for _ in range(3):
    start = time.perf_counter()
    subprocess.run([{str(COMMAND)!r}, "--help"], check=True, capture_output=True)
    times.append(time.perf_counter() - start)
print(min(times))
"""
    assert float(in_child(code)) < 0.5


@pytest.mark.parametrize("arguments", [["--help"], ["models", "--help"], ["inspect", "--help"], ["models"]])
def test_help_and_the_table_load_no_torch(arguments: list[str]) -> None:
    code = f"""
import contextlib, io, sys
from plainvit.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({arguments!r})
print("torch" in sys.modules)
"""
    assert in_child(code) == "False"


# Files ----------------------------------------------------------------------------------------------------------------


def tracked() -> list[Path]:
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in found.stdout.split("\0") if name]


def test_no_tracked_file_is_large() -> None:
    assert [file.name for file in tracked() if file.is_file() and file.stat().st_size > 1_000_000] == []


def test_the_lock_names_no_index_and_pins_hashes() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*(--(extra-)?index-url|--find-links|-i|-f|-e|--trusted-host)\b", text, re.MULTILINE)
    pins = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(pins) > 50
    for pin in pins:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", pin), pin.splitlines()[0]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", pin), pin.splitlines()[0]
