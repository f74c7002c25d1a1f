"""Every ViT, DeiT, hybrid, ResNetV2, EVA, BEiT and SAM name of timm, with every tag: the same features, or an error.

timm builds the model with one block (a ResNet with one unit in each stage), weights are random, and config.json is
timm's own. plainvit loads the folder and the bare weights. What it computes must be timm's; what it cannot compute must
be refused; what the bare weights leave open must be stated as an assumption.

    pytest tests/test_weights_sweep.py -m slow -s       all names; prints how many are equal and refused, and why
"""

import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import tiny
import torch
from peers import hollow, scramble
from timm.models import resnetv2
from timm.models._hub import save_config_for_hf

import plainvit
from plainvit.config import to_json

PREFIXES = ("vit_", "deit", "eva", "beit", "samvit", "aimv2", "flexivit", "test_vit", "resnetv2")
NAMES = [name for prefix in PREFIXES for name in timm.list_models(f"{prefix}*")]
OTHER_PARTS = ("relpos", "resnet", "_mci_")  # in names of ViTs that are not plain: relative positions, other CNN stems
FEW = {  # and the part that is not supported
    "vit_tiny_patch16_224": "",
    "vit_tiny_r_s16_p8_224": "",
    "deit_tiny_distilled_patch16_224": "",
    "vit_base_patch32_siglip_256": "",  # tanh GELU
    "vit_base_patch16_gap_224": "",  # 16 heads of 48
    "resnetv2_50x1_bit": "",
    "resnetv2_18": "a ResNet that is not BiT",
    "test_vit3": "pooling over all tokens",
    "test_vit4": "",  # RMSNorm
    "vit_base_patch16_plus_clip_240": "",
    "vit_medium_patch16_gap_240": "",  # no bias on q, k and v
    "vit_small_resnet26d_224": "a hybrid whose stem",
    "vit_small_patch16_dinov3": "",
    "eva02_tiny_patch14_224": "",
    "beit_base_patch16_224": "",
    "vit_small_patch16_rope_ape_224": "",  # the names and shapes of DeiT III
    "vit_small_patch16_rope_mixed_224": "learned rotary",
    "vit_base_patch16_rpn_224": "norms after each branch",
    "vit_pe_core_tiny_patch16_384": "pooling over all tokens",
    "vit_relpos_small_patch16_224": "relative positions",
    "samvit_base_patch16_224": "SAM",
}
HEAD_WIDTH = 16  # in place of 64 or more: heads and activation come from the name
CLOSE = 1e-8  # in float64: an epsilon of 1e-5 in place of 1e-6 would show
ROTARY = 2e-6  # timm computes the angles in fp32


def build(name: str) -> Any:
    """timm's model with one narrow block, without weights."""
    original = resnetv2.ResNetV2.__init__

    def with_one_unit(self: Any, layers: Any, *arguments: Any, **settings: Any) -> None:
        original(self, [1] * len(layers), *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(resnetv2.ResNetV2, "__init__", with_one_unit)
        if name.startswith("resnetv2") or "sapiens2" in name:  # which has a setting for each block, and is unsupported
            return timm.create_model(name)
        made = timm.create_model(name, depth=1)
        heads = getattr(getattr(made.blocks[0], "attn", None), "num_heads", 0)
        is_narrow = heads and not any(part in name for part in ("samvit", "mci"))
        return timm.create_model(name, depth=1, embed_dim=HEAD_WIDTH * heads) if is_narrow else made


def versions(name: str, folder: Path, most: int | None) -> Iterator[tuple[str, Any]]:
    """(tag, timm's model), the folder filled with each; tags whose weights have the same shapes share them.

    Of what is refused by its names and config.json no weights are made.
    """
    last, peer = None, None
    for tag in timm.list_models(f"{name}.*", pretrained=True)[:most] or [name]:
        made = build(tag)
        kind = {key: tuple(x.shape) for key, x in made.state_dict().items()}, getattr(made, "global_pool", "")
        save_config_for_hf(made, folder / "config.json")
        if kind != last:
            last, peer = kind, made
            hollow(made.state_dict(), folder / "model.safetensors")
            if not load(folder)[1]:
                peer.to_empty(device="cpu")
                for module in peer.modules():  # rotary angles
                    getattr(module, "init_non_persistent_buffers", lambda: None)()
                scramble(peer.double().eval())
                safetensors.torch.save_file(peer.state_dict(), folder / "model.safetensors")
        assert peer is not None
        peer.pretrained_cfg = made.pretrained_cfg
        yield tag, peer


@torch.inference_mode()
def gap(model: Any, peer: Any) -> float:
    """Largest difference of features and of logits, relative to the largest of timm's."""
    size = peer.pretrained_cfg["input_size"][1:] if hasattr(model.config, "heads") else (32, 32)
    images = tiny.images(1, tuple(size))
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (model.config.mean, model.config.std))
    tokens = peer.forward_features((images - mean[:, None, None]) / std[:, None, None])
    theirs = [peer.forward_head(tokens)]
    height, width = model.config.image_size if hasattr(model.config, "heads") else size
    images = images[..., :height, :width]  # timm leaves out what patches do not fill
    ours = [model(images)]
    if not getattr(model.config, "distillation", False):  # timm averages the two tokens' logits, not the tokens
        theirs.append(peer.forward_head(tokens, pre_logits=True).flatten(1))
        ours.append(model.features(images))
    return max(tiny.difference(a, b) / b.abs().max().item() for a, b in zip(ours, theirs, strict=True))


def check_preprocessing(model: Any, published: dict[str, Any]) -> None:
    config, about = model.config, model.about
    assert config.image_size == tuple(published["input_size"][1:]) or about.sources["image_size"].startswith("assumed")
    assert (config.mean, config.std) == (tuple(published["mean"]), tuple(published["std"]))
    assert (about.preprocess.crop, about.preprocess.interpolation) == (
        published["crop_pct"],
        published["interpolation"],
    )
    squash = "squash" if published["crop_pct"] == 1 else "squash-crop"
    assert about.preprocess.resize == {"center": "crop", "squash": squash}[published["crop_mode"]]


def load(path: Path) -> tuple[Any, str]:
    """(model, "") or (None, why it is refused)."""
    try:
        return plainvit.load(path, dtype=None), ""
    except ValueError as error:
        return None, str(error)


def check_bare(path: Path, told: Any) -> None:
    """The weights alone: refused, or every setting that differs from what config.json says is called an assumption."""
    model, refused = load(path)
    assert model or "heads" in refused or "rotary grid" in refused
    if model:
        bare, whole = to_json(model.config), to_json(told.config)
        free = ("mean", "std", *(() if hasattr(model.config, "heads") else ("image_size",)))  # a ResNet takes any size
        differing = [name for name in bare if bare[name] != whole[name] and name not in free]
        assert all(model.about.sources[name].startswith("assumed") for name in differing), differing


def sweep(name: str, folder: Path, most: int | None = None) -> dict[str, str]:
    """{tag: "equal", or why it is refused}, of the first `most` tags; anything else is an error."""
    outcomes, compared = {}, {}
    for tag, peer in versions(name, folder, most):
        model, refused = load(folder)
        if refused:
            part = re.search(r"looks like (.*) \(|(no model that plainvit knows)", refused)
            assert part, refused
            bare, _ = load(folder / "model.safetensors")
            open_settings = ("posemb", "rotary", "norm")  # rotary positions and the place of norms have no weights
            assert not bare or any(bare.about.sources.get(one, "").startswith("assumed") for one in open_settings)
            outcomes[tag] = part[1] or part[2]
            continue
        check_preprocessing(model, peer.pretrained_cfg)
        sources = model.about.sources
        assert not any(sources.get(setting, "").startswith("assumed") for setting in ("heads", "activation")), sources
        kind = f"{model.config.replace(mean=(0.5,), std=(0.5,))} {id(peer)}"
        if kind not in compared:
            compared[kind] = gap(model, peer)
        assert compared[kind] < (CLOSE if getattr(model.config, "rotary", "none") == "none" else ROTARY)
        check_bare(folder / "model.safetensors", model)
        outcomes[tag] = "equal"
    return outcomes


@pytest.mark.parametrize(("name", "unsupported"), FEW.items(), ids=FEW)
def test_timm_model_is_equal_or_unsupported(tmp_path: Path, name: str, unsupported: str) -> None:
    (outcome,) = sweep(name, tmp_path, most=1).values()
    assert unsupported in outcome if unsupported else outcome == "equal"


@pytest.mark.slow
def test_every_timm_model_is_equal_or_unsupported(tmp_path: Path) -> None:
    outcomes: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in NAMES:
        try:
            outcomes |= sweep(name, tmp_path)
        except AssertionError as error:
            failed[name] = str(error)
    print_table(outcomes, failed)
    assert not failed
    plain = {tag: outcome for tag, outcome in outcomes.items() if tag.startswith(("vit_", "deit", "eva", "beit"))}
    plain = [outcome for tag, outcome in plain.items() if not any(part in tag for part in OTHER_PARTS)]
    print(f"{plain.count('equal')} of {len(plain)} plain ViTs are equal (without {', '.join(OTHER_PARTS)})")
    assert plain.count("equal") >= 0.9 * len(plain)


def print_table(outcomes: dict[str, str], failed: dict[str, str]) -> None:
    print("\nprefix    architectures  names with tags  equal  unsupported")
    for prefix in PREFIXES:
        of_prefix = [outcome for tag, outcome in outcomes.items() if tag.startswith(prefix)]
        names, equal = sum(name.startswith(prefix) for name in NAMES), of_prefix.count("equal")
        print(f"{prefix:9} {names:13} {len(of_prefix):16} {equal:6} {len(of_prefix) - equal:12}")
    print(f"{len(outcomes)} names with tags, {len(failed)} different {failed or ''}")
    for why, count in collections.Counter(outcomes.values()).most_common():
        examples = [tag for tag, outcome in outcomes.items() if outcome == why != "equal"]
        print(f"{count:4} {why}: {', '.join(examples[:3])}" if examples else f"{count:4} {why}")
