"""Prediction by Ray Data: two machines of one cluster, and a cluster that the command starts. Loopback only.

Each job runs in its own process, as Ray keeps state in the process that connects to a cluster.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from pictures import jpeg, plant, png

import plainvit

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
COMMAND = (sys.executable, "-m", "plainvit")

# Starts two nodes of one CPU each and runs the command on them
TWO_NODES = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
try:
    sys.exit(subprocess.run([*sys.argv[1:], "--engine", "ray", "--address", cluster.address], check=False).returncode)
finally:
    cluster.shutdown()
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plainvit.save(tiny.vit(torch.float32, depth=1), tmp_path_factory.mktemp("model") / "tiny.safetensors")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """150 images of two formats, one of them broken."""
    files = {f"{at:03d}.{'jpg' if at % 3 else 'png'}": jpeg(at) if at % 3 else png(at) for at in range(150)}
    return plant(tmp_path / "photos", {**files, "077.jpg": b"broken"})


def run(*words: object, names: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a process without the caller's RAY_ variables, on the loopback interface, with `names` on its stdin."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ours |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1"}
    line = list(map(str, words))
    return subprocess.run(
        line, input=names, capture_output=True, text=True, env=ours | settings, timeout=300, check=False
    )


def rows(text: str) -> list[tuple[str, list[str], str]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [(row["name"], [cell["label"] for cell in row["predictions"]], row["error"]) for row in lines]


def test_two_machines_give_the_same_rows(weights: Path, photos: Path, tmp_path: Path) -> None:
    line = [*COMMAND, "predict", weights, photos, "--batch", 16, "--device", "cpu"]
    assert run(*line, "--out", tmp_path / "local.jsonl").returncode == 0
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = run(sys.executable, "-c", TWO_NODES, *line, "--out", tmp_path / "ray.jsonl", **secret)
    assert done.returncode == 0, done.stderr
    assert rows((tmp_path / "ray.jsonl").read_text()) == rows((tmp_path / "local.jsonl").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local.jsonl", "photos", "ray.jsonl"]


def test_a_local_cluster_prints_the_same_rows_and_errors(weights: Path, photos: Path, tmp_path: Path) -> None:
    model: Any = plainvit.load(weights)
    model.norm.weight.data.fill_(3e38)
    overflowing = plainvit.save(model, tmp_path / "over.safetensors")
    names = f"{photos}/none.png\n{photos}/000.png\n{photos}/077.jpg\n"
    for path, code in ((weights, 0), (overflowing, 3)):
        line = [*COMMAND, "predict", path, "-", "--json", "--device", "cpu"]
        local, ray = run(*line, names=names), run(*line, "--engine", "ray", names=names)
        assert local.returncode == ray.returncode == code
        assert rows(ray.stdout) == rows(local.stdout)


# Connects as predict does, then looks at the cluster from outside
LOOK = """
import json, os, subprocess, sys
from plainvit.evaluate.cluster import connect_cluster

with connect_cluster(None, "cpu") as cluster:
    address = cluster.ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init({address!r}, log_to_driver=False); print(len(ray.nodes()), 'in')"
    join = [sys.executable, "-c", code]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    wrong_token = {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    tried = []
    for known in ({**env, "RAY_AUTH_MODE": "disabled"}, wrong_token, dict(os.environ)):
        try:
            tried.append(subprocess.run(join, env=known, capture_output=True, timeout=30).stdout)
        except subprocess.TimeoutExpired:
            tried.append(b"")
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
    ports = [line.split()[3] for line in listening if "gcs_server" in line or "raylet" in line]
print(json.dumps({"tried": [b"in" in one for one in tried], "ports": ports, "left": "RAY_AUTH_TOKEN" in os.environ}))
"""


def test_a_local_cluster_needs_a_token_and_listens_on_loopback() -> None:
    done = run(sys.executable, "-c", LOOK)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["tried"] == [False, False, True]  # no token, a wrong one, and the right one
    assert not seen["left"]
    assert all("127.0.0.1" in port for port in seen["ports"])


# As on GPUs, of which this cluster claims one; the model itself runs on the CPU. Then files vanish once the job is sent
DECODE = """
import shutil, sys, ray
from plainvit.evaluate import cluster, inputs
from plainvit.evaluate.predict import PredictionJob, predict_rows
from plainvit.evaluate.predictor import Predictor
pack = cluster.Work.pack
cluster.Work.pack = lambda job, source, device, workers: pack(job, source, "cpu", workers)
ray.init("local", num_gpus=1, num_cpus=2, log_to_driver=False, include_dashboard=False)
job = PredictionJob(Predictor(sys.argv[1], device="cpu", batch=16), 2)
with cluster.connect_cluster(None) as connected:
    assert connected.device == "cuda"
    source = inputs.find([sys.argv[2]])
    assert list(predict_rows(job, source, engine=connected)) == list(predict_rows(job, source))
    def vanish(job, source, device, workers):
        packed = pack(job, source, "cpu", workers)
        shutil.move(sys.argv[2], sys.argv[2] + ".gone")
        return packed
    cluster.Work.pack = vanish
    try:
        list(predict_rows(job, source, engine=connected))
    except ValueError as error:
        print(type(error).__name__, error)
"""


def test_gpu_actors_decode_in_processes_and_errors_arrive_as_one_line(weights: Path, photos: Path) -> None:
    done = run(sys.executable, "-c", DECODE, weights, photos)
    (line,) = (line for line in done.stdout.splitlines() if "(raylet)" not in line)
    assert line.startswith("DataError "), done.stderr
    assert f"has no file {photos}" in line


def test_an_unreachable_address_is_an_error(weights: Path, photos: Path) -> None:
    done = run(*COMMAND, "predict", weights, photos, "--engine", "ray", "--address", "127.0.0.1:9")
    assert done.returncode == 2
    assert "--address 127.0.0.1:9" in done.stderr
