"""open_clip's image towers, compared with the library itself (skipped where it is not installed)."""

import collections
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import tiny
import torch
from peers import normalize, scramble

import plainvit

open_clip = pytest.importorskip("open_clip")
VISION: dict[str, Any] = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32}
TEXT = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
CLIPA = {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True}
TOWERS: dict[str, tuple[dict[str, Any], bool]] = {
    "gelu": ({}, False),
    "quick gelu": ({}, True),
    "LayerScale": ({"ls_init_value": 0.1}, False),
    "CLIPA": (CLIPA, False),
    "rectangle": ({"image_size": (24, 40)}, False),
}


def make(settings: dict[str, Any], quick_gelu: bool, folder: Path) -> Any:
    """A model of open_clip, saved as its push_to_hf_hub does."""
    model = {"embed_dim": 24, "vision_cfg": VISION | settings, "text_cfg": TEXT, "quick_gelu": quick_gelu}
    peer = open_clip.CLIP(**model).eval()
    scramble(peer)
    folder.mkdir()
    safetensors.torch.save_file(peer.state_dict(), folder / "open_clip_model.safetensors")
    pixels = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear", "resize_mode": "squash"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": pixels}))
    return peer


@torch.inference_mode()
@pytest.mark.parametrize(("settings", "quick_gelu"), TOWERS.values(), ids=TOWERS)
def test_tower_equals_open_clip_and_is_written_back(tmp_path: Path, settings: dict[str, Any], quick_gelu: bool) -> None:
    peer = make(settings, quick_gelu, tmp_path / "hub")
    size = settings.get("image_size", (32, 32))
    model = plainvit.load(tmp_path / "hub")
    assert (model.config.mean, model.about.preprocess.resize) == ((0.1, 0.2, 0.3), "squash")
    images = tiny.images(2, size)
    theirs = peer.double().encode_image(normalize(model, images))
    assert tiny.difference(model(images.float()), theirs.float()) < 1e-5 * theirs.abs().max()
    written = safetensors.torch.load_file(plainvit.save(model, tmp_path / "m.safetensors", format="open_clip"))
    assert tiny.difference(model.double()(images), theirs) < 1e-10
    original = safetensors.torch.load_file(tmp_path / "hub" / "open_clip_model.safetensors")
    assert written.keys() == {name for name in original if name.startswith("visual.")}
    assert all(torch.equal(x, original[name]) for name, x in written.items())


@torch.inference_mode()
def test_other_resolution_equals_open_clip(tmp_path: Path) -> None:
    make({}, False, tmp_path / "hub")
    state = safetensors.torch.load_file(tmp_path / "hub" / "open_clip_model.safetensors")
    larger = open_clip.CLIP(embed_dim=24, vision_cfg=VISION | {"image_size": (48, 24)}, text_cfg=TEXT).eval()
    open_clip.model.resize_pos_embed(state, larger)
    larger.load_state_dict(state)
    model = plainvit.load(tmp_path / "hub", image_size=(48, 24)).double()
    images = tiny.images(2, (48, 24))
    theirs = larger.double().encode_image(normalize(model, images))
    assert tiny.difference(model(images), theirs) < 1e-5  # positions are resampled in fp32


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """One of open_clip's own models with one narrow block, and its config."""
    config = open_clip.get_model_config(name)
    vision, create = dict(config["vision_cfg"]), timm.create_model

    def create_narrow(*arguments: Any, **settings: Any) -> Any:
        with torch.device("meta"):
            heads = create(*arguments, **settings, depth=1).blocks[0].attn.num_heads
        shape = {} if "_mci_" in arguments[0] else {"embed_dim": 16 * heads}
        return create(*arguments, **settings, depth=1, **shape)

    if "timm_model_name" not in vision:
        heads = vision["width"] // vision.get("head_width", 64)
        vision |= {"layers": 1, "width": 16 * heads, "head_width": 16}
    described = {"embed_dim": 24, "vision_cfg": vision, "quick_gelu": config.get("quick_gelu", False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", create_narrow)
        return open_clip.CLIP(**described, text_cfg=TEXT), described


def is_plain(name: str) -> bool:
    """Whether the image tower is a ViT, and not a ResNet, CoCa, or a model of timm that is no plain ViT."""
    config = open_clip.get_model_config(name)
    vision = config["vision_cfg"]
    other = re.search("convnext|swin|vitamin|fastvit|_mci_|relpos", str(vision.get("timm_model_name", "")).lower())
    return not (other or "multimodal_cfg" in config or isinstance(vision.get("layers"), list))


@pytest.mark.slow
@torch.inference_mode()
def test_every_open_clip_model_is_equal_or_unsupported(tmp_path: Path) -> None:
    outcomes: dict[str, str] = {}
    for name in filter(is_plain, open_clip.list_models()):
        peer, described = build(name)
        scramble(peer.eval())
        safetensors.torch.save_file(peer.state_dict(), tmp_path / "open_clip_model.safetensors")
        (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": described, "preprocess_cfg": {}}))
        try:
            model = plainvit.load(tmp_path).double()
        except ValueError as error:
            outcomes[name] = str(error)
            continue
        images = tiny.images(1, peer.visual.image_size)
        theirs = peer.visual.double()(normalize(model, images))
        height, width = model.config.image_size  # timm leaves out what patches do not fill
        ours = model(images[..., :height, :width])
        outcomes[name] = "equal" if tiny.difference(ours, theirs) < 2e-6 * theirs.abs().max() else "different"
    print(collections.Counter("equal" if one == "equal" else one.split(" (")[0] for one in outcomes.values()))
    assert "different" not in outcomes.values()
    assert list(outcomes.values()).count("equal") >= 0.9 * len(outcomes)


REFUSED = [{"attentional_pool": True}, {"pool_type": "avg"}, {"norm_kwargs": {"eps": 1e-3}}]
REFUSED += [{"block_type": "custom", "scale_heads": True}]


@pytest.mark.parametrize("settings", REFUSED)
def test_other_tower_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    make(settings, False, tmp_path / "hub")
    with pytest.raises(ValueError, match=r"open_clip|CoCa|unknown weights"):
        plainvit.load(tmp_path / "hub")
