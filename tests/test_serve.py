"""The server: answers equal to offline predictions, limits, overload, faults, hostile clients, access."""

import asyncio
import base64
import functools
import inspect
import io
import json
import re
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pictures import encode, photo, real_data
from PIL import Image
from servers import Running, as_files, photos, read_memory, reset_peak_memory, serving
from shell import fail
from tiny import vit
from torch import Tensor

import plainvit
from bench import serve_faults
from bench.clients import find_port
from plainvit.commands.serve import LimitFlags, serve
from plainvit.config import About
from plainvit.evaluate.predictor import Predictor
from plainvit.serve.app import FILES, Application
from plainvit.serve.batcher import Batcher, DeadlineError
from plainvit.serve.requests import Limits
from plainvit.serve.server import TOKEN, bind_port, check_access, load_app, make_server, split_name
from plainvit.serve.service import Service

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    model = vit(torch.float32)
    model.about = About(class_names=(HOSTILE, *(f"class {index}" for index in range(1, 7))))
    path = tmp_path_factory.mktemp("run") / "model.safetensors"
    plainvit.save(model, path)
    return Predictor(path, device="cpu")


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Running]:
    with serving(predictor) as running:
        yield running


class Gated:
    """A backend that waits until its gate is open, and fails on images whose first pixel is 13."""

    def __init__(self, predictor: Predictor, *, is_open: bool = False, fault: type = RuntimeError) -> None:
        self.predictor, self.gate, self.batches, self.fault = predictor, threading.Event(), [], fault
        if is_open:
            self.gate.set()

    def logits(self, images: Tensor) -> Tensor:
        assert self.gate.wait(60)
        self.batches.append(len(images))
        if bool((images[:, 0, 0, 0] == 13).any()):
            raise self.fault("a fault of the model")
        return self.predictor.logits(images)

    features = logits


def probabilities(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [[one["probability"] for one in result["predictions"]] for result in response.json()["results"]]


# Answers --------------------------------------------------------------------------------------------------------------


def test_answers_equal_the_predictor_on_the_same_batch(server: Running, predictor: Predictor) -> None:
    some = photos(6)
    expected = predictor(some)
    response = server.post(files=as_files(some))
    assert probabilities(response) == [[one.probability for one in row] for row in expected]
    labels = [[one["label"] for one in result["predictions"]] for result in response.json()["results"]]
    assert labels == [[one.label for one in row] for row in expected]


def test_raw_multipart_and_json_requests_give_the_same_answer(server: Running) -> None:
    (one,) = photos(1)
    texts = {"images": [base64.b64encode(one).decode()]}
    kinds = ("image/jpeg", "application/x-www-form-urlencoded", "")  # the second is curl's --data-binary
    answers = [server.post(content=one, headers={"content-type": kind}) for kind in kinds]
    answers += [server.post(files=as_files([one])), server.post(json=texts)]
    assert len({response.text for response in answers}) == 1
    assert len(probabilities(server.post("/predict?k=2", content=one))[0]) == 2


def test_embed_gives_the_features_of_the_predictor(server: Running, predictor: Predictor) -> None:
    some = photos(3, "PNG")
    found = [row["features"] for row in server.post("/embed", files=as_files(some)).json()["results"]]
    assert torch.equal(torch.tensor(found), predictor.features(predictor.stack(some)))


def test_explain_gives_maps_of_every_layer_and_head(server: Running) -> None:
    found = server.post("/explain?class=2", content=photos(1)[0]).json()
    assert (found["layers"], found["heads"], found["grid"]) == (3, 4, [3, 5])
    sizes = [len(base64.b64decode(found[name])) for name in ("attention", "rollout", "relevance")]
    assert sizes == [3 * (1 + 4) * 15, 15, 15]  # the mean of the heads, then each
    assert server.post("/explain?class=7", content=photos(1)[0]).status_code == 400


def test_explanations_can_be_turned_off(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    app = load_app([str(predictor.source)], Limits(), backend="torch", device="cpu", no_explain=True)
    (service,) = app.services.values()
    assert service.explainer is None
    with serving(predictor) as running:
        monkeypatch.setattr(running.service, "explainer", None)
        assert running.post("/explain", content=photos(1)[0]).status_code == 404
        assert running.post(content=photos(1)[0]).is_success


def test_an_explanation_past_its_deadline_gets_503(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with serving(predictor, Limits(deadline=0.5)) as running:
        monkeypatch.setattr(running.service.explainer, "explain", lambda *_: gate.wait(60))
        response = running.post("/explain", content=photos(1)[0])
        gate.set()
    assert (response.status_code, running.app.active_explanations) == (503, 0)


def test_a_bad_image_fails_alone(server: Running, predictor: Predictor) -> None:
    good = photos(2)
    results = server.post(files=as_files([good[0], b"\xff\xd8\xff not a JPEG", good[1]])).json()["results"]
    assert results[1]["status"] == 422
    expected = predictor(good, k=1)
    assert [results[index]["predictions"][0]["probability"] for index in (0, 2)] == [
        row[0].probability for row in expected
    ]


@pytest.mark.parametrize("fault", [RuntimeError, SystemExit])  # the second would end the model's thread
def test_an_image_that_the_model_fails_on_fails_alone(
    predictor: Predictor, fault: type, caplog: pytest.LogCaptureFixture
) -> None:
    bad = np.full((24, 40, 3), 13, np.uint8)
    with serving(predictor, backend=Gated(predictor, is_open=True, fault=fault)) as running:
        some = [*photos(3), encode(bad), *photos(3)]
        results = running.post(files=as_files(some)).json()["results"]
    assert [result.get("status", 200) for result in results] == [200, 200, 200, 500, 200, 200, 200]
    assert "fault of the model" not in results[3]["error"]  # internals are not shown to clients
    assert "a fault of the model" in caplog.text


def test_sixty_four_clients_each_get_their_own_answer(server: Running, predictor: Predictor) -> None:
    some = photos(64)
    expected = [row[0] for row in predictor(some, k=1)]

    def ask(index: int) -> None:
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
            for turn in range(3):
                response = client.post("/predict?k=1", content=some[index], headers={"x-request-id": f"{index}-{turn}"})
                assert response.headers["x-request-id"] == f"{index}-{turn}"
                assert probabilities(response)[0][0] == pytest.approx(expected[index].probability, rel=1e-4)

    with ThreadPoolExecutor(64) as clients:
        list(clients.map(ask, range(64)))
    assert server.service.waiting == 0


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_waiting_images_are_computed_in_batches(predictor: Predictor) -> None:
    backend = Gated(predictor)
    with serving(predictor, Limits(max_batch=8, deadline=60), backend) as running, ThreadPoolExecutor(17) as clients:
        found = [clients.submit(running.post, content=one) for one in photos(17)]
        wait_until(lambda: len(running.service.batchers["logits"].queue) >= 17 - 8)
        backend.gate.set()
        assert all(one.result().is_success for one in found)
    assert sum(backend.batches) == 17
    assert len(backend.batches) <= 4
    assert max(backend.batches) == 8


# Overload and shutdown ------------------------------------------------------------------------------------------------


def test_an_overloaded_server_rejects_at_once_and_recovers(predictor: Predictor) -> None:
    backend = Gated(predictor)
    limits = Limits(max_batch=4, max_queue=8, deadline=60)
    with serving(predictor, limits, backend) as running, ThreadPoolExecutor(24) as clients:
        found = [clients.submit(running.post, content=one) for one in photos(24)]
        wait_until(lambda: sum(one.done() for one in found) == 16)  # while the model still computes
        backend.gate.set()
        rejected = [one.result() for one in found if one.result().status_code == 429]
        assert len(rejected) == 16
        assert all(int(response.headers["retry-after"]) >= 1 for response in rejected)
        assert sum(one.result().is_success for one in found) == 8
        assert running.post(content=photos(1)[0]).is_success
        assert running.service.waiting == 0


def test_an_idle_server_accepts_a_request_that_is_larger_than_its_queue(predictor: Predictor) -> None:
    with serving(predictor, Limits(max_batch=4, max_queue=8)) as running:
        assert len(probabilities(running.post(files=as_files(photos(12))))) == 12


def test_an_image_past_its_deadline_is_dropped_without_computing_it() -> None:
    computed: list[Tensor] = []

    def compute(images: Tensor) -> Tensor:
        computed.append(images)
        return images

    async def submit() -> list[list[Any]]:
        batcher, now = Batcher(compute, 32, ThreadPoolExecutor(1), lambda *_: None), time.monotonic()
        return await asyncio.gather(
            batcher.submit([torch.ones(1)], now + 60), batcher.submit([torch.zeros(1)], now - 1)
        )

    (answered,), (late,) = asyncio.run(submit())
    assert torch.equal(answered, torch.ones(1))
    assert isinstance(late, DeadlineError)
    assert [images.tolist() for images in computed] == [[[1.0]]]


def serve_gated(source: Path, port: int, gate: Any) -> None:
    limits, predictor = Limits(max_batch=4, deadline=60), Predictor(source, device="cpu")
    backend = Gated(predictor)
    backend.gate = gate
    app = Application([Service("gated", predictor, limits, backend)])  # pyright: ignore[reportArgumentType]
    make_server(app, limits).run(sockets=[bind_port("127.0.0.1", port)])


def test_sigterm_answers_everything_accepted_and_closes_the_port_first(predictor: Predictor) -> None:
    port, context = find_port(), get_context("spawn")
    gate = context.Event()
    process = context.Process(target=serve_gated, args=(predictor.source, port, gate), daemon=True)
    process.start()
    ask = functools.partial(httpx.post, f"http://127.0.0.1:{port}/predict", timeout=60, trust_env=False)
    metrics = functools.partial(httpx.get, f"http://127.0.0.1:{port}/metrics", trust_env=False)
    wait_until(lambda: not is_refused(metrics))
    with ThreadPoolExecutor(32) as clients:
        found = [clients.submit(ask, content=one) for one in photos(32)]
        wait_until(lambda: read_waiting(metrics().text) == 32)
        process.terminate()
        wait_until(lambda: is_refused(metrics))
        gate.set()
        assert [one.result().status_code for one in found] == [200] * 32
    process.join(30)
    assert process.exitcode == -signal.SIGTERM


def read_waiting(text: str) -> int:
    return int(re.findall(r"^plainvit_waiting_images.* (\d+)\.0$", text, re.M)[0])


def is_refused(ask: Callable[[], httpx.Response]) -> bool:
    try:
        ask()
    except httpx.TransportError:
        return True
    return False


# Hostile input --------------------------------------------------------------------------------------------------------


def png_of(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG whose pixels are zeros, of which at most 150 MB are there; with further chunks before them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    header = (b"IHDR", width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0]))
    pixels = (b"IDAT", zlib.compress(bytes(min(height * (3 * width + 1), 150_000_000)), 1))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in (header, *chunks, pixels, (b"IEND", b"")))


def many_frames() -> bytes:
    """An animated PNG that announces 10,000 frames; the first is decoded."""
    frame = (b"fcTL", bytes(4) + (40).to_bytes(4) * 2 + bytes(14))
    return png_of(40, 40, (b"acTL", (10_000).to_bytes(4) + bytes(4)), *[frame] * 10_000)


def large_text() -> bytes:
    """A PNG with a compressed comment of 200 MB."""
    return png_of(40, 40, (b"zTXt", b"a\0\0" + zlib.compress(bytes(200 << 20), 9)))


def many_webp_frames() -> bytes:
    """An animated WebP of 10,000 frames; the first is decoded."""
    image, *others = (Image.new("RGB", (40, 40), color) for color in ("black", "white"))
    file = io.BytesIO()
    image.save(file, "WEBP", save_all=True, append_images=others)
    data = file.getvalue()
    data += data[data.rindex(b"ANMF") :] * 10_000
    return data[:4] + (len(data) - 8).to_bytes(4, "little") + data[8:]


def many_scans() -> bytes:
    data = encode(photo(64, 64), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * 1000 + data[-2:]


BOMBS = {
    "7000 px": (png_of(7_000, 7_000), 413),
    "12000 px": (png_of(12_000, 12_000), 413),
    "30000 px": (png_of(30_000, 30_000), 413),
    "scans": (many_scans(), 422),
    "frames": (many_frames(), 422),
    "WebP frames": (many_webp_frames(), 200),
    "text": (large_text(), 422),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0", 415),
    "pdf": (b"%PDF-1.7", 415),
    "cut": (b"\x89PNG\r\n\x1a\n", 422),
    "tiff": (b"II*\0" + bytes(100), 415),
}


@pytest.mark.parametrize(("body", "status"), BOMBS.values(), ids=BOMBS)
def test_bombs_and_other_formats_are_rejected_before_pixels_are_allocated(
    server: Running, body: bytes, status: int
) -> None:
    before = reset_peak_memory()
    assert server.post(content=body).status_code == status
    assert read_memory("VmHWM") - before < 64e6


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_uploads_never_break_the_server(server: Running, predictor: Predictor, count: int) -> None:
    random, before = np.random.default_rng(0), read_memory()
    seeds = [encode(photo(48, 48), form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP")]
    for number in range(count):
        data = bytearray(seeds[number % len(seeds)])
        for position in random.integers(0, len(data), 8):
            data[position] = random.integers(0, 256)
        end = random.integers(1, len(data)) if number % 3 else len(data)
        response = server.post(content=bytes(data[:end]))
        assert response.status_code in (200, 413, 415, 422), response.text
        assert count < 10_000 or response.elapsed.total_seconds() < 2
    assert read_memory() - before < 100e6
    assert probabilities(server.post(content=photos(1)[0]))[0][0] == predictor(photos(1))[0][0].probability


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"content": bytes(1_000_001)}, 413),
        ({"content": iter([bytes(600_000)] * 2)}, 413),  # chunked, without a content-length
        ({"content": bytes(1_000_000)}, 415),  # not too large
        ({"content": b"", "headers": {"content-type": "image/png"}}, 422),
        ({"content": b"x", "headers": {"content-encoding": "gzip"}}, 415),
        ({"content": b"x", "headers": {"content-type": "text/html"}}, 415),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
        ({"content": b"--a\r\n" * 1000, "headers": {"content-type": "multipart/form-data; boundary=a"}}, 400),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400),
        ({"json": {"images": []}}, 400),
        ({"json": {"images": ["AAAA"] * 65}}, 413),
        ({"json": {"images": ["file:///etc/passwd"]}}, 422),
        ({"json": {"images": ["http://169.254.169.254/"]}}, 422),
        ({"json": {"images": ["../../etc/passwd"]}}, 422),
    ],
)
def test_invalid_requests_get_their_status(predictor: Predictor, options: dict[str, Any], status: int) -> None:
    with serving(predictor, Limits(max_megabytes=1)) as running:
        assert running.post(**options).status_code == status


def test_a_response_is_sent_without_waiting_for_an_acknowledgement(server: Running) -> None:
    """Without TCP_NODELAY the body follows the header after up to 40 ms."""
    server.client.get("/healthz")
    (connection, *_) = server.http.server_state.connections
    assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("query", ["model=../../etc/passwd", "model=http://127.0.0.1/", "model=other"])
def test_a_client_cannot_name_a_model_that_was_not_given_at_start(server: Running, query: str) -> None:
    assert server.post(f"/predict?{query}", content=photos(1)[0]).status_code == 404


def test_requests_on_one_connection_do_not_mix(server: Running) -> None:
    (one,) = photos(1)
    head = b"POST /predict?k=1 HTTP/1.1\r\nhost: localhost\r\n"
    whole = head + b"content-length: %d\r\n\r\n%s" % (len(one), one)
    assert server.talk(whole + whole).count(b"HTTP/1.1 200") == 2
    assert server.talk(head + b"\r\n").startswith(b"HTTP/1.1 411")
    assert server.talk(head + b"x: " + b"a" * 100_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 4\r\ncontent-length: 5",
        b"content-length: 4\r\ntransfer-encoding: chunked",
        b"content-length: +4",
        b"content-length: 0x4",
        b"content-length : 4",
        b"transfer-encoding: xchunked",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding:\x0bchunked",
        b"transfer-encoding: chunked\r\n\r\nlies\r\n",  # a chunk without a size
        b"transfer-encoding: chunked\r\n\r\n1\r\nlies",  # and one that is longer than it says
    ],
)
def test_a_request_whose_end_is_ambiguous_is_answered_once(server: Running, fields: bytes) -> None:
    request = b"POST /predict HTTP/1.1\r\nhost: localhost\r\n" + fields
    said = server.talk(request + b"\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert said[:10] == b"HTTP/1.1 4" or said[:12] == b"HTTP/1.1 501"
    assert said.count(b"HTTP/1.1") == 1


def count_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_slow_and_idle_connections_are_closed(predictor: Predictor, count: int) -> None:
    half = b"POST /predict HTTP/1.1\r\nhost: local"
    body = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nabc"
    answered = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    expected = {b"": b"", half: b"", body: b"HTTP/1.1 408", answered: b"HTTP/1.1 200"}
    limits = Limits(header_seconds=1, body_seconds=1, idle_seconds=2)
    with serving(predictor, limits) as running:
        before = count_files()
        connections = [(running.connect(), beginning) for _ in range(count) for beginning in expected]
        for connection, beginning in connections:
            connection.sendall(beginning)
        for _ in range(count):  # a client that goes away while it sends
            with running.connect() as connection:
                connection.sendall(body)
        assert running.post(content=photos(1)[0]).is_success
        for connection, beginning in connections:
            said = b"".join(iter(functools.partial(connection.recv, 100_000), b""))  # until the server closes
            assert said.startswith(expected[beginning])
            assert bool(said) == bool(expected[beginning])
            connection.close()
        assert running.post(content=photos(1)[0]).is_success
        wait_until(lambda: count_files() <= before + 2)


@pytest.mark.slow
@pytest.mark.parametrize("path", [b"page.js", b"metrics"])
def test_a_client_that_does_not_read_its_answers_is_cut_off(predictor: Predictor, path: bytes) -> None:
    with serving(predictor, Limits(body_seconds=1, deadline=1)) as running, running.connect() as connection:
        connection.settimeout(30)
        request = b"GET /%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path
        with pytest.raises(ConnectionError):
            connection.sendall(1_000_000 * request)
        assert running.post(content=photos(1)[0]).is_success


@pytest.mark.slow
def test_a_minute_of_load_and_overload_loses_nothing(tmp_path: Path) -> None:
    flags = ["--minutes", "0.5", "--seconds", "10", "--sockets", "50", "--json", str(tmp_path / "found.json")]
    serve_faults.main(["--data", str(real_data()), *flags])
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert set(found["load"]["statuses"]) == {"200"}
    assert found["load"]["lost"] == found["load"]["swapped"] == 0
    assert set(found["overload"]["statuses"]) <= {"200", "429", "503"}
    assert found["overload"]["statuses"]["429"] > 0
    assert found["overload"]["p50_p99_ms"]["200"][1] < 10_000  # the deadline
    before, after = found["slow"]["open_files"]
    assert after <= before + 2


# Access ---------------------------------------------------------------------------------------------------------------


def test_other_machines_need_a_token_or_an_explicit_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert inspect.signature(serve).parameters["host"].default == "127.0.0.1"
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(ValueError, match="--host"):
            check_access(host, False)
    assert check_access("0.0.0.0", True) == ("", ())
    assert check_access("127.0.0.2", False)[0] == ""
    assert {"localhost", "127.0.0.2"} <= set(check_access("127.0.0.2", False)[1])  # accepted Host headers
    monkeypatch.setenv(TOKEN, "secret\n")  # as in a file
    assert check_access("0.0.0.0", False) == ("secret", ())


def test_a_token_protects_all_but_the_page_and_health(predictor: Predictor) -> None:
    with serving(predictor, token="sécret") as running:
        for path in ("/metrics", "/models", "/openapi.json"):
            assert running.client.get(path).status_code == 401
        for given in ("", "Bearer wrong", "Bearer sécret2".encode(), "Bearer é".encode("latin-1")):
            assert running.post(content=photos(1)[0], headers={"authorization": given}).status_code == 401
        assert running.post(content=photos(1)[0], headers={"authorization": "Bearer sécret".encode()}).is_success
        assert running.client.get("/").status_code == running.client.get("/readyz").status_code == 200


def test_every_answer_has_security_headers_and_no_version(server: Running) -> None:
    for response in (server.client.get("/"), server.client.get("/nothing"), server.post(content=b"x")):
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not {"server", "access-control-allow-origin"} & set(response.headers)


@pytest.mark.parametrize("headers", [{"host": "attacker.example"}, {"sec-fetch-site": "cross-site"}])
def test_other_sites_cannot_use_a_local_server(server: Running, headers: dict[str, str]) -> None:
    assert server.post(content=photos(1)[0], headers=headers).status_code in (400, 403)
    assert server.client.get("/", headers={"sec-fetch-site": "cross-site"}).is_success  # a link opens the page


# Operation ------------------------------------------------------------------------------------------------------------


def test_metrics_count_requests_images_and_batches(predictor: Predictor) -> None:
    with serving(predictor, name='a"b') as running:
        running.post(files=as_files([*photos(3), b"bad"]))
        text = running.client.get("/metrics").text
    assert 'plainvit_images_total{model="a\\"b",outcome="answered"} 3.0' in text
    assert 'plainvit_requests_total{path="/predict",status="200"} 1.0' in text
    assert 'plainvit_batch_images_bucket{le="4.0",model="a\\"b"} 1.0' in text


def test_openapi_describes_every_route(server: Running) -> None:
    described = set(json.loads(server.client.get("/openapi.json").text)["paths"])
    assert described == set(server.app.routes) - set(FILES)


def test_the_flags_have_the_defaults_of_the_limits() -> None:
    assert Limits(**vars(LimitFlags())) == Limits()


def test_a_name_is_given_or_the_last_part_of_the_path() -> None:
    assert split_name("cats=runs/a") == ("cats", "runs/a")
    assert split_name("runs/a") == ("a", "runs/a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/a", "other/a", "--port", "0"], "NAME=MODEL"),
        (["runs/none", "--port", "USED"], "--port"),  # before models are loaded
        (["runs/none", "--port", "70000"], "--port 70000"),
        (["runs/none", "--host", "0.0.0.0"], "--no-auth"),
        (["runs/none", "--max-queue", "0"], "--max-queue"),
    ],
)
def test_a_server_that_cannot_start_is_one_line(
    server: Running, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(server.port) if word == "USED" else word for word in arguments]
    assert words in fail(capsys, "serve", *given, code=2)


def test_a_missing_extra_is_one_line_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    line = fail(capsys, "serve", "runs/a", code=2)
    assert "pip install starlette uvicorn prometheus-client" in line
