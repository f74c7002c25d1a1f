"""Training runs: train, finetune, plan and doctor, whose flags are the settings of a recipe; recipes and replay."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tyro.conf import DisallowNone, Positional, arg

from plainvit.commands.parsing import (
    Pattern,
    Processes,
    parse_arguments,
    print_result,
    print_short_help,
    reject_argument,
)
from plainvit.config import Config, Model, Preprocess

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True, kw_only=True)
class ConfigFlags(Config):
    """A config on the command line: the recipe is positional, and --model selects a model by its name."""

    recipe: Annotated[str, Positional, arg(metavar="[RECIPE]", help_behavior_hint="")] = ""
    """Name from `plainvit recipes`, or FILE.py:FUNCTION for your own; comes before the flags"""
    model_name: Annotated[str, arg(name="model", metavar="NAME", help_behavior_hint="")] = ""
    """Model from `plainvit models`, such as ViT-S/16, in place of the recipe's"""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine, and the settings of a RECIPE if given, for known problems.

    Prints versions, devices and each problem with its fix.
    """

    config: Annotated[Config, arg(name="")]
    devices: int = 1  # Number of processes that will train on this machine
    json: bool = False  # Print JSON instead of tables


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model with a recipe, or resume an unfinished run.

    Every setting of the recipe is a flag, for example --optim.lr 1e-3 or --model ViT-S/16. The same command resumes an
    interrupted run. The run folder holds the weights, the metrics and a report.
    """

    config: Annotated[Config, arg(name="")]
    #: Run folder
    out: Annotated[DisallowNone[Path | None], arg(help_behavior_hint="(default: runs/RECIPE-HASH)")] = None
    search: bool = False  # Try the learning rates of --optim.grid on held-out training images first
    force: bool = False  # Resume even if the config or the data changed; use a recipe on other data
    devices: int = 1  # Number of processes on this machine, one per device (several machines: torchrun)
    restarts: int = 0  # How often to restart the processes of --devices when one of them dies
    json: bool = False  # Print the results as JSON


@dataclass(frozen=True, kw_only=True)
class Finetune(Train):
    """Fine-tune pretrained weights on your images.

    For example: plainvit finetune --init WEIGHTS --data photos/. First a linear head is fitted to frozen features, a
    usable model within a minute or so; then all layers are trained from there, and the better model is kept. The
    default recipe is `finetune`; the paper's, which start from a head of zeros, are ft-cifar10, ft-pets and others.
    """


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimate the FLOPs, memory, images per second and hours of a run.

    Step times come from steps measured on an H200, or with --measure from real steps on this machine. Every setting of
    the recipe is a flag.
    """

    config: Annotated[Config, arg(name="")]
    on: str = ""  # Device to plan for: h200, h100 or a100-80; without it, no times
    devices: int = 1  # Number of these devices
    images: DisallowNone[int | None] = None  # Number of training images, if the data is not a known dataset
    search: bool = False  # Include the runs of the learning rate search (--optim.grid)
    measure: bool = False  # Train for 25 steps on this machine and use their median time; needs the data
    json: bool = False  # Print JSON instead of tables


def _plan(command: Plan) -> None:
    from plainvit.planning import plan

    config, images, measured = command.config, command.images, None
    if command.measure:
        if command.on or command.devices > 1 or images:
            raise ValueError("--measure uses one device and the data of this machine: remove --on, --devices, --images")
        from plainvit.train.measure import measure_steps

        config, measured = measure_steps(config)
        images = measured["images"]
    report = plan.plan(
        config, on=command.on, devices=command.devices, images=images, search=command.search, measured=measured
    )
    print_result(report, None if command.json else plan.table(report))


def _train(command: Train) -> Processes | None:
    if command.devices < 1:
        raise ValueError(f"--devices must be at least 1, got {command.devices}")
    if command.restarts < 0:
        raise ValueError(f"--restarts must be at least 0, got {command.restarts}")
    if command.devices > 1 and "RANK" not in os.environ:
        return Processes(command.devices, command.restarts, command.config.device)
    from plainvit.train.finalize import describe_choice
    from plainvit.train.run import fit

    run = fit(command.config, command.out, force=command.force, search=command.search, quiet=command.json)
    if os.environ.get("RANK", "0") != "0":  # only the main process prints
        return None
    if command.json:
        print_result({"folder": str(run.folder), **_drop_confusion(run.numbers)}, None)
        return None
    for line in (*describe_choice(run.numbers), *describe_results(run.numbers)):
        print(line)
    print(f"report: {run.folder / 'report.html'}")
    return None


def describe_results(results: dict[str, Any]) -> Iterator[str]:
    """Lines with the accuracy or loss on validation and test images."""
    from plainvit.evaluate.statistics import describe_accuracy

    for split, name in (("val", "validation"), ("test", "test")):
        scores = results.get(split, {})
        if "top1" in scores:
            correct = round(scores["top1"] * scores["images"])
            accuracy, *warning = describe_accuracy(correct, scores["images"], scores.get("majority_accuracy"))
            yield from (f"{name}: {accuracy}", *warning)
            if split == "val" and (better := results.get("better_before")):
                percent = f"{better['top1']:.2%}".replace("%", " %")
                yield (
                    f"the final weights are the last step's; step {better['step']:,} had {percent}: "
                    "use --patience N to keep the best"
                )
        elif scores.get("loss") is not None:
            yield f"{name} loss {scores['loss']:.4f}"


def _drop_confusion(numbers: dict[str, Any]) -> dict[str, Any]:
    """Results without the confusion matrix, which is in results.json and has a row for each pair of classes."""
    splits = {name: value for name, value in numbers.items() if isinstance(value, dict)}
    return numbers | {
        name: {key: one for key, one in value.items() if key != "confusion"} for name, value in splits.items()
    }


def _doctor(command: Doctor) -> None:
    from plainvit.train import doctor

    if command.devices < 1:
        raise ValueError(f"--devices must be at least 1, got {command.devices}")
    report = doctor.examine(command.config if command.config.recipe else None, command.devices)
    print_result(report, None if command.json else doctor.table(report))


class RunCommand(NamedTuple):
    """A command whose flags include every setting of a recipe."""

    flags: type[Any]
    call: Callable[[Any], Processes | None]
    default_recipe: str
    common: tuple[str, ...]  # arguments in --help; --help-all lists all


_MODEL = ("[RECIPE]", "--data", "--init", "--model", "--image-size")
_TRAIN = (*_MODEL, "--batch", "--epochs", "--steps", "--hours", "--optim.lr", "--out", "--device", "--seed")
_PLAN = (*_MODEL, "--batch", "--epochs", "--steps", "--on", "--devices", "--images", "--search", "--measure", "--json")
RUNS = {
    "train": RunCommand(Train, _train, "", _TRAIN),
    "finetune": RunCommand(Finetune, _train, "finetune", _TRAIN),
    "plan": RunCommand(Plan, _plan, "", _PLAN),
    "doctor": RunCommand(Doctor, _doctor, "", (*_MODEL, "--batch", "--devices", "--device", "--json")),
}


def run(command: str, arguments: list[str]) -> Processes | None:
    """Run a command whose flags are the settings of a recipe; the recipe's values are their defaults.

    The recipe and the flags that select the model are read first: they decide which --model.* flags there are.
    """
    from plainvit.recipes import list_recipes, recipe

    flags, call, name, _ = RUNS[command]
    recipe_given = bool(arguments) and not arguments[0].startswith("-")
    if recipe_given:
        name, arguments = arguments[0], arguments[1:]
    asks_help = not {"-h", "--help", "--help-all"}.isdisjoint(arguments)
    selected, rest = _read_model_flags(arguments)
    if not name and command in ("train", "plan") and not asks_help:
        raise ValueError(
            f"no recipe given, for example: plainvit {command} digits (`plainvit recipes` lists all). For your photos: "
            "plainvit finetune --init WEIGHTS --data photos/, or plainvit train photos --data photos/"
        )
    config = _select_model(recipe(name) if name else Config(), selected, command)
    changes_preprocess = any(one.startswith("--preprocess.") for one in rest)
    # plan does not depend on the preprocessing
    implied = _implied_preprocess(config) if changes_preprocess and command != "plan" else Preprocess()
    default = flags(config=ConfigFlags(**_settings(config.replace(preprocess=config.preprocess or implied))))
    if "--help-all" in rest:
        rest = ["--help"]
    elif asks_help:
        return print_short_help(flags, command, RUNS[command].common, default=default)
    result = parse_arguments(flags, command, rest, default=default)
    stray = result.config.recipe
    if stray != config.recipe:
        if not recipe_given and stray in list_recipes():
            raise ValueError(f"the recipe comes first: plainvit {command} {stray} ...")
        reject_argument(stray, flags, command, rest, default=default)
    chosen = Config(**_settings(result.config))
    return call(replace(result, config=chosen if changes_preprocess else chosen.replace(preprocess=config.preprocess)))


def _settings(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(Config)}


def _implied_preprocess(config: Config) -> Preprocess:
    """The preprocessing of a config that has none: that of init, or the default."""
    if not config.init:
        return Preprocess()
    from plainvit.train.transfer import starting_model

    return starting_model(config)[1]


def _read_model_flags(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The flags that decide which model the --model.* flags describe; and the other arguments."""
    from argparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--model", "--init", "--head"):
        parser.add_argument(name)
    parser.add_argument("--image-size", "--image_size", type=int)
    parser.add_argument("--model.image-size", "--model.image_size", dest="sides", type=int, nargs="+")
    try:
        selected, rest = parser.parse_known_args(arguments)
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    if selected.sides:
        selected.sides = selected.sides if len(selected.sides) > 1 else selected.sides * 2
        rest += ["--model.image-size", *map(str, selected.sides)]  # for the recipe's own model and for init's
    return {name: value for name, value in vars(selected).items() if value is not None}, rest


def _select_model(config: Config, selected: dict[str, Any], command: str) -> Config:
    """The recipe's config with the model that --model names, or with that of the weights to start from."""
    from plainvit.names import configure

    size, sides = selected.get("image_size") or config.image_size, selected.pop("sides", None)
    if "model" in selected:
        default_size = config.model.image_size if config.model else 224
        selected["model"] = configure(selected["model"], 0, tuple(sides or ()) or size or default_size)
    elif size and config.model:
        selected["model"] = config.model.replace(image_size=(size, size))
    if "model" in selected and not selected.get("init", config.init):
        selected["image_size"] = 0  # it is part of the model now
    config = config.replace(**selected)
    return config.replace(model=_load_model_config(config, command)) if config.init and config.model is None else config


def _load_model_config(config: Config, command: str) -> Model | None:
    """The model of the weights to start from; plan reads it off a published name without loading them."""
    if command == "plan":
        from plainvit.planning.shapes import published_model

        if model := published_model(config):
            return model
    from plainvit.hub import UnreachableError
    from plainvit.train.transfer import starting_model

    try:
        return starting_model(config)[0]
    except (ValueError, OSError) as error:
        if command == "doctor":
            return None
        if not isinstance(error, UnreachableError):
            raise
        raise ValueError(f"{error}{_suggest_without_weights(config, command)}") from error


def _suggest_without_weights(config: Config, command: str) -> str:
    """The end of an error message: what to do when the weights cannot be downloaded."""
    if command == "plan":
        return "; or plan without the weights: --model NAME"
    if command == "finetune" and config.recipe == "finetune":
        return "; or train without pretrained weights: plainvit train photos --data DATA"
    return ""


def recipes(pattern: Pattern = "", /, *, json: bool = False) -> None:
    """List the recipes: what each trains, the expected result and the cost.

    Without a PATTERN only the recipes to start with are listed; '*' lists all, those of published papers too.

    Args:
        pattern: Shell-style pattern of names, such as '*', 'ft-*' or '*i21k*'
        json: Print JSON instead of a table, with source, command and the full config
    """
    from plainvit.config import to_json
    from plainvit.recipes import about, list_recipes, recipe
    from plainvit.recipes.small import RECIPES as STARTERS

    names = list_recipes(pattern) if pattern else list(STARTERS)
    if not names:
        raise ValueError(f"no recipe matches {pattern!r}; `plainvit recipes '*'` lists all")
    rows = [about(name) for name in names]
    if json:
        print_result([row | {"config": to_json(recipe(row["name"]))} for row in rows], None)
        return
    note = ""
    if not pattern:
        note = f"\n{len(list_recipes()) - len(names)} more follow published papers: plainvit recipes '*' lists all, "
        note += "'vit-*' those of the ViT paper, 'ft-*' its fine-tuning, 'deit*' DeiT's."
    print_result(None, _recipe_table(rows, note))


def _recipe_table(rows: list[dict[str, str]], note: str) -> "Group":
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", style="cyan", no_wrap=True)
    for title in ("what it trains", "expected", "cost"):
        table.add_column(title)
    for row in rows:
        table.add_row(*(row[key] for key in ("name", "summary", "expected", "cost")))
    return Group(table, *([note] if note else []))


def replay(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    /,
    *,
    step: int | None = None,
    data_root: str = "",
    device: str = "auto",
    json: bool = False,
) -> None:
    """Rerun one step of a run to find where values become NaN or Inf.

    The run folder is not changed.

    Args:
        run: Run folder
        step: Step number as in the metrics: a captured step, or one right after a checkpoint; default: last captured
        data_root: Folder with the known datasets, if it has moved
        device: Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one
        json: Print JSON instead of a table
    """
    from plainvit.runtime.folder import finite
    from plainvit.train import replay as rerun

    report = rerun.replay(run, step, data_root, device)
    print_result(finite(report), None if json else rerun.table(report))
