"""A request -> the encoded photos in it, within limits that are checked before memory is allocated.

photos = await read_photos(request, Limits())     # one photo as the body, multipart/form-data, or JSON with base64
check_photo(photos[0], max_pixels=25_000_000)     # before it is decoded
"""

import asyncio
import base64
import binascii
import json
import re
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from plainvit.data.decode import ImageError, get_image_size

CURL_DEFAULT = "application/x-www-form-urlencoded"  # the content type of `curl --data-binary` for any file
CONTENT_TYPES = ("multipart/form-data", "application/json", "application/octet-stream", CURL_DEFAULT, "")
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
        height, width = get_image_size(photo)
    except ImageError as error:
        raise (SizeError if "limit" in str(error) else ImageError)(str(error)) from error
    if height * width > max_pixels:
        raise SizeError(f"{width} x {height} is over the limit of {max_pixels / 1e6:g} megapixels")


async def read_photos(request: Request, limits: Limits) -> list[bytes]:
    """The encoded photos of a request, after its size has been checked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in CONTENT_TYPES and not kind.startswith("image/"):
        raise HTTPException(415, "send an image, multipart/form-data, or application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "content-encoding is not supported: send the body as it is")
    body = await read_body(request, limits)
    if kind == "multipart/form-data":
        photos = _parse_multipart(request.headers["content-type"], body, limits.max_images)
    elif kind == "application/json":
        photos = await asyncio.to_thread(_parse_json, body)
    else:
        photos = [body]
    if not photos:
        raise HTTPException(400, "the request has no image")
    if len(photos) > limits.max_images:
        raise HTTPException(413, f"{len(photos)} images are above the limit of {limits.max_images} per request")
    return photos


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, read only as far as the limits allow."""
    limit = int(limits.max_megabytes * 1e6)
    length = request.headers.get("content-length")
    if length is None and "transfer-encoding" not in request.headers:
        raise HTTPException(411, "the request needs a content-length")
    too_large = HTTPException(413, f"the request is larger than the limit of {limit / 1e6:g} MB")
    if length is not None and (not length.isdecimal() or int(length[:18]) > limit):
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError as error:
        late = f"the request was not received within {limits.body_seconds:g} s"
        raise HTTPException(408, late, {"connection": "close"}) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the connection was closed") from error
    return b"".join(chunks)


def _parse_multipart(content_type: str, body: bytes, most: int) -> list[bytes]:
    """The files of a form (RFC 7578); `most` bounds the parts that are looked at."""
    boundary = re.search(r'boundary="?([^";]{1,70})', content_type)
    if boundary is None:
        raise HTTPException(400, "multipart/form-data needs a boundary")
    preamble, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary[1].encode("latin-1"), 2 * most + 1)
    if preamble.strip() or not parts or parts[-1].strip() != b"--":
        raise HTTPException(400, f"invalid multipart/form-data: it must end with its boundary within {2 * most} parts")
    files = []
    for part in parts[:-1]:
        head, blank, content = part.partition(b"\r\n\r\n")
        if not blank or not head.startswith(b"\r\n"):
            raise HTTPException(400, "invalid multipart/form-data: a part has no header")
        if b"filename" in head:
            files.append(content)
    return files


def _parse_json(body: bytes) -> list[bytes]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "invalid JSON") from error
    texts = value.get("images") if isinstance(value, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, 'the JSON must be {"images": [BASE64, ...]}')
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise HTTPException(422, "an image is not valid base64; addresses and paths are not opened") from error
