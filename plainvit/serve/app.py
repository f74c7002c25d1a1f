"""The HTTP application: `POST /predict`, `/embed` and `/explain`, health, metrics, OpenAPI and the page.

    app = make_app([service], token="")       # any ASGI server runs it

A request is one photo as its body, several as multipart/form-data, or JSON with base64. Clients choose among models by
the names given at start; no path and no address from a client is ever opened.
"""

import asyncio
import base64
import binascii
import hmac
import json
import mimetypes
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor, stack

from plainvit.data.decode import ImageError
from plainvit.errors import NonFiniteError
from plainvit.serve.batcher import DeadlineError, OverloadError
from plainvit.serve.explain import Explainer
from plainvit.serve.limits import FormatError, SizeError
from plainvit.serve.metrics import Metrics
from plainvit.serve.service import Service

PAGE = Path(__file__).with_name("page")
CURL_DEFAULT = "application/x-www-form-urlencoded"  # what `curl --data-binary` says of any file
MAX_EXPLAINED = 4  # requests to /explain that wait; each needs a backward pass
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# Status of an exception; the first that matches. All else is a fault of the server.
STATUS: list[tuple[type[BaseException], int]] = [
    (FormatError, 415),
    (SizeError, 413),
    (ImageError, 422),
    (DeadlineError, 503),
    (OverloadError, 429),
    (NonFiniteError, 500),
]


class Server:
    """The routes, for a fixed set of models."""

    def __init__(self, services: Sequence[Service], explainers: dict[str, Explainer]) -> None:
        self.services = {service.name: service for service in services}
        self.explainers = explainers
        self.explaining, self.explainer_thread = 0, ThreadPoolExecutor(1, "explain")

    def find_service(self, request: Request) -> Service:
        name = request.query_params.get("model", next(iter(self.services)))
        if name not in self.services:
            raise HTTPException(404, f"there is no model {name[:80]!r}; models: {', '.join(self.services)}")
        return self.services[name]

    async def predict(self, request: Request) -> Response:
        service, k = self.find_service(request), _parse_number(request, "k", 5, 1, 1000)
        if not service.predictor.classes:
            raise HTTPException(404, "this model has no head and predicts no classes: use /embed")
        results = await self.answer(request, service, "logits")
        good = [row for row in results if isinstance(row, Tensor)]
        answers = iter(self.name_classes(service, stack(good), min(k, service.predictor.classes)) if good else ())
        return _respond(service, results, [next(answers) if isinstance(row, Tensor) else None for row in results])

    def name_classes(self, service: Service, logits: Tensor, k: int) -> list[dict[str, Any]]:
        best, names = logits.softmax(-1).topk(k), service.predictor.class_names
        explainer, found = self.explainers.get(service.name), []
        for values, classes in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            pairs = zip(values, classes, strict=True)
            top = [{"label": names[at], "probability": value, "class": at} for value, at in pairs]
            similar = explainer.describe_confidence(values[0]) if explainer else None
            found.append({"predictions": top} | ({"confidence": similar} if similar else {}))
        return found

    async def embed(self, request: Request) -> Response:
        service = self.find_service(request)
        results = await self.answer(request, service, "features")
        answers = [{"features": row.tolist()} if isinstance(row, Tensor) else None for row in results]
        return _respond(service, results, answers)

    async def answer(self, request: Request, service: Service, output: str) -> list[Tensor | BaseException]:
        deadline = time.monotonic() + service.limits.deadline
        service.admit()  # before the body is read: a busy server answers at once
        photos = await read_photos(request, service)
        return await service.run(output, photos, deadline)

    async def explain(self, request: Request) -> Response:
        service = self.find_service(request)
        explainer = self.explainers.get(service.name)
        if explainer is None:
            raise HTTPException(404, "explanations are turned off on this server")
        if self.explaining >= MAX_EXPLAINED:
            raise OverloadError(2.0)
        label = _parse_number(request, "class", -1, 0, service.predictor.classes - 1)  # -1: the predicted class
        self.explaining += 1
        try:
            photo, *rest = await read_photos(request, service)
            if rest:
                raise HTTPException(400, "send one image to /explain")
            image = await service.decode(photo, time.monotonic() + service.limits.deadline)
            loop, label = asyncio.get_running_loop(), None if label < 0 else label
            found = await loop.run_in_executor(self.explainer_thread, explainer.explain, image, label)
        finally:
            self.explaining -= 1
        return JSONResponse({"model": service.name, **found})

    async def models(self, _: Request) -> Response:
        found = [(name, service.predictor) for name, service in self.services.items()]
        rows = [{"name": name, "classes": one.classes, "image_size": list(one.size)} for name, one in found]
        return JSONResponse({"models": rows})

    async def healthz(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    readyz = healthz  # the models are loaded before the port is opened

    async def metrics(self, _: Request) -> Response:
        text = next(iter(self.services.values())).metrics.render()
        return Response(text, media_type="text/plain; version=0.0.4")


def _parse_number(request: Request, name: str, default: int, first: int, last: int) -> int:
    text = request.query_params.get(name, str(default))
    if name in request.query_params and not (text.isdecimal() and first <= int(text[:9]) <= last):
        raise HTTPException(400, f"{name} must be a number from {first} to {last}")
    return int(text[:9])


def _respond(service: Service, results: Sequence[Any], answers: Sequence[dict[str, Any] | None]) -> Response:
    """One entry per image, in order. The status is an error only if no image was answered."""
    entries = []
    for result, answer in zip(results, answers, strict=True):
        service.metrics.images.labels(service.name, "failed" if answer is None else "answered").inc()
        entries.append(answer if answer is not None else {"error": _say(result), "status": _status(result)})
    status = 200 if any(answer is not None for answer in answers) else entries[0]["status"]
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONResponse({"model": service.name, "results": entries}, status, headers)


def _status(error: BaseException) -> int:
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def _say(error: BaseException) -> str:
    """The message of an error that a client may see; others are logged by the server alone."""
    known = any(isinstance(error, kind) for kind, _ in STATUS)
    return str(error).splitlines()[0] if known and str(error) else "the server could not process this image"


# Requests -------------------------------------------------------------------------------------------------------------


async def read_photos(request: Request, service: Service) -> list[bytes]:
    """The encoded photos of a request, after its size has been checked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    known = ("multipart/form-data", "application/json", "application/octet-stream", CURL_DEFAULT, "")
    if kind not in known and not kind.startswith("image/"):
        raise HTTPException(415, "send an image, multipart/form-data, or application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "content-encoding is not supported: send the body as it is")
    body = await read_body(request, int(service.limits.max_megabytes * 1e6), service.limits.body_seconds)
    most = service.limits.max_images
    if kind == "multipart/form-data":
        photos = _parse_multipart(request.headers["content-type"], body, most)
    elif kind == "application/json":
        photos = await asyncio.to_thread(_parse_json, body, most)
    else:
        photos = [body]
    if not photos:
        raise HTTPException(400, "the request has no image")
    if len(photos) > most:
        raise HTTPException(413, f"{len(photos)} images are above the limit of {most} per request")
    return photos


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body, read only as far as the limits allow."""
    length = request.headers.get("content-length")
    if length is None and "transfer-encoding" not in request.headers:
        raise HTTPException(411, "the request needs a content-length")
    too_large = HTTPException(413, f"the request is larger than the limit of {limit / 1e6:g} MB")
    if length is not None and (not length.isdecimal() or int(length[:18]) > limit):
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError as error:
        late = f"the request was not received within {seconds:g} s"
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


def _parse_json(body: bytes, most: int) -> list[bytes]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "invalid JSON") from error
    texts = value.get("images") if isinstance(value, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, 'the JSON must be {"images": [BASE64, ...]}')
    if len(texts) > most:
        raise HTTPException(413, f"{len(texts)} images are above the limit of {most} per request")
    try:
        return [base64.b64decode(text, validate=True) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise HTTPException(422, "an image is not valid base64; addresses and paths are not opened") from error


# Around every request -------------------------------------------------------------------------------------------------


class Guard:
    """Checks who asks, adds the security headers, echoes x-request-id, and counts."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Sequence[str], metrics: Metrics) -> None:
        self.app, self.token, self.hosts, self.metrics = app, token.encode(), hosts, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, start = Request(scope), time.monotonic()
        extra = dict(HEADERS)
        if re.fullmatch(r"[\w.-]{1,64}", identity := request.headers.get("x-request-id", "")):
            extra["x-request-id"] = identity

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                pairs = ((name.encode(), value.encode()) for name, value in extra.items())
                message["headers"] = [*message["headers"], *pairs]
                path = request.url.path if request.url.path in ROUTES else "other"
                self.metrics.requests.labels(path, message["status"]).inc()
                if path in ("/predict", "/embed", "/explain"):
                    self.metrics.request_seconds.labels(path).observe(time.monotonic() - start)
            await send(message)

        refusal = self.refuse(request)
        await (refusal or self.app)(scope, receive, send_guarded)

    def refuse(self, request: Request) -> Response | None:
        """The response to a request that is not allowed; None for the others."""
        if {"content-length", "transfer-encoding"} <= set(request.headers):  # two lengths: a proxy may take the other
            return _error(400, "the request has both content-length and transfer-encoding", {"connection": "close"})
        host = re.sub(r":\d+$", "", request.headers.get("host", "")).strip("[]").lower()
        if self.hosts and host not in self.hosts:  # a web page could reach a local server by a name of its own
            return _error(400, "the host is not served here")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _error(403, "requests from other sites are not allowed")
        is_open = request.url.path in ("/", "/page.css", "/page.js", "/healthz", "/readyz")  # no data of the model
        if self.token and not is_open:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.token):
                return _error(401, "a token is required: send the header `Authorization: Bearer TOKEN`")
        return None


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail, dict(error.headers or {}))


async def _known_error(_: Request, error: Exception) -> Response:
    seconds = getattr(error, "seconds", 1.0)
    headers = {"retry-after": str(round(seconds))} if _status(error) in (429, 503) else None
    return _error(_status(error), _say(error), headers)


def _serve_file(path: Path) -> Any:
    """Not a FileResponse: while it sends, uvicorn reads on, and a client that reads nothing would fill the memory."""
    content, kind = path.read_bytes(), mimetypes.guess_type(path.name)[0]

    async def send_file(_: Request) -> Response:
        return Response(content, media_type=kind)

    return send_file


FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/openapi.json": "openapi.json"}
ROUTES = ("/predict", "/embed", "/explain", "/models", "/healthz", "/readyz", "/metrics", *FILES)


def make_app(
    services: Sequence[Service],
    explainers: dict[str, Explainer] | None = None,
    *,
    token: str = "",
    hosts: Sequence[str] = (),
) -> ASGIApp:
    """The application. `hosts` are the accepted Host headers, all if empty; a token protects all but the page."""
    server = Server(services, explainers or {})

    posted, shown = ("predict", "embed", "explain"), ("models", "metrics", "healthz", "readyz")
    routes = [Route(f"/{name}", getattr(server, name), methods=["POST"]) for name in posted]
    routes += [Route(f"/{name}", getattr(server, name)) for name in shown]
    routes += [Route(path, _serve_file(PAGE / name)) for path, name in FILES.items()]
    handlers: dict[Any, Any] = {HTTPException: _http_error, **{kind: _known_error for kind, _ in STATUS}}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Guard(app, token=token, hosts=hosts, metrics=services[0].metrics)
