"""The paper's tables: paper."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from plainvit.verbs.words import show

Number = Annotated[int, Positional, arg(metavar="[TABLE]", help_behavior_hint="")]
Cards = Annotated[tuple[Path, ...], Positional, arg(metavar="[CARD ...]", help_behavior_hint="")]


def paper(table: Number = 0, cards: Cards = (), /, *, json: bool = False) -> None:
    """Tables 2 and 5 to 9 of the ViT paper, with what you have evaluated below in the same columns.

    Without a number, the list of tables. Fine-tuned weights that began from the same ones share a row, and several
    cards of one data set are printed as their mean and standard deviation. Below it is said in what yours were made
    otherwise: images, pixels, steps, number of runs.

    Args:
        table: 2, 5, 6, 7, 8 or 9.
        cards: Folders that `plainvit evaluate`, `finetune` or `vtab` wrote; for Table 8 the study positions.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.evaluate import paper as tables

    if not table:
        titles = [{"table": number, "title": one.title} for number, one in tables.tables().items()]
        show(titles, None if json else tables.contents())
        return
    found = tables.with_cards(tables.table(table), cards)
    show(tables.as_json(found), None if json else tables.shown(found))
