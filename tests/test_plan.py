"""`plainvit plan` compared with PyTorch's optimizers and saved tensors, and with steps measured on an H200."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import small_runs
import tiny
import torch
from children import in_child
from rich.console import Console
from torch import Tensor

from plainvit import cli, hub
from plainvit.config import Config, Model, Optim, ViTConfig, from_json
from plainvit.data.splits import open_splits
from plainvit.disk import read_json
from plainvit.models import build
from plainvit.names import configure
from plainvit.planning import cost
from plainvit.planning.datasets import count_training_images
from plainvit.planning.devices import H200
from plainvit.planning.memory import GIB, Step, largest_micro_batch, memory, saved_bytes
from plainvit.planning.plan import plan, table
from plainvit.planning.step_time import executed_macs, exposed_communication, step_seconds
from plainvit.recipes import recipe
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.train.measure import measure_steps
from plainvit.train.objectives import Classify
from plainvit.train.optim import Optimizers
from plainvit.train.run import fit
from plainvit.train.transfer import complete_config

ROOT = Path(__file__).parent.parent
SMALL = ViTConfig(width=64, depth=2, heads=4, mlp_dim=192, patch=(8, 8), image_size=(32, 24), classes=10)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_weights_gradients_and_optimizer_state_match_pytorch(name: Any) -> None:
    model, optim = build(SMALL), Optim(name=name)
    optimizers = Optimizers(model, model.named_parameters(), optim)
    for parameter in optimizers.parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizers.set_rate(1e-3)
    optimizers.step()
    found = memory(Step(model=SMALL, images=1, optim=optim))
    assert found["optimizer state"] == sum(t.nbytes for t in optimizers.state().values() if t.ndim)  # without counters
    assert found["weights"] == found["gradients"] == sum(p.nbytes for p in model.parameters())
    assert found["bf16 weights"] == found["weights"] / 2


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
    ("ViT-L/16", 256, {}, 1_162, 46.3),
    ("ViT-H/14", 128, {}, 418, 54.1),
    ("ViT-H/14", 32, {}, 359, 19.8),
]


@pytest.mark.parametrize(("name", "batch", "options", "rate", "gib"), STEPS)
def test_plans_match_measured_steps(name: str, batch: int, options: dict[str, Any], rate: float, gib: float) -> None:
    model = configure(name)
    step = Step(model=model, images=batch, graphs=bool(options) and cost.is_small(model, batch), **options)
    assert memory(step)["total"] / GIB == pytest.approx(gib, rel=0.05)
    assert batch / sum(step_seconds(step, H200).values()) == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_largest_micro_batch_just_fits(recompute: bool) -> None:
    step = Step(model=configure("ViT-L/16"), images=20_000, recompute=recompute)
    largest = largest_micro_batch(step, H200)
    assert memory(dataclasses.replace(step, micro_batch=largest))["total"] <= H200.usable_bytes
    assert memory(dataclasses.replace(step, micro_batch=largest + 1))["total"] > H200.usable_bytes


def test_fsdp_holds_a_shard_of_what_ddp_holds() -> None:
    config = recipe("vit-h14-jft")
    ddp = plan(config, devices=64)["step"]["memory"]
    fsdp = plan(config.replace(parallel="fsdp"), devices=64)["step"]["memory"]
    for name in ("weights", "gradients", "optimizer state"):
        assert fsdp[name] == pytest.approx(ddp[name] / 64, abs=1)
    assert fsdp["total"] < ddp["total"]


def test_checkpoint_bytes_match_a_saved_checkpoint(tmp_path: Path) -> None:
    fit(small_runs.config(steps=1, evaluations=1, recipe="mine"), tmp_path, quiet=True, bare=True)
    config = from_json(read_json(tmp_path / "config.json"), ("run",))
    assert isinstance(config, Config)
    tensors, _ = Checkpoints(tmp_path / "checkpoints", 1).read(1)
    real = sum(tensor.nbytes for tensor in tensors.values())
    assert plan(config)["checkpoint_bytes"] == pytest.approx(real, rel=0.02)
    assert plan(config.replace(ema=0.0))["checkpoint_bytes"] == pytest.approx(0.75 * real, rel=0.02)


# Time -----------------------------------------------------------------------------------------------------------------


SLOWER: list[dict[str, Any]] = [{"recompute": True}, {"eager": True}, {"element_bytes": 4}, {"micro_batch": 2}]
SLOWER += [{"optim": Optim(name="muon")}, {"model": configure("R50x1+ViT-B/16")}]


@pytest.mark.parametrize("changes", SLOWER, ids=str)
def test_more_work_takes_longer(changes: dict[str, Any]) -> None:
    step = Step(model=configure("ViT-B/16"), images=256)
    slower = dataclasses.replace(step, **changes)
    assert sum(step_seconds(slower, H200).values()) > sum(step_seconds(step, H200).values())


@pytest.mark.parametrize("name", ["ViT-B/16", "R50x1+ViT-B/16", "BiT-R50x1", "Axial-ViT-B/32"])
def test_executed_macs_are_all_macs_without_the_fast_path(name: str) -> None:
    model = configure(name)
    assert sum(executed_macs(Step(model=model, images=1))) == pytest.approx(cost.macs(model))
    fast = sum(executed_macs(Step(model=model, images=1, fast_path=True)))
    assert (fast < cost.macs(model)) == (isinstance(model, ViTConfig) and model.reads_one_token)


@pytest.mark.parametrize(("parallel", "copies"), [("ddp", 2), ("fsdp", 3)])
def test_communication_is_bytes_over_bandwidth_less_computation(parallel: Any, copies: int) -> None:
    step = Step(model=configure("ViT-B/16"), images=64, parallel=parallel, devices=8)
    sent = copies * 4 * cost.parameters(step.model) * 7 / 8
    assert exposed_communication(step, H200, computation=0.0) == pytest.approx(sent / (0.75 * 450e9))
    assert exposed_communication(step, H200, computation=1.0) == 0.0
    assert H200.collective_bandwidth(8) > H200.collective_bandwidth(16)


def test_measured_steps_replace_the_estimate() -> None:
    config, measured = measure_steps(small_runs.config(steps=40, recipe="mine"))
    report = plan(config, images=measured["images"], measured=measured)
    step = report["step"]
    assert step["seconds"] == measured["seconds"] > 0
    assert step["hours"] == pytest.approx(40 * measured["seconds"] / 3600)
    assert report["on"] == ("cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert report["notes"] == []


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit-h14-jft", {"on": "h200", "devices": 1024}),
        ("r152x2-jft", {"on": "h100", "devices": 8}),
        ("digits", {"devices": 2}),
    ],
)
def test_reports_are_json_and_fit_80_columns(name: str, options: dict[str, Any]) -> None:
    report = plan(recipe(name), **options)
    assert json.loads(json.dumps(report)) == report
    text, step = render(report), report["step"]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert f"{report['parameters']:,}" in text
    assert ("seconds" in step) == ("on" in options)
    if "seconds" in step:
        assert step["seconds"] == pytest.approx(sum(step["parts"].values()))
        assert f"{1000 * step['seconds']:,.1f} ms" in text


@pytest.mark.parametrize(
    ("data", "images"),
    [("cifar10", 45_000), ("flowers102", 1_020), ("vtab/svhn", 800), ("vtab1000/svhn", 900), ("photos", None)],
)
def test_known_datasets_are_counted_without_their_held_out_images(data: str, images: int | None) -> None:
    """Flowers and vtab/ have validation images of their own."""
    assert count_training_images(Config(data=data, holdout=0.1)) == images


@pytest.mark.parametrize("name", ["masked-cifar10", "mae-cifar10"])
def test_self_supervision_is_planned_without_a_head(name: str) -> None:
    config = recipe(name).replace(data="digits")
    report, trained = plan(config), complete_config(config, open_splits(config)).model
    assert trained is not None
    assert (report["classes"], report["parameters"]) == (0, cost.parameters(trained))


NOTES: dict[str, tuple[dict[str, Any], str]] = {
    "no length": ({"steps": 0}, "--epochs"),
    "teacher": ({"teacher": "weights.npz"}, "teacher"),
    "frozen": ({"optim": Optim(frozen=("head*",))}, "upper bound"),
    "MAE": ({"objective": "mae"}, "MAE"),
    "ResNet": ({"model": configure("BiT-R50x1")}, "convolutions"),
}


@pytest.mark.parametrize(("changes", "word"), NOTES.values(), ids=NOTES)
def test_notes_name_what_is_not_planned(changes: dict[str, Any], word: str) -> None:
    config = Config(model=SMALL, data="digits", steps=1)
    assert plan(config, on="h200")["notes"] == []
    (note,) = plan(config.replace(**changes), on="h200")["notes"]
    assert word in note


def test_too_few_hours_are_noted_with_the_steps_they_allow() -> None:
    report = plan(recipe("vit-l16-i21k").replace(hours=2.0), on="h200")
    allowed = int(report["run"]["steps"] * 2 / report["step"]["hours"])
    assert any("--hours 2" in note and f"{allowed:,}" in note for note in report["notes"])


def test_a_step_that_does_not_fit_has_no_time_but_advice() -> None:
    giant = Config(model=configure("ViT-G/14", image_size=2800), batch=2, steps=1)
    report = plan(giant, on="h100", devices=2)
    step = report["step"]
    assert (step["micro_batch"], step["fits"], step["largest_micro_batch"]) == (1, False, 0)
    assert "seconds" not in step
    assert any("--parallel fsdp" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("config", "options", "word"),
    [
        (recipe("cifar10"), {"on": "h20"}, "h200"),
        (recipe("cifar10"), {"on": "cpu"}, "--on"),
        (recipe("ft-cifar10"), {}, "--model"),
        (recipe("cifar10"), {"devices": 0}, "--devices"),
        (recipe("vit-b16-i1k"), {"devices": 100}, "--devices 128"),
        (recipe("vit-h14-jft"), {"images": 0}, "--images"),
    ],
)
def test_bad_input_raises_one_line_that_names_the_flag(config: Config, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        plan(config, **options)
    assert "\n" not in str(caught.value)


def test_a_plan_loads_no_torch() -> None:
    code = "import sys; from plainvit.recipes import recipe; from plainvit.planning.plan import plan, table;"
    code += "table(plan(recipe('vit-b16-i1k'), on='h200', devices=8)); print('torch' in sys.modules)"
    assert in_child(code) == "False"


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["--image-size 32", "--model.image-size 32", "--model.image-size 32 32"])
def test_a_named_model_takes_the_image_size_of_either_flag(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (f"digits {size} --model ViT-Ti/16", f"digits --model ViT-Ti/16 {size}"):
        assert plan_json(words, capsys)["parameters"] == cost.parameters(configure("ViT-Ti/16", 10, 32))
    assert plan_json("digits --image-size 16 --on h200", capsys)["tokens"] == 64  # of the recipe's model


def test_a_plan_without_the_weights_takes_the_name_of_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(address: str, *_: object) -> Path:
        raise hub.UnreachableError(f"{address} cannot be reached")

    monkeypatch.setattr(hub, "fetch", fail)
    with pytest.raises(SystemExit):
        cli.main(["plan", "ft-cifar10", "--init", "hf:org/name"])
    assert "--model NAME" in capsys.readouterr().err
    assert plan_json("ft-cifar10 --model ViT-B/16 --init hf:org/name", capsys)["tokens"] == 577
