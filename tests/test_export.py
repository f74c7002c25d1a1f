"""Exports: logits of PyTorch for every family, metadata, int8, and what must not be written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import encode, photo, plant, real_data
from tiny import bit, hybrid, mostly_slow, vit
from torch import Tensor, nn

import plainvit
from plainvit.cli import main
from plainvit.config import About
from plainvit.evaluate.predictor import Predictor
from plainvit.serve import export as exports
from plainvit.serve import formats
from plainvit.serve.bench import load_photos, measure
from plainvit.serve.export import DisagreementError, export
from plainvit.serve.formats import Graph, open_graph, trace_program

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters' own deprecations
FAMILIES: dict[str, Callable[[], Any]] = {
    "class token": lambda: vit(torch.float32),
    "BiT": lambda: bit(torch.float32),
    "average": lambda: vit(torch.float32, pool="average", class_token=False),
    "attention": lambda: vit(torch.float32, pool="attention", class_token=False),
    "DeiT": lambda: vit(torch.float32, distillation=True),
    "relative": lambda: vit(torch.float32, posemb="relative", representation=16),
    "registers": lambda: vit(torch.float32, registers=3, posemb="2d", layer_scale=0.1),
    "axial": lambda: vit(torch.float32, axial=True, pool="average", class_token=False),
    "every layer": lambda: vit(torch.float32, posemb_at="every", norm_pooled=True),
    "post-norm": lambda: vit(torch.float32, posemb="sincos2d", norm="post"),
    "no head": lambda: vit(torch.float32, classes=0),
    "class token and average": lambda: vit(torch.float32, pool="token+average"),
    "EVA-02": lambda: vit(torch.float32, rotary="eva02", gated=True, activation="silu", norm_inner="mlp"),
    "DINOv3": lambda: vit(torch.float32, rotary="dinov3", posemb="none", registers=4, block_bias="no_k"),
    "BEiT": lambda: vit(torch.float32, posemb="bias", pool="average", norm_pooled=True),
    "image-text": lambda: vit(torch.float32, projection=16, cosine_head=True, qk_norm=True),
    "hybrid": lambda: hybrid(torch.float32),
}


def noise(model: Any, count: int) -> Tensor:
    size = (count, 3, *model.config.image_size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, 9))
def test_exports_equal_pytorch_for_any_batch_size(family: str, tmp_path: Path) -> None:
    """The reference is the model in float64."""
    model = FAMILIES[family]()
    written, checks = export(Predictor(model), noise(model, 4), ["onnx", "openvino", "pt2"], tmp_path)
    assert [path.name for path in written] == ["model.onnx", "model.bin", "model.xml", "model.pt2"]
    assert [check.agreeing for check in checks] == [4] * 4
    images, exact = noise(model, 5), model.double()
    with torch.no_grad():
        features, logits = exact.features(images), exact(images) if model.config.classes else None
    for name in ("model.onnx", "model.xml", "model.pt2"):
        graph = open_graph(tmp_path / name)
        for count in (1, 5):
            torch.testing.assert_close(graph.features(images[:count]).double(), features[:count], rtol=0, atol=1e-4)
            if logits is not None:
                torch.testing.assert_close(graph.logits(images[:count]).double(), logits[:count], rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_a_file_says_how_to_use_it(form: Any, tmp_path: Path) -> None:
    """Float input, class names and preprocessing, read by the runtime alone."""
    model = vit(torch.float32, depth=1)
    model.about = About(class_names=tuple(f"ünï {at}" for at in range(7)))
    (*_, path), _ = export(Predictor(model), noise(model, 2), [form], tmp_path, dtype=torch.float32)
    pixels = noise(model, 3)
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        about = json.loads(session.get_modelmeta().custom_metadata_map["plainvit"])
        found = session.run(["logits"], {"images": pixels.numpy() / np.float32(255)})[0]
    else:
        import openvino

        graph = openvino.Core().read_model(path)
        about = json.loads(graph.get_rt_info("plainvit").value)
        settings = {"INFERENCE_PRECISION_HINT": "f32"}
        found = openvino.compile_model(graph, "CPU", settings)([pixels.numpy() / np.float32(255)])["logits"]
    assert about["class_names"] == list(model.about.class_names)
    assert about["preprocess"]["resize"] == "squash"
    assert about["image_size"] == [24, 40]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(pixels), rtol=0, atol=1e-4)


def test_an_export_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit(torch.float32, depth=1)
    wrong = Graph(lambda images, _: np.ones((len(images), 7), np.float32), {"input": "uint8"})
    monkeypatch.setattr(exports, "open_graph", lambda _: wrong)
    with pytest.raises(DisagreementError, match="onnx fp32"):
        export(Predictor(model), noise(model, 2), ["onnx"], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert DisagreementError.exit_code == 4


def test_what_cannot_be_exported_is_named() -> None:
    with pytest.raises(ValueError, match="Conv2d"):
        trace_program(nn.Conv2d(3, 3, 1))
    model = vit(torch.float32)
    for form in ("pt2", "aoti"):
        with pytest.raises(ValueError, match=form):
            export(Predictor(model), noise(model, 4), [form], Path("none"), int8=True)


def test_int8_quantizes_weights_per_channel_and_keeps_the_worst_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    monkeypatch.setattr(exports, "MIN_AGREEMENT", 0.0)
    model = vit(torch.float32)
    (path,), checks = export(Predictor(model), noise(model, 7), ["onnx"], tmp_path, int8=True)
    assert checks[1].images == 3  # the other four were used to calibrate
    graph = onnx.load(path).graph
    values = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    weights = [one for one in graph.node if one.op_type == "DequantizeLinear" and one.input[0] in values]
    weights = [[values[name] for name in one.input[:2]] for one in weights if values[one.input[0]].dtype == np.int8]
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert len(weights) == layers - round(0.1 * layers)
    assert all(scales.size in weight.shape and scales.size > 1 for weight, scales in weights)


def test_int8_without_a_head_is_compared_by_its_features(tmp_path: Path) -> None:
    model = vit(torch.float32, classes=0)
    written, checks = export(Predictor(model), noise(model, 7), ["onnx"], tmp_path, int8=True)
    assert [path.name for path in written] == ["model.int8.onnx"]
    assert checks[1].agreeing == 3


@pytest.mark.slow
@pytest.mark.parametrize("data", ["oxford-pets", "imagenet-photos"])
def test_int8_of_published_weights_agrees_on_photos(data: str, tmp_path: Path) -> None:
    predictor = Predictor(real_data() / "weights" / "vit_ti16_augreg.safetensors", device="cpu")
    source = exports.find_images("", str(real_data() / data), None)
    images, _ = exports.load_images(predictor, source, 128)
    _, checks = export(predictor, images, ["onnx", "openvino"], tmp_path, int8=True)
    for check in checks[1:]:
        assert check.interval[1] > 0.95
        assert check.megabytes < 0.5 * checks[0].megabytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_aoti_equals_pytorch(tmp_path: Path, dtype: torch.dtype) -> None:
    model = vit(torch.float32, depth=1)
    (path,), checks = export(Predictor(model), noise(model, 5), ["aoti"], tmp_path, dtype=dtype)
    assert path.name == "model.aoti.pt2"
    assert checks[1].agreeing == 5
    assert open_graph(path).about["outputs"] == ["logits", "features"]


def test_weights_that_one_onnx_file_cannot_hold_are_written_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_PROTOBUF_BYTES", 0)
    model = vit(torch.float32, depth=1)
    written, checks = export(Predictor(model), noise(model, 2), ["onnx"], tmp_path)
    assert [path.name for path in written] == ["model.onnx.data", "model.onnx"]
    assert checks[1].agreeing == 2


def test_the_command_prints_checks_and_writes_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plainvit.save(vit(torch.float32, depth=1), tmp_path / "model.safetensors")
    plant(tmp_path / "photos", {f"{at}.jpg": encode(photo(40, 50, at), "JPEG") for at in range(4)})
    main(["export", "model.safetensors", "--data", "photos", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == ["exports/model/model.onnx"]
    assert [check["agreeing"] for check in found["checks"]] == [4, 4]
    main(["export", "model.safetensors", "--out", "compared-on-noise"])
    assert Path("compared-on-noise/model.onnx").is_file()
    assert "fp32" in capsys.readouterr().out
    main(["export", "model.safetensors", "--no-verify", "--input", "float", "--out", "unchecked"])
    assert "fp32" not in capsys.readouterr().out
    assert open_graph(Path("unchecked/model.onnx")).about["input"] == "floats in [0, 1]"
    for flags in (["--int8"], ["--data", "nothing/"], ["--data", "photos", "--images", "1"]):
        with pytest.raises(SystemExit):
            main(["export", "model.safetensors", *flags])


@pytest.mark.slow
def test_bench_measures_every_format_and_the_accuracy(tmp_path: Path) -> None:
    model = vit(torch.float32, classes=10)
    plainvit.save(model, tmp_path / "model.safetensors")
    predictor = Predictor(tmp_path / "model.safetensors", device="cpu")
    photos = load_photos(predictor, "digits", None, 40)
    assert photos is not None
    held = b"x" * 2**30  # of this process, not of those that are measured
    rows = measure(predictor, ["torch", "onnx", "onnx int8"], [1, 4], photos, 0.1)
    assert [(row.format, row.batch) for row in rows] == [(f, b) for f in ("torch", "onnx", "onnx int8") for b in (1, 4)]
    assert all(0 < row.p50_ms <= row.p99_ms and 50 < row.memory_mb < len(held) / 1e6 for row in rows)
    right = predictor.logits(photos.images).argmax(1).numpy()[:, None] == photos.targets
    assert rows[0].top1 == rows[2].top1 == right.any(1).mean()


def test_bench_without_photos_measures_speed_but_not_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plainvit.save(vit(torch.float32, depth=1), tmp_path / "model.safetensors")
    command = ["bench", "model.safetensors", "--format", "torch", "--batches", "2", "--seconds", "0.01"]
    main([*command, "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["format"], row["batch"], row["top1"]) == ("torch", 2, None)
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    with pytest.raises(SystemExit):
        main([*command, "--format", "onnx", "--int8"])
    assert "--data" in capsys.readouterr().err


IMPORTS = """import socket, sys
asked = []
socket.getaddrinfo = lambda host, *rest, **options: asked.append(host) or []
from plainvit.serve import require
require("export", "onnxruntime", "openvino")
import onnxruntime, openvino
print("openvino_telemetry.main" in sys.modules, asked)"""


def test_runtimes_do_not_report_their_use(tmp_path: Path) -> None:
    """On import ONNX Runtime opens a database of events in the home folder, and openvino asks for Google Analytics."""
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(Path(plainvit.__file__).parents[1])}
    child = subprocess.run([sys.executable, "-c", IMPORTS], env=own, capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stdout.strip()) == (0, "False []"), child.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
