"""Weights in and out, side by side with the libraries themselves: timm, transformers and torchvision.

Each library builds a small model with random weights and writes it; plainvit loads the file and must give the
library's own logits, to 1e-10 in float64 and to 1e-5 of their scale in fp32. Then the other way: plainvit writes, and
the library loads with its own strict loader. Pixels are normalised outside plainvit, by the loaded config.
"""

import io
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import timm
import tiny
import torch
import torchvision
import transformers
from peers import scramble
from pictures import photo
from PIL import Image
from timm.layers import HybridEmbed, StdConv2d
from timm.models import save_for_hf
from timm.models.deit import VisionTransformerDistilled
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import _resnetv2
from torch import Tensor, nn
from torchvision.models import VisionTransformer as TorchvisionViT
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.utils import logging as transformers_logging

import plainvit
from plainvit.config import About, Preprocess
from plainvit.data.transforms import preprocess_image
from plainvit.models import ViT
from plainvit.weights import inspect_weights

transformers_logging.disable_progress_bar()
EXACT, CLOSE = 1e-10, 1e-5
State = dict[str, Tensor]


# Comparing ------------------------------------------------------------------------------------------------------------


def normalised(images: Tensor, model: Any) -> Tensor:
    """What the model's config says of pixels, computed here."""
    mean, std = (torch.tensor(values, dtype=images.dtype) for values in (model.config.mean, model.config.std))
    return (images - mean[:, None, None]) / std[:, None, None]


def answer(peer: nn.Module, pixels: Tensor) -> Tensor:
    """Logits of a peer, or the representation of one without a head."""
    out = peer(pixels)
    for name in ("logits", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return out if isinstance(out, Tensor) else out.last_hidden_state[:, 0]


@torch.inference_mode()
def gap(model: Any, peer: nn.Module, size: tuple[int, int] | None = None) -> float:
    """Largest difference on random images, relative to the largest logit where the model is in fp32."""
    weight = next(model.parameters())
    images = tiny.images(size=size or model.config.image_size, channels=model.config.channels, dtype=weight.dtype)
    theirs = answer(peer.to(weight.dtype).eval(), normalised(images, model))
    scale = theirs.abs().max().item() if weight.dtype is torch.float32 else 1.0
    return tiny.difference(model(images), theirs) / scale


def check(path: Path, peer: nn.Module, size: tuple[int, int] | None = None, **hints: Any) -> Any:
    """The file against the library's model, in both precisions; returns the float64 model."""
    model = plainvit.load(path, dtype=None, **hints)
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float64}
    assert gap(model, peer, size) < EXACT
    single = plainvit.load(path, **hints)
    assert {weight.dtype for weight in single.state_dict().values()} == {torch.float32}
    assert gap(single, peer, size) < CLOSE
    return model


def write(state: State, path: Path) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({name: x.contiguous() for name, x in state.items()}, path)
    else:
        torch.save(state, path)
    return path


# timm in --------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 7}


def timm_vit(kind: type[VisionTransformer] = VisionTransformer, **settings: Any) -> VisionTransformer:
    peer = kind(**{"img_size": 32, "patch_size": 8} | SMALL | settings).double().eval()
    scramble(peer)
    return peer


def timm_hybrid(blocks: tuple[int, ...], patch: int, size: tuple[int, int]) -> VisionTransformer:
    embed = partial(HybridEmbed, backbone=_resnetv2(layers=blocks))
    return timm_vit(img_size=size, patch_size=patch, embed_layer=embed)


def timm_bit(blocks: tuple[int, ...]) -> ResNetV2:
    peer = ResNetV2(list(blocks), num_classes=7, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8)).double()
    scramble(peer)
    return peer.eval()


# timm's settings, and what a bare file of them cannot say
TIMM: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "registers without rows": ({"reg_tokens": 3, "no_embed_class": True}, {}),
    "registers with rows": ({"reg_tokens": 3}, {}),
    "no_embed_class": ({"no_embed_class": True}, {}),
    "LayerScale": ({"init_values": 0.1}, {}),
    "average, fc_norm": ({"global_pool": "avg"}, {}),
    "map": ({"global_pool": "map"}, {}),
    "map, no class token": ({"global_pool": "map", "class_token": False}, {}),
    "average, no class token": ({"global_pool": "avg", "class_token": False}, {}),
    "average, no class token, norm": ({"global_pool": "avg", "class_token": False, "fc_norm": False}, {}),
    "no class token, registers": (
        {"global_pool": "avg", "class_token": False, "reg_tokens": 2, "no_embed_class": True},
        {},
    ),
    "no positions": ({"pos_embed": "none"}, {"image_size": 32}),
    "one channel": ({"in_chans": 1}, {}),
    "headless": ({"num_classes": 0}, {}),
    "wide, by image size": ({"img_size": (24, 40)}, {"image_size": (24, 40)}),
    "tall, by grid": ({"img_size": (40, 24)}, {"grid": (5, 3)}),
    "a square number of tokens that is no square": ({"img_size": (16, 64)}, {"grid": (2, 8)}),
    "rectangular patch": ({"img_size": (36, 16), "patch_size": (12, 8)}, {"image_size": (36, 16)}),
    "registers with rows, wide": ({"img_size": (24, 40), "reg_tokens": 2}, {"image_size": (24, 40)}),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(("theirs", "hints"), TIMM.values(), ids=TIMM)
def test_loaded_timm_model_equals_timm(
    tmp_path: Path, theirs: dict[str, Any], hints: dict[str, Any], suffix: str
) -> None:
    peer = timm_vit(**theirs)
    path = write(peer.state_dict(), tmp_path / f"model{suffix}")
    check(path, peer, heads=4, **hints)


def test_loaded_distilled_deit_equals_timm(tmp_path: Path) -> None:
    peer = timm_vit(VisionTransformerDistilled)
    model = check(write(peer.state_dict(), tmp_path / "model.bin"), peer, heads=4)
    assert model.config.distillation


# stages, patch and image size: as /16, the root alone under patches, and rectangles
HYBRIDS = [((1, 2), 1, (32, 32)), ((1, 1, 1), 1, (80, 48)), ((), 8, (64, 64)), ((), 4, (32, 64))]


@pytest.mark.parametrize(("blocks", "patch", "size"), HYBRIDS)
def test_loaded_hybrid_equals_timm(tmp_path: Path, blocks: tuple[int, ...], patch: int, size: tuple[int, int]) -> None:
    peer = timm_hybrid(blocks, patch, size)
    path = write(peer.state_dict(), tmp_path / "model.safetensors")
    model = check(path, peer, heads=4, image_size=None if size[0] == size[1] else size)
    assert model.config.stem.blocks == blocks


def test_loaded_bit_equals_timm(tmp_path: Path) -> None:
    peer = timm_bit((2, 1))
    model = check(write(peer.state_dict(), tmp_path / "model.safetensors"), peer, size=(33, 21))
    assert model.config.blocks == (2, 1)


def timm_folder(folder: Path, arguments: dict[str, Any], config: dict[str, Any] | None = None) -> nn.Module:
    """A folder as timm itself writes it for the hub, of a model that is not of the architecture's own shape."""
    peer = timm.create_model("vit_base_patch16_224", **arguments).double().eval()
    scramble(peer)
    save_for_hf(peer, str(folder), config, arguments, safe_serialization=True)
    return peer


FOLDER: dict[str, Any] = {"img_size": 32, "patch_size": 8} | SMALL
TIMM_FOLDERS: dict[str, dict[str, Any]] = {
    "heads that no convention has": {"embed_dim": 64, "num_heads": 4},
    "tanh GELU": {"act_layer": "gelu_tanh"},
    "average, norm": {"global_pool": "avg", "fc_norm": False},
    "token, fc_norm": {"global_pool": "token", "fc_norm": True},
    "average, fc_norm": {"global_pool": "avg"},
}


@pytest.mark.parametrize("arguments", TIMM_FOLDERS.values(), ids=TIMM_FOLDERS)
def test_timm_folder_needs_no_hints(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Nothing is given by the caller: config.json's model_args have it all."""
    peer = timm_folder(tmp_path, FOLDER | arguments)
    check(tmp_path, peer)


@pytest.mark.parametrize("size", [(24, 40), (16, 64)], ids=["3 x 5", "2 x 8, a square number"])
def test_timm_folder_has_the_grid(tmp_path: Path, size: tuple[int, int]) -> None:
    peer = timm_folder(tmp_path, FOLDER | {"img_size": size})
    described = json.loads((tmp_path / "config.json").read_text())
    described["pretrained_cfg"]["input_size"] = [3, *size]  # what timm has there for a published model of that size
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert check(tmp_path, peer, heads=4).config.grid == (size[0] // 8, size[1] // 8)
    other = plainvit.load(tmp_path, heads=4, image_size=(40, 40))
    assert other.config.grid == (5, 5)


def test_timm_folder_has_pixels_and_class_names(tmp_path: Path) -> None:
    names = ["tench", "goldfish", "shark", "ray", "cock", "hen", "ostrich"]
    peer = timm_folder(tmp_path, FOLDER, {"label_names": list(names)})
    peer.pretrained_cfg |= {
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
        "crop_pct": 0.7,
        "interpolation": "lanczos",
    }
    save_for_hf(peer, str(tmp_path), {"label_names": list(names)}, FOLDER, safe_serialization=True)
    model = check(tmp_path, peer, heads=4)
    assert (model.config.mean, model.config.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (model.about.preprocess.crop, model.about.preprocess.interpolation) == (0.7, "lanczos")
    assert model.about.class_names == tuple(names)


@pytest.mark.parametrize("pool", ["avgmax", "max"])
def test_unsupported_pooling_is_an_error(tmp_path: Path, pool: str) -> None:
    timm_folder(tmp_path, FOLDER | {"global_pool": pool, "fc_norm": False})
    with pytest.raises(ValueError, match=pool):
        plainvit.load(tmp_path, heads=4)


@pytest.mark.parametrize("arguments", [{"norm_layer": "rmsnorm"}, {"pool_include_prefix": True}])
def test_unsupported_timm_arguments_are_errors(tmp_path: Path, arguments: dict[str, Any]) -> None:
    timm_folder(tmp_path, FOLDER)
    described = json.loads((tmp_path / "config.json").read_text())
    described["model_args"] |= arguments
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=next(iter(arguments))):
        plainvit.load(tmp_path)


def test_unknown_timm_architecture_is_an_error(tmp_path: Path) -> None:
    """Its heads, activation and positions are not guessed at; without config.json they are assumptions."""
    timm_folder(tmp_path, {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2})
    described = json.loads((tmp_path / "config.json").read_text())
    del described["model_args"]
    (tmp_path / "config.json").write_text(json.dumps(described | {"architecture": "vit_of_tomorrow"}))
    with pytest.raises(ValueError, match="vit_of_tomorrow"):
        plainvit.load(tmp_path)
    sources = plainvit.load(tmp_path / "model.safetensors").about.sources
    assert sources["heads"].startswith("assumed")
    assert sources["activation"].startswith("assumed")


def test_unsupported_crop_mode_is_an_assumption(tmp_path: Path) -> None:
    peer = timm_folder(tmp_path, FOLDER)
    peer.pretrained_cfg |= {"crop_mode": "border"}
    save_for_hf(peer, str(tmp_path), None, FOLDER, safe_serialization=True)
    assert plainvit.load(tmp_path).about.sources["preprocess"].startswith("assumed")


# timm out -------------------------------------------------------------------------------------------------------------

GREY = {"mean": (0.4,), "std": (0.3,)}
# our settings, and timm's
OUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "registers without rows": (
        {"registers": 3, "posemb_prefix": "none"},
        {"reg_tokens": 3, "no_embed_class": True},
    ),
    "registers with rows": ({"registers": 3, "posemb_prefix": "all"}, {"reg_tokens": 3}),
    "no_embed_class": ({"posemb_prefix": "none"}, {"no_embed_class": True}),
    "LayerScale": ({"layer_scale": 0.1}, {"init_values": 0.1}),
    "average, fc_norm": ({"pool": "average", "norm_pooled": True}, {"global_pool": "avg"}),
    "token, fc_norm": ({"norm_pooled": True}, {"fc_norm": True}),
    "map": ({"pool": "attention"}, {"global_pool": "map"}),
    "average, no class token": (
        {"pool": "average", "class_token": False},
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "no positions": ({"posemb": "none"}, {"pos_embed": "none"}),
    "square": ({"image_size": 32}, {"img_size": 32}),
    "rectangular patch": (
        {"image_size": (36, 16), "patch": (12, 8)},
        {"img_size": (36, 16), "patch_size": (12, 8)},
    ),
    "one channel": ({"channels": 1} | GREY, {"in_chans": 1}),
    "headless": ({"classes": 0}, {"num_classes": 0}),
    "ImageNet pixels": ({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, {}),
}


@pytest.mark.parametrize(("ours", "theirs"), OUT.values(), ids=OUT)
def test_timm_loads_our_file(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    model = tiny.vit(numerics="timm", **ours)
    peer = timm_vit(**{"img_size": (24, 40), "depth": 3} | theirs)
    for suffix in (".safetensors", ".pth"):
        path = plainvit.save(model, tmp_path / f"model{suffix}", format="timm")
        scramble(peer, seed=9)
        read = safetensors.torch.load_file if suffix == ".safetensors" else partial(torch.load, weights_only=True)
        peer.load_state_dict(read(path), strict=True)
        assert gap(model, peer) < EXACT


def test_timm_loads_our_distilled_deit(tmp_path: Path) -> None:
    model = tiny.vit(numerics="timm", distillation=True)
    peer = timm_vit(VisionTransformerDistilled, img_size=(24, 40), depth=3)
    plainvit.save(model, tmp_path / "m.pth", format="timm")
    peer.load_state_dict(torch.load(tmp_path / "m.pth", weights_only=True), strict=True)
    assert gap(model, peer) < EXACT


@pytest.mark.parametrize(("blocks", "patch", "size"), HYBRIDS)
def test_timm_loads_our_hybrids(tmp_path: Path, blocks: tuple[int, ...], patch: int, size: tuple[int, int]) -> None:
    model = tiny.hybrid(blocks=blocks, patch=patch, image_size=size, numerics="timm")
    peer = timm_hybrid(blocks, patch, size)
    path = plainvit.save(model, tmp_path / "m.safetensors", format="timm")
    scramble(peer, seed=9)
    peer.load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert gap(model, peer) < EXACT


def test_timm_loads_our_bit(tmp_path: Path) -> None:
    model, peer = tiny.bit(blocks=(1, 2), numerics="timm"), timm_bit((1, 2))
    path = plainvit.save(model, tmp_path / "m.safetensors", format="timm")
    scramble(peer, seed=9)
    peer.load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert gap(model, peer, size=(21, 33)) < EXACT


def from_folder(folder: Path) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("ours", [ours for ours, _ in OUT.values()], ids=OUT)
def test_timm_creates_a_model_from_our_folder(tmp_path: Path, ours: dict[str, Any], activation: str) -> None:
    model = tiny.vit(torch.float32, numerics="timm", activation=activation, **ours)
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    assert gap(model, from_folder(folder)) < CLOSE


def test_timm_reads_our_pixels_and_names(tmp_path: Path) -> None:
    model = tiny.vit(torch.float32, numerics="timm", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    settings = timm.data.resolve_model_data_config(from_folder(folder))
    assert (*settings["mean"], *settings["std"]) == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert tuple(settings["input_size"]) == (3, 24, 40)


@pytest.mark.parametrize("resize", ["squash", "crop", "squash-crop"])
def test_timm_crops_like_plainvit(tmp_path: Path, resize: str) -> None:
    """A square resize cuts nothing, whatever `crop` says: that is of the other kind."""
    model = tiny.vit(torch.float32, numerics="timm", image_size=32)
    model.about = About(preprocess=Preprocess(resize=resize, crop=0.5))
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    photo = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8).repeat(32, 0).repeat(32, 1)
    settings = timm.data.resolve_model_data_config(from_folder(folder))
    theirs = timm.data.create_transform(**settings, is_training=False)(Image.fromarray(photo)).numpy()
    ours = preprocess_image(photo, model.about.preprocess, (32, 32)).numpy() / 127.5 - 1
    assert np.abs(theirs - ours).max() < 0.02


@pytest.mark.slow
def test_timm_creates_a_bit_from_our_folder(tmp_path: Path) -> None:
    model = tiny.bit(torch.float32, (3, 4, 6, 3), numerics="timm")
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    assert gap(model, from_folder(folder), size=(64, 64)) < CLOSE


def test_shape_without_a_name_in_timm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timm has no model"):
        plainvit.save(tiny.bit(numerics="timm"), tmp_path / "folder", format="timm")
    assert not list(tmp_path.iterdir())


# transformers in ------------------------------------------------------------------------------------------------------


def transformers_settings(**settings: Any) -> dict[str, Any]:
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return shape | {"image_size": 32, "patch_size": 8, "num_labels": 7} | settings


TRANSFORMERS: dict[str, tuple[type[nn.Module], type[Any], dict[str, Any]]] = {
    "ViT": (ViTForImageClassification, ViTConfig, {}),
    "ViT with pooler": (ViTModel, ViTConfig, {}),
    "ViT with a narrow pooler": (ViTModel, ViTConfig, {"pooler_output_size": 20}),
    "ViT, wide": (ViTForImageClassification, ViTConfig, {"image_size": (24, 40)}),
    "ViT, a square number that is no square": (ViTForImageClassification, ViTConfig, {"image_size": (16, 64)}),
    "ViT, tanh GELU": (ViTForImageClassification, ViTConfig, {"hidden_act": "gelu_pytorch_tanh"}),
    "ViT, gelu_new": (ViTForImageClassification, ViTConfig, {"hidden_act": "gelu_new"}),
    "ViT, quick_gelu": (ViTForImageClassification, ViTConfig, {"hidden_act": "quick_gelu"}),
    "ViT, eps 1e-5": (ViTForImageClassification, ViTConfig, {"layer_norm_eps": 1e-5}),
    "DeiT": (DeiTForImageClassification, DeiTConfig, {}),
    "DeiT with teacher": (DeiTForImageClassificationWithTeacher, DeiTConfig, {}),
    "DeiT without head": (DeiTModel, DeiTConfig, {}),
}


def transformers_peer(name: str, **more: Any) -> nn.Module:
    kind, config, settings = TRANSFORMERS[name]
    peer = kind(config(**transformers_settings(**settings | more))).double().eval()
    scramble(peer)
    return peer


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_loaded_folder_equals_transformers(tmp_path: Path, name: str) -> None:
    peer = transformers_peer(name)
    peer.save_pretrained(tmp_path)
    model = check(tmp_path, peer)
    assert model.config.norm_eps == peer.config.layer_norm_eps


def sides(peer: nn.Module) -> dict[str, Any]:
    """What the file alone cannot say of a grid."""
    size = peer.config.image_size
    return {} if isinstance(size, int) else {"grid": (size[0] // 8, size[1] // 8)}


PLAIN_FILES = [name for name in TRANSFORMERS if "lu" not in name.lower() and "eps" not in name]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("name", PLAIN_FILES)
def test_loaded_state_dict_equals_transformers(tmp_path: Path, name: str, suffix: str) -> None:
    peer = transformers_peer(name)
    assert any(re.search(r"layers\.0\.attention\.q_proj", name) for name in peer.state_dict())
    check(write(peer.state_dict(), tmp_path / f"m{suffix}"), peer, heads=4, **sides(peer))


@pytest.mark.parametrize("name", ["ViT", "DeiT with teacher"])
def test_loaded_shards_equal_transformers(tmp_path: Path, name: str) -> None:
    peer = transformers_peer(name)
    peer.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    check(tmp_path, peer)


def test_transformers_class_names_are_loaded(tmp_path: Path) -> None:
    names = ["tench", "goldfish", "shark", "ray", "cock", "hen", "ostrich"]
    peer = transformers_peer("ViT", id2label=dict(enumerate(names)))
    peer.save_pretrained(tmp_path)
    assert plainvit.load(tmp_path).about.class_names == tuple(names)
    transformers_peer("ViT").save_pretrained(tmp_path)
    assert plainvit.load(tmp_path).about.class_names == ()


# transformers out -----------------------------------------------------------------------------------------------------

TO_TRANSFORMERS: dict[str, tuple[dict[str, Any], type[Any]]] = {
    "ViT": ({}, ViTForImageClassification),
    "square": ({"image_size": 32}, ViTForImageClassification),
    "eps 1e-6": ({"norm_eps": 1e-6}, ViTForImageClassification),
    "tanh GELU": ({"activation": "gelu_tanh"}, ViTForImageClassification),
    "quick GELU": ({"activation": "gelu_sigmoid"}, ViTForImageClassification),
    "ReLU": ({"activation": "relu"}, ViTForImageClassification),
    "one channel": ({"channels": 1} | GREY, ViTForImageClassification),
    "rectangular patch": ({"image_size": (36, 16), "patch": (12, 8)}, ViTForImageClassification),
    "pooler": ({"classes": 0, "representation": 48}, ViTModel),
    "narrow pooler": ({"classes": 0, "representation": 20}, ViTModel),
    "DeiT": ({"registers": 1, "posemb_prefix": "all"}, DeiTForImageClassification),
    "DeiT with teacher": ({"distillation": True}, DeiTForImageClassificationWithTeacher),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("ours", "kind"), TO_TRANSFORMERS.values(), ids=TO_TRANSFORMERS)
def test_transformers_loads_our_folder(
    tmp_path: Path, ours: dict[str, Any], kind: type[Any], dtype: torch.dtype
) -> None:
    model = tiny.vit(dtype, numerics="transformers", **ours)
    folder = plainvit.save(model, tmp_path / "folder", format="transformers")
    peer, notes = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert peer.dtype is dtype
    said = AutoConfig.from_pretrained(folder)  # by which the library chooses the class itself
    assert (type(said), said.architectures) == (kind.config_class, [kind.__name__])
    assert gap(model, peer) < (EXACT if dtype is torch.float64 else CLOSE)


PIXELS = {
    "Google's": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def with_crop(model: ViT, resize: str) -> ViT:
    prepared = type(model.about.preprocess)(resize=resize, crop=0.5 if resize == "crop" else 1.0)
    model.about = type(model.about)(preprocess=prepared)
    return model


@pytest.mark.parametrize("resize", ["squash", "crop"])
@pytest.mark.parametrize("deit", [False, True], ids=["ViT", "DeiT"])
@pytest.mark.parametrize(("mean", "std"), PIXELS.values(), ids=PIXELS)
def test_written_processor_normalises_like_the_config(
    tmp_path: Path, mean: tuple[float, ...], std: tuple[float, ...], deit: bool, resize: str
) -> None:
    """One colour all over stays so under any resize; what comes out is the normalisation alone."""
    model = tiny.vit(numerics="transformers", image_size=32, distillation=deit, mean=mean, std=std)
    folder = plainvit.save(with_crop(model, resize), tmp_path / "folder", format="transformers")
    colour = (10, 100, 250)
    out = AutoImageProcessor.from_pretrained(folder)(Image.new("RGB", (50, 70), colour), return_tensors="np")
    assert out["pixel_values"].shape == (1, 3, 32, 32)
    expected = (np.array(colour) / 255 - mean) / std
    assert np.abs(out["pixel_values"] - expected[None, :, None, None]).max() < 1e-5


@pytest.mark.parametrize("resize", ["squash", "crop"])
def test_written_processor_crops_like_plainvit(tmp_path: Path, resize: str) -> None:
    """A photo with a border of a quarter: the crop of one half of the side loses it, the square resize keeps it."""
    model = with_crop(tiny.vit(numerics="transformers", image_size=32), resize)
    folder = plainvit.save(model, tmp_path / "folder", format="transformers")
    photo = np.zeros((128, 128, 3), np.uint8)
    photo[32:96, 32:96] = 255
    pixels = AutoImageProcessor.from_pretrained(folder)(Image.fromarray(photo), return_tensors="np")["pixel_values"]
    assert pixels[0, 0, 16, 16] == 1.0
    corner = pixels[0, :, 2, 2]
    assert (corner == (1.0 if resize == "crop" else -1.0)).all()
    assert plainvit.load(folder).about.preprocess == model.about.preprocess


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTImageProcessor", {}),
    "ViT, bicubic": ("ViTImageProcessor", {"resample": 3}),
    "ViT, with a crop": ("ViTImageProcessor", {"size": {"height": 64, "width": 64}, "do_center_crop": True}),
    "DeiT": ("DeiTImageProcessor", {"size": {"height": 36, "width": 36}}),
    "DeiT, half": ("DeiTImageProcessor", {"size": {"height": 64, "width": 64}}),
    "DeiT without a crop": ("DeiTImageProcessor", {"do_center_crop": False}),
    "CLIP": ("CLIPImageProcessor", {"size": {"shortest_edge": 36}}),
    "CLIP, half": ("CLIPImageProcessor", {"size": {"shortest_edge": 64}, "resample": 2}),
    "Bit": ("BitImageProcessor", {"size": {"shortest_edge": 32}}),
}


def photos() -> list[Image.Image]:
    """Two drawn ones, wide and tall, and where they are at hand some real ones."""
    found = [photo(90, 130, seed=1), photo(200, 110, seed=2)]
    root = os.environ.get("PLAINVIT_DATA")
    if root:
        rows = pyarrow.parquet.read_table(next(Path(root, "imagenet-photos").glob("*.parquet"))).slice(0, 8).to_pylist()
        found += [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]
    return [image for image in found if image.width != image.height]


def smallest_gap(one: np.ndarray, other: np.ndarray, shift: int) -> float:
    """Mean difference of two images, at best after moving one by up to `shift` pixels."""
    size, moves = one.shape[-1], range(-shift, shift + 1)
    pairs = [(slice(max(by, 0), size + min(by, 0)), slice(max(-by, 0), size + min(-by, 0))) for by in moves]
    return min(
        float(np.abs(one[:, rows, columns] - other[:, others, across]).mean())
        for rows, others in pairs
        for columns, across in pairs
    )


@pytest.mark.parametrize(("kind", "settings"), PROCESSORS.values(), ids=PROCESSORS)
def test_preprocessing_equals_the_librarys_processor(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """Read, and written back; by its own file, in which keys that the class has as defaults may be missing.

    Of an odd margin around a crop transformers leaves the smaller half above and left, torchvision and we the even one.
    """
    size = {"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = getattr(transformers, kind)(**size | settings)
    model = tiny.vit(torch.float32, numerics="transformers", image_size=32)
    plainvit.save(model, tmp_path / "in", format="transformers")
    weights = safetensors.torch.load_file(tmp_path / "in" / "model.safetensors")
    write(weights, tmp_path / "in" / "model.safetensors")  # without plainvit's own description
    kept = {name: value for name, value in processor.to_dict().items() if value != getattr(type(processor), name, None)}
    (tmp_path / "in" / "preprocessor_config.json").write_text(json.dumps(kept | {"image_processor_type": kind}))
    loaded = plainvit.load(tmp_path / "in")
    assert not loaded.about.sources["preprocess"].startswith("assumed")
    written = AutoImageProcessor.from_pretrained(plainvit.save(loaded, tmp_path / "out", format="transformers"))
    for image in photos():
        theirs = processor(image, return_tensors="np")["pixel_values"][0]
        ours = loaded.normalise(preprocess_image(np.array(image), loaded.about.preprocess, (32, 32))[None])[0].numpy()
        assert smallest_gap(ours, theirs, shift=int(loaded.about.preprocess.resize == "crop")) < 0.01
        assert np.array_equal(written(image, return_tensors="np")["pixel_values"][0], theirs)


LEGACY: dict[str, tuple[dict[str, Any], tuple[str, float]]] = {
    "DeiT of 2021": ({"feature_extractor_type": "DeiTFeatureExtractor", "size": 256}, ("squash-crop", 0.875)),
    "ViT of 2021": ({"feature_extractor_type": "ViTFeatureExtractor", "size": 224}, ("squash", 1.0)),
    "hybrid of 2022": ({"image_processor_type": "ViTHybridImageProcessor", "size": 256}, ("crop", 0.875)),
    "crop larger than the image": ({"image_processor_type": "DeiTImageProcessor", "size": 200}, ("squash", 1.0)),
    "long side": ({"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 224}}, ("squash", 1.0)),
}
CANNOT = ("crop larger than the image", "long side")


@pytest.mark.parametrize("name", LEGACY)
def test_unsupported_processor_is_an_assumption(tmp_path: Path, name: str) -> None:
    settings, (resize, crop) = LEGACY[name]
    folder = plainvit.save(tiny.vit(numerics="transformers", image_size=32), tmp_path / "f", format="transformers")
    write(safetensors.torch.load_file(folder / "model.safetensors"), folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    about = plainvit.load(folder).about
    assert (about.preprocess.resize, about.preprocess.crop) == (resize, crop)
    assert about.sources["preprocess"].startswith("assumed") is (name in CANNOT)


# torchvision ----------------------------------------------------------------------------------------------------------


def torchvision_vit(**settings: Any) -> TorchvisionViT:
    shape = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 48, "mlp_dim": 96}
    peer = TorchvisionViT(**shape | {"num_classes": 7} | settings).double().eval()
    scramble(peer)
    return peer


def older(state: State) -> State:
    """The names before metadata version 2."""
    return {
        name.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): x for name, x in state.items()
    }


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("old", [False, True], ids=["new names", "old names"])
@pytest.mark.parametrize("hidden", [None, 20], ids=["", "pre_logits"])
def test_loaded_file_equals_torchvision(tmp_path: Path, hidden: int | None, old: bool, suffix: str) -> None:
    peer = torchvision_vit(representation_size=hidden)
    state = older(peer.state_dict()) if old else peer.state_dict()
    assert any("linear_1" in name for name in state) is old
    model = check(write(state, tmp_path / f"m{suffix}"), peer, heads=4)
    assert model.config.representation == (hidden or 0)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("hidden", [0, 20])
def test_torchvision_loads_our_file(tmp_path: Path, hidden: int, suffix: str) -> None:
    model = tiny.vit(numerics="torchvision", image_size=32, representation=hidden)
    path = plainvit.save(model, tmp_path / f"m{suffix}", format="torchvision")
    peer = torchvision_vit(num_layers=3, representation_size=hidden or None)
    scramble(peer, seed=9)
    read = safetensors.torch.load_file if suffix == ".safetensors" else partial(torch.load, weights_only=True)
    peer.load_state_dict(read(path), strict=True)
    assert gap(model, peer) < EXACT


TORCHVISION = {
    f"{name} {one.name}": (name, one)
    for name in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
    for one in torchvision.models.get_model_weights(name)
}


@pytest.mark.parametrize(("name", "published"), TORCHVISION.values(), ids=TORCHVISION)
def test_preprocessing_equals_torchvision_or_names_the_other(tmp_path: Path, name: str, published: Any) -> None:
    """A state dict does not say which weights it is: always an assumption. By headers alone, the weights are a hole."""
    theirs = published.transforms()
    with torch.device("meta"):
        state = getattr(torchvision.models, name)(image_size=theirs.crop_size[0]).state_dict()
    found, _ = inspect_weights(hollow(state, tmp_path / "hollow.safetensors"))
    ours, source = found.about["preprocess"], found.sources["preprocess"]
    same = (
        ours["interpolation"] == theirs.interpolation.value
        and round(theirs.crop_size[0] / ours["crop"]) == theirs.resize_size[0]
    )
    assert source.startswith("assumed")
    assert any(note.startswith("assumed") and "interpolation" in note for note in found.notes)
    assert same or "SWAG_LINEAR" in source
    assert same is (published.name != "IMAGENET1K_SWAG_LINEAR_V1" or name == "vit_h_14")


def hollow(state: State, path: Path) -> Path:
    """A safetensors file of the right names and shapes, all zeros, that takes no room on disk."""
    header, end = {}, 0
    for name, x in state.items():
        start, end = end, end + 4 * x.numel()
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
