"""Words -> a call: `plainvit VERB ...`. Each verb is imported inside its function, so --help never loads torch.

Exit codes: 0 done, 2 usage, 3 data, 4 diverged, 5 resources, 130/143 signals.
"""

import contextlib
import functools
import io
import json as _json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

from plainvit import __version__
from plainvit.config import Checked, Config, nearest

if TYPE_CHECKING:
    from rich.console import RenderableType


Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Spec = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")]
Target = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
Pattern = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATTERN")]


def models(pattern: Pattern = "*", /, *, image_size: int = 224, json: bool = False) -> None:
    """Table of the named models: tokens, parameters, compute, size of their weights.

    Any other patch size works too, for instance ViT-B/20 at 240 px. exaFLOPs is the paper's pre-training of that
    model on JFT-300M (Table 6); where the paper trained it twice, both are given.

    Args:
        pattern: Only names that match, shell-style, such as '*B/16' or 'BiT-*'.
        image_size: Height and width of the images in pixels.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.evaluate import cost
    from plainvit.names import list_models

    names = list_models(pattern)
    if not names:
        raise ValueError(f"no model matches {pattern!r}; `plainvit models` lists them all")
    rows = [cost.summary(name, image_size) for name in names]
    _show(rows, None if json else cost.table(rows))


def inspect(
    source: Source,
    /,
    *,
    image: Path | None = None,
    image_size: int | None = None,
    heads: int | None = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """What a weights file holds and means; or, for a model's name, every step of one real forward pass.

    Of a file it prints each setting and where it was learned: from the shapes, from a file beside it, or from what is
    known of that library's code. Of a name such as ViT-B/16 it prints the names that a Trace takes, with the shape,
    mean and spread of each: model(images, Trace("block*/attention")).

    Args:
        source: A weights file or folder, hf:org/name, a name from `plainvit weights`, or a model's name.
        image: A photo to run a named model on; without one, a colour gradient.
        image_size: Height and width of the images in pixels.
        heads: Heads of the file's model, where the file cannot say.
        seed: Draws a named model's weights.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.names import is_model

    if is_model(source):
        if heads is not None:
            raise ValueError("--heads goes with a weights file; a named model has its own")
        from plainvit.evaluate import forward

        report = forward.report(source, image, 224 if image_size is None else image_size, seed)
        _show(report, None if json else forward.tables(report))
        return
    if image is not None:
        raise ValueError("--image goes with a model's name; a weights file is described, not run")
    from plainvit.evaluate import describe

    described = describe.describe(source, heads=heads, image_size=image_size)
    _show(described, None if json else describe.table(described))


def convert(
    source: Source,
    target: Target,
    /,
    *,
    format: Literal["plainvit", "google", "timm", "transformers", "torchvision"],  # noqa: A002
    drop: tuple[str, ...] = (),
    heads: int | None = None,
    image_size: int | None = None,
    classes: int | None = None,
) -> None:
    """Weights from any library's format to another's, every number as it was.

    What the target cannot express (a hidden layer in the head, another GELU, registers ...) is refused by name; --drop
    NAME goes on without it. google writes an .npz; transformers a folder that the library loads; timm a folder with
    its config.json, or a bare file where the name ends in .safetensors or .pth.

    Args:
        source: A weights file or folder, hf:org/name, or a name from `plainvit weights`.
        target: The file or folder to write.
        format: Whose format to write.
        drop: Parts to leave out, by the names that the refusal gives.
        heads: Heads of the source's model, where the file cannot say.
        image_size: Resample the positions to this size first.
        classes: Replace the head by one of zeros with so many classes first.
    """
    from plainvit.weights import convert as run

    print(run(source, target, format, drop, heads=heads, image_size=image_size, classes=classes))


def weights(*, json: bool = False) -> None:
    """Published weights by name, with their hub address, licence and reported accuracy.

    Any of the names loads: plainvit.load("vit_b16_augreg_i21k_i1k_224"). top-1 and ReaL are those of timm's results
    files, in per cent; an empty field was not at hand.

    Args:
        json: Print JSON for machines instead of a table.
    """
    from dataclasses import asdict

    from plainvit.evaluate import describe

    rows = {name: asdict(entry) for name, entry in describe.PUBLISHED.items()}
    _show(rows, None if json else describe.published_table())


def data_info(spec: Spec, /, *, sheet: Path | None = None, data_root: Path | None = None, json: bool = False) -> None:
    """Counts, classes, sizes and fingerprint of each split; with --sheet, a page of thumbnails.

    Args:
        spec: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        sheet: Write a contact sheet of the first split to this PNG.
        data_root: Where known sets lie, each in a folder of its name.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.data import check

    report = check.info(spec, data_root, sheet)
    _show(report, None if json else check.info_table(report))


def data_check(
    spec: Spec,
    /,
    *,
    save: Path | None = None,
    data_root: Path | None = None,
    json: bool = False,
) -> None:
    """Corrupt files, duplicates within and across splits, empty classes, odd sizes. Exit code 3 if any is unreadable.

    Args:
        spec: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        save: Write the findings to this file, one JSON object a line; it can be given back as a list to exclude.
        data_root: Where known sets lie, each in a folder of its name.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.data import check
    from plainvit.disk import write_atomically

    findings = check.check(spec, data_root)
    if save:
        lines = "".join(f"{_json.dumps(finding)}\n" for finding in findings)
        write_atomically(save, lambda beside: beside.write_text(lines, encoding="utf-8"))
    _show(findings, None if json else check.check_table(findings))
    if any(finding["problem"] == "unreadable" for finding in findings):
        sys.exit(3)


def data_pack(
    spec: Spec,
    target: Target,
    /,
    *,
    side: int = 320,
    quality: int = 90,
    data_root: Path | None = None,
    json: bool = False,
) -> None:
    """A faster copy: tar shards (WebDataset) of JPEGs with a short side of --side, and an index for random access.

    Args:
        spec: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        target: A new folder for the shards.
        side: Short side in pixels; smaller images stay as they are.
        quality: Of the JPEGs, 1 to 100.
        data_root: Where known sets lie, each in a folder of its name.
        json: Print JSON for machines instead of a line.
    """
    from rich.text import Text

    from plainvit.data import check

    packed = check.pack(spec, target, side, quality, data_root)
    line = (
        f"{packed['images']:,} images, {packed['bytes'] / 2**20:,.1f} MiB, {len(packed['left_out'])} left out: {target}"
    )
    _show(packed, None if json else Text(line))  # a folder's brackets are no markup


@dataclass(frozen=True, kw_only=True)
class Train:
    """Trains by a recipe: `plainvit recipes` lists them, or FILE.py:FUNCTION is one of your own.

    Every setting of the recipe is a flag, for instance --optim.lr 1e-3 or --model ViT-S/16. The same command again goes
    on with an unfinished run. The run folder holds the weights, the metrics and a report.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None  # the run folder; runs/RECIPE-HASH where not given
    search: bool = False  # first try the rates of optim.grid on held-out training images
    force: bool = False  # go on although the config or the data changed since the run began
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
class Doctor(Train):
    """Versions, devices and quirks of this machine; with a RECIPE, the risks in its configuration and their mending."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will need before it is paid for: memory, images a second, hours, exaFLOPs and TPUv3-core-days.

    From a measured model of the device; what was not measured is said to be so. Every setting of the recipe is a flag.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    on: str = ""  # the device: h200, h100, a100-80; without one, only what does not depend on it
    devices: int = 1  # how many of them
    images: int | None = None  # training images, where the data is not a known set
    json: bool = False  # print JSON for machines instead of tables


def _plan(command: Plan) -> None:
    from plainvit.evaluate import plan

    report = plan.plan(command.config, on=command.on, devices=command.devices, images=command.images)
    _show(report, None if command.json else plan.table(report))


def _train(command: Train) -> None:
    if command.devices < 1 or command.restarts < 0:
        raise ValueError(
            f"--devices is at least 1 and --restarts at least 0, got {command.devices}, {command.restarts}"
        )
    if command.devices > 1 and "RANK" not in os.environ:
        from plainvit.runtime.distributed import launch

        sys.exit(launch(sys.argv[1:], command.devices, command.restarts, command.config.device))
    from plainvit.train.fit import fit

    run = fit(command.config, command.out, force=command.force, search=command.search, quiet=command.json)
    if os.environ.get("RANK", "0") != "0":  # the first of several processes speaks for all
        return
    if command.json:
        print(_json.dumps({"folder": str(run.folder), **run.numbers}, indent=2))
        return
    for split, name in (("val", "validation"), ("test", "test")):
        if split in run.numbers:
            print(f"{name} top-1 {100 * run.numbers[split]['top1']:.2f} %")
    print(f"report: {run.folder / 'report.html'}")


def _doctor(command: Train) -> None:
    from plainvit.train import doctor

    report = doctor.examine(command.config if command.config.recipe else None)
    _show(report, None if command.json else doctor.table(report))


RUNS: dict[str, tuple[type[Any], Callable[[Any], None], str]] = {  # verb -> flags, what to do, default recipe
    "train": (Train, _train, ""),
    "finetune": (Finetune, _train, "finetune"),
    "plan": (Plan, _plan, ""),
    "doctor": (Doctor, _doctor, ""),
}


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
    _show([row | {"config": to_json(recipe(row["name"]))} for row in rows], None if json else recipes_table(rows))


def replay(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
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
        device: cpu, cuda; auto: a GPU where there is one.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.runtime.folder import finite
    from plainvit.train import replay as again

    found = again.replay(run, step, data_root, device)
    _show(finite(found), None if json else again.table(found))


VERBS: dict[str, Callable[..., object]] = {
    "train": Train,
    "finetune": Finetune,
    "recipes": recipes,
    "plan": Plan,
    "doctor": Doctor,
    "replay": replay,
    "models": models,
    "inspect": inspect,
    "weights": weights,
    "convert": convert,
    "data info": data_info,
    "data check": data_check,
    "data pack": data_pack,
}


def main(arguments: list[str] | None = None) -> None:
    """The command. Errors that a user can mend are one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verb = next((" ".join(arguments[:n]) for n in (2, 1) if " ".join(arguments[:n]) in VERBS), None)
    if verb is None:
        _overview(arguments)
        return
    from plainvit import device

    device.prepare()
    try:
        rest = arguments[len(verb.split()) :]
        if verb in RUNS:
            _run(verb, rest)
            if "RANK" in os.environ:  # the work is done and on disk; PyTorch's teardown of its threads may yet abort
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        else:
            _parsed(_deferred(VERBS[verb]), prog=f"plainvit {verb}", args=rest)()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, OSError) as error:
        if getattr(error, "agreed", False) and os.environ.get("RANK", "0") != "0":
            sys.exit(getattr(error, "exit_code", 2))  # the first of several processes says it
        _fail(str(error).splitlines()[0], getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        sys.exit(130)


def _run(verb: str, arguments: list[str]) -> None:
    """A verb whose flags are the fields of a recipe's config, with the recipe's values as their defaults."""
    from plainvit.recipes import recipe

    flags, do, name = RUNS[verb]
    if arguments and not arguments[0].startswith("-"):
        name, arguments = arguments[0], arguments[1:]
    words, arguments = _first_words(arguments)
    name = words.pop("recipe", name)
    if not name and verb in ("train", "plan") and not set(arguments) & {"-h", "--help"}:
        raise ValueError(f"which recipe? `plainvit recipes` lists them: plainvit {verb} digits")
    config = _begun(recipe(name) if name else Config(), words, strict=verb != "doctor")
    found, unknown = _parsed(
        flags,
        prog=f"plainvit {verb} [RECIPE]",
        args=arguments,
        default=flags(config=config),
        return_unknown_args=True,
    )
    if unknown:
        _fail(f"unknown flag {unknown[0]!r}; {nearest(unknown[0], _flags(found.config))}", 2)
    do(found)


def _deferred(call: Callable[..., object]) -> Callable[..., Callable[[], object]]:
    """The same parameters, but calling it only binds them."""

    @functools.wraps(call)
    def bind(*values: object, **named: object) -> Callable[[], object]:
        return functools.partial(call, *values, **named)

    return bind


def _parsed(what: Callable[..., Any], **options: Any) -> Any:
    """What the words mean; where they mean nothing, one line in place of the parser's box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(what, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands), **options)
    except SystemExit as end:
        if not end.code:
            raise
        box = [line.strip("\u2502 ") for line in said.getvalue().splitlines()]
        rule = next((at for at, line in enumerate(box) if at and line.startswith("\u2500")), len(box))
        words = " ".join(line for line in box[1:rule] if line and line[0] not in "\u256d\u2570")
        _fail(words or "the words of this command cannot be read: see --help", 2)


def _first_words(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What decides which model the --model flags belong to, and so must be read before them; and the rest."""
    from argparse import ArgumentError, ArgumentParser

    first = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--recipe", "--model", "--init", "--head"):
        first.add_argument(name)
    first.add_argument("--image-size", "--image_size", type=int)
    try:
        words, rest = first.parse_known_args(arguments)
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    return {name: value for name, value in vars(words).items() if value is not None}, rest


def _begun(config: Config, words: dict[str, Any], *, strict: bool) -> Config:
    """The recipe's config with another model by its name, or with that of the weights to start from."""
    from plainvit.names import configure

    if "model" in words:
        size = words.pop("image_size", 0) or (config.model.image_size if config.model else 224)
        words["model"] = configure(words["model"], 0, size)
    config = config.replace(**words)
    if config.init and config.model is None:
        from plainvit.train.transfer import starting_model

        try:
            config = config.replace(model=starting_model(config)[0])
        except (ValueError, OSError):
            if strict:
                raise
    return config


def _flags(config: Checked, prefix: str = "--") -> list[str]:
    """Every flag that a config has."""
    found: list[str] = []
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        found += _flags(value, f"{name}.") if isinstance(value, Checked) else [name]
    return found


def _overview(arguments: list[str]) -> None:
    """All verbs, or those that begin with the word given; anything else is an error with the nearest verb."""
    word = arguments[0] if arguments else "--help"
    if word == "--version":
        print(f"plainvit {__version__}")
        return
    verbs = [verb for verb in VERBS if word in ("-h", "--help") or verb.split()[0] == word]
    if not verbs or not set(arguments[1:]) <= {"-h", "--help"}:
        _fail(f"there is no verb {' '.join(arguments[:2])!r}; {nearest(' '.join(arguments[:2]), VERBS)}", 2)
    print("plainvit: Vision Transformers, from raw images to an answer.\n")
    for verb in verbs:
        print(f"  plainvit {verb:12} {(VERBS[verb].__doc__ or '').splitlines()[0]}")
    print("\nplainvit VERB --help tells more of each; plainvit --version prints the version.")


def _fail(line: str, code: int) -> NoReturn:
    print(f"plainvit: {line}", file=sys.stderr)
    sys.exit(code)


def _show(value: object, renderable: "RenderableType | None") -> None:
    """JSON where no table was made, else the table."""
    if renderable is None:
        print(_json.dumps(value, indent=2))
        return
    from rich.console import Console

    Console().print(renderable)
