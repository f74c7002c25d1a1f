"""Looking at a data set before training on it: what is there, what is wrong with it, and a faster copy of it.

plainvit data info photos/          plainvit data check photos/ --save bad.jsonl
plainvit data pack photos/ shards/ --side 320
"""

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from rich.console import Console, Group
from rich.progress import track
from rich.table import Table
from rich.text import Text

from plainvit.data import known
from plainvit.data.decode import DataError, ImageError, decode, has_exif, size
from plainvit.data.shards import INDEX, UNFINISHED
from plainvit.data.sources import SPLITS, AbsentSplit, Source, open_source, order_classes
from plainvit.data.transforms import resized
from plainvit.disk import make_folder, write_atomically

T = TypeVar("T")
SHARD_BYTES = 256 * 2**20
WIDEST = 65_500  # pixels along a side of a JPEG, by libjpeg


def splits(spec: str, data_root: Path | None = None) -> dict[str, Source]:
    """Every split that the data has. One that is there but damaged is an error: the others alone would hide it."""
    found: dict[str, Source] = {}
    wanted = known.SETS[spec].splits if spec in known.SETS else tuple(SPLITS)
    first: AbsentSplit | None = None
    for split in wanted:
        try:
            found[split] = open_source(spec, split, data_root=data_root)
        except AbsentSplit as error:
            first = first or error
    if not found:
        raise first or DataError(f"{spec} has no images")
    return found


def _classes(spec: str, parts: dict[str, Source]) -> tuple[str, ...]:
    """The classes of all splits. Where they are bare numbers, a split may end before the highest."""
    classes = max((source.classes for source in parts.values()), key=len)
    for split, source in parts.items():
        if source.classes != classes[: len(source.classes)]:
            raise DataError(f"{spec}: its {split} split names other classes than the others, so labels would not agree")
    return classes


def _each(work: Callable[[int], T], count: int, title: str) -> Iterator[T]:
    """work(0), work(1) ... by as many threads as there are cores, in order, with a bar."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        console, numbers = Console(stderr=True), iter(range(count))
        waiting = [pool.submit(work, number) for number in islice(numbers, 64)]
        for _ in track(range(count), title, transient=True, console=console, disable=not console.is_terminal):
            done = waiting.pop(0)
            waiting += [pool.submit(work, number) for number in islice(numbers, 1)]
            yield done.result()


def info(spec: str, parts: dict[str, Source]) -> dict[str, Any]:
    """Counts, classes and sizes of each split."""
    classes = _classes(spec, parts)
    by_number = list(classes) != sorted(classes) and list(classes) == order_classes(classes)
    report: dict[str, Any] = {"spec": spec, "classes": len(classes), "ordered_as_numbers": by_number, "splits": {}}
    for split, source in parts.items():
        sample = np.unique(np.linspace(0, len(source) - 1, min(len(source), 500)).astype(int))
        extents = np.array([extent for one in sample if (extent := _extent(source, int(one))) is not None])
        counts = np.bincount(source.labels[source.labels >= 0], minlength=len(source.classes))
        report["splits"][split] = {
            "images": len(source),
            "fingerprint": source.fingerprint(),
            "per_class": {"least": int(counts.min()), "most": int(counts.max())}
            if len(counts)
            else {"least": 0, "most": 0},
            "height": _spread(extents[:, 0]) if len(extents) else None,
            "width": _spread(extents[:, 1]) if len(extents) else None,
            "sizes_from": len(extents),
            "unreadable": len(sample) - len(extents),
        }
    return report


def _extent(source: Source, index: int) -> tuple[int, int] | None:
    try:
        return size(source.read(index))
    except (ImageError, OSError):
        return None


def _spread(values: np.ndarray) -> dict[str, int]:
    return {"least": int(values.min()), "median": int(np.median(values)), "most": int(values.max())}


def info_table(report: dict[str, Any]) -> Group:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("split", "images", "per class", "height", "width", "fingerprint"):
        shown.add_column(title, justify="left" if title == "split" else "right")
    for split, part in report["splits"].items():
        spread = [f"{s['least']}-{s['most']} ({s['median']})" if s else "?" for s in (part["height"], part["width"])]
        least, most = part["per_class"]["least"], part["per_class"]["most"]
        shown.add_row(split, f"{part['images']:,}", f"{least:,}-{most:,}", *spread, part["fingerprint"])
    order = ", in the order of their numbers" if report["ordered_as_numbers"] else ""
    lines: list[Any] = [
        Text.assemble((_plain(report["spec"]), "bold"), f": {report['classes']} classes{order}\n"),
        shown,
    ]
    for split, part in report["splits"].items():
        if part["unreadable"]:
            seen = part["unreadable"] + part["sizes_from"]
            lines.append(f"\n{split}: {part['unreadable']} of {seen} images cannot be read: run plainvit data check")
    lines += [Text(f"\ncontact sheet: {_plain(report['sheet'])}")] if "sheet" in report else []
    return Group(*lines, "\nheight and width: least-most (median), of up to 500 images a split")


def _plain(name: str) -> str:
    """A name on one line that any terminal can show; in a Text, its brackets are no markup either."""
    return repr(name)[1:-1]


def check(spec: str, data_root: Path | None = None) -> list[dict[str, Any]]:
    """Everything that is wrong or odd, one finding each: {split, name, problem, detail}."""
    findings: list[dict[str, Any]] = []
    seen: dict[bytes, tuple[str, str]] = {}
    for split, source in splits(spec, data_root).items():
        counts = np.bincount(source.labels[source.labels >= 0], minlength=len(source.classes))
        for label in np.flatnonzero(counts == 0):
            name = source.classes[label]
            findings.append({"split": split, "name": name, "problem": "empty class", "detail": "it has no images"})
        results = _each(lambda index, source=source: _look(source, index), len(source), f"{split}: reading")
        sizes = np.zeros((len(source), 2))
        for index, (digest, extent, problem) in enumerate(results):
            name = source.name(index)
            if problem:
                findings.append({"split": split, "name": name, "problem": "unreadable", "detail": problem})
                continue
            sizes[index] = extent
            if digest in seen:
                where, other = seen[digest]
                kind = "duplicate" if where == split else "duplicate across splits"
                findings.append(
                    {"split": split, "name": name, "problem": kind, "detail": f"same as {other} in {where}"}
                )
            seen.setdefault(digest, (split, name))
        findings += _outliers(source, split, sizes)
    return findings


def _look(source: Source, index: int) -> tuple[bytes, tuple[int, int], str]:
    """(content hash, size, problem)."""
    try:
        data = source.read(index)
        if isinstance(data, np.ndarray):
            return hashlib.sha256(data.tobytes()).digest(), (data.shape[0], data.shape[1]), ""
        pixels = decode(data)
        if data[:2] == b"\xff\xd8":
            simplejpeg.decode_jpeg(data, "GRAY")  # strict, so that damage which other readers forgive is seen
        return hashlib.sha256(data).digest(), (pixels.shape[0], pixels.shape[1]), ""
    except (ValueError, OSError) as error:  # ImageError among them
        return b"", (0, 0), (str(error).splitlines() or ["unknown"])[0]


def _outliers(source: Source, split: str, sizes: np.ndarray) -> Iterator[dict[str, Any]]:
    """Images far smaller than the others, or far longer than wide."""
    good = sizes[sizes[:, 0] > 0]
    typical = np.median(good.min(1)) if len(good) else 0
    for index, (height, width) in enumerate(sizes):
        if not height:
            continue
        detail = f"{int(width)} x {int(height)} pixels"
        if max(height, width) > 8 * min(height, width):
            yield {"split": split, "name": source.name(index), "problem": "odd shape", "detail": detail}
        elif min(height, width) < typical / 8:
            yield {"split": split, "name": source.name(index), "problem": "very small", "detail": detail}


def check_table(findings: list[dict[str, Any]]) -> Group:
    if not findings:
        return Group("nothing wrong found")
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding["problem"]] = counts.get(finding["problem"], 0) + 1
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("split", "name", "problem", "detail"):
        shown.add_column(title, overflow="fold")
    for finding in findings[:40]:
        shown.add_row(*(Text(_plain(finding[key])) for key in ("split", "name", "problem", "detail")))
    summary = ", ".join(f"{problem}: {count:,}" for problem, count in counts.items())
    return Group(shown, f"\n{summary}" + (" (the first 40 are shown)" if len(findings) > 40 else ""))


def pack(spec: str, target: Path, side: int = 320, quality: int = 90, data_root: Path | None = None) -> dict[str, Any]:
    """Tar shards with images shrunk to a short side, and an index; smaller JPEGs are taken over as they are."""
    if side < 1 or not 1 <= quality <= 100:
        raise ValueError(
            f"pack takes a side of at least 1 and a quality of 1 to 100, not side {side}, quality {quality}"
        )
    if target.exists() and any(target.iterdir()):
        raise DataError(f"{target} is not empty: pack into a new folder")
    parts = splits(spec, data_root)
    classes = _classes(spec, parts)
    make_folder(target)
    write_atomically(
        target / UNFINISHED, lambda beside: beside.write_text("plainvit data pack has not finished here\n")
    )
    columns: dict[str, list[Any]] = {
        name: [] for name in ("shard", "name", "offset", "length", "label", "height", "width", "crc32")
    }
    bad: list[dict[str, str]] = []
    for split, source in parts.items():
        _pack_split(split, source, target, side, quality, columns, bad)
    described = json.dumps({"schema": 1, "classes": list(classes), "spec": spec, "side": side})
    table = pa.table(columns).replace_schema_metadata({"plainvit": described})
    write_atomically(target / INDEX, lambda beside: _write_index(table, beside))
    (target / UNFINISHED).unlink()
    return {"images": len(columns["name"]), "left_out": bad, "bytes": sum(columns["length"]), "folder": str(target)}


def _write_index(table: pa.Table, path: Path) -> None:
    """To an open file: pyarrow takes a path such as pk:1/index.parquet for a URI."""
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd")


def _pack_split(
    split: str,
    source: Source,
    target: Path,
    side: int,
    quality: int,
    columns: dict[str, list[Any]],
    bad: list[dict[str, str]],
) -> None:
    results = enumerate(_each(lambda index: _shrunk(source, index, side, quality), len(source), f"{split}: packing"))
    number, more, before = 0, True, len(bad)
    while more:
        path = target / f"{split}-{number:05d}.tar"

        def write(beside: Path, path: Path = path) -> None:
            nonlocal more
            more = _write_shard(beside, path.name, source, results, columns, bad)

        write_atomically(path, write)
        number += 1
    if len(bad) - before == len(source):
        raise DataError(f"no image of the {split} split can be read; the first: {bad[before]['why']}")


def _write_shard(
    beside: Path,
    shard: str,
    source: Source,
    results: Iterator[tuple[int, tuple[bytes, tuple[int, int]] | str]],
    columns: dict[str, list[Any]],
    bad: list[dict[str, str]],
) -> bool:
    """Fills one tar; False when the images are used up."""
    with tarfile.open(beside, "w", format=tarfile.USTAR_FORMAT) as archive:
        for index, result in results:
            if isinstance(result, str):
                bad.append({"name": source.name(index), "why": result})
                continue
            data, (height, width) = result
            key = f"{index:09d}"
            offset = archive.offset + tarfile.BLOCKSIZE
            _add(archive, f"{key}.jpg", data)
            _add(archive, f"{key}.cls", str(int(source.labels[index])).encode())
            row = (
                shard,
                f"{shard}/{key}",
                offset,
                len(data),
                int(source.labels[index]),
                height,
                width,
                zlib.crc32(data),
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
            if archive.offset > SHARD_BYTES:
                return True
    return False


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _shrunk(source: Source, index: int, side: int, quality: int) -> tuple[bytes, tuple[int, int]] | str:
    """(JPEG, its size), or why there is none."""
    try:
        data = source.read(index)
        height, width = size(data)
        scale = min(side / min(height, width), 1)
        target = max(round(height * scale), 1), max(round(width * scale), 1)
        pixels = decode(data, target if scale < 1 else None)
        if scale == 1 and isinstance(data, bytes) and data[:2] == b"\xff\xd8" and not has_exif(data):
            return data, (height, width)
        if max(target) > WIDEST:
            raise ImageError(f"{target[1]} x {target[0]} is larger than a JPEG can be")
        small = resized(pixels, target).permute(1, 2, 0).contiguous().numpy()
        return simplejpeg.encode_jpeg(small, quality, "RGB", "420"), target
    except (ImageError, OSError) as error:
        return str(error)
