"""Encoded images -> pixels: one function for training, evaluation and serving.

libjpeg-turbo decodes JPEGs at the smallest sufficient scale; Pillow decodes everything else, and JPEGs that the strict
decoder rejects. Sizes are checked before memory is allocated; only listed formats are opened; only the first frame.
"""

import io
import warnings

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from plainvit.errors import first_line

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
PIXEL_LIMIT = 50_000_000
MARGIN = 3  # a JPEG decoded at a smaller scale keeps at least this many pixels per output pixel, for antialiasing


class DataError(ValueError):
    """A problem with the data that the user can fix; the command ends with exit code 3."""

    exit_code = 3


class ImageError(DataError):
    """An image that cannot be read or decoded."""


def decode(data: bytes | np.ndarray, target: tuple[int, int] | None = None) -> np.ndarray:
    """Decode to uint8 pixels [height, width, 3], rotated upright; arrays are returned unchanged.

    `target` is the (height, width) to which the whole image will be resized: a JPEG at least MARGIN times larger is
    decoded at a half, a quarter or an eighth of its size, still no smaller than MARGIN times `target`.
    """
    if isinstance(data, np.ndarray):
        return data
    if data[:2] == b"\xff\xd8":
        pixels = _decode_jpeg(data, target)
        if pixels is not None:
            return pixels
    with _open_image(data) as image:
        return to_pixels(image)


def get_image_size(data: bytes | np.ndarray) -> tuple[int, int]:
    """(height, width) of the upright image, from its header alone."""
    if isinstance(data, np.ndarray):
        return int(data.shape[0]), int(data.shape[1])
    if data[:2] == b"\xff\xd8" and _orientation(data) == 1:
        try:
            height, width, _ = _read_jpeg_header(data, strict=False)
        except ValueError:
            pass  # Pillow reads some headers that libjpeg-turbo rejects
        else:
            _check_size(height, width)
            return height, width
    with _open_image(data) as image:
        is_rotated = _exif_orientation(image) in (5, 6, 7, 8)
        return (image.width, image.height) if is_rotated else (image.height, image.width)


def _decode_jpeg(data: bytes, target: tuple[int, int] | None) -> np.ndarray | None:
    """Decode with libjpeg-turbo; None for CMYK and what its strict decoder rejects, which Pillow then tries."""
    try:
        height, width, color_space = _read_jpeg_header(data, strict=True)
    except ValueError:
        return None
    _check_size(height, width)
    if color_space in ("CMYK", "YCCK"):
        return None
    orientation = _orientation(data)
    if target and orientation in (5, 6, 7, 8):
        target = target[1], target[0]
    reduction = min(height / target[0], width / target[1]) / MARGIN if target else 1
    divisor = next((d for d in (8, 4, 2) if reduction >= d), 1)
    min_height, min_width = (-(-height // divisor), -(-width // divisor)) if divisor > 1 else (0, 0)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=min_height, min_width=min_width)
    except ValueError:
        return None
    return pixels if orientation == 1 else _rotate_upright(pixels, orientation)


def _read_jpeg_header(data: bytes, *, strict: bool) -> tuple[int, int, str]:
    try:
        height, width, color_space, _ = simplejpeg.decode_jpeg_header(data, strict=strict)
    except KeyError as error:  # simplejpeg on a header that ends before the color space
        raise ValueError("the JPEG header is truncated") from error
    return int(height), int(width), str(color_space)


def _orientation(data: bytes) -> int:
    """The EXIF orientation of a JPEG; 1 (upright) without one."""
    if not has_exif(data):
        return 1
    try:
        with _open_image(data) as image:
            return _exif_orientation(image)
    except ImageError:
        return 1


def has_exif(data: bytes) -> bool:
    """Whether a JPEG has an EXIF block among the segments before its image."""
    start, markers = 2, (*range(0xE0, 0xF0), 0xFE, 0xDB, 0xC4)
    while start + 10 <= len(data) and data[start] == 0xFF and data[start + 1] in markers:
        if data[start + 1] == 0xE1 and data[start + 4 : start + 10] == b"Exif\0\0":
            return True
        start += 2 + int.from_bytes(data[start + 2 : start + 4])
    return False


def _exif_orientation(image: Image.Image) -> int:
    if image.format == "TIFF" or (image.format in ("PNG", "JPEG", "MPO") and "exif" not in image.info):
        return 1  # Pillow rotates TIFFs itself; getexif would decode the whole PNG, and would read XMP in a JPEG
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # Pillow's parsers raise anything on damaged metadata; the pixels may still be intact
        return 1
    return orientation if orientation in range(1, 9) else 1


def _rotate_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo one of EXIF's eight orientations."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def to_pixels(image: Image.Image) -> np.ndarray:
    """Pixels of a Pillow image, as `decode` returns them: upright, RGB, 8 bits, transparency on white."""
    orientation = _exif_orientation(image)
    try:
        image.load()
        return _rotate_upright(np.array(_to_rgb(image)), orientation)
    except Exception as error:  # Pillow's decoders raise anything on damaged data
        is_truncated = "truncated" in str(error)  # Pillow's sentence counts the bytes that are left, not those missing
        raise ImageError("truncated: copy it again from its source" if is_truncated else first_line(error)) from error


def _open_image(data: bytes) -> Image.Image:
    if not data:
        raise ImageError("the file is empty")
    warnings.filterwarnings("ignore", module="PIL")  # they repeat our errors; set here, as filters may be reset
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"not an image in a known format: it starts with {data[:12]!r}") from error
    except Exception as error:  # Pillow's parsers raise anything on damaged data
        raise ImageError(first_line(error)) from error
    _check_size(image.height, image.width)
    return image


def _check_size(height: int, width: int) -> None:
    if height * width > PIXEL_LIMIT:
        raise ImageError(f"{width} x {height} is over the limit of {PIXEL_LIMIT:,} pixels")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB: 16 bits are scaled, transparency is composed on white."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.nan_to_num(np.asarray(image).astype(np.float64))
        if image.mode.startswith("I"):
            maximum = 65535
        elif values.max(initial=0) <= 1:  # floats are in [0, 1] or [0, 255]
            maximum = 1
        else:
            maximum = 255
        image = Image.fromarray((values.clip(0, maximum) * (255 / maximum)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")
