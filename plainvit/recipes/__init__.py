"""Named training configurations: a recipe is a function that returns a Config; its docstring has the expected result.

    plainvit train NAME --data-root DIR          plainvit train my.py:function

One file per source: starters, paper, bit, augreg, plain_baselines, deit, masked. Each has RECIPES: name -> function.
Your own recipe is a function in your own file. The file is executed: name only files that you trust.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

from plainvit.config import Config, DataSummary, nearest

Recipe = Callable[..., Config]
PARTS = ("source", "command", "expected", "cost")  # lines of a docstring, after the first


def list_recipes(pattern: str = "*") -> list[str]:
    """The named recipes that match a shell-style pattern: small ones, then the paper's, then those that followed."""
    return [name for name in _recipes() if fnmatchcase(name, pattern)]


def recipe(name: str, data: DataSummary | None = None) -> Config:
    """The config of a named recipe or of FILE.py:FUNCTION; its `recipe` field is that name.

    A recipe that has a parameter `data` adapts to the dataset, such as `small`.
    """
    make = _find(name)
    try:
        config = make(data=data) if data and _has_data_parameter(make) else make()
    except Exception as error:
        if not is_user_file(name):
            raise
        raise ValueError(f"recipe {name} raised {_describe_error(error, Path(name.rpartition(':')[0]))}") from error
    if not isinstance(config, Config):
        raise ValueError(f"recipe {name} returned {type(config).__name__}, expected plainvit.config.Config")
    return config.replace(recipe=name)


def takes_data(name: str) -> bool:
    """Whether a recipe depends on the dataset."""
    return _has_data_parameter(_find(name))


def _has_data_parameter(make: Recipe) -> bool:
    return "data" in inspect.signature(make).parameters


SMALL_SIDE = 96  # images up to this many pixels are small


def choose_recipe(data: str, summary: DataSummary) -> tuple[str, str]:
    """The recipe to train on a dataset from scratch, and the reason."""
    for name in ("digits", "cifar10", "tiny-imagenet"):
        if data == name:
            return name, "made for this dataset"
    reason = f"{summary.images:,} training images of about {summary.side} px"
    if summary.side <= SMALL_SIDE:
        return "small", reason
    hint = "pretrained weights are far more accurate: plainvit finetune --init WEIGHTS --data "
    return "photos", f"{reason}; {hint}{data}"


def read_docstring(name: str) -> dict[str, str]:
    """The parts of a recipe's docstring: name, summary, source, command, expected, cost; "" if absent."""
    lines = [line.strip() for line in (_find(name).__doc__ or "").strip().splitlines()]
    parts = {"name": name, "summary": lines[0] if lines else ""} | dict.fromkeys(PARTS, "")
    for line in lines[1:]:
        part, _, text = line.partition(": ")
        if part.lower() in PARTS:
            parts[part.lower()] = text
    return parts


def describe_recipe(make: Recipe, *, summary: str, source: str, command: str, expected: str, cost: str) -> Recipe:
    """Give a generated recipe the docstring that a handwritten one has."""
    name = "finetune" if " --init " in command else "train"
    parts = f"Source: {source}\nCommand: plainvit {name} {command}\nExpected: {expected}\nCost: {cost}"
    make.__doc__ = f"{summary}\n\n{parts}\n"
    return make


def _recipes() -> dict[str, Recipe]:
    from plainvit.recipes import augreg, bit, deit, masked, paper, plain_baselines, starters

    modules = (starters, paper, bit, augreg, plain_baselines, deit, masked)
    return {name: make for module in modules for name, make in module.RECIPES.items()}


def _find(name: str) -> Recipe:
    if is_user_file(name):
        return _load(name)
    known = _recipes()
    if name not in known:
        raise ValueError(f"unknown recipe {name!r}; {nearest(name, known)}; or FILE.py:FUNCTION for your own")
    return known[name]


def is_user_file(name: str) -> bool:
    """Whether a name refers to the user's own file, FILE.py:NAME."""
    return name.endswith(".py") or name.rpartition(":")[0].endswith(".py")


def _load(name: str) -> Recipe:
    """The function of FILE.py:FUNCTION."""
    if name.endswith(".py"):
        raise ValueError(f"no function given for {name}: use {name}:FUNCTION")
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"file {file} of recipe {name} does not exist")
    module = import_file(Path(file))
    make: Recipe | None = getattr(module, function, None)
    if not callable(make):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        hint = nearest(function, own) if own else "it defines no functions"
        raise ValueError(f"{file} has no function {function!r}; {hint}")
    return make


def import_file(path: Path) -> ModuleType:
    """Import the user's own file as a module, which executes it."""
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
        raise ValueError(f"cannot load {path}: {_describe_error(error, path)}") from error
    return module


def _describe_error(error: Exception, path: Path) -> str:
    """The error in one line, with the last line of the user's file that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    where = f" ({path.name}, line {lines[-1]})" if lines else ""  # a SyntaxError's message names its line itself
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
