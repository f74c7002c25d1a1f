"""Batch prediction: rows, output formats, the predict and embed commands, jobs that are killed, resumed or repeated,
and the parts of a Ray job that need no Ray."""

import csv
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_runs
import tiny
import torch
from pictures import encode, jpeg, noise, plant, png, write_tar
from PIL import Image
from shell import Capture, fail, run
from small_runs import Child

import plainvit
from plainvit.analyse.figures import write_csv
from plainvit.cli import main
from plainvit.data.decode import decode
from plainvit.data.sources import Source
from plainvit.disk import DiskError, write_atomically
from plainvit.evaluate import inputs
from plainvit.evaluate.cluster import Cluster, ModelActor, Work, _size_cluster
from plainvit.evaluate.predict import NON_FINITE, OutputBatches, PredictionJob, predict_locally, predict_rows, write
from plainvit.evaluate.predictor import Predictor

CLASSES = ("ant", "bee", "=cow", "dog, or cat", "eel", "fox", "gnu")
NAMES = ["0.jpg", "1.jpg", "2.jpg", "4.PNG", "5.jpg", "6.gif", "sub/3.png"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for 24 x 40 pixels with named classes."""
    model = tiny.vit(torch.float32, depth=1)
    object.__setattr__(model.about, "class_names", CLASSES)
    return plainvit.save(model, tmp_path_factory.mktemp("model") / "tiny.safetensors")


@pytest.fixture(scope="module")
def predictor(weights: Path) -> Predictor:
    return Predictor(weights, device="cpu", batch=4)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven files of different sizes and formats, one broken, one in a subfolder."""
    files = {f"{i}.jpg": jpeg(i, 30 + 7 * i, 80 - 5 * i) for i in range(3)}
    files |= {
        "sub/3.png": png(3, 9, 70),
        "4.PNG": png(4, 200, 31),
        "5.jpg": jpeg(5)[:200],
        "6.gif": encode(noise(5, 5), "GIF"),
    }
    return plant(tmp_path / "photos", {**files, "readme.txt": b"no image", ".hidden.jpg": jpeg(9)})


def by_hand(predictor: Predictor, path: Path) -> list[tuple[str, float]]:
    """One image alone, resized by Pillow, with softmax in float64."""
    image = Image.fromarray(decode(path.read_bytes())).resize((40, 24), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    with torch.no_grad():
        logits = predictor.model(pixels)[0].numpy().astype(np.float64)
    share = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return [(CLASSES[at], share[at]) for at in np.argsort(-share)]


def test_rows_equal_those_of_each_image_alone(predictor: Predictor, photos: Path) -> None:
    found = list(predict_rows(PredictionJob(predictor, 3), inputs.find([str(photos)])))
    assert [row["name"] for row in found] == [f"{photos}/{name}" for name in NAMES]
    for row in found:
        if row["name"].endswith("5.jpg"):
            assert row["predictions"] == []
            assert "truncated" in row["error"].lower()
            continue
        assert row["error"] is None
        expected = by_hand(predictor, Path(row["name"]))[:3]
        assert [one["label"] for one in row["predictions"]] == [label for label, _ in expected]
        given = [one["probability"] for one in row["predictions"]]
        assert given == pytest.approx([share for _, share in expected], abs=0.01)  # Pillow's resize rounds differently


def test_rows_do_not_depend_on_the_number_of_workers(predictor: Predictor, tmp_path: Path) -> None:
    write_tar(tmp_path / "test-0.tar", ((f"{seed:02d}.png", png(seed)) for seed in range(40)))
    source, job = inputs.find([str(tmp_path)]), PredictionJob(predictor, 2)
    source.read(3)  # workers must not inherit this open file
    alone = list(predict_rows(job, source, engine=partial(predict_locally, workers=0)))
    assert list(predict_rows(job, source, engine=partial(predict_locally, workers=2))) == alone
    assert len({json.dumps(row["predictions"]) for row in alone}) == 40


def test_all_formats_have_the_same_content(weights: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    for kind in ("jsonl", "csv", "parquet"):
        main(["predict", str(weights), str(photos), "--out", str(tmp_path / f"r.{kind}"), "--top", "7", "--batch", "4"])
    assert "7 images, 1 failed" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert pq.read_table(tmp_path / "r.parquet").to_pylist() == lines
    with (tmp_path / "r.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    for line, cell in zip(lines, cells, strict=True):
        assert cell["name"] == line["name"]
        assert cell["error"] == (line["error"] or "")
        for place, one in enumerate(line["predictions"], 1):
            assert cell[f"label_{place}"] == one["label"].replace("=cow", "'=cow")
            assert float(cell[f"probability_{place}"]) == one["probability"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "r.csv", "r.jsonl", "r.parquet"]


def test_features_equal_the_models(weights: Path, predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    for kind in ("parquet", "npz"):
        main(["embed", str(weights), str(photos), "--out", str(tmp_path / f"f.{kind}"), "--batch", "4", "--json"])
    saved, table = np.load(tmp_path / "f.npz"), pq.read_table(tmp_path / "f.parquet")
    assert saved["names"].tolist() == table["name"].to_pylist()
    assert [error or None for error in saved["errors"].tolist()] == table["error"].to_pylist()
    for at, name in enumerate(NAMES):
        if name == "5.jpg":
            assert np.isnan(saved["features"][at]).all()
            assert table["features"][at].as_py() is None
            continue
        expected = predictor.features(predictor.stack([photos / name]))[0].numpy()
        np.testing.assert_allclose(saved["features"][at], expected, atol=1e-5)
        np.testing.assert_array_equal(saved["features"][at], np.float32(table["features"][at].as_py()))


def test_non_finite_results_are_errors(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    """A model whose features overflow for half of the images, and whose logits overflow for all."""
    model = tiny.vit(torch.float32, depth=1)
    predictor = Predictor(model, device="cpu", batch=4)
    good = [photos / name for name in NAMES if name != "5.jpg"]
    largest = predictor.features(predictor.stack(good)).abs().amax(1).double().numpy()
    for part in (model.norm.weight, model.norm.bias):
        part.data *= np.finfo(np.float32).max / np.median(largest)
    found = list(predict_rows(PredictionJob(predictor), inputs.find([str(photos)])))
    errors = [row["error"] for row in found if not row["name"].endswith("5.jpg")]
    assert errors == [NON_FINITE if one else None for one in largest > np.median(largest)]
    assert all((row["features"] is None) == (row["error"] is not None) for row in found)
    assert "truncated" in found[NAMES.index("5.jpg")]["error"].lower()
    assert np.isfinite([row["features"] for row in found if row["features"]]).all()
    path = plainvit.save(model, tmp_path / "over.safetensors")
    code, out, err = run(capsys, "predict", path, photos, "--json")
    assert code == 3
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [line["predictions"] for line in lines] == [[]] * 7
    assert lines[0]["error"] == NON_FINITE
    assert "all 7 images failed" in err


FORMULAS = ["=1+1.png", "+1.png", "-1.png", "@SUM(1).png", "\t=1.png", "\r=1.png", "x\r=1.png"]


def test_formulas_are_escaped_in_csv_only(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plant(tmp_path, {**{name: png(8) for name in FORMULAS}, "=in/x.png": png(9)}))
    plant(Path("+x"), {"-.png": png()})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join([*FORMULAS, "@none"]).encode())))
    assert inputs.find(["=1+1.png"]).name(0) == "=1+1.png"
    given = [str(weights), "-", "=in", "+x", "--top", "7", "--out"]
    for kind in ("csv", "jsonl"):
        sys.stdin.seek(0)
        main(["predict", *given, f"r.{kind}"])
    expected = [*FORMULAS, "@none", "=in/x.png", "+x/-.png"]
    assert [json.loads(line)["name"] for line in Path("r.jsonl").read_text().split("\n")[:-1]] == expected
    with Path("r.csv").open(newline="") as file:
        head, *cells = csv.reader(file)
    assert [row[0] for row in cells] == [name if name[0] == "x" else f"'{name}" for name in expected]
    assert not [cell for row in (head, *cells) for cell in row if re.match(r"[=+\-@\t\r]", cell)]


def test_numbers_in_csv_are_not_escaped(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [["=1+1", "-1.5e-07", "-3", -2, -0.5, "-1+1", "a=b", "\uff1d1"]])
    assert (tmp_path / "x.csv").read_text() == "'=1+1,-1.5e-07,-3,-2,-0.5,'-1+1,a=b,'\uff1d1\n"


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("predict WEIGHTS empty", 3, "no images"),
        ("predict WEIGHTS photos --top 8", 2, "--top"),
        ("predict WEIGHTS photos --top 0", 2, "--top"),
        ("predict WEIGHTS", 2, "INPUT"),
        ("predict WEIGHTS bad.jpg", 3, "bad.jpg: "),
        ("predict WEIGHTS photos --out old.jsonl", 2, "--force"),
        ("predict WEIGHTS photos --out r.txt", 2, ".jsonl"),
        ("predict WEIGHTS photos --out no/r.csv", 2, "folder"),
        ("predict WEIGHTS photos --address auto", 2, "--engine ray"),
        ("predict WEIGHTS digits", 2, "--out"),
        ("embed WEIGHTS photos --out r.jsonl", 2, ".npz"),
        ("predict no-such-model photos --contact-sheet s.txt", 2, ".png"),  # before any work
        ("predict no-such-model photos --contact-sheet no/s.png", 2, "folder"),
    ],
)
@pytest.mark.usefixtures("photos")
def test_bad_input_is_one_line(
    words: str, code: int, part: str, weights: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plant(tmp_path, {"bad.jpg": b"\xff\xd8 no", "old.jsonl": b""}))
    (tmp_path / "empty").mkdir()
    assert part in fail(capsys, *words.replace("WEIGHTS", str(weights)).split(), code=code)


def test_a_model_without_a_head_can_only_embed(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    path = plainvit.save(tiny.vit(torch.float32, depth=1, classes=0), tmp_path / "headless.safetensors")
    assert "plainvit embed" in fail(capsys, "predict", path, photos, code=2)
    main(["embed", str(path), str(photos), "--out", str(tmp_path / "f.parquet")])
    assert len(pq.read_table(tmp_path / "f.parquet")) == 7


def test_the_contact_sheet_shows_the_images(weights: Path, tmp_path: Path, capsys: Capture) -> None:
    """For a run, the output includes its validation accuracy."""
    weights = Path(shutil.copy(weights, tmp_path / "model.safetensors"))
    plain = {f"{name}.png": encode(Image.new("RGB", (60, 60), name)) for name in ("red", "lime", "blue")}
    plant(tmp_path / "in", {**plain, "zz.png": b"broken"})
    for extra in ([], ["--out", str(tmp_path / "r.csv")]):
        main(["predict", str(weights), str(tmp_path / "in"), "--contact-sheet", str(tmp_path / "sheet.png"), *extra])
        with Image.open(tmp_path / "sheet.png") as sheet:
            pixels = np.array(sheet.convert("RGB")).reshape(-1, 3)
        for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
            assert (pixels == color).all(1).sum() > 5_000
        out, err = capsys.readouterr()
        printed = out.replace("\n", "").replace(" ", "")
        assert printed.endswith(f"contactsheet:{tmp_path / 'sheet.png'}")
        assert ("1 of 4" in err) == (not extra)
        assert ("14of36validationimages" in printed) == bool(extra)  # once there are results
        (tmp_path / "results.json").write_text(json.dumps({"val": {"images": 36, "top1": 14 / 36}}))


# Resuming -------------------------------------------------------------------------------------------------------------


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
        (PredictionJob(other_weights, 2), "weights"),
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


def test_a_file_written_meanwhile_is_not_replaced(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "r.jsonl", inputs.find([str(photos)])
    job = PredictionJob(predictor, 1)

    def interfere(*arguments: Any) -> OutputBatches:
        yield from predict_locally(*arguments)
        out.write_text("another's")

    with pytest.raises(ValueError, match="--force"):
        write(job, source, out, engine=interfere)
    assert out.read_text() == "another's"
    summary, _ = write(job, source, out, force=True)
    assert summary.resumed == len(out.read_text().splitlines()) == 7, "the finished parts were kept"


def test_an_output_that_cannot_be_written_is_named_as_it_was_given(predictor: Predictor, photos: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot write /proc/r\.jsonl: "):
        write(PredictionJob(predictor, 1), inputs.find([str(photos)]), Path("/proc/r.jsonl"))


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_written_in_the_last_moment_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    """Also on a file system without hard links."""
    if not hard_links:
        monkeypatch.setattr("os.link", Mock(side_effect=PermissionError))

    def write_both(temporary: Path) -> None:
        temporary.write_text("new")
        (tmp_path / "taken").write_text("another's")

    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "taken", write_both, overwrite=False)
    assert (tmp_path / "taken").read_text() == "another's"
    write_atomically(tmp_path / "free", lambda temporary: temporary.write_text("new"), overwrite=False)
    assert (tmp_path / "free").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "taken"]


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
    for step, given in zip(found["step"], found["rows"], strict=True):
        assert pa.ipc.open_stream(given).read_all().equals(local[step])
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
