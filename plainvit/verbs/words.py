"""What the verbs share: kinds of words, how they are read, how an answer is shown."""

import contextlib
import difflib
import inspect
import io
import json as _json
import logging
import re
import sys
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
UNSAID = arg(help_behavior_hint="")  # a default that the help has no word for
READING = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)


class Processes(NamedTuple):
    """What a command returns to be run in several processes; `cli.py`, which has its arguments, starts them."""

    count: int
    restarts: int
    device: str


@dataclass(frozen=True, kw_only=True)
class PixelFlags:
    """How a photo becomes the model's input, where the weights file does not say it or says it wrongly."""

    mean: Annotated[tuple[float, ...], UNSAID] = ()  # Mean of the pixels in [0, 1], one value or one per channel
    std: Annotated[tuple[float, ...], UNSAID] = ()  # Standard deviation of the pixels, one value or one per channel
    #: squash: to the size; crop: the short side, then a centre crop; squash-crop: squash, then a centre crop
    resize: Literal["squash", "crop", "squash-crop"] | None = None
    crop: float | None = None  # With a centre crop, the side that is kept as a share of the resized one
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None  # How pixels are resampled


PixelOptions = Annotated[PixelFlags, arg(name="")]


def given_pixels(flags: PixelFlags) -> dict[str, Any]:
    """The flags that were given, as the arguments of `load`."""
    values = {field.name: getattr(flags, field.name) for field in fields(PixelFlags)}
    return {name: value for name, value in values.items() if value not in (None, ())}


def parsed(what: Callable[..., Any], verb: str, args: list[str], **options: Any) -> Any:
    """What the words mean; where they mean nothing, one line in place of the parser's box."""
    said = io.StringIO()
    options.setdefault("config", READING)
    try:
        with contextlib.redirect_stderr(said):
            found, unknown = tyro.cli(what, prog=f"plainvit {verb}", args=args, return_unknown_args=True, **options)
    except SystemExit as end:
        if not end.code:
            raise
        box = [line.strip("\u2502 ") for line in said.getvalue().splitlines()]
        rule = next((at for at, line in enumerate(box) if at and line.startswith("\u2500")), len(box))
        words = " ".join(line for line in box[1:rule] if line and line[0] not in "\u256d\u2570")
        fail(words or "the words of this command cannot be read: see --help", 2)
    if unknown:
        refuse(unknown[0], what, verb, args, **options)
    return found


def refuse(word: str, what: Callable[..., Any], verb: str, args: list[str], **options: Any) -> NoReturn:
    """A word that has no place in the command, and what may have been meant."""
    said = io.StringIO()
    options.setdefault("config", READING)
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        tyro.cli(what, prog="", args=["--help"], **options)
    flags = re.findall(r"(?:\u2502 |  |, )(--[a-z][\w.-]*)", said.getvalue())
    if word.startswith("-"):
        fail(_unknown_flag(word.partition("=")[0].replace("_", "-"), flags, verb), 2)
    parts = [part for one in args for part in (one.split("=", 1) if one.startswith("--") else (one,))]
    before = parts[parts.index(word) - 1] if word in parts[1:] else ""
    if before in flags:
        fail(f"{before} takes no value, got {word!r}", 2)
    named = [one.name for one in inspect.signature(what).parameters.values() if one.kind is one.POSITIONAL_ONLY]
    takes = " and ".join(f"one {name.upper()}" for name in named or (["recipe"] if "default" in options else []))
    fail(f"{verb} takes {takes or 'flags alone'}: {word!r} is a word too many", 2)


def _unknown_flag(flag: str, known: Iterable[str], verb: str) -> str:
    """What is near it; of what is on already, how it is turned off."""
    part, dot, name = flag.rpartition(".")
    off = f"{part}.no-{name}" if dot else flag.replace("--", "--no-", 1)
    if off in known:
        return f"{flag} takes no value; {off} turns it off"
    others = [one for one in known if one != flag]
    near = [one for one in others if one.startswith(f"{flag}.")][:3] or difflib.get_close_matches(flag, others, 3, 0.5)
    said = ", ".join(near or difflib.get_close_matches(flag, others, 3, 0))
    return f"unknown flag {flag!r}; nearest: {said}{'' if near else f'; `plainvit {verb} --help` lists them all'}"


def chosen_workers(workers: int) -> int | None:
    """-1 leaves it to the machine, which the rooms call None."""
    if workers < -1:
        raise ValueError(f"--workers is a number of processes, or -1 for as many as suit the machine, got {workers}")
    return None if workers < 0 else workers


def fail(line: str, code: int) -> NoReturn:
    print(f"plainvit: {visible(line)}", file=sys.stderr)
    sys.exit(code)


def show(value: object, renderable: "RenderableType | None") -> None:
    """JSON where no table was made, else the table."""
    if renderable is None:
        print(_json.dumps(value, indent=2))
        return
    from rich.console import Console

    console = Console(markup=False, emoji=False)  # names of classes and files are shown as they are
    with console.capture() as shown:  # its own print ends the process with 1 where nobody reads on
        console.print(_Visible(renderable))
    print(shown.get(), end="")


class _Visible:
    """A table or a text whose characters cannot reach the terminal as commands, whoever wrote them."""

    def __init__(self, inner: "RenderableType") -> None:
        self.inner = inner

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Segment]":
        for segment in console.render(self.inner, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def show_records_visibly() -> None:
    """Log lines name files and classes too. A line is one line, whatever is in it."""
    logging.getLogger("plainvit").addFilter(_make_visible)


def _make_visible(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage().replace("\n", "\\n")), ()
    return True
