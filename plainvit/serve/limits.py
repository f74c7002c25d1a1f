"""Limits of sizes and times, and the check of a photo before it is decoded."""

from dataclasses import dataclass

from plainvit.data.decode import ImageError, size

SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")  # and WebP
MAX_SCANS = 100  # of a progressive JPEG; a file of a few kB may ask for thousands of passes over all pixels


class FormatError(ImageError):
    """A file in a format that the server does not decode."""


class SizeError(ImageError):
    """An image with more pixels than the server decodes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one server."""

    max_batch: int = 32  # Images per forward pass
    max_queue: int = 256  # Images that wait or run; further requests get status 429
    max_images: int = 64  # Images per request
    max_megabytes: float = 20.0  # Size of a request
    max_megapixels: float = 25.0  # Size of one image
    deadline: float = 10.0  # Seconds from the arrival of a request to its answer
    decode_seconds: float = 2.0  # Time to decode one image
    body_seconds: float = 15.0  # Time to receive a request
    header_seconds: float = 10.0  # Time to receive the header of a request
    idle_seconds: float = 60.0  # Time that an unused connection is kept


def check_photo(photo: bytes, max_pixels: int) -> None:
    """Raises an ImageError for a photo that the server does not decode; only its header is read."""
    if not photo:
        raise ImageError("the image is empty")
    if not photo.startswith(SIGNATURES) and not (photo[:4] == b"RIFF" and photo[8:12] == b"WEBP"):
        raise FormatError("the format is not supported: send JPEG, PNG, WebP, GIF or BMP")
    if photo[:2] == b"\xff\xd8" and photo.count(b"\xff\xda") > MAX_SCANS:
        raise ImageError(f"the JPEG has more than {MAX_SCANS} scans")
    try:
        height, width = size(photo)
    except ImageError as error:
        raise (SizeError if "limit" in str(error) else ImageError)(str(error)) from error
    if height * width > max_pixels:
        raise SizeError(f"{width} x {height} is over the limit of {max_pixels / 1e6:g} megapixels")
