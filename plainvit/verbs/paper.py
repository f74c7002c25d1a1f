"""The paper's tables: paper."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from plainvit.verbs.words import show

Number = Annotated[int, Positional, arg(metavar="[TABLE]", help_behavior_hint="")]
Cards = Annotated[tuple[Path, ...], Positional, arg(metavar="[CARD ...]", help_behavior_hint="")]


def paper(table: Number = 5, cards: Cards = (), /, *, json: bool = False) -> None:
    """A table of results of the ViT paper, with your evaluations as further rows.

    Runs that were fine-tuned from the same weights share a row; several on one data set are printed as mean and
    standard deviation.

    Args:
        table: 2 (best models), 5 (by pre-training set), 6 (by compute), 7 (ResNets), 8 (positions) or 9 (VTAB-1k).
        cards: Folders that `plainvit evaluate`, `train` or `finetune` wrote.
        json: Print JSON for machines instead of a table.
    """
    from dataclasses import asdict

    from plainvit.evaluate import paper as tables

    found = tables.add_cards(tables.table(table), cards)
    show(asdict(found), None if json else tables.render(found))
