"""CLIP, SigLIP, DINO, EVA-02, BEiT, AIMv2, I-JEPA: features equal to the libraries' own models, and exact round trips.

Models are small and random; each is saved by its own library, loaded from the folder, and compared in float64.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import tiny
import torch
import transformers
from peers import scramble
from timm.models._hub import save_for_hf
from torch import Tensor

import plainvit
from plainvit.cli import main
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


def make_hybrid(folder: Path, size: tuple[int, int]) -> tuple[Any, Any]:
    """ViTHybrid as transformers 4 had it: BiT's feature map is the image of a ViT with patches of one pixel.

    The class is gone from version 5, BiT and ViT are not; files and config.json are written here under its names.
    """
    sizes, stem = [256, 512], {"depths": [1, 2], "layer_type": "bottleneck", "global_padding": "same"}
    stem |= {"hidden_sizes": sizes, "embedding_dynamic_padding": True, "out_features": ["stage2"]}
    backbone = transformers.BitBackbone(transformers.BitConfig(**stem))
    inner = {"image_size": (size[0] // 8, size[1] // 8), "patch_size": 1, "num_channels": sizes[-1]}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**SHAPE, **inner, **LABELS))
    for module in (backbone, vit):
        scramble(module.eval())
    vit.save_pretrained(folder)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    prefix = "vit.embeddings.patch_embeddings.backbone."
    safetensors.torch.save_file(state | {prefix + name: x for name, x in backbone.state_dict().items()}, folder / "m")
    (folder / "m").replace(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "vit-hybrid", "image_size": list(size), "num_channels": 3, "backbone_config": stem}
    (folder / "config.json").write_text(json.dumps(config))
    return backbone.double(), vit.double()


@torch.inference_mode()
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_hybrid_equals_transformers_and_is_written_back(tmp_path: Path, size: tuple[int, int]) -> None:
    backbone, vit = make_hybrid(tmp_path / "a", size)
    model = plainvit.load(tmp_path / "a")
    assert (model.about.family, model.config.stem.blocks) == ("transformers ViTHybrid", (1, 2))
    plainvit.save(model, tmp_path / "b", format="transformers")
    images = tiny.images(2, size)
    theirs = vit(backbone(normalise(model, images)).feature_maps[-1]).logits
    assert tiny.difference(model.double()(images), theirs) < 1e-10
    original, written = (safetensors.torch.load_file(tmp_path / one / "model.safetensors") for one in "ab")
    assert original.keys() == written.keys()
    assert all(torch.equal(x, original[name]) for name, x in written.items())
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    stem = transformers.BitConfig(**config["backbone_config"])
    transformers.BitBackbone(stem).load_state_dict(backbone.state_dict())  # the same names and shapes
    assert config["architectures"] == ["ViTHybridForImageClassification"]


# timm's classes, under the name that plainvit writes to config.json
TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_clip_224": {"num_classes": 16},
    "vit_base_patch16_clip_quickgelu_224": {"num_classes": 16},
    "vit_giant_patch14_dinov2": {"mlp_ratio": 4},
    "beit3_base_patch16_224": {},
    "aimv2_large_patch14_224": {},
    "vit_medium_patch16_gap_240": {},
    "eva02_tiny_patch14_224": {},
    "eva02_base_patch14_224": {},
    "eva02_base_patch16_clip_224": {},
    "eva_giant_patch14_224": {},
    "vit_base_patch16_dinov3": {"num_classes": 0},
    "vit_base_patch16_dinov3_qkvb": {"num_classes": 3, "global_pool": "token"},
    "vit_huge_plus_patch16_dinov3_qkvb": {},
    "vit_base_patch16_rope_ape_224": {},
    "beit_base_patch16_224": {"img_size": (40, 40)},  # timm loads no other shape
}


def make_timm(name: str, folder: Path) -> Any:
    settings = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": (40, 64), "patch_size": 8, "num_classes": 5}
    model_args = {key: value for key, value in (settings | TIMM[name]).items() if key != "num_classes"}
    peer = timm.create_model(name, **settings | TIMM[name])
    scramble(peer)
    save_for_hf(peer.eval(), folder, model_args=model_args, safe_serialization=True)
    return peer.double()


@pytest.mark.parametrize("name", TIMM)
def test_rectangle_equals_timm_and_is_written_for_timm(tmp_path: Path, name: str) -> None:
    peer = make_timm(name, tmp_path / "a")
    model = plainvit.load(tmp_path / "a").double()
    images = tiny.images(2, model.config.image_size)
    close = 2e-6 if model.config.rotary != "none" else 1e-10
    with torch.inference_mode():
        theirs = peer(normalise(model, images))
        assert tiny.difference(model(images), theirs) < close
        plainvit.save(plainvit.load(tmp_path / "a"), tmp_path / "b", format="timm")
        again = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True).double().eval()
        assert tiny.difference(again(normalise(model, images)), theirs) < close
    original = safetensors.torch.load_file(tmp_path / "a/model.safetensors")
    written = safetensors.torch.load_file(tmp_path / "b/model.safetensors")
    assert original.keys() == written.keys() or model.config.rotary == "axial"
    assert all(torch.equal(tensor, original[key]) for key, tensor in written.items())


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_clip_224", "vit_base_patch16_dinov3_qkvb", "eva02_base_patch14_224"]
)
def test_other_resolution_equals_timm(tmp_path: Path, name: str) -> None:
    peer = make_timm(name, tmp_path)
    model = plainvit.load(tmp_path, image_size=(56, 48)).double()
    peer.set_input_size((56, 48))
    images = tiny.images(2, (56, 48))
    with torch.inference_mode():
        assert tiny.difference(model(images), peer(normalise(model, images))) < 5e-6  # positions resampled in fp32


def to_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' CLIP tower under open_clip's names, by a table that shares no code with plainvit."""
    out = {"logit_scale": torch.zeros(()), "ln_final.weight": torch.zeros(4)}
    for name, x in state.items():
        name = name.removeprefix("vision_model.").replace("encoder.layers", "transformer.resblocks")
        for old, new in (
            ("embeddings.class_embedding", "class_embedding"),
            ("embeddings.patch_embedding", "conv1"),
            ("embeddings.position_embedding.weight", "positional_embedding"),
            ("pre_layrnorm", "ln_pre"),
            ("post_layernorm", "ln_post"),
            ("layer_norm", "ln_"),
            ("self_attn", "attn"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
        ):
            name = name.replace(old, new)
        if name == "visual_projection.weight":
            out["visual.proj"] = x.T.contiguous()
        elif ".q_proj." in name:
            parts = [state[key] for key in _projections_of(name)]
            out["visual." + name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.", name):
            out[f"visual.{name}"] = x
    return out


def _projections_of(name: str) -> list[str]:
    layer, leaf = re.search(r"resblocks\.(\d+)\..*\.(\w+)$", name).groups()
    return [f"vision_model.encoder.layers.{layer}.self_attn.{letter}_proj.{leaf}" for letter in "qkv"]


@pytest.mark.parametrize("openai", [False, True])
def test_open_clip_equals_transformers_and_is_written_back(tmp_path: Path, openai: bool) -> None:
    peer = clip("CLIPVisionModelWithProjection", hidden_act="quick_gelu" if openai else "gelu").eval()
    scramble(peer)
    peer.double()
    state = to_open_clip({name: x.float() for name, x in peer.state_dict().items()})
    state |= {"input_resolution": torch.tensor(24)} if openai else {}
    torch.save(state, tmp_path / "clip.pt")
    model = plainvit.load(tmp_path / "clip.pt", heads=4)
    images = tiny.images(2, (24, 24))
    theirs = peer(normalise(model, images)).image_embeds
    plainvit.save(model, tmp_path / "again.safetensors", format="open_clip")
    assert tiny.difference(model.double()(images), theirs) < 1e-10
    written = safetensors.torch.load_file(tmp_path / "again.safetensors")
    assert written.keys() == {name for name in state if name.startswith("visual.")}
    assert all(torch.equal(x, state[name]) for name, x in written.items())


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "eva02_base_patch16_clip_224"])
def test_open_clip_around_timm_equals_timm(tmp_path: Path, name: str) -> None:
    settings = {"embed_dim": 64, "depth": 1, "num_heads": 1, "num_classes": 0}
    peer = timm.create_model(name, **settings).eval()
    scramble(peer)
    state = {f"visual.trunk.{key}": x for key, x in peer.state_dict().items()}
    torch.save(state | {"text.token_embedding.weight": torch.zeros(2, 2)}, tmp_path / "m.pt")
    model = plainvit.load(tmp_path / "m.pt", heads=1)
    images = tiny.images(1, (224, 224))
    with torch.inference_mode():
        theirs = peer.double()(normalise(model, images))
        assert tiny.difference(model.double()(images), theirs) < 2e-6


def to_dinov2_original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): x for name, x in state.items()} | {
        "mask_token": torch.zeros(1, 64)
    }


def to_dinov3_original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's names with the original's: biases of q, k and v in one vector, whose k third is masked."""
    out = {"mask_token": torch.zeros(1, 64), "rope_embed.periods": torch.zeros(16)}
    for name, x in state.items():
        if name.endswith("q_bias"):
            block = name.removesuffix("q_bias")
            out[f"{block}qkv.bias"] = torch.cat((x, torch.ones_like(x), state[f"{block}v_bias"]))
            out[f"{block}qkv.bias_mask"] = torch.zeros(192)
        elif not name.endswith("v_bias"):
            name = re.sub(r"gamma_([12])", r"ls\1.gamma", name).replace("reg_token", "storage_tokens")
            out[name.replace("mlp.fc1_g", "mlp.w1").replace("mlp.fc1_x", "mlp.w2")] = x
    return out


def to_eva_original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renames = {"fc1_g": "w1", "fc1_x": "w2", "fc2": "w3", "mlp.norm": "mlp.ffn_ln", "attn.norm": "attn.inner_attn_ln"}
    return {re.sub("|".join(renames), lambda match: renames[match[0]], name): x for name, x in state.items()}


ORIGINALS = {
    "DINOv2": ("vit_giant_patch14_dinov2", {"mlp_ratio": 4}, to_dinov2_original),
    "DINOv3": ("vit_base_patch16_dinov3_qkvb", {"global_pool": "token"}, to_dinov3_original),
    "EVA": ("eva02_base_patch16_clip_224", {}, to_eva_original),
}


@pytest.mark.parametrize("family", ORIGINALS)
def test_original_file_equals_timm(tmp_path: Path, family: str) -> None:
    name, settings, rename = ORIGINALS[family]
    shape = {"embed_dim": 64, "depth": 2, "num_heads": 1, "img_size": 32, "patch_size": 8, "num_classes": 0}
    peer = timm.create_model(name, **shape, **settings)
    scramble(peer.eval())
    torch.save(rename(peer.state_dict()), tmp_path / "m.pth")
    model = plainvit.load(tmp_path / "m.pth", image_size=32)
    assert model.about.family == family
    images = tiny.images(2, (32, 32))
    with torch.inference_mode():
        assert tiny.difference(model.double()(images), peer.double()(normalise(model, images))) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip projection", "siglip", "dinov2 gated", "dinov3", "ijepa", "beit", "aimv2"])
def test_family_fine_tunes_probes_analyses_and_exports(tmp_path: Path, name: str) -> None:
    make(name, tmp_path / "weights")
    weights, run = str(tmp_path / "weights"), str(tmp_path / "run")
    main(["finetune", "--init", weights, "--data", "digits", "--steps", "2", "--batch", "8", "--out", run])
    main(["probe", weights, "--data", "digits", "--json"])
    main(["analyse", run])
    main(["export", run, "--images", "16"])  # compared with PyTorch
    assert (tmp_path / "run" / "exports" / "model.onnx").exists()
    assert plainvit.load(run).config.classes == 10
