"""`plainvit plan` compared with PyTorch's optimizers and saved tensors, steps measured on an H200, and Table 6."""

import contextlib
import dataclasses
import io
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_runs
import tiny
import torch
from rich.console import Console
from test_cost import TABLE_6
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from plainvit import cli, hub
from plainvit.config import Augment, Config, Model, Optim, ViTConfig, from_json
from plainvit.data.splits import open_splits
from plainvit.disk import read_json
from plainvit.models import ResNet, ViT, build
from plainvit.names import configure, list_models
from plainvit.planning import cost, step_time
from plainvit.planning.devices import DEVICES, H200
from plainvit.planning.memory import GIB, Step, count_trained, largest_micro_batch, memory, saved_bytes
from plainvit.planning.plan import choose_micro_batch, plan, resolve_model, table
from plainvit.planning.shapes import parse_name
from plainvit.planning.step_time import MEASURED, executed_macs, exposed_communication, matmul_rate, step_seconds
from plainvit.recipes import about, recipe
from plainvit.recipes.paper import PRETRAINING
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.train import guards
from plainvit.train.masked import PredictPatches
from plainvit.train.measure import measure_steps
from plainvit.train.objectives import Classify
from plainvit.train.optim import Optimizers, add_lora, freeze
from plainvit.train.run import fit
from plainvit.train.transfer import resolve
from plainvit.weights.published import PUBLISHED

ROOT = Path(__file__).parent.parent
SMALL = ViTConfig(width=64, depth=2, heads=4, mlp_dim=192, patch=(8, 8), image_size=(32, 24), classes=10)


@pytest.mark.parametrize("name", [name for name, row in PRETRAINING.items() if row.data == "jft"])
def test_exaflops_match_table_6(name: str) -> None:
    row = PRETRAINING[name]
    found = plan(recipe(name), images=303_000_000)["run"]
    expected = TABLE_6[row.model, row.epochs]
    assert found["exaflops"] == pytest.approx(expected, rel=0.05 if row.model.startswith("BiT") else 0.03)
    assert found["epochs"] == pytest.approx(row.epochs, rel=1e-3)


# Memory ---------------------------------------------------------------------------------------------------------------


def take_step(model: ViT | ResNet, optim: Optim) -> Optimizers:
    optimizers = Optimizers(model, model.named_parameters(), optim)
    for parameter in optimizers.parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizers.set_rate(1e-3)
    optimizers.step()
    return optimizers


def state_bytes(optimizers: Optimizers) -> int:
    return sum(tensor.nbytes for tensor in optimizers.state().values() if tensor.ndim)  # without counters


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_weights_gradients_and_optimizer_state_match_pytorch(name: Any) -> None:
    model, optim = build(SMALL), Optim(name=name)
    optimizers = take_step(model, optim)
    found = memory(Step(model=SMALL, images=1, optim=optim))
    assert found["optimizer state"] == state_bytes(optimizers)
    assert found["weights"] == sum(p.nbytes for p in model.parameters())
    assert found["bf16 weights"] == sum(p.bfloat16().nbytes for p in model.parameters())
    assert found["gradients"] == sum(p.grad.nbytes for p in optimizers.parameters if p.grad is not None)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_weights_have_no_gradient_and_no_state(name: Any) -> None:
    model, optim = build(SMALL), Optim(name=name, frozen=("blocks.0.*", "embedding.*"))
    freeze(model, optim.frozen)
    optimizers = take_step(model, optim)
    found = memory(Step(model=SMALL, images=1, optim=optim))
    assert found["gradients"] == sum(p.nbytes for p in optimizers.parameters)
    assert found["optimizer state"] == state_bytes(optimizers)


LORA: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two heads": ({"distillation": True}, ()),
    "hidden layer": ({"representation": 20}, ()),
    "no head": ({"classes": 0}, ()),
    "frozen block": ({}, ("blocks.0.*",)),
    "frozen head": ({}, ("head*",)),
}


@pytest.mark.parametrize(("settings", "frozen"), LORA.values(), ids=LORA)
def test_lora_counts_match_the_trained_model(settings: dict[str, Any], frozen: tuple[str, ...]) -> None:
    config, optim = SMALL.replace(**settings), Optim(name="muon", lora=3, frozen=frozen)
    model = build(config)
    assert isinstance(model, ViT)
    add_lora(model, optim.lora, 0)
    freeze(model, frozen)
    left = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    matrices = sum(count for name, count in left.items() if name.startswith("blocks."))
    assert count_trained(config, optim) == (sum(left.values()), matrices)


def count_saved(config: Model, images: int, bf16: bool) -> int:
    """Bytes that PyTorch saves for the backward pass, each storage once, without the weights and their casts."""
    model = tiny.filled(config, torch.float32).train()
    objective = Classify(model, Config(model=config))
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    pixels = torch.randint(0, 256, (images, 3, *config.image_size), dtype=torch.uint8)
    targets = torch.rand(images, config.classes)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", enabled=bf16):
        objective(pixels, targets, torch.zeros(images, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def count_saved_per_image(config: Model, bf16: bool = False) -> float:
    return (count_saved(config, 5, bf16) - count_saved(config, 2, bf16)) / 3


EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"pool": "average", "class_token": False, "depth": 1},
    "LayerScale": {"layer_scale": 0.1},
    "registers": {"registers": 3},
    "relu": {"activation": "relu"},
    "hidden layer": {"representation": 24},
    "axial": {"axial": True, "class_token": False, "pool": "average"},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", EXACT.values(), ids=EXACT)
def test_activations_match_saved_tensors(changes: dict[str, Any], bf16: bool) -> None:
    """Not compiled: a block to the byte, the whole model up to a few tensors of the head."""
    config, element_bytes = SMALL.replace(**changes), 2 if bf16 else 4
    deeper = config.replace(depth=config.depth + 1)
    planned, planned_deeper = (
        saved_bytes(Step(model=one, images=1, element_bytes=element_bytes)) for one in (config, deeper)
    )
    real = count_saved_per_image(config, bf16)
    assert planned_deeper - planned == count_saved_per_image(deeper, bf16) - real
    assert planned == pytest.approx(real, rel=0.05)


def test_dropout_masks_match_saved_tensors() -> None:
    """A CPU saves masks as fp32, a GPU as bytes."""
    plain, dropped = SMALL, SMALL.replace(dropout=0.1)
    planned = [saved_bytes(Step(model=config, images=1, element_bytes=4)) for config in (plain, dropped)]
    assert 4 * (planned[1] - planned[0]) == count_saved_per_image(dropped) - count_saved_per_image(plain)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (SMALL.replace(posemb="relative"), 0.1),
        (SMALL.replace(pool="attention"), 0.05),
        (SMALL.replace(norm="post"), 0.05),
        (tiny.bit(blocks=(3, 4)).config.replace(image_size=(96, 96)), 0.25),
        (tiny.hybrid().config, 0.15),
    ],
    ids=["relative", "attention pool", "post-norm", "ResNet", "hybrid"],
)
def test_activations_of_other_models_are_close(config: Model, tolerance: float) -> None:
    assert saved_bytes(Step(model=config, images=1, element_bytes=4)) == pytest.approx(
        count_saved_per_image(config), rel=tolerance
    )


def test_recomputed_blocks_save_only_their_input() -> None:
    step = Step(model=SMALL, images=1)
    block = saved_bytes(Step(model=SMALL.replace(depth=3), images=1)) - saved_bytes(step)
    saving = saved_bytes(step) - saved_bytes(dataclasses.replace(step, recompute=True))
    assert saving == SMALL.depth * (block - 4 * SMALL.tokens * SMALL.width)


FAST: dict[str, Any] = {"fast_path": True, "residual_bytes": 2}
STEPS = [  # one H200, torch 2.11, bf16, compiled, AdamW, 224 px (docs/results.md): model, batch, options, images/s, GiB
    ("ViT-Ti/16", 1024, FAST, 28_857, 11.12),
    ("ViT-S/16", 1024, FAST, 12_593, 21.85),
    ("ViT-B/16", 256, FAST, 4_304, 11.83),
    ("ViT-L/16", 256, FAST, 1_400, 32.06),
    ("ViT-H/14", 128, FAST, 486, 38.77),
    ("ViT-L/16", 256, FAST | {"fp8": True}, 1_529, 31.15),
    ("ViT-H/14", 128, FAST | {"fp8": True}, 534, 37.24),
    ("ViT-B/16", 256, {}, 3_434, 17.3),
    ("ViT-B/16", 128, {}, 3_164, 9.2),
    ("ViT-L/16", 256, {}, 1_162, 46.3),
    ("ViT-L/16", 64, {}, 1_011, 14.6),
    ("ViT-H/14", 128, {}, 418, 54.1),
    ("ViT-H/14", 32, {}, 359, 19.8),
]


@pytest.mark.parametrize(("name", "batch", "options", "rate", "gib"), STEPS)
def test_plans_match_measured_steps(name: str, batch: int, options: dict[str, Any], rate: float, gib: float) -> None:
    model = configure(name)
    step = Step(model=model, images=batch, graphs=bool(options) and cost.is_small(model, batch), **options)
    assert memory(step)["total"] / GIB == pytest.approx(gib, rel=0.05)
    assert batch / sum(step_seconds(step, H200).values()) == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize("row", MEASURED[1:-1], ids=lambda row: row[0])
def test_a_measured_model_is_predicted_from_the_others(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one out: what a width between the measured ones can expect."""
    name, batch, rate = row
    others = [one for one in step_time._measured_rates() if one[0] != configure(name).width]
    monkeypatch.setattr(step_time, "_measured_rates", lambda: others)
    step = Step(model=configure(name), images=batch, graphs=True, **FAST)
    assert batch / sum(step_seconds(step, H200).values()) == pytest.approx(rate, rel=0.08)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_largest_micro_batch_just_fits(recompute: bool) -> None:
    step = Step(model=configure("ViT-L/16"), images=20_000, recompute=recompute)
    largest = largest_micro_batch(step, H200)
    assert memory(dataclasses.replace(step, micro_batch=largest))["total"] <= H200.usable_bytes
    assert memory(dataclasses.replace(step, micro_batch=largest + 1))["total"] > H200.usable_bytes


@pytest.mark.parametrize("largest", [1, 11, 12, 24, 49, 99])
def test_the_micro_batch_is_the_one_that_training_chooses(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run(SimpleNamespace):
        def objective(self, images: Tensor) -> tuple[Tensor, None]:
            if len(images) > largest:
                raise torch.OutOfMemoryError("out of memory")
            return torch.ones((), requires_grad=True), None

    run = Run(cast=contextlib.nullcontext, optimizers=SimpleNamespace(zero=lambda: None))
    found = guards.largest_micro_batch(run, (torch.zeros(100, 1),), 100)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("plainvit.planning.plan.largest_micro_batch", lambda *_: largest)
    tiny_device = dataclasses.replace(H200, memory=1e-9)  # the full batch never fits
    assert choose_micro_batch(Step(model=SMALL, images=100), tiny_device) == found


def test_a_step_that_does_not_fit_has_no_time() -> None:
    giant = Config(model=configure("ViT-G/14", image_size=2800), batch=2, steps=1)
    mode = plan(giant, on="h100")["modes"]["single"]
    assert (mode["micro_batch"], mode["fits"], mode["largest_micro_batch"]) == (1, False, 0)
    assert "seconds" not in mode


def test_fsdp_holds_a_shard_of_what_ddp_holds() -> None:
    modes = plan(recipe("vit-h14-jft"), on="h200", devices=64)["modes"]
    for name in ("weights", "gradients", "optimizer state"):
        assert modes["fsdp"]["memory"][name] == pytest.approx(modes["ddp"]["memory"][name] / 64, abs=1)
    assert modes["fsdp"]["memory"]["total"] < modes["ddp"]["memory"]["total"]


def test_gathered_blocks_are_those_of_the_built_model() -> None:
    with torch.device("meta"):
        model = build(SMALL)
    assert isinstance(model, ViT)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    others = sum(p.numel() for p in model.parameters()) - SMALL.depth * block
    found = memory(Step(model=SMALL, images=1, parallel="fsdp", devices=2))["gathered blocks"]
    assert found == 4 * (2 * block + others) + 8 * block


def test_mixed_images_are_floats_and_averages_are_weights() -> None:
    plain = plan(Config(model=SMALL, steps=1))["modes"]["single"]["memory"]
    rich = plan(Config(model=SMALL, steps=1, augment=Augment(mixup=0.1), ema=0.99))["modes"]["single"]["memory"]
    assert rich["images"] == 4 * plain["images"]
    assert rich["averaged weights"] == rich["weights"]


def test_checkpoint_bytes_match_a_saved_checkpoint(tmp_path: Path) -> None:
    fit(small_runs.config(steps=1, evaluations=1, recipe="mine"), tmp_path, quiet=True, bare=True)
    config = from_json(read_json(tmp_path / "config.json"), ("run",))
    assert isinstance(config, Config)
    tensors, _ = Checkpoints(tmp_path / "checkpoints", 1).read(1)
    real = sum(tensor.nbytes for tensor in tensors.values())
    assert plan(config)["checkpoint_bytes"] == pytest.approx(real, rel=0.02)
    assert plan(config.replace(ema=0.0))["checkpoint_bytes"] == pytest.approx(0.75 * real, rel=0.02)


# Time -----------------------------------------------------------------------------------------------------------------


def images_per_second(step: Step) -> float:
    return step.images * step.devices / sum(step_seconds(step, H200).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": True},
        {"eager": True},
        {"element_bytes": 4},
        {"micro_batch": 2},
        {"optim": Optim(name="muon")},
        {"model": configure("ViT-B/16", image_size=384)},
        {"model": configure("R50x1+ViT-B/16")},
    ],
    ids=str,
)
def test_more_work_takes_longer(changes: dict[str, Any]) -> None:
    step = Step(model=configure("ViT-B/16"), images=256)
    assert images_per_second(dataclasses.replace(step, **changes)) < images_per_second(step)


@pytest.mark.parametrize("name", list_models())
def test_executed_macs_are_all_macs_without_the_fast_path(name: str) -> None:
    model = configure(name)
    assert sum(executed_macs(Step(model=model, images=1))) == pytest.approx(cost.macs(model))
    fast = sum(executed_macs(Step(model=model, images=1, fast_path=True)))
    reads_one_token = isinstance(model, ViTConfig) and model.reads_one_token
    assert (fast < cost.macs(model)) == reads_one_token
    assert all(seconds >= 0 for seconds in step_seconds(Step(model=model, images=64), H200).values())


def test_self_supervision_computes_the_last_block_for_all_tokens() -> None:
    """PyTorch's count of the forward pass, without the layer that predicts the patches."""
    config = Config(model=SMALL, objective="masked", data="digits", steps=1)
    model = build(SMALL.replace(classes=0))
    assert isinstance(model, ViT)
    net, index = PredictPatches(model, config), torch.arange(1)
    with FlopCounterMode(display=False) as counted:
        net(torch.zeros(1, 3, *SMALL.image_size, dtype=torch.uint8), *net.hide(0, torch.zeros_like(index), index))
    predictions = 2 * net.hidden * SMALL.width * 512
    planned = 2 * sum(executed_macs(Step(model=resolve_model(config), images=1, fast_path=True)))
    assert planned == counted.get_total_flops() - predictions


def test_the_rate_grows_with_the_width_below_the_largest_models() -> None:
    rates = [matmul_rate(width) for width in (64, 192, 256, 384, 768, 1024)]
    assert rates == sorted(rates)
    assert matmul_rate(96) == pytest.approx(matmul_rate(192) / 2)
    assert matmul_rate(1664) == matmul_rate(1280)


def test_a_small_step_waits_for_the_host() -> None:
    parts = step_seconds(Step(model=configure("ViT-Ti/16"), images=1), H200)
    assert max(parts, key=lambda name: parts[name]) == "host"


@pytest.mark.parametrize(("parallel", "copies"), [("ddp", 2), ("fsdp", 3)])
def test_communication_is_bytes_over_bandwidth_less_computation(parallel: Any, copies: int) -> None:
    step = Step(model=configure("ViT-B/16"), images=64, parallel=parallel, devices=8)
    sent = copies * 4 * cost.parameters(step.model) * 7 / 8
    assert exposed_communication(step, H200, computation=0.0) == pytest.approx(sent / (0.75 * 450e9))
    assert exposed_communication(step, H200, computation=1.0) == 0.0
    assert H200.collective_bandwidth(8) > H200.collective_bandwidth(16)


def test_accumulated_gradients_are_exchanged_once() -> None:
    step = Step(model=configure("ViT-B/16"), images=64, micro_batch=16, parallel="ddp", devices=8)
    at_once = dataclasses.replace(step, micro_batch=64)
    assert exposed_communication(step, H200, 0.0) == exposed_communication(at_once, H200, 0.0)


def test_other_devices_are_scaled_and_say_so() -> None:
    assert [name for name, device in DEVICES.items() if "not measured" not in device.origin] == ["h200"]
    assert H200.slowdown == 1
    assert 1 < DEVICES["h100"].slowdown < DEVICES["a100-80"].slowdown < 989 / 312
    assert plan(recipe("cifar10"), on="a100")["on"] == "a100-80"


def test_measured_steps_replace_the_estimate() -> None:
    config, measured = measure_steps(small_runs.config(steps=40, recipe="mine"))
    report = plan(config, images=measured["images"], measured=measured)
    mode = report["modes"]["single"]
    assert mode["step_seconds"] == measured["seconds"] > 0
    assert mode["hours"] == pytest.approx(40 * measured["seconds"] / 3600)
    assert report["on"] == ("cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert report["notes"] == []


def test_measuring_is_only_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--on", "h200"], ["--devices", "2"], ["--images", "10"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["plan", "digits", "--measure", *flags])
        assert stopped.value.code == 2
    assert "--measure" in capsys.readouterr().err


# The report -----------------------------------------------------------------------------------------------------------


def render(report: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_the_documented_plan_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    command = "$ plainvit plan vit-h14-jft --images 303000000 --on h200 --devices 64\n"
    report = plan(recipe("vit-h14-jft"), images=303_000_000, on="h200", devices=64)
    assert f"{command}{render(report, 120)}\n```" in page


def plan_json(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    cli.main(["plan", *words.split(), "--json"])
    return json.loads(capsys.readouterr().out)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("vit-h14-jft", {"images": 303_000_000, "on": "h200", "devices": 64}),
    ("vit-h14-jft", {"on": "h200", "devices": 1024}),
    ("vit-l16-i21k", {"on": "a100-80"}),
    ("r152x2-jft", {"on": "h100", "devices": 8}),
    ("cifar10", {}),
    ("digits", {"devices": 2}),
]


@pytest.mark.parametrize(("name", "options"), PLANS)
def test_reports_are_json_and_fit_80_columns(name: str, options: dict[str, Any]) -> None:
    report = plan(recipe(name), **options)
    assert json.loads(json.dumps(report)) == report
    text = render(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert f"{report['parameters']:,}" in text
    for mode in report["modes"].values():
        assert f"{mode['micro_batch']:,}" in text
        if "seconds" in mode:
            assert mode["step_seconds"] == pytest.approx(sum(mode["seconds"].values()))
            assert f"{1000 * mode['step_seconds']:,.1f} ms" in text


def test_known_datasets_set_the_length() -> None:
    run = plan(recipe("vit-b16-i1k"))["run"]
    assert run["images"] == 1_281_167 - round(0.01 * 1_281_167)
    assert run["steps"] == int(300 * run["images"] / 4096)
    assert plan(Config(model=SMALL.replace(classes=0), data="vtab/dtd", steps=3))["classes"] == 47
    assert plan(Config(model=SMALL, data="flowers102", holdout=0.5, epochs=2, batch=102))["run"]["steps"] == 20


def test_without_the_number_of_images_a_step_is_planned() -> None:
    report = plan(recipe("vit-h14-jft"), on="h200", devices=64)
    mode = report["modes"]["ddp"]
    assert (report["run"]["exaflops"], mode["hours"]) == (None, None)
    assert mode["images_per_second"] > 0
    assert any("--images" in note for note in report["notes"])


@pytest.mark.parametrize("name", ["masked-cifar10", "mae-cifar10"])
def test_self_supervision_is_planned_without_a_head(name: str) -> None:
    config = recipe(name).replace(data="digits")
    report, trained = plan(config), resolve(config, open_splits(config)).model
    assert trained is not None
    assert (report["classes"], report["parameters"]) == (0, cost.parameters(trained))


@pytest.mark.parametrize("changes", [{"optim": Optim(name="muon")}, {"optim": Optim(lora=2)}, {"objective": "masked"}])
def test_what_fsdp_does_not_support_is_planned_by_ddp(changes: dict[str, Any]) -> None:
    config = Config(model=SMALL, data="digits", batch=16, steps=1, parallel="fsdp", **changes)
    report = plan(config, on="h200", devices=4)
    assert (list(report["modes"]), report["chosen"]) == (["ddp"], "ddp")


NOTES: dict[str, tuple[dict[str, Any], str]] = {
    "no length": ({"steps": 0}, "--epochs"),
    "teacher": ({"teacher": "weights.npz"}, "teacher"),
    "LoRA": ({"optim": Optim(lora=2)}, "upper bound"),
    "MAE": ({"objective": "mae"}, "MAE"),
    "ResNet": ({"model": configure("BiT-R50x1")}, "convolutions"),
}


@pytest.mark.parametrize(("changes", "word"), NOTES.values(), ids=NOTES)
def test_notes_name_what_is_not_planned(changes: dict[str, Any], word: str) -> None:
    config = Config(model=SMALL, data="digits", steps=1)
    assert plan(config, on="h200")["notes"] == []
    (note,) = plan(config.replace(**changes), on="h200")["notes"]
    assert word in note


def test_a_mode_that_fits_is_recommended() -> None:
    config = recipe("vit-h14-jft").replace(batch=8 * 505, micro_batch=505)
    report = plan(config, on="h200", devices=8)
    assert [mode["fits"] for mode in report["modes"].values()] == [False, True]
    assert any("--parallel fsdp" in note for note in report["notes"])


def test_too_few_hours_are_noted_with_the_steps_they_allow() -> None:
    report = plan(recipe("vit-l16-i21k").replace(hours=2.0), on="h200")
    allowed = int(report["run"]["steps"] * 2 / report["modes"]["single"]["hours"])
    assert any("--hours 2" in note and f"{allowed:,}" in note for note in report["notes"])


def test_rare_checkpoints_are_noted_with_an_interval_of_half_an_hour() -> None:
    config, options = recipe("vit-h14-jft"), {"on": "h200", "devices": 64, "images": 303_000_000}
    report = plan(config, **options)
    (every,) = [int(found[1]) for note in report["notes"] if (found := re.search(r"--save-every (\d+)", note))]
    assert every * report["modes"]["ddp"]["step_seconds"] == pytest.approx(1800, rel=0.05)
    saved = plan(config.replace(save_every=every), **options)
    assert not any("--save-every" in note for note in saved["notes"])


@pytest.mark.parametrize(
    ("config", "options", "word"),
    [
        (recipe("cifar10"), {"on": "h20"}, "h200"),
        (recipe("cifar10"), {"on": "cpu"}, "--on"),
        (recipe("ft-cifar10"), {}, "--model"),
        (recipe("ft-cifar10").replace(init="weights.npz"), {}, "--model"),
        (recipe("cifar10"), {"devices": 0}, "--devices"),
        (recipe("vit-b16-i1k"), {"devices": 100}, "--devices 128"),
        (recipe("vit-h14-jft"), {"images": 0}, "--images"),
        (recipe("cifar10"), {"search": True}, "--optim.grid"),
    ],
)
def test_bad_input_raises_one_line_that_names_the_flag(config: Config, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        plan(config, **options)
    assert "\n" not in str(caught.value)


def test_a_plan_loads_no_torch() -> None:
    code = (
        "import sys; from plainvit.recipes import recipe; from plainvit.planning.plan import plan, table;"
        "table(plan(recipe('vit-b16-i1k'), on='h200', devices=8)); print('torch' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.strip() == "False"


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ft-imagenet", "ft-pets"])
def test_fine_tuning_is_planned_at_its_image_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The cost line of the recipe is for 384 pixels; the model's name alone means 224."""
    expected = float(about(name)["cost"].split()[0])
    found = plan_json(f"{name} --model ViT-B/16 --on h200", capsys)
    assert found["run"]["exaflops"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("sides", ["32", "32 32"])
def test_a_named_model_takes_the_image_size_of_either_flag(sides: str, capsys: pytest.CaptureFixture[str]) -> None:
    for size in (f"--image-size {sides.split()[0]}", f"--model.image-size {sides}"):
        for flags in itertools.permutations((size, "--model ViT-Ti/16")):
            found = plan_json(f"digits {' '.join(flags)}", capsys)
            assert found["parameters"] == cost.parameters(configure("ViT-Ti/16", 10, 32))


def test_a_recipe_takes_another_image_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_json("digits --image-size 16 --on h200", capsys)["tokens"] == 64
    config = recipe("digits")
    with pytest.raises(ValueError, match="--image-size 16"):
        resolve(config.replace(image_size=16), open_splits(config))


def test_a_command_of_the_readme_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """With --search: Table 4 has four rates for Pets, of 500 steps each, and one run follows."""
    text = (ROOT / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("plainvit finetune ft-pets"))
    words = " ".join(line.partition("#")[0].replace("WEIGHTS", "vit_b16_orig_i21k_224").split()[2:])
    assert "--search" in words
    searched = plan_json(f"{words} --on h200", capsys)
    one = plan_json(f"{words.replace('--search', '')} --on h200", capsys)
    assert (searched["run"]["runs"], searched["run"]["steps"], one["run"]["runs"]) == (5, 500, 1)
    assert searched["run"]["exaflops"] == pytest.approx(5 * one["run"]["exaflops"])
    assert searched["modes"]["single"]["hours"] == pytest.approx(5 * one["modes"]["single"]["hours"])


def test_published_names_give_the_parameters_of_the_files() -> None:
    for name, entry in PUBLISHED.items():
        assert cost.parameters(parse_name(name)) == entry.parameters, name


def test_a_plan_downloads_no_published_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(address: str, *_: object) -> Path:
        raise hub.UnreachableError(f"{address} cannot be reached")

    monkeypatch.setattr(hub, "fetch", fail)
    by_model, *by_weights = (
        plan_json(f"ft-cifar10 {start} --preprocess.crop 0.9", capsys)
        for start in ("--model ViT-B/16", "--init vit_b16_orig_i21k_224", "--init vit_b16_augreg_i21k_i1k_384")
    )
    assert by_weights == [by_model] * 2
    with pytest.raises(SystemExit):
        cli.main(["plan", "ft-cifar10", "--init", "hf:org/name"])
    assert "--model NAME" in capsys.readouterr().err
