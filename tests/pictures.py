"""Images, folders and shards for the tests, made with Pillow, pyarrow and tarfile."""

import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from plainvit.data.decode import DataError
from plainvit.data.sources import Source, open_source


def real_data() -> Path:
    """The folder of real images; skips the test if there is none."""
    folder = os.environ.get("PLAINVIT_DATA")
    if not folder:
        pytest.skip("PLAINVIT_DATA is not set")
    return Path(folder)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Random pixels [height, width, 3], which do not compress; any two seeds differ."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth blobs of color, which JPEG compresses like a photograph."""
    coarse = noise(max(height // 8, 2), max(width // 8, 2), seed)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image | np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    """The pixels that Pillow reads, without EXIF rotation."""
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert(mode))


def png(seed: int = 0, height: int = 12, width: int = 12) -> bytes:
    return encode(noise(height, width, seed))


def jpeg(seed: int = 0, height: int = 24, width: int = 24, **options: Any) -> bytes:
    return encode(photo(height, width, seed), "JPEG", **options)


def plant(root: Path, files: Mapping[str, bytes]) -> Path:
    """Writes {relative path: content} below the root."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def plant_classes(root: Path, counts: Mapping[str, int], start: int = 0) -> Path:
    """Class folders, each with this number of different PNGs."""
    seeds = iter(range(start, start + sum(counts.values())))
    return plant(root, {f"{name}/{i}.png": png(next(seeds)) for name, count in counts.items() for i in range(count)})


def write_parquet(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any] | None,
    *,
    names: Sequence[str] = (),
    struct: bool = True,
    columns: tuple[str, str] = ("image", "label"),
    group: int = 1000,
) -> None:
    """A shard as the `datasets` library writes it: a struct of bytes and path, class names in the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [None if data is None else {"bytes": data, "path": None} for data in images] if struct else list(images)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if struct else pa.binary()
    table: dict[str, Any] = {columns[0]: pa.array(cells, kind)}
    if labels is not None:
        table[columns[1]] = pa.array(labels)
    features = {columns[1]: {"names": list(names), "_type": "ClassLabel"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
    pq.write_table(pa.table(table).replace_schema_metadata(about), path, row_group_size=group)


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def catch_error(spec: Path | str, split: str = "train", **options: Any) -> str:
    """The one line of the DataError that opening a source raises."""
    with pytest.raises(DataError) as caught:
        open_source(str(spec), split, **options)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text
