"""Ray Serve: two replicas, one killed under load, and every request is answered."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pictures import encode, photo
from tiny import vit

import plainvit
from plainvit.evaluate.predictor import Predictor

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


@pytest.mark.slow
def test_a_replica_killed_under_load_loses_no_request(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plainvit.save(vit(torch.float32), tmp_path / "model.safetensors")
    image = encode(photo(60, 80), "JPEG")
    (tmp_path / "photo.jpg").write_bytes(image)
    command = [sys.executable, "-c", CODE, str(tmp_path / "model.safetensors"), str(tmp_path / "photo.jpg"), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["statuses"] == [200] * 160
    expected = Predictor(tmp_path / "model.safetensors", device="cpu")([image], k=1)[0][0].probability
    assert found["answers"] == [round(expected, 4)]
