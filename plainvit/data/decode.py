"""Encoded images -> pixels: one function for training, evaluation and serving.

JPEG goes through libjpeg-turbo at the smallest scale that serves; whatever else, and what a strict decoder rejects,
through Pillow. Sizes are checked before a pixel is allocated; only listed formats are opened; the first frame counts.
"""

import contextlib
import io
import os
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
PIXEL_LIMIT = 50_000_000
_FILTERS = threading.Lock()
MARGIN = 3  # a scaled-down JPEG keeps at least this many pixels per pixel wanted, so that resizing still antialiases


class DataError(ValueError):
    """Something about the data that its owner can mend; the command ends with exit code 3."""

    exit_code = 3


class ImageError(DataError):
    """One image that cannot be decoded, and why."""


def decode(data: bytes | np.ndarray, wanted: tuple[int, int] | None = None, limit: int = PIXEL_LIMIT) -> np.ndarray:
    """Pixels [height, width, 3] in uint8, upright; pixels, which a source may hold as well, are what they are.

    `wanted` is the (height, width) to which the whole image will be resized: a JPEG at least MARGIN times larger is
    decoded at a half, a quarter or an eighth of its size, still no smaller than MARGIN times `wanted`.
    """
    if isinstance(data, np.ndarray):
        return data
    if data[:2] == b"\xff\xd8":
        pixels = _decode_jpeg(data, wanted, limit)
        if pixels is not None:
            return pixels
    return _decode_any(data, limit)


def size(data: bytes | np.ndarray) -> tuple[int, int]:
    """(height, width) of the upright image, from its header alone."""
    if isinstance(data, np.ndarray):
        return int(data.shape[0]), int(data.shape[1])
    if data[:2] == b"\xff\xd8" and _orientation(data) == 1:
        try:
            return _jpeg_header(data, strict=False)[:2]
        except ValueError:
            pass
    with _opened(data, PIXEL_LIMIT) as image:
        turned = _exif_orientation(image) in (5, 6, 7, 8)
        return (image.width, image.height) if turned else (image.height, image.width)


def _decode_jpeg(data: bytes, wanted: tuple[int, int] | None, limit: int) -> np.ndarray | None:
    """None where Pillow should have a try: CMYK, or what the strict decoder rejects."""
    try:
        height, width, colours = _jpeg_header(data, strict=True)
    except ValueError:
        return None
    _check_size(height, width, limit)
    if colours in ("CMYK", "YCCK"):
        return None
    orientation = _orientation(data)
    if wanted and orientation in (5, 6, 7, 8):
        wanted = wanted[1], wanted[0]
    spare = min(height / wanted[0], width / wanted[1]) / MARGIN if wanted else 1
    divisor = next((d for d in (8, 4, 2) if spare >= d), 1)
    least = (-(-height // divisor), -(-width // divisor)) if divisor > 1 else (0, 0)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1])
    except ValueError:
        return None
    return pixels if orientation == 1 else _turned(pixels, orientation)


def _jpeg_header(data: bytes, *, strict: bool) -> tuple[int, int, str]:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=strict)
    except KeyError as error:  # simplejpeg's own table, where the header ends before the colour space
        raise ValueError("its header is cut short") from error
    return int(height), int(width), str(colours)


def _orientation(data: bytes) -> int:
    """EXIF's orientation, 1 (upright) for most; Pillow parses the block where there is one."""
    if not has_exif(data):
        return 1
    try:
        with _opened(data, PIXEL_LIMIT) as image:
            return _exif_orientation(image)
    except ImageError:
        return 1


def has_exif(data: bytes) -> bool:
    """Whether a JPEG has an EXIF block among the segments before its image."""
    place = 2
    while place + 10 <= len(data) and data[place] == 0xFF and data[place + 1] in (*range(0xE0, 0xF0), 0xFE, 0xDB, 0xC4):
        if data[place + 1] == 0xE1 and data[place + 4 : place + 10] == b"Exif\0\0":
            return True
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
    return False


def _exif_orientation(image: Image.Image) -> int:
    if image.format == "TIFF" or (image.format in ("PNG", "JPEG", "MPO") and "exif" not in image.info):
        return 1  # Pillow turns a TIFF by itself; a PNG would be decoded for it, and in a JPEG XMP would count
    try:
        with _quiet():
            orientation = image.getexif().get(0x0112, 1)
    except Exception as error:  # Pillow's parsers raise anything on damaged metadata
        raise ImageError(_reason(error)) from error
    return orientation if orientation in range(1, 9) else 1


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """What the camera meant: EXIF's eight ways of holding it."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _decode_any(data: bytes, limit: int) -> np.ndarray:
    with _opened(data, limit) as image:
        return pixels_of(image)


def pixels_of(image: Image.Image) -> np.ndarray:
    """An image that Pillow has opened, as its file would be decoded: turned, on white, in 8 bits."""
    orientation = _exif_orientation(image)
    try:
        image.load()
        return _turned(np.array(_to_rgb(image)), orientation)
    except Exception as error:  # Pillow's decoders raise anything on damaged data
        raise ImageError(_reason(error)) from error


def _opened(data: bytes, limit: int) -> Image.Image:
    if not data:
        raise ImageError("the file is empty")
    try:
        with _quiet():
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"not an image in a known format: it starts with {data[:12]!r}") from error
    except Exception as error:  # Pillow's parsers raise anything on damaged data, and its size warning may be an error
        raise ImageError(_reason(error)) from error
    _check_size(image.height, image.width, limit)
    return image


def _renew_lock() -> None:
    """In a forked worker: another thread of its parent may have held the lock, and will never let go of it here."""
    global _FILTERS
    _FILTERS = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Pillow warns of what it also raises or we refuse. Filters are the process's: one thread at a time sets them."""
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check_size(height: int, width: int, limit: int) -> None:
    if height < 1 or width < 1:
        raise ImageError(f"it has no pixels ({width} x {height})")
    if height * width > limit:
        raise ImageError(f"{width} x {height} is over the limit of {limit:,} pixels")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Grey, palette and CMYK as RGB; 16 bits scaled to 8; transparency on white, as a page shows it."""
    if image.mode.startswith("I") or image.mode == "F":
        deep = np.nan_to_num(np.asarray(image).astype(np.float64))
        top = 65535 if image.mode.startswith("I") else 1 if deep.max(initial=0) <= 1 else 255
        image = Image.fromarray((deep.clip(0, top) * (255 / top)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, over)
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__
