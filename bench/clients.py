"""HTTP clients for the measurements of the server: start a server, send photos from many connections, gather answers.

with start(command, port, requests) as session:
    answers = asyncio.run(send(port, requests, clients=64, seconds=10))
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
import pyarrow.parquet as pq


class Answer(NamedTuple):
    """One request: which it was, when it was sent, how long it took, and what came back."""

    request: int
    sent: float  # time.monotonic()
    seconds: float
    status: int  # 0: the connection was closed without an answer
    same_id: bool  # the answer has the x-request-id of the request
    body: bytes


def read_photos(data: Path) -> list[bytes]:
    """The encoded photos of imagenet-photos."""
    table = pq.read_table(data / "imagenet-photos" / "photos-00.parquet", columns=["image"])
    return [row["bytes"] for row in table["image"].to_pylist()]


def encode_request(photos: Sequence[bytes], path: str = "/predict") -> bytes:
    """An HTTP request with a form of some files; the value of x-request-id, eight characters, is filled in later."""
    head = b'--border\r\ncontent-disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    body = b"".join(head + photo + b"\r\n" for photo in photos) + b"--border--\r\n"
    lines = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=border\r\n"
    return f"{lines}content-length: {len(body)}\r\nx-request-id: {'0' * 8}\r\n\r\n".encode() + body


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def start(command: Sequence[str], port: int, requests: Sequence[bytes]) -> Iterator[int]:
    """Runs a server until the block ends, and gives its session; it is ready when it answers a request."""
    end = time.monotonic() + 300
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        try:
            while not asyncio.run(_is_ready(port, requests)):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"the server did not start: {' '.join(command)}\n{said}")
                time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # LitServe leaves workers behind


async def _is_ready(port: int, requests: Sequence[bytes]) -> bool:
    try:
        (answer,) = await send(port, requests[:1], clients=1, count=1)
    except OSError:
        return False
    return answer.status == 200


def read_cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


async def send(
    port: int,
    requests: Sequence[bytes],
    *,
    clients: int,
    seconds: float = 600.0,
    rate: float = 0.0,
    count: int = 2**31,
    first: int = 0,
) -> list[Answer]:
    """Each client sends one request after the other on its connection until the time is over.

    `rate` is that of all clients together, in requests per second; 0: as fast as the answers come. `count` limits the
    requests of each client. A full HTTP client would take a fifth of the cores.
    """
    begun, found = time.monotonic(), []

    async def run(number: int) -> None:
        connection, turn = await asyncio.open_connection("127.0.0.1", port, limit=2**20), 0
        while turn < count:
            due = begun + (turn * clients + number) / rate if rate else 0.0
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if time.monotonic() >= begun + seconds:
                break
            at = (first + turn * clients + number) % len(requests)
            found.append(await post(*connection, at, requests[at], f"{number % 10000:04}{turn % 10000:04}".encode()))
            turn += 1
            if not found[-1].status:
                connection[1].close()
                connection = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        connection[1].close()

    await asyncio.gather(*(run(number) for number in range(clients)))
    return found


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: int, request: bytes, identity: bytes
) -> Answer:
    sent = time.monotonic()
    try:
        start, _, rest = request.partition(b"x-request-id: ")
        writer.writelines((start, b"x-request-id: ", identity, rest[8:]))
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    except (OSError, asyncio.IncompleteReadError):
        return Answer(at, sent, time.monotonic() - sent, 0, False, b"")
    same = head.partition(b"x-request-id: ")[2][:8] == identity
    return Answer(at, sent, time.monotonic() - sent, int(head.split(None, 2)[1]), same, body)


def send_from_processes(
    port: int, requests: Sequence[bytes], *, clients: int, seconds: float, processes: int
) -> list[Answer]:
    """The same from several processes, for servers that are faster than one process of clients."""
    if processes == 1:
        return asyncio.run(send(port, requests, clients=clients, seconds=seconds))
    with ProcessPoolExecutor(processes) as pool:
        share = [clients // processes + (at < clients % processes) for at in range(processes)]
        jobs = [pool.submit(_send, port, requests, some, seconds, 7 * at) for at, some in enumerate(share) if some]
        return [answer for job in jobs for answer in job.result()]


def _send(port: int, requests: Sequence[bytes], clients: int, seconds: float, first: int) -> list[Answer]:
    found = asyncio.run(send(port, requests, clients=clients, seconds=seconds, first=first))
    return [answer._replace(body=b"") for answer in found]


def summarise(answers: Sequence[Answer]) -> dict[str, float]:
    """Requests per second, latency in ms, and failures; the time is that from the first request to the last answer."""
    good = [one.seconds for one in answers if one.status == 200]
    took = max(one.sent + one.seconds for one in answers) - min(one.sent for one in answers)
    p50, p99 = (1e3 * float(np.quantile(good or [np.nan], q)) for q in (0.5, 0.99))
    return {"rate": len(good) / took, "p50_ms": p50, "p99_ms": p99, "failed": len(answers) - len(good)}
