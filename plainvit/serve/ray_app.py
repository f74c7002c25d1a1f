"""The server on many machines: a Ray Serve application of replicas, each with the same batcher, behind one gateway.

    serve run plainvit.serve.ray_app:build models=/shared/runs/photos replicas=4 gpus=1

Every machine needs the models under the same paths. The gateway holds a request until a replica has answered it: if the
replica dies, another one gets the request. https://docs.ray.io/en/latest/serve/develop-and-deploy.html
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from plainvit.serve import require
from plainvit.serve.requests import Limits, read_body
from plainvit.serve.server import TOKEN, load_app

TRIES = 5  # replicas that may die during one request


class Replica:
    """One copy of the models and the application around them."""

    def __init__(self, models: list[str], backend: str, device: str) -> None:
        options: Any = {"backend": backend, "device": device, "token": os.environ.get(TOKEN, "")}
        self.app = load_app(models, Limits(), **options)

    async def respond(self, scope: dict[str, Any], body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body of the response to one HTTP request."""
        status, headers, chunks = 500, [], []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                chunks.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return status, headers, b"".join(chunks)


class Gateway:
    """Sends each request to a replica, and to another one if that dies."""

    def __init__(self, replicas: Any) -> None:
        self.replicas, self.limits = replicas, Limits()

    async def __call__(self, request: Request) -> Response:
        import ray  # pyright: ignore

        try:
            body = await read_body(request, self.limits) if request.method == "POST" else b""
        except HTTPException as error:
            return JSONResponse({"error": error.detail}, error.status_code)
        kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "root_path")
        scope = {name: request.scope[name] for name in kept if name in request.scope}
        for attempt in range(TRIES):
            try:
                status, headers, content = await self.replicas.respond.remote(scope, body)
            except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError):
                await asyncio.sleep(0.1 * attempt)
                continue
            response = Response(content, status)
            response.raw_headers = headers
            return response
        return JSONResponse({"error": "no replica could answer"}, 503, {"retry-after": "1"})


def build(arguments: Mapping[str, str]) -> Any:
    """The application; arguments are models (separated by commas), replicas, backend, device, gpus and cpus."""
    require("ray", "ray")
    from ray import serve  # pyright: ignore

    limits = Limits()
    models = [word for word in arguments.get("models", "").split(",") if word]
    if not models:
        raise ValueError("no model given: use models=PATH")
    resources = {"num_cpus": float(arguments.get("cpus", "1")), "num_gpus": float(arguments.get("gpus", "0"))}
    replicas = serve.deployment(Replica).options(
        num_replicas=int(arguments.get("replicas", "2")),
        max_ongoing_requests=limits.max_queue,
        ray_actor_options=resources,
        health_check_period_s=2,
    )
    bound = replicas.bind(models, arguments.get("backend", "auto"), arguments.get("device", "auto"))
    options = {"max_ongoing_requests": 4 * limits.max_queue, "ray_actor_options": {"num_cpus": 0}}
    gateway = serve.deployment(Gateway).options(**options)
    return gateway.bind(bound)
