"""Every named run: a recipe is a function without arguments that returns a Config; its docstring says what to expect.

    plainvit train NAME --data-root DIR          plainvit train my.py:function

One file per source: small, paper, bit, augreg, plain_baselines, deit, masked. Each has a dict RECIPES of its functions
by name.
A recipe of your own is a function in a file of your own, which is loaded and run: name only files that you trust.
"""

import importlib.util
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

from plainvit.config import Config, nearest

Recipe = Callable[[], Config]
PARTS = ("source", "command", "expected", "cost")  # lines of a docstring, after the first


def list_recipes(pattern: str = "*") -> list[str]:
    """The named recipes that match a shell-style pattern: small ones, then the paper's, then those that followed."""
    return [name for name in _recipes() if fnmatchcase(name, pattern)]


def recipe(name: str) -> Config:
    """The config of a named recipe, or of FILE.py:FUNCTION; its `recipe` field is the word that was given."""
    make = _find(name)
    if not in_file(name):
        return make().replace(recipe=name)
    try:
        config = make()
    except Exception as error:
        raise ValueError(f"the recipe {name} failed: {_one_line(error)}") from error
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise ValueError(f"the recipe {name} returned {kind}; a recipe returns a plainvit.config.Config")
    return config.replace(recipe=name)


def about(name: str) -> dict[str, str]:
    """What a recipe's docstring says: name, summary, source, command, expected, cost; "" where it says nothing."""
    lines = [line.strip() for line in (_find(name).__doc__ or "").strip().splitlines()]
    found = {"name": name, "summary": lines[0] if lines else ""} | dict.fromkeys(PARTS, "")
    for line in lines[1:]:
        part, _, text = line.partition(": ")
        if part.lower() in PARTS:
            found[part.lower()] = text
    return found


def described(make: Recipe, *, summary: str, source: str, command: str, expected: str, cost: str) -> Recipe:
    """A recipe that comes from a row of a table, with the docstring that one written by hand has."""
    verb = "finetune" if " --init " in command else "train"
    parts = f"Source: {source}\nCommand: plainvit {verb} {command}\nExpected: {expected}\nCost: {cost}"
    make.__doc__ = f"{summary}\n\n{parts}\n"
    return make


def _recipes() -> dict[str, Recipe]:
    from plainvit.recipes import augreg, bit, deit, masked, paper, plain_baselines, small

    found: dict[str, Recipe] = {}
    for module in (small, paper, bit, augreg, plain_baselines, deit, masked):
        twice = found.keys() & module.RECIPES.keys()
        assert not twice, f"two recipes have one name: {twice}"
        found |= module.RECIPES
    return found


def _find(name: str) -> Recipe:
    if in_file(name):
        return _load(name)
    known = _recipes()
    if name not in known:
        raise ValueError(f"unknown recipe {name!r}; {nearest(name, known)}; or FILE.py:FUNCTION for one of your own")
    return known[name]


def in_file(name: str) -> bool:
    """Whether a name is of something in a file of the user's, FILE.py:NAME."""
    return name.endswith(".py") or name.rpartition(":")[0].endswith(".py")


def _load(name: str) -> Recipe:
    """The function of FILE.py:FUNCTION."""
    file, _, function = (name + ":" if name.endswith(".py") else name).rpartition(":")
    path = Path(file)
    if not function:
        raise ValueError(f"{file} is a file of recipes: name the function too, {file}:FUNCTION")
    if not path.is_file():
        raise ValueError(f"there is no file {file}, which the recipe {name} names")
    module = run_file(path)
    make: Recipe | None = getattr(module, function, None)
    if not callable(make):
        own = [word for word, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        hint = nearest(function, own) if own else "it defines none"
        raise ValueError(f"{file} has no function {function!r}; {hint}; a recipe of your own is FILE.py:FUNCTION")
    return make


def run_file(path: Path) -> ModuleType:
    """A file of the user's as a module. It is run, as any Python file that one imports."""
    module_name = f"plainvit_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it is loaded
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{path} cannot be loaded: {_one_line(error)}") from error
    return module


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
