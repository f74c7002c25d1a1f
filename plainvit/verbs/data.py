"""Images: data info, data check, data pack."""

import json as _json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from plainvit.verbs.words import Data, show

Target = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]


def info(data: Data, /, *, sheet: Path | None = None, data_root: Path | None = None, json: bool = False) -> None:
    """Counts, classes, sizes and fingerprint of each split; with --sheet, a page of thumbnails.

    Args:
        data: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        sheet: Write a contact sheet of the first split to this PNG.
        data_root: Where known sets lie, each in a folder of its name.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.data import check as look

    parts = look.splits(data, data_root)
    report = look.info(data, parts)
    if sheet:
        from plainvit.analyse.figures import save
        from plainvit.analyse.gallery import BYTES, class_sheet

        save(class_sheet(next(iter(parts.values()))), sheet, BYTES)
        report["sheet"] = str(sheet)
    show(report, None if json else look.info_table(report))


def check(
    data: Data,
    /,
    *,
    save: Path | None = None,
    data_root: Path | None = None,
    json: bool = False,
) -> None:
    """Corrupt files, duplicates within and across splits, empty classes, odd sizes. Exit code 3 if any is unreadable.

    Args:
        data: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        save: Write the findings to this file, one JSON object a line; it can be given back as a list to exclude.
        data_root: Where known sets lie, each in a folder of its name.
        json: Print JSON for machines instead of a table.
    """
    from plainvit.data import check as look
    from plainvit.disk import write_atomically

    findings = look.check(data, data_root)
    if save:
        lines = "".join(f"{_json.dumps(finding)}\n" for finding in findings)
        write_atomically(save, lambda beside: beside.write_text(lines, encoding="utf-8"))
    show(findings, None if json else look.check_table(findings))
    if any(finding["problem"] == "unreadable" for finding in findings):
        sys.exit(3)


def pack(
    data: Data,
    target: Target,
    /,
    *,
    side: int = 320,
    quality: int = 90,
    data_root: Path | None = None,
    json: bool = False,
) -> None:
    """A faster copy: tar shards (WebDataset) of JPEGs with a short side of --side, and an index for random access.

    Args:
        data: A folder, a list (labels.csv), shards, hf:org/dataset, a known set, digits or shapes.
        target: A new folder for the shards.
        side: Short side in pixels; smaller images stay as they are.
        quality: Of the JPEGs, 1 to 100.
        data_root: Where known sets lie, each in a folder of its name.
        json: Print JSON for machines instead of a line.
    """
    from rich.text import Text

    from plainvit.data import check as look

    packed = look.pack(data, target, side, quality, data_root)
    line = (
        f"{packed['images']:,} images, {packed['bytes'] / 2**20:,.1f} MiB, {len(packed['left_out'])} left out: {target}"
    )
    show(packed, None if json else Text(line))  # a folder's brackets are no markup
