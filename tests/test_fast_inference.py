"""Models for inference only: equal results, the fastest choice measured, the plain model where others fail."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import plainvit
from plainvit import Predictor
from plainvit.device import CpuSpeed
from plainvit.models.fast import inference
from plainvit.models.fast.inference import PLAIN, Choice, InferenceModel, compile_call, measure

CPU = torch.device("cpu")
PACKED = ("mkldnn::_linear_pointwise", "mkl::_mkl_linear")  # products with a matrix that was packed beforehand


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""

    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", refuse)


@pytest.mark.parametrize("kind", ["class token", "average", "ResNet"])
@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_plain_model_runs(kind: str) -> None:
    pool = {"pool": "average"} if kind == "average" else {}
    model: Any = tiny.bit(torch.float32) if kind == "ResNet" else tiny.vit(torch.float32, **pool)
    model.config = model.config.replace(image_size=(24, 40))  # on which choices are measured
    images = tiny.images(dtype=torch.float32)
    with torch.no_grad():
        logits, features = model(images), model.features(images)
    fast = InferenceModel(model)
    torch.testing.assert_close(fast(images), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.features(images), features, rtol=1e-5, atol=1e-5)
    assert fast.choices == {len(images): PLAIN}
    assert fast.agreement(images) == 1
    assert not fast(images).requires_grad


def test_fastest_accurate_choice_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three planted ways: one is quick and wrong, one quick and right."""
    wrong, right = Choice("bf16", "graphs"), Choice("fp32", "compiled")
    monkeypatch.setattr(inference, "list_choices", lambda _: (PLAIN, wrong, right))
    order = {PLAIN: 3.0, wrong: 1.0, right: 2.0}
    seen: list[Choice] = []

    def planted(model: Any, way: Choice, what: str) -> Any:
        call = compile_call(model, PLAIN, what)
        return (lambda images: call(images) + 1) if way is wrong else call

    def timed(calls: dict[Choice, Any], images: Any) -> dict[Choice, list[float]]:  # noqa: ARG001
        seen.extend(calls)
        return {way: [order[way]] for way in calls}

    monkeypatch.setattr(inference, "compile_call", planted)
    monkeypatch.setattr(inference, "time_choices", timed)
    assert measure(tiny.vit().config, 2, CPU) == right
    assert seen == [PLAIN, right]


def test_choices_are_measured_outside_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise fp32 would be timed, and compared, in bf16."""
    seen: list[bool] = []
    monkeypatch.setattr(inference, "measure", lambda *_: seen.append(torch.is_autocast_enabled("cpu")) or PLAIN)
    with torch.autocast("cpu", torch.bfloat16):
        InferenceModel(tiny.vit(torch.float32))(tiny.images(dtype=torch.float32))
    assert seen == [False]


def test_inference_model_cannot_be_trained() -> None:
    fast = InferenceModel(tiny.vit(torch.float32))
    with pytest.raises(ValueError, match="optimize=True"):
        fast.train()
    assert not fast.eval().training


@pytest.mark.parametrize(("supported", "refused"), [(True, False), (True, True), (False, False), (False, True)])
def test_bf16_is_tried_only_on_cpus_where_it_is_faster(
    supported: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference.device, "measure_cpu", lambda: CpuSpeed(2.0, 1.0 if supported else 5.0))
    monkeypatch.setattr(inference.device, "is_cpu_bf16_unsafe", lambda: refused)
    tried = any(way.precision == "bf16" for way in inference.list_choices(CPU))
    assert tried == (supported and not refused)


def test_moving_the_model_measures_again() -> None:
    model = InferenceModel(tiny.vit(torch.float32))
    model.choices = {"forward": PLAIN}  # pyright: ignore[reportAttributeAccessIssue]
    assert {weight.dtype for weight in model.double().parameters()} == {torch.float64}
    assert model.choices == {}


@pytest.mark.usefixtures("no_compiler")
def test_load_and_predictor_return_it(tmp_path: Path) -> None:
    model = tiny.vit(torch.float32)
    plainvit.save(model, tmp_path / "m.safetensors")
    fast = plainvit.load(tmp_path / "m.safetensors", optimize=True)
    images = tiny.images(dtype=torch.float32)
    ours, plain = Predictor(fast, device="cpu").logits(images), Predictor(model, device="cpu").logits(images)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_every_choice_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for real, each against fp32; then the one that is chosen."""
    model = tiny.vit(torch.float32, width=64)
    images = tiny.images(dtype=torch.float32)
    with torch.no_grad():
        logits, features = model(images), model.features(images)
    for way in inference.list_choices(CPU):
        monkeypatch.setattr(inference, "measure", lambda *_, way=way: way)
        fast = InferenceModel(tiny.vit(torch.float32, width=64))
        near = 0.05 if way.precision == "bf16" else 1e-4
        assert (fast(images) - logits).abs().max() <= near * logits.std()
        assert (fast.features(images) - features).abs().max() <= near * features.std()
        with torch.profiler.profile() as seen:
            assert fast(images).dtype is torch.float32
        packed = [event.key for event in seen.key_averages() if event.key in PACKED]
        assert bool(packed) == (way.code == "compiled"), f"{way}: weights as constants are packed for their products"
    monkeypatch.undo()
    assert measure(model.config, 2, CPU) in inference.list_choices(CPU)
