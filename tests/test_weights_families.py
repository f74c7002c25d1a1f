"""Every family of transformers and timm: outputs equal to the libraries' own models, and exact round trips.

Models are small and random; each is saved by its own library, loaded from the folder, and compared in float64 and fp32,
at its own and at other resolutions. Pixels are normalized outside plainvit, by the loaded config.
"""

import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import tiny
import torch
import transformers
from peers import normalize, scramble, write
from timm.models._hub import save_for_hf
from timm.models.beit import checkpoint_filter_fn
from torch import Tensor
from transformers.utils import logging as transformers_logging

import plainvit
from plainvit.models.fast import accelerate

transformers_logging.disable_progress_bar()
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
SMALL = SHAPE | {"image_size": 24, "patch_size": 8}
LABELS = {"num_labels": 5}
NAMES = ["tench", "goldfish", "shark", "ray", "cock"]


def peer(kind: str, config: str = "", **settings: Any) -> Callable[[], Any]:
    """Builds a class of transformers; `config` is its config's class, if it is not named after it."""
    config = config or re.sub(r"(For|Model|With(?!Registers)).*", "", kind)
    return lambda: getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**SMALL | settings))


def vit(**settings: Any) -> Callable[[], Any]:
    return peer("ViTForImageClassification", **LABELS | settings)


def clip(kind: str, **settings: Any) -> Callable[[], Any]:
    return peer(kind, "CLIPVision", projection_dim=16, **settings)


MAE = {"mask_ratio": 0.0, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
NAMED = {"id2label": dict(enumerate(NAMES))}
BEIT = {"use_relative_position_bias": True, **LABELS}
PEERS: dict[str, Callable[[], Any]] = {
    "vit": vit(**NAMED),
    "vit pooler": peer("ViTModel"),
    "vit narrow pooler": peer("ViTModel", pooler_output_size=20),
    "vit rectangle": vit(image_size=(24, 40)),
    "vit rectangle of a square number": vit(image_size=(16, 64)),
    "vit rectangular patch": vit(image_size=(36, 16), patch_size=(12, 8)),
    "vit gelu_new": vit(hidden_act="gelu_new"),
    "vit quick_gelu": vit(hidden_act="quick_gelu"),
    "vit relu": vit(hidden_act="relu"),
    "vit eps 1e-5": vit(layer_norm_eps=1e-5),
    "vit one channel": vit(num_channels=1),
    "deit": peer("DeiTForImageClassification", **LABELS),
    "deit teacher": peer("DeiTForImageClassificationWithTeacher", **LABELS),
    "deit pooler": peer("DeiTModel"),
    "mae": peer("ViTMAEForPreTraining", **MAE),
    "clip": clip("CLIPVisionModel"),
    "clip gelu": clip("CLIPVisionModel", hidden_act="gelu"),
    "clip projection": clip("CLIPVisionModelWithProjection"),
    "clip classifier": peer("CLIPForImageClassification", vision_config=SMALL, **NAMED),
    "siglip": peer("SiglipVisionModel"),
    "siglip classifier": peer("SiglipForImageClassification", vision_config=SMALL, **NAMED),
    "dinov2": peer("Dinov2Model"),
    "dinov2 gated": peer("Dinov2Model", use_swiglu_ffn=True),
    "dinov2 classifier": peer("Dinov2ForImageClassification", **LABELS),
    "dinov2 registers": peer("Dinov2WithRegistersModel", num_register_tokens=3),
    "dinov3": peer("DINOv3ViTModel", num_register_tokens=3),
    "dinov3 gated": peer("DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu"),
    "dinov3 no bias": peer("DINOv3ViTModel", query_bias=False, value_bias=False),
    "ijepa": peer("IJepaForImageClassification", **LABELS),
    "beit": peer("BeitForImageClassification", **BEIT),
    "beit token": peer("BeitForImageClassification", use_mean_pooling=False, **BEIT),
    "aimv2": peer("Aimv2VisionModel", use_head=False),
}
# Largest difference in float64: transformers computes rotary angles, RMSNorm and DINOv2's resampling in fp32
CLOSE = {name: 2e-6 if name.startswith(("dinov3", "aimv2")) else 1e-10 for name in PEERS}
RESAMPLED_IN_FP32 = 2e-6
BY_FLAG = ("vit", "deit", "mae", "clip", "siglip", "ijepa")  # which interpolate positions only if they are asked to


def run(name: str, model: Any, pixels: Tensor, **flags: Any) -> Tensor:
    """What the class computes for a classifier or for features."""
    if name == "mae":  # its encoder shuffles patches, unless noise ascends
        order = torch.arange(pixels.shape[2] * pixels.shape[3] // 64).expand(len(pixels), -1)
        return model.vit(pixels, noise=order, **flags).last_hidden_state[:, 0]
    out = model(pixels, **flags)
    if name in ("aimv2", "tokens"):
        return out.last_hidden_state.mean(1) if name == "aimv2" else out.last_hidden_state[:, 0]
    return next(out[key] for key in ("logits", "image_embeds", "pooler_output") if out.get(key) is not None)


def make(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = PEERS[name]().eval()
    scramble(model)
    model.save_pretrained(folder)
    return model.double()


@torch.inference_mode()
def compare(load: Callable[..., Any], run: Callable[[Tensor], Tensor], close: float) -> None:
    """What plainvit loads with what the peer runs: in float64, and in fp32 to 1e-5 of the largest output."""
    model = load(dtype=torch.float64)
    images = tiny.images(2, model.config.image_size, model.config.channels)
    expected = run(normalize(model, images))
    assert tiny.difference(model(images), expected) < close
    assert tiny.difference(accelerate(model)(images), expected) < close
    assert tiny.difference(load()(images.float()), expected.float()) < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", PEERS)
def test_output_equals_transformers(tmp_path: Path, name: str) -> None:
    theirs = make(name, tmp_path)
    compare(partial(plainvit.load, tmp_path), partial(run, name, theirs), CLOSE[name])
    assert plainvit.load(tmp_path).about.class_names == (
        tuple(NAMES) if name in ("vit", "clip classifier", "siglip classifier") else ()
    )


@pytest.mark.parametrize("size", [(40, 40), (16, 48)])
@pytest.mark.parametrize("name", [name for name in PEERS if name != "aimv2" and "rectang" not in name])
def test_other_resolution_equals_transformers(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    """AIMv2 of transformers has none: it is compared with timm's below."""
    theirs = make(name, tmp_path)
    flags = {"interpolate_pos_encoding": True} if name.startswith(BY_FLAG) else {}
    close = RESAMPLED_IN_FP32 if name.startswith("dinov2") else CLOSE[name]
    compare(partial(plainvit.load, tmp_path, image_size=size), partial(run, name, theirs, **flags), close)


AS_OTHER_CLASS = {"siglip classifier": "IJepaForImageClassification", "mae": "ViTModel"}


@pytest.mark.parametrize("name", [name for name in PEERS if name != "clip classifier"])
def test_written_folder_equals_the_original(tmp_path: Path, name: str) -> None:
    make(name, tmp_path / "a")
    model = plainvit.load(tmp_path / "a")
    plainvit.save(model, tmp_path / "b", format="transformers")
    original, written = (safetensors.torch.load_file(tmp_path / one / "model.safetensors") for one in "ab")
    kind = getattr(transformers, AS_OTHER_CLASS.get(name, "x"), type(PEERS[name]()))
    if name not in AS_OTHER_CLASS:
        assert all(torch.equal(original[key], tensor) for key, tensor in written.items())
        lost = {key.rsplit(".", 1)[-1] for key in original.keys() - written.keys()}
        assert lost <= {"mask_token", "register_tokens"}
    again, notes = kind.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(key for key in notes["missing_keys"] if not re.search("mask_token|register|pooler", key))
    assert not notes["unexpected_keys"]
    assert not notes["mismatched_keys"]
    chosen = transformers.AutoConfig.from_pretrained(tmp_path / "b")  # by which the library finds the class itself
    assert (type(chosen), chosen.architectures) == (kind.config_class, [kind.__name__])
    name = "tokens" if name == "mae" else name
    compare(partial(plainvit.load, tmp_path / "b"), partial(run, name, again.double().eval()), CLOSE.get(name, 1e-10))


def test_unsupported_class_is_not_written(tmp_path: Path) -> None:
    """CLIPForImageClassification averages tokens before the final norm; a fine-tuned CLIP reads its class token."""
    make("clip classifier", tmp_path / "a")
    with pytest.raises(ValueError, match="head"):
        plainvit.save(plainvit.load(tmp_path / "a"), tmp_path / "b", format="transformers")


# Weights alone, under the names that modules have in memory; what they do not show is given, or is the default
BARE = "vit, vit pooler, vit rectangle, deit, deit teacher, deit pooler, clip, clip projection, siglip, dinov2"
BARE += ", dinov2 gated, dinov2 classifier, dinov2 registers, dinov3, dinov3 gated, ijepa, beit, aimv2"


@pytest.mark.parametrize(
    ("name", "suffix"), zip(BARE.split(", "), itertools.cycle((".safetensors", ".bin")), strict=False)
)
def test_bare_state_dict_equals_transformers(tmp_path: Path, name: str, suffix: str) -> None:
    theirs = make(name, tmp_path)
    path = write(theirs.float().state_dict(), tmp_path / f"bare{suffix}")
    grid = (3, 5) if name == "vit rectangle" else (3, 3)
    compare(partial(plainvit.load, path, heads=4, grid=grid), partial(run, name, theirs.double()), CLOSE[name])


# transformers mixes up rows and columns of a rectangle; and one bias for all layers is not supported
@pytest.mark.parametrize("settings", [{"image_size": (24, 40)}, {"use_shared_relative_position_bias": True}])
def test_unsupported_beit_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    peer("BeitForImageClassification", **BEIT | settings)().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BEiT.*not support"):
        plainvit.load(tmp_path)


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
    theirs = vit(backbone(normalize(model, images)).feature_maps[-1]).logits
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


TIMM_SHAPE = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": (40, 64), "patch_size": 8, "num_classes": 5}


def make_timm(name: str, folder: Path) -> Any:
    settings = TIMM_SHAPE | TIMM[name]
    theirs = timm.create_model(name, **settings)
    scramble(theirs)
    model_args = {key: value for key, value in settings.items() if key != "num_classes"}
    save_for_hf(theirs.eval(), folder, model_args=model_args, safe_serialization=True)
    return theirs.double()


@pytest.mark.parametrize("name", TIMM)
def test_rectangle_equals_timm_and_is_written_for_timm(tmp_path: Path, name: str) -> None:
    theirs = make_timm(name, tmp_path / "a")
    model = plainvit.load(tmp_path / "a")
    close = 2e-6 if model.config.rotary != "none" else 1e-10
    plainvit.save(model, tmp_path / "b", format="timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True).eval()
    original, written = (safetensors.torch.load_file(tmp_path / one / "model.safetensors") for one in "ab")
    assert original.keys() == written.keys() or model.config.rotary == "axial"
    assert all(torch.equal(tensor, original[key]) for key, tensor in written.items())
    compare(partial(plainvit.load, tmp_path / "a"), theirs, close)
    compare(partial(plainvit.load, tmp_path / "b"), again.double(), close)


@pytest.mark.filterwarnings("ignore")  # of timm's own interpolation
@pytest.mark.parametrize("size", [(56, 48), (24, 24)])
@pytest.mark.parametrize("name", TIMM)
def test_other_resolution_equals_timm(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    theirs = make_timm(name, tmp_path)
    if name.startswith("beit_"):  # timm resamples biases only when it loads weights
        larger = timm.create_model(name, **TIMM_SHAPE | TIMM[name] | {"img_size": size}).eval()
        larger.load_state_dict(checkpoint_filter_fn(theirs.float().state_dict(), larger), strict=False)
        theirs = larger
    else:
        theirs.set_input_size(size)
    compare(partial(plainvit.load, tmp_path, image_size=size), theirs.double(), 5e-6)  # timm resamples in fp32


TO_OPEN_CLIP = {
    "vision_model.": "",
    "encoder.layers": "transformer.resblocks",
    "pre_layrnorm": "ln_pre",
    "layer_norm": "ln_",
    "embeddings.class_embedding": "class_embedding",
    "embeddings.patch_embedding": "conv1",
    "embeddings.position_embedding.weight": "positional_embedding",
    "post_layernorm": "ln_post",
    "self_attn": "attn",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def to_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' CLIP tower under open_clip's names, by a table that shares no code with plainvit."""
    out = {"logit_scale": torch.zeros(()), "ln_final.weight": torch.zeros(4)}
    out["visual.proj"] = state.pop("visual_projection.weight").T.contiguous()
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        state[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    for name, x in state.items():
        for old, new in TO_OPEN_CLIP.items():
            name = name.replace(old, new)
        out[f"visual.{name}"] = x
    return out


@pytest.mark.parametrize("openai", [False, True])
def test_open_clip_equals_transformers_and_is_written_back(tmp_path: Path, openai: bool) -> None:
    peer = clip("CLIPVisionModelWithProjection", hidden_act="quick_gelu" if openai else "gelu")().eval()
    scramble(peer)
    peer.double()
    state = to_open_clip({name: x.float() for name, x in peer.state_dict().items()})
    state |= {"input_resolution": torch.tensor(24)} if openai else {}
    torch.save(state, tmp_path / "open_clip_pytorch_model.bin")  # as on the hub
    model = plainvit.load(tmp_path, heads=4)
    images = tiny.images(2, (24, 24))
    theirs = peer(normalize(model, images)).image_embeds
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
        theirs = peer.double()(normalize(model, images))
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
        assert tiny.difference(model.double()(images), peer.double()(normalize(model, images))) < 2e-6
