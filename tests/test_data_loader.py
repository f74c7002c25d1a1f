"""Loading: any number of workers, processes and restarts gives the bytes that one process reads in order."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as VF
from pictures import jpeg, noise, photo, plant, png, write_parquet
from tiny import mostly_slow
from torch import Tensor

from plainvit.config import Augment, Preprocess
from plainvit.data import tables
from plainvit.data.decode import DataError
from plainvit.data.generated import ArraySource
from plainvit.data.loader import Batch, Loader, evaluation_batches
from plainvit.data.order import permutation
from plainvit.data.pack import pack
from plainvit.data.resident import resize_boxes
from plainvit.data.sources import Source, Subset, open_source
from plainvit.data.transforms import as_floats
from plainvit.data.workers import default_workers, inference_workers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # torch counts the cores
LEVEL = 1 / 255 + 1e-5
EVERYTHING = Augment(randaugment=(2, 12), three_augment=True, color=0.3, erase=0.4)
Stream = list[Batch]


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """A test that waits for ever fails instead."""

    def stop(*_: object) -> None:
        raise TimeoutError("this test hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(90)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """37 files of many sizes, formats and classes."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number in range(37):
        height, width = random.integers(20, 90, 2)
        image = photo(int(height), int(width), seed=number)
        path = root / f"class{number % 5}" / f"{number}.{'png' if number % 4 == 0 else 'jpg'}"
        path.parent.mkdir(exist_ok=True)
        image.save(path)
    return open_source(str(root))


def stream(
    source: Source,
    start: int = 0,
    stop: int = 6,
    *,
    batch: int = 12,
    world: int = 1,
    side: int = 32,
    augment: Augment = EVERYTHING,
    **options: Any,
) -> Stream:
    """Global batches: the shares of all processes, one after the other."""
    options = {"mode": "streamed", "workers": 0, "seed": 11, **options}
    ranks = [
        Loader(source, batch=batch, size=(side, side), augment=augment, rank=rank, world_size=world, **options).batches(
            start, stop
        )
        for rank in range(world)
    ]
    return [concatenate(shares) for shares in zip(*ranks, strict=True)]


def concatenate(shares: tuple[Batch, ...]) -> Batch:
    return Batch(
        torch.cat([share.images for share in shares]),
        torch.cat([share.labels for share in shares]),
        np.concatenate([share.index for share in shares]),
        [flaw for share in shares for flaw in share.bad],
    )


def samples(batches: Stream) -> tuple[Tensor, Tensor, list[int]]:
    whole = concatenate(tuple(batches))
    return whole.images, whole.labels, whole.index.tolist()


def assert_same(found: Stream, expected: Stream) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.images.dtype is other.images.dtype
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert np.array_equal(one.index, other.index)


# The same stream, however it is made ----------------------------------------------------------------------------------


def test_order_is_that_of_the_permutations(photos: Source) -> None:
    expected = np.concatenate([permutation(11, epoch, 37) for epoch in range(3)])
    assert samples(stream(photos, stop=9))[2] == expected[: 9 * 12].tolist()
    far = 37 * 10**6  # the step at which epoch 12 * 10**6 starts
    assert samples(stream(photos, far, far + 1))[2] == permutation(11, 12 * 10**6, 37)[:12].tolist()


@pytest.mark.parametrize(
    ("start", "workers", "world", "mode"),
    [(0, 1, 1, "streamed"), (3, 3, 2, "streamed"), (1, 0, 4, "streamed"), (2, 2, 2, "cached"), (0, 0, 4, "resident")],
)
def test_stream_does_not_depend_on_start_workers_or_processes(
    photos: Source, start: int, workers: int, world: int, mode: str
) -> None:
    for augment in (EVERYTHING, Augment(repeats=3)):
        found = stream(photos, start, 6, world=world, mode=mode, workers=workers, augment=augment)
        assert_same(found, stream(photos, mode=mode, augment=augment)[start:])


@pytest.mark.parametrize("augment", [Augment(erase=0.3, color=0.2), Augment(crop="pad", randaugment=(2, 10))])
@pytest.mark.parametrize(("start", "world"), [(0, 1), (1, 1), (2, 2), (4, 1)])
def test_making_several_steps_at_once_gives_the_same_batches(
    photos: Source, monkeypatch: pytest.MonkeyPatch, augment: Augment, start: int, world: int
) -> None:
    """As on a GPU: in threes, from the middle of three, and ending there."""
    apart = stream(photos, start, 5, augment=augment, mode="resident")
    monkeypatch.setattr("plainvit.data.loader.steps_at_once", lambda *_: 3)
    assert_same(stream(photos, start, 5, augment=augment, mode="resident", world=world), apart)


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_samples_do_not_depend_on_the_batch_size(photos: Source, mode: str) -> None:
    """Another batch size: at the same position the same sample with the same pixels."""
    expected = samples(stream(photos, stop=5, batch=12, mode=mode))
    for batch in (1, 4, 30):
        found = samples(stream(photos, stop=60 // batch, batch=batch, mode=mode))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert found[2] == expected[2]


def test_the_global_generator_is_neither_used_nor_changed(photos: Source) -> None:
    """Dropout draws from it: were it moved by a loader, a resumed run would not equal one that was never stopped."""
    expected = stream(photos, stop=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        for workers in (0, 2):
            assert_same(stream(photos, stop=2, workers=workers), expected)
            assert torch.equal(torch.get_rng_state(), before)
        stream(photos, stop=2, mode="resident")
        assert torch.equal(torch.get_rng_state(), before)


def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Source]:
    """Every kind of source, of which some hold files, maps or locks that a worker inherits."""
    plant(tmp_path / "folder", {f"{'ab'[i % 2]}/{i}.jpg": jpeg(i) for i in range(20)})
    write_parquet(
        tmp_path / "parquet" / "train-00.parquet", [png(i) for i in range(20)], [i % 3 for i in range(20)], group=3
    )
    pack(str(tmp_path / "folder"), tmp_path / "tars")
    monkeypatch.setattr(tables, "MEMORY_LIMIT", 0)
    folders = {name: open_source(str(tmp_path / name)) for name in ("folder", "parquet", "tars")}
    made = {"shapes": open_source("shapes:size=16,count=20"), "digits": Subset(open_source("digits"), np.arange(20))}
    return folders | made


def test_workers_can_read_every_kind_of_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in kinds(tmp_path, monkeypatch).values():
        source.image(3)  # so that a file is open before the workers are
        expected = stream(source, stop=4, side=16, augment=Augment())
        assert_same(stream(source, stop=4, side=16, augment=Augment(), workers=2), expected)


def wait_for_children() -> None:
    """Returns once all worker processes have ended; `nothing_hangs` fails a test that waits for ever."""
    while multiprocessing.active_children():
        time.sleep(0.02)


def test_closing_the_loader_ends_its_workers(photos: Source) -> None:
    loader = Loader(photos, batch=4, size=(8, 8), augment=Augment(), workers=2, mode="streamed")
    batches = loader.batches()
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    wait_for_children()


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_repeated_augmentation_gives_other_crops_of_one_image(mode: str) -> None:
    source = open_source("shapes:size=32,count=24")
    images, _, index = samples(stream(source, stop=2, augment=Augment(repeats=3), mode=mode))
    thrice = np.array(index).reshape(-1, 3)
    assert (thrice == thrice[:, :1]).all()
    assert thrice[:, 0].tolist() == permutation(11, 0, 24)[:8].tolist()
    for first, second, third in images.view(8, 3, *images.shape[1:]):
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)


def test_a_batch_that_is_no_multiple_of_the_processes_is_rejected(photos: Source) -> None:
    with pytest.raises(ValueError, match=r"--batch 10 .* 4 processes"):
        stream(photos, batch=10, world=4)


# Workers that die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["waiting", "computing"])
def test_killing_a_worker_does_not_change_the_stream(photos: Source, pause: float) -> None:
    """While the loop waits for a batch, and while it computes."""
    loader = Loader(photos, batch=12, size=(32, 32), augment=EVERYTHING, seed=11, workers=2, mode="streamed")
    found: Stream = []
    for batch in loader.batches(0, 16):
        found.append(batch)
        if len(found) == 3:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
            time.sleep(pause)
    assert_same(found, stream(photos, stop=16))


class Trap(ArraySource):
    """Images in memory; to read some of them in a worker does something."""

    def __init__(self, strike: Callable[[], None], at: int) -> None:
        super().__init__(noise(8, 8)[None].repeat(40, 0), np.zeros(40), ("a",), np.arange(40))
        self.strike, self.at, self.home = strike, at, os.getpid()

    def read(self, index: int) -> np.ndarray:
        if index >= self.at and os.getpid() != self.home:
            self.strike()
        return super().read(index)


def test_an_exception_in_a_worker_is_raised_unchanged() -> None:
    def strike() -> None:
        raise RuntimeError("a fault of the program")

    with pytest.raises(RuntimeError, match="a fault of the program"):
        stream(Trap(strike, 17), stop=10, batch=4, side=8, augment=Augment(), workers=2)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="asks Linux for the state of a process")
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Also while they read, as from a disk that hangs: torch itself looks for the parent between two items only."""

    def hang() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(600)

    context = multiprocessing.get_context("fork")
    parent = context.Process(target=lambda: stream(Trap(hang, 0), workers=2))
    parent.start()
    while len(workers := [int(note.name) for note in tmp_path.iterdir()]) < 2:  # nothing_hangs ends what hangs
        time.sleep(0.02)
    assert all(map(is_running, workers))
    parent.kill()
    parent.join()
    try:
        while any(map(is_running, workers)):
            time.sleep(0.02)
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)


# Streamed and resident ------------------------------------------------------------------------------------------------


def difference(source: Source, augment: Augment, side: int, steps: int = 4) -> Tensor:
    """Between the two ways, per pixel; samples and labels are the same."""
    options = {"stop": steps, "batch": 32, "side": side, "augment": augment}
    streamed, resident = (samples(stream(source, mode=mode, **options)) for mode in ("streamed", "resident"))
    assert streamed[2] == resident[2]
    assert torch.equal(streamed[1], resident[1])
    assert as_floats(resident[0]).min() >= 0
    assert as_floats(resident[0]).max() <= 1
    return (as_floats(streamed[0]) - as_floats(resident[0])).abs()


@pytest.mark.parametrize(
    "augment",
    [Augment(), Augment(crop="inception-tf"), Augment(erase=0.5), Augment(color=0.4)],
    ids=["torchvision", "tensorflow", "erasing", "color"],
)
def test_resident_crops_equal_streamed_ones(augment: Augment) -> None:
    """Crops are enlarged to 64 pixels, so both are bilinear; streamed ones are rounded to gray levels.

    Brightness, contrast and saturation may each enlarge the rounding by 1.4. Crops that are reduced differ by a level
    on average.
    """
    source = open_source("shapes:size=64,count=40")
    assert difference(source, augment, 64, 2).max() <= (1 + augment.color) ** 3 * LEVEL
    assert difference(source, Augment(crop="random", resize=80), 64, 2).mean() <= LEVEL


@pytest.mark.parametrize(
    "augment",
    [Augment(crop="pad"), Augment(crop="none"), Augment(crop="pad", pad=9, color=0.4, erase=0.5)],
    ids=["pad", "none", "color"],
)
def test_crops_without_resizing_are_equal_in_both_modes(augment: Augment) -> None:
    source = open_source("shapes:size=64,count=40")
    assert difference(source, augment, 64, 2).max() == 0
    if not augment.color:
        batches = [stream(source, stop=1, side=64, augment=augment, mode=mode)[0] for mode in ("streamed", "resident")]
        assert all(batch.images.dtype is torch.uint8 for batch in batches)


class Sizes(Source):
    """Photos or white images of given sizes."""

    def __init__(self, shapes: list[tuple[int, int]], *, is_white: bool = False) -> None:
        self.labels, self.classes, self.shapes = np.zeros(len(shapes), np.int32), ("a",), shapes
        self.is_white = is_white

    def read(self, index: int) -> np.ndarray:
        return np.maximum(photo(*self.shapes[index], seed=index), 255 * self.is_white).astype(np.uint8)

    def name(self, index: int) -> str:
        return str(index)


def test_padding_of_resident_images_is_never_visible() -> None:
    """White images of many sizes on a black canvas stay white, whatever is cut from them."""
    source = Sizes([(8 + i, 40 - i) for i in range(30)], is_white=True)
    for augment in (Augment(), Augment(crop="inception-tf"), Augment(crop="none"), Augment(crop="random", resize=40)):
        for one in stream(source, stop=5, side=32, augment=augment, mode="resident"):
            assert as_floats(one.images).min() > 0.999


@pytest.mark.parametrize(("out", "pad"), [((64, 64), 9), ((24, 50), 0), ((224, 160), 9)])
def test_boxes_are_resized_as_torchvision_resizes_a_crop(out: tuple[int, int], pad: int) -> None:
    """Smaller and larger, within 0.01 gray levels; a padded box reaches into zeros around the image."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 120, 200), dtype=torch.uint8, generator=generator)
    boxes = [[-pad, -pad, 120, 200], [10, 20, 50, 33], [3, 5 + pad, 117, 195], [100 - pad, 0, 20 + pad, 200]]
    found = resize_boxes(images, torch.tensor(boxes), out, pad) * 255
    for image, one, (top, left, height, width) in zip(images, found, boxes, strict=True):
        crop = VF.crop(VF.pad(image.double(), [pad] * 4), top + pad, left + pad, height, width)
        assert (one - VF.resize(crop, list(out), antialias=True)).abs().max() < 0.01


def test_mode_is_chosen_by_image_size(photos: Source) -> None:
    def chosen(source: Source, augment: Augment | None = None, **options: Any) -> bool:
        options = {"workers": 0, **options}
        made = Loader(source, batch=2, size=(32, 32), augment=augment or Augment(), **options)
        return made.resident is not None

    assert chosen(photos)
    assert chosen(open_source("digits"))
    assert not chosen(photos, mode="streamed")
    assert not chosen(open_source("shapes:size=400,count=4"))
    assert chosen(open_source("shapes:size=400,count=4"), mode="resident")
    assert chosen(photos, EVERYTHING)
    assert not chosen(Sizes([(600, 600) if i == 3 else (16, 16) for i in range(400)]))  # one large image among small


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "processes", "expected", "on_cpu"),
    [(16, None, 15, 8), (12, None, 11, 6), (16, "4", 3, 2), (2, "8", 1, 1), (2, "", 1, 1)],
)
def test_workers_divide_the_cores_of_the_job_among_processes(
    monkeypatch: pytest.MonkeyPatch, photos: Source, cores: int, processes: str | None, expected: int, on_cpu: int
) -> None:
    """A model that predicts on the CPU keeps half of its cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert default_workers() == inference_workers(10_000, "cuda") == expected
    assert (inference_workers(10_000, "cpu"), inference_workers(10, "cuda")) == (on_cpu, 0)
    assert Loader(photos, batch=4, size=(8, 8), augment=Augment(), mode="streamed").workers == expected


@pytest.mark.parametrize(("batch", "world"), [(1, 3), (7, 2), (64, 1), (7, 40)])
def test_every_image_is_evaluated_once(photos: Source, batch: int, world: int) -> None:
    options: dict[str, Any] = {"size": (24, 24), "preprocess": Preprocess(resize="crop", crop=0.9), "world_size": world}
    ranks = [list(evaluation_batches(photos, batch=batch, rank=rank, **options)) for rank in range(world)]
    index = [one for batches in ranks for made in batches for one in made.index.tolist()]
    assert sorted(index) == list(range(37))
    for batches in ranks:
        order = [one for made in batches for one in made.index.tolist()]
        assert order == sorted(order)
        assert all(len(made.images) == batch for made in batches[:-1])
        for made in batches:
            assert made.labels.tolist() == photos.labels[made.index].tolist()
            assert len(made.images) == len(made.labels) == len(made.index) > 0


# Bad images -----------------------------------------------------------------------------------------------------------

SOUND = jpeg(1, 40, 40, quality=95)
FLAWS: dict[str, bytes | None] = {
    "empty": b"",
    "html": b"<html>404</html>",
    "cut in the pixels": SOUND[: len(SOUND) * 2 // 3],
    "cut in the header": SOUND[:100],
    "cut png": png(1, 40, 40)[:2000],
    "missing": None,
    "bomb": b"P6 12000 12000 255\n" + bytes(64),
}


def flawed_set(root: Path, count: int, flaws: dict[int, bytes | None]) -> Source:
    """PNGs named by their index, some of them replaced; None is removed after the folder was listed."""
    plant(root, {f"{'ab'[i >= count // 2]}/{i:04}.png": png(i) for i in range(count)})
    source = open_source(str(root))
    for index, data in flaws.items():
        path = root / source.name(index)
        path.unlink() if data is None else path.write_bytes(data)
    return source


@pytest.mark.parametrize("mode", ["streamed", "resident"])
@pytest.mark.parametrize("flaw", mostly_slow(FLAWS, 3))
def test_a_bad_image_is_replaced_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flaw: str, mode: str
) -> None:
    """The next image stands in with its own label; the flaw is counted once and told once, with its file and reason."""
    source = flawed_set(tmp_path, 200, {17: FLAWS[flaw], 99: FLAWS[flaw]})
    loader = Loader(source, batch=40, size=(8, 8), augment=Augment(), seed=11, workers=0, mode=mode)
    with caplog.at_level(logging.WARNING, "plainvit"):
        found = samples(list(loader.batches(0, 10)))
    order = np.concatenate([permutation(11, epoch, 200) for epoch in range(2)])
    expected = np.where(order == 17, 18, np.where(order == 99, 100, order))
    assert found[2] == expected.tolist()
    assert found[1].tolist() == source.labels[expected].tolist()
    assert sorted(loader.bad) == [17, 99]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all(any(source.name(index) in line for line in told) for index in (17, 99))


@pytest.mark.parametrize("flaw", mostly_slow(["cut in the pixels", "html"], 2))
def test_replacements_do_not_depend_on_workers_or_processes(tmp_path: Path, flaw: str) -> None:
    """Neighbors that are bad too, and the last image, whose next is the first."""
    source = flawed_set(tmp_path, 500, {20: FLAWS[flaw], 21: FLAWS[flaw], 499: FLAWS[flaw]})
    options = {"stop": 6, "batch": 100, "side": 8, "augment": Augment()}
    expected = stream(source, **options)
    assert {20, 21, 499} & set(samples(expected)[2]) == set()
    assert_same(stream(source, workers=3, **options), expected)
    assert_same(stream(source, world=2, **options), expected)
    assert_same(stream(source, start=3, **options), expected[3:])
    resident = stream(source, mode="resident", **options)
    assert samples(resident)[2] == samples(expected)[2]


@pytest.mark.parametrize(("workers", "mode"), [(0, "streamed"), (2, "streamed"), (0, "resident")])
def test_over_one_percent_of_bad_images_end_training(tmp_path: Path, workers: int, mode: str) -> None:
    flaw = FLAWS["cut in the pixels"]
    options = {"stop": 6, "batch": 50, "side": 8, "augment": Augment(), "workers": workers, "mode": mode}
    source = flawed_set(tmp_path, 300, {10 * i: flaw for i in range(3)})
    assert len(stream(source, **options)) == 6
    (tmp_path / source.name(30)).write_bytes(flaw or b"")
    with pytest.raises(DataError, match="4 of 300"):
        stream(source, **options)


@pytest.mark.parametrize(
    ("flaw", "mode", "workers"),
    [("cut in the pixels", "streamed", 2), ("html", "auto", 0), ("cut in the header", "resident", 0)],
)
def test_a_set_without_readable_images_is_a_data_error(tmp_path: Path, flaw: str, mode: str, workers: int) -> None:
    source = flawed_set(tmp_path, 60, dict.fromkeys(range(60), FLAWS[flaw]))
    with pytest.raises(DataError, match="image"):
        stream(source, batch=4, side=8, augment=Augment(), mode=mode, workers=workers)


@pytest.mark.parametrize("crop", ["inception", "inception-tf", "random", "pad", "none"])
@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_images_of_one_pixel_width_can_be_trained_on(crop: str, mode: str) -> None:
    source = Sizes([(1, 300), (300, 1), (1, 1), (2, 2), (1, 2), (20, 20)])
    loader = Loader(source, batch=6, size=(16, 16), augment=Augment(crop=crop, resize=20), workers=0, mode=mode)
    for one in loader.batches(0, 5):
        assert one.images.shape == (6, 3, 16, 16)
    assert loader.bad == {}


def test_a_loader_can_be_read_in_a_thread(photos: Source) -> None:
    """As a prefetching loop does; signals are no help there."""
    found: Stream = []
    thread = threading.Thread(target=lambda: found.extend(stream(photos, workers=2)))
    thread.start()
    thread.join()
    assert_same(found, stream(photos))
