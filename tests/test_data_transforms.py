"""Crops, flips, colors and mixing: against torchvision, timm and Pillow, and TensorFlow's sampling rewritten."""

from collections.abc import Iterator

import numpy as np
import pytest
import simplejpeg
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as VF
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import by_pillow, encode, noise, photo
from PIL import Image
from scipy.stats import beta, binomtest, ks_2samp, kstest
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2

from plainvit.config import Augment, Preprocess
from plainvit.data.decode import decode
from plainvit.data.mix import mix, soft_labels
from plainvit.data.order import uniforms
from plainvit.data.transforms import NUM_UNIFORMS, TRIES, augment_batch, crop_and_resize, crop_boxes, preprocess_image

RARE = 1e-3  # of a p-value; every draw is seeded, so a test passes always or never
FLIP, COLORS, HOLES = 4 * TRIES, slice(4 * TRIES + 1, 4 * TRIES + 4), slice(4 * TRIES + 4, 4 * TRIES + 9)
PAPER = Augment()
TENSORFLOW = Augment(crop="inception-tf")


def draws(count: int, seed: int = 0) -> Tensor:
    return uniforms(seed, torch.zeros(count, dtype=torch.long), torch.arange(count), NUM_UNIFORMS)


def boxes_of(augment: Augment, size: tuple[int, int], count: int = 4000, out: int = 224, seed: int = 0) -> np.ndarray:
    return crop_boxes(draws(count, seed), torch.tensor([size] * count), augment, (out, out)).double().numpy()


def shapes_of(boxes: np.ndarray, size: tuple[int, int]) -> Iterator[tuple[str, np.ndarray]]:
    """What the law of a random box is made of: area, aspect, and where it lies within what is free."""
    top, left, height, width = boxes.T
    yield "area", height * width / (size[0] * size[1])
    yield "aspect", width / height
    for name, place, free in (("top", top, size[0] - height), ("left", left, size[1] - width)):
        yield name, place[free > 9] / free[free > 9]


def as_tensor(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


# Inception crops ------------------------------------------------------------------------------------------------------

SIZES = [(224, 224), (375, 500), (500, 375), (64, 64), (200, 600), (700, 300)]


def by_torchvision(size: tuple[int, int], augment: Augment, count: int = 4000) -> np.ndarray:
    image = torch.empty((1, *size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        area, aspect = list(augment.area), list(augment.aspect)
        return np.array([RandomResizedCrop.get_params(image, area, aspect) for _ in range(count)], float)


def tensorflow_box(random: np.random.Generator, size: tuple[int, int], augment: Augment) -> tuple[int, int, int, int]:
    """tf.image.sample_distorted_bounding_box as documented and as its kernel computes it: 100 tries, then all of it."""
    height, width = size
    least, most = (fraction * height * width for fraction in augment.area)
    for _ in range(100):
        aspect = random.uniform(*augment.aspect)
        h, top_h = round(np.sqrt(least / aspect)), round(np.sqrt(most / aspect))
        if round(top_h * aspect) > width:
            top_h = int((width + 0.5 - 1e-7) / aspect)
            top_h -= round(top_h * aspect) > width
        top_h = min(top_h, height)
        h = min(h, top_h)
        h += random.integers(top_h - h + 1)
        h += h * round(h * aspect) < least
        h -= h * round(h * aspect) > most
        w = round(h * aspect)
        if least <= h * w <= most and 0 < h <= height and 0 < w <= width:
            top = random.integers(height - h) if h < height else 0
            left = random.integers(width - w) if w < width else 0
            return int(top), int(left), int(h), int(w)
    return 0, 0, height, width


def by_tensorflow(size: tuple[int, int], augment: Augment, count: int = 4000) -> np.ndarray:
    random = np.random.default_rng(2)
    return np.array([tensorflow_box(random, size, augment) for _ in range(count)], float)


LAWS = [*((size, augment) for size in SIZES for augment in (PAPER, TENSORFLOW))]
LAWS += [((300, 400), Augment(area=(0.3, 0.5), aspect=(0.5, 2.0)))]


@pytest.mark.parametrize(("size", "augment"), LAWS)
def test_inception_crops_are_distributed_as_in_the_library(size: tuple[int, int], augment: Augment) -> None:
    theirs = (by_tensorflow if augment.crop == "inception-tf" else by_torchvision)(size, augment)
    for (name, found), (_, expected) in zip(
        shapes_of(boxes_of(augment, size), size), shapes_of(theirs, size), strict=True
    ):
        assert ks_2samp(found, expected).pvalue > RARE, name


@pytest.mark.parametrize("size", [(10, 1000), (1, 30000), (61, 7)])
def test_the_fallback_crop_equals_that_of_the_library(size: tuple[int, int]) -> None:
    """No crop of 90 % of these images has an aspect ratio within bounds: TensorFlow returns the whole image."""
    augment = Augment(area=(0.9, 1.0))
    expected = np.unique(by_torchvision(size, augment, 50), axis=0)
    assert len(expected) == 1
    assert np.array_equal(np.unique(boxes_of(augment, size, 50), axis=0), expected)
    assert np.unique(boxes_of(augment.replace(crop="inception-tf"), size, 20), axis=0).tolist() == [[0, 0, *size]]


# All boxes ------------------------------------------------------------------------------------------------------------

sides = st.one_of(st.integers(1, 40), st.integers(1, 5000), st.just(30000))
edge = st.sampled_from([0.0, 0.5, 1 - 2.0**-24])


@settings(max_examples=200)
@given(sides, sides, st.sampled_from(["inception", "inception-tf", "none"]), st.integers(0, 10**6), edge, st.booleans())
def test_boxes_are_inside_the_image(height: int, width: int, crop: str, seed: int, value: float, extreme: bool) -> None:
    u = torch.full((4, NUM_UNIFORMS), value) if extreme else draws(4, seed)
    boxes = crop_boxes(u, torch.tensor([[height, width]] * 4), Augment(crop=crop), (32, 32))
    top, left, h, w = boxes.T
    assert (boxes == boxes.round()).all()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (h >= 1).all()
    assert (w >= 1).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()


# Cutting --------------------------------------------------------------------------------------------------------------

PICTURE = np.array(photo(90, 120, seed=1))


def box(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


CUTS = [
    (0, 0, 90, 120),
    (10, 20, 60, 60),
    (5, 7, 33, 81),
    (0, 0, 16, 16),
    (89, 119, 1, 1),
    (3, 0, 1, 120),
    (30, 40, 24, 24),
]


@pytest.mark.parametrize(("place", "out"), zip(CUTS, [(24, 24), (48, 16), (64, 100)] * 2 + [(24, 24)], strict=True))
def test_a_cut_equals_crop_and_resize(place: tuple[int, int, int, int], out: tuple[int, int]) -> None:
    """Compared with torchvision on floats, within one gray level."""
    top, left, height, width = place
    found = crop_and_resize(PICTURE, box(*place), out, (90, 120))
    assert found.dtype is torch.uint8
    assert found.shape == (3, *out)
    floats = VF.resized_crop(as_tensor(PICTURE).double(), top, left, height, width, list(out), antialias=True)
    assert (found - floats.round()).abs().max() <= 1


@pytest.mark.parametrize("pad", [1, 4])
def test_cutting_beyond_the_border_gives_zeros(pad: int) -> None:
    pixels = noise(12, 10)
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))
    for top in range(-pad, pad + 1):
        for left in range(-pad, pad + 1):
            expected = padded[top + pad : top + pad + 12, left + pad : left + pad + 10]
            assert torch.equal(crop_and_resize(pixels, box(top, left, 12, 10), (12, 10), (12, 10)), as_tensor(expected))


@pytest.mark.parametrize("offset", [(-40, 24), (40, 0), (0, -8)])
def test_padding_of_a_large_jpeg_is_in_full_pixels(offset: tuple[int, int]) -> None:
    """It is decoded whole where a scaled one would be decoded, whose pixels a border does not share."""
    pixels = np.array(photo(640, 640, seed=5))
    data = encode(pixels, "JPEG", quality=95)
    assert decode(data, (32, 32)).shape[0] < 640
    padded = np.pad(by_pillow(data), ((40, 40), (40, 40), (0, 0)))
    top, left = offset
    window = as_tensor(padded[top + 40 : top + 680, left + 40 : left + 680])
    expected = VF.resize(window.double(), [32, 32], antialias=True)
    found = crop_and_resize(data, box(top, left, 640, 640), (32, 32), (640, 640))
    assert (found - expected).abs().max() <= 1
    assert (found == 0).all(0).any() == (min(offset) < -20 or max(offset) > 20)


def test_crops_of_a_scaled_jpeg_have_the_right_position() -> None:
    """Ramps along both axes: a crop's mean says where its center was, to a quarter of a pixel of the result."""
    ramp = np.linspace(0, 255, 1024)
    pixels = np.zeros((1024, 1024, 3))
    pixels[..., 0], pixels[..., 1] = ramp[None, :], ramp[:, None]
    data = encode(pixels.round().astype(np.uint8), "JPEG", quality=98, subsampling=0)
    assert decode(data, (32, 32)).shape[0] == 128
    for index, place in enumerate(boxes_of(Augment(area=(0.3, 1.0)), (1024, 1024), 30)):
        side = (16, 32, 48)[index % 3]
        red, green, _ = (
            crop_and_resize(data, torch.from_numpy(place), (side, side), (1024, 1024)).double().mean((1, 2))
            * 1023
            / 255
        )
        top, left, height, width = place
        assert abs(float(green) - (top + height / 2 - 0.5)) < 0.3 * height / side + 1
        assert abs(float(red) - (left + width / 2 - 0.5)) < 0.3 * width / side + 1


@pytest.mark.parametrize(
    ("shape", "resize", "out"), [((64, 64), 160, 128), ((64, 64), 80, 64), ((96, 130), 112, 96), ((300, 400), 256, 224)]
)
def test_random_equals_resize_then_crop(shape: tuple[int, int], resize: int, out: int) -> None:
    """BiT's own order by torchvision: a square first, then the window."""
    pixels = np.array(photo(*shape, seed=2))
    whole = VF.resize(as_tensor(pixels).double(), [resize, resize], antialias=True)
    u = draws(12)
    for row, place in zip(
        u, crop_boxes(u, torch.tensor([shape] * 12), Augment(crop="random", resize=resize), (out, out)), strict=True
    ):
        top, left = (int(row[i] * (resize - out + 1)) for i in (0, 1))
        expected = whole[:, top : top + out, left : left + out]
        assert (crop_and_resize(pixels, place, (out, out), shape) - expected).abs().mean() < 1


# Preparing for evaluation ---------------------------------------------------------------------------------------------

SHAPES = [(90, 120), (120, 90), (333, 500), (500, 331), (224, 224), (256, 256), (64, 64), (100, 1000), (37, 53)]
KINDS = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}


def fraction_within(found: Tensor, expected: Tensor, levels: int) -> float:
    return float(((found.int() - expected.int()).abs() <= levels).double().mean())


@pytest.mark.parametrize(("shape", "crop"), zip(SHAPES, [0.875, 0.9, 1.0] * 3, strict=True))
@pytest.mark.parametrize("interpolation", KINDS)
def test_crop_equals_torchvision(shape: tuple[int, int], crop: float, interpolation: str) -> None:
    """All pixels within a gray level, and 99 % of them equal."""
    image = as_tensor(np.array(photo(*shape, seed=4)))
    steps = [v2.Resize(int(96 / crop + 1e-6), KINDS[interpolation], antialias=True), v2.CenterCrop(96)]
    expected = v2.Compose(steps)(image)
    preprocess = Preprocess(resize="crop", crop=crop, interpolation=interpolation)
    found = preprocess_image(image.permute(1, 2, 0).numpy(), preprocess, (96, 96))
    assert found.shape == (3, 96, 96)
    assert fraction_within(found, expected, 1) == 1
    assert fraction_within(found, expected, 0) > 0.99


SETTINGS = [
    *((name, smooth) for name in ("nearest", "bilinear", "bicubic") for smooth in (True, False)),
    ("lanczos", True),
]


def resize_by_peers(pixels: np.ndarray, out: tuple[int, int], interpolation: str, antialias: bool) -> Tensor:
    """Pillow, which antialiases all but nearest; without antialiasing, F.interpolate in float64."""
    if antialias or interpolation == "nearest":
        method = Image.Resampling[interpolation.upper()]
        return as_tensor(np.array(Image.fromarray(pixels).resize((out[1], out[0]), method)))
    found = F.interpolate(as_tensor(pixels)[None].double(), out, mode=interpolation)[0]
    return found.round().clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize(("interpolation", "antialias"), SETTINGS)
@pytest.mark.parametrize("scale", [1, 12])
def test_a_large_jpeg_is_resized_like_its_pixels(interpolation: str, antialias: bool, scale: int) -> None:
    """A JPEG that the decoder could scale down by eight, as the peers resize its full pixels."""
    coarse = noise(48, 64, 3) // 2 + 64  # nothing is clipped
    image = Image.fromarray(coarse).resize((64 * 12, 48 * 12), Image.Resampling.BICUBIC)
    image = image if scale == 12 else Image.fromarray(noise(48 * 12, 64 * 12, 4) // 2 + 64)
    data, out = encode(image, "JPEG", quality=95), (24, 32)
    expected = resize_by_peers(simplejpeg.decode_jpeg(data, "RGB"), out, interpolation, antialias)
    found = preprocess_image(data, Preprocess(interpolation=interpolation, antialias=antialias), out)
    apart = (found.int() - expected.int()).abs()
    exact = not antialias or interpolation == "nearest"  # elsewhere the decoder may scale first
    assert apart.max() <= 1 if exact else apart.double().mean() < 1.5


@pytest.mark.parametrize(("interpolation", "antialias"), [one for one in SETTINGS if one != ("bicubic", False)])
@pytest.mark.parametrize("shape", [(3, 400), (400, 3)])
def test_only_the_center_of_a_very_long_image_is_resized(
    interpolation: str, antialias: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = noise(*shape) // 4 + 96  # nothing is clipped between passes
    preprocess = Preprocess(resize="crop", interpolation=interpolation, antialias=antialias)
    expected = resize_by_peers(pixels, (shape[0] * 16, shape[1] * 16), interpolation, antialias)
    top, left = (side * 8 - 24 for side in shape)
    monkeypatch.setattr("plainvit.data.transforms.PIXEL_LIMIT", 48 * 48)
    found = preprocess_image(pixels, preprocess, (48, 48))
    assert (found.int() - expected[:, top : top + 48, left : left + 48].int()).abs().max() <= 1


# Flips, colors, holes ------------------------------------------------------------------------------------------------


def batch(count: int, side: int = 16, seed: int = 0) -> Tensor:
    return torch.stack([as_tensor(noise(side, side, seed + i)) for i in range(count)])


def test_flips_are_exact_and_where_a_uniform_is_below_the_probability() -> None:
    images, u = batch(8), draws(8)
    for flip in (0.0, 0.3, 0.5, 1.0):
        found = augment_batch(images, u, Augment(flip=flip))
        assert found.dtype is torch.uint8
        for image, result, number in zip(images, found, u[:, FLIP], strict=True):
            assert torch.equal(result, VF.horizontal_flip(image) if number < flip else image)


@pytest.mark.parametrize("color", [0.1, 0.4, 0.9])
def test_color_jitter_equals_torchvision(color: float) -> None:
    """The same factors in the same order; torchvision's gray weighs red by 0.2989 and ours by 0.299."""
    images, u = batch(32), draws(32)
    found = augment_batch(images, u, Augment(flip=0, color=color))
    factors = 1 + (2 * u[:, COLORS] - 1) * color
    assert factors.min() < 1 < factors.max()
    for image, result, (brightness, contrast, saturation) in zip(images, found, factors.tolist(), strict=True):
        expected = VF.adjust_brightness(image.float() / 255, brightness)
        expected = VF.adjust_saturation(VF.adjust_contrast(expected, contrast), saturation)
        assert (result - expected).abs().max() < 2.5e-4 * color


def draw_holes(probability: float, count: int, side: int, floats: bool) -> Tensor:
    """Where images without gray in them are gray after erasing: [B, H, W]."""
    images = torch.zeros(count, 3, side, side, dtype=torch.float32 if floats else torch.uint8)
    found = augment_batch(images, draws(count), Augment(flip=0, erase=probability))
    gray = 0.5 if floats else 128
    assert ((found == 0) | (found == gray)).all()
    assert (found == found[:, :1]).all()
    return found[:, 0] == gray


@pytest.mark.parametrize("floats", [False, True])
def test_erased_areas_have_the_stated_probability_area_and_aspect(floats: bool) -> None:
    erased = draw_holes(0.6, 4000, 24, floats).flatten(1).any(1)
    assert binomtest(int(erased.sum()), 4000, 0.6).pvalue > RARE
    gray = draw_holes(1.0, 800, 96, floats)
    rows, columns = gray.any(2).sum(1).double(), gray.any(1).sum(1).double()
    assert torch.equal(gray.sum((1, 2)).double(), rows * columns)  # filled: a rectangle
    area = (rows * columns / 96**2).numpy()
    assert area.min() > 0.015
    assert area.max() < 0.345
    whole = ((rows < 95) & (columns < 95)).numpy()  # not cut to the image
    assert ((rows / columns).numpy()[whole] < 3.7).all()
    assert ((columns / rows).numpy()[whole] < 3.7).all()
    assert kstest(area, "uniform", (0.02, 1 / 3 - 0.02)).statistic < 0.06
    assert kstest(np.log((rows / columns).numpy()), "uniform", (np.log(0.3), 2 * np.log(1 / 0.3))).statistic < 0.08


# Mixing ---------------------------------------------------------------------------------------------------------------


def pairs(count: int = 8, side: int = 16, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Random images as floats, and one-hot targets of which no two neighbors are alike."""
    images = batch(count, side).float() / 255
    return images, F.one_hot(torch.arange(count) % classes, classes).float()


def partner(values: Tensor) -> Tensor:
    order = [index ^ 1 for index in range(len(values))]
    return values[order]


def own_weight(targets: Tensor, mixed: Tensor) -> float:
    """What is left of each sample's own label; the same for all."""
    weights = (mixed * targets).sum(1)
    assert torch.equal(weights, weights[:1].expand_as(weights))
    return float(weights[0])


MIXUP, CUTMIX = Augment(mixup=0.8), Augment(cutmix=1.0)
BOTH = Augment(mixup=0.8, cutmix=1.0)


@pytest.mark.parametrize("augment", [MIXUP, CUTMIX, BOTH])
def test_mixed_targets_are_distributions(augment: Augment) -> None:
    images, targets = pairs()
    kept = images.clone(), targets.clone()
    for step in range(50):
        mixed, soft = mix(images, targets, augment, 0, step)
        of_bytes = mix((images * 255).round().to(torch.uint8), targets, augment, 0, step)[0]
        assert of_bytes.dtype is mixed.dtype is torch.float32
        assert torch.allclose(of_bytes, mixed, atol=1e-6)
        assert (soft >= 0).all()
        assert torch.allclose(soft.sum(1), torch.ones(8), atol=1e-6)
        weight = own_weight(targets, soft)
        assert torch.allclose(soft, weight * targets + (1 - weight) * partner(targets), atol=1e-6)
        if augment is MIXUP:
            assert torch.allclose(mixed, weight * images + (1 - weight) * partner(images), atol=1e-6)
    assert torch.equal(images, kept[0])
    assert torch.equal(targets, kept[1])


def test_cutmix_area_equals_the_label_weight() -> None:
    images, targets = pairs(side=21)
    for step in range(100):
        mixed, soft = mix(images, targets, CUTMIX, 0, step)
        foreign = (mixed != images).any(1)  # [B, H, W]
        assert torch.equal(mixed, torch.where(foreign.unsqueeze(1), partner(images), images))
        hole = foreign.any(0)
        count = int(hole.sum())
        assert count == int(hole.any(0).sum()) * int(hole.any(1).sum())
        assert own_weight(targets, soft) == pytest.approx(1 - count / 21**2, abs=1e-6)


def test_mixup_weights_are_beta_distributed() -> None:
    """The larger of b and 1 - b, since neighbors take it in turns; against scipy's beta."""
    images, targets = pairs(2, 1, 2)
    for alpha in (0.2, 0.8, 1.0):
        weights = [own_weight(targets, mix(images, targets, Augment(mixup=alpha), 1, step)[1]) for step in range(600)]
        law = beta(alpha, alpha)
        assert min(weights) >= 0.5
        assert kstest(weights, lambda x, law=law: 1 - 2 * law.sf(x)).pvalue > RARE


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_cutmix_weights_are_distributed_as_in_torchvision(alpha: float) -> None:
    """Holes are cut off at the border there as here, so the law is compared with its own CutMix."""
    images, targets = torch.zeros(2, 3, 32, 32), torch.eye(2)
    ours = [own_weight(targets, mix(images, targets, Augment(cutmix=alpha), 1, step)[1]) for step in range(800)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs_mix = v2.CutMix(alpha=alpha, num_classes=2)
        theirs = [float(theirs_mix(images, torch.tensor([0, 1]))[1][0, 0]) for _ in range(800)]
    assert ks_2samp(ours, theirs).pvalue > RARE


@pytest.mark.parametrize(("augment", "world"), [(MIXUP, 2), (CUTMIX, 4), (BOTH, 2)])
def test_mixing_does_not_depend_on_the_number_of_processes(augment: Augment, world: int) -> None:
    images, targets = pairs(16)
    for step in range(20):
        whole = mix(images, targets, augment, 7, step)
        parts = [mix(x, y, augment, 7, step) for x, y in zip(images.chunk(world), targets.chunk(world), strict=True)]
        assert torch.equal(torch.cat([x for x, _ in parts]), whole[0])
        assert torch.equal(torch.cat([y for _, y in parts]), whole[1])


# Labels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_equals_torch(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(32, 7, generator=generator), torch.randint(0, 7, (32,), generator=generator)
    soft = soft_labels(labels, 7, smoothing)
    assert torch.allclose(soft.sum(1), torch.ones(32), atol=1e-6)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    assert torch.allclose(F.cross_entropy(logits, soft, reduction="none"), expected, atol=1e-5)
