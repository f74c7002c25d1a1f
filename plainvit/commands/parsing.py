"""Arguments of the commands: shared types, parsing with one-line errors, printing of results."""

import contextlib
import difflib
import inspect
import io
import itertools
import json as _json
import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

import tyro
from tyro.conf import Positional, arg

from plainvit.config import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

Model = Annotated[str, Positional, arg(metavar="MODEL")]
Data = Annotated[str, Positional, arg(metavar="DATA")]
Pattern = Annotated[str, Positional, arg(metavar="[PATTERN]", help_behavior_hint="")]
HIDE_DEFAULT = arg(help_behavior_hint="")  # for defaults that mean "not given"
PARSER_CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)


class Processes(NamedTuple):
    """Returned by a command that has to run in several processes; `cli.py` starts them with the same arguments."""

    number: int
    restarts: int
    device: str


@dataclass(frozen=True, kw_only=True)
class PixelFlags:
    """Preprocessing to use in place of what the weights file says."""

    mean: Annotated[tuple[float, ...], HIDE_DEFAULT] = ()  # Mean of the pixels in [0, 1]: one value or one per channel
    std: Annotated[tuple[float, ...], HIDE_DEFAULT] = ()  # Standard deviation of the pixels: one value or one each
    resize: Literal["squash", "crop", "squash-crop"] | None = None  # Resize: ignore aspect, centre-crop, or both
    crop: float | None = None  # Side kept by the centre crop, as a fraction of the resized side
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None  # Interpolation when resizing


PixelOptions = Annotated[PixelFlags, arg(name="")]


def given_pixel_flags(flags: PixelFlags) -> dict[str, Any]:
    """The flags that were given, as arguments of `load`."""
    values = {field.name: getattr(flags, field.name) for field in fields(PixelFlags)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def parse_arguments(target: Callable[..., Any], command: str, args: list[str], **options: Any) -> Any:
    """Build `target` from the arguments. An error is one line in place of tyro's box."""
    stderr = io.StringIO()
    options.setdefault("config", PARSER_CONFIG)
    try:
        with contextlib.redirect_stderr(stderr):
            result, unknown = tyro.cli(
                target, prog=f"plainvit {command}", args=args, return_unknown_args=True, **options
            )
    except SystemExit as end:
        if not end.code:
            raise
        text = _extract_message(stderr.getvalue())
        exit_with_error(text or f"invalid arguments: see `plainvit {command} --help`", 2)
    if unknown:
        reject_argument(unknown[0], target, command, args, **options)
    return result


def _extract_message(box: str) -> str:
    """The first paragraph below the title of tyro's box, which is drawn in Unicode or in ASCII."""
    lines = [re.sub(r"^[\u2500-\u257f -]+$", "", line).strip("\u2502 ") for line in box.splitlines()[1:]]
    below_rule = itertools.dropwhile(lambda line: not line, lines)
    return " ".join(itertools.takewhile(bool, below_rule))


def print_short_help(target: Callable[..., Any], command: str, flags: Iterable[str], **options: Any) -> None:
    """Help with only the given arguments, each with its default."""
    text = _capture_help(target, command, **options)
    usage, _, description = text.partition("\n positional arguments")[0].partition("\n")
    width = min(shutil.get_terminal_size().columns, 120)
    print(usage)
    for paragraph in description.strip().split("\n\n"):
        print(f"\n{textwrap.fill(paragraph, width)}")
    print()
    entries = {entry.split()[0]: (entry, explanation) for entry, explanation in _list_flags(text)}
    for entry, explanation in (entries[flag] for flag in flags):
        stated = re.sub(r" \(default: (|''|None|False)\)$", "", explanation)
        print(textwrap.fill(stated, width, initial_indent=f"  {entry:20} ", subsequent_indent=" " * 23))
    print(f"\nEvery setting is a flag: `plainvit {command} RECIPE --help-all` lists all with the recipe's values.")


def _capture_help(target: Callable[..., Any], command: str, **options: Any) -> str:
    stdout = io.StringIO()
    options.setdefault("config", PARSER_CONFIG)
    with contextlib.redirect_stdout(stdout), contextlib.suppress(SystemExit):
        tyro.cli(target, prog=f"plainvit {command}", args=["--help"], **options)
    return stdout.getvalue()


def _list_flags(text: str) -> list[tuple[str, str]]:
    """Each flag of a captured help text, as in ("--batch INT", "Images per step (default: 512)")."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if entry := re.match(r"  ((?:--?[a-z]|\[[A-Z]).*?)(?: {2,}(\S.*))?$", line.rstrip()):
            found.append([entry[1], entry[2] or ""])
        elif found and line.startswith("     "):
            found[-1][1] += f" {line.strip()}"
    return [(entry, explanation.strip()) for entry, explanation in found]


def reject_argument(word: str, target: Callable[..., Any], command: str, args: list[str], **options: Any) -> NoReturn:
    """Exit because of an argument that the command does not take, with what may have been meant."""
    entries = " ".join(entry for entry, _ in _list_flags(_capture_help(target, command, **options)))
    flags = re.findall(r"--[a-z][\w.-]*", entries)
    if word.startswith("-"):
        help_flag = "--help-all" if "default" in options else "--help"
        flag = word.partition("=")[0].replace("_", "-")
        exit_with_error(_describe_unknown_flag(flag, flags, f"plainvit {command} {help_flag}"), 2)
    parts = [part for one in args for part in (one.split("=", 1) if one.startswith("--") else (one,))]
    previous = parts[parts.index(word) - 1] if word in parts[1:] else ""
    if previous in flags:
        exit_with_error(f"{previous} takes no value, got {word!r}", 2)
    parameters = inspect.signature(target).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
    positional = positional or (["recipe"] if "default" in options else [])
    accepted = " and ".join(f"one {name.upper()}" for name in positional) or "only flags"
    exit_with_error(f"unexpected argument {word!r}: {command} takes {accepted}", 2)


def _describe_unknown_flag(flag: str, known: Iterable[str], help_command: str) -> str:
    """The nearest flags; for a flag that is on by default, how to turn it off."""
    part, dot, name = flag.rpartition(".")
    off = f"{part}.no-{name}" if dot else flag.replace("--", "--no-", 1)
    if off in known:
        return f"{flag} takes no value and is on by default: {off} turns it off"
    others = [one for one in known if one != flag]
    near = [one for one in others if one.startswith(f"{flag}.")][:3] or difflib.get_close_matches(flag, others, 3, 0.5)
    listed = ", ".join(near or difflib.get_close_matches(flag, others, 3, 0))
    return f"unknown flag {flag!r}; nearest: {listed}{'' if near else f'; `{help_command}` lists all'}"


def resolve_workers(workers: int) -> int | None:
    """The value of --workers as the Python API takes it: None for -1."""
    if workers < -1:
        raise ValueError(f"--workers must be at least 0, or -1 to choose by the number of cores; got {workers}")
    return None if workers < 0 else workers


def exit_with_error(line: str, code: int) -> NoReturn:
    print(f"plainvit: {visible(line)}", file=sys.stderr)
    sys.exit(code)


def print_result(value: object, renderable: "RenderableType | None") -> None:
    """Print the table, or the value as JSON if there is no table."""
    if renderable is None:
        print(_json.dumps(value, indent=2))
        return
    from rich.console import Console

    console = Console(markup=False, emoji=False)  # names of classes and files may contain brackets and colons
    with console.capture() as captured:  # rich's own print exits with 1 on a closed pipe
        console.print(_Escaped(renderable))
    print(captured.get(), end="")


class _Escaped:
    """A renderable whose text cannot send control characters to the terminal."""

    def __init__(self, inner: "RenderableType") -> None:
        self.inner = inner

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Segment]":
        for segment in console.render(self.inner, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def escape_log_records() -> None:
    """Escape control characters and newlines in log lines, which name files and classes too."""
    logging.getLogger("plainvit").addFilter(_escape_record)


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage().replace("\n", "\\n")), ()
    return True
