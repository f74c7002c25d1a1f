"""A server of a tiny model in a thread of the test, on a free port of the loopback interface."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from pictures import encode, photo

from plainvit.evaluate.predictor import Predictor
from plainvit.serve.app import Application
from plainvit.serve.explain import Explainer
from plainvit.serve.requests import Limits
from plainvit.serve.server import LOOPBACK, DeadlineServer, bind_port, make_server
from plainvit.serve.service import Service


class Running:
    """A started server and a client of it."""

    def __init__(self, app: Application, service: Service, http: DeadlineServer, port: int) -> None:
        self.app, self.service, self.http, self.port = app, service, http, port
        self.address = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.address, timeout=30, trust_env=False)

    def post(self, path: str = "/predict", **options: Any) -> httpx.Response:
        return self.client.post(path, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def talk(self, data: bytes) -> bytes:
        """All that the server says to these bytes, until it closes or is silent for a second."""
        with self.connect() as connection:
            connection.sendall(data)
            connection.settimeout(1)
            said = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while chunk := connection.recv(65536):
                    said += chunk
        return said


@contextlib.contextmanager
def serving(
    predictor: Predictor,
    limits: Limits | None = None,
    backend: Any = None,
    token: str = "",
    name: str = "tiny",
    neighbors: str = "",
) -> Iterator[Running]:
    limits = limits or Limits()
    service = Service(name, predictor, limits, backend, explainer=Explainer(predictor, neighbors))
    app = Application([service], token=token, hosts=LOOPBACK)
    server, bound = make_server(app, limits), bind_port("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    running = Running(app, service, server, bound.getsockname()[1])
    try:
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        thread.join(40)
        assert not thread.is_alive()


def photos(count: int, form: str = "JPEG") -> list[bytes]:
    return [encode(photo(60, 80, seed), form) for seed in range(count)]


def as_files(some: list[bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", (f"{index}.jpg", body)) for index, body in enumerate(some)]


def read_memory(name: str = "VmRSS") -> int:
    """Bytes of memory that this process holds; VmHWM: the most that it held."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def reset_peak_memory() -> int:
    """Returns what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return read_memory()
