"""The input pipeline compared with torchvision's and timm's, on the same images, in the same run.

    python -m bench.input --data DIR [--json FILE] [--files 1000000]

DIR holds `imagenet-photos` and `tiny-imagenet` as parquet shards. The photos are repeated as hard links to make an
epoch; every system makes 224 px training batches of them (Inception crop, flip) with two worker processes. Peers use
their own standard transforms, which end in normalised floats; plainvit ends in uint8, and its model normalises.
"""

import os
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import plainvit
from bench.measure import interleaved, make_parser, report, seconds_a_call, summary
from plainvit.config import Augment
from plainvit.data import pack
from plainvit.data.loader import Loader
from plainvit.data.mix import mix, soft_labels
from plainvit.data.resident import decode_all
from plainvit.data.sources import open_source

BATCH, WORKERS, SIDE = 64, 2, 224


def images_per_second(batches: Iterator[Any], count: Callable[[Any], int], warm: int = 6) -> float:
    """From the batch after the warm-up to the last, so that starting the workers does not count."""
    start, images = 0.0, 0
    for number, batch in enumerate(batches):
        if number == warm:
            start, images = time.perf_counter(), 0
        images += count(batch)
    return images / (time.perf_counter() - start)


def write_folder(spec: str, folder: Path, copies: int) -> int:
    """A set as a folder of class folders, each image under several names."""
    source = open_source(spec)
    for index in range(len(source)):
        home = folder / f"class{int(source.labels[index]):04d}"
        home.mkdir(parents=True, exist_ok=True)
        first = home / f"{index:05d}-000.jpg"
        data = source.read(index)
        assert isinstance(data, bytes)
        first.write_bytes(data)
        for copy in range(1, copies):
            os.link(first, home / f"{index:05d}-{copy:03d}.jpg")
    return len(source) * copies


def ours(folder: Path) -> float:
    source = open_source(str(folder))
    loader = Loader(source, batch=BATCH, size=(SIDE, SIDE), augment=Augment(), workers=WORKERS, mode="streamed")
    return images_per_second(loader.batches(0, len(source) // BATCH), lambda batch: len(batch.labels))


def torchvision_loader(folder: Path) -> float:
    from torchvision import datasets, transforms

    chain = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    chain.append(transforms.Normalize([0.5] * 3, [0.5] * 3))
    dataset = datasets.ImageFolder(str(folder), transforms.Compose(chain))
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)
    return images_per_second(iter(loader), lambda batch: len(batch[1]))


def timm_loader(folder: Path) -> float:
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(folder))
    shape = (3, SIDE, SIDE)
    loader = create_loader(dataset, shape, BATCH, is_training=True, num_workers=WORKERS, use_prefetcher=False)
    return images_per_second(iter(loader), lambda batch: len(batch[1]))


def photos(data: Path, work: Path, repeats: int) -> list[dict[str, Any]]:
    originals, packed, unpacked = work / "originals", work / "packed", work / "unpacked"
    count = write_folder(str(data / "imagenet-photos"), originals, 48)
    pack.pack(str(originals), packed, side=320)
    small = work / "small"
    pack.pack(str(data / "imagenet-photos"), small, side=320)
    write_folder(str(small), unpacked, 48)
    runs = {
        "plainvit, original files": lambda: ours(originals),
        "torchvision, original files": lambda: torchvision_loader(originals),
        "timm, original files": lambda: timm_loader(originals),
        "plainvit, packed shards (320)": lambda: ours(packed),
        "torchvision, same packed images": lambda: torchvision_loader(unpacked),
        "timm, same packed images": lambda: timm_loader(unpacked),
    }
    found = {name: summary(values) for name, values in interleaved(runs, repeats).items()}
    median = {name: value["median"] for name, value in found.items()}

    def ratios(name: str, peers: tuple[str, ...]) -> str:
        return ", ".join(f"{median[name] / median[peer]:.2f}x {peer}" for peer in peers)

    original = ("torchvision, original files", "timm, original files")
    same = ("torchvision, same packed images", "timm, same packed images")
    remarks = {
        "plainvit, original files": ratios("plainvit, original files", original),
        "plainvit, packed shards (320)": ratios("plainvit, packed shards (320)", original + same),
    }
    unit = f"img/s ({count} images an epoch)"
    return [{"what": name, **value, "unit": unit, "remark": remarks.get(name, "")} for name, value in found.items()]


def index(work: Path, files: int, repeats: int) -> list[dict[str, Any]]:
    folder = work / "many"
    classes = max(files // 1000, 1)
    for label in range(classes):
        home = folder / f"class{label:04d}"
        home.mkdir(parents=True)
        for number in range(files // classes):
            os.close(os.open(home / f"ILSVRC2012_val_{number:08d}.jpg", os.O_CREAT | os.O_WRONLY))
    open_source(str(folder))  # warm
    seconds = [seconds_a_call(partial(open_source, str(folder)), 1, "cpu") for _ in range(repeats)]
    tracemalloc.start()
    source = open_source(str(folder))
    held = tracemalloc.get_traced_memory()[0] / len(source)
    tracemalloc.stop()
    shutil.rmtree(folder)
    rows = [{"what": f"index of {len(source):,} files", **summary(seconds), "unit": "s", "remark": "warm; limit 10"}]
    return [*rows, {"what": "memory of that index", **summary([held]), "unit": "bytes/image", "remark": "limit 500"}]


def resident(data: Path, repeats: int) -> list[dict[str, Any]]:
    source = open_source("tiny-imagenet", data_root=data)
    decode = lambda: decode_all(open_source("tiny-imagenet", data_root=data), {})  # noqa: E731
    seconds = [seconds_a_call(decode, 1, "cpu") for _ in range(repeats)]
    remark = "limit 15 on two cores"
    return [
        {"what": f"tiny-imagenet, {len(source):,} images decoded", **summary(seconds), "unit": "s", "remark": remark}
    ]


def on_gpu(data: Path, repeats: int) -> list[dict[str, Any]]:
    """Crop, flip, colour, MixUp/CutMix of resident images, with nothing else on the device."""
    augment = Augment(colour=0.3, mixup=0.2, cutmix=1.0)
    source = open_source("tiny-imagenet", data_root=data)
    loader = Loader(source, batch=1024, size=(64, 64), augment=augment, device="cuda", mode="resident")
    rates: list[float] = []
    for _ in range(repeats):
        steps = 200
        for step, batch in enumerate(loader.batches(0, steps + 20)):
            if step == 20:
                torch.cuda.synchronize()
                start = time.perf_counter()
            mix(batch.images, soft_labels(batch.labels, 200), augment, 0, step)
        torch.cuda.synchronize()
        rates.append(steps * 1024 / (time.perf_counter() - start))
    shares = [100 * (1024 / rate) / seconds for rate, seconds in zip(rates, step_seconds(repeats), strict=True)]
    remark = "ViT-S/8, bf16, compiled, AdamW, batch 1024; limit 5"
    return [
        {"what": "resident augmentation, 64 px", **summary(rates), "unit": "img/s", "remark": "at least 300,000"},
        {"what": "its share of the training step", **summary(shares), "unit": "%", "remark": remark},
    ]


def step_seconds(repeats: int) -> list[float]:
    """One training step of the model that such batches feed, on a batch that is already there."""
    model = plainvit.create("ViT-S/8", classes=200, image_size=64, device="cuda")
    step = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images = torch.rand(1024, 3, 64, 64, device="cuda")
    targets = soft_labels(torch.arange(1024, device="cuda") % 200, 200)
    found: list[float] = []
    for number in range(20 + 20 * repeats):
        if number >= 20 and (number - 20) % 20 == 0:
            torch.cuda.synchronize()
            found.append(time.perf_counter())
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(step(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    ends = [*found[1:], time.perf_counter()]
    return [(end - start) / 20 for start, end in zip(found, ends, strict=True)]


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--data", type=Path, required=True, help="folder with imagenet-photos and tiny-imagenet")
    parser.add_argument(
        "--files", type=int, default=1_000_000, help="files of the folder that is indexed; 0: leave it out"
    )
    parser.add_argument("--only", choices=("photos", "index", "resident", "gpu"), help="one part alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        parts = {
            "photos": partial(photos, options.data, Path(work)),
            "index": partial(index, Path(work), options.files),
            "resident": partial(resident, options.data),
            "gpu": partial(on_gpu, options.data),
        }
        skipped = {"index": not options.files, "gpu": not torch.cuda.is_available()}
        wanted = [name for name in parts if options.only in (None, name) and not skipped.get(name)]
        rows = [row for name in wanted for row in parts[name](options.repeats)]
    report("bench.input", "input pipeline", rows, options.json)


if __name__ == "__main__":
    main()
