"""`plainvit serve`: load models, choose their backends, and run the application until a signal comes.

SIGTERM or SIGINT closes the port, answers every accepted request, and ends the process. Without --host only programs on
this machine can connect.
"""

import contextlib
import gc
import ipaddress
import os
import resource
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

from plainvit.evaluate.predictor import Predictor
from plainvit.serve.app import Application
from plainvit.serve.backends import choose_backend
from plainvit.serve.explain import Explainer
from plainvit.serve.metrics import Metrics
from plainvit.serve.requests import Limits
from plainvit.serve.service import Service, lower_priority

TOKEN = "PLAINVIT_TOKEN"  # environment variable: command lines are visible to other users
LOOPBACK = ("localhost", "127.0.0.1", "::1")
GRACE = 30  # seconds for accepted requests after a signal


def split_name(word: str) -> tuple[str, str]:
    """NAME=MODEL -> (NAME, MODEL); without NAME=, the name is the last part of the path."""
    name, equals, model = word.partition("=")
    if equals and not Path(word).exists():
        return name, model
    return Path(word).name.removesuffix(".safetensors") or word, word


def load_app(
    models: Sequence[str],
    limits: Limits,
    *,
    backend: str = "auto",
    precision: str = "auto",
    device: str = "auto",
    neighbors: str = "",
    data_root: Path | None = None,
    no_explain: bool = False,
    token: str = "",
    hosts: Sequence[str] = (),
) -> Application:
    """Loads the models, each MODEL or NAME=MODEL, and makes the application; `plainvit serve --help` has the rest."""
    metrics, services = Metrics(), []
    names = [split_name(word) for word in models]
    if len({name for name, _ in names}) < len(names):
        raise ValueError("two models have the same name: use NAME=MODEL")
    for name, model in names:
        # auto: bf16 on a GPU; on a CPU the backends decide
        predictor = Predictor(model, device=device, precision="fp32" if precision == "fp32" else "auto")
        chosen, compute, speeds = choose_backend(predictor, backend, precision)
        measured = ", ".join(f"{kind} {speed:.0f}" for kind, speed in speeds.items())
        print(f"{name}: backend {chosen}" + (f" (images/s: {measured})" if measured else ""), flush=True)
        explainer = None if no_explain else Explainer(predictor, neighbors, data_root)
        services.append(Service(name, predictor, limits, compute, metrics, explainer))
    gc.collect()
    gc.freeze()  # a full collection would look at all objects of the libraries: a pause of 150 ms
    return Application(services, token=token, hosts=hosts)


def check_access(host: str, no_auth: bool) -> tuple[str, Sequence[str]]:
    """(token, accepted Host headers) for --host; a host that other machines reach needs a token or --no-auth."""
    token = os.environ.get(TOKEN, "").strip()  # files of secrets end with a newline
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ValueError(f"--host must be an IP address or localhost, got {host!r}") from error
    if not is_local and not token and not no_auth:
        raise ValueError(f"--host {host} lets other machines connect: set {TOKEN} to a secret, or give --no-auth")
    hosts = (*LOOPBACK, host) if is_local else ()
    return "" if no_auth else token, hosts


def bind_port(host: str, port: int) -> socket.socket:
    """A socket that is not listening yet: connections are refused until the models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it every response may wait 40 ms
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"--host {host} --port {port} cannot be used: {error}") from error
    return bound


class DeadlineServer(uvicorn.Server):
    """uvicorn that closes connections whose header is late, that are idle, or that do not read their response."""

    def __init__(self, config: uvicorn.Config, limits: Limits) -> None:
        super().__init__(config)
        self.limits = limits
        self.seen: dict[Any, tuple[Any, float]] = {}  # connection -> its current request, and since when

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self._close_late_connections()
        return await super().on_tick(counter)

    def _close_late_connections(self) -> None:
        now, limits = time.monotonic(), self.limits
        seen_before, self.seen = self.seen, {}
        for connection in list(self.server_state.connections):
            request = connection.cycle  # pyright: ignore[reportAttributeAccessIssue] - the http connection of uvicorn
            before, since = seen_before.get(connection, (request, now))
            since = since if before is request else now
            self.seen[connection] = request, since
            if request is None:
                limit = limits.header_seconds
            elif request.response_complete:
                limit = limits.idle_seconds
            else:
                limit = limits.body_seconds + limits.deadline + 5
            if now - since >= limit:
                connection.transport.abort()


def run(bound: socket.socket, models: Sequence[str], limits: Limits, **options: Any) -> None:
    """Serves until a signal comes. The threads of the libraries get the priority of the one that loads the models."""
    with ThreadPoolExecutor(1, initializer=lower_priority) as loader:
        app = loader.submit(load_app, models, limits, **options).result()
    try:
        make_server(app, limits).run(sockets=[bound])
    except KeyboardInterrupt:  # uvicorn raises it when all is answered; the teardown of Triton prints about leaks
        sys.stdout.flush()
        os._exit(130)


def make_server(app: Application, limits: Limits) -> DeadlineServer:
    """A server whose `run(sockets=[...])` serves until a signal comes."""
    with contextlib.suppress(ValueError, OSError):  # every connection is an open file
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = uvicorn.Config(
        app,
        http="h11",  # strict about what a request is
        ws="none",
        lifespan="off",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_level="warning",
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=GRACE,
    )
    return DeadlineServer(config, limits)
