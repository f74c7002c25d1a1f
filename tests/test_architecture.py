"""The architecture: imports point down, forbidden names and calls are absent, importing stays cheap."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import ROOT, in_child

FILES = sorted((ROOT / "plainvit").rglob("*.py"))

_LEAVES = {"config", "device", "disk", "errors", "hub"}
_MODELS = {*_LEAVES, "names", "models"}
_NUMBERS = {*_MODELS, "data", "weights", "runtime", "planning", "evaluate"}
# What each package may import besides itself
MAY_IMPORT: dict[str, set[str]] = {
    **{leaf: set() for leaf in _LEAVES},
    "device": {"disk"},
    "model_config": set(),
    "config": {"model_config"},
    "names": {"config"},
    "recipes": {"config", "names"},
    "data": _LEAVES,
    "models": {*_LEAVES, "names"},
    "weights": _MODELS,
    "runtime": _MODELS,
    "planning": {*_MODELS, "data", "weights", "runtime"},
    "evaluate": _NUMBERS,
    "analyse": _NUMBERS,
    "serve": {*_NUMBERS, "analyse"},
    "train": {*_NUMBERS, "recipes", "analyse"},
    "studies": {*_NUMBERS, "recipes", "analyse", "train"},
    "__main__": {"cli"},
}


LAZY = ("cli", "commands", "__init__")  # import packages inside functions only


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def package(file: Path) -> str:
    return file.relative_to(ROOT / "plainvit").parts[0].removesuffix(".py")


PACKAGES = {name: [file for file in FILES if package(file) == name] for name in dict.fromkeys(map(package, FILES))}
every_package = pytest.mark.parametrize(("name", "files"), PACKAGES.items(), ids=PACKAGES)


def packages_imported(node: ast.AST) -> Iterator[str]:
    """Packages of plainvit that one import statement names."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "no relative imports"
        modules = [node.module or ""]
        if node.module == "plainvit":
            modules = [f"plainvit.{alias.name}" for alias in node.names]
    else:
        return
    for module in modules:
        top, _, rest = module.partition(".")
        if top == "plainvit":
            yield rest.split(".")[0]


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not in functions, not for type checkers alone."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from at_import(statement.body)


@every_package
def test_imports_point_down(name: str, files: list[Path]) -> None:
    assert name in {*MAY_IMPORT, *LAZY}, f"{name} is a new package: add it to MAY_IMPORT"
    for file in files:
        if name in LAZY:
            imported = {one for statement in at_import(tree(file).body) for one in packages_imported(statement)}
            assert imported <= {"__version__", "config", "errors", "commands"}, file
        else:
            imported = {one for node in ast.walk(tree(file)) for one in packages_imported(node)}
            assert imported - {name, "__version__"} <= MAY_IMPORT[name], file


def reachable_lines(start: str) -> int:
    """Lines of the files of ours that importing one of them loads, its own included."""
    seen: set[Path] = set()
    todo = [ROOT / "plainvit" / start]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for node in at_import(tree(file).body):
            named = [f"{module}.{alias.name}" for module in modules_of(node) for alias in getattr(node, "names", ())]
            for module in (*modules_of(node), *named):
                parts = module.split(".")
                for count in range(1, len(parts) + 1):
                    path = ROOT.joinpath(*parts[:count])
                    todo += [one for one in (path.with_suffix(".py"), path / "__init__.py") if one in FILES]
    return sum(len(file.read_text().splitlines()) for file in seen)


def test_the_model_and_the_loop_can_be_read_in_one_sitting() -> None:
    """The reference model, the training loop, and everything that the loop loads."""
    assert len((ROOT / "plainvit/models/vit.py").read_text().splitlines()) <= 380
    assert len((ROOT / "plainvit/train/loop.py").read_text().splitlines()) <= 250
    assert 1000 < reachable_lines("train/loop.py") <= 3000


def test_the_reference_model_knows_nothing_of_the_fast_path() -> None:
    for file in (ROOT / "plainvit" / "models").glob("*.py"):
        assert not any("models.fast" in module for node in ast.walk(tree(file)) for module in modules_of(node)), file


def test_no_package_for_everything() -> None:
    parts = {part.removesuffix(".py") for file in FILES for part in file.relative_to(ROOT / "plainvit").parts}
    assert not parts & {"utils", "util", "common", "core", "helpers", "manager", "engine", "base", "misc"}


def test_every_module_has_a_docstring() -> None:
    assert [file for file in FILES if len(ast.get_docstring(tree(file)) or "") <= 10] == []


@every_package
def test_development_dependencies_are_not_imported(name: str, files: list[Path]) -> None:  # noqa: ARG001
    """timm and transformers are for tests."""
    for file in files:
        modules = {one.split(".")[0] for node in ast.walk(tree(file)) for one in modules_of(node)}
        assert not modules & {"timm", "transformers", "sklearn", "scipy", "hypothesis", "pytest"}, file


def modules_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@every_package
def test_nothing_dangerous_is_called(name: str, files: list[Path]) -> None:  # noqa: ARG001
    """No code from strings, no pickles except tensors with weights_only, no shell, no unsafe YAML."""
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


HEAVY = {"torch", "torchvision", "numpy", "PIL", "matplotlib", "pyarrow", "safetensors", "huggingface_hub"}
HEAVY |= {"starlette", "uvicorn", "onnx", "onnxruntime", "openvino"}


def modules_loaded_by(code: str) -> set[str]:
    """Modules that the code loads in a new interpreter, beyond those of an empty one."""
    quietly = "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit)"
    loaded, before = (
        in_child(f"import contextlib, io, sys\n{quietly}:\n    {line}\nprint(*sys.modules)") for line in (code, "pass")
    )
    return set(loaded.split()) - set(before.split())


def command_line(*arguments: str) -> str:
    return f"from plainvit.cli import main; main({list(arguments)!r})"


def test_import_is_cheap() -> None:
    loaded = modules_loaded_by("import plainvit")
    assert not loaded & HEAVY
    assert len(loaded) < 20


@pytest.mark.parametrize(
    "code",
    [
        "import plainvit; plainvit.list_models(); dir(plainvit)",
        "import plainvit.config, plainvit.device, plainvit.cli",
        "from plainvit.names import configure; configure('ViT-B/16')",
        "from plainvit.planning import cost; cost.summary('ViT-B/16')",
        *(command_line(*words.split()) for words in ("inspect --help", "train digits --help-all")),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    assert not modules_loaded_by(code) & HEAVY


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
