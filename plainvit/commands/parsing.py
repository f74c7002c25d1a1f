"""What the commands share: types of arguments, printing of results and of errors. The parser is in flags.py."""

import json as _json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

from plainvit.config import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

# Types of arguments that several commands have, with their help texts
Model = Annotated[str, "Run folder, weights file of any library, hf:org/name, or name from `plainvit weights`"]
Data = Annotated[str, "Folder, list (labels.csv), shards, hf:org/dataset, known dataset, digits or shapes"]
DataRoot = Annotated[Path | None, "Folder with the known datasets, each in a folder of its name"]
Device = Annotated[str, "Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one"]
Heads = Annotated[int | None, "Number of attention heads, if the weights do not say it"]
ImageSize = Annotated[int | None, "Height and width in pixels; the position embedding is resampled"]
ClassNames = Annotated[Path | None, "File with the names of the model's classes: one per line, or a JSON list"]
TextHead = Annotated[Path | None, "Classify by these text embeddings of class names (zero-shot; a .safetensors file)"]
Json = Annotated[bool, "Print JSON instead of a table"]


class Processes(NamedTuple):
    """Returned by a command that has to run in several processes; `cli.py` starts them with the same arguments."""

    number: int
    restarts: int
    device: str


@dataclass(frozen=True, kw_only=True)
class PixelFlags:
    """Preprocessing to use in place of what the weights file says."""

    mean: tuple[float, ...] = ()  # Mean that is subtracted from pixels in [0, 1]: one value or one per channel
    std: tuple[float, ...] = ()  # Standard deviation that pixels are divided by: one value or one per channel
    resize: Literal["squash", "crop", "squash-crop"] | None = None  # How to resize: ignore the aspect, crop, or both
    crop: float | None = None  # Side kept by the center crop, as a fraction of the resized side
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None = None  # Interpolation when resizing
    antialias: Literal["on", "off"] | None = None  # Antialias when an image is made smaller (lanczos always does)


@dataclass(frozen=True, kw_only=True)
class InferenceFlags(PixelFlags):
    """How images are read and run through the model."""

    batch: int = 64  # Images per forward pass
    image_size: ImageSize = None
    device: Device = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # Precision of the computation; auto: bf16 on a GPU, else fp32
    workers: int = -1  # Number of processes that read images; -1 chooses by the number of cores
    data_root: DataRoot = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"--batch must be at least 1, got {self.batch}")
        if self.workers < -1:
            raise ValueError(
                f"--workers must be at least 0, or -1 to choose by the number of cores; got {self.workers}"
            )

    @property
    def processes(self) -> int | None:
        """--workers for the Python API: None in place of -1."""
        return None if self.workers < 0 else self.workers


def collect_pixel_flags(flags: PixelFlags) -> dict[str, Any]:
    """The flags that were given, as arguments of `load`."""
    values = {name: getattr(flags, name) for name in PixelFlags.__dataclass_fields__}
    given = {name: value for name, value in values.items() if value not in (None, ())}
    return given | ({"antialias": flags.antialias == "on"} if flags.antialias else {})


def check_output_file(flag: str, path: Path | None) -> None:
    """Raise ValueError if a file cannot be written, before any work."""
    if path and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}; create it first"
        raise ValueError(f"cannot write {flag} {path}: {problem}")


def exit_with_error(line: str, code: int) -> NoReturn:
    print(f"plainvit: {visible(line)}", file=sys.stderr)
    sys.exit(code)


def print_result(value: object, renderable: "RenderableType | None") -> None:
    """Print the table, or the value as JSON if there is no table."""
    if renderable is None:
        print(_json.dumps(value, indent=2))
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    # Files and other programs read whole lines; names may contain brackets and colons
    console = Console(markup=False, emoji=False, width=width)
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
