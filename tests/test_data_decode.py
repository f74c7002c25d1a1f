"""Decoding: against Pillow bit for bit (its draft mode for scaled JPEGs), analytic pixels, and hostile files."""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import by_pillow, encode, jpeg, noise, photo, png, real_data
from PIL import Image, ImageOps
from torchvision.transforms.v2.functional import resize

from plainvit.config import Preprocess
from plainvit.data.decode import MARGIN, PIXEL_LIMIT, ImageError, decode, get_image_size
from plainvit.data.transforms import preprocess_image

ORIENTATION = 0x0112


def catch_image_error(data: bytes, function: Callable[[bytes], object] = decode) -> str:
    """The one line of an ImageError."""
    with pytest.raises(ImageError) as caught:
        function(data)
    text = str(caught.value)
    assert text.strip()
    assert "\n" not in text
    assert len(text) < 300
    return text


# JPEG -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "subsampling", "progressive", "mode"),
    [
        ((61, 83), 0, False, "RGB"),
        ((61, 83), 2, True, "L"),
        ((16, 16), 1, True, "RGB"),
        ((1, 1), 2, False, "RGB"),
        ((7, 300), 2, True, "RGB"),
        ((7, 300), 0, False, "L"),
    ],
)
def test_jpeg_equals_pillow(shape: tuple[int, int], subsampling: int, progressive: bool, mode: str) -> None:
    image = photo(*shape).convert(mode)
    data = encode(image, "JPEG", quality=80, subsampling=subsampling, progressive=progressive)
    for pixels in (decode(data), decode(data + b"\0" * 500)):  # bytes after the end are ignored
        assert np.array_equal(pixels, by_pillow(data))
        assert pixels.dtype == np.uint8
        assert pixels.flags["C_CONTIGUOUS"]
        assert pixels.flags["WRITEABLE"]
    assert get_image_size(data) == shape


def test_real_photos_equal_pillow() -> None:
    for data in photographs():
        assert np.array_equal(decode(data), by_pillow(data))
        assert get_image_size(data) == by_pillow(data).shape[:2]


# Orientation ----------------------------------------------------------------------------------------------------------


def held(orientation: int, form: str = "JPEG", shape: tuple[int, int] = (64, 160)) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"quality": 90} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    return encode(photo(*shape, seed=3), form, exif=exif, **options)


def upright(data: bytes, least: tuple[int, int] | None = None) -> np.ndarray:
    """Pillow's reading, turned by Pillow; with `least`, decoded at the smallest scale not below (height, width)."""
    with Image.open(io.BytesIO(data)) as image:
        if least:
            image.draft("RGB", (least[1], least[0]))
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_equals_pillow(form: str, orientation: int) -> None:
    data = held(orientation, form)
    expected = upright(data)
    assert expected.shape[:2] == ((64, 160) if orientation < 5 else (160, 64))
    assert np.array_equal(decode(data), expected)
    assert get_image_size(data) == expected.shape[:2]


@pytest.mark.parametrize(("orientation", "factor"), [(1, 8), (2, 2), (3, 4), (4, 8), (5, 2), (6, 4), (7, 8), (8, 2)])
def test_a_scaled_jpeg_is_rotated_upright(orientation: int, factor: int) -> None:
    data = held(orientation, shape=(128, 320))
    height, width = (128, 320) if orientation < 5 else (320, 128)
    small = decode(data, (height // factor // MARGIN, width // factor // MARGIN))
    assert small.shape[:2] == (height // factor, width // factor)
    assert np.array_equal(small, upright(data, (128 // factor, 320 // factor)))


@pytest.mark.parametrize(
    "block",
    [
        *(b"", b"garbage", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"MM\0*\0\0\0\x08\0\x01\x01\x12"),
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x01abcd",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff\x06\0\0\0",
    ],
)
def test_an_invalid_exif_block_means_upright(block: bytes) -> None:
    for orientation in (0, 9, 65535):
        assert np.array_equal(decode(held(orientation)), by_pillow(held(orientation)))
    plain = jpeg(height=40, width=56)
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 8) + b"Exif\0\0" + block + plain[2:]
    assert np.array_equal(decode(data), by_pillow(plain))
    assert get_image_size(data) == (40, 56)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_a_damaged_exif_block_of_other_formats_means_upright(form: str) -> None:
    """The pixels are intact."""
    image = photo(40, 56)
    for block in (
        b"garbage",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff\x06\0\0\0",
    ):
        data = encode(image, form, exif=b"Exif\0\0" + block, lossless=True)
        assert np.array_equal(decode(data), np.asarray(image))
        assert get_image_size(data) == (40, 56)


# Scaled JPEGs ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 120), st.integers(1, 120))
def test_a_scaled_jpeg_keeps_the_margin(height: int, width: int, want_h: int, want_w: int) -> None:
    small = decode(jpeg(height=height, width=width), (want_h, want_w)).shape
    assert small[:2] == (height, width) or (small[0] >= MARGIN * want_h and small[1] >= MARGIN * want_w)


def photographs() -> list[bytes]:
    table = pq.read_table(real_data() / "imagenet-photos" / "photos-00.parquet")
    found = [cell["bytes"].as_py() for cell in table.column("image")]
    assert len(found) > 40
    return found


def psnr(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float(((found.double() - expected.double()) ** 2).mean())
    return 10 * np.log10(255**2 / error) if error else np.inf


@pytest.mark.parametrize("side", [20, 32, 40, 48])
def test_scaled_decoding_is_close_to_full_decoding(side: int) -> None:
    """Pillow's draft mode, told the scaled image's fractional extent, stays above 39 dB on each of these photos."""
    scaled, worst = 0, np.inf
    for data in photographs():
        whole = by_pillow(data)
        scaled += decode(data, (side, side)).shape[0] < whole.shape[0]
        expected = resize(torch.from_numpy(whole).permute(2, 0, 1), [side, side], antialias=True)
        worst = min(worst, psnr(preprocess_image(data, Preprocess(), (side, side)), expected))
    assert scaled > 20
    assert worst >= 38


# Kinds of pixels ------------------------------------------------------------------------------------------------------

COLORS = photo(20, 30, seed=5)


def test_cmyk() -> None:
    for form in ("JPEG", "TIFF"):
        data = encode(COLORS.convert("CMYK"), form)
        assert np.array_equal(decode(data), by_pillow(data))
        assert np.abs(decode(data).astype(int) - np.array(COLORS)).mean() < 6  # not inverted, not CMY as RGB


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP", "PPM", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_lossless_formats_round_trip(form: str, mode: str) -> None:
    image = COLORS.convert(mode) if form != "GIF" else COLORS.quantize(64)
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(image, form, **options)
    assert np.array_equal(decode(data), np.array(image.convert("RGB")))
    assert get_image_size(data) == (20, 30)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_to_eight(form: str) -> None:
    """Every one of the 65,536 levels, rounded to the nearest of 256."""
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert np.array_equal(decode(encode(deep, form))[..., 1], np.round(deep / 257).astype(np.uint8))
    dark = deep[:2]  # the scale does not depend on the brightest pixel
    assert np.array_equal(decode(encode(dark, form))[..., 0], np.round(dark / 257).astype(np.uint8))


def on_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:].astype(np.float64) / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


def see_through(seed: int = 0) -> np.ndarray:
    rgba = np.random.default_rng(seed).integers(0, 256, (24, 24, 4), dtype=np.uint8)
    rgba[:8, :, 3], rgba[8:16, :, 3] = 0, 255
    return rgba


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
def test_transparency_is_composed_on_white(form: str) -> None:
    rgba = see_through()
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    found = decode(encode(rgba, form, **options))
    assert (found[:8] == 255).all()
    assert np.array_equal(found[8:16], rgba[8:16, :, :3])
    assert np.abs(found - on_white(rgba)).max() <= 1
    rgba[..., 1] = rgba[..., 2] = rgba[..., 0]
    gray = decode(encode(Image.fromarray(rgba).convert("LA"), "PNG"))
    assert np.abs(gray - on_white(rgba)).max() <= 1


def palette_image() -> tuple[Image.Image, np.ndarray]:
    """A palette of four colors, and its indices."""
    indices = np.arange(64, dtype=np.uint8).reshape(8, 8) % 4
    image = Image.fromarray(indices).convert("P")
    image.putdata(indices.ravel())
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 10, 20, 30])
    return image, indices


FOUR = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]])


def test_palettes_with_and_without_transparency() -> None:
    image, indices = palette_image()
    for form in ("PNG", "GIF", "BMP", "TIFF"):
        assert np.array_equal(decode(encode(image, form)), FOUR[indices])
    white = np.array([[255, 0, 0], [255, 255, 255], [0, 0, 255], [10, 20, 30]])[indices]
    for form in ("PNG", "GIF"):
        assert np.array_equal(decode(encode(image, form, transparency=1)), white)
    alphas = [0, 64, 128, 255]
    rgba = np.concatenate([FOUR, np.array(alphas)[:, None]], 1)[indices]
    found = decode(encode(image, "PNG", transparency=bytes(alphas)))
    assert np.abs(found - on_white(rgba)).max() <= 1


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_used(form: str) -> None:
    frames = [Image.new("RGB", (16, 12), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3
    assert np.array_equal(decode(data), np.array(frames[0]))


@pytest.mark.parametrize("form", ["ICO", "TGA", "PDF", "EPS", "DDS", "JPEG2000", "XBM"])
def test_other_formats_are_rejected(form: str) -> None:
    image = photo(32, 32).convert("1") if form == "XBM" else photo(32, 32)
    assert "format" in catch_image_error(encode(image, form))


# Limits ---------------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, rows: bytes | None = None) -> bytes:
    """A one-bit PNG whose header says so; without rows, its pixels are a lie."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    body = zlib.compress(rows if rows is not None else b"\0\0", 9)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def jpeg_of(width: int, height: int) -> bytes:
    """A small JPEG whose frame header claims another size."""
    data = bytearray(jpeg())
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def tiff_of(width: int, height: int) -> bytes:
    tags = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, height), (279, 64)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4) + bytes(64)


CLAIMS: dict[str, Callable[[int, int], bytes]] = {"PNG": png_of, "JPEG": jpeg_of, "TIFF": tiff_of}


@pytest.mark.parametrize("form", CLAIMS)
def test_a_decompression_bomb_is_rejected_before_it_is_decoded(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = CLAIMS[form](12000, 12001)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("pixels are allocated"))
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *_, **__: pytest.fail("pixels are allocated"))
    for function in (decode, get_image_size):
        reason = catch_image_error(data, function)
        assert "12000 x 12001" in reason
        assert f"{PIXEL_LIMIT:,}" in reason


@pytest.mark.parametrize("form", [*CLAIMS, "WEBP"])
def test_a_size_is_read_without_decoding(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(COLORS, form)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("pixels are decoded"))
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *_, **__: pytest.fail("pixels are decoded"))
    assert get_image_size(data) == (20, 30)


@pytest.mark.parametrize("form", CLAIMS)
def test_an_image_without_pixels_is_rejected(form: str) -> None:
    for width, height in ((0, 0), (0, 5), (5, 0)):
        catch_image_error(CLAIMS[form](width, height))
        catch_image_error(CLAIMS[form](width, height), get_image_size)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("shape", [(1, 30000), (30000, 1)])
def test_thin_images_are_decoded(form: str, shape: tuple[int, int]) -> None:
    data = encode(noise(*shape), form)
    assert np.array_equal(decode(data), by_pillow(data))
    assert get_image_size(data) == shape
    assert decode(data, (8, 8)).shape[:2] == shape


# Damage ---------------------------------------------------------------------------------------------------------------

EXIF = Image.Exif()
EXIF[ORIENTATION] = 6
EXIF[0x010E] = "a description"
SOUND: dict[str, bytes] = {
    "jpeg": jpeg(height=24, width=40),
    "jpeg with exif": jpeg(height=24, width=40, exif=EXIF),
    "jpeg progressive": jpeg(height=24, width=40, progressive=True),
    "jpeg cmyk": encode(photo(24, 40).convert("CMYK"), "JPEG"),
    "png": png(height=24, width=40),
    "png with exif": encode(noise(24, 40), exif=EXIF),
    "png palette": encode(photo(24, 40).quantize(16), "PNG", transparency=b"\0\x80\xff"),
    "png deep": encode(np.arange(960, dtype=np.uint16).reshape(24, 40)),
    "gif": encode(photo(24, 40).quantize(16), "GIF"),
    "bmp": encode(photo(24, 40), "BMP"),
    "tiff": encode(photo(24, 40), "TIFF"),
    "tiff lzw": encode(photo(24, 40), "TIFF", compression="tiff_lzw"),
    "webp": encode(photo(24, 40), "WEBP"),
    "webp lossless": encode(photo(24, 40), "WEBP", lossless=True, exif=EXIF),
    "ppm": encode(photo(24, 40), "PPM"),
    "pgm deep": encode(np.arange(960, dtype=np.uint16).reshape(24, 40), "PPM"),
}


def attempt(data: bytes) -> None:
    """decode() and get_image_size() return pixels and a size, or raise an ImageError of one line."""
    for function in (decode, get_image_size, lambda data: decode(data, (4, 4))):
        reason = "none"
        try:
            found = function(data)
            assert found.ndim == 3 if isinstance(found, np.ndarray) else len(found) == 2
        except ImageError as error:
            reason = str(error)
        assert re.fullmatch(r"[^\n]+", reason)


@pytest.mark.parametrize("kind", [kind for kind in SOUND if kind != "gif"])  # Pillow shows half a GIF
def test_half_a_file_is_rejected(kind: str) -> None:
    catch_image_error(SOUND[kind][: len(SOUND[kind]) // 2])


def test_files_that_are_not_images_are_rejected() -> None:
    assert "<!DOCTYPE" in catch_image_error(b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>")
    for data in (
        b"",
        b"\0",
        b"\xff\xd8",
        b"\xff\xd8\xff\xe0",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
        b"BM",
        b"P6",
    ):
        catch_image_error(data)
        catch_image_error(data, get_image_size)


def mutations(kinds: list[str]) -> st.SearchStrategy[bytes]:
    """Sound files with some bytes changed, dropped or inserted, mostly near the front where the structure is."""

    def mutate(kind: str, edits: list[tuple[float, int, bytes]], end: float) -> bytes:
        data = bytearray(SOUND[kind])
        for place, dropped, inserted in edits:
            start = int(place**2 * len(data))
            data[start : start + dropped] = inserted
        return bytes(data[: max(int(len(data) * end), 1)])

    edit = st.tuples(st.floats(0, 1), st.integers(0, 12), st.binary(max_size=8))
    return st.builds(
        mutate, st.sampled_from(kinds), st.lists(edit, min_size=1, max_size=6), st.sampled_from([1.0, 1.0, 0.95, 0.6])
    )


@settings(max_examples=500)
@given(mutations(list(SOUND)))
def test_damaged_files_raise_only_image_errors(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt(data)


def test_damaged_files_give_no_warnings() -> None:
    """A worker's warnings would bury the log. Pillow itself warns of tags that reach beyond the end of these files."""
    tiff, exif = SOUND["tiff"], SOUND["jpeg with exif"]
    start = exif.index(b"a description")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attempt(tiff[:4] + tiff[4:].replace(struct.pack("<HH", 273, 4), struct.pack("<HH", 273, 12), 1))
        attempt(exif[: start - 30] + b"\xff\xff\xff\x7f" + exif[start - 26 :])
    assert [str(warning.message) for warning in caught] == []
