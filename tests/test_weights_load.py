"""`plainvit.load` and its messages: replaced heads, resampled positions, hints, families, the hub's cache.

References: timm's and transformers' models and tables, SciPy's zoom for positions, each family's published
preprocessing, and files written here as the training scripts write them.
"""

import argparse
import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import test_weights_google as google
import timm
import tiny
import torch
import transformers
from peer_models import timm_vit, torchvision_vit
from peers import normalize, write
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torchvision.models.vision_transformer import interpolate_embeddings

import plainvit
from plainvit.evaluate.inspection import describe_weights
from plainvit.models.resample import resize
from plainvit.weights.published import PUBLISHED

EXACT, SINGLE = 1e-10, 1e-6  # timm and torchvision resample in fp32
HALF = ((0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
State = dict[str, Tensor]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What plainvit reported, without the name of the file; each report is one line."""
    records = [record for record in caplog.records if record.name == "plainvit"]
    assert all("\n" not in record.getMessage() for record in records)
    return [record.getMessage().split(": ", 1)[1] for record in records]


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "plainvit")
    return lambda: lines(caplog)


def load_error(source: Path | str, match: str, **hints: Any) -> None:
    """Loading is an error of one line that matches."""
    with pytest.raises(ValueError, match=match) as caught:
        plainvit.load(source, **hints)
    assert "\n" not in str(caught.value)


# Another head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [0, 5])
@pytest.mark.parametrize("settings", [{}, {"representation": 20}, {"distillation": True}], ids=str)
def test_other_classes_give_a_head_of_zeros_or_none(
    tmp_path: Path, settings: dict[str, Any], classes: int, reported: Any
) -> None:
    model, images = tiny.vit(**settings), tiny.images()
    model.about = type(model.about)(class_names=tuple("abcdefg"))
    path = plainvit.save(model, tmp_path / "m.safetensors")
    loaded = plainvit.load(path, classes=classes, dtype=None)
    assert (loaded.config.classes, loaded.config.representation, loaded.about.class_names) == (classes, 0, ())
    features = loaded.features(images) if "representation" in settings else model.features(images)
    assert torch.equal(loaded(images), torch.zeros(2, 5, dtype=torch.float64) if classes else features)
    assert len(reported()) == 1
    assert plainvit.load(path).about.class_names == tuple("abcdefg")


@pytest.mark.parametrize("bias", [0.0, -10.0], ids=["zeros", "bias of the i21k head's start"])
def test_head_of_zeros_is_reported(tmp_path: Path, bias: float, reported: Any) -> None:
    """As in imagenet21k/*.npz. A constant bias says nothing of an image either."""
    arrays = google.original(google.D)
    arrays["head/kernel"] = np.zeros_like(arrays["head/kernel"])
    arrays["head/bias"] = np.full_like(arrays["head/bias"], bias)
    path = google.save(arrays, tmp_path / "B_16.npz")
    plainvit.load(path)
    assert [line for line in reported() if "features only" in line]
    assert describe_weights(path)["head"] == "all zeros: features only"


# Another size ---------------------------------------------------------------------------------------------------------


SIZES = {
    "wide to tall": ((24, 40), (64, 16)),
    "as many tokens, other sides": ((112, 112), (56, 224)),  # 14 x 14 and 7 x 28: nothing may pass unresampled
    "as many tokens, turned": ((24, 40), (40, 24)),
}


@pytest.mark.parametrize(("old", "new"), SIZES.values(), ids=SIZES)
def test_other_size_resamples_on_the_true_grid(
    tmp_path: Path, old: tuple[int, int], new: tuple[int, int], reported: Any
) -> None:
    """By Google's method unless another is given; tests/test_resample.py compares the methods with libraries."""
    model = tiny.vit(image_size=old)
    path = plainvit.save(model, tmp_path / "m.safetensors")
    before, after = (tuple(side // 8 for side in size) for size in (old, new))
    for given, method in ((None, "bilinear-aligned"), ("bicubic-antialias", "bicubic-antialias")):
        loaded = plainvit.load(path, image_size=new, resample=given, dtype=None)
        assert torch.equal(loaded.positions[0].table, resize(model, new, method=method).positions[0].table)
        assert loaded(tiny.images(size=new)).shape == (2, 7)
        assert f"{before[0]} x {before[1]} to {after[0]} x {after[1]} ({method})" in reported()[-1]


@pytest.mark.parametrize("size", [16, 48, 56])
def test_other_size_equals_torchvision(tmp_path: Path, size: int) -> None:
    path = bare("torchvision", (32, 32), tmp_path)
    state = interpolate_embeddings(size, 8, safetensors.torch.load_file(path))
    table = plainvit.load(path, image_size=size, heads=4).positions[0].table
    assert tiny.difference(table, state["encoder.pos_embedding"][0]) < SINGLE


def test_converted_weights_are_resampled_like_their_family(tmp_path: Path) -> None:
    """plainvit's own format keeps where the weights come from."""
    path = bare("torchvision", (32, 32), tmp_path)
    expected = plainvit.load(path, image_size=48, heads=4).positions[0].table
    own = plainvit.save(plainvit.load(path, heads=4), tmp_path / "own.safetensors")
    assert torch.equal(plainvit.load(own, image_size=48).positions[0].table, expected)


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"classes": -1}, "classes"),
        ({"image_size": 33}, "33 x 33"),
        ({"image_size": 64, "resample": "bicubik"}, "bicubik"),
    ],
)
def test_invalid_arguments_are_one_line_errors(tmp_path: Path, hints: dict[str, Any], words: str) -> None:
    load_error(plainvit.save(tiny.vit(), tmp_path / "m.safetensors"), words, **hints)


def test_bit_loads_at_any_size(tmp_path: Path) -> None:
    path = plainvit.save(tiny.bit(blocks=(1,)), tmp_path / "m.safetensors")
    assert plainvit.load(path, image_size=(40, 48)).config.image_size == (40, 48)


# What a bare file cannot say ------------------------------------------------------------------------------------------


def of_transformers(kind: str, head: str = "ForImageClassification", size: tuple[int, int] = (32, 32)) -> Any:
    shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = getattr(transformers, f"{kind}Config")(**shape, image_size=size, patch_size=8, num_labels=7)
    return getattr(transformers, f"{kind}{head}")(config)


def bare(kind: str, size: tuple[int, int], folder: Path) -> Path:
    """Bare weights of each library, on a grid of any sides."""
    if kind == "timm":
        return write(timm_vit(img_size=size).state_dict(), folder / "m.safetensors")
    if kind == "transformers":
        return write(of_transformers("ViT", size=size).state_dict(), folder / "m.safetensors")
    state = torchvision_vit(num_layers=1).float().state_dict()
    table = {"encoder.pos_embedding": torch.randn(1, size[0] * size[1] // 64 + 1, 48)}
    return write(state | table, folder / "m.safetensors")


BARE = ["timm", "transformers", "torchvision"]


@pytest.mark.parametrize("kind", BARE)
def test_grid_and_heads_must_be_given(tmp_path: Path, kind: str) -> None:
    """A table that is no square, and a width that no convention has."""
    path = bare(kind, (24, 48), tmp_path)
    load_error(path, r"19 positions.*grid=.*image_size=", heads=4)
    for hint in ({"grid": (3, 6)}, {"image_size": (24, 48)}):
        model = plainvit.load(path, heads=4, **hint)
        assert (model.config.image_size, model.config.grid, model.config.heads) == ((24, 48), (3, 6), 4)
        load_error(path, "width 48.*heads=N", **hint)
        for heads in (5, -4, 0):
            load_error(path, "heads", heads=heads, **hint)
    for hint in ({"grid": (3, 5)}, {"image_size": (24, 40)}, {"image_size": (25, 48)}):
        load_error(path, "19 positions", heads=4, **hint)


def test_ambiguous_grid_is_an_error(tmp_path: Path) -> None:
    """25 rows, a class token and 8 registers: 5 x 5 without rows for them, or 4 x 4 with."""
    for size, settings in ((40, {"no_embed_class": True}), (32, {})):
        path = write(timm_vit(img_size=size, reg_tokens=8, **settings).state_dict(), tmp_path / "m.safetensors")
        load_error(path, "25 positions", heads=4)
        assert plainvit.load(path, heads=4, grid=(size // 8, size // 8)).config.image_size == (size, size)


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (128, 2), (1280, 16)])
def test_assumed_heads_are_reported(tmp_path: Path, width: int, heads: int, reported: Any) -> None:
    """By the paper's table, else 64 a head; H/14 has 80."""
    peer = timm_vit(embed_dim=width, num_heads=heads, depth=1, mlp_ratio=0.1)
    path = write(peer.float().state_dict(), tmp_path / "m.safetensors")
    assert plainvit.load(path).config.heads == heads
    assert [line for line in reported() if line.startswith("heads: assumed")]


# Families -------------------------------------------------------------------------------------------------------------


def deit(state: State) -> dict[str, Any]:
    """As DeiT's and MAE's training codes save: flags and optimizer next to the weights."""
    flags = argparse.Namespace(lr=5e-4, model="deit_small_patch16_224", resume="")
    return {"model": state, "args": flags, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}, "epoch": 299}


def encoder(**settings: Any) -> tuple[Any, State]:
    peer = timm_vit(**settings)
    return peer, peer.state_dict()


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: x for name, x in state.items()}


def noise(**shapes: tuple[int, ...]) -> State:
    return {name.replace("__", "."): torch.randn(shape) for name, shape in shapes.items()}


def deit_3() -> tuple[Any, Any]:
    """LayerScale under its own names, positions for the patches alone."""
    peer, state = encoder(init_values=0.1, no_embed_class=True)
    return peer, {"model": {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): x for name, x in state.items()}}


def mae(*, decoder: bool) -> tuple[Any, Any]:
    """Fixed positions, with zeros for the class token."""
    peer = timm_vit(num_classes=0)
    with torch.no_grad():
        peer.pos_embed[:, 0] = 0
    extra = noise(mask_token=(1, 1, 32), decoder_embed__weight=(32, 48), decoder_pos_embed=(1, 17, 32))
    extra |= noise(decoder_blocks__0__attn__qkv__weight=(96, 32), decoder_pred__weight=(192, 32))
    return peer, deit(peer.state_dict() | (extra if decoder else {}))


def dino() -> tuple[Any, Any]:
    """The teacher counts: backbone and projection head."""
    peer, state = encoder(num_classes=0)
    head = noise(head__mlp__0__weight=(64, 48), head__mlp__0__bias=(64,), head__last_layer__weight_g=(100, 1))
    teacher = prefixed(state, "backbone.") | head
    student = {name: torch.zeros_like(x) for name, x in prefixed(teacher, "module.").items()}
    return peer, {"student": student, "teacher": teacher, "epoch": 100}


def dinov2(registers: int, *, wrapped: bool) -> tuple[Any, Any]:
    """Its table has a row for the class token and none for the registers; timm folds that row into the token."""
    peer, state = encoder(num_classes=0, init_values=0.1, reg_tokens=registers, no_embed_class=True)
    row = torch.linspace(-1, 1, 48, dtype=torch.float64).view(1, 1, 48)  # a constant would vanish in LayerNorm
    state |= {"cls_token": state["cls_token"] - row, "pos_embed": torch.cat((row, state["pos_embed"]), 1)}
    state["mask_token"] = torch.zeros(1, 48)
    if registers:
        state["register_tokens"] = state.pop("reg_token")
    heads = noise(dino_head__mlp__0__weight=(9, 48), ibot_head__last_layer__weight_v=(9, 9))
    return peer, {"teacher": prefixed(state, "backbone.") | heads} if wrapped else state


def wrap(change: Callable[[State], Any], **settings: Any) -> tuple[Any, Any]:
    peer, state = encoder(**settings)
    return peer, change(state)


# name: the family, timm's model and the file, settings of ours, and what is reported as left out
SCRIPTS: dict[str, tuple[str, Callable[[], tuple[Any, Any]], dict[str, Any], str]] = {
    "DeiT": ("DeiT", lambda: wrap(deit), {}, ""),
    "DeiT, distilled": ("DeiT", lambda: wrap(deit, kind=VisionTransformerDistilled), {"distillation": True}, ""),
    "PyTorch's ImageNet example, with its best accuracy": (
        *("DeiT", lambda: wrap(lambda state: {"best_acc1": torch.tensor(81.2)} | deit(state)), {}, ""),
    ),
    "DeiT III": ("DeiT III", deit_3, {"posemb_prefix": "none"}, ""),
    "MAE": ("MAE", partial(mae, decoder=False), {}, ""),
    "MAE with its decoder": ("MAE", partial(mae, decoder=True), {}, "decoder_blocks"),
    "MAE, bare, with its mask token": (
        *("MAE", lambda: wrap(lambda state: state | noise(mask_token=(1, 1, 32)), num_classes=0), {}, "mask_token"),
    ),
    "MAE, fine-tuned": ("MAE", lambda: wrap(deit, global_pool="avg"), {"pool": "average", "norm_pooled": True}, ""),
    "DINO": ("DINO", dino, {}, "head"),
    "DINOv2": ("DINOv2", partial(dinov2, 0, wrapped=False), {"posemb_prefix": "class"}, "mask_token"),
    "DINOv2, teacher": ("DINOv2", partial(dinov2, 0, wrapped=True), {"posemb_prefix": "class"}, "ibot_head"),
    "DINOv2 with registers": ("DINOv2", partial(dinov2, 4, wrapped=False), {"registers": 4}, "mask_token"),
    "DINOv2 with registers, teacher": ("DINOv2", partial(dinov2, 4, wrapped=True), {"registers": 4}, "ibot_head"),
}


@pytest.mark.parametrize(("name", "legacy"), [(name, bool(at % 2)) for at, name in enumerate(SCRIPTS)])
def test_file_of_a_training_script_equals_timm(tmp_path: Path, name: str, legacy: bool, reported: Any) -> None:
    family, build, settings, left_out = SCRIPTS[name]
    peer, saved = build()
    path = tmp_path / "m.pth"
    torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
    model = plainvit.load(path, heads=4, dtype=None)
    assert model.about.family == family
    assert (model.config.mean, model.config.std) == IMAGENET
    assert (model.config.activation, model.config.norm_eps) == ("gelu", 1e-6)
    assert {key: getattr(model.config, key) for key in settings} == settings
    assert model.about.preprocess.crop == (1.0 if family == "DeiT III" else 0.875)
    lines = " ".join(line for line in reported() if "left out" in line)
    assert left_out in lines
    assert bool(lines) == bool(left_out)
    images = tiny.images(size=(32, 32))
    with torch.inference_mode():
        assert tiny.difference(model(images), peer(normalize(model, images))) < EXACT


# Each training code's own call of F.interpolate from a 4 x 4 grid to 6 x 3: DINO's scale factors move every sample
OFFSET = {"scale_factor": (6.1 / 4, 3.1 / 4)}
INTERPOLATED = {"DeiT": {"size": (6, 3)}, "MAE": {"size": (6, 3)}, "DINO": OFFSET, "DINOv2": OFFSET}


@pytest.mark.parametrize("name", INTERPOLATED)
def test_other_size_equals_the_training_script(tmp_path: Path, name: str) -> None:
    peer, saved = SCRIPTS[name][1]()
    model = plainvit.load(write(saved, tmp_path / "m.pth"), image_size=(48, 24), heads=4, dtype=None)
    grid = peer.pos_embed[:, -16:].view(1, 4, 4, 48).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(grid, mode="bicubic", align_corners=False, **INTERPOLATED[name])
    assert tiny.difference(model.positions[0].table[1:], expected.flatten(2)[0].mT) < EXACT


@pytest.mark.parametrize(
    ("plain", "averaged"), [("model", "model_ema"), ("state_dict", "state_dict_ema"), ("student", "teacher")]
)
def test_averaged_weights_are_preferred(tmp_path: Path, plain: str, averaged: str) -> None:
    peer, state = encoder(num_classes=0)
    trained = {name: x + 1 for name, x in state.items()}
    path = write({plain: trained, averaged: state}, tmp_path / "m.pth")
    loaded = plainvit.load(path, heads=4, dtype=None)
    assert torch.equal(loaded.blocks[0].mlp.fc1.bias, peer.blocks[0].mlp.fc1.bias)


def hub_folder(folder: Path, kind: str, processor: dict[str, Any] | None) -> Path:
    of_transformers(kind).save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.parametrize(("kind", "pixels"), [("ViT", HALF), ("DeiT", IMAGENET)])
def test_transformers_pixels_without_a_processor(tmp_path: Path, kind: str, pixels: Any) -> None:
    model = plainvit.load(hub_folder(tmp_path, kind, None))
    assert (model.config.mean, model.config.std) == pixels
    assert model.config.norm_eps == 1e-12


def test_file_is_preferred_to_the_index_of_older_shards(tmp_path: Path) -> None:
    """As transformers leaves and reads it."""
    folder = hub_folder(tmp_path, "ViT", None)
    peer = transformers.ViTForImageClassification.from_pretrained(folder)
    peer.save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    images = tiny.images(size=(32, 32), dtype=torch.float32)
    sharded = plainvit.load(folder)
    with torch.inference_mode():
        assert tiny.difference(sharded(images), peer(normalize(sharded, images)).logits) < SINGLE
    torch.nn.init.ones_(peer.classifier.weight)
    peer.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    assert torch.equal(plainvit.load(folder).head.weight, torch.ones_like(sharded.head.weight))


def test_folder_of_several_models_is_an_error(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        plainvit.save(tiny.vit(torch.float32), tmp_path / name)
    load_error(tmp_path, r"2 weights files \(a\.safetensors, b\.safetensors\)")
    (tmp_path / "a.safetensors").rename(tmp_path / "model.safetensors")
    assert plainvit.load(tmp_path).config.classes == 7


# Unsupported ----------------------------------------------------------------------------------------------------------


def swin() -> State:
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4}
    return SwinTransformer(**shape, num_classes=7).state_dict()


UNSUPPORTED: dict[str, tuple[Callable[[], State], str]] = {
    "BEiT, shared bias": (lambda: timm_vit(Beit, use_shared_rel_pos_bias=True, init_values=0.1).state_dict(), "BEiT"),
    "Swin": (swin, "Swin"),
    "chunked DINOv2": (
        lambda: {n.replace("blocks.", "blocks.0."): x for n, x in timm_vit().state_dict().items()},
        "DINOv2",
    ),
    "a tower of another model": (
        lambda: {f"tower.{n}": x for n, x in of_transformers("ViT", "Model").state_dict().items()},
        r"a ViT inside, under 'tower\.'",
    ),
    "torchvision's convolutional stem": (
        lambda: {"conv_proj.conv_bn_relu_0.0.weight": torch.zeros(8, 3, 3, 3)} | torchvision_vit().state_dict(),
        "a convolutional stem",
    ),
}


@pytest.mark.parametrize(("build", "name"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_models_are_named(tmp_path: Path, build: Callable[[], State], name: str) -> None:
    path = write({n: x.contiguous() for n, x in build().items()}, tmp_path / "m.pth")
    load_error(path, f"{name}.*not support", heads=4)


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "mobilenetv3_small_050", "resnetv2_50"])
def test_other_networks_are_errors(tmp_path: Path, name: str) -> None:
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
    state = {key: torch.zeros(x.shape, dtype=torch.float16) for key, x in state.items()}
    load_error(write(state, tmp_path / "m.safetensors"), r"m\.safetensors|timm|ResNet")


# Describing -----------------------------------------------------------------------------------------------------------

SHAPES = "shapes of the weights"
# What no shape shows; a file of any kind must say where it has these from
NUMERICS = {
    "vit": ("activation", "norm_eps", "mean", "std", "image_size"),
    "resnet": ("standardize", "norm_eps", "padding", "mean", "std"),
}
FILES: dict[str, Callable[[Path], Path]] = {
    "google": lambda folder: google.save(google.original(), folder / "m.npz"),
    "google hybrid": lambda folder: google.save(
        google.original(stem=google.stem_shapes((1, 1)), kernel=(1, 1, 512)), folder / "m.npz"
    ),
    "big_vision": lambda folder: google.save(google.prefixed(google.big_vision("map"), "params/"), folder / "m.npz"),
    "BiT": lambda folder: google.save(google.bit_arrays((1, 1)), folder / "m.npz"),
    "timm": lambda folder: write(encoder()[1], folder / "m.safetensors"),
    "timm BiT": lambda folder: plainvit.save(tiny.bit(blocks=(1, 1), numerics="timm"), folder / "m.bin", format="timm"),
    "timm hybrid": lambda folder: plainvit.save(
        tiny.hybrid(blocks=(1, 1), image_size=(32, 32), numerics="timm"), folder / "m.bin", format="timm"
    ),
    "DeiT": lambda folder: write(deit(encoder()[1]), folder / "m.pth"),
    "PyTorch": lambda folder: write({"state_dict": encoder()[1]}, folder / "m.pth"),
    "transformers without a processor": lambda folder: hub_folder(folder, "ViT", None),
    "transformers": lambda folder: bare("transformers", (32, 32), folder),
    "transformers folder": lambda folder: hub_folder(folder, "ViT", {"image_mean": [0.5] * 3}),
    "torchvision": lambda folder: bare("torchvision", (32, 32), folder),
    "plainvit": lambda folder: plainvit.save(tiny.vit(), folder / "m.safetensors"),
    "plainvit BiT": lambda folder: plainvit.save(tiny.bit(blocks=(1, 1)), folder / "m.safetensors"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_setting_has_a_source(tmp_path: Path, name: str) -> None:
    path = FILES[name](tmp_path)
    path.with_name(f"{path.name}.plainvit.json").unlink(missing_ok=True)
    described = describe_weights(path, heads=4)
    json.dumps(described)
    assert set(described["sources"]) == {*described["settings"], "preprocess"}
    assert all(isinstance(source, str) and source for source in described["sources"].values())
    numerics = NUMERICS["resnet" if "BiT" in name else "vit"]
    sources = {key: described["sources"][key] for key in (*numerics, "preprocess")}
    assert SHAPES not in sources.values(), sources


# Published ------------------------------------------------------------------------------------------------------------

OF_TIMM = [name for name, entry in PUBLISHED.items() if entry.hub.startswith("timm/")]


@pytest.mark.parametrize("name", OF_TIMM)
def test_published_weights_equal_timms_table(name: str) -> None:
    entry = PUBLISHED[name]
    model = entry.hub.removeprefix("timm/")
    assert model in timm.list_pretrained()
    published = timm.models.get_pretrained_cfg(model)
    assert published.hf_hub_id in (entry.hub, "timm/")
    assert entry.license == published.license
    assert name.endswith(f"_{published.input_size[-1]}")


# The hub --------------------------------------------------------------------------------------------------------------

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


def plant(cache: Path, name: str, revisions: dict[str, Any], file: str = "model.safetensors") -> None:
    """A repository in the cache of huggingface_hub: blobs, snapshots of links to them, and refs."""
    root = cache / f"models--{name.replace('/', '--')}"
    for revision, model in revisions.items():
        commit, blob = COMMITS[revision], root / "blobs" / f"blob-of-{revision}"
        for folder in (root / "refs", root / "snapshots" / commit, root / "blobs"):
            folder.mkdir(parents=True, exist_ok=True)
        if file.endswith(".bin"):
            torch.save(model.state_dict(), blob)
        else:
            plainvit.save(model, blob)
        (root / "snapshots" / commit / file).symlink_to(Path("..") / ".." / "blobs" / blob.name)
        (root / "refs" / revision).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own, and no network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.mark.parametrize("revision", ["v1", COMMITS["v1"]])
def test_revision_is_respected(cache: Path, revision: str) -> None:
    main, other = tiny.vit(torch.float32), tiny.vit(torch.float32, classes=3)
    plant(cache, "org/name", {"main": main, "v1": other})
    assert plainvit.load(f"hf:org/name@{revision}").config.classes == 3
    assert plainvit.load("hf:org/name").config.classes == 7


def test_published_name_loads_from_the_cache(cache: Path) -> None:
    plant(cache, "timm/vit_base_patch16_224.augreg_in21k_ft_in1k", {"main": tiny.vit()})
    assert plainvit.load("vit_b16_augreg_i21k_i1k_224").config.width == 48


@pytest.mark.usefixtures("cache")
def test_published_name_offline_says_how_to_download() -> None:
    load_error("vit_b16_augreg_i21k_i1k_224", "hf download timm/")


@pytest.mark.parametrize(
    "address",
    [
        *("nobody/nothing", "nobody/nothing@v1", "nothing", "org/name@v9"),
        *("", "a/b/c", "../../etc/passwd", "org/na me", "org/name@../..", "-/-", "@v1"),
    ],
)
def test_unknown_hub_address_is_a_one_line_error(cache: Path, address: str) -> None:
    plant(cache, "org/name", {"main": tiny.vit()})
    load_error(f"hf:{address}", re.escape(address) if address.startswith(("no", "org/name@v")) else ".")


def test_only_safetensors_come_from_the_hub(cache: Path) -> None:
    plant(cache, "org/name", {"main": timm_vit()}, "pytorch_model.bin")
    load_error("hf:org/name", "safetensors", heads=4)


@pytest.mark.parametrize("word", ["vit_b16_augreg_i21k", "vit_b16_augrg_i21k_i1k_224"])
def test_misspelt_published_name_gives_the_nearest(word: str) -> None:
    load_error(word, r"nearest: .*vit_b16_augreg_i21k")


@pytest.mark.parametrize("source", ["no/such/file.npz", "no such folder/", "a\0b.npz"])
def test_missing_path_is_a_one_line_error(source: str) -> None:
    load_error(source, "no file or folder")
