"""The HTTP application: `POST /predict`, `/embed` and `/explain`, health, metrics, OpenAPI and the page.

    app = Application([service])       # any ASGI server runs it

A request is one photo as its body, several as multipart/form-data, or JSON with base64. Clients choose among models by
the names given at start; no path and no address from a client is ever opened.
"""

import asyncio
import hmac
import logging
import mimetypes
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from plainvit.data.decode import ImageError
from plainvit.errors import NonFiniteError
from plainvit.serve.batcher import DeadlineError
from plainvit.serve.requests import FormatError, SizeError, read_photos
from plainvit.serve.service import OverloadError, Service, lower_priority

PAGE = Path(__file__).with_name("page")
FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js", "/openapi.json": "openapi.json"}
OPEN = ("/", "/page.css", "/page.js", "/healthz", "/readyz")  # no data of the model: they need no token
MAX_EXPLANATIONS = 4  # requests to /explain at a time; each needs a backward pass
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
ENCODED_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
# Status of an exception; the first that matches. All others are errors of the server.
STATUS: list[tuple[type[BaseException], int]] = [
    (FormatError, 415),
    (SizeError, 413),
    (ImageError, 422),
    (DeadlineError, 503),
    (OverloadError, 429),
    (NonFiniteError, 500),
]
RETRY = {429: {"retry-after": "1"}, 503: {"retry-after": "1"}}  # headers by status
Handler = Callable[[Request], Awaitable[Response]]
Describe = Callable[[Tensor], dict[str, Any]]
log = logging.getLogger("plainvit")


class Application:
    """The ASGI application of a fixed set of models.

    `hosts` are the accepted Host headers, all if empty; a token protects everything except the page and health checks.
    Only HTTP is handled: run it with lifespan and WebSocket support turned off.
    """

    def __init__(self, services: Sequence[Service], *, token: str = "", hosts: Sequence[str] = ()) -> None:
        self.services = {service.name: service for service in services}
        self.metrics = services[0].metrics
        self.active_explanations = 0
        self.explainer_thread = ThreadPoolExecutor(1, "explain", lower_priority)
        self.token, self.hosts = token.encode(), hosts
        self.routes: dict[str, tuple[str, Handler]] = {
            "/predict": ("POST", self.predict),
            "/embed": ("POST", self.embed),
            "/explain": ("POST", self.explain),
            "/models": ("GET", self.list_models),
            "/metrics": ("GET", self.get_metrics),
            "/healthz": ("GET", self.get_health),
            "/readyz": ("GET", self.get_health),
            **{path: ("GET", _make_file_handler(PAGE / name)) for path, name in FILES.items()},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, start = Request(scope, receive), time.monotonic()
        response = await self.respond(request)
        response.raw_headers += ENCODED_HEADERS
        request_id = request.headers.get("x-request-id", "")
        if re.fullmatch(r"[\w.-]{1,64}", request_id):
            response.headers["x-request-id"] = request_id
        path = scope["path"] if scope["path"] in self.routes else "other"
        self.metrics.requests.labels(path, response.status_code).inc()
        self.metrics.request_seconds.labels(path).observe(time.monotonic() - start)
        await response(scope, receive, send)

    async def respond(self, request: Request) -> Response:
        """The response of the route, or that of an error."""
        try:
            self.check_access(request)
            path = request.scope["path"]
            if path not in self.routes:
                raise HTTPException(404, f"there is no {path[:80]}; /openapi.json describes the API")
            method, handle = self.routes[path]
            if request.method != method and (request.method, method) != ("HEAD", "GET"):
                raise HTTPException(405, f"use {method} for {path}", {"allow": method})
            return await handle(request)
        except HTTPException as error:
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        except Exception as error:
            status = _find_status(error)
            if status == 500:
                log.exception("%s failed", request.scope["path"])
            return JSONResponse({"error": _describe(error)}, status, RETRY.get(status))

    def check_access(self, request: Request) -> None:
        """Raises the error of a request that is not allowed."""
        headers = request.headers
        if {"content-length", "transfer-encoding"} <= set(headers):  # a proxy may use the other length
            message = "the request has both content-length and transfer-encoding"
            raise HTTPException(400, message, {"connection": "close"})
        host = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if self.hosts and host not in self.hosts:  # a web page can give its own host name the address of this machine
            raise HTTPException(400, "the Host header must name this machine, such as localhost")
        if request.scope["path"] in OPEN:
            return
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HTTPException(403, "requests from other sites are not allowed")
        given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")  # the bytes of the header
        if self.token and not hmac.compare_digest(given, self.token):
            raise HTTPException(401, "a token is required: send the header `Authorization: Bearer TOKEN`")

    def find_service(self, request: Request) -> Service:
        name = request.query_params.get("model", next(iter(self.services)))
        if name not in self.services:
            raise HTTPException(404, f"there is no model {name[:80]!r}; models: {', '.join(self.services)}")
        return self.services[name]

    async def predict(self, request: Request) -> Response:
        service, k = self.find_service(request), _parse_number(request, "k", 1, 1000) or 5
        if not service.predictor.classes:
            raise HTTPException(404, "this model has no head and predicts no classes: use /embed")
        return await self.compute(request, service, "logits", lambda logits: self.name_classes(service, logits, k))

    async def embed(self, request: Request) -> Response:
        service = self.find_service(request)
        return await self.compute(request, service, "features", lambda features: {"features": features.tolist()})

    async def compute(self, request: Request, service: Service, output: str, describe: Describe) -> Response:
        """One entry per photo, in order; the status is an error only if every photo failed."""
        deadline = time.monotonic() + service.limits.deadline
        service.admit()  # before the body is read: a busy server rejects at once
        photos = await read_photos(request, service.limits)
        entries: list[dict[str, Any]] = []
        for result in await service.run(output, photos, deadline):
            is_answered = isinstance(result, Tensor)
            entries.append(describe(result) if is_answered else _describe_failure(service, result))
            service.metrics.images.labels(service.name, "answered" if is_answered else "failed").inc()
        statuses = [entry.get("status", 200) for entry in entries]
        status = 200 if 200 in statuses else statuses[0]
        return JSONResponse({"model": service.name, "results": entries}, status, RETRY.get(status))

    def name_classes(self, service: Service, logits: Tensor, k: int) -> dict[str, Any]:
        """The k most probable classes for logits [K], and how often similar predictions were right."""
        names, best = service.predictor.class_names, logits.softmax(-1).topk(min(k, len(logits)))
        predictions = [
            {"label": names[index], "probability": value, "class": index}
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        entry: dict[str, Any] = {"predictions": predictions}
        if service.explainer is not None:
            confidence = service.explainer.describe_confidence(predictions[0]["probability"])
            entry |= {"confidence": confidence} if confidence else {}
        return entry

    async def explain(self, request: Request) -> Response:
        service = self.find_service(request)
        if service.explainer is None:
            raise HTTPException(404, "explanations are turned off on this server")
        if self.active_explanations >= MAX_EXPLANATIONS:
            raise OverloadError
        label = _parse_number(request, "class", 0, service.predictor.classes - 1)  # None: the predicted class
        deadline = time.monotonic() + service.limits.deadline
        self.active_explanations += 1
        try:
            photos = await read_photos(request, service.limits)
            if len(photos) > 1:
                raise HTTPException(400, "send one image to /explain")
            image = await service.decode(photos[0], deadline)
            loop = asyncio.get_running_loop()
            job = loop.run_in_executor(self.explainer_thread, service.explainer.explain, image, label)
            explanation = await asyncio.wait_for(job, deadline - time.monotonic())
        except TimeoutError as error:
            raise DeadlineError from error
        finally:
            self.active_explanations -= 1
        return JSONResponse({"model": service.name, **explanation})

    async def list_models(self, _: Request) -> Response:
        rows = [{"name": name, "classes": service.predictor.classes} for name, service in self.services.items()]
        return JSONResponse({"models": rows})

    async def get_health(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")  # also of /readyz: the models are loaded before the port is opened

    async def get_metrics(self, _: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")


def _make_file_handler(path: Path) -> Handler:
    """Not a FileResponse: while it sends, uvicorn reads on, and a client that reads nothing would fill the memory."""
    content, kind = path.read_bytes(), mimetypes.guess_type(path.name)[0]

    async def send_file(_: Request) -> Response:
        return Response(content, media_type=kind)

    return send_file


def _parse_number(request: Request, name: str, first: int, last: int) -> int | None:
    """The number in the query; None if it is not given."""
    text = request.query_params.get(name)
    if text is None:
        return None
    is_number = text.isdecimal() and len(text) < 10
    if not (is_number and first <= int(text) <= last):
        raise HTTPException(400, f"{name} must be a number from {first} to {last}")
    return int(text)


def _describe_failure(service: Service, error: BaseException) -> dict[str, Any]:
    status = _find_status(error)
    if status == 500:
        log.error("%s failed on an image", service.name, exc_info=error)
    return {"error": _describe(error), "status": status}


def _find_status(error: BaseException) -> int:
    for kind, status in STATUS:
        if isinstance(error, kind):
            return status
    return 500


def _describe(error: BaseException) -> str:
    """The message that a client may see; unknown errors are only logged."""
    is_known = isinstance(error, tuple(kind for kind, _ in STATUS))
    return str(error).splitlines()[0] if is_known and str(error) else "the server could not process this"
