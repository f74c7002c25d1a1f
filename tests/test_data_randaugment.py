"""RandAugment and 3-Augment: each operation on each image against torchvision's own, level by level."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as VF
from pictures import noise, photo, real_data
from tiny import mostly_slow
from torch import Tensor
from torchvision.transforms import v2

from plainvit.config import Augment, Preprocess
from plainvit.data.loader import Loader
from plainvit.data.order import uniforms
from plainvit.data.randaugment import FILL, OPERATIONS, SIGMAS, RandAugment, three_augment
from plainvit.data.sources import Source, open_source
from plainvit.data.transforms import NUM_UNIFORMS, TRIES, augment_batch, crop_and_resize, crop_boxes, preprocess_image

BOTH = Augment(randaugment=(2, 15), three_augment=True)
THEIRS = v2.RandAugment(fill=[FILL] * 3)
SPACE: dict[str, tuple[Callable[..., Any], bool]] = THEIRS._AUGMENTATION_SPACE


def by_torchvision(image: Tensor, name: str, value: float) -> Tensor:
    return THEIRS._apply_image_or_video_transform(image, name, value, THEIRS.interpolation, THEIRS._fill)


def their_value(name: str, magnitude: int, size: tuple[int, int], negative: bool) -> float:
    table, signed = SPACE[name]
    values = table(31, *size)
    return 0.0 if values is None else float(values[magnitude]) * (-1 if signed and negative else 1)


def drawing(name: str, negative: bool, count: int) -> Tensor:
    """The uniforms with which every sample draws this operation."""
    u = torch.full((count, 4), 0.25 if negative else 0.75)
    u[:, 2] = (OPERATIONS.index(name) + 0.5) / len(OPERATIONS)
    return u


def draws(count: int, operations: int = 2, seed: int = 0) -> Tensor:
    count_of_each = NUM_UNIFORMS + 2 + 2 * operations
    return uniforms(seed, torch.zeros(count, dtype=torch.long), torch.arange(count), count_of_each)[:, NUM_UNIFORMS:]


def drawn(u: Tensor) -> list[list[tuple[str, bool]]]:
    """What each sample draws, pass by pass: an operation, and whether it is the negative one."""
    rows = u[:, 2:].reshape(len(u), -1, 2).tolist()
    return [[(OPERATIONS[int(14 * which)], sign < 0.5) for which, sign in row] for row in rows]


@cache
def pictures(kind: str) -> Tensor:
    """Real images as uint8 [B, 3, H, W], and what real images seldom are."""
    if kind == "extreme":
        flat = [np.full((24, 24, 3), level, np.uint8) for level in (0, 1, 127, 128, 254, 255)]
        pairs = enumerate([(0, 255), (7, 9), (254, 255)])
        two = [np.where(noise(24, 24, i) < 40 * i + 20, np.uint8(a), np.uint8(b)) for i, (a, b) in pairs]
        gray = np.repeat(noise(24, 24)[..., :1], 3, 2)
        one = np.zeros((24, 24, 3), np.uint8)
        one[3, 4] = 200
        return stacked([*flat, *two, gray, one, noise(24, 24)])
    if kind == "digits":
        return stacked([open_source("digits").image(i) for i in range(12)])
    if kind == "photos":
        return prepared(open_source(str(real_data() / "imagenet-photos")), (224, 224), 4)
    source = open_source("tiny-imagenet", "val", data_root=real_data())
    return prepared(source, {"tiny": (64, 64), "odd": (33, 33), "wide": (40, 72)}[kind], 16)


def stacked(images: list[np.ndarray]) -> Tensor:
    return torch.stack([torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images])


def prepared(source: Source, size: tuple[int, int], count: int) -> Tensor:
    places = np.linspace(0, len(source) - 1, count).astype(int)
    return torch.stack([preprocess_image(source.read(int(i)), Preprocess(), size) for i in places])


def size_of(images: Tensor) -> tuple[int, int]:
    return images.shape[2], images.shape[3]


# RandAugment's operations ---------------------------------------------------------------------------------------------


def assert_equals_torchvision(images: Tensor, magnitude: int, name: str, within: int = 0) -> None:
    """Not one level of one pixel is another; so the operations have torchvision's magnitudes."""
    made = RandAugment(Augment(randaugment=(1, magnitude)), size_of(images), "cpu")
    for negative in (False, True):
        found = made(images, drawing(name, negative, len(images)))
        value = their_value(name, magnitude, size_of(images), negative)
        for image, result in zip(images, found, strict=True):
            apart = (result.int() - by_torchvision(image, name, value).int()).abs().max()
            assert apart <= within, (name, magnitude, negative)


USUAL = (0, 4, 9, 10, 15, 20, 28, 30)
KINDS = {"extreme": range(31), "digits": range(31), "odd": range(31), "tiny": USUAL, "wide": range(31), "photos": USUAL}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", mostly_slow(KINDS, 3))
def test_each_operation_equals_torchvision(kind: str, name: str) -> None:
    for magnitude in KINDS[kind]:
        assert_equals_torchvision(pictures(kind), magnitude, name)


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_operations_on_images_of_a_few_pixels(side: int) -> None:
    """So few that none is in the vector code, which rounds once: within a level."""
    assert sorted(OPERATIONS) == sorted(SPACE)
    images = stacked([noise(side, side, i) for i in range(8)])
    for name in OPERATIONS:
        assert_equals_torchvision(images, 20, name, within=1)


@pytest.mark.parametrize("operations", [1, 2, 3])
def test_operations_are_applied_in_the_order_drawn(operations: int) -> None:
    images, u = pictures("tiny").repeat(6, 1, 1, 1), draws(96, operations)
    found = RandAugment(Augment(randaugment=(operations, 13)), (64, 64), "cpu")(images, u)
    for image, result, choices in zip(images, found, drawn(u), strict=True):
        assert len(choices) == operations
        for name, negative in choices:
            image = by_torchvision(image, name, their_value(name, 13, (64, 64), negative))
        assert torch.equal(result, image), choices


# 3-Augment ------------------------------------------------------------------------------------------------------------


def three(kind: int, amount: float | Tensor, count: int) -> Tensor:
    """Uniforms that draw this kind: all of its third of the interval, up to the ends."""
    u = torch.linspace(kind / 3 + 1e-6, (kind + 1) / 3 - 1e-6, count).unsqueeze(1).repeat(1, 2)
    u[:, 1] = amount
    return u


@pytest.mark.parametrize("kind", ["digits", "extreme", "tiny", "wide", "photos"])
def test_gray_and_solarized_equal_torchvision(kind: str) -> None:
    images = pictures(kind)
    for image, result in zip(images, three_augment(images, three(0, 0.5, len(images))), strict=True):
        assert torch.equal(result, VF.rgb_to_grayscale(image, 3))
    for image, result in zip(images, three_augment(images, three(1, 0.5, len(images))), strict=True):
        assert torch.equal(result, VF.solarize(image, 128))


@pytest.mark.parametrize("kind", ["digits", "extreme", "tiny", "wide", "photos"])
def test_the_blur_equals_torchvision(kind: str) -> None:
    """torchvision adds 81 products where we add nine twice: a level where they round apart, one pixel in 5,000."""
    images = pictures(kind)
    amounts = torch.linspace(0, 1 - 2.0**-24, len(images))
    found = three_augment(images, three(2, amounts, len(images)))
    for image, result, amount in zip(images, found, amounts.tolist(), strict=True):
        sigma = SIGMAS[0] + amount * (SIGMAS[1] - SIGMAS[0])
        apart = (result.int() - VF.gaussian_blur(image, [9, 9], [sigma, sigma]).int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).double().mean() <= 2e-4


def test_an_image_too_small_to_blur_is_rejected() -> None:
    with pytest.raises(ValueError, match="three-augment"):
        RandAugment(Augment(three_augment=True), (4, 32), "cpu")
    images = stacked([noise(5, 5)])
    for kind in range(3):
        assert (
            RandAugment(Augment(three_augment=True), (5, 5), "cpu")(images, three(kind, 0.5, 1)).shape == images.shape
        )


# In the loader --------------------------------------------------------------------------------------------------------

CHAINS = {"randaugment": Augment(randaugment=(2, 15)), "three": Augment(three_augment=True), "both": BOTH}


def loaded(source: Source, augment: Augment, batch: int = 12, stop: int = 48, world: int = 1, **options: Any) -> Tensor:
    options = {"seed": 3, "workers": 0, "mode": "streamed", "size": (32, 32), **options}
    ranks = [
        Loader(source, batch=batch, augment=augment, rank=rank, world_size=world, **options) for rank in range(world)
    ]
    parts = [[one.images for one in loader.batches(0, stop // batch)] for loader in ranks]
    return torch.cat([share for step in zip(*parts, strict=True) for share in step])


@pytest.fixture
def shapes() -> Source:
    return open_source("shapes:size=32,count=48")


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_augmentations_are_applied_in_the_documented_order(shapes: Source, mode: str) -> None:
    """Crop, flip, randaugment, colors, holes: made again from the parts that other tests hold to torchvision."""
    augment = BOTH.replace(crop="pad", color=0.4, erase=0.5)
    found = loaded(shapes, augment, batch=48, mode=mode)
    loader = Loader(shapes, batch=48, size=(32, 32), augment=augment, seed=3, workers=0, mode="streamed")
    index = loader.order.sample(np.arange(48))
    u = uniforms(3, torch.zeros(48, dtype=torch.long), torch.arange(48), NUM_UNIFORMS + 6)
    boxes = crop_boxes(u, torch.full((48, 2), 32), augment, (32, 32))
    images = [
        crop_and_resize(shapes.read(int(i)), box, (32, 32), (32, 32)) for i, box in zip(index, boxes, strict=True)
    ]
    flipped = [x.flip(2) if row[4 * TRIES] < 0.5 else x for x, row in zip(images, u, strict=True)]
    changed = RandAugment(augment, (32, 32), "cpu")(torch.stack(flipped), u[:, NUM_UNIFORMS:])
    assert torch.equal(found, augment_batch(changed, u, augment.replace(flip=0.0)))


# On other devices -----------------------------------------------------------------------------------------------------


def test_a_policy_never_synchronizes() -> None:
    """The meta device has no values: whoever asked for one, to choose or to count, would wait for a GPU."""
    augment = BOTH.replace(color=0.3, erase=0.3)
    images, u = torch.empty((56, 3, 32, 32), dtype=torch.uint8, device="meta"), draws(56)
    found = RandAugment(augment, (32, 32), "meta")(images, u)
    assert (found.shape, found.dtype, found.device.type) == (images.shape, torch.uint8, "meta")
    assert augment_batch(found, torch.empty((56, NUM_UNIFORMS), device="meta"), augment).shape == images.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("side", [8, 32, 224])
def test_a_gpu_gives_the_same_without_synchronizing(side: int) -> None:
    images, u = stacked([np.array(photo(side, side, i)) for i in range(64)]), draws(64)
    for augment in CHAINS.values():
        expected = RandAugment(augment, (side, side), "cpu")(images, u)
        made, there = RandAugment(augment, (side, side), "cuda"), images.cuda()
        made(there, u)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = made(there, u)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        apart = (found.cpu().int() - expected.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).double().mean() <= 2e-4
