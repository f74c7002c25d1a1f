"""Recipe and flags -> the config of a run, for train, finetune, plan and doctor."""

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

from plainvit.commands.flags import Settings
from plainvit.config import Config, DataSummary, Model, Preprocess, pair


def configure_run(command: str, name: str, given: Settings, *, quiet: bool = False) -> Config:
    """The recipe's config, with the model that the flags select and every other setting that was given."""
    from plainvit.recipes import recipe

    name = name or _choose_recipe(command, given, quiet)
    config = recipe(name, _summarize_data(name, given)) if name else Config()
    changes, nested = _split_names(given)
    needed = ("init", "image_size", "head", "recipe", "data")
    start = Config(**{key: changes.get(key, getattr(config, key)) for key in needed})
    settings = nested.pop("model", {})
    with _name_flags(tuple(settings)):
        model = _select_model(config, start, changes.pop("model", ""), settings, command)
    if model and not start.init:
        changes["image_size"] = 0  # it is part of the model now
    for part, values in nested.items():
        current = getattr(config, part) or _infer_preprocess(start, command)
        changes[part] = current.replace(**values)
    return config.replace(model=model, **changes)


def _choose_recipe(command: str, given: Settings, quiet: bool) -> str:
    """The recipe that suits --data, printed with the reason; "" for a doctor without data."""
    data, init = given.get("data", ""), given.get("init", "")
    if not data:
        if command == "doctor":
            return ""
        raise ValueError(f"no recipe and no data given: plainvit {command} digits, or plainvit {command} --data FOLDER")
    if init:
        name, reason = "finetune", f"starts from {init}"
    else:
        from plainvit.data.summary import summarize
        from plainvit.recipes import choose_recipe

        name, reason = choose_recipe(data, summarize(data, given.get("data_root", "")))
    if not quiet and os.environ.get("RANK", "0") == "0":
        print(f"recipe {name}: {reason}", file=sys.stderr)
    return name


def _summarize_data(name: str, given: Settings) -> DataSummary | None:
    """The summary of --data, for a recipe that depends on it."""
    from plainvit.recipes import takes_data

    if not given.get("data") or not takes_data(name):
        return None
    from plainvit.data.summary import summarize

    return summarize(given["data"], given.get("data_root", ""))


def _split_names(given: Settings) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """{"batch": 64, "optim.lr": 1e-3} -> {"batch": 64}, {"optim": {"lr": 1e-3}}."""
    flat: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        part, dot, rest = name.partition(".")
        if dot:
            nested.setdefault(part, {})[rest] = value
        else:
            flat[name] = value
    return flat, nested


def _select_model(config: Config, start: Config, name: str, settings: dict[str, Any], command: str) -> Model | None:
    """The model that --model names, or that of the recipe or of the weights to start from, with its own settings."""
    from plainvit.names import configure

    for side in ("image_size", "patch"):
        if len(settings.get(side, ())) == 1:  # a square
            settings[side] = pair(*settings[side])
    model = config.model
    if name:
        default = model.image_size if model else 224
        return configure(name, 0, settings.pop("image_size", start.image_size or default), **settings)
    if model is None and start.init:
        model = _load_model_config(start, command)
    elif start.image_size:
        settings = {"image_size": pair(start.image_size)} | settings
    if model is None and settings and not start.image_size:
        raise ValueError(f"--model.{next(iter(settings))} needs a model: give a recipe, --model NAME or --init WEIGHTS")
    return model.replace(**settings) if model else None


@contextlib.contextmanager
def _name_flags(settings: Collection[str]) -> Iterator[None]:
    """Errors of a model start with the name of a setting; here with its flag, if it was given as one."""
    try:
        yield
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        if name not in settings:
            raise
        raise ValueError(f"--model.{name.replace('_', '-')} {problem}") from error


def _infer_preprocess(start: Config, command: str) -> Preprocess:
    """The preprocessing of a config that has none: that of init, or the default. A plan does not depend on it."""
    if not start.init or command == "plan":
        return Preprocess()
    from plainvit.train.transfer import read_starting_model

    return read_starting_model(start)[1]


def _load_model_config(start: Config, command: str) -> Model | None:
    """The model of the weights to start from."""
    from plainvit.hub import UnreachableError
    from plainvit.train.transfer import read_starting_model

    try:
        return read_starting_model(start)[0]
    except (ValueError, OSError) as error:
        if command == "doctor":  # which reports the error
            return None
        if not isinstance(error, UnreachableError):
            raise
        hint = "; or plan without the weights: --model NAME" if command == "plan" else ""
        if start.recipe == "finetune":
            hint = f"; or train without pretrained weights: plainvit train photos --data {start.data or 'FOLDER'}"
        raise ValueError(f"{error}{hint}") from error
