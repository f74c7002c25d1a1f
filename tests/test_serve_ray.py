"""Ray Serve: two replicas, one killed under load, and every request is answered."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import in_child
from pictures import encode, photo
from starlette.routing import Route
from starlette.testclient import TestClient
from tiny import vit

import plainvit
from bench.clients import find_port
from plainvit.evaluate.predictor import Predictor
from plainvit.serve.ray_app import Gateway, Replica

CODE = """
import json, os, secrets, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import httpx
from plainvit.evaluate.cluster import LOCAL_CLUSTER

os.environ |= LOCAL_CLUSTER | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
import ray
from ray import serve
from plainvit.serve.ray_app import build

model, photo, port = sys.argv[1], Path(sys.argv[2]).read_bytes(), int(sys.argv[3])
ray.init("local", dashboard_host="127.0.0.1", num_cpus=4, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(build({"models": model, "replicas": "2", "backend": "torch", "device": "cpu"}))
statuses, answers, half = [], set(), threading.Event()

def ask(number):
    with httpx.Client(timeout=120, trust_env=False) as client:
        for turn in range(20):
            response = client.post(f"http://127.0.0.1:{port}/predict?k=1", content=photo)
            statuses.append(response.status_code)
            answers.add(round(response.json()["results"][0]["predictions"][0]["probability"], 4))
            if turn == 8:
                half.set()

with ThreadPoolExecutor(8) as clients:
    running = [clients.submit(ask, number) for number in range(8)]
    half.wait()
    name = next(one for one in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in one["name"])
    ray.kill(ray.get_actor(**name))
    for one in running:
        one.result()
serve.shutdown()
ray.shutdown()
print(json.dumps({"statuses": statuses, "answers": sorted(answers)}))
"""


class DiesFirst:
    """The handle of replicas, of which the first dies when it gets a request."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.calls = replica, 0
        self.respond = SimpleNamespace(remote=self.call)

    async def call(self, scope: dict[str, Any], body: bytes) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError
        return await self.replica.respond(scope, body)


@pytest.mark.parametrize(("path", "status"), [("/predict", 200), ("/nothing", 404)])
def test_the_gateway_sends_a_request_to_another_replica_if_one_dies(
    path: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = SimpleNamespace(RayActorError=ConnectionError, WorkerCrashedError=ConnectionError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=errors))
    plainvit.save(vit(torch.float32), tmp_path / "model.safetensors")
    replicas = DiesFirst(Replica([str(tmp_path / "model.safetensors")], "torch", "cpu"))
    client = TestClient(Route("/{path:path}", Gateway(replicas).__call__, methods=["POST"]))
    response = client.post(path, content=encode(photo(60, 80), "JPEG"), headers={"content-type": "image/jpeg"})
    assert (response.status_code, replicas.calls) == (status, 2)
    assert ("results" in response.json()) == (status == 200)


@pytest.mark.slow
def test_a_replica_killed_under_load_loses_no_request(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    plainvit.save(vit(torch.float32), tmp_path / "model.safetensors")
    image = encode(photo(60, 80), "JPEG")
    (tmp_path / "photo.jpg").write_bytes(image)
    files = str(tmp_path / "model.safetensors"), str(tmp_path / "photo.jpg")
    found = json.loads(in_child(CODE, *files, str(find_port())).splitlines()[-1])
    assert found["statuses"] == [200] * 160
    expected = Predictor(tmp_path / "model.safetensors", device="cpu")([image], k=1)[0][0].probability
    assert found["answers"] == [round(expected, 4)]
