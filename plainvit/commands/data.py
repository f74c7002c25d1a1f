"""Datasets: data info, data check, data pack."""

import json as _json
import sys
from pathlib import Path

from plainvit.commands.parsing import Data, DataRoot, Json, check_output_file, print_result


def info(data: Data, /, *, data_root: DataRoot = None, json: Json = False) -> None:
    """Show the images, classes, sizes and fingerprint of each split."""
    from plainvit.data import check as checks

    report = checks.info(data, checks.open_all_splits(data, data_root))
    print_result(report, None if json else checks.info_table(report))


def check(data: Data, /, *, save: Path | None = None, data_root: DataRoot = None, json: Json = False) -> None:
    """Find corrupt files, duplicates, photos under two labels and empty classes.

    Exit code 3 if an image is unreadable.

    Args:
        save: Write the findings to this file, one JSON object per line (`plainvit train --exclude` reads it)
    """
    from plainvit.data import check as checks
    from plainvit.disk import write_text

    check_output_file("--save", save)
    findings = checks.check(data, data_root)
    if save:
        write_text(save, "".join(f"{_json.dumps(finding)}\n" for finding in findings))
    print_result(findings, None if json else checks.check_table(findings))
    if any(finding["problem"] == "unreadable" for finding in findings):
        sys.exit(3)


def pack(
    data: Data,
    target: Path,
    /,
    *,
    side: int = 320,
    quality: int = 90,
    data_root: DataRoot = None,
    json: Json = False,
) -> None:
    """Copy a dataset into tar shards (WebDataset) of resized JPEGs, which are faster to read.

    Args:
        target: New folder for the shards
        side: Short side in pixels; smaller images are not resized
        quality: JPEG quality, 1 to 100
    """
    from rich.text import Text

    from plainvit.config import pluralize
    from plainvit.data.pack import pack as write_shards

    packed = write_shards(data, target, side, quality, data_root)
    unreadable = len(packed["left_out"])
    line = f"packed {packed['images']:,} images ({_format_bytes(packed['bytes'])}) into {target}/"
    if unreadable:
        line += f"; {pluralize(unreadable, 'unreadable image')} left out (listed with --json)"
    print_result(packed, None if json else Text(line))  # brackets in a path are not markup


def _format_bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
