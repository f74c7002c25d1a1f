"""Runs: train, finetune, plan and doctor, whose flags are the fields of a recipe's config; recipes and replay."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import DisallowNone, Positional, arg

from plainvit.config import Config, Model, Preprocess
from plainvit.verbs.words import Pattern, Processes, parsed, refuse, show


@dataclass(frozen=True, kw_only=True)
class Words(Config):
    """A config as the command names it: the recipe is a word, and a model may be given by its name."""

    recipe: Annotated[str, Positional, arg(metavar="[RECIPE]", help_behavior_hint="")] = ""
    """A name from `plainvit recipes`, or FILE.py:FUNCTION for one of your own; it comes before the flags."""
    model_name: Annotated[str, arg(name="model", metavar="NAME", help_behavior_hint="")] = ""
    """a model from `plainvit models`, such as ViT-S/16, in place of the recipe's"""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Versions, devices and quirks of this machine; with a RECIPE, the risks in its configuration and their mending."""

    config: Annotated[Config, arg(name="")]
    devices: int = 1  # processes on this machine that are to train by the RECIPE
    json: bool = False  # print JSON for machines instead of tables


@dataclass(frozen=True, kw_only=True)
class Train:
    """Trains by a recipe: `plainvit recipes` lists them, or FILE.py:FUNCTION is one of your own.

    Every setting of the recipe is a flag, for instance --optim.lr 1e-3 or --model ViT-S/16. The same command again goes
    on with an unfinished run. The run folder holds the weights, the metrics and a report.
    """

    config: Annotated[Config, arg(name="")]
    out: DisallowNone[Path | None] = None  # the run folder; runs/RECIPE-HASH where not given
    search: bool = False  # first try the rates of optim.grid on held-out training images
    force: bool = False  # go on although the config or the data changed, or the recipe is for other data
    devices: int = 1  # processes on this machine, one a device; on several machines start it with torchrun
    restarts: int = 0  # how often --devices starts the processes again when one of them dies
    json: bool = False  # print the results as JSON at the end


@dataclass(frozen=True, kw_only=True)
class Finetune(Train):
    """Fine-tunes weights of any library on your images: --init WEIGHTS --data photos/.

    The head is replaced by one of zeros and the positions are resampled to --image-size. Without a RECIPE the settings
    are those of `finetune`; the paper's are ft-cifar10, ft-pets and so on. Every setting is a flag.
    """


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimate what a run will need: FLOPs, memory of each device, images per second, hours.

    Step times come from steps measured on an H200, or with --measure from real steps on this machine. Every setting of
    the recipe is a flag.
    """

    config: Annotated[Config, arg(name="")]
    on: str = ""  # device to plan for: h200, h100 or a100-80; without it, no times
    devices: int = 1  # number of these devices
    images: DisallowNone[int | None] = None  # number of training images, where the data is not a known dataset
    search: bool = False  # add the runs that try the rates of optim.grid
    measure: bool = False  # train for 25 steps on this machine and use their median time; needs the data
    json: bool = False  # print JSON instead of tables


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
    show(report, None if command.json else plan.table(report))


def _train(command: Train) -> Processes | None:
    if command.devices < 1 or command.restarts < 0:
        raise ValueError(
            f"--devices is at least 1 and --restarts at least 0, got {command.devices}, {command.restarts}"
        )
    if command.devices > 1 and "RANK" not in os.environ:
        return Processes(command.devices, command.restarts, command.config.device)
    from plainvit.train.run import fit

    done = fit(command.config, command.out, force=command.force, search=command.search, quiet=command.json)
    if os.environ.get("RANK", "0") != "0":  # the first of several processes speaks for all
        return None
    if command.json:
        show({"folder": str(done.folder), **_without_confusion(done.numbers)}, None)
        return None
    for line in _in_words(done.numbers):
        print(line)
    print(f"report: {done.folder / 'report.html'}")
    return None


def _in_words(results: dict[str, Any]) -> Iterator[str]:
    """What the run came to, of images that it has not learned from."""
    from plainvit.evaluate.chance import in_words

    for split, name in (("val", "validation"), ("test", "test")):
        found = results.get(split, {})
        if "top1" in found:
            right = round(found["top1"] * found["images"])
            said, *warning = in_words(right, found["images"], found.get("guessing"))
            yield from (f"{name}: {said}", *warning)
            if split == "val" and (better := results.get("better_before")):
                before = f"step {better['step']:,} had {better['top1']:.2%}".replace("%", " %")
                yield f"these are the last step's weights; {before}: --patience N delivers the best"
        elif found.get("loss") is not None:
            yield f"{name} loss {found['loss']:.4f}"


def _without_confusion(numbers: dict[str, Any]) -> dict[str, Any]:
    """results.json has it: a line for each pair of classes is more than anyone reads."""
    inner = {name: value for name, value in numbers.items() if isinstance(value, dict)}
    return numbers | {
        name: {key: one for key, one in value.items() if key != "confusion"} for name, value in inner.items()
    }


def _doctor(command: Doctor) -> None:
    from plainvit.train import doctor

    if command.devices < 1:
        raise ValueError(f"--devices is at least 1, got {command.devices}")
    report = doctor.examine(command.config if command.config.recipe else None, command.devices)
    show(report, None if command.json else doctor.table(report))


OWN = "for your own photos: plainvit finetune --init WEIGHTS --data photos/, or plainvit train photos --data photos/"

# verb -> flags, what to do, default recipe
RUNS: dict[str, tuple[type[Any], Callable[[Any], Processes | None], str]] = {
    "train": (Train, _train, ""),
    "finetune": (Finetune, _train, "finetune"),
    "plan": (Plan, _plan, ""),
    "doctor": (Doctor, _doctor, ""),
}


def run(verb: str, arguments: list[str]) -> Processes | None:
    """A verb whose flags are the fields of a recipe's config, with the recipe's values as their defaults."""
    from plainvit.recipes import list_recipes, recipe

    flags, do, name = RUNS[verb]
    named = bool(arguments) and not arguments[0].startswith("-")
    if named:
        name, arguments = arguments[0], arguments[1:]
    words, arguments = _first_words(arguments)
    if not name and verb in ("train", "plan") and not set(arguments) & {"-h", "--help"}:
        raise ValueError(f"which recipe? `plainvit recipes` lists them: plainvit {verb} digits; {OWN}")
    config = _begun(recipe(name) if name else Config(), words, verb)
    prepared = any(word.startswith("--preprocess.") for word in arguments)
    implied = _implied(config) if prepared and verb != "plan" else Preprocess()  # which costs a plan nothing
    shown = config.replace(preprocess=config.preprocess or implied)
    default = flags(config=Words(**_values(shown)))
    found = parsed(flags, verb, arguments, default=default)
    stray = found.config.recipe
    if stray != config.recipe:
        if not named and stray in list_recipes():
            raise ValueError(f"the recipe comes first: plainvit {verb} {stray} ...")
        refuse(stray, flags, verb, arguments, default=default)
    asked = Config(**_values(found.config))
    return do(replace(found, config=asked if prepared else asked.replace(preprocess=config.preprocess)))


def _values(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(Config)}


def _implied(config: Config) -> Preprocess:
    """What the flags of a recipe without preprocessing change: that of init, or the default."""
    if not config.init:
        return Preprocess()
    from plainvit.train.transfer import starting_model

    return starting_model(config)[1]


def _first_words(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What decides which model the --model flags belong to, and so must be read before them; and the rest."""
    from argparse import ArgumentError, ArgumentParser

    first = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--model", "--init", "--head"):
        first.add_argument(name)
    first.add_argument("--image-size", "--image_size", type=int)
    first.add_argument("--model.image-size", "--model.image_size", dest="sides", type=int, nargs="+")
    try:
        words, rest = first.parse_known_args(arguments)
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    if words.sides:
        words.sides = words.sides if len(words.sides) > 1 else words.sides * 2
        rest += ["--model.image-size", *map(str, words.sides)]  # of a recipe's own model, and of init's
    return {name: value for name, value in vars(words).items() if value is not None}, rest


def _begun(config: Config, words: dict[str, Any], verb: str) -> Config:
    """The recipe's config with another model by its name, or with that of the weights to start from."""
    from plainvit.names import configure

    size, sides = words.get("image_size") or config.image_size, words.pop("sides", None)
    if "model" in words:
        own = config.model.image_size if config.model else 224
        words["model"] = configure(words["model"], 0, tuple(sides or ()) or size or own)
    elif size and config.model:
        words["model"] = config.model.replace(image_size=(size, size))
    if "model" in words and not words.get("init", config.init):
        words["image_size"] = 0  # the model has it now
    config = config.replace(**words)
    return config.replace(model=_of_init(config, verb)) if config.init and config.model is None else config


def _of_init(config: Config, verb: str) -> Model | None:
    """The model of the weights to start from: a plan reads it off a published name, the others off the weights."""
    if verb == "plan":
        from plainvit.planning.shapes import published_model

        if model := published_model(config):
            return model
    from plainvit.hub import UnreachableError
    from plainvit.train.transfer import starting_model

    try:
        return starting_model(config)[0]
    except (ValueError, OSError) as error:
        if verb == "doctor":
            return None
        if not isinstance(error, UnreachableError):
            raise
        raise ValueError(f"{error}{_without(config, verb)}") from error


def _without(config: Config, verb: str) -> str:
    """What can be done without the weights."""
    if verb == "plan":
        return "; or plan without it: --model NAME, of the same shape"
    photos = verb == "finetune" and config.recipe == "finetune"  # which is for images of the user's own
    return "; or learn without weights: plainvit train photos --data DATA" if photos else ""


def recipes(pattern: Pattern = "*", /, *, json: bool = False) -> None:
    """Table of the recipes: what each trains, what to expect, what it costs.

    Args:
        pattern: Only names that match, shell-style, such as 'ft-*' or '*i21k*'.
        json: Print JSON for machines instead of a table: with source and command, and the whole config.
    """
    from plainvit.config import to_json
    from plainvit.evaluate.describe import recipes_table
    from plainvit.recipes import about, list_recipes, recipe

    names = list_recipes(pattern)
    if not names:
        raise ValueError(f"no recipe matches {pattern!r}; `plainvit recipes` lists them all")
    rows = [about(name) for name in names]
    show([row | {"config": to_json(recipe(row["name"]))} for row in rows], None if json else recipes_table(rows))


def replay(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    /,
    *,
    step: int | None = None,
    data_root: str = "",
    device: str = "auto",
    json: bool = False,
) -> None:
    """One step of a run made again, to see where its numbers stop being finite. Nothing is changed.

    Args:
        run: A run folder.
        step: Counted as in the metrics; a captured one, or one that follows a checkpoint. Without: the last captured.
        data_root: Where known sets lie, if no longer where the run had them.
        device: cpu, cuda, cuda:1; auto: a GPU where there is one.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.runtime.folder import finite
    from plainvit.train import replay as again

    found = again.replay(run, step, data_root, device)
    show(finite(found), None if json else again.table(found))
