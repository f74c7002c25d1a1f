"""The speed benchmarks run on a CPU, count FLOPs correctly, and skip what is not available."""

import copy
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import agreement, gate, infer, measure, train
from plainvit import create
from plainvit.disk import read_json
from plainvit.models import ViT
from plainvit.models.fast import accelerate
from plainvit.names import SIZES, configure
from plainvit.train.run import fit

TINY = ("--device", "cpu", "--image-size", "32", "--repeats", "2")
STEPS = ("--models", "Ti/16", "--batch", "2", "--steps", "1", "--loss-steps", "3")


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "Ti", {"width": 48, "depth": 2, "heads": 3, "mlp_dim": 96})


def test_every_benchmark_can_be_loaded() -> None:
    for path in sorted(Path(measure.__file__).parent.glob("*.py")):
        assert importlib.import_module(f"bench.{path.stem}").__doc__


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_runs_side_by_side(tmp_path: Path, capsys: Any) -> None:
    train.main([*TINY, *STEPS, "--json", str(tmp_path / "rows.json"), "--kernels"])
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["system"]: row for row in found["rows"]}
    peers = [f"{peer}, {form}" for peer in ("timm", "transformers", "torchvision") for form in ("default", "tuned")]
    assert list(rows) == ["plainvit", *peers]
    for row in rows.values():
        assert row["images_per_second"] == pytest.approx(2 / (row["step_ms"] / 1000))
        assert row["min"] <= row["images_per_second"] <= row["max"]
        assert len(row["rounds"]) == row["repeats"] == 2
        assert row["loss_difference"] < 1e-5, "the same weights on the same images"
        assert row["losses"][0] == pytest.approx(math.log(1000), rel=1e-4), "a head of zeros"
        assert (row["mfu"] == row["hfu"]) == (row["system"] != "plainvit")
    assert max(rows["plainvit"]["losses"]) - min(rows["plainvit"]["losses"]) > 1e-3, "the weights moved"
    best = max((row for row in rows.values() if "tuned" in row["system"]), key=lambda row: row["images_per_second"])
    assert best["is_best_peer"]
    assert best["ratio"] == 1
    plain = rows["plainvit"]
    assert plain["ratio"] == pytest.approx(plain["images_per_second"] / best["images_per_second"])
    matmul = plain["matmul"]
    assert all(0.1 < row["matmul"] / found["peak_rates"]["matmul"] < 10 for row in rows.values()), "both in TFLOP/s"
    step = 2 * 3 * _macs_by_hand(48, 2, 96, 5)
    assert plain["mfu"] == pytest.approx(100 * plain["images_per_second"] * step / (matmul * 1e12), rel=1e-6)
    executed = step * plain["hfu"] / plain["mfu"]
    assert executed == pytest.approx(3 * _flops_by_torch(), rel=1e-6)
    assert found["command"].startswith("python -m bench.train --device cpu")
    assert str(tmp_path) not in found["command"]
    assert {"torch", "timm", "transformers", "triton", "commit", "processor"} <= found["machine"].keys()
    assert "no GPU" in capsys.readouterr().err


def _flops_by_torch() -> int:
    """FLOPs that PyTorch counts in a forward pass of one image."""
    model = create("ViT-Ti/16", image_size=32, device="cpu")
    assert isinstance(model, ViT)
    with FlopCounterMode(display=False) as counter:
        accelerate(model)(torch.rand(1, 3, 32, 32))
    return counter.get_total_flops()


def _macs_by_hand(width: int, depth: int, mlp: int, tokens: int) -> int:
    """Of a ViT with 16 x 16 patches and 1000 classes: linear layers and the two matmuls of attention."""
    block = tokens * (4 * width**2 + 2 * width * mlp) + 2 * tokens**2 * width
    return (tokens - 1) * 768 * width + depth * block + 1000 * width


@pytest.mark.slow
def test_a_missing_peer_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    train.main([*TINY, *STEPS, "--systems", "plainvit;timm", "--json", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [row["system"] for row in found["rows"]] == ["plainvit"]
    assert found["rows"][0]["ratio"] is None
    line = "ViT-Ti/16, timm, tuned: timm is not installed: pip install timm"
    assert line in found["skipped"]
    assert f"skipped: {line}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("losses", "is_finite", "is_valid"),
    [([7.0, 6.0], True, True), ([7.0, 6.009], True, False), ([7.0, math.nan], True, False), ([7.0, 6.0], False, False)],
)
def test_losses_are_compared_with_those_of_plainvit(losses: list[float], is_finite: bool, is_valid: bool) -> None:
    baseline = train.System("plainvit", None, 3e9, 1.0, [7.0, 6.0], None)
    peer = train.System("timm, tuned", None, 3e9, 1.0, losses, None, is_finite=is_finite)
    assert train.compare_losses(peer, baseline, train.Options("cpu"))["is_valid"] == is_valid


def test_invalid_arguments_are_one_line(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--systems", "tim"])
    assert ended.value.code == 2
    assert "'tim' is unknown" in capsys.readouterr().err.splitlines()[-1]


# Arithmetic -----------------------------------------------------------------------------------------------------------


def test_utilization_is_relative_to_the_matmul_rate() -> None:
    assert measure.compute_utilization(1000, 2e9, 4) == pytest.approx(50)  # 2 TFLOP/s of 4
    published = {"ViT-S/16": 4.61, "ViT-B/16": 17.58, "ViT-L/16": 61.60, "ViT-H/14": 167.40}  # timm's GMACs
    for name, gmacs in published.items():
        assert measure.count_training_flops(configure(name)) == pytest.approx(6e9 * gmacs, rel=0.005)


def test_kernels_are_classified_by_their_names() -> None:
    kinds = {
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT": "gemm",
        "triton_tem_fused_addmm_3": "gemm",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "gemm",
        "triton_poi_fused__scaled_dot_product_flash_attention_view_5": "pointwise",
        "triton_red_fused_addmm_native_layer_norm_2": "pointwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "pointwise",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": "attention",
        "attention_backward_keys": "attention",
        "attention_forward_online": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "void at::native::reduce_kernel<128, 4, sum_functor<float>::operator()::{lambda(float, float)#1}>": "pointwise",
        "Memcpy DtoD (Device -> Device)": "other",
    }
    assert {name: measure.classify_kernel(name) for name in kinds} == kinds


# The gate -------------------------------------------------------------------------------------------------------------


ROW = {"system": "timm, tuned", "loss_difference": 1e-4, "is_valid": True}


@pytest.mark.parametrize(
    ("ratio", "changes", "device", "code"),
    [
        (1.25, {}, "H200", 0),
        (1.19, {}, "H200", 0),  # 4.8 % below
        (1.40, {}, "H200", 0),
        (1.18, {}, "H200", 1),  # 5.6 % below
        (1.18, {}, "A100", 0),  # nothing to compare with
        (1.25, {"is_valid": False}, "H200", 1),
        (1.25, {"system": "timm, default"}, "H200", 1),
    ],
)
def test_gate_fails_below_the_tolerance_and_without_a_ratio(
    ratio: float, changes: dict[str, Any], device: str, code: int
) -> None:
    rows = [ROW | {"relative_to_plainvit": 1 / ratio} | changes]
    found, line = gate.check_results({"rows": rows, "skipped": []}, device, {"H200": {"ratio": 1.25}})
    assert found == code
    assert "\n" not in line


@pytest.mark.slow
def test_gate_exits_with_1_and_writes_the_ratio(tmp_path: Path, capsys: Any) -> None:
    device = gate.name_device(gate.Options("cpu"))
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({device: {"ratio": 1000.0}, "other": {"ratio": 1.0}}))
    with pytest.raises(SystemExit) as ended:
        gate.main([*TINY, *STEPS, "--figures", str(figures), "--add"])
    assert ended.value.code == 1
    assert "the committed 1000.000" in capsys.readouterr().err.splitlines()[-1]
    found = json.loads(figures.read_text())
    assert 0.01 < found[device]["ratio"] < 100
    assert found["other"] == {"ratio": 1.0}


# Inference ------------------------------------------------------------------------------------------------------------


def test_inference_runs_side_by_side(tmp_path: Path) -> None:
    words = ["--model", "Ti/16", "--batches", "2,1", "--seconds", "0.01", "--json", str(tmp_path / "rows.json")]
    infer.main([*TINY, *words, "--compile", "off"])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["library"], row["batch"]) for row in found["rows"]] == [
        (library, batch) for batch in (2, 1) for library in ("plainvit", "timm", "transformers", "torchvision")
    ]
    for row in found["rows"]:
        assert row["error"] < 1e-5, "the same weights give the same logits"
        assert row["images_per_second"] == pytest.approx(1000 * row["batch"] / row["ms"])
        assert (row["x_timm"] == 1) == (row["system"] == "timm, eager")
    assert sum(row["is_best_peer"] for row in found["rows"]) == 2
    assert any("no GPU" in line for line in found["skipped"])
    assert any("compile" in line for line in found["skipped"])


def test_agreement_is_counted_on_test_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the classes of one precision rolled by one, no prediction agrees."""
    small_runs.without_figures(monkeypatch)
    fit(small_runs.config(steps=4), tmp_path / "run", quiet=True)

    def cast_model(model: Any, choice: Any) -> Any:
        if choice == agreement.PLAIN:
            return model
        rolled = copy.deepcopy(model)
        rolled.head.weight.data, rolled.head.bias.data = model.head.weight.roll(1, 0), model.head.bias.roll(1, 0)
        return rolled

    monkeypatch.setattr(agreement, "cast_model", cast_model)
    monkeypatch.setattr(agreement, "select_choices", lambda *_: [agreement.PLAIN, agreement.Choice("bf16", "eager")])
    out = tmp_path / "found.json"
    agreement.main([str(tmp_path / "run"), "--data", "digits", "--device", "cpu", "--json", str(out)])
    found = json.loads(out.read_text())
    plain, rolled = found["rows"]
    assert found["images"] > 300
    assert plain["top1"] == pytest.approx(read_json(tmp_path / "run" / "results.json")["test"]["top1"])
    assert (plain["agreement"], rolled["agreement"]) == (1, 0)
