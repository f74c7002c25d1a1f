"""A server under load, overload and slow connections: what is lost, what is rejected, and how long it takes.

    python -m bench.serve_faults --data DIR [--minutes 10] [--json FILE]

Sends the photos of imagenet-photos to `plainvit serve` with ViT-Ti/16 and the default limits. Parts:

capacity      64 clients that send as fast as the responses come
load          0.8 of the capacity for --minutes: lost, failed and swapped responses, latency, growth of memory
overload      3 times the capacity: goodput, latency of accepted and of rejected requests, time to recover
slow          --sockets connections each that send no header, half a header or half a body, or disconnect in the body,
              next to the clients: when the server closes them, latency of the clients, open files before and after

A response is swapped if its x-request-id is not that of the request, or if its class is not that of the photo alone.
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients import Response, encode_request, find_port, send, start_server, summarize_responses
from bench.measure import make_parser, print_table, write_results
from bench.photos import read_photos
from plainvit.serve.requests import Limits

CLIENTS = 64
SLOW = {
    "no header": b"",
    "half a header": b"POST /predict HTTP/1.1\r\nhost: local",
    "half a body": b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nabc",
}


class Server:
    """A running server and the requests to send to it."""

    def __init__(self, pid: int, port: int, requests: Sequence[bytes]) -> None:
        self.process, self.port, self.requests = Path(f"/proc/{pid}"), port, requests

    def send(self, **options: Any) -> list[Response]:
        return asyncio.run(send(self.port, self.requests, **({"clients": CLIENTS} | options)))

    def read_memory(self) -> float:
        """Resident memory in MB."""
        return int((self.process / "statm").read_text().split()[1]) * resource.getpagesize() / 1e6

    def count_open_files(self) -> int:
        return len(list((self.process / "fd").iterdir()))


def read_class(response: Response) -> int:
    return json.loads(response.body)["results"][0]["predictions"][0]["class"]


def measure_load(server: Server, rate: float, seconds: float) -> dict[str, Any]:
    expected = {r.request: read_class(r) for r in server.send(clients=1, count=len(server.requests))}
    server.send(rate=rate, seconds=min(seconds / 4, 20.0))  # warm up
    memory = server.read_memory()
    responses = server.send(rate=rate, seconds=seconds)
    successful = [response for response in responses if response.status == 200]
    summary = summarize_responses(responses)
    return {
        "requests": len(responses),
        "requests_per_second": summary["rate"],
        "lost": sum(response.status == 0 for response in responses),
        "statuses": dict(Counter(response.status for response in responses)),
        "swapped": sum(not r.same_id or read_class(r) != expected[r.request] for r in successful),
        "p50_ms": summary["p50_ms"],
        "p99_ms": summary["p99_ms"],
        "memory_mb": [memory, server.read_memory()],
    }


def measure_overload(server: Server, capacity: float, seconds: float) -> dict[str, Any]:
    responses = server.send(clients=8 * CLIENTS, rate=3 * capacity, seconds=seconds)
    end = time.monotonic()
    response = server.send(clients=1, count=1)[0]
    while response.status != 200:
        time.sleep(0.05)
        response = server.send(clients=1, count=1)[0]
    times: dict[int, list[float]] = {}
    for r in responses:
        times.setdefault(r.status, []).append(1e3 * r.seconds)
    return {
        "offered_per_second": len(responses) / seconds,
        "goodput": summarize_responses(responses)["rate"] / capacity,
        "statuses": {status: len(values) for status, values in times.items()},
        "p50_p99_ms": {status: np.quantile(values, (0.5, 0.99)).tolist() for status, values in times.items()},
        "recovered_ms": 1e3 * (response.sent + response.seconds - end),
    }


async def _hold(port: int, beginning: bytes) -> float:
    """Seconds until the server closes a connection on which only the beginning of a request is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    try:
        writer.write(beginning)
        while await reader.read(65536):
            pass
    except OSError:
        pass
    finally:
        writer.close()
    return time.monotonic() - started


async def _disconnect(port: int, request: bytes) -> float:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request[: len(request) // 2])
    await asyncio.sleep(1.0)
    writer.transport.abort()
    return 0.0


def measure_slow(server: Server, rate: float, sockets: int) -> dict[str, Any]:
    baseline = summarize_responses(server.send(rate=rate, seconds=20.0))
    open_files = server.count_open_files()
    seconds = max(Limits().header_seconds, Limits().body_seconds)

    async def send_later() -> list[Response]:
        await asyncio.sleep(2.0)  # opening the connections keeps this process busy
        return await send(server.port, server.requests, clients=CLIENTS, rate=rate, seconds=seconds)

    async def run() -> tuple[list[Response], dict[str, list[float]]]:
        clients = asyncio.create_task(send_later())
        connections = {
            name: [_hold(server.port, beginning) for _ in range(sockets)] for name, beginning in SLOW.items()
        }
        connections["disconnected"] = [_disconnect(server.port, server.requests[0]) for _ in range(sockets)]
        groups = await asyncio.gather(*(asyncio.gather(*group) for group in connections.values()))
        return await clients, dict(zip(connections, groups, strict=True))

    responses, closed = asyncio.run(run())
    time.sleep(2.0)
    return {
        "baseline": baseline,
        "next_to_slow": summarize_responses(responses),
        "closed_after_seconds": {name: [min(times), max(times)] for name, times in closed.items()},
        "open_files": [open_files, server.count_open_files()],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, data="imagenet-photos and weights")
    parser.add_argument("--minutes", type=float, default=10.0, help="Duration of the load")
    parser.add_argument("--seconds", type=float, default=30.0, help="Duration of the overload")
    parser.add_argument("--sockets", type=int, default=500, help="Slow connections of each kind")
    args = parser.parse_args(arguments)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    requests, port = [encode_request([photo]) for photo in read_photos(args.data)], find_port()
    weights = args.data / "weights" / "vit_ti16_augreg.safetensors"
    command = [sys.executable, "-m", "plainvit", "serve", f"ti={weights}", "--port", str(port)]
    results: dict[str, Any] = {}
    with start_server(command, port, requests) as session:
        server = Server(session, port, requests)
        server.send(seconds=3.0)  # warm up
        capacity = results["capacity"] = summarize_responses(server.send(seconds=10.0))
        results["load"] = measure_load(server, 0.8 * capacity["rate"], 60 * args.minutes)
        results["overload"] = measure_overload(server, capacity["rate"], args.seconds)
        results["slow"] = measure_slow(server, 0.5 * capacity["rate"], args.sockets)
    rows = [[part, name, _format(value)] for part, values in results.items() for name, value in values.items()]
    print_table(f"plainvit serve, {CLIENTS} clients", ("part", "name", "value"), rows, left=("part", "name"))
    write_results("bench.serve_faults", arguments, args.json, results=results)


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return "-".join(map(_format, value))
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    main()
