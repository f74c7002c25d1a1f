"""Losses against PyTorch's own and by hand; a tiny model overfits one batch under each optimizer and loss."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
import torch
import torch.nn.functional as F
from tiny import mostly_slow

from plainvit.config import Augment, Config, Optim
from plainvit.data.loader import Batch
from plainvit.data.mix import soft_labels
from plainvit.models import ViT, create
from plainvit.train.objectives import Classify, binary_loss, sigmoid_loss, softmax_loss
from plainvit.train.optim import Optimizers
from plainvit.train.run import fit
from plainvit.train.schedule import learning_rate

PLAIN = Augment(crop="none", flip=0.0)
SMALL = {"width": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "patch": (4, 4), "image_size": 16}


def batch(count: int = 8, size: int = 16, classes: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.arange(count) % classes, np.arange(count))


def small(**settings: object) -> ViT:
    model = create("ViT-Ti/4", classes=5, seed=0, **SMALL | settings)
    assert isinstance(model, ViT)
    return model


def fill_randomly(model: torch.nn.Module) -> None:
    for seed, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(seed))


def numbers(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5, generator=generator) * 3
    labels = torch.randint(0, 5, (6,), generator=generator)
    return logits, labels, soft_labels(labels, 5)


def test_softmax_is_cross_entropy() -> None:
    logits, labels, targets = numbers()
    torch.testing.assert_close(softmax_loss(logits, targets), F.cross_entropy(logits, labels, reduction="none"))
    smoothed = soft_labels(labels, 5, 0.1)
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(softmax_loss(logits, smoothed), expected)


def test_sigmoid_sums_over_the_classes() -> None:
    logits, _, targets = numbers()
    p = torch.sigmoid(logits.double())
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1)
    torch.testing.assert_close(sigmoid_loss(logits, targets).double(), expected, rtol=1e-5, atol=1e-5)


def test_binary_is_the_mean_of_yes_or_no() -> None:
    logits, labels, targets = numbers()
    mixed = 0.7 * targets + 0.3 * targets.flip(0)
    expected = F.binary_cross_entropy_with_logits(logits, (mixed > 0).float())
    torch.testing.assert_close(binary_loss(logits, mixed).mean(), expected)
    assert (labels != labels.flip(0)).any()


def test_class_weights_are_torchs_up_to_scale() -> None:
    model, counts = small(), torch.tensor([4, 1, 1, 1, 1])
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    one = batch()
    objective = Classify(model.eval(), Config(class_weights=True, augment=PLAIN), counts)
    loss, _ = objective(*objective.make_inputs(one, 0))
    weights = 8 / (counts * 5.0)
    expected = F.cross_entropy(model(one.images), one.labels, weight=weights, reduction="sum") / 8
    torch.testing.assert_close(loss, expected)


def test_mixed_targets_reach_the_loss() -> None:
    model = small()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    one = batch()
    objective = Classify(model.eval(), Config(augment=PLAIN.replace(mixup=1.0), seed=3))
    images, targets, labels = objective.make_inputs(one, step=7)
    share = targets[0].max().item()
    assert 0.5 < share < 1
    expected_images = share * one.images[0] / 255 + (1 - share) * one.images[1] / 255
    torch.testing.assert_close(images[0], expected_images)
    log_p = F.log_softmax(model(images), -1)
    expected = -(share * log_p[0, 0] + (1 - share) * log_p[0, 1])
    torch.testing.assert_close(objective.loss(model(images), targets)[0], expected)
    assert torch.equal(labels, one.labels)


def test_a_hard_teacher_is_deits() -> None:
    """DeiT: half the loss on the class token's head and the label, half on the other's and the teacher's choice."""
    student, teacher = small(distillation=True), small()
    fill_randomly(student)
    fill_randomly(teacher)
    teacher.eval()
    objective = Classify(student.train(), Config(augment=PLAIN), teacher=teacher)
    one = batch()
    loss, _ = objective(*objective.make_inputs(one, 0))
    own, other = student(one.images)
    choice = teacher(one.images).argmax(-1)
    expected = (F.cross_entropy(own, one.labels) + F.cross_entropy(other, choice)) / 2
    torch.testing.assert_close(loss, expected)
    assert not any(name.startswith("teacher") for name, _ in objective.named_parameters())


def test_two_heads_without_a_teacher_learn_as_inference_uses_them() -> None:
    """The loss is that of their mean, and every parameter has a gradient, as DDP needs."""
    model = small(distillation=True)
    fill_randomly(model)
    objective, one = Classify(model.train(), Config(augment=PLAIN)), batch()
    loss, correct = objective(*objective.make_inputs(one, 0))
    loss.backward()
    logits = model.eval()(one.images)
    torch.testing.assert_close(loss, F.cross_entropy(logits, one.labels))
    assert correct == (logits.argmax(-1) == one.labels).sum()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_teacher_has_the_precision_of_the_run_and_images_of_its_own_size(precision: Any, dtype: torch.dtype) -> None:
    teacher = small(image_size=32).eval()
    seen: list[torch.dtype] = []
    teacher.blocks[0].mlp.fc1.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    objective = Classify(small(), Config(augment=PLAIN, precision=precision), teacher=teacher)
    predicted = objective.make_inputs(batch(), 0)[3]
    assert (seen, predicted.dtype, predicted.shape) == ([dtype], torch.float32, (8, 5))


@pytest.mark.parametrize("loss", ["softmax", *(pytest.param(k, marks=pytest.mark.slow) for k in ("sigmoid", "binary"))])
@pytest.mark.parametrize("name", mostly_slow(["adamw", "sgd", "lamb", "muon"], 2))
def test_one_batch_is_learned_by_heart(name: str, loss: str) -> None:
    sgd = {"softmax": 0.3, "sigmoid": 0.1, "binary": 1.0}[loss]
    lr = {"adamw": 1e-2, "sgd": sgd, "lamb": 2e-2, "muon": 2e-2}[name]
    optim = Optim(name=name, lr=lr, warmup=10)  # pyright: ignore[reportArgumentType]
    config = Config(loss=loss, optim=optim, augment=PLAIN)  # pyright: ignore[reportArgumentType]
    model, one, steps = small(), batch(), 200
    objective = Classify(model.train(), config)
    ours = Optimizers(model, model.named_parameters(), optim)
    value = math.inf
    for step in range(steps):
        ours.set_rate(learning_rate(optim, step, steps))
        result, correct = objective(*objective.make_inputs(one, step))
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours.step()
        ours.zero_grad()
        value = result.item()
    assert value < 0.01
    assert correct == 8


def test_a_loss_of_ones_own_trains_as_the_same_loss_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--loss FILE.py:FUNCTION. A run folder cannot make `replay` execute a file that it names."""
    own = tmp_path / "my.py"
    own.write_text("def mine(logits, targets):\n    return -(targets * logits.float().log_softmax(-1)).sum(-1)\n")
    numbers = [
        fit(small_runs.config(loss=loss), tmp_path / str(i), quiet=True, bare=True).metrics["val"]["nll"]
        for i, loss in enumerate(("softmax", f"{own}:mine"))
    ]
    assert numbers[0] == numbers[1]
    assert "mine" in small_runs.error_of(capsys, "replay", tmp_path / "1")
    for wrong in (f"{own}:other", f"{tmp_path}/absent.py:mine", "focal"):
        with pytest.raises(ValueError, match="--loss"):
            fit(small_runs.config(loss=wrong), tmp_path / "wrong", quiet=True)
