"""Inspect a data set (info), and find damaged and duplicate images (check).

plainvit data info photos/          plainvit data check photos/ --save bad.jsonl
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from rich.console import Group
from rich.table import Table
from rich.text import Text

from plainvit.data.content_hash import map_images
from plainvit.data.decode import DataError, ImageError, decode
from plainvit.data.folders import order_classes
from plainvit.data.imagenet import readable_names
from plainvit.data.known import find_known
from plainvit.data.sources import SPLITS, MissingSplitError, Source, open_source
from plainvit.errors import first_line

NAMES_SHOWN = 6  # classes named by `data info`


def open_all_splits(spec: str, data_root: Path | None = None) -> dict[str, Source]:
    """Open every split of the data. A damaged split is an error; an absent one is left out."""
    sources: dict[str, Source] = {}
    missing: MissingSplitError | None = None
    known = find_known(spec)
    for split in known.splits if known else SPLITS:
        try:
            sources[split] = open_source(spec, split, data_root=data_root)
        except MissingSplitError as error:
            missing = missing or error
    if not sources and missing:
        raise missing
    return sources


def merge_classes(spec: str, sources: dict[str, Source]) -> tuple[str, ...]:
    """The classes of all splits. Where classes are only numbers, a split may lack the highest ones."""
    classes = max((source.classes for source in sources.values()), key=len)
    for split, source in sources.items():
        if source.classes != classes[: len(source.classes)]:
            raise DataError(f"{spec}: the {split} split has other classes than the rest: make them equal")
    return classes


def info(spec: str, sources: dict[str, Source]) -> dict[str, Any]:
    """Counts, classes and sizes of each split."""
    classes = merge_classes(spec, sources)
    by_number = list(classes) != sorted(classes) and list(classes) == order_classes(classes)
    report: dict[str, Any] = {"spec": spec, "classes": len(classes), "ordered_as_numbers": by_number, "splits": {}}
    report["class_names"] = list(readable_names(classes[:NAMES_SHOWN]))
    for split, source in sources.items():
        report["splits"][split] = _describe_split(source)
    return report


def _describe_split(source: Source) -> dict[str, Any]:
    """Counts and sizes; sizes are those of up to 500 images."""
    sample = source.sample(500)
    sizes = [_read_size(source, index) for index in sample]
    readable = np.array([size for size in sizes if size is not None])
    counts = count_images(source)
    return {
        "images": len(source),
        "fingerprint": source.fingerprint(),
        "per_class": {"least": int(min(counts, default=0)), "most": int(max(counts, default=0))},
        "height": _summarize(readable[:, 0]) if len(readable) else None,
        "width": _summarize(readable[:, 1]) if len(readable) else None,
        "sizes_from": len(readable),
        "unreadable": len(sample) - len(readable),
    }


def count_images(source: Source) -> np.ndarray:
    """Number of images of each class."""
    return np.bincount(source.labels[source.labels >= 0], minlength=len(source.classes))


def _read_size(source: Source, index: int) -> tuple[int, int] | None:
    try:
        return source.extent(index)
    except (ImageError, OSError):
        return None


def _summarize(values: np.ndarray) -> dict[str, int]:
    return {"least": int(values.min()), "median": int(np.median(values)), "most": int(values.max())}


def info_table(report: dict[str, Any]) -> Group:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("split", "images", "per class", "height", "width", "fingerprint"):
        shown.add_column(title, justify="left" if title == "split" else "right")
    for split, part in report["splits"].items():
        images, least, most = part["images"], part["per_class"]["least"], part["per_class"]["most"]
        height, width = _format_range(part["height"]), _format_range(part["width"])
        shown.add_row(split, f"{images:,}", f"{least:,}-{most:,}", height, width, part["fingerprint"])
    order = ", in numeric order" if report["ordered_as_numbers"] else ""
    names = ", ".join(map(_escape, report["class_names"])) + (", ..." if report["classes"] > NAMES_SHOWN else "")
    title = Text.assemble((_escape(report["spec"]), "bold"), f": {report['classes']:,} classes{order} ({names})\n")
    lines: list[Any] = [title, shown]
    for split, part in report["splits"].items():
        if part["unreadable"]:
            sampled = part["unreadable"] + part["sizes_from"]
            lines.append(f"\n{split}: {part['unreadable']} of {sampled} images cannot be read: run plainvit data check")
    return Group(*lines, "\nheight and width: min-max (median) of up to 500 images per split")


def _format_range(values: dict[str, int] | None) -> str:
    return f"{values['least']}-{values['most']} ({values['median']})" if values else "?"


def _escape(name: str) -> str:
    """Escape a name for one line of a terminal; put it into a Text so that brackets are not read as markup."""
    return repr(name)[1:-1]


def check(spec: str, data_root: Path | None = None) -> list[dict[str, Any]]:
    """Every problem of the data as one finding: {split, name, problem, detail}."""
    findings: list[dict[str, Any]] = []
    seen: dict[bytes, tuple[str, str, str]] = {}  # content hash -> (split, name, class) of the first image with it
    for split, source in open_all_splits(spec, data_root).items():
        empty = [source.classes[label] for label in np.flatnonzero(count_images(source) == 0)]
        findings += [_make_finding(split, name, "empty class", "it has no images") for name in empty]
        results = map_images(partial(_inspect, source), source, f"{split}: reading {len(source):,} images")
        for index, (digest, problem) in enumerate(results):
            name = source.name(index)
            if problem:
                findings.append(_make_finding(split, name, "unreadable", problem))
                continue
            label = source.classes[source.labels[index]] if source.labels[index] >= 0 else ""
            if digest in seen:
                findings += _compare_copies((split, name, label), seen[digest])
            seen.setdefault(digest, (split, name, label))
    return findings


def _compare_copies(image: tuple[str, str, str], first: tuple[str, str, str]) -> Iterator[dict[str, Any]]:
    """Findings for an image (split, name, class) that equals an earlier one: both, if one has a wrong label."""
    split, name, label = image
    other_split, other, other_label = first
    if label == other_label or not label or not other_label:
        kind = "duplicate" if other_split == split else "duplicate across splits"
        yield _make_finding(split, name, kind, f"same as {other} in {other_split}")
        return
    for (split, name, label), (other_split, other, other_label) in ((first, image), (image, first)):
        detail = f"same as {other} in {other_split}: {label!r} here, {other_label!r} there"
        yield _make_finding(split, name, "two labels", detail)


def _make_finding(split: str, name: str, problem: str, detail: str) -> dict[str, Any]:
    return {"split": split, "name": name, "problem": problem, "detail": detail}


def _inspect(source: Source, index: int) -> tuple[bytes, str]:
    """Read and decode one image: (content hash, problem)."""
    try:
        data = source.read(index)
        decode(data)
        if isinstance(data, bytes) and data[:2] == b"\xff\xd8":
            simplejpeg.decode_jpeg(data, "GRAY")  # strict: finds damage that other decoders ignore
        return hashlib.sha256(data if isinstance(data, bytes) else data.tobytes()).digest(), ""
    except (ValueError, OSError) as error:  # ImageError among them
        return b"", first_line(error)


def check_table(findings: list[dict[str, Any]]) -> Group:
    if not findings:
        return Group("no problems found")
    counts = Counter(finding["problem"] for finding in findings)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("split", "name", "problem", "detail"):
        shown.add_column(title, overflow="fold")
    for finding in findings[:40]:
        shown.add_row(*(Text(_escape(finding[key])) for key in ("split", "name", "problem", "detail")))
    summary = ", ".join(f"{problem}: {count:,}" for problem, count in counts.items())
    return Group(shown, f"\n{summary}" + (" (first 40 shown)" if len(findings) > 40 else ""))
