"""A server under load, overload and slow connections: what is lost, what is rejected, and how long it takes.

    python -m bench.serve_faults --data DIR [--minutes 10] [--json FILE]

DIR is the data root: its imagenet-photos are sent to `plainvit serve` with ViT-Ti/16 and the default limits. Parts:

capacity      --clients clients as fast as the answers come
load          0.8 of the capacity for --minutes: lost, failed and exchanged answers, latency, growth of memory
overload      3 times the capacity: goodput, latency of accepted and of rejected requests, time to recover
slow          --sockets connections each that send no header, half a header, half a body, or go away in the body, next
              to the clients: when the server closes them, the clients' latency, open files before and after

An answer is exchanged if its x-request-id is not the request's, or if it names another class than the photo alone does.
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

from bench.clients import Answer, encode_request, find_port, read_photos, send, start, summarise
from bench.measure import make_parser, publish, show
from plainvit.serve.limits import Limits

PAGE = 4096
SLOW = {
    "no header": b"",
    "half a header": b"POST /predict HTTP/1.1\r\nhost: local",
    "half a body": b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nabc",
}


class Probe:
    """A running server."""

    def __init__(self, pid: int, port: int, requests: Sequence[bytes], clients: int) -> None:
        self.pid, self.port, self.requests, self.clients = pid, port, requests, clients

    def send(self, **how: Any) -> list[Answer]:
        return asyncio.run(send(self.port, self.requests, **({"clients": self.clients} | how)))

    def memory(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE / 1e6

    def files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def read_class(answer: Answer) -> int:
    return json.loads(answer.body)["results"][0]["predictions"][0]["class"]


def measure_load(probe: Probe, rate: float, seconds: float) -> dict[str, Any]:
    expected = {one.request: read_class(one) for one in probe.send(clients=1, count=len(probe.requests))}
    probe.send(rate=rate, seconds=min(seconds / 4, 20.0))
    memory = probe.memory()
    answers = probe.send(rate=rate, seconds=seconds)
    good = [one for one in answers if one.status == 200]
    found = summarise(answers)
    return {
        "requests": len(answers),
        "requests_per_second": found["rate"],
        "lost": sum(one.status == 0 for one in answers),
        "statuses": dict(Counter(one.status for one in answers)),
        "exchanged": sum(not one.same_id or read_class(one) != expected[one.request] for one in good),
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "memory_mb": [memory, probe.memory()],
    }


def measure_overload(probe: Probe, capacity: float, seconds: float) -> dict[str, Any]:
    answers = probe.send(clients=8 * probe.clients, rate=3 * capacity, seconds=seconds)
    end = time.monotonic()
    while (after := probe.send(clients=1, count=1)[0]).status != 200:
        time.sleep(0.05)
    by_status: dict[int, list[float]] = {}
    for one in answers:
        by_status.setdefault(one.status, []).append(1e3 * one.seconds)
    quantiles = {s: [float(np.quantile(times, q)) for q in (0.5, 0.99)] for s, times in by_status.items()}
    return {
        "offered_per_second": len(answers) / seconds,
        "goodput": summarise(answers)["rate"] / capacity,
        "statuses": {status: len(times) for status, times in by_status.items()},
        "p50_p99_ms": quantiles,
        "recovered_ms": 1e3 * (after.sent + after.seconds - end),
    }


async def _hold(port: int, beginning: bytes) -> float:
    """Seconds until the server closes a connection on which only this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()
    try:
        writer.write(beginning)
        while await reader.read(65536):
            pass
    except OSError:
        pass
    finally:
        writer.close()
    return time.monotonic() - begun


async def _disconnect(port: int, request: bytes) -> float:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request[: len(request) // 2])
    await asyncio.sleep(1.0)
    writer.transport.abort()
    return 0.0


def measure_slow(probe: Probe, rate: float, sockets: int) -> dict[str, Any]:
    baseline = summarise(probe.send(rate=rate, seconds=20.0))
    before = probe.files()

    async def run() -> tuple[list[Answer], dict[str, list[float]]]:
        limits = Limits()
        seconds = max(limits.header_seconds, limits.body_seconds)

        async def send_later() -> list[Answer]:
            await asyncio.sleep(2.0)  # opening the connections keeps this process busy
            return await send(probe.port, probe.requests, clients=probe.clients, rate=rate, seconds=seconds)

        clients = asyncio.create_task(send_later())
        held = {name: [_hold(probe.port, text) for _ in range(sockets)] for name, text in SLOW.items()}
        held["disconnected in the body"] = [_disconnect(probe.port, probe.requests[0]) for _ in range(sockets)]
        names = [name for name, some in held.items() for _ in some]
        closed = await asyncio.gather(*(one for some in held.values() for one in some))
        times: dict[str, list[float]] = {}
        for name, took in zip(names, closed, strict=True):
            times.setdefault(name, []).append(took)
        return await clients, times

    answers, times = asyncio.run(run())
    time.sleep(2.0)
    return {
        "baseline": baseline,
        "next_to_slow": summarise(answers),
        "closed_after_seconds": {name: [min(some), max(some)] for name, some in times.items()},
        "open_files": [before, probe.files()],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the data root, with imagenet-photos and weights")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the load")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the overload")
    parser.add_argument("--sockets", type=int, default=500, help="slow connections of each kind")
    options = parser.parse_args(arguments)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    requests, port = [encode_request([photo]) for photo in read_photos(options.data)], find_port()
    weights = options.data / "weights" / "vit_ti16_augreg.safetensors"
    command = [sys.executable, "-m", "plainvit", "serve", f"ti={weights}", "--port", str(port)]
    found: dict[str, Any] = {}
    with start(command, port, requests) as session:
        probe = Probe(session, port, requests, options.clients)
        probe.send(seconds=3.0)
        capacity = found["capacity"] = summarise(probe.send(seconds=10.0))
        found["load"] = measure_load(probe, 0.8 * capacity["rate"], 60 * options.minutes)
        found["overload"] = measure_overload(probe, capacity["rate"], options.seconds)
        found["slow"] = measure_slow(probe, 0.5 * capacity["rate"], options.sockets)
    rows = [[part, name, _write(value)] for part, values in found.items() for name, value in values.items()]
    show(f"plainvit serve, {options.clients} clients", ("part", "what", "value"), rows, left=("part", "what"))
    publish("bench.serve_faults", arguments, options.json, found=found)


def _write(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_write(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "-".join(map(_write, value))
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    main()
