"""Write a copy of a data set that reads faster: tar shards (WebDataset) of resized JPEGs, with an index.

plainvit data pack photos/ shards/ --side 320
"""

import contextlib
import io
import itertools
import json
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import simplejpeg

from plainvit.data.check import merge_classes, open_all_splits
from plainvit.data.columns import write_table
from plainvit.data.content_hash import map_images
from plainvit.data.decode import DataError, ImageError, decode, get_image_size, has_exif
from plainvit.data.shards import INDEX, UNFINISHED
from plainvit.data.sources import Source
from plainvit.data.transforms import resize_image
from plainvit.disk import make_folder, write_atomically, write_text

SHARD_BYTES = 256 * 2**20
JPEG_SIDE_LIMIT = 65_500  # pixels, set by libjpeg
_Encoded = tuple[bytes, tuple[int, int]]  # a JPEG and its (height, width)


def pack(spec: str, target: Path, side: int = 320, quality: int = 90, data_root: Path | None = None) -> dict[str, Any]:
    """Write tar shards of JPEGs shrunk to a short side of `side`, and an index; smaller JPEGs are copied unchanged."""
    if side < 1 or not 1 <= quality <= 100:
        raise ValueError(f"--side must be at least 1 and --quality 1 to 100, got --side {side} --quality {quality}")
    if target.exists() and any(target.iterdir()):
        raise DataError(f"{target} is not empty: give an empty or new folder")
    sources = open_all_splits(spec, data_root)
    classes = merge_classes(spec, sources)
    make_folder(target)
    write_text(target / UNFINISHED, "plainvit data pack has not finished here\n")
    rows: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    for split, source in sources.items():
        encode = partial(_encode_small, source, side, quality)
        images = map_images(encode, source, f"{split}: packing {len(source):,} images")
        count = len(rows)
        unreadable += _write_shards(split, source, target, enumerate(images), rows)
        if len(rows) == count:
            raise DataError(f"no image of the {split} split can be read; the last error: {unreadable[-1]['why']}")
    metadata = json.dumps({"schema": 1, "classes": list(classes), "spec": spec, "side": side})
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"plainvit": metadata})
    write_atomically(target / INDEX, lambda temporary: write_table(table, temporary))
    (target / UNFINISHED).unlink()
    total = sum(row["length"] for row in rows)
    return {"images": len(rows), "left_out": unreadable, "bytes": total, "folder": str(target)}


def _write_shards(
    split: str, source: Source, target: Path, images: Iterator[tuple[int, _Encoded | str]], rows: list[dict[str, Any]]
) -> list[dict[str, str]]:
    """Write the tars of a split and add a row to the index for each image; returns those that cannot be read."""
    unreadable: list[dict[str, str]] = []
    names = (f"{split}-{number:05d}.tar" for number in itertools.count())
    shard, archive = "", None
    with contextlib.ExitStack() as stack:
        for index, image in images:
            if isinstance(image, str):
                unreadable.append({"name": source.name(index), "why": image})
                continue
            if archive is None or archive.offset > SHARD_BYTES:
                stack.close()
                shard = next(names)
                archive = stack.enter_context(tarfile.open(target / shard, "w", format=tarfile.USTAR_FORMAT))
            row = _add_image(archive, index, image, int(source.labels[index]))
            rows.append({"shard": shard, "name": f"{shard}/{index:09d}", **row})
    return unreadable


def _add_image(archive: tarfile.TarFile, index: int, image: _Encoded, label: int) -> dict[str, Any]:
    data, (height, width) = image
    offset = archive.offset + tarfile.BLOCKSIZE
    for suffix, content in (("jpg", data), ("cls", str(label).encode())):
        member = tarfile.TarInfo(f"{index:09d}.{suffix}")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    where = {"offset": offset, "length": len(data), "crc32": zlib.crc32(data)}
    return {**where, "label": label, "height": height, "width": width}


def _encode_small(source: Source, side: int, quality: int, index: int) -> _Encoded | str:
    """(JPEG, its size), or the reason why the image cannot be read."""
    try:
        data = source.read(index)
        height, width = get_image_size(data)
        scale = min(side / min(height, width), 1)
        target = max(round(height * scale), 1), max(round(width * scale), 1)
        pixels = decode(data, target if scale < 1 else None)
        if scale == 1 and isinstance(data, bytes) and data[:2] == b"\xff\xd8" and not has_exif(data):
            return data, (height, width)
        if max(target) > JPEG_SIDE_LIMIT:
            raise ImageError(f"{target[1]} x {target[0]} pixels exceed JPEG's limit of {JPEG_SIDE_LIMIT:,} a side")
        small = resize_image(pixels, target).permute(1, 2, 0).contiguous().numpy()
        return simplejpeg.encode_jpeg(small, quality, "RGB", "420"), target
    except (ImageError, OSError) as error:
        return str(error)
