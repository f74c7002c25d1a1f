"""Checkpoints of training codes that give the model a prefix and keep more than the model: Lightning, DDP, Trainer."""

import fractions
import logging
from pathlib import Path
from typing import Any

import pytest
import test_weights_load as loading
import tiny
import torch

import plainvit
from plainvit.weights.files import open_file

State = dict[str, torch.Tensor]


def lightning(state: State, **more: Any) -> dict[str, Any]:
    """What Lightning's Trainer.save_checkpoint writes, as far as it is plain values."""
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"completed": 3}}}}
    saved = {"epoch": 3, "global_step": 120, "pytorch-lightning_version": "2.5.0", "loops": loops, "callbacks": {}}
    saved |= {
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}],
        "lr_schedulers": [],
    }
    return saved | {"state_dict": state, "hyper_parameters": {"lr": 1e-3, "name": "vit"}} | more


def bare(kind: str, folder: Path) -> tuple[State, Any]:
    """Weights under a library's own names, and the model that they are."""
    path = loading.bare(kind, (32, 32), folder)
    tensors = open_file(path)
    return {name: tensors.read(name) for name in tensors.shapes}, plainvit.load(path, heads=4)


def same(loaded: Any, wanted: Any) -> bool:
    weights = wanted.state_dict()
    return loaded.config == wanted.config and all(
        torch.equal(x, weights[name]) for name, x in loaded.state_dict().items()
    )


PREFIXES = ["model.", "net.", "model._orig_mod.", "module.", "module.model.", "_forward_module.model.", "my_vit."]


@pytest.mark.parametrize(("kind", "prefix"), [(loading.BARE[at % 3], prefix) for at, prefix in enumerate(PREFIXES)])
def test_prefix_is_removed_and_other_weights_are_named(
    tmp_path: Path, kind: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, wanted = bare(kind, tmp_path)
    inside = {prefix + name: x for name, x in state.items()}
    saved = lightning({"loss.weight": torch.ones(7)} | inside | {"train_acc.total": torch.ones(1)})
    torch.save(saved, tmp_path / "last.ckpt")
    caplog.clear()
    assert same(plainvit.load(tmp_path / "last.ckpt", heads=4), wanted)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("loss.weight" in line and "train_acc.total" in line for line in lines) == 1
    torch.save(lightning(inside), tmp_path / "last.ckpt")
    caplog.clear()
    plainvit.load(tmp_path / "last.ckpt", heads=4)
    assert "left out" not in caplog.text, "there is nothing outside"


def test_head_next_to_a_backbone_belongs_to_it(tmp_path: Path) -> None:
    state, wanted = bare("timm", tmp_path)
    split = {f"model.{name}" if name.startswith("head.") else f"model.backbone.{name}": x for name, x in state.items()}
    torch.save(lightning(split | {"model.loss.weight": torch.ones(7)}), tmp_path / "last.ckpt")
    assert same(plainvit.load(tmp_path / "last.ckpt", heads=4), wanted)


def test_hybrid_under_a_prefix_loads(tmp_path: Path) -> None:
    """It has a stem of its own inside, which is no second model."""
    model = tiny.hybrid(torch.float32, blocks=(1, 1), image_size=(32, 32), numerics="timm")
    path = plainvit.save(model, tmp_path / "m.pth", format="timm")
    state = {f"net.{name}": x for name, x in torch.load(path, weights_only=True).items()}
    torch.save(lightning(state), tmp_path / "last.ckpt")
    assert same(plainvit.load(tmp_path / "last.ckpt", heads=4), plainvit.load(path))


def test_two_models_in_one_file_are_an_error(tmp_path: Path) -> None:
    state, _ = bare("timm", tmp_path)
    both = {f"{prefix}{name}": x for prefix in ("student.", "teacher.") for name, x in state.items()}
    torch.save(lightning(both), tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"student\..*teacher\."):
        plainvit.load(tmp_path / "last.ckpt", heads=4)


def test_objects_in_a_checkpoint_are_an_error(tmp_path: Path) -> None:
    """With the line of Python that saves the weights alone."""
    state, _ = bare("timm", tmp_path)
    saved = lightning({f"model.{name}": x for name, x in state.items()}, hyper_parameters=fractions.Fraction(1, 3))
    torch.save(saved, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"fractions\.Fraction.*torch\.save\(") as caught:
        plainvit.load(tmp_path / "last.ckpt", heads=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [("checkpoint-90", "checkpoint-500"), ("a.ckpt", "b.ckpt"), ("checkpoints/a.ckpt",)])
def test_folder_of_checkpoints_is_an_error_that_names_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    """As transformers' Trainer and Lightning leave it; with weights of its own it is loaded."""
    for name in names:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix:
            path.touch()
        else:
            loading.hub_folder(path, "ViT", None)
    with pytest.raises(ValueError, match=names[-1]) as caught:
        plainvit.load(tmp_path / "run")
    assert "\n" not in str(caught.value)
    if names[0].startswith("checkpoint-"):
        assert str(caught.value).endswith("checkpoint-500"), "the newest is the one to give"
        loading.hub_folder(tmp_path / "run", "ViT", None)
        assert plainvit.load(tmp_path / "run").config.classes == 7
