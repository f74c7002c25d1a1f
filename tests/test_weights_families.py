"""CLIP, SigLIP, DINO, EVA-02, BEiT, AIMv2, I-JEPA: features equal to the libraries' own models, and exact round trips.

Models are small and random; each is saved by its own library, loaded from the folder, and compared in float64.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
import torch
import transformers
from peers import scramble
from torch import Tensor

import plainvit
from plainvit.models.fast import accelerate

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
GRID = {"image_size": 24, "patch_size": 8}
SMALL = SHAPE | GRID
LABELS = {"num_labels": 5}


def clip(kind: str, **settings: Any) -> Any:
    return getattr(transformers, kind)(transformers.CLIPVisionConfig(**SMALL, projection_dim=16, **settings))


def dinov2(kind: str = "Dinov2Model", **settings: Any) -> Any:
    config = transformers.Dinov2WithRegistersConfig if "Registers" in kind else transformers.Dinov2Config
    return getattr(transformers, kind)(config(**SMALL, **settings))


def dinov3(**settings: Any) -> Any:
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**SMALL, **settings))


def beit(**settings: Any) -> Any:
    settings = {"use_relative_position_bias": True} | settings
    return transformers.BeitForImageClassification(transformers.BeitConfig(**SMALL, **LABELS, **settings))


# Name -> (model, what it computes from pixels)
Peer = tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]
PEERS: dict[str, Peer] = {
    "clip": (lambda: clip("CLIPVisionModel"), lambda m, x: m(x).pooler_output),
    "clip gelu": (lambda: clip("CLIPVisionModel", hidden_act="gelu"), lambda m, x: m(x).pooler_output),
    "clip projection": (lambda: clip("CLIPVisionModelWithProjection"), lambda m, x: m(x).image_embeds),
    "clip classifier": (
        lambda: transformers.CLIPForImageClassification(transformers.CLIPConfig(vision_config=SMALL, **LABELS)),
        lambda m, x: m(x).logits,
    ),
    "siglip": (
        lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL)),
        lambda m, x: m(x).pooler_output,
    ),
    "siglip classifier": (
        lambda: transformers.SiglipForImageClassification(transformers.SiglipConfig(vision_config=SMALL, **LABELS)),
        lambda m, x: m(x).logits,
    ),
    "dinov2": (dinov2, lambda m, x: m(x).pooler_output),
    "dinov2 gated": (lambda: dinov2(use_swiglu_ffn=True), lambda m, x: m(x).pooler_output),
    "dinov2 classifier": (lambda: dinov2("Dinov2ForImageClassification", **LABELS), lambda m, x: m(x).logits),
    "dinov2 registers": (
        lambda: dinov2("Dinov2WithRegistersModel", num_register_tokens=3),
        lambda m, x: m(x).pooler_output,
    ),
    "dinov3": (lambda: dinov3(num_register_tokens=3), lambda m, x: m(x).pooler_output),
    "dinov3 gated": (lambda: dinov3(use_gated_mlp=True, hidden_act="silu"), lambda m, x: m(x).pooler_output),
    "dinov3 no bias": (lambda: dinov3(query_bias=False, value_bias=False), lambda m, x: m(x).pooler_output),
    "ijepa": (
        lambda: transformers.IJepaForImageClassification(transformers.IJepaConfig(**SMALL, **LABELS)),
        lambda m, x: m(x).logits,
    ),
    "beit": (beit, lambda m, x: m(x).logits),
    "beit token": (lambda: beit(use_mean_pooling=False), lambda m, x: m(x).logits),
    "aimv2": (
        lambda: transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**SMALL, use_head=False)),
        lambda m, x: m(x).last_hidden_state.mean(1),
    ),
}
# Largest difference in float64: transformers computes rotary angles and RMSNorm in fp32
CLOSE = {name: 2e-6 if name.startswith(("dinov3", "aimv2")) else 1e-10 for name in PEERS}


def make(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    peer = PEERS[name][0]().eval()
    scramble(peer)
    peer.save_pretrained(folder)
    return peer.double()


def normalise(model: Any, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(x, dtype=images.dtype)[:, None, None] for x in (model.config.mean, model.config.std))
    return (images - mean) / std


@pytest.mark.parametrize("name", PEERS)
def test_output_equals_transformers(tmp_path: Path, name: str) -> None:
    peer = make(name, tmp_path)
    model = plainvit.load(tmp_path).double()
    images = tiny.images(2, (24, 24))
    theirs = PEERS[name][1](peer, normalise(model, images))
    assert tiny.difference(model(images), theirs) < CLOSE[name]
    assert tiny.difference(accelerate(model)(images), theirs) < CLOSE[name]


@pytest.mark.parametrize("name", PEERS)
def test_written_folder_equals_the_original(tmp_path: Path, name: str) -> None:
    make(name, tmp_path / "a")
    model = plainvit.load(tmp_path / "a")
    if name == "clip classifier":
        with pytest.raises(ValueError, match="head"):
            plainvit.save(model, tmp_path / "b", format="transformers")
        return
    plainvit.save(model, tmp_path / "b", format="transformers")
    original = safetensors.torch.load_file(tmp_path / "a/model.safetensors")
    written = safetensors.torch.load_file(tmp_path / "b/model.safetensors")
    if name != "siglip classifier":  # a plain ViT with average pooling is written as I-JEPA
        assert all(torch.equal(original[key], tensor) for key, tensor in written.items())
        lost = {key.rsplit(".", 1)[-1] for key in original.keys() - written.keys()}
        assert lost <= {"mask_token", "register_tokens"}
    kind = transformers.IJepaForImageClassification if name == "siglip classifier" else type(PEERS[name][0]())
    again = kind.from_pretrained(tmp_path / "b").double().eval()
    images = tiny.images(2, (24, 24))
    theirs = PEERS[name][1](again, normalise(model, images))
    assert tiny.difference(model.double()(images), theirs) < CLOSE[name]
