"""Decode once: cached pixels against decoding each time; the memory for them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import encode, photo, plant, real_data
from PIL import Image

from plainvit.config import Augment
from plainvit.data import cache, cores_and_memory
from plainvit.data.cache import CachedSource, open_cache
from plainvit.data.cores_and_memory import available_memory, memory_budget
from plainvit.data.decode import decode
from plainvit.data.loader import Loader
from plainvit.data.sources import Source, Subset, open_source

NOTHING = Augment(crop="none", flip=0.0)


def make_photos(root: Path, sizes: list[tuple[int, int]]) -> Source:
    files = {f"{'ab'[i % 2]}/{i}.jpg": encode(photo(*size, seed=i), "JPEG") for i, size in enumerate(sizes)}
    return open_source(str(plant(root, files)))


def read_batches(source: Source, *, workers: int = 0, **options: Any) -> torch.Tensor:
    options = {"batch": 4, "size": (32, 32), "augment": Augment(), "seed": 3, "mode": "cached", **options}
    return torch.cat([batch.images for batch in Loader(source, workers=workers, **options).batches(0, 6)])


@pytest.mark.parametrize(
    ("extent", "crop", "stored"),
    [
        ((500, 375), Augment(area=(0.08, 1.0)), (500, 375)),  # less than half of the pixels would be saved
        ((4000, 3000), Augment(area=(0.08, 1.0)), (597, 448)),  # the short side is twice the output: a quarter's area
        ((4000, 3000), Augment(area=(0.5, 1.0)), (422, 317)),  # the smallest crop has 224 pixels
        ((3000, 4000), Augment(crop="random", resize=256), (256, 341)),
        ((4000, 3000), NOTHING, (299, 224)),
        ((4000, 3000), Augment(crop="pad"), (4000, 3000)),
        ((1, 30000), Augment(), (1, 30000)),
    ],
)
def test_an_image_keeps_the_pixels_that_crops_need(
    extent: tuple[int, int], crop: Augment, stored: tuple[int, int]
) -> None:
    assert cache._find_stored_size(extent, cache._find_least_size(crop, (224, 224))) == stored


def test_an_image_is_decoded_once_by_the_workers_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_photos(tmp_path, [(40, 50)] * 5)
    images = open_cache(source, Augment(), (32, 32))
    assert images is not None
    worker = os.fork()
    if not worker:
        os._exit(0 if [images.read(index).shape for index in range(5)] == [(40, 50, 3)] * 5 else 1)
    assert os.waitpid(worker, 0)[1] == 0
    monkeypatch.setattr(cache, "shrink", lambda *_: pytest.fail("it is decoded again"))
    for index in range(5):
        assert np.array_equal(images.read(index), source.image(index))


def test_batches_do_not_depend_on_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that resumes on a smaller machine sees the same pixels."""
    source = make_photos(tmp_path, [(300, 400)] * 7 + [(30, 40), (20, 900)])
    expected = read_batches(source)
    monkeypatch.setattr(cache, "memory_budget", lambda: 0)
    assert open_cache(source, Augment(), (32, 32)) is None
    assert torch.equal(read_batches(source, workers=2), expected)


def test_an_image_larger_than_its_slot_is_decoded_each_time(tmp_path: Path) -> None:
    source = make_photos(tmp_path, [(40, 50), (8, 8)])
    images = CachedSource(source, (32, 32), slot=200)
    for index in (0, 0, 1, 1):
        assert np.array_equal(images.read(index), source.image(index))
    assert images._sizes.tolist() == [[0, 0, 0, 0], [8, 8, 8, 8]]


def test_images_that_need_no_decoding_are_not_cached() -> None:
    assert open_cache(open_source("shapes:size=200,count=10"), Augment(), (32, 32)) is None


def test_shrunk_images_are_close_to_the_originals() -> None:
    """Real photos of which 192 pixels are kept, as crops of 96 pixels: within two gray levels on average."""
    source = open_source(str(real_data() / "imagenet-photos"))
    source = Subset(source, np.array([i for i in range(len(source)) if min(source.extent(i)) > 300][:16]))
    options: dict[str, Any] = {"size": (96, 96), "augment": Augment(area=(0.25, 1.0)), "batch": 4}
    apart = read_batches(source, **options).int() - read_batches(source, mode="streamed", **options).int()
    assert apart.abs().float().mean() < 2
    small = open_cache(source, options["augment"], (96, 96))
    assert small is not None
    assert all(min(small.read(index).shape[:2]) == 192 for index in range(len(source)))


def test_photos_are_stored_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(photo(400, 600), "JPEG", exif=exif)
    assert cache.shrink(data, (1e9, 1e9)).shape == decode(data).shape == (600, 400, 3)
    assert cache.shrink(data, (100, 100)).shape == (150, 100, 3)


# Free memory, from planted files of the kernel ------------------------------------------------------------------------


def plant_cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(cores_and_memory, "CGROUP", folder)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("900000\n")
    (folder / "memory.stat").write_text("anon 100000\nfile 800000\ninactive_file 700000\n")


def test_the_page_cache_of_a_container_is_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a data set was read once, it fills the container."""
    plant_cgroup(tmp_path, monkeypatch, "1000000")
    assert available_memory() == 800_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert memory_budget() == pytest.approx(80_000)


def test_memory_is_known_without_a_limit_or_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_cgroup(tmp_path, monkeypatch, "max")
    assert available_memory() > 2**20

    def read_text(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", read_text)  # as on macOS
    assert available_memory() > 2**20
