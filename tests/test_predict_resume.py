"""Prediction jobs that are killed, resumed or repeated, and the parts of a Ray job that need no Ray."""

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import small_runs
import tiny
import torch
from pictures import jpeg, plant, png
from shell import Capture, fail
from small_runs import Child

import plainvit
from plainvit.data.sources import Source
from plainvit.evaluate import inputs
from plainvit.evaluate.cluster import Cluster, ModelActor, Work, _size_cluster
from plainvit.evaluate.predict import OutputBatches, PredictionJob, predict_locally, write
from plainvit.evaluate.predictor import Predictor


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plainvit.save(tiny.vit(torch.float32, depth=1), tmp_path_factory.mktemp("model") / "tiny.safetensors")


@pytest.fixture(scope="module")
def predictor(weights: Path) -> Predictor:
    return Predictor(weights, device="cpu", batch=4)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven files, one of them broken."""
    return plant(tmp_path / "photos", {**{f"{at}.jpg": jpeg(at) for at in range(7)}, "5.jpg": b"broken"})


class Stop(Exception):
    """In place of a signal."""


def stop_after_one_part(job: PredictionJob, source: Source, steps: np.ndarray) -> Iterator[Any]:
    yield from predict_locally(job, source, steps[:1])
    raise Stop


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def paced(pause: float, job: PredictionJob, source: Source, steps: np.ndarray) -> OutputBatches:
    for answer in predict_locally(job, source, steps, workers=0):
        time.sleep(pause)
        yield answer


def run_job(weights: str, folder: str, out: Path, pause: float = 0.0) -> None:
    """In a child or here: parts of 32 images in batches of 8."""
    job = PredictionJob(Predictor(weights, device="cpu", batch=8), 3)
    write(job, inputs.find([folder]), out, engine=partial(paced, pause), part=32)


def count_parts(out: Path) -> int:
    return len(list(out.with_name(f"{out.name}.parts").glob("part-*.parquet")))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 images, one of them broken."""
    files = {f"{seed:03d}.png": png(seed) for seed in range(600)}
    return plant(tmp_path_factory.mktemp("many"), {**files, "333.png": b"broken"})


@pytest.mark.slow
def test_a_job_killed_three_times_has_every_image_once(weights: Path, many: Path, tmp_path: Path) -> None:
    out, calm = tmp_path / "r.jsonl", tmp_path / "calm.jsonl"
    for more in (3, 2, 5):
        before = count_parts(out)
        child = Child(run_job, str(weights), str(many), out, 0.01, log=tmp_path / "log")
        child.wait_for(lambda least=before + more: count_parts(out) >= least)
        child.kill()
        assert count_parts(out) >= before + more, child.said
        assert not out.exists()
    assert count_parts(out) < 19
    run_job(str(weights), str(many), out)
    run_job(str(weights), str(many), calm)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in found] == [f"{many}/{seed:03d}.png" for seed in range(600)]
    assert [row["name"] for row in found if row["error"]] == [f"{many}/333.png"]
    assert out.read_bytes() == calm.read_bytes()
    assert list_files(tmp_path) == ["calm.jsonl", "log", "r.jsonl"]


def test_a_resumed_job_computes_only_what_is_missing(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    job, source, computed = PredictionJob(predictor, 2), inputs.find([str(photos)]), []
    write(job, source, tmp_path / "whole.jsonl", part=4)
    with pytest.raises(Stop):
        write(job, source, tmp_path / "r.jsonl", engine=stop_after_one_part, part=4)

    def record(*arguments: Any) -> OutputBatches:
        computed.append(arguments[2].tolist())
        yield from predict_locally(*arguments)

    summary, _ = write(job, source, tmp_path / "r.jsonl", engine=record, part=4)
    assert computed == [[1]]
    assert summary.resumed == 4
    assert (tmp_path / "r.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert list_files(tmp_path) == ["photos", "r.jsonl", "whole.jsonl"]


def test_a_damaged_part_is_computed_again(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, job, source = tmp_path / "r.csv", PredictionJob(predictor, 2), inputs.find([str(photos)])
    with pytest.raises(Stop):
        write(job, source, out, engine=stop_after_one_part, part=4)
    part = tmp_path / "r.csv.parts" / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-50])
    summary, _ = write(job, source, out, part=4)
    assert (summary.images, summary.resumed) == (7, 0)


def test_parts_of_another_job_need_force(predictor: Predictor, weights: Path, photos: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "r.csv", inputs.find([str(photos)])
    with pytest.raises(Stop):
        write(PredictionJob(predictor, 2), source, out, engine=stop_after_one_part, part=4)
    other_weights, other_mean = Predictor(weights, device="cpu", batch=4), Predictor(weights, mean=0.1, batch=4)
    other_weights.model.head.bias.data += 1
    other_batch = Predictor(weights, device="cpu", batch=2)
    for job, changed in (
        (PredictionJob(predictor, 3), "top"),
        (PredictionJob(other_weights, 2), "model"),
        (PredictionJob(other_mean, 2), "config"),
        (PredictionJob(other_batch, 2), "batch"),
    ):
        with pytest.raises(ValueError, match=f"different: {changed}"):
            write(job, source, out, part=4)
    plant(photos, {"7.png": png(7)})
    more = inputs.find([str(photos)])
    with pytest.raises(ValueError, match="different: inputs, images"):
        write(PredictionJob(predictor, 2), more, out, part=4)
    summary, _ = write(PredictionJob(predictor, 2), more, out, part=4, force=True)
    assert (summary.images, summary.resumed) == (8, 0)
    assert list_files(tmp_path) == ["photos", "r.csv"]


def test_an_existing_file_is_replaced_only_with_force(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, source, job = tmp_path / "r.jsonl", inputs.find([str(photos)]), PredictionJob(predictor, 1)
    out.write_text("another's")
    with pytest.raises(ValueError, match="--force"):
        write(job, source, out, engine=stop_after_one_part)
    with pytest.raises(Stop):
        write(job, source, out, engine=stop_after_one_part, part=4, force=True)
    assert out.read_text() == "another's"
    summary, _ = write(job, source, out, part=4, force=True)  # the same command resumes
    assert summary.resumed == 4
    assert len(out.read_text().splitlines()) == 7


def test_a_file_written_meanwhile_is_not_replaced(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "r.jsonl", inputs.find([str(photos)])

    def interfere(*arguments: Any) -> OutputBatches:
        yield from predict_locally(*arguments)
        out.write_text("another's")

    with pytest.raises(ValueError, match="--force"):
        write(PredictionJob(predictor, 1), source, out, engine=interfere)
    assert out.read_text() == "another's"


# Ray ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "device", "found"),
    [
        ([{"CPU": 8, "GPU": 2}, {"CPU": 12, "GPU": 4}], "auto", ("cuda", 6, 3)),
        ([{"CPU": 8, "GPU": 2}, {"GPU": 4}], "cpu", ("cpu", 2, 4)),
        ([{"CPU": 6}, {"CPU": 2}, {"CPU": 0.5}], "auto", ("cpu", 4, 2)),  # all copies have the same threads
        ([{"CPU": 1}], "cpu", ("cpu", 1, 1)),
        ([{"CPU": 8}], "cuda", "--device cpu"),
        ([{"CPU": 0.5}], "cpu", "CPU"),
    ],
)
def test_the_number_of_copies_follows_the_cluster(nodes: list[dict], device: str, found: Any) -> None:
    alive = [{"Resources": node, "Alive": True} for node in nodes]
    ray: Any = SimpleNamespace(nodes=lambda: [*alive, {"Resources": {"CPU": 64, "GPU": 8}, "Alive": False}])
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            _size_cluster(ray, device)
    else:
        assert _size_cluster(ray, device) == Cluster(ray, *found)


def test_an_actor_gives_the_rows_of_one_machine_and_errors_as_values(
    predictor: Predictor, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray's transport; with Ray: test_predict_ray.py."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda sent: sent))
    job, source = PredictionJob(predictor, 3), inputs.find([str(photos)])
    work = Work.pack(job, source, "cpu", workers=0)
    found = ModelActor(work)({"item": np.arange(2)})
    assert found["error"] == ["", ""]
    local = dict(predict_locally(job, source, np.arange(2), workers=0))
    for step, rows in zip(found["step"], found["rows"], strict=True):
        assert pa.ipc.open_stream(rows).read_all().equals(local[step])
    for error, message in (
        (RuntimeError("no such thing"), "the Ray job failed: RuntimeError: no such thing"),
        (torch.OutOfMemoryError("of the GPU"), "of the GPU"),
        (ValueError("of its own"), "of its own"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(source, "read", small_runs.fail(error))
            assert ModelActor(work)({"item": np.arange(2)})["error"] == [message]
    (photos / "0.jpg").unlink()
    lost = ModelActor(work)({"item": np.arange(2)})
    assert lost["kind"] == ["DataError"]
    assert f"has no file {photos}/0.jpg" in lost["error"][0]


def test_without_ray_the_install_command_is_printed(
    weights: Path, photos: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'ray[data]>=2.52'" in fail(capsys, "predict", weights, photos, "--engine", "ray", code=2)
