"""What the verbs share: kinds of words, how they are read, how an answer is shown."""

import contextlib
import io
import json as _json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

if TYPE_CHECKING:
    from rich.console import RenderableType

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Spec = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")]
Pattern = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATTERN")]


def parsed(what: Callable[..., Any], **options: Any) -> Any:
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
        fail(words or "the words of this command cannot be read: see --help", 2)


def fail(line: str, code: int) -> NoReturn:
    print(f"plainvit: {line}", file=sys.stderr)
    sys.exit(code)


def show(value: object, renderable: "RenderableType | None") -> None:
    """JSON where no table was made, else the table."""
    if renderable is None:
        print(_json.dumps(value, indent=2))
        return
    from rich.console import Console

    Console().print(renderable)
