"""What computes a served model: the fastest backend that agrees with PyTorch in fp32, and the answers it gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from servers import as_files, photos, serving
from tiny import vit

import plainvit
from plainvit.evaluate.predictor import Predictor
from plainvit.serve import backends
from plainvit.serve.backends import choose_backend

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters' own deprecations


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predictor]:
    """Its exports are written once and opened by all tests."""
    folder = tmp_path_factory.mktemp("model")
    plainvit.save(vit(torch.float32), folder / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(backends, "SECONDS", 0.01)
        yield Predictor(folder / "model.safetensors", device="cpu")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_fastest_of_the_installed_backends_is_chosen(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(backends, "cpu_computes_bf16", lambda: has_bf16)
    name, backend, speeds = choose_backend(predictor)
    kinds = {"torch fp32", "onnx fp32", "openvino fp32"} | ({"torch bf16", "openvino bf16"} if has_bf16 else set())
    assert set(speeds) == kinds
    assert speeds[name] == max(speeds.values())
    assert backends.measure_difference(backend, predictor) < (0.05 if "bf16" in name else 1e-5)


def test_precision_fp32_turns_bf16_off(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "cpu_computes_bf16", lambda: True)
    assert choose_backend(predictor, "openvino", "fp32")[0] == "openvino fp32"
    assert choose_backend(predictor, "torch", "fp32")[1] is predictor


def test_a_backend_that_disagrees_is_not_used(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "cpu_computes_bf16", lambda: True)
    monkeypatch.setattr(backends, "measure_difference", lambda *_: 0.06)
    assert choose_backend(predictor, "openvino")[0] == "openvino fp32"
    for name in ("openvino", "onnx"):
        with pytest.raises(ValueError, match="bf16"):
            choose_backend(predictor, name, "bf16")


def test_the_same_weights_with_another_activation_are_exported_again(predictor: Predictor) -> None:
    choose_backend(predictor, "onnx", "fp32")
    other = vit(torch.float32, activation="relu")
    other.load_state_dict(predictor.model.state_dict())
    changed = Predictor(other, device="cpu")
    assert backends.measure_difference(choose_backend(changed, "onnx", "fp32")[1], changed) < 1e-5


@pytest.mark.parametrize("kind", [("onnx", "fp32"), ("openvino", "fp32"), ("openvino", "bf16")])
def test_answers_equal_the_same_backend_offline(predictor: Predictor, kind: Any) -> None:
    _, backend, _ = choose_backend(predictor, *kind)
    some = photos(6)
    expected = backend.logits(predictor.stack(some)).softmax(-1).topk(5).values
    with serving(predictor, backend=backend) as running:
        results = running.post(files=as_files(some)).json()["results"]
    found = [[one["probability"] for one in result["predictions"]] for result in results]
    assert found == expected.tolist()
