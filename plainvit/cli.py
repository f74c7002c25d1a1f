"""Words -> a call: `plainvit VERB ...`. Each verb is imported inside its function, so --help never loads torch.

Exit codes: 0 done, 2 usage, 3 data, 4 diverged, 5 resources, 130/143 signals.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from plainvit import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType


Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
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
    name: Name, /, *, image: Path | None = None, image_size: int = 224, seed: int = 0, json: bool = False
) -> None:
    """One model in detail: its settings, and every named intermediate of one real forward pass.

    The names are those that a Trace takes: model(images, Trace("block*/attention")).

    Args:
        name: A model's name, such as ViT-B/16; `plainvit models` lists them.
        image: A photo to run it on; without one, a colour gradient.
        image_size: Height and width of the images in pixels.
        seed: Draws the weights.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.evaluate import forward

    report = forward.report(name, image, image_size, seed)
    _show(report, None if json else forward.tables(report))


VERBS: dict[str, Callable[..., None]] = {"models": models, "inspect": inspect}


def main(arguments: list[str] | None = None) -> None:
    """The command. Errors that a user can mend are one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"plainvit {__version__}")
        return
    from plainvit import device

    device.prepare()
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="plainvit",
            args=arguments,
            description="Vision Transformers, from raw images to an answer.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except (ValueError, OSError) as error:
        print(f"plainvit: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _show(value: object, renderable: "RenderableType | None") -> None:
    """JSON where no table was made, else the table."""
    if renderable is None:
        print(json.dumps(value, indent=2))
        return
    from rich.console import Console

    Console().print(renderable)
