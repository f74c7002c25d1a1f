"""HTTP clients to measure a server: start it, send photos over many connections, collect responses.

with start_server(command, port, requests) as session:
    responses = asyncio.run(send(port, requests, clients=64, seconds=10))
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

READY = b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nx-request-id: 00000000\r\n\r\n"


class Response(NamedTuple):
    """The response to one request."""

    request: int  # index of the request
    sent: float  # time.monotonic()
    seconds: float
    status: int  # 0: the connection was closed without a response
    same_id: bool  # the x-request-id is that of the request
    body: bytes


def encode_request(photos: Sequence[bytes]) -> bytes:
    """POST /predict with the photos as a form. `_post` replaces the 8 characters of x-request-id."""
    head = b'--border\r\ncontent-disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    body = b"".join(head + photo + b"\r\n" for photo in photos) + b"--border--\r\n"
    lines = "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=border\r\n"
    return f"{lines}content-length: {len(body)}\r\nx-request-id: {'0' * 8}\r\n\r\n".encode() + body


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def start_server(
    command: Sequence[str], port: int, requests: Sequence[bytes] = (READY,), folder: Path | None = None
) -> Iterator[int]:
    """Runs a server until the block ends; yields its session id when it responds to a request."""
    deadline = time.monotonic() + 300
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True, cwd=folder)
        try:
            while not asyncio.run(_is_ready(port, requests)):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    output = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"the server did not start: {' '.join(command)}\n{output}")
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # LitServe does not stop its workers


async def _is_ready(port: int, requests: Sequence[bytes]) -> bool:
    try:
        (response,) = await send(port, requests[:1], clients=1, count=1)
    except OSError:
        return False
    return response.status == 200


def read_cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


async def send(
    port: int,
    requests: Sequence[bytes],
    *,
    clients: int,
    seconds: float = 600.0,
    rate: float = 0.0,
    count: int = 2**31,
    offset: int = 0,
) -> list[Response]:
    """Each client has a connection and sends one request after the other until the time is over.

    Plain sockets, because an HTTP library would use a fifth of the cores.

    Args:
        rate: Requests per second of all clients together; 0: as fast as the responses come.
        count: Maximum number of requests per client.
        offset: Index of the first request.
    """
    started, responses = time.monotonic(), []

    async def run(client: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        for turn in range(count):
            due = started + (turn * clients + client) / rate if rate else 0.0
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if time.monotonic() >= started + seconds:
                break
            index = (offset + turn * clients + client) % len(requests)
            request_id = f"{client % 10000:04}{turn % 10000:04}".encode()
            responses.append(await _post(reader, writer, index, requests[index], request_id))
            if not responses[-1].status:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        writer.close()

    await asyncio.gather(*(run(client) for client in range(clients)))
    return responses


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int, request: bytes, request_id: bytes
) -> Response:
    sent = time.monotonic()
    try:
        start, _, rest = request.partition(b"x-request-id: ")
        writer.writelines((start, b"x-request-id: ", request_id, rest[8:]))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    except (OSError, asyncio.IncompleteReadError):
        return Response(index, sent, time.monotonic() - sent, 0, False, b"")
    same_id = head.partition(b"x-request-id: ")[2][:8] == request_id
    return Response(index, sent, time.monotonic() - sent, int(head.split(None, 2)[1]), same_id, body)


def measure_server(
    session: int, port: int, requests: Sequence[bytes], *, clients: int, seconds: float, processes: int = 1
) -> dict[str, float]:
    """Requests/s, latency, failures and the server's CPU ms per request, after two seconds of warm-up."""
    send_from_processes(port, requests, clients=clients, seconds=2.0, processes=processes)
    cpu = read_cpu_seconds(session)
    responses = send_from_processes(port, requests, clients=clients, seconds=seconds, processes=processes)
    cpu = (read_cpu_seconds(session) - cpu) / max(len(responses), 1)
    return summarize_responses(responses) | {"cpu_ms": 1e3 * cpu}


def send_from_processes(
    port: int, requests: Sequence[bytes], *, clients: int, seconds: float, processes: int
) -> list[Response]:
    """For servers that are faster than the clients of one process."""
    if processes == 1:
        return asyncio.run(send(port, requests, clients=clients, seconds=seconds))
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(_send, port, requests, clients // processes, seconds, 7 * n) for n in range(processes)]
        return [response for job in jobs for response in job.result()]


def _send(port: int, requests: Sequence[bytes], clients: int, seconds: float, offset: int) -> list[Response]:
    responses = asyncio.run(send(port, requests, clients=clients, seconds=seconds, offset=offset))
    return [response._replace(body=b"") for response in responses]


def summarize_responses(responses: Sequence[Response]) -> dict[str, float]:
    """Requests/s between the first request and the last response, latency in ms, and failures."""
    latencies = [response.seconds for response in responses if response.status == 200]
    elapsed = max(r.sent + r.seconds for r in responses) - min(r.sent for r in responses)
    p50, p99 = (1e3 * float(np.quantile(latencies or [np.nan], q)) for q in (0.5, 0.99))
    failed = len(responses) - len(latencies)
    return {"rate": len(latencies) / elapsed, "p50_ms": p50, "p99_ms": p99, "failed": failed}
