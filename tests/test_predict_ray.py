"""The same job by Ray: two machines of one cluster, and a cluster that predict starts for itself. Loopback only.

Each job is a process of its own: Ray keeps state in the process that joins a cluster, and warns of much.
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
COMMAND = Path(sys.executable).with_name("plainvit")

# Starts two nodes of one CPU each with a token, or without, and runs the command on them
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
    """150 pictures of two formats, one of them broken."""
    files = {f"{at:03d}.{'jpg' if at % 3 else 'png'}": jpeg(at) if at % 3 else png(at) for at in range(150)}
    return plant(tmp_path / "photos", {**files, "077.jpg": b"broken"})


def environment(**settings: str) -> dict[str, str]:
    """Ray without what the user's own environment says, on the loopback interface, with nothing reported."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "OMP_NUM_THREADS": "1"}
    return {**ours, **quiet, **settings}


def run(*words: object, **settings: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env=environment(**settings), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_machines_give_the_same_rows(weights: Path, photos: Path, tmp_path: Path) -> None:
    line = [COMMAND, "predict", weights, photos, "--batch", 16, "--device", "cpu"]
    run(*line, "--out", tmp_path / "local.jsonl")
    told = run(
        *(sys.executable, "-c", TWO_NODES, *line, "--out", tmp_path / "ray.jsonl"),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
    )
    local, ray = rows(tmp_path / "local.jsonl"), rows(tmp_path / "ray.jsonl")
    assert [row["name"] for row in ray] == [str(path) for path in sorted(photos.iterdir())]
    for one, other in zip(local, ray, strict=True):
        assert {**one, "guesses": []} == {**other, "guesses": []}
        assert [guess["label"] for guess in one["guesses"]] == [guess["label"] for guess in other["guesses"]]
        for a, b in zip(one["guesses"], other["guesses"], strict=True):
            assert a["probability"] == pytest.approx(b["probability"], rel=1e-5)
    assert [row["name"] for row in ray if row["error"]] == [str(photos / "077.jpg")]
    assert "requires no token" not in told.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local.jsonl", "photos", "ray.jsonl"]


def test_features_on_a_cluster_without_a_token(weights: Path, photos: Path, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    line = [COMMAND, "embed", weights, photos, "--batch", 16, "--device", "cpu"]
    run(*line, "--out", tmp_path / "local.safetensors")
    told = run(
        *(sys.executable, "-c", TWO_NODES, *line, "--out", tmp_path / "ray.safetensors"), RAY_AUTH_MODE="disabled"
    )
    local, ray = (load_file(tmp_path / f"{name}.safetensors") for name in ("local", "ray"))
    assert bytes(local["names"]) == bytes(ray["names"])
    np.testing.assert_allclose(local["features"], ray["features"], atol=1e-6)
    assert told.stderr.count("requires no token") == 1


# Joins as predict does, then looks at the cluster from outside
LOOK = """
import json, os, subprocess, sys
from plainvit.evaluate.cluster import joined

with joined(None, "cpu") as there:
    address = there.ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init({address!r}, log_to_driver=False); print(len(ray.nodes()), 'in')"
    join = [sys.executable, "-c", code]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    stranger = {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    tried = []
    for known in ({**env, "RAY_AUTH_MODE": "disabled"}, stranger, dict(os.environ)):
        try:
            tried.append(subprocess.run(join, env=known, capture_output=True, timeout=30).stdout)
        except subprocess.TimeoutExpired:
            tried.append(b"")
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
    ports = [line.split()[3] for line in listening if "gcs_server" in line or "raylet" in line]
print(json.dumps({"tried": [b"in" in one for one in tried], "ports": ports, "left": "RAY_AUTH_TOKEN" in os.environ}))
"""


def test_a_local_cluster_needs_a_token_and_listens_on_loopback(tmp_path: Path) -> None:
    del tmp_path
    done = run(sys.executable, "-c", LOOK)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tried"] == [False, False, True]  # no token, a wrong one, and the right one
    assert not found["left"]
    for port in found["ports"]:
        assert "127.0.0.1" in port


def test_a_local_cluster_gives_the_same_rows(weights: Path, photos: Path, tmp_path: Path) -> None:
    line = [COMMAND, "predict", weights, photos, "--batch", 16, "--device", "cpu"]
    run(*line, "--out", tmp_path / "local.jsonl")
    run(*line, "--out", tmp_path / "ray.jsonl", "--engine", "ray")
    local, ray = rows(tmp_path / "local.jsonl"), rows(tmp_path / "ray.jsonl")
    assert [(row["name"], [guess["label"] for guess in row["guesses"]], row["error"]) for row in local] == [
        (row["name"], [guess["label"] for guess in row["guesses"]], row["error"]) for row in ray
    ]


def test_files_missing_on_a_machine_are_one_line(weights: Path, photos: Path, tmp_path: Path) -> None:
    """The pictures vanish when the job has been sent: as for a machine without that disk."""
    code = """
import shutil, sys
from plainvit.evaluate import cluster, inputs
from plainvit.evaluate.predict import Question, write
from plainvit.evaluate.predictor import Predictor
from pathlib import Path
with cluster.joined(None, "cpu") as there:
    source = inputs.find([sys.argv[2]])
    question = Question(Predictor(sys.argv[1], device="cpu", batch=16), 2)
    class Sent(cluster._Decoding):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            shutil.move(sys.argv[2], sys.argv[2] + ".gone")
    cluster._Decoding = Sent
    try:
        write(question, source, Path(sys.argv[3]), engine=there)
    except ValueError as error:
        print(type(error).__name__, error)
"""
    done = run(sys.executable, "-c", code, weights, photos, tmp_path / "r.csv")
    said = done.stdout.splitlines()[-1]
    assert said.startswith("DataError ")
    assert f"has no file {photos}" in said
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "r.csv.parts").exists()


def asked(*words: object, names: str = "") -> subprocess.CompletedProcess[str]:
    """The command with names on its standard input."""
    line, env = [*map(str, (COMMAND, *words))], environment()
    return subprocess.run(line, input=names, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_an_absent_file_is_a_row_and_only_rows_are_printed(weights: Path, photos: Path) -> None:
    line = ["predict", weights, "-", "--json", "--device", "cpu"]
    names = f"{photos}/none.png\n{photos}/000.png\n{photos}/077.jpg\n"
    local, ray = asked(*line, names=names), asked(*line, "--engine", "ray", names=names)
    assert (ray.returncode, ray.stderr) == (local.returncode, local.stderr)
    assert local.stderr == "plainvit: 2 of 3 images could not be read\n"
    ours, theirs = ([json.loads(text) for text in one.stdout.splitlines()] for one in (local, ray))
    assert [(row["name"], row["error"]) for row in theirs] == [(row["name"], row["error"]) for row in ours]
    assert [len(row["guesses"]) for row in theirs] == [0, 5, 0]


def test_a_non_finite_result_is_a_row_with_an_error(weights: Path, photos: Path, tmp_path: Path) -> None:
    model: Any = plainvit.load(weights)
    model.norm.weight.data.fill_(3e38)
    over = plainvit.save(model, tmp_path / "over.safetensors")
    done = asked("predict", over, photos / "000.png", "--json", "--device", "cpu", "--engine", "ray")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"] == "the model's answer is not finite"
    assert done.stderr == f"plainvit: {photos}/000.png: the model's answer is not finite\n"


def test_images_decoded_by_tasks(weights: Path, photos: Path) -> None:
    """As on GPUs, of which this cluster claims one; the model itself runs on the CPU. Then a source that fails."""
    code = """
import sys, ray
from plainvit.evaluate import cluster, inputs
from plainvit.evaluate.predict import Question, rows
from plainvit.evaluate.predictor import Predictor
packed = cluster._Packed.of
cluster._Packed.of = lambda question, device: packed(question, "cpu")
ray.init("local", num_gpus=1, num_cpus=2, log_to_driver=False, include_dashboard=False)
question = Question(Predictor(sys.argv[1], device="cpu", batch=16), 2)
class Failing(inputs.Inputs):
    def read(self, index):
        if index == 30:
            raise self.error
        return super().read(index)
with cluster.joined(None) as there:
    assert there.device == "cuda"
    source = inputs.find([sys.argv[2]])
    assert list(rows(question, source, engine=there)) == list(rows(question, source))
    for error in (RuntimeError("no such thing"), ValueError("of its own")):
        failing = Failing(list(zip(source.prefixes, source.sources)))
        failing.error = error
        try:
            list(rows(question, failing, engine=there))
        except ValueError as error:
            print(error)
"""
    done = run(sys.executable, "-c", code, weights, photos)
    said = [line for line in done.stdout.splitlines() if "(raylet)" not in line]  # it tells of tasks that are ended
    assert said == ["the Ray job failed: RuntimeError: no such thing", "of its own"]


def test_an_unreachable_address_is_an_error(weights: Path, photos: Path) -> None:
    words = [COMMAND, "predict", weights, photos, "--engine", "ray", "--address", "127.0.0.1:9"]
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env=environment(), timeout=120, check=False
    )
    assert done.returncode == 2
    assert "--address 127.0.0.1:9" in done.stderr
