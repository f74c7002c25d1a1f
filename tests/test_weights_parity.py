"""Weights read and written, compared with the libraries: timm's and torchvision's ViT, hybrids and BiT; processors.

Each library builds a small model with random weights and writes it; plainvit loads the file and must give the
library's own logits, to 1e-10 in float64 and to 1e-5 of their scale in fp32. Then plainvit writes it back, and the
library loads that with its own strict loader. Pixels are normalized outside plainvit, by the loaded config.
"""

import copy
import io
import json
import os
from collections.abc import Callable
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
from peer_models import timm_bit, timm_hybrid, timm_vit, torchvision_vit
from peers import hollow, normalize, scramble, write
from pictures import photo
from PIL import Image
from timm.models import save_for_hf
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn
from transformers import AutoImageProcessor
from transformers.utils import logging as transformers_logging

import plainvit
from plainvit.config import About, Preprocess
from plainvit.data.transforms import preprocess_image
from plainvit.weights import inspect_weights

transformers_logging.disable_progress_bar()
EXACT, CLOSE = 1e-10, 1e-5
State = dict[str, Tensor]


@torch.inference_mode()
def gap(model: Any, peer: nn.Module, size: tuple[int, int] | None = None) -> float:
    """Largest difference on random images, relative to the largest logit where the model is in fp32."""
    dtype = next(model.parameters()).dtype
    images = tiny.images(size=size or model.config.image_size, channels=model.config.channels, dtype=dtype)
    theirs = copy.deepcopy(peer).to(dtype).eval()(normalize(model, images))
    scale = theirs.abs().max().item() if dtype is torch.float32 else 1.0
    return tiny.difference(model(images), theirs) / scale


def check(path: Path, peer: nn.Module, size: tuple[int, int] | None = None, **hints: Any) -> Any:
    """Compares the file with the library's model, in both precisions; returns the float64 model."""
    model = plainvit.load(path, dtype=None, **hints)
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float64}
    assert gap(model, peer, size) < EXACT
    assert gap(plainvit.load(path, **hints), peer, size) < CLOSE
    return model


def check_written(model: Any, peer: nn.Module, format_: str, folder: Path) -> None:
    """Written as .safetensors and .pth, under the library's own names: the same bits."""
    for suffix in (".safetensors", ".pth"):
        path = plainvit.save(model, folder / f"written{suffix}", format=format_)
        written = safetensors.torch.load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
        theirs = peer.state_dict()
        assert written.keys() == theirs.keys()
        assert all(torch.equal(x, theirs[name]) for name, x in written.items())
        peer.load_state_dict(written, strict=True)


# timm -----------------------------------------------------------------------------------------------------------------

NO_CLASS = {"global_pool": "avg", "class_token": False}
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
    "average, no class token": (NO_CLASS, {}),
    "average, no class token, norm": (NO_CLASS | {"fc_norm": False}, {}),
    "no class token, registers": (NO_CLASS | {"reg_tokens": 2, "no_embed_class": True}, {}),
    "no positions": ({"pos_embed": "none"}, {"image_size": 32}),
    "one channel": ({"in_chans": 1}, {}),
    "five channels": ({"in_chans": 5}, {}),
    "headless": ({"num_classes": 0}, {}),
    "wide, by image size": ({"img_size": (24, 40)}, {"image_size": (24, 40)}),
    "tall, by grid": ({"img_size": (40, 24)}, {"grid": (5, 3)}),
    "a square number of tokens that is no square": ({"img_size": (16, 64)}, {"grid": (2, 8)}),
    "rectangular patch": ({"img_size": (36, 16), "patch_size": (12, 8)}, {"image_size": (36, 16)}),
    "registers with rows, wide": ({"img_size": (24, 40), "reg_tokens": 2}, {"image_size": (24, 40)}),
    "distilled": ({"kind": VisionTransformerDistilled}, {}),
}


@pytest.mark.parametrize(("theirs", "hints"), TIMM.values(), ids=TIMM)
def test_timm_model_is_equal_and_written_back(tmp_path: Path, theirs: dict[str, Any], hints: dict[str, Any]) -> None:
    peer = timm_vit(**theirs)
    path = write(peer.state_dict(), tmp_path / ("m.pth" if "reg_tokens" in theirs else "m.safetensors"))
    model = check(path, peer, heads=4, **hints)
    check_written(model, peer, "timm", tmp_path)
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    assert gap(model.float(), from_folder(folder)) < CLOSE
    settings = timm.data.resolve_model_data_config(from_folder(folder))
    assert (tuple(settings["mean"]), tuple(settings["std"])) == (model.config.mean, model.config.std)
    assert tuple(settings["input_size"]) == (model.config.channels, *model.config.image_size)


# stages, patch and image size: as /16, as /32 with odd maps, the root alone under patches, and rectangles
HYBRIDS = [((1, 2), 1, (32, 32)), ((2, 1, 1), 1, (80, 48)), ((1,), 2, (24, 40)), ((), 8, (64, 64)), ((), 1, (20, 36))]


@pytest.mark.parametrize(("blocks", "patch", "size"), HYBRIDS)
def test_hybrid_is_equal_and_written_back(
    tmp_path: Path, blocks: tuple[int, ...], patch: int, size: tuple[int, int]
) -> None:
    peer = timm_hybrid(blocks, patch, img_size=size)
    path = write(peer.state_dict(), tmp_path / "model.safetensors")
    model = check(path, peer, heads=4, image_size=None if size[0] == size[1] else size)
    assert model.config.stem.blocks == blocks
    check_written(model, peer, "timm", tmp_path)


BIT = tiny.mostly_slow([((2, 1), (33, 47)), ((2, 1, 1), (7, 9)), ((1, 1, 1, 2), (65, 98))], 2)


@pytest.mark.parametrize(("blocks", "size"), BIT)
def test_bit_is_equal_and_written_back(tmp_path: Path, blocks: tuple[int, ...], size: tuple[int, int]) -> None:
    peer = timm_bit(blocks)
    model = check(write(peer.state_dict(), tmp_path / "model.safetensors"), peer, size=size)
    assert model.config.blocks == blocks
    check_written(model, peer, "timm", tmp_path)


def from_folder(folder: Path) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True)


SWIGLU: dict[str, Any] = {"gated": True, "activation": "silu"}
DINOV3: dict[str, Any] = {"rotary": "dinov3", "posemb": "none", "posemb_prefix": "none", "norm_eps": 1e-5}
# Models that only their config.json says how to compute
OURS: list[dict[str, Any]] = [
    *({"activation": activation} for activation in ("gelu", "gelu_tanh", "gelu_sigmoid", "relu")),
    {"activation": "relu", "distillation": True},
    SWIGLU,
    SWIGLU | {"layer_scale": 0.1},
    {"block_bias": "no_k"},
    {"block_bias": "no_k", "rotary": "eva02"},
    {"block_bias": "no_k", "rotary": "eva02", "norm_inner": "mlp"} | SWIGLU,
    {"block_bias": "no_k"} | DINOV3,
    {"block_bias": "no_qkv", "layer_scale": 0.1} | DINOV3 | SWIGLU,
    {"rotary": "axial", "layer_scale": 0.1},
]


@pytest.mark.parametrize("settings", OURS)
def test_written_timm_folder_says_how_to_compute_the_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tiny.vit(torch.float32, numerics="timm", **{"mlp_dim": 488, "width": 56, "heads": 7} | settings)
    assert int(56 * (488 / 56)) == 487  # timm computes int(width * ratio), which must not lose one
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    assert gap(model, from_folder(folder)) < CLOSE
    write(safetensors.torch.load_file(folder / "model.safetensors"), folder / "model.safetensors")
    config = plainvit.load(folder).config  # without plainvit's own description
    assert config == model.config.replace(layer_scale=config.layer_scale, posemb_prefix=config.posemb_prefix)


def timm_folder(folder: Path, arguments: dict[str, Any]) -> nn.Module:
    """A folder as timm itself writes it for the hub, of a model that is not of the architecture's own shape."""
    peer = timm.create_model("vit_base_patch16_224", **arguments).double().eval()
    scramble(peer)
    save_for_hf(peer, str(folder), model_args=arguments, safe_serialization=True)
    return peer


FOLDER: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
FOLDER |= {"mlp_ratio": 2.0, "num_classes": 7}


# What bare weights cannot say: the grid (2 x 8 is a square number) and where the norm is
STATED: list[dict[str, Any]] = [
    {"img_size": (24, 40)},
    {"img_size": (16, 64)},
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "avg", "fc_norm": False, "reg_tokens": 2},
    {"fc_norm": True},
]


@pytest.mark.parametrize("arguments", STATED)
def test_timm_folder_states_grid_and_pooling(tmp_path: Path, arguments: dict[str, Any]) -> None:
    peer = timm_folder(tmp_path, FOLDER | arguments)
    size = arguments.get("img_size", (32, 32))
    # What timm has there for a published model of that size
    edit_json(tmp_path / "config.json", lambda described: described["pretrained_cfg"].update(input_size=[3, *size]))
    assert check(tmp_path, peer, heads=4).config.grid == (size[0] // 8, size[1] // 8)
    other = plainvit.load(tmp_path, heads=4, image_size=(40, 40))
    assert other.config.grid == (5, 5)


def test_timm_folder_has_pixels_and_class_names(tmp_path: Path) -> None:
    names = ["tench", "goldfish", "shark", "ray", "cock", "hen", "ostrich"]
    peer = timm_folder(tmp_path, FOLDER)
    peer.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.7}
    peer.pretrained_cfg |= {"interpolation": "lanczos"}
    save_for_hf(peer, str(tmp_path), {"label_names": names}, FOLDER, safe_serialization=True)
    model = check(tmp_path, peer, heads=4)
    assert (model.config.mean, model.config.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (model.about.preprocess.crop, model.about.preprocess.interpolation) == (0.7, "lanczos")
    assert model.about.class_names == tuple(names)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


UNSUPPORTED = [
    {"global_pool": "avgmax"},
    {"global_pool": "max"},
    {"norm_layer": "rmsnorm"},
    {"pool_include_prefix": True},
]


@pytest.mark.parametrize("arguments", UNSUPPORTED)
def test_unsupported_timm_arguments_are_errors(tmp_path: Path, arguments: dict[str, Any]) -> None:
    timm_folder(tmp_path, FOLDER)
    edit_json(tmp_path / "config.json", lambda described: described["model_args"].update(arguments))
    with pytest.raises(ValueError, match=str(next(iter(arguments.values()))) + "|" + next(iter(arguments))):
        plainvit.load(tmp_path)


def test_unknown_timm_architecture_is_an_error(tmp_path: Path) -> None:
    """Its heads, activation and positions are not guessed; without config.json they are assumptions."""
    timm_folder(tmp_path, {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2})
    edit_json(tmp_path / "config.json", lambda described: described.update(architecture="new_vit", model_args={}))
    with pytest.raises(ValueError, match="new_vit"):
        plainvit.load(tmp_path)
    sources = plainvit.load(tmp_path / "model.safetensors").about.sources
    assert sources["heads"].startswith("assumed")
    assert sources["activation"].startswith("assumed")


@pytest.mark.parametrize("resize", ["squash", "crop", "squash-crop"])
def test_timm_crops_like_plainvit(tmp_path: Path, resize: str) -> None:
    """`crop` has no effect on a square resize."""
    model = tiny.vit(torch.float32, numerics="timm", image_size=32)
    model.about = About(preprocess=Preprocess(resize=resize, crop=0.5))
    folder = plainvit.save(model, tmp_path / "folder", format="timm")
    photo = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8).repeat(32, 0).repeat(32, 1)
    settings = timm.data.resolve_model_data_config(from_folder(folder))
    theirs = timm.data.create_transform(**settings, is_training=False)(Image.fromarray(photo)).numpy()
    ours = preprocess_image(photo, model.about.preprocess, (32, 32)).numpy() / 127.5 - 1
    assert np.abs(theirs - ours).max() < 0.02


def test_shape_without_a_name_in_timm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timm has no model"):
        plainvit.save(tiny.bit(numerics="timm"), tmp_path / "folder", format="timm")
    assert not list(tmp_path.iterdir())


# Processors of transformers -------------------------------------------------------------------------------------------

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
    "not normalized": ("ViTImageProcessor", {"do_normalize": False}),
    "bytes": ("ViTImageProcessor", {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [64.0] * 3}),
    "rescaled": ("ViTImageProcessor", {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [2.0] * 3}),
}


def photos() -> list[Image.Image]:
    """Two drawn ones, wide and tall, and where they are at hand some real ones."""
    images = [photo(90, 130, seed=1), photo(200, 110, seed=2)]
    root = os.environ.get("PLAINVIT_DATA")
    if root:
        rows = pyarrow.parquet.read_table(next(Path(root, "imagenet-photos").glob("*.parquet"))).slice(0, 8).to_pylist()
        images += [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]
    return [image for image in images if image.width != image.height]


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
        ours = loaded.normalize(preprocess_image(np.array(image), loaded.about.preprocess, (32, 32))[None])[0].numpy()
        assert smallest_gap(ours, theirs, shift=int(loaded.about.preprocess.resize == "crop")) < 0.01
        assert np.allclose(written(image, return_tensors="np")["pixel_values"][0], theirs, rtol=0, atol=1e-6)


def test_processor_next_to_a_tokenizer_is_read(tmp_path: Path) -> None:
    """Version 5 writes the image processor of CLIP and SigLIP into processor_config.json."""
    folder = plainvit.save(tiny.vit(numerics="transformers", image_size=32), tmp_path / "f", format="transformers")
    write(safetensors.torch.load_file(folder / "model.safetensors"), folder / "model.safetensors")
    (folder / "preprocessor_config.json").unlink()
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=32, image_mean=[0.1, 0.2, 0.3])
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": processor.to_dict()}))
    model = plainvit.load(folder)
    assert (model.config.mean, model.about.preprocess.resize) == ((0.1, 0.2, 0.3), "crop")
    assert model.about.preprocess.crop == 0.8
    assert not model.about.sources["preprocess"].startswith("assumed")


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


@pytest.mark.parametrize("old", [False, True], ids=["new names", "names before metadata version 2"])
@pytest.mark.parametrize("hidden", [None, 20], ids=["", "pre_logits"])
def test_torchvision_model_is_equal_and_written_back(tmp_path: Path, hidden: int | None, old: bool) -> None:
    peer = torchvision_vit(representation_size=hidden)
    renames = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."} if old else {}
    state = peer.state_dict()
    for new, before in renames.items():
        state = {name.replace(new, before): x for name, x in state.items()}
    model = check(write(state, tmp_path / ("m.pth" if old else "m.safetensors")), peer, heads=4)
    assert model.config.representation == (hidden or 0)
    check_written(model, peer, "torchvision", tmp_path)


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
    detected, _ = inspect_weights(hollow(state, tmp_path / "hollow.safetensors"))
    ours, source = detected.preprocess, detected.sources["preprocess"]
    same = (
        ours.interpolation == theirs.interpolation.value
        and round(theirs.crop_size[0] / ours.crop) == theirs.resize_size[0]
    )
    assert source.startswith("assumed")
    assert any(note.startswith("assumed") and "interpolation" in note for note in detected.notes)
    assert same or "SWAG_LINEAR" in source
    assert same is (published.name != "IMAGENET1K_SWAG_LINEAR_V1" or name == "vit_h_14")
