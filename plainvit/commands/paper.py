"""The paper's tables: paper."""

from pathlib import Path

from plainvit.commands.parsing import Json, print_result


def paper(table: int = 5, runs: tuple[Path, ...] = (), /, *, json: Json = False) -> None:
    """Print a results table of the ViT paper, with your evaluations as additional rows.

    Runs fine-tuned from the same weights share a row; several runs on one dataset are shown as mean and standard
    deviation.

    Args:
        table: Number: 2 best models, 5 pre-training dataset, 6 compute, 7 ResNets, 8 position embedding, 9 VTAB-1k
        runs: Run folders or output folders of `plainvit evaluate`
    """
    from dataclasses import asdict

    from plainvit.evaluate import paper as tables

    report = tables.add_cards(tables.table(table), runs)
    print_result(asdict(report), None if json else tables.render(report))
