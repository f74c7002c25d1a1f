"""The input pipeline compared with those of torchvision and timm, on the same images.

    python -m bench.input --data DIR [--json FILE]

The 48 photos of imagenet-photos are repeated as hard links to make an epoch. Every system makes training batches of
224 px (Inception crop, flip) with two worker processes: plainvit as uint8, since its model normalizes, the peers as
normalized floats by their default transforms.
"""

import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.measure import make_parser, report, run_interleaved, summarize, time_calls
from bench.photos import BY_CLASS, write_images
from plainvit.config import Augment
from plainvit.data import pack
from plainvit.data.loader import Loader
from plainvit.data.sources import open_source

BATCH, WORKERS, SIDE, COPIES = 64, 2, 224, 48
WARM_UP_BATCHES = 6
INDEXED_FILES = 1_000_000


# Photos ---------------------------------------------------------------------------------------------------------------


def measure_rate(batches: Iterator[Any], count: Callable[[Any], int]) -> float:
    """Images/s after the first batches, so that the start of the workers does not count."""
    start, images = 0.0, 0
    for number, batch in enumerate(batches):
        if number == WARM_UP_BATCHES:
            start, images = time.perf_counter(), 0
        images += count(batch)
    return images / (time.perf_counter() - start)


def measure_plainvit(folder: Path) -> float:
    source = open_source(str(folder))
    loader = Loader(source, batch=BATCH, size=(SIDE, SIDE), augment=Augment(), workers=WORKERS, mode="streamed")
    return measure_rate(loader.batches(0, len(source) // BATCH), lambda batch: len(batch.labels))


def measure_torchvision(folder: Path) -> float:
    from torchvision import datasets, transforms

    chain = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    chain.append(transforms.Normalize([0.5] * 3, [0.5] * 3))
    dataset = datasets.ImageFolder(str(folder), transforms.Compose(chain))
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)
    return measure_rate(iter(loader), lambda batch: len(batch[1]))


def measure_timm(folder: Path) -> float:
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(folder))
    options: dict[str, Any] = {"is_training": True, "num_workers": WORKERS, "use_prefetcher": False}
    loader = create_loader(dataset, (3, SIDE, SIDE), BATCH, **options)
    return measure_rate(iter(loader), lambda batch: len(batch[1]))


def measure_photos(data: Path, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Original files, and photos that were packed into shards with a short side of 320 px."""
    photos = str(data / "imagenet-photos")
    originals, packed, small, unpacked = (folder / name for name in ("originals", "packed", "small", "unpacked"))
    count = write_images(open_source(photos), originals, f"{BY_CLASS}.jpg", COPIES)
    pack.pack(str(originals), packed, side=320)
    pack.pack(photos, small, side=320)
    write_images(open_source(str(small)), unpacked, f"{BY_CLASS}.jpg", COPIES)
    runs = {
        "plainvit, original files": lambda: measure_plainvit(originals),
        "torchvision, original files": lambda: measure_torchvision(originals),
        "timm, original files": lambda: measure_timm(originals),
        "plainvit, packed shards (320)": lambda: measure_plainvit(packed),
        "torchvision, same packed images": lambda: measure_torchvision(unpacked),
        "timm, same packed images": lambda: measure_timm(unpacked),
    }
    results = {name: summarize(values) for name, values in run_interleaved(runs, repeats).items()}
    unit = f"img/s ({count} images per epoch)"
    rows = {name: {"name": name, **values, "unit": unit} for name, values in results.items()}
    names = list(rows)
    for name, peers in ((names[0], names[1:3]), (names[3], names[1:3] + names[4:])):
        ratios = (f"{rows[name]['median'] / rows[peer]['median']:.2f}x {peer}" for peer in peers)
        rows[name]["remark"] = ", ".join(ratios)
    return list(rows.values())


# Index ----------------------------------------------------------------------------------------------------------------


def measure_index(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Time and memory to open a folder of a million files, with a warm cache."""
    classes = INDEXED_FILES // 1000
    for label in range(classes):
        class_folder = folder / f"class{label:04d}"
        class_folder.mkdir(parents=True)
        for number in range(INDEXED_FILES // classes):
            (class_folder / f"ILSVRC2012_val_{number:08d}.jpg").touch()
    open_source(str(folder))  # warm up
    seconds = [time_calls(partial(open_source, str(folder)), 1, "cpu") for _ in range(repeats)]
    tracemalloc.start()
    source = open_source(str(folder))
    size = tracemalloc.get_traced_memory()[0] / len(source)
    tracemalloc.stop()
    shutil.rmtree(folder)
    return [
        {"name": f"index of {len(source):,} files", **summarize(seconds), "unit": "s", "remark": "target 10"},
        {"name": "memory of the index", **summarize([size]), "unit": "bytes/image", "remark": "target 500"},
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, repeats=5, data="imagenet-photos")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        rows = measure_photos(args.data, Path(name), args.repeats)
        rows += measure_index(Path(name) / "index", args.repeats)
    report("bench.input", arguments, args.json, "input pipeline", rows)


if __name__ == "__main__":
    main()
