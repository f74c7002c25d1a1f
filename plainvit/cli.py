"""Command line -> a call: `plainvit COMMAND ...`. Packages are imported inside the commands: --help never loads torch.

Exit codes: 0 success, 2 usage, 3 data, 4 diverged (study: failed runs), 5 resources, 130/143 signals.
"""

import os
import sys
from collections.abc import Callable
from typing import Literal

from plainvit import __version__
from plainvit.commands import analyse, data, evaluate, models, paper, predict, probe, runs, serve, study, vtab
from plainvit.commands.flags import HELP, HELP_ALL, format_help, parse
from plainvit.commands.parsing import Processes, escape_log_records, exit_with_error
from plainvit.config import nearest
from plainvit.errors import exit_code, first_line

Command = Callable[..., object]


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands and flags with the tab key.

    For example: plainvit completion bash > ~/.local/share/bash-completion/completions/plainvit

    Args:
        shell: Shell to complete in: bash, zsh or fish
    """
    from plainvit.commands.completion import format_completion

    print(format_completion(shell, COMMANDS), end="")


TASKS: dict[str, dict[str, Command]] = {
    "Train": {
        "train": runs.train,
        "finetune": runs.finetune,
        "recipes": runs.recipes,
        "plan": runs.plan,
        "doctor": runs.doctor,
        "replay": runs.replay,
    },
    "Evaluate and predict": {
        "evaluate": evaluate.evaluate,
        "compare": evaluate.compare,
        "predict": predict.predict,
        "embed": predict.embed,
        "probe": probe.probe,
        "vtab": vtab.vtab,
    },
    "Understand a model": {"analyse": analyse.analyse},
    "Export and serve": {"export": serve.export, "bench": serve.bench, "serve": serve.serve},
    "Models and weights": {
        "models": models.models,
        "inspect": models.inspect,
        "weights": models.weights,
        "convert": models.convert,
    },
    "Data": {"data info": data.info, "data check": data.check, "data pack": data.pack},
    "Studies of the paper's claims": {
        "study": study.study,
        "study list": study.list_studies,
        "paper": paper.paper,
    },
    "Shell": {"completion": completion},
}
FIRST_STEPS = {
    "plainvit train digits": "Train a small ViT in about a minute",
    "plainvit train --data FOLDER": "Train on your images: one folder per class",
    "plainvit finetune --init WEIGHTS --data FOLDER": "Fine-tune pretrained weights: far more accurate",
}
COMMANDS = {name: call for commands in TASKS.values() for name, call in commands.items()}


def main(arguments: list[str] | None = None) -> None:
    """Run one command. An error that the user can fix is one line on standard error."""
    escape_log_records()
    try:
        try:
            _run_command(sys.argv[1:] if arguments is None else arguments)
        finally:
            _flush_stdout()
    except BrokenPipeError:  # the reader of the output has closed it, such as `head`
        sys.exit(0)
    except (ValueError, OSError) as error:
        if getattr(error, "raised_by_all", False) and os.environ.get("RANK", "0") != "0":
            sys.exit(exit_code(error))  # the main process prints it
        exit_with_error(_describe_error(error), exit_code(error))
    except (RuntimeError, MemoryError) as error:
        from plainvit.device import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        detail = str(error) or type(error).__name__
        exit_with_error(f"out of memory, reduce --batch: {detail.splitlines()[0]}", 5)
    except KeyboardInterrupt:
        exit_with_error("interrupted", 130)


def _describe_error(error: Exception) -> str:
    """One line; operating system errors without their number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return first_line(error)


def _find_command(arguments: list[str]) -> str | None:
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name
    return None


def _run_command(arguments: list[str]) -> None:
    name = _find_command(arguments)
    if name is None:
        _print_overview(arguments)
        return
    rest = arguments[len(name.split()) :]
    if not {*HELP, HELP_ALL}.isdisjoint(rest):
        _print_help(name, rest)
        return
    from plainvit import device

    device.set_environment()
    result = parse(COMMANDS[name], name, rest)()
    if isinstance(result, Processes):
        from plainvit.runtime.launch import launch

        sys.exit(launch(arguments, *result))
    if "RANK" in os.environ:  # everything is on disk; the teardown of PyTorch's threads may still abort
        _flush_stdout()
        sys.stderr.flush()
        os._exit(0)


def _flush_stdout() -> None:
    """Flush now: a failure while Python exits would print a traceback and exit with 120."""
    if sys.stdout is None:  # closed by the parent process
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
        if not isinstance(error, BrokenPipeError):
            raise


def _print_help(name: str, arguments: list[str]) -> None:
    """Help of one command; with a recipe, its values are the defaults."""
    from plainvit.recipes import recipe

    common = () if HELP_ALL in arguments else runs.COMMON_FLAGS.get(name, ())
    takes_recipe = name in runs.COMMON_FLAGS and not arguments[0].startswith("-")
    config = recipe(arguments[0]) if takes_recipe else None
    print(format_help(COMMANDS[name], name, common=common, config=config), end="")


def _print_overview(arguments: list[str]) -> None:
    """List all commands, or those of a family such as `data`; any other word is an error."""
    first = arguments[0] if arguments else "--help"
    if first == "--version":
        print(f"plainvit {__version__}")
        return
    listed = {name for name in COMMANDS if first in ("-h", "--help") or name.split()[0] == first}
    if not listed or not set(arguments[1:]) <= {"-h", "--help"}:
        given = " ".join(arguments[:2])
        exit_with_error(f"unknown command {given!r}; {nearest(given, COMMANDS)}", 2)
    print("plainvit: train, fine-tune, evaluate and understand Vision Transformers.")
    for task, commands in TASKS.items():
        if listed & commands.keys():
            print(f"\n{task}")
        for name in (name for name in commands if name in listed):
            print(f"  plainvit {name:12} {(COMMANDS[name].__doc__ or '').splitlines()[0].removesuffix('.')}")
    if len(listed) == len(COMMANDS):
        print("\nFirst steps")
        for example, explanation in FIRST_STEPS.items():
            print(f"  {example:52} {explanation}")
    print("\n`plainvit COMMAND --help` describes a command; `plainvit --version` prints the version.")
