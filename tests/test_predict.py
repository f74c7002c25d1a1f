"""Batch prediction: all kinds of inputs, order of rows, output formats, killed and resumed jobs."""

import bz2
import csv
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from pictures import encode, jpeg, noise, plant, png, write_parquet, write_tar
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import save_file
from small_runs import Child

import plainvit
from plainvit.analyse.figures import write_csv
from plainvit.analyse.gallery import choose_evenly
from plainvit.cli import main
from plainvit.data import sources
from plainvit.data.decode import DataError, ImageError, decode
from plainvit.data.sources import Source
from plainvit.evaluate import inputs
from plainvit.evaluate.cluster import Cluster, _Answering, _decoded, _Decoding, _Packed, _size_cluster
from plainvit.evaluate.outputs import Parts
from plainvit.evaluate.predict import (
    NOT_FINITE,
    OutputBatches,
    PredictionJob,
    describe_accuracy_of_run,
    predict_locally,
    rows,
    write,
)
from plainvit.evaluate.predictor import Predictor

Capture = pytest.CaptureFixture[str]
CLASSES = ("ant", "bee", "=cow", "dog, or cat", "eel", "fox", "gnu")
COMMAND = Path(sys.executable).with_name("plainvit")


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


NAMES = ["0.jpg", "1.jpg", "2.jpg", "4.PNG", "5.jpg", "6.gif", "sub/3.png"]


def names(source: Source) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def refused(capsys: Capture, *arguments: object, code: int) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    assert caught.value.code == code
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("plainvit: ")]
    assert len(said) == 1
    assert not any("Traceback" in line for line in lines)
    return said[0]


# Inputs ---------------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_order(photos: Path) -> None:
    found = inputs.find([str(photos)])
    assert names(found) == [f"{photos}/{name}" for name in NAMES]
    assert all(found.read(at) == (photos / name).read_bytes() for at, name in enumerate(NAMES))


def test_globs_match_only_images_and_each_once(photos: Path) -> None:
    assert [Path(name).name for name in names(inputs.find([f"{photos}/**/*"]))] == [Path(name).name for name in NAMES]
    assert names(inputs.find([f"{photos}/[01].*"])) == [f"{photos}/0.jpg", f"{photos}/1.jpg"]
    assert names(inputs.find([f"{photos}/s*"])) == [f"{photos}/sub/3.png"]


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_archives_are_read_in_any_order(photos: Path, kind: str) -> None:
    path = photos.parent / f"all.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name in (*NAMES, "readme.txt", ".hidden.jpg"):
                file.write(photos / name, name)
    else:
        packing = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "xz": "xz"}.get(kind.split(".")[-1], "")
        with tarfile.open(path, f"w:{packing}") as file:
            for name in (*NAMES, "readme.txt", ".hidden.jpg"):
                file.add(photos / name, name)
    found = inputs.find([str(path)])
    assert names(found) == [f"{path}/{name}" for name in NAMES]
    backwards = [found.read(at) for at in reversed(range(len(found)))]
    assert backwards == [(photos / name).read_bytes() for name in reversed(NAMES)]


def test_names_are_read_from_standard_input_and_invalid_ones_are_rows(photos: Path) -> None:
    (photos.parent / "empty").mkdir()
    lines = [
        f"{photos}/2.jpg\n",
        f"{photos}/nothing.jpg\r\n",
        "\n",
        f"{photos.parent}/empty\n",
        f"{photos}/sub",
    ]
    found = inputs.find(["-"], lines=[line.encode() for line in lines])
    assert [Path(name).name for name in names(found)] == ["2.jpg", "nothing.jpg", "empty", "3.png"]
    for index, words in ((1, "No such file"), (2, "no images")):
        with pytest.raises(ImageError, match=words):
            found.read(index)


def test_names_on_standard_input_may_be_separated_by_zero_bytes(tmp_path: Path) -> None:
    plant(tmp_path, {"a.png": png(1), "two\nlines.png": png(2)})
    given = subprocess.run(["find", str(tmp_path), "-type", "f", "-print0"], capture_output=True, check=True).stdout
    found = inputs.find(["-"], lines=io.BytesIO(given))
    assert sorted(names(found)) == [f"{tmp_path}/a.png", f"{tmp_path}/two\nlines.png"]
    assert {bytes(found.read(0)), bytes(found.read(1))} == {png(1), png(2)}


def test_a_closed_standard_input_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.stdin is None after `<&-`."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="no images"):
        inputs.find(["-"])


def test_a_broken_link_is_a_row_with_an_error(photos: Path) -> None:
    (photos / "3.jpg").symlink_to("nowhere.jpg")
    (photos / "circle.jpg").symlink_to("circle.jpg")
    for word in (str(photos), f"{photos}/**/*"):
        found = inputs.find([word])
        wrong = {Path(name).name: at for at, name in enumerate(names(found)) if Path(name).is_symlink()}
        assert list(wrong) == ["3.jpg", "circle.jpg"]
        with pytest.raises(ImageError, match="No such file"):
            found.read(wrong["3.jpg"])
        with pytest.raises(ImageError, match="symbolic links"):
            found.read(wrong["circle.jpg"])


def test_inputs_keep_their_order_and_repetitions(photos: Path) -> None:
    archive = write_tar(photos.parent / "one.tar", [("x.png", png())])
    words = [f"{photos}/1.jpg", str(archive), f"{photos}/0.jpg", f"{photos}/1.jpg"]
    expected = [f"{photos}/1.jpg", f"{archive}/x.png", f"{photos}/0.jpg", f"{photos}/1.jpg"]
    assert names(inputs.find(words)) == expected


@pytest.mark.parametrize("word", ["nothing.jpg", "nothing", "no/*.jpg"])
def test_an_absent_input_is_a_data_error(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="file"):
        inputs.find([word])


def test_the_fingerprint_changes_with_a_file(photos: Path) -> None:
    before = inputs.find([str(photos)]).fingerprint()
    assert inputs.find([str(photos)]).fingerprint() == before
    (photos / "0.jpg").write_bytes(jpeg(77))
    after = inputs.find([str(photos)]).fingerprint()
    assert after != before
    assert len(after) == len(before) == 16


def test_the_fingerprint_changes_with_the_images_of_a_dataset(tmp_path: Path) -> None:
    path, images = tmp_path / "test-00000-of-00001.parquet", [png(seed) for seed in range(100)]
    write_parquet(path, images, [0] * 100)
    before = inputs.find([str(tmp_path)]).fingerprint()
    assert inputs.find([str(tmp_path)]).fingerprint() == before
    write_parquet(path, [*images[:37], png(777), *images[38:]], [0] * 100)
    assert inputs.find([str(tmp_path)]).fingerprint() != before


# Hostile archives -----------------------------------------------------------------------------------------------------


def test_members_with_parent_or_absolute_paths_write_no_files(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    members = [("../../out.png", png(1)), ("/tmp/plainvit-absolute.png", png(2))]
    write_tar(inner / "x.tar", members)
    with zipfile.ZipFile(inner / "x.zip", "w") as file:
        for name, data in members:
            file.writestr(name, data)
    for kind in ("tar", "zip"):
        found = inputs.find([str(inner / f"x.{kind}")])
        assert [found.read(0), found.read(1)] == [png(1), png(2)]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["x.tar", "x.zip"]
    assert not Path("/tmp/plainvit-absolute.png").exists()


def test_links_in_a_tar_only_reach_its_own_images_and_devices_are_error_rows(tmp_path: Path) -> None:
    kinds = {"l": tarfile.LNKTYPE, "s": tarfile.SYMTYPE, "p": tarfile.FIFOTYPE, "c": tarfile.CHRTYPE}
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        member = tarfile.TarInfo("./in/good.png")
        member.size = len(png())
        file.addfile(member, io.BytesIO(png()))
        for name, target in (
            *(
                ("in/l.png", "./in/good.png"),
                ("in/s.png", "good.png"),
                ("s.png", "in/./s.png"),
                ("p.png", "in/good.png"),
            ),
            *(("in/lost.l.png", "/etc/passwd"), ("in/lost.s.png", "../../good.png"), ("c.png", "in/good.png")),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kinds[name[-5]], target
            file.addfile(member)
    found = inputs.find([str(tmp_path / "x.tar")])
    assert [name.removeprefix(f"{tmp_path}/x.tar/") for name in names(found)] == [
        *("./in/good.png", "in/l.png", "in/s.png", "s.png"),
        *("p.png", "in/lost.l.png", "in/lost.s.png", "c.png"),
    ]
    assert [found.read(at) for at in range(4)] == [png()] * 4
    for at, reason in ((4, "pipe"), (5, "link"), (6, "link"), (7, "pipe")):
        with pytest.raises(ImageError, match=reason):
            found.read(at)


def test_a_tar_bomb_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "x.tar.bz2", "w:bz2") as file:
        for name, data in (("good.png", png()), ("hole.bin", bytes(40 * 2**20)), ("late.png", png())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    assert len(inputs.find([str(tmp_path / "x.tar.bz2")])) == 2  # small ones are allowed
    monkeypatch.setattr(inputs, "UNPACKED_LEAST", 2**20)
    found = inputs.find([str(tmp_path / "x.tar.bz2")])
    assert [Path(name).name for name in names(found)] == ["good.png", "x.tar.bz2"]
    with pytest.raises(ImageError, match="unpacks to more"):
        found.read(1)


def lying_zip(path: Path, method: int, packed: bytes) -> Path:
    """A zip whose member claims 1,000 bytes and this compression method."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.png", packed)
    data = bytearray(path.read_bytes())
    for mark, kind, size in ((b"PK\3\4", 8, 22), (b"PK\1\2", 10, 24)):
        start = data.index(mark)
        struct.pack_into("<H", data, start + kind, method)
        struct.pack_into("<I", data, start + size, 1000)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["deflate", "bzip2"])
def test_a_zip_member_is_not_unpacked_beyond_its_stated_size(tmp_path: Path, kind: str) -> None:
    zeros, deflate = bytes(32 * 2**20), zlib.compressobj(wbits=-15)
    packed = bz2.compress(zeros) if kind == "bzip2" else deflate.compress(zeros) + deflate.flush()
    found = inputs.find([str(lying_zip(tmp_path / "x.zip", 12 if kind == "bzip2" else 8, packed))])
    del zeros
    tracemalloc.start()
    with pytest.raises(ImageError, match=r"method 12|CRC"):
        found.read(0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 * 2**20


def test_a_huge_tar_header_is_an_error_row(tmp_path: Path) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 6 * 2**30
    good = tarfile.TarInfo("good.png")
    good.size = len(png())
    padded = png() + bytes(-len(png()) % tarfile.BLOCKSIZE)
    (tmp_path / "x.tar").write_bytes(good.tobuf(tarfile.GNU_FORMAT) + padded + member.tobuf(tarfile.GNU_FORMAT))
    found = inputs.find([str(tmp_path / "x.tar")])
    assert [Path(name).name for name in names(found)] == ["good.png", "x.tar"]
    assert found.read(0) == png()
    with pytest.raises(ImageError, match="header has 6,442,450,944"):
        found.read(1)


def test_members_and_files_over_the_limit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"x.png": png()})
    write_tar(tmp_path / "x.tar", [("x.png", png())])
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.write(tmp_path / "x.png")
    for module in (inputs, sources):
        monkeypatch.setattr(module, "FILE_LIMIT", len(png()) - 1)
    for name in ("x.png", "x.tar", "x.zip"):
        with pytest.raises(ImageError, match="limit"):
            inputs.find([str(tmp_path / name)]).read(0)


@pytest.mark.parametrize("kind", ["tar", "tgz"])
def test_a_truncated_archive_keeps_its_readable_images(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / f"x.{kind}"
    with tarfile.open(whole, "w:gz" if kind == "tgz" else "w") as file:
        for seed in range(20):
            member = tarfile.TarInfo(f"{seed}.png")
            member.size = len(png(seed))
            file.addfile(member, io.BytesIO(png(seed)))
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    found = inputs.find([str(whole)])
    assert 2 < len(found) < 20
    assert found.read(0) == png(0)
    assert names(found)[-1] == str(whole)
    with pytest.raises(ImageError, match="cannot be read"):
        found.read(len(found) - 1)


def test_a_corrupt_or_encrypted_zip_member_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.png", png())
    data = bytearray(path.read_bytes())
    data[data.index(b"PNG") + 20] ^= 255  # its checksum no longer holds
    path.write_bytes(data)
    with pytest.raises(ImageError, match="CRC"):
        inputs.find([str(path)]).read(0)
    data[data.index(b"PK\1\2") + 8] |= 1  # and now it asks for a password
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"encrypted|password"):
        inputs.find([str(path)]).read(0)


# Rows -----------------------------------------------------------------------------------------------------------------


def by_hand(predictor: Predictor, path: Path) -> list[tuple[str, float]]:
    """One image alone, resized by Pillow, with softmax in float64."""
    picture = Image.fromarray(decode(path.read_bytes())).resize((40, 24), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    with torch.no_grad():
        logits = predictor.model(pixels)[0].numpy().astype(np.float64)
    share = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return [(CLASSES[at], share[at]) for at in np.argsort(-share)]


def test_rows_equal_those_of_each_image_alone(predictor: Predictor, photos: Path) -> None:
    found = list(rows(PredictionJob(predictor, 3), inputs.find([str(photos)])))
    assert [row["name"] for row in found] == [f"{photos}/{name}" for name in NAMES]
    for row in found:
        if row["name"].endswith("5.jpg"):
            assert row["guesses"] == []
            assert "truncated" in row["error"].lower()
            continue
        assert row["error"] is None
        expected = by_hand(predictor, Path(row["name"]))[:3]
        assert [guess["label"] for guess in row["guesses"]] == [label for label, _ in expected]
        given = [guess["probability"] for guess in row["guesses"]]
        assert given == pytest.approx([share for _, share in expected], abs=0.01)  # Pillow's resize rounds differently


def test_rows_equal_the_predictors_results(predictor: Predictor, photos: Path) -> None:
    good = [photos / name for name in NAMES if name != "5.jpg"]
    found = [row for row in rows(PredictionJob(predictor, 7), inputs.find([str(photos)])) if not row["error"]]
    for row, guesses in zip(found, predictor(good, k=7), strict=True):
        assert [guess["label"] for guess in row["guesses"]] == [guess.label for guess in guesses]
        assert [guess["probability"] for guess in row["guesses"]] == pytest.approx(
            [g.probability for g in guesses], rel=1e-5
        )
        assert sum(guess["probability"] for guess in row["guesses"]) == pytest.approx(1, abs=1e-5)
    assert [len(guesses) for guesses in predictor(good)] == [5] * len(good)
    for k in (0, 8):
        with pytest.raises(ValueError, match="7 classes"):
            predictor(good, k=k)


@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_workers_read_an_archive_independently(predictor: Predictor, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            for seed in range(40):
                file.writestr(f"{seed:02d}.png", png(seed))
    else:
        with tarfile.open(path, "w:gz") as file:
            for seed in range(40):
                member = tarfile.TarInfo(f"{seed:02d}.png")
                member.size = len(png(seed))
                file.addfile(member, io.BytesIO(png(seed)))
    source, question = inputs.find([str(path)]), PredictionJob(predictor, 2)
    source.read(3)  # workers must not inherit this file position
    alone = list(rows(question, source, engine=partial(predict_locally, workers=0)))
    assert list(rows(question, source, engine=partial(predict_locally, workers=2))) == alone
    assert len({json.dumps(row["guesses"]) for row in alone}) == 40


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
        for place, guess in enumerate(line["guesses"], 1):
            assert cell[f"label_{place}"] == guess["label"].replace("=cow", "'=cow")
            assert float(cell[f"probability_{place}"]) == guess["probability"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "r.csv", "r.jsonl", "r.parquet"]


def test_features_equal_the_models(weights: Path, predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    for kind in ("parquet", "safetensors"):
        main(["embed", str(weights), str(photos), "--out", str(tmp_path / f"f.{kind}"), "--batch", "4", "--json"])
    saved, table = load_file(tmp_path / "f.safetensors"), pq.read_table(tmp_path / "f.parquet")
    assert bytes(saved["names"]).decode().split("\0") == table["name"].to_pylist()
    assert [error or None for error in bytes(saved["errors"]).decode().split("\0")] == table["error"].to_pylist()
    for at, name in enumerate(NAMES):
        if name == "5.jpg":
            assert np.isnan(saved["features"][at]).all()
            assert table["features"][at].as_py() is None
            continue
        expected = predictor.features(predictor.stack([photos / name]))[0].numpy()
        np.testing.assert_allclose(saved["features"][at], expected, atol=1e-5)
        np.testing.assert_array_equal(saved["features"][at], np.float32(table["features"][at].as_py()))


def overflowing(photos: Path) -> tuple[PredictionJob, list[bool]]:
    """A model whose features overflow for some images, and which."""
    model = tiny.vit(torch.float32, depth=1)
    predictor = Predictor(model, device="cpu", batch=4)
    good = [predictor.load_image(photos / name) for name in NAMES if name != "5.jpg"]
    largest = predictor.features(torch.stack(good)).abs().amax(1).double().numpy()
    scale = np.finfo(np.float32).max / np.median(largest)
    for part in (model.norm.weight, model.norm.bias):
        part.data *= scale
    return PredictionJob(predictor), (largest > np.median(largest)).tolist()


def test_non_finite_results_are_errors(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    question, over = overflowing(photos)
    found = list(rows(question, inputs.find([str(photos)])))
    errors = [row["error"] for row in found if not row["name"].endswith("5.jpg")]
    assert errors == [NOT_FINITE if one else None for one in over]
    assert 0 < sum(over) < 6
    assert all((row["features"] is None) == (row["error"] is not None) for row in found)
    assert "truncated" in found[NAMES.index("5.jpg")]["error"].lower()
    assert np.isfinite([row["features"] for row in found if row["features"]]).all()
    path = plainvit.save(question.predictor.model, tmp_path / "over.safetensors")
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(path), str(photos), "--json"])
    assert caught.value.code == 3
    said = capsys.readouterr()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in said.out.splitlines()]
    assert [line["guesses"] for line in lines] == [[]] * 7
    assert lines[0]["error"] == NOT_FINITE
    assert "all 7 images failed" in said.err


FORMULAS = ["=1+1.png", "+1.png", "-1.png", "@SUM(1).png", "\t=1.png", "\r=1.png", "x\r=1.png"]


def test_formulas_are_escaped_in_csv_only(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plant(tmp_path, {**{name: png(8) for name in FORMULAS}, "=in/x.png": png(9)}))
    write_tar(Path("+x.tar"), [("-.png", png())])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\0".join([*FORMULAS, "@none"]).encode() + b"\0")))
    assert names(inputs.find(["=1+1.png"])) == ["=1+1.png"]
    given = [str(weights), "-", "=in", "+x.tar", "--top", "7", "--out"]
    for kind in ("csv", "jsonl"):
        sys.stdin.seek(0)
        main(["predict", *given, f"r.{kind}"])
    expected = [*FORMULAS, "@none", "=in/x.png", "+x.tar/-.png"]
    assert [json.loads(line)["name"] for line in Path("r.jsonl").read_text().split("\n")[:-1]] == expected
    with Path("r.csv").open(newline="") as file:
        head, *cells = csv.reader(file)
    assert [row[0] for row in cells] == [name if name[0] == "x" else f"'{name}" for name in expected]
    assert not [cell for row in (head, *cells) for cell in row if re.match(r"[=+\-@\t\r]", cell)]


def test_numbers_in_csv_are_not_escaped(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [["=1+1", "-1.5e-07", "-3", -2, -0.5, "-1+1", "a=b", "\uff1d1"]])
    assert (tmp_path / "x.csv").read_text() == "'=1+1,-1.5e-07,-3,-2,-0.5,'-1+1,a=b,'\uff1d1\n"


# The command ----------------------------------------------------------------------------------------------------------


def test_predict_prints_a_table_or_json_lines(weights: Path, photos: Path, capsys: Capture) -> None:
    main(["predict", str(weights), str(photos), "--top", "1"])
    out, err = capsys.readouterr()
    assert "4.PNG" in out
    assert "1 of 7" in err
    main(["predict", str(weights), str(photos), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["guesses"]) for line in lines] == [5, 5, 5, 5, 0, 5, 5]


def test_write_prints_nothing_when_called_from_python(
    predictor: Predictor, photos: Path, tmp_path: Path, capsys: Capture
) -> None:
    write(PredictionJob(predictor, 1), inputs.find([str(photos)]), tmp_path / "r.csv")
    assert capsys.readouterr() == ("", "")


def test_an_unwritable_output_is_an_error_before_any_work(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    source = inputs.find([str(photos)])
    for out, words in (("rows.txt", ".jsonl"), ("no/rows.csv", "folder")):
        with pytest.raises(ValueError, match=re.escape(words)):
            write(PredictionJob(predictor, 1), source, tmp_path / "new" / out, engine=never)
    assert not (tmp_path / "new").exists()


def never(*_: object) -> OutputBatches:
    raise AssertionError("the model was called")


def test_out_of_memory_has_exit_code_5(
    weights: Path, photos: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore\nlines")

    monkeypatch.setattr(Predictor, "logits", full)
    assert "--batch 4" in refused(capsys, "predict", weights, photos, "--out", tmp_path / "r.csv", "--batch", 4, code=5)


def test_the_summary_as_json(weights: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    main(["predict", str(weights), str(photos), "--out", str(tmp_path / "r.jsonl"), "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["images"], found["unreadable"], found["resumed"], err) == (7, 1, 0, "")
    assert "5.jpg" in found["first_error"]


def test_rows_are_printed_as_they_come(weights: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushed after each row, also into a pipe."""
    lines: list[int] = []

    class Told(io.StringIO):
        def flush(self) -> None:
            lines.append(self.getvalue().count("\n"))

    monkeypatch.setattr(sys, "stdout", Told())
    main(["predict", str(weights), str(photos), "--json"])
    assert [*dict.fromkeys(lines)] == [1, 2, 3, 4, 5, 6, 7]


def test_bad_input_is_one_line(weights: Path, photos: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    plant(tmp_path, {"bad.jpg": b"\xff\xd8 no"})
    out = tmp_path / "r.jsonl"
    assert "no images" in refused(capsys, "predict", weights, tmp_path / "empty", code=3)
    assert "--top" in refused(capsys, "predict", weights, photos, "--top", 8, code=2)
    assert "top" in refused(capsys, "predict", weights, photos, "--top", 0, code=2)
    assert "no INPUT" in refused(capsys, "predict", weights, code=2)
    assert "bad.jpg: " in refused(capsys, "predict", weights, tmp_path / "bad.jpg", code=3)
    assert "bad.jpg: " in refused(capsys, "predict", weights, tmp_path / "bad.jpg", "--out", out, code=3)
    assert json.loads(out.read_text())["guesses"] == []  # the row is kept all the same
    assert "--force" in refused(capsys, "predict", weights, photos, "--out", out, code=2)
    assert ".jsonl" in refused(capsys, "predict", weights, photos, "--out", "r.txt", code=2)
    assert ".safetensors" in refused(capsys, "embed", weights, photos, "--out", out, code=2)
    assert "folder" in refused(capsys, "predict", weights, photos, "--out", tmp_path / "no/r.csv", code=2)
    assert "--engine ray" in refused(capsys, "predict", weights, photos, "--address", "auto", code=2)
    assert "--out" in refused(capsys, "predict", weights, "digits", code=2)


def test_an_unwritable_sheet_is_an_error_before_any_work(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    for name, words in (("s.txt", ".png"), ("no/s.png", "folder"), ("photos.png", "folder")):
        (tmp_path / "photos.png").mkdir(exist_ok=True)
        line = ["predict", "no-such-model", photos, "--out", tmp_path / "r.csv", "--sheet", tmp_path / name]
        assert words in refused(capsys, *line, code=2)


def test_a_model_without_a_head_can_only_embed(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    path = plainvit.save(tiny.vit(torch.float32, depth=1, classes=0), tmp_path / "headless.safetensors")
    assert "plainvit embed" in refused(capsys, "predict", path, photos, code=2)
    main(["embed", str(path), str(photos), "--out", str(tmp_path / "f.parquet")])
    assert len(pq.read_table(tmp_path / "f.parquet")) == 7


@pytest.mark.parametrize(
    ("nodes", "device", "found"),
    [
        ([{"CPU": 8, "GPU": 2}, {"GPU": 4}], "auto", (6, 1, "cuda")),
        ([{"CPU": 8, "GPU": 2}, {"GPU": 4}], "cpu", (2, 4, "cpu")),
        ([{"CPU": 6}, {"CPU": 2}, {"CPU": 0.5}], "auto", (4, 2, "cpu")),  # all copies have the same threads
        ([{"CPU": 1}], "cpu", (1, 1, "cpu")),
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


@pytest.mark.parametrize("ahead", [False, True])  # True: tasks decode, as they do for GPUs
def test_ray_workers_give_the_same_rows(
    predictor: Predictor, photos: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Without Ray's transport; with Ray: test_predict_ray.py."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda sent: sent))
    question, source = PredictionJob(predictor, 3), inputs.find([str(photos)])
    work = _Decoding(source, question)
    machine = _Answering(_Packed.of(question, "cpu"), work)
    local = dict(predict_locally(question, source, np.arange(2), workers=0))
    for step in (1, 0):
        asked: dict[str, Any] = {"item": np.array([step])}
        row = machine(_decoded(asked, work) if ahead else asked)
        assert row["fault"] == [""]
        assert row["step"] == [step]
        assert pa.ipc.open_stream(row["rows"][0]).read_all().equals(local[step])


def test_without_ray_the_install_command_is_printed(
    weights: Path, photos: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = refused(capsys, "predict", weights, photos, "--engine", "ray", code=2)
    assert "pip install 'ray[data]>=2.52'" in said


def test_the_contact_sheet_shows_the_images(weights: Path, tmp_path: Path, capsys: Capture) -> None:
    """For a run, the output includes its held-out accuracy."""
    weights = Path(shutil.copy(weights, tmp_path / "model.safetensors"))
    plain = {f"{name}.png": encode(Image.new("RGB", (60, 60), name)) for name in ("red", "lime", "blue")}
    plant(tmp_path / "in", {**plain, "zz.png": b"broken"})
    for extra in ([], ["--out", str(tmp_path / "r.csv")]):
        main(["predict", str(weights), str(tmp_path / "in"), "--sheet", str(tmp_path / "sheet.png"), *extra])
        with Image.open(tmp_path / "sheet.png") as sheet:
            pixels = np.array(sheet.convert("RGB")).reshape(-1, 3)
        for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
            assert (pixels == colour).all(1).sum() > 5_000
        said = capsys.readouterr().out.replace("\n", "").replace(" ", "")
        assert said.endswith(f"sheet:{tmp_path / 'sheet.png'}")
        assert ("14of36held-outimages" in said) == bool(extra)  # once there are results
        (tmp_path / "results.json").write_text(json.dumps({"val": {"images": 36, "top1": 14 / 36}}))
    assert list(choose_evenly(3)) == [0, 1, 2]
    assert len(choose_evenly(100_000)) == 96


@pytest.mark.parametrize(
    "text",
    ['{"test": {"top1": 85.3, "images": 500}}', '{"val": {"top1": 0.5, "images": "36"}}', '{"test": 0.9}', "[1]", "{"],
)
def test_foreign_results_json_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    assert describe_accuracy_of_run(tmp_path) == ""


# Jobs that are killed -------------------------------------------------------------------------------------------------


def paced(pause: float, question: PredictionJob, source: Source, steps: np.ndarray) -> OutputBatches:
    for answer in predict_locally(question, source, steps, workers=0):
        time.sleep(pause)
        yield answer


def job(weights: str, folder: str, out: Path, pause: float = 0.0) -> None:
    """In a child or here: parts of 32 images in batches of 8."""
    question = PredictionJob(Predictor(weights, device="cpu", batch=8), 3)
    write(question, inputs.find([folder]), out, engine=partial(paced, pause), part=32)


def finished(out: Path) -> int:
    return len(list(out.with_name(f"{out.name}.parts").glob("part-*.parquet")))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 pictures, one of them broken."""
    files = {f"{seed:03d}.png": png(seed) for seed in range(600)}
    return plant(tmp_path_factory.mktemp("many"), {**files, "333.png": b"broken"})


@pytest.mark.slow
def test_a_job_killed_three_times_has_every_image_once(weights: Path, many: Path, tmp_path: Path) -> None:
    out, calm = tmp_path / "r.jsonl", tmp_path / "calm.jsonl"
    for more in (3, 2, 5):
        before = finished(out)
        child = Child(job, str(weights), str(many), out, 0.01, log=tmp_path / "log")
        child.wait_for(lambda least=before + more: finished(out) >= least)
        with pytest.raises(ValueError, match="another process"):
            job(str(weights), str(many), out)
        child.kill()
        assert finished(out) >= before + more, child.said
        assert not out.exists()
    assert finished(out) < 19
    job(str(weights), str(many), out)
    job(str(weights), str(many), calm)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in found] == [f"{many}/{seed:03d}.png" for seed in range(600)]
    assert [row["name"] for row in found if row["error"]] == [f"{many}/333.png"]
    assert out.read_bytes() == calm.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm.jsonl", "log", "r.jsonl"]


def test_resume_after_a_kill_during_cleanup(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, question, source = tmp_path / "r.jsonl", PredictionJob(predictor, 2), inputs.find([str(photos)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "close", lambda self: self._lock.close())
        write(question, source, out, part=4)
    first = out.read_bytes()
    (tmp_path / "r.jsonl.parts" / "part-000000.parquet").unlink()  # as far as it came

    def counted(*arguments: Any) -> OutputBatches:
        asked.append(arguments[2].tolist())
        yield from predict_locally(*arguments)

    asked: list[list[int]] = []
    summary, _ = write(question, source, out, engine=counted, part=4)
    assert asked == [[0]]
    assert summary.resumed == 3
    assert out.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "r.jsonl"]


class Stop(Exception):
    """In place of a signal."""


def stopping(question: PredictionJob, source: Source, steps: np.ndarray) -> Iterator[Any]:
    """One part, then no more."""
    yield from predict_locally(question, source, steps[:1])
    raise Stop


def test_a_damaged_part_is_computed_again(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, question, source = tmp_path / "r.csv", PredictionJob(predictor, 2), inputs.find([str(photos)])
    with pytest.raises(Stop):
        write(question, source, out, engine=stopping, part=4)
    part = tmp_path / "r.csv.parts" / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-50])
    summary, _ = write(question, source, out, part=4)
    assert (summary.images, summary.resumed) == (7, 0)


def test_parts_of_another_job_need_force(predictor: Predictor, weights: Path, photos: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "r.csv", inputs.find([str(photos)])
    with pytest.raises(Stop):
        write(PredictionJob(predictor, 2), source, out, engine=stopping, part=4)
    with pytest.raises(ValueError, match="different: top"):
        write(PredictionJob(predictor, 3), source, out, part=4)
    other = Predictor(weights, device="cpu", batch=4)
    other.model.head.bias.data += 1
    with pytest.raises(ValueError, match="different: model"):
        write(PredictionJob(other, 2), source, out, part=4)
    plant(photos, {"7.png": png(7)})
    more = inputs.find([str(photos)])
    with pytest.raises(ValueError, match="different: inputs, images"):
        write(PredictionJob(predictor, 2), more, out, part=4)
    summary, _ = write(PredictionJob(predictor, 2), more, out, part=4, force=True)
    assert (summary.images, summary.resumed) == (8, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "r.csv"]


def test_a_job_resumes_with_a_batch_size_that_divides_its_parts(
    predictor: Predictor, weights: Path, photos: Path, tmp_path: Path
) -> None:
    out, source = tmp_path / "r.jsonl", inputs.find([str(photos)])
    with pytest.raises(Stop):
        write(PredictionJob(predictor, 2), source, out, engine=stopping, part=4)  # in batches of 4
    part = tmp_path / "r.jsonl.parts" / "part-000000.parquet"
    first = part.read_bytes()
    for batch in (3, 8):
        with pytest.raises(ValueError, match="--batch"):
            write(PredictionJob(Predictor(weights, device="cpu", batch=batch), 2), source, out, part=4)
        assert part.read_bytes() == first
    asked: list[list[int]] = []

    def counted(*arguments: Any) -> OutputBatches:
        asked.append(arguments[2].tolist())
        yield from predict_locally(*arguments)

    summary, _ = write(PredictionJob(Predictor(weights, device="cpu", batch=2), 2), source, out, engine=counted, part=4)
    assert (summary.images, summary.resumed, asked) == (7, 4, [[2, 3]])
    whole = list(rows(PredictionJob(predictor, 2), source))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["name"], row["error"]) for row in found] == [(row["name"], row["error"]) for row in whole]
    for ours, theirs in zip(found, whole, strict=True):
        assert [one["label"] for one in ours["guesses"]] == [one["label"] for one in theirs["guesses"]]
        np.testing.assert_allclose(
            [one["probability"] for one in ours["guesses"]],
            [one["probability"] for one in theirs["guesses"]],
            rtol=1e-5,
        )


def test_the_same_weights_in_another_model_are_another_job(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    model = tiny.vit(torch.float32, depth=1, mean=(0.1, 0.2, 0.3))
    model.load_state_dict(predictor.model.state_dict())
    object.__setattr__(model.about, "class_names", CLASSES)
    other, source, out = Predictor(model, device="cpu", batch=4), inputs.find([str(photos)]), tmp_path / "r.csv"
    with pytest.raises(Stop):
        write(PredictionJob(predictor, 2), source, out, engine=stopping, part=4)
    with pytest.raises(ValueError, match="different: config"):
        write(PredictionJob(other, 2), source, out, part=4)


def test_a_job_of_a_timm_model_is_resumed(photos: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    name = f"timm:vit_tiny_patch16_224@{tmp_path / 'w.safetensors'}"
    question = PredictionJob(Predictor(name, device="cpu", image_size=32, batch=4), 2)
    out, source = tmp_path / "r.csv", inputs.find([str(photos)])
    with pytest.raises(Stop):
        write(question, source, out, engine=stopping, part=4)
    summary, _ = write(question, source, out, part=4)
    assert (summary.images, summary.resumed) == (7, 4)


def fails(*_: Any) -> OutputBatches:
    raise Stop
    yield


def kill_early(question: PredictionJob, source: Source, out: Path, *, force: bool = False) -> None:
    """Stops before the first part, without cleaning up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "close", lambda self: self._lock.close())
        with pytest.raises(Stop):
            write(question, source, out, engine=fails, force=force)


def test_only_a_job_started_with_force_replaces_a_file(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "r.jsonl", inputs.find([str(photos)])
    write(PredictionJob(predictor, 1), source, out)
    first = out.read_bytes()
    kill_early(PredictionJob(predictor, 2), source, out, force=True)
    for top in (1, 3):
        with pytest.raises(ValueError, match="--force"):
            write(PredictionJob(predictor, top), source, out)
    assert out.read_bytes() == first
    write(PredictionJob(predictor, 2), source, out)  # resumes the job that was started with force
    assert {len(json.loads(line)["guesses"]) for line in out.read_text().splitlines()} == {0, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "r.jsonl"]


def test_a_file_written_by_others_is_not_replaced(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, source, question = tmp_path / "r.jsonl", inputs.find([str(photos)]), PredictionJob(predictor, 1)
    kill_early(question, source, out)
    out.write_text("another's")
    with pytest.raises(ValueError, match="--force"):
        write(question, source, out)
    assert out.read_text() == "another's"


def test_a_kill_during_cleanup_keeps_the_output(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "r.jsonl", inputs.find([str(photos)])
    write(PredictionJob(predictor, 1), source, out)
    plant(tmp_path, {"r.jsonl.parts/.lock": b""})
    first = out.read_bytes()
    with pytest.raises(ValueError, match="--force"):
        write(PredictionJob(predictor, 2), source, out)
    assert out.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "r.jsonl"]


def test_temporary_files_of_a_killed_job_are_deleted(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    plant(tmp_path, {".r[1].csv.0123abcd.tmp": b"half", ".r[1].csv.notes.tmp": b"", ".r1.csv.0123abcd.tmp": b""})
    write(PredictionJob(predictor, 2), inputs.find([str(photos)]), tmp_path / "r[1].csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".r1.csv.0123abcd.tmp", ".r[1].csv.notes.tmp", "photos", "r[1].csv")
    ]


def test_a_job_without_a_finished_part_leaves_no_files(predictor: Predictor, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        write(PredictionJob(predictor, 2), inputs.find([str(photos)]), tmp_path / "r.csv", engine=fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]
