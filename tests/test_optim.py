"""Optimizers, schedules and averaging against torch's own, timm's LAMB and big_vision's formulas."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import timm.optim
import torch
from tiny import vit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plainvit.config import Optim
from plainvit.models import create
from plainvit.runtime.checkpoint import hash_tensors
from plainvit.train.optim import (
    Average,
    Muon,
    Optimizers,
    find_depth,
    has_weight_decay,
)
from plainvit.train.schedule import learning_rate

STEPS = 100


# schedules ------------------------------------------------------------------------------------------------------------


def big_vision(step: int, total: int, kind: str, base: float, warmup: float, cooldown: float, end: float) -> float:
    """big_vision's utils.create_learning_rate_schedule, written down from its description."""
    progress = min(max((step - warmup) / float(total - warmup), 0.0), 1.0)
    if kind == "linear":
        lr = end + (base - end) * (1.0 - progress) ** 1
    elif kind == "cosine":
        lr = base * 0.5 * (1.0 + math.cos(math.pi * progress))
    elif kind == "rsqrt":
        lr = base / math.sqrt(1 + (step - warmup) / 10_000) if warmup <= step else base
    else:
        lr = base
    if warmup:
        lr *= min(1.0, step / warmup)
    if cooldown:
        lr *= min(1.0, (total - step) / cooldown)
    return lr


@pytest.mark.parametrize("kind", ["linear", "cosine", "rsqrt", "constant"])
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 0), (10, 0), (10, 20), (0, 5), (1, 1)])
def test_schedules_are_big_visions(kind: str, warmup: int, cooldown: int) -> None:
    optim = Optim(lr=3e-3, schedule=kind, warmup=warmup, cooldown=cooldown)  # pyright: ignore[reportArgumentType]
    for step in range(STEPS):
        expected = big_vision(step, STEPS, kind, 3e-3, warmup, cooldown, 0.0)
        assert learning_rate(optim, step, STEPS) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_steps_fall_by_ten_at_thirty_sixty_and_ninety_per_cent() -> None:
    optim = Optim(lr=0.003, schedule="steps")
    found = [learning_rate(optim, step, 500) for step in (0, 149, 150, 299, 300, 449, 450, 499)]
    assert found == pytest.approx([3e-3, 3e-3, 3e-4, 3e-4, 3e-5, 3e-5, 3e-6, 3e-6])


def test_a_share_of_the_run_is_that_many_steps() -> None:
    shares, steps = Optim(warmup=0.1, cooldown=0.2), Optim(warmup=10, cooldown=20)
    assert [learning_rate(shares, s, STEPS) for s in range(STEPS)] == [
        learning_rate(steps, s, STEPS) for s in range(STEPS)
    ]


# optimizers -----------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1


def decayed(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Kernels and the rest, told by the paper's rule on module types, not by our names."""
    kernels = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    ids = {id(kernel) for kernel in kernels}
    return kernels, [p for p in model.parameters() if id(p) not in ids]


def test_only_kernels_decay() -> None:
    for name in ("ViT-Ti/16", "R+ViT-Ti/16", "BiT-R26x1"):
        model = create(name, image_size=32, device="meta") if "Bi" in name else create(name, 5, 64, device="meta")
        kernels, _ = decayed(model)
        assert {id(p) for n, p in model.named_parameters() if has_weight_decay(n, p)} == {id(p) for p in kernels}


@pytest.mark.parametrize(
    ("optim", "decay", "theirs", "tolerance"),
    [
        (
            Optim(lr=3e-3, warmup=10, weight_decay=0.3, betas=(0.9, 0.95), eps=1e-7),
            0.3,
            partial(torch.optim.AdamW, lr=1.0, betas=(0.9, 0.95), eps=1e-7),
            1e-12,
        ),
        (Optim(name="sgd", lr=0.03, weight_decay=1e-2), 1e-2, partial(torch.optim.SGD, lr=1.0, momentum=0.9), 1e-12),
        (
            Optim(name="lamb", lr=4e-3, weight_decay=0.05),
            0.05,
            partial(timm.optim.Lamb, lr=1.0, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=None),
            1e-10,
        ),
    ],
    ids=["adamw", "sgd", "lamb"],
)
def test_optimizers_are_those_of_torch_and_timm(optim: Optim, decay: float, theirs: Any, tolerance: float) -> None:
    """With decay on kernels only."""
    model = vit()
    twin = copy.deepcopy(model)
    kernels, rest = decayed(twin)
    reference = theirs([{"params": kernels, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}])
    ours = Optimizers(model, model.named_parameters(), optim)
    for step in range(STEPS):
        lr = learning_rate(optim, step, STEPS)
        ours.set_rate(lr)
        for group in reference.param_groups:
            group["lr"] = lr
        for trained, optimizer in ((model, ours), (twin, reference)):
            gradients(trained, step)
            optimizer.step()
        ours.zero_grad()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def is_block_matrix(name: str) -> bool:
    return "blocks." in name and name.endswith("weight") and "norm" not in name


def test_muon_is_torchs() -> None:
    model = vit(torch.float32)
    twin = copy.deepcopy(model)
    optim = Optim(name="muon", lr=5e-3, momentum=0.95, weight_decay=0.1)
    ours = Optimizers(model, model.named_parameters(), optim)
    theirs = []
    for name, parameter in twin.named_parameters():
        if is_block_matrix(name):
            theirs += [(parameter, part) for part in parameter.detach().chunk(3 if "qkv" in name else 1)]
    parts = [nn.Parameter(part) for _, part in theirs]
    muon = torch.optim.Muon(parts, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(20):
        lr = learning_rate(optim, step + 5, 30)
        ours.set_rate(lr)
        gradients(model, step)
        gradients(twin, step)
        seen: dict[int, int] = {}
        for (whole, _), part in zip(theirs, parts, strict=True):
            at = seen.setdefault(id(whole), 0)
            part.grad = whole.grad[at : at + len(part)]
            seen[id(whole)] += len(part)
        muon.param_groups[0]["lr"] = lr
        ours.step()
        muon.step()
    mine = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        if is_block_matrix(name):
            torch.testing.assert_close(mine[name], parameter, rtol=0.02, atol=2e-4)  # both iterate in bf16


def test_muon_leaves_the_rest_to_adamw() -> None:
    model = vit()
    ours = Optimizers(model, model.named_parameters(), Optim(name="muon", lr=0.01))
    muon, adam = ours.all
    assert isinstance(muon, Muon)
    assert isinstance(adam, torch.optim.AdamW)
    inside = {p.data_ptr() for group in muon.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (parameter.data_ptr() in inside) == is_block_matrix(name)


@pytest.mark.parametrize("graphs", [False, True])
def test_layer_decay_slows_the_lower_layers(graphs: bool) -> None:
    model = vit(depth=3)
    optim = Optim(lr=1.0, layer_decay=0.5)
    ours = Optimizers(model, model.named_parameters(), optim, graphs=graphs)
    ours.set_rate(1.0)
    lr = {p.data_ptr(): g["lr"] for one in ours.all for g in one.param_groups for p in g["params"]}
    found = {name: lr[p.data_ptr()] for name, p in model.named_parameters()}
    assert found["head.weight"] == found["norm.weight"] == 1.0
    assert [found[f"blocks.{i}.mlp.fc1.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["embedding.weight"] == found["positions.0.table"] == found["class_token"] == 0.0625


def test_layer_decay_counts_the_stages_of_a_resnet() -> None:
    names = [name for name, _ in create("BiT-R26x1", device="meta").named_parameters()]
    depths = {name: find_depth(name, 4) for name in names}
    assert (depths["body.root.weight"], depths["head.weight"]) == (0, 5)
    assert {depths[name] for name in names if ".stages.2." in name} == {3}


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "muon"])
def test_a_restored_optimizer_continues_bit_for_bit(name: str) -> None:
    optim = Optim(name=name, lr=1e-2, weight_decay=0.1)  # pyright: ignore[reportArgumentType]
    model = vit()
    ours = Optimizers(model, model.named_parameters(), optim)

    def take(which: Optimizers, of: nn.Module, steps: range) -> None:
        for step in steps:
            which.set_rate(learning_rate(optim, step, 20))
            gradients(of, step)
            which.step()

    take(ours, model, range(7))
    twin = copy.deepcopy(model)
    other = Optimizers(twin, twin.named_parameters(), optim)
    other.load({key: value.clone() for key, value in ours.state().items()}, updates=7)
    take(ours, model, range(7, 20))
    take(other, twin, range(7, 20))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert hash_tensors(ours.state()) == hash_tensors(other.state())


@pytest.mark.parametrize(("name", "device"), [("adamw", "cuda"), ("lamb", "cpu")])
def test_counters_are_restored_to_where_a_new_state_has_them(name: str, device: str) -> None:
    """On the host for LAMB, which would wait for the device at every parameter otherwise."""
    optim = Optim(name=name)  # pyright: ignore[reportArgumentType]
    model = vit()
    with FakeTensorMode(allow_non_fake_inputs=True):  # no GPU is needed to see where tensors lie
        parameter = nn.Parameter(torch.zeros(3, 2, device="cuda"))
        ours = Optimizers(model, [("head.weight", parameter)], optim)
        stored = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(3, 2), "exp_avg_sq": torch.zeros(3, 2)}
        ours.load({f"head.weight:{key}": value for key, value in stored.items()}, updates=7)
        found = {key: value.device.type for key, value in ours.all[0].state[parameter].items()}
    assert found == {"step": device, "exp_avg": "cuda", "exp_avg_sq": "cuda"}


# averages -------------------------------------------------------------------------------------------------------------


def test_averages_are_torchs_once_the_window_is_full() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = vit()
    ours, theirs = Average(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # its first call copies
    for step in range(STEPS):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        ours.update(step + 1000)  # far from the start, where the decay is the one given
        theirs.update_parameters(model)
    for name, parameter in theirs.module.named_parameters():
        torch.testing.assert_close(ours.weights[name], parameter, rtol=1e-5, atol=1e-6)
