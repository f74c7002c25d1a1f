"""Plans against PyTorch's optimisers, what its backward pass keeps, FSDP itself, steps of an H200, and Table 6."""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import small_runs
import tiny
import torch
import torch.distributed as dist
from rich.console import Console
from test_cost import TABLE_6
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from plainvit import cli, hub
from plainvit.config import Augment, Config, Model, Optim, ResNetConfig, ViTConfig, from_json
from plainvit.data.splits import open_splits
from plainvit.disk import read_json
from plainvit.models import ResNet, ViT, build
from plainvit.models.fast import attention as short_attention
from plainvit.names import configure, list_models
from plainvit.planning import cost
from plainvit.planning.devices import DEVICES, H200
from plainvit.planning.memory import GIB, Step, groups, largest_micro_batch, memory, stored, trained_numbers
from plainvit.planning.plan import _halved, _resolved, plan, table
from plainvit.planning.ranks import sharded
from plainvit.planning.shapes import shape
from plainvit.planning.step_time import (
    RING,
    _update_bytes,
    attention_flops,
    exposed,
    ideal,
    is_short,
    products,
    seconds,
    traffic,
)
from plainvit.recipes import about, recipe
from plainvit.recipes.paper import PRETRAINING
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.train import guards
from plainvit.train.fit import fit
from plainvit.train.masked import PredictPatches
from plainvit.train.objectives import Classify
from plainvit.train.optim import Optimizers, add_lora, freeze
from plainvit.train.transfer import resolve
from plainvit.weights.published import PUBLISHED

ROOT = Path(__file__).parent.parent
SMALL = ViTConfig(width=64, depth=2, heads=4, mlp_dim=192, patch=(8, 8), image_size=(32, 24), classes=10)


def on_meta(config: Model) -> ViT | ResNet:
    with torch.device("meta"):
        return build(config)


# The paper ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, row in PRETRAINING.items() if row.data == "jft"])
def test_compute_is_that_of_table_6(name: str) -> None:
    row = PRETRAINING[name]
    found = plan(recipe(name), images=303_000_000)["run"]
    expected = TABLE_6[row.model, row.epochs]
    assert found["exaflops"] == pytest.approx(expected, rel=0.05 if row.model.startswith("BiT") else 0.03)
    assert found["epochs"] == pytest.approx(row.epochs, rel=1e-3)


def test_core_days_cover_those_of_table_2() -> None:
    for name, days in (("vit-h14-jft", 2500), ("vit-l16-jft-14ep", 680), ("vit-l16-i21k", 230)):
        images = 303_000_000 if name.endswith(("jft", "14ep")) else None
        found = plan(recipe(name), images=images)["run"]["tpuv3_core_days"]
        assert 0.98 * found["low"] <= days <= 1.02 * found["high"]
        assert found["low"] < found["estimate"] < found["high"]


# Memory ---------------------------------------------------------------------------------------------------------------


def take_a_step(model: ViT | ResNet, optim: Optim) -> Optimizers:
    optimizers = Optimizers(model, model.named_parameters(), optim)
    for parameter in optimizers.parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizers.set_rate(1e-3)
    optimizers.step()
    return optimizers


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_weights_gradients_and_state_are_those_of_real_optimisers(name: Any) -> None:
    model, optim = build(SMALL), Optim(name=name)
    optimizers = take_a_step(model, optim)
    state = sum(tensor.nbytes for tensor in optimizers.state().values() if tensor.ndim)  # counters are not counted
    found = memory(Step(model=SMALL, images=1, optim=optim))
    assert found["optimiser"] == state
    assert found["weights"] == sum(p.nbytes for p in model.parameters())
    assert found["bf16 weights"] == sum(p.bfloat16().nbytes for p in model.parameters())
    assert found["gradients"] == sum(p.grad.nbytes for p in optimizers.parameters if p.grad is not None)


@pytest.mark.parametrize("changes", [{"frozen": ("blocks.0.*", "embedding.*")}, {"lora": 3}])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_is_frozen_has_neither_gradient_nor_state(name: Any, changes: dict[str, Any]) -> None:
    model, optim = build(SMALL), Optim(name=name, **changes)
    assert isinstance(model, ViT)
    freeze(model, optim.frozen)
    if optim.lora:
        add_lora(model, optim.lora, 0)
    optimizers = take_a_step(model, optim)
    found = memory(Step(model=SMALL, images=1, optim=optim))
    assert found["gradients"] == 4 * trained_numbers(SMALL, optim)[0] == sum(p.nbytes for p in optimizers.parameters)
    assert found["optimiser"] == sum(tensor.nbytes for tensor in optimizers.state().values() if tensor.ndim)


def kept(config: Model, images: int, bf16: bool) -> int:
    """Bytes that PyTorch keeps for the backward pass, each storage once, without the weights and their casts."""
    model = tiny.filled(config, torch.float32).train()
    objective = Classify(model, Config(model=config))
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    pixels = torch.randint(0, 256, (images, 3, *config.image_size), dtype=torch.uint8)
    targets = torch.rand(images, config.classes)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", enabled=bf16):
        objective(pixels, targets, torch.zeros(images, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def slope(config: Model, bf16: bool = False) -> float:
    """Bytes an image: what does not grow with the images drops out."""
    return (kept(config, 5, bf16) - kept(config, 2, bf16)) / 3


EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "deeper": {"depth": 3},
    "average": {"pool": "average", "class_token": False, "depth": 1},
    "LayerScale": {"layer_scale": 0.1},
    "registers": {"registers": 3},
    "relu": {"activation": "relu"},
    "hidden layer": {"representation": 24},
    "axial": {"axial": True, "class_token": False, "pool": "average"},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("changes", EXACT.values(), ids=EXACT)
def test_activations_are_what_pytorch_keeps(changes: dict[str, Any], bf16: bool) -> None:
    """Uncompiled: blocks to the byte, the whole within what the few tensors of the head are."""
    config = SMALL.replace(**changes)
    number = 2 if bf16 else 4
    block = slope(config.replace(depth=config.depth + 1), bf16) - slope(config, bf16)
    step = Step(model=config, images=1, number=number)
    more = Step(model=config.replace(depth=config.depth + 1), images=1, number=number)
    assert stored(more) - stored(step) == block
    assert stored(step) == pytest.approx(slope(config, bf16), rel=0.05)


def test_masks_of_dropout_are_what_pytorch_keeps() -> None:
    """In the blocks, and one of all tokens before them; a CPU keeps them as fp32, a GPU as bytes."""
    plain, dropped = SMALL, SMALL.replace(dropout=0.1)
    ours = [stored(Step(model=config, images=1, number=4)) for config in (plain, dropped)]
    assert 4 * (ours[1] - ours[0]) == slope(dropped) - slope(plain)


@pytest.mark.parametrize(
    ("config", "within"),
    [
        (SMALL.replace(posemb="relative"), 0.1),
        (SMALL.replace(pool="attention"), 0.05),
        (SMALL.replace(norm="post"), 0.05),
        (tiny.bit(blocks=(3, 4)).config.replace(image_size=(96, 96)), 0.25),
        (tiny.hybrid().config, 0.15),
    ],
    ids=["relative", "attention pool", "post-norm", "ResNet", "hybrid"],
)
def test_activations_of_rarer_models_are_near(config: Model, within: float) -> None:
    assert stored(Step(model=config, images=1, number=4)) == pytest.approx(slope(config), rel=within)


def test_recomputed_blocks_keep_their_input_alone() -> None:
    step = Step(model=SMALL, images=1)
    again = dataclasses.replace(step, recompute=True)
    one = (stored(Step(model=SMALL.replace(depth=3), images=1)) - stored(step)) - 4 * SMALL.tokens * SMALL.width
    assert stored(step) - stored(again) == SMALL.depth * one
    resnet = Step(model=configure("BiT-R50x1"), images=1)
    assert stored(dataclasses.replace(resnet, recompute=True)) < stored(resnet) / 2


def test_recomputed_blocks_run_their_attention_once_more() -> None:
    """Its forward pass is 2 products, and its backward pass, which makes one of them again, 5."""
    once, again = (ideal(Step(model=SMALL, images=1, recompute=on), H200)["attention"] for on in (False, True))
    assert again / once == pytest.approx(9 / 7)


# Measured on one H200: torch 2.11, compiled, bf16 autocast, fused AdamW, attention by cuDNN, images as floats.
# (model, batch, bytes of the residual stream, images/s, GiB); a bf16 stream is a plain fused ViT, an fp32 one timm
MEASURED = [
    ("ViT-B/16", 256, 2, 3876, 15.8),
    ("ViT-L/16", 256, 2, 1254, 41.8),
    ("ViT-B/16", 256, 4, 3528, 17.4),
    ("ViT-L/16", 256, 4, 1176, 46.7),
    ("ViT-H/14", 128, 4, 427, 54.6),
]


@pytest.mark.parametrize(("name", "batch", "stream", "rate", "gib"), MEASURED)
def test_measured_steps_are_met(name: str, batch: int, stream: int, rate: float, gib: float) -> None:
    step = Step(model=configure(name), images=batch, stream=stream, pixel=4)
    cudnn = dataclasses.replace(H200, attention=0.291)
    assert memory(step)["total"] / GIB == pytest.approx(gib, rel=0.03)
    assert batch / sum(seconds(step, cudnn).values()) == pytest.approx(rate, rel=0.05)


OURS = [  # `python -m bench.plan` on an H200 (docs/results.md): our own step, without the shortcuts of since
    ("ViT-B/16", 256, 3434, 17.3),
    ("ViT-B/16", 128, 3164, 9.2),
    ("ViT-L/16", 256, 1162, 46.3),
    ("ViT-L/16", 64, 1011, 14.6),
    ("ViT-H/14", 128, 418, 54.1),
    ("ViT-H/14", 32, 359, 19.8),
]


@pytest.mark.parametrize(("name", "batch", "rate", "gib"), OURS)
def test_our_own_steps_are_met(name: str, batch: int, rate: float, gib: float) -> None:
    step = Step(model=configure(name), images=batch)
    assert memory(step, H200.kept)["total"] / GIB == pytest.approx(gib, rel=0.1)
    assert batch / sum(seconds(step, H200).values()) == pytest.approx(rate, rel=0.15)


def test_a_relu_is_never_computed_again() -> None:
    of_relu, of_gelu = (
        Step(model=configure("ViT-B/16", activation=name), images=8, shortcuts=True) for name in ("relu", "gelu")
    )
    assert (of_relu.lean, of_gelu.lean) == (False, True)
    assert traffic(of_relu) < traffic(of_gelu)
    assert memory(of_relu)["activations"] == memory(of_gelu)["activations"]
    assert memory(of_relu)["working"] < memory(of_gelu)["working"]


def test_the_largest_micro_batch_just_fits() -> None:
    room = H200.memory * H200.usable * GIB
    for again in (False, True):
        step = Step(model=configure("ViT-L/16"), images=20_000, recompute=again)
        most = largest_micro_batch(step, H200)
        assert memory(dataclasses.replace(step, micro_batch=most))["total"] <= room
        assert memory(dataclasses.replace(step, micro_batch=most + 1))["total"] > room
    assert largest_micro_batch(Step(model=configure("ViT-G/14", image_size=1792), images=2), DEVICES["h100"]) == 0


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in list_models() if not name.startswith("BiT")])
def test_products_and_attention_are_all_multiply_adds(name: str) -> None:
    model = configure(name)
    assert isinstance(model, ViTConfig)
    (h, w), N = model.grid, model.tokens
    pairs = N * (h + w) if model.axial else N * N
    stem = cost.macs(model.stem.replace(image_size=model.image_size)) if model.stem else 0
    counted = sum(one.rows * one.inner * one.outer * one.times for one in products(model))
    assert counted + 2 * model.depth * pairs * model.width + stem == cost.macs(model)


def test_products_of_odd_models() -> None:
    for changes in ({"posemb": "relative"}, {"distillation": True}, {"representation": 20}, {"pool": "attention"}):
        model = SMALL.replace(**changes)
        attention = 2 * model.depth * model.tokens**2 * model.width
        pooled = 2 * math.prod(model.grid) * model.width if model.pool == "attention" else 0  # by one query
        counted = sum(one.rows * one.inner * one.outer * one.times for one in products(model))
        assert counted + attention + pooled == cost.macs(model)


@pytest.mark.parametrize(("name", "passes"), [("adamw", 7), ("sgd", 5), ("muon", 5)])
def test_an_update_reads_and_writes_each_number_so_often(name: str, passes: int) -> None:
    """Weight, gradient and one or two moments are read, all but the gradient written; and it is set to zero."""
    step = Step(model=SMALL, images=1, optim=Optim(name=name, clip=0.0))  # pyright: ignore[reportArgumentType]
    assert _update_bytes(step) == 4 * (passes + 1) * cost.parameters(SMALL)


def test_the_stream_passes_ten_times_a_block() -> None:
    """Each half of a block reads and writes it; on the way back it is read, as is its gradient, which is written."""
    wide, narrow = (traffic(Step(model=SMALL, images=1, stream=r)) for r in (4, 2))
    assert wide - narrow == SMALL.depth * 2 * (2 + 3) * 2 * SMALL.tokens * SMALL.width


def test_the_last_block_is_a_part_of_one_where_one_token_is_read() -> None:
    """With shortcuts: more than a model of one block less, which has none, and less than all blocks in full."""
    full = Step(model=SMALL.replace(image_size=(160, 160)), images=1)  # too long for our own attention
    less = dataclasses.replace(full, model=full.model.replace(depth=SMALL.depth - 1))
    short = dataclasses.replace(full, shortcuts=True)
    for count in (traffic, stored, lambda step: ideal(step, H200)["products"]):
        assert count(less) < count(short) < count(full)
    assert isinstance(full.model, ViTConfig)
    assert attention_flops(full.model, shortcuts=True) == attention_flops(full.model) / 2  # of two blocks


def rate_of(step: Step) -> float:
    return step.images * step.devices / sum(seconds(step, H200).values())


def test_more_work_takes_longer() -> None:
    base = Step(model=configure("ViT-B/16"), images=256)
    for changes in (
        {"recompute": True},
        {"eager": True},
        {"number": 4},
        {"average": True},
        {"micro_batch": 2},
        {"optim": Optim(name="muon")},
        {"model": configure("ViT-B/16", image_size=384)},
        {"model": configure("ViT-B/16", dropout=0.1)},
        {"model": configure("R50x1+ViT-B/16")},
    ):
        assert rate_of(dataclasses.replace(base, **changes)) < rate_of(base), changes
    assert rate_of(dataclasses.replace(base, images=512)) > rate_of(base)
    assert rate_of(dataclasses.replace(base, optim=Optim(name="sgd"))) > rate_of(base)


def test_few_images_wait_for_the_host() -> None:
    parts = seconds(Step(model=configure("ViT-Ti/16"), images=1), H200)
    assert max(parts, key=lambda name: parts[name]) == "host"


def test_ddp_hides_all_but_the_last_bucket() -> None:
    step = Step(model=configure("ViT-B/16"), images=64, mode="ddp", devices=8)
    size = 4 * cost.parameters(step.model)
    buckets = math.ceil(size / (25 * 2**20))
    ring = 14e-6 + 2 * 7 * min(RING[0], 1.25e-6) + 2 * 7 / 8 * size / buckets / (0.75 * 450e9)
    assert exposed(step, H200, computing=1.0) == pytest.approx(ring)
    assert exposed(step, H200, computing=0.0) == pytest.approx(buckets * ring)


def test_fsdp_gathers_twice_and_scatters_once() -> None:
    step = Step(model=configure("ViT-B/16"), images=64, mode="fsdp", devices=8)
    parts, bus = groups(step.model), 0.75 * 450e9
    gathered = 4 * (2 * sum(parts[:-1]) + parts[-1]) + 4 * sum(parts)
    latency = 14e-6 + 7 * RING[0]
    expected = (3 * 12 + 2) * latency + gathered * 7 / 8 / bus
    assert exposed(step, H200, computing=0.0) == pytest.approx(expected)
    assert exposed(step, H200, computing=1.0) < expected / 10


def test_accumulated_gradients_travel_once() -> None:
    step = Step(model=configure("ViT-B/16"), images=64, micro_batch=16, mode="ddp", devices=8)
    whole = dataclasses.replace(step, micro_batch=64)
    assert exposed(step, H200, 0.0) == exposed(whole, H200, 0.0)


LORA: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two heads": ({"distillation": True}, ()),
    "a hidden layer": ({"representation": 20}, ()),
    "no head": ({"classes": 0}, ()),
    "a frozen block": ({}, ("blocks.0.*",)),
    "a frozen head": ({}, ("head*",)),
}


@pytest.mark.parametrize(("settings", "frozen"), LORA.values(), ids=LORA)
def test_what_lora_trains_is_counted_as_the_run_has_it(settings: dict[str, Any], frozen: tuple[str, ...]) -> None:
    config, optim = SMALL.replace(**settings), Optim(name="muon", lora=3, frozen=frozen)
    model = build(config)
    assert isinstance(model, ViT)
    add_lora(model, optim.lora, 0)
    freeze(model, frozen)
    left = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    matrices = sum(count for name, count in left.items() if name.startswith("blocks."))
    assert trained_numbers(config, optim) == (sum(left.values()), matrices)


# Many ranks -----------------------------------------------------------------------------------------------------------


def rows_held(config: Model, ranks: int) -> int:
    """Numbers of the fullest rank, each tensor cut by rows."""
    return sum(math.ceil(p.shape[0] / ranks) * p[0].numel() for p in on_meta(config).parameters())


@pytest.mark.parametrize(("config", "ranks"), [(SMALL, 2), (SMALL, 1024)])
def test_a_rank_holds_what_arithmetic_says(config: ViTConfig, ranks: int) -> None:
    found = sharded(config, ranks)
    assert not dist.is_initialized()
    assert found["held_bytes"] == 4 * rows_held(config, ranks)
    assert found["bytes_without_filling"] == 4 * cost.parameters(config) / ranks
    assert found["held_bytes"] >= found["bytes_without_filling"]
    blocks = config.depth
    assert (found["groups"], found["all_gathers"], found["reduce_scatters"]) == (blocks + 1, 2 * blocks + 1, blocks + 1)
    assert found["reduce_scatter_bytes"] == found["held_bytes"] * (ranks - 1)


def test_bytes_without_filling_are_those_of_the_groups() -> None:
    """Two ranks divide nearly every row: the simulation's messages are the arithmetic's."""
    found, parts = sharded(SMALL, 2), groups(SMALL)
    assert found["all_gather_bytes"] == pytest.approx(4 * (2 * sum(parts[:-1]) + parts[-1]) / 2, rel=0.01)


@pytest.mark.parametrize("name", ["ViT-B/16", "Axial-ViT-B/32", "R50x1+ViT-B/16", "BiT-R50x1"])
def test_groups_are_those_of_the_built_model(name: str) -> None:
    model = on_meta(configure(name))
    units = model.blocks if isinstance(model, ViT) else model.body.stages
    counted = [count(unit) for unit in units]
    found = groups(configure(name))
    assert sum(found) == count(model)
    assert found[:-1] == pytest.approx(counted, rel=0 if isinstance(model, ViT) else 0.01)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.slow
def test_a_plan_for_several_devices_simulates_them() -> None:
    report = plan(Config(model=SMALL, batch=16, steps=10), on="h200", devices=4)
    assert report["simulation"]["held_bytes"] == 4 * rows_held(SMALL, 4)
    assert not dist.is_initialized()


# The report -----------------------------------------------------------------------------------------------------------


def shown(report: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(table(report))
    return out.getvalue()


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
    report = plan(recipe(name), **options, simulate=False)
    assert json.loads(json.dumps(report)) == report
    text = shown(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert f"{report['parameters']:,}" in text
    for word in ("parameters", "activations", "FLOPs"):
        assert word in text
    assert report["chosen"] in report["modes"]
    for mode in report["modes"].values():
        if "seconds" in mode:
            assert mode["step_seconds"] == pytest.approx(sum(mode["seconds"].values()))
            assert mode["images_per_second"] == pytest.approx(report["run"]["batch"] / mode["step_seconds"])


def test_the_simulation_is_shown() -> None:
    report = plan(recipe("digits"), devices=2, simulate=False)
    report["simulation"] = sharded(SMALL, 2)
    assert "2 simulated ranks" in shown(report)
    report["simulation"] = {"left_out": "it took longer than five minutes"}
    assert "not simulated: it took longer" in shown(report)


def test_sizes_of_known_sets_make_the_length() -> None:
    run = plan(recipe("vit-b16-i1k"))["run"]
    assert run["images"] == 1_281_167 - round(0.01 * 1_281_167)
    assert run["steps"] == int(300 * run["images"] / 4096)
    assert plan(Config(model=SMALL.replace(classes=0), data="vtab/dtd", steps=3))["classes"] == 47
    assert plan(Config(model=SMALL, data="flowers102", holdout=0.5, epochs=2, batch=102))["run"]["steps"] == 20


@pytest.mark.parametrize("name", ["masked-cifar10", "mae-cifar10"])
def test_self_supervision_is_planned_without_a_head(name: str) -> None:
    """As a run of it is: the classes of its data are not asked for."""
    config = recipe(name).replace(data="digits")  # whose images need not be there
    report = plan(config)
    trained = resolve(config, open_splits(config)).model
    assert trained is not None
    assert (report["classes"], report["parameters"]) == (0, cost.parameters(trained))
    assert not any("last layer" in note for note in report["notes"])


def test_self_supervision_is_planned_with_all_tokens_of_the_last_block() -> None:
    """PyTorch's count of a step's forward pass, less the layer that answers: every token is counted."""
    config = Config(model=SMALL, objective="masked", data="digits", steps=1)
    model = build(SMALL.replace(classes=0))
    assert isinstance(model, ViT)
    net, place = PredictPatches(model, config), torch.arange(1)
    with FlopCounterMode(display=False) as counted:
        net(torch.zeros(1, 3, *SMALL.image_size, dtype=torch.uint8), *net.hide(0, torch.zeros_like(place), place))
    answers = 2 * net.hidden * SMALL.width * 512
    planned = _resolved(config)
    assert isinstance(planned, ViTConfig)
    linear = sum(2 * one.rows * one.inner * one.outer * one.times for one in products(planned, shortcuts=True))
    attention = SMALL.depth * 4 * SMALL.tokens**2 * SMALL.width
    assert linear + attention == counted.get_total_flops() - answers


def test_without_the_number_of_images_a_step_is_planned() -> None:
    report = plan(recipe("vit-h14-jft"), on="h200", devices=64, simulate=False)
    assert report["run"]["exaflops"] is None
    mode = report["modes"]["ddp"]
    assert mode["hours"] is None
    assert mode["images_per_second"] > 0
    assert any("--images" in note for note in report["notes"])


def test_fsdp_holds_a_part_of_what_ddp_holds() -> None:
    modes = plan(recipe("vit-h14-jft"), on="h200", devices=64, simulate=False)["modes"]
    for name in ("weights", "gradients", "optimiser"):
        assert modes["fsdp"]["memory"][name] == pytest.approx(modes["ddp"]["memory"][name] / 64, abs=1)
    assert modes["fsdp"]["memory"]["total"] < modes["ddp"]["memory"]["total"]
    assert set(plan(recipe("vit-h14-jft"))["modes"]) == {"single"}


def test_the_micro_batch_is_halved_until_it_fits() -> None:
    mode = plan(recipe("vit-l16-i21k"), on="h200")["modes"]["single"]
    assert mode["images"] == 4096
    assert 4096 % mode["micro_batch"] == 0
    assert mode["micro_batch"] <= mode["largest_micro_batch"]["stored"] < 2 * mode["micro_batch"]
    assert mode["largest_micro_batch"]["recomputed"] > mode["largest_micro_batch"]["stored"]
    given = plan(recipe("vit-l16-i21k").replace(micro_batch=2048), on="h200")["modes"]["single"]
    assert (given["micro_batch"], given["fits"]) == (2048, False)
    assert "seconds" not in given
    assert "no" in shown(plan(recipe("vit-l16-i21k").replace(micro_batch=2048), on="h200"))


def test_a_half_that_just_fits_is_not_halved_again() -> None:
    """Nor is one image, where not one has room."""
    config, half = recipe("vit-b16-i21k"), 400
    for _ in range(4):  # the images themselves take room
        mode = plan(config.replace(batch=2 * half), on="h100", simulate=False)["modes"]["single"]
        half = mode["largest_micro_batch"]["stored"]
    assert mode["images"] == 2 * half
    assert mode["micro_batch"] == half
    giant = Config(model=configure("ViT-G/14", image_size=2800), batch=2, steps=1)
    mode = plan(giant, on="h100")["modes"]["single"]
    assert (mode["micro_batch"], mode["fits"], mode["largest_micro_batch"]["stored"]) == (1, False, 0)


def test_more_devices_are_faster_and_cost_more() -> None:
    config = recipe("vit-l16-i21k")
    one, eight, many = (plan(config, on="h200", devices=n, simulate=False)["modes"] for n in (1, 8, 512))
    assert one["single"]["hours"] > eight["ddp"]["hours"] > many["ddp"]["hours"]
    assert one["single"]["device_hours"] <= eight["ddp"]["device_hours"] < many["ddp"]["device_hours"]


def test_mixed_images_are_floats_and_averages_are_weights() -> None:
    plain = plan(Config(model=SMALL, steps=1))["modes"]["single"]["memory"]
    rich = plan(Config(model=SMALL, steps=1, augment=Augment(mixup=0.1), ema=0.99))["modes"]["single"]["memory"]
    assert rich["images"] == 4 * plain["images"]
    assert rich["averaged weights"] == rich["weights"]


def test_muon_is_not_sharded() -> None:
    config = Config(model=SMALL, batch=16, steps=1, optim=Optim(name="muon"), parallel="fsdp")
    report = plan(config, on="h200", devices=4, simulate=False)
    assert set(report["modes"]) == {"ddp"}
    assert report["chosen"] == "ddp"


def test_a_budget_is_held_against_the_hours() -> None:
    report = plan(recipe("vit-l16-i21k").replace(hours=2.0), on="h200")
    allowed = report["run"]["steps"] * 2 // report["modes"]["single"]["hours"]
    assert any(f"2 hours allow about {allowed:,.0f} of the steps" in note for note in report["notes"])


def test_the_bytes_of_a_checkpoint_are_those_of_a_real_one(tmp_path: Path) -> None:
    config = small_runs.config(steps=1, evaluations=1, recipe="mine")
    fit(config, tmp_path, quiet=True, bare=True)
    made = from_json(read_json(tmp_path / "config.json"), ("run",))
    assert isinstance(made, Config)
    tensors, _ = Checkpoints(tmp_path / "checkpoints", 1).read(1)
    real = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert plan(made)["checkpoint_bytes"] == pytest.approx(real, rel=0.02)
    assert plan(made.replace(ema=0.0))["checkpoint_bytes"] == pytest.approx(0.75 * real, rel=0.02)


def test_the_table_says_what_to_read_what_links_and_which_way() -> None:
    report = plan(recipe("vit-h14-jft"), on="h200", devices=64, images=303_000_000, simulate=False)
    text = " ".join(shown(report).split())
    modes = report["modes"]
    assert f"{modes['ddp']['images_per_second'] / 64:,.0f} {modes['fsdp']['images_per_second'] / 64:,.0f}" in text
    assert "ddp* fsdp" in text
    assert "* as the config has it: --parallel ddp" in text
    faster = modes["fsdp"]["images_per_second"] / modes["ddp"]["images_per_second"] - 1
    assert f"--parallel fsdp is planned {faster:.0%} faster" in text
    assert "450 GB/s between the devices of a node of 8 and 50 GB/s of each to other nodes, at 75%" in text
    assert "what computing does not hide" in text
    inside = plan(recipe("vit-h14-jft"), on="a100", devices=8, simulate=False)
    assert inside["on"] == "a100-80"
    assert "300 GB/s" in " ".join(inside["notes"])
    assert "other nodes" not in " ".join(inside["notes"])
    assert not any("GB/s" in note for note in plan(recipe("vit-h14-jft"), devices=8, simulate=False)["notes"])


@pytest.mark.parametrize("most", [1, 11, 12, 24, 49, 99])
def test_micro_batches_are_planned_as_the_loop_finds_them(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 100 where no more than `most` images fit: the loop takes equal parts of it."""

    class Run(SimpleNamespace):
        def objective(self, images: Tensor) -> tuple[Tensor, None]:
            if len(images) > most:
                raise torch.OutOfMemoryError("out of memory")
            return torch.ones((), requires_grad=True), None

    run = Run(cast=contextlib.nullcontext, optimizers=SimpleNamespace(zero=lambda: None))
    found = guards.largest_micro_batch(run, (torch.zeros(100, 1),), 100)
    monkeypatch.setattr("plainvit.planning.plan.largest_micro_batch", lambda *_: most)
    small = dataclasses.replace(H200, memory=1e-9)  # nothing fits whole
    assert _halved(Step(model=SMALL, images=100), small) == found


def test_the_way_that_fits_is_named() -> None:
    config = recipe("vit-h14-jft").replace(batch=8 * 505, micro_batch=505)
    report = plan(config, on="h200", devices=8, simulate=False)
    assert [mode["fits"] for mode in report["modes"].values()] == [False, True]
    assert "ddp does not fit, fsdp does: --parallel fsdp" in report["notes"]


def test_what_the_numbers_leave_out_is_said() -> None:
    def said(config: Config) -> str:
        return " ".join(plan(config)["notes"])

    run = Config(model=SMALL, data="digits", steps=1)
    assert "the run has no length" in said(run.replace(steps=0))
    assert "the teacher's memory and time are left out" in said(run.replace(teacher="weights.npz"))
    assert "an upper bound" in said(run.replace(optim=Optim(lora=2)))
    assert not any(words in said(run) for words in ("no length", "teacher", "upper bound"))


def test_rare_checkpoints_are_told_of() -> None:
    """ViT-H on 64 devices: 36 hours with 20 evaluations, 1.8 hours apart."""
    config, options = recipe("vit-h14-jft"), {"on": "h200", "devices": 64, "images": 303_000_000, "simulate": False}
    report = plan(config, **options)
    (note,) = [note for note in report["notes"] if "--save-every" in note]
    assert f"every {report['modes']['ddp']['hours'] / 20:.3g} hours" in note
    found = re.search(r"--save-every (\d+)", note)
    assert found
    each = int(found[1]) * report["modes"]["ddp"]["step_seconds"]
    assert each == pytest.approx(1800, rel=0.05)
    saved = plan(config.replace(save_every=int(found[1])), **options)
    assert not any("--save-every" in note for note in saved["notes"])
    assert not any("--save-every" in note for note in plan(recipe("cifar10"), on="h200")["notes"])


def test_scaled_devices_say_so() -> None:
    for name, device in DEVICES.items():
        assert (name == "h200") == ("not measured" not in device.origin)
    assert DEVICES["h100"].matmul == H200.matmul
    assert DEVICES["a100-80"].matmul == pytest.approx(766 * 312 / 989)
    assert "not measured" in " ".join(shown(plan(recipe("cifar10"), on="h100")).split())


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (recipe("cifar10"), {"on": "h20"}, r"nearest: h200"),
        (recipe("cifar10"), {"on": "cpu"}, r"no rates of a device 'cpu'"),
        (recipe("ft-cifar10"), {}, r"no model to plan for"),
        (recipe("ft-cifar10").replace(init="weights.npz"), {}, r"the model of weights.npz is not in the config"),
        (recipe("cifar10"), {"devices": 0}, r"devices must be .* at least 1, got 0"),
        (recipe("vit-b16-i1k"), {"devices": 100}, r"batch of 4096 cannot be shared by 100 devices; try 128"),
        (recipe("vit-h14-jft"), {"images": 0}, r"images must be at least 1"),
        (recipe("cifar10"), {"search": True}, r"--search needs rates to try: --optim.grid"),
    ],
)
def test_bad_input_is_one_clear_line(config: Config, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        plan(config, **options)
    assert "\n" not in str(caught.value)


def test_a_plan_for_one_device_loads_no_torch() -> None:
    code = (
        "import sys; from plainvit.recipes import recipe; from plainvit.planning.plan import plan, table;"
        "table(plan(recipe('vit-b16-i1k'), on='h200')); print('torch' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.strip() == "False"


# The measurement ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.plan")


def test_the_measurement_runs_without_a_gpu(bench: ModuleType, tmp_path: Path, capsys: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("would measure for minutes")
    bench.main(["--json", str(tmp_path / "rows.json")])
    saved = json.loads((tmp_path / "rows.json").read_text())
    (row,) = saved["rows"]
    assert row["images_per_second"] == pytest.approx(16 / row["step_s"])
    assert math.isfinite(row["loss"])
    assert "tiny ViT" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--fit", str(tmp_path / "rows.json"), "--on", "h200"])


def test_no_time_leaves_rows_out(bench: ModuleType) -> None:
    (row,) = bench.measured(budget=0.0)
    assert row["left_out"] == "no time was left"


def test_kernels_are_told_apart_by_their_names(bench: ModuleType) -> None:
    kinds = {
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32": "products",
        "triton_tem_fused_addmm_3": "products",
        "triton_poi_fused__scaled_dot_product_flash_attention_view_5": "pointwise",
        "triton_red_fused_addmm_native_layer_norm_2": "pointwise",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention",
        "multi_tensor_apply_kernel<FusedAdamMathFunctor>": "update",
        "Memcpy DtoD (Device -> Device)": "pointwise",
    }
    assert {name: bench.kind_of(name) for name in kinds} == kinds


@pytest.mark.parametrize("parts", [True, False], ids=["profiled", "steps alone"])
def test_fitting_finds_the_shares_that_made_the_rows(bench: ModuleType, parts: bool) -> None:
    truth = dataclasses.replace(H200, gemm=0.8, short_attention=0.25, pointwise=0.5, update=0.7, kept=1.1)
    rows = []
    for name, batch in bench.ROWS:
        row = {"what": name, "model": bench.to_json(configure(name)), "batch": batch}
        took = seconds(bench.step_of(row), truth)
        row |= {"step_s": sum(took.values()), "allocated": memory(bench.step_of(row), truth.kept)["total"]}
        rows.append(row | ({"parts_s": {name: took[name] for name in bench.PARTS}} if parts else {}))
    found = bench.fit(rows, H200)
    assert found["kept"] == pytest.approx(1.1, rel=0.001)
    better = dataclasses.replace(H200, **found)
    for row in rows:
        assert bench.planned(row, better)["step_s"] == pytest.approx(row["step_s"], rel=0.01)
    if parts:
        assert found["gemm"] == pytest.approx(0.8, rel=0.01)
        assert found["short_attention"] == pytest.approx(0.25, rel=0.02)
        assert found["update"] == pytest.approx(0.7, rel=0.02)


def test_the_fit_is_printed_to_be_copied(bench: ModuleType, tmp_path: Path, capsys: Any) -> None:
    row = {"what": "ViT-B/16, batch 256", "model": bench.to_json(configure("ViT-B/16")), "batch": 256}
    row |= {"step_s": 0.08, "allocated": 20 * GIB}
    saved = {
        "on": "h200",
        "rows": [row, {"what": "ViT-H/14", "left_out": "no time was left"}],
        "ceilings": {"copy": 4.2},
    }
    (tmp_path / "rows.json").write_text(json.dumps(saved))
    bench.main(["--fit", str(tmp_path / "rows.json")])
    out = capsys.readouterr().out
    assert "gemm=0." in out
    assert "kept=1." in out
    assert "ceiling copy" in out


def test_resnets_and_hybrids_have_no_gap() -> None:
    """Every named model can be planned."""
    for name in list_models():
        config = Config(model=configure(name), batch=64, steps=10)
        mode = plan(config, on="h200")["modes"]["single"]
        assert mode["fits"], name
        assert isinstance(config.model, ViTConfig | ResNetConfig)
        assert mode["images_per_second"] > 0


def test_what_is_short_is_what_the_kernel_takes() -> None:
    """The plan is made without torch, so it has these numbers a second time."""
    for width, tokens in itertools.product((32, 48, 64, 80, 96), (287, 288, 289)):
        model = ViTConfig(width=2 * width, heads=2, patch=(1, 1), image_size=(1, tokens - 1))
        fits = tokens <= short_attention.MOST_TOKENS and width in short_attention.HEAD_WIDTHS
        assert is_short(model) == fits


@pytest.mark.parametrize("name", ["ft-imagenet", "ft-pets"])
def test_a_fine_tuning_is_planned_at_its_own_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As its line of costs says, which is for 384 pixels, and the model's name alone would mean 224."""
    cli.main(["plan", name, "--model", "ViT-B/16", "--on", "h200", "--json"])
    said = float(about(name)["cost"].split()[0])
    assert json.loads(capsys.readouterr().out)["run"]["exaflops"] == pytest.approx(said, rel=0.01)


@pytest.mark.parametrize("words", [["32"], ["32", "32"]])
def test_a_named_model_has_the_size_that_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By either flag, in any order, though the recipe's own images are smaller than one of its patches."""
    for size in (["--image-size", words[0]], ["--model.image-size", *words]):
        for asked in itertools.permutations((size, ["--model", "ViT-Ti/16"])):
            cli.main(["plan", "digits", *itertools.chain(*asked), "--json"])
            found = json.loads(capsys.readouterr().out)
            assert found["parameters"] == cost.parameters(configure("ViT-Ti/16", 10, 32))


def test_a_line_of_the_readme_is_planned_by_changing_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """With the runs of its search: Table 4 has four rates for Pets, of 500 steps each, and one run follows."""
    text = (ROOT / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("plainvit finetune ft-pets"))
    words = line.partition("#")[0].replace("WEIGHTS", "vit_b16_orig_i21k_224").split()[2:]
    assert "--search" in words
    found = []
    for asked in (words, [word for word in words if word != "--search"]):
        cli.main(["plan", *asked, "--on", "h200", "--hours", "0.01", "--json"])
        found.append(json.loads(capsys.readouterr().out))
    all_runs, one = found
    assert (all_runs["run"]["runs"], all_runs["run"]["steps"], one["run"]["runs"]) == (5, 500, 1)
    for name in ("seen", "exaflops"):
        assert all_runs["run"][name] == pytest.approx(5 * one["run"][name])
    hours = [report["modes"]["single"]["hours"] for report in found]
    assert hours[0] == pytest.approx(5 * hours[1])
    assert "5 runs of all the steps: the search tries 0.001, 0.003, 0.01, 0.03" in all_runs["notes"][0]
    assert all_runs["notes"][1] == f"{one['notes'][0]} of each run"


def test_published_names_say_their_shape() -> None:
    """All of them: the table's counts are those of the files."""
    for name, entry in PUBLISHED.items():
        assert cost.parameters(shape(name)) == entry.parameters, name


def test_a_plan_fetches_no_published_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plan as for a model of that shape; an address that the table does not have is asked for."""

    def away(address: str, *_: object) -> Path:
        raise hub.UnreachableError(f"{address} cannot be reached")

    monkeypatch.setattr(hub, "fetch", away)
    for start in ("--model ViT-B/16", "--init vit_b16_orig_i21k_224", "--init vit_b16_augreg_i21k_i1k_384"):
        cli.main(["plan", "ft-cifar10", *start.split(), "--preprocess.crop", "0.9", "--json"])
    ours, *theirs = capsys.readouterr().out.replace("}\n{", "}\0{").split("\0")
    assert [json.loads(one) for one in theirs] == [json.loads(ours)] * 2
    assert plan(recipe("ft-cifar10").replace(init="vit_b16_orig_i21k_224")) == json.loads(ours)
    for verb, hint in (("plan", "; or plan without it: --model NAME, of the same shape"), ("finetune", "")):
        with pytest.raises(SystemExit):
            cli.main([verb, "ft-cifar10", "--init", "hf:org/name"])
        assert capsys.readouterr().err == f"plainvit: org/name cannot be reached{hint}\n"


def test_a_recipes_model_takes_another_size(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", "digits", "--image-size", "16", "--on", "h200", "--json"])
    assert json.loads(capsys.readouterr().out)["tokens"] == 64
    config = recipe("digits")
    with pytest.raises(ValueError, match="image_size 16 is for init's model, and there is none: this has 8 x 8"):
        resolve(config.replace(image_size=16), open_splits(config))
