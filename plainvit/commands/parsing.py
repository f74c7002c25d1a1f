"""What the commands share: types of arguments, printing of results and of errors. The parser is in flags.py."""

import json as _json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from plainvit.config import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

Model = Data = Pattern = str


class Processes(NamedTuple):
    """Returned by a command that has to run in several processes; `cli.py` starts them with the same arguments."""

    number: int
    restarts: int
    device: str


@dataclass(frozen=True, kw_only=True)
class PixelFlags:
    """Preprocessing to use in place of what the weights file says."""

    mean: tuple[float, ...] = ()  # Mean of the pixels in [0, 1]: one value or one per channel
    std: tuple[float, ...] = ()  # Standard deviation of the pixels: one value or one each
    resize: Literal["squash", "crop", "squash-crop"] | None = None  # Resize: ignore aspect, centre-crop, or both
    crop: float | None = None  # Side kept by the centre crop, as a fraction of the resized side
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None  # Interpolation when resizing


def given_pixel_flags(flags: PixelFlags) -> dict[str, Any]:
    """The flags that were given, as arguments of `load`."""
    values = {name: getattr(flags, name) for name in PixelFlags.__dataclass_fields__}
    return {name: value for name, value in values.items() if value not in (None, ())}


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
