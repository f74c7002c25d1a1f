"""MAE's published format: names written by hand, compared with transformers' ViTMAE and timm's VisionTransformer."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import tiny
import torch
from peers import scramble
from test_masked import peer
from torch import Tensor

import plainvit
from plainvit.config import Config, Masked
from plainvit.models import ViT
from plainvit.models.masked import Decoder, MaskedViT
from plainvit.train.masked import PredictPatches
from plainvit.weights import load
from plainvit.weights.mae import read_mae, write_mae

# models_mae.py's state dict at depth 1 and decoder depth 1, width 48 in 4 heads and 64 in 2, on 32 x 32 in patches of 8
KEYS = {
    "cls_token": (1, 1, 48), "pos_embed": (1, 17, 48), "mask_token": (1, 1, 64), "decoder_pos_embed": (1, 17, 64),
    "patch_embed.proj.weight": (48, 3, 8, 8), "patch_embed.proj.bias": (48,),
    "blocks.0.norm1.weight": (48,), "blocks.0.norm1.bias": (48,),
    "blocks.0.attn.qkv.weight": (144, 48), "blocks.0.attn.qkv.bias": (144,),
    "blocks.0.attn.proj.weight": (48, 48), "blocks.0.attn.proj.bias": (48,),
    "blocks.0.norm2.weight": (48,), "blocks.0.norm2.bias": (48,),
    "blocks.0.mlp.fc1.weight": (192, 48), "blocks.0.mlp.fc1.bias": (192,),
    "blocks.0.mlp.fc2.weight": (48, 192), "blocks.0.mlp.fc2.bias": (48,),
    "norm.weight": (48,), "norm.bias": (48,),
    "decoder_embed.weight": (64, 48), "decoder_embed.bias": (64,),
    "decoder_blocks.0.norm1.weight": (64,), "decoder_blocks.0.norm1.bias": (64,),
    "decoder_blocks.0.attn.qkv.weight": (192, 64), "decoder_blocks.0.attn.qkv.bias": (192,),
    "decoder_blocks.0.attn.proj.weight": (64, 64), "decoder_blocks.0.attn.proj.bias": (64,),
    "decoder_blocks.0.norm2.weight": (64,), "decoder_blocks.0.norm2.bias": (64,),
    "decoder_blocks.0.mlp.fc1.weight": (256, 64), "decoder_blocks.0.mlp.fc1.bias": (256,),
    "decoder_blocks.0.mlp.fc2.weight": (64, 256), "decoder_blocks.0.mlp.fc2.bias": (64,),
    "decoder_norm.weight": (64,), "decoder_norm.bias": (64,),
    "decoder_pred.weight": (192, 64), "decoder_pred.bias": (192,),
}  # fmt: skip
DECODER = ("decoder_", "mask_token")


def net(**settings: Any) -> MaskedViT:
    shape = {"width": 48, "depth": 1, "heads": 4, "mlp_dim": 192, "image_size": 32}
    model = plainvit.create("ViT-Ti/8", 0, numerics="timm", **shape | settings)
    assert isinstance(model, ViT)
    masked = Masked(ratio=0.75, target="pixels", normalise=True, depth=1, width=64, heads=2)
    made = MaskedViT(model, "mae", masked)
    scramble(made)
    return made.eval()


def stored(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_mae(net(), tmp_path / "mae.pth")


def test_names_and_shapes_are_the_published_ones(file: Path) -> None:
    assert {name: tuple(tensor.shape) for name, tensor in stored(file).items()} == KEYS


def test_roundtrip_is_bit_exact(file: Path) -> None:
    first, again = net(), read_mae(file, heads=4)
    assert (again.model.config.width, again.model.config.heads, again.masked) == (48, 4, first.masked)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    write_mae(again, file.with_name("again.pth"))
    theirs = stored(file)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in stored(file.with_name("again.pth")).items())


def test_loss_equals_transformers_from_the_same_weights(tmp_path: Path) -> None:
    """Written here from ViTMAE's weights: reading it gives ViTMAE's loss."""
    theirs = peer(normalise=True).float()
    state, out = theirs.state_dict(), {}
    simple = {
        r"vit\.embeddings\.cls_token": "cls_token",
        r"vit\.embeddings\.position_embeddings": "pos_embed",
        r"vit\.embeddings\.patch_embeddings\.projection": "patch_embed.proj",
        r"decoder\.mask_token": "mask_token",
        r"decoder\.decoder_layers": "decoder_blocks",
        r"decoder\.decoder_": "decoder_",
        r"vit\.layers": "blocks",
        r"vit\.layernorm": "norm",
    }
    for name, tensor in state.items():
        for pattern, new in simple.items():
            if re.match(pattern, name):
                name = re.sub(f"^{pattern}", new, name)
                break
        name = name.replace("attention.o_proj", "attn.proj").replace("layernorm_before", "norm1")
        out[name.replace("layernorm_after", "norm2")] = tensor
    for name in [name for name in out if "attention.q_proj" in name]:
        parts = [out.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        out[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    torch.save({"model": out}, tmp_path / "theirs.pth")
    found = read_mae(tmp_path / "theirs.pth", heads=4, decoder_heads=4)
    config = found.model.config.replace(norm_eps=1e-12, mean=(0.0,), std=(1.0,), heads=4)  # ViTMAE's, whatever is said
    made = PredictPatches(ViT(config), Config(objective="mae", masked=found.masked))
    made.load_state_dict(found.state_dict())
    images, noise = tiny.images(2, (32, 32), dtype=torch.float32), torch.rand(2, 16)
    with torch.no_grad():
        loss, _ = made.eval()(images, noise.argsort(dim=1).roll(12, 1))
        assert loss.item() == pytest.approx(theirs(images, noise=noise).loss.item(), rel=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_load_reads_the_encoder(tmp_path: Path, whole: bool) -> None:
    made = net()
    model = load(write_mae(made if whole else made.model, tmp_path / "mae.pth"), heads=4)
    assert isinstance(model, ViT)
    assert model.about.family == ("MAE" if whole else "DeiT")  # scrambled positions are not those that tell MAE apart
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_encoder_equals_timm(tmp_path: Path) -> None:
    made = net(posemb="sincos2d")
    state = stored(write_mae(made.model, tmp_path / "encoder.pth"))
    assert not any(name.startswith(DECODER) for name in state)
    theirs = timm.models.VisionTransformer(32, 8, embed_dim=48, depth=1, num_heads=4, num_classes=0).eval()
    theirs.load_state_dict(state)
    images = tiny.images(2, (32, 32), dtype=torch.float32)
    with torch.no_grad():
        assert tiny.difference(made.model.encode(images), theirs.forward_features((images - 0.5) / 0.5)) < 1e-5
    again = load(tmp_path / "encoder.pth", heads=4)
    assert again.about.family == "MAE"  # its class token has no position
    assert again.config.mean == (0.485, 0.456, 0.406)


def test_fine_tuned_file_has_head_and_norm_after_pooling(tmp_path: Path) -> None:
    model = net(norm_pooled=True, pool="average").model.replace_head(5)
    scramble(model)
    state = stored(write_mae(model, tmp_path / "tuned.pth"))
    assert {"fc_norm.weight", "head.weight"} <= state.keys()
    assert "norm.weight" not in state
    images = tiny.images(2, (32, 32), dtype=torch.float32)
    again = load(tmp_path / "tuned.pth", heads=4)
    assert again.about.family == "MAE"
    same = ViT(again.config.replace(mean=(0.5,), std=(0.5,)))
    same.load_state_dict(again.state_dict())
    with torch.no_grad():
        assert tiny.difference(same(images), model(images)) < 1e-5


def test_decoder_heads_are_32_wide_by_default(file: Path) -> None:
    decoder = read_mae(file, heads=4).decoder
    assert isinstance(decoder, Decoder)
    assert decoder.config.heads == 2


# Errors ---------------------------------------------------------------------------------------------------------------


def change_file(file: Path, change: Any) -> Path:
    state = stored(file)
    change(state)
    torch.save({"model": state}, file)
    return file


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("decoder_norm.bias"), "decoder_norm.bias"),
        (lambda state: state.pop("decoder_embed.weight"), "no MAE decoder"),
        (lambda state: state.update(mask_token=torch.zeros(1, 1, 3)), r"mask_token.*\(1, 1, 3\)"),
        (lambda state: state["decoder_pred.weight"].fill_(torch.nan), "decoder_pred.weight.*NaN"),
        (lambda state: state.pop("blocks.0.norm2.bias"), "blocks.0.norm2.bias"),
    ],
)
def test_damaged_file_is_a_one_line_error(file: Path, change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_mae(change_file(file, change), heads=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"class_token": False, "pool": "average"}, "class token"),
        ({"registers": 2}, "no other"),
        ({"activation": "gelu_tanh"}, "activation"),
        ({"posemb": "2d"}, "posemb"),
        ({"layer_scale": 0.1}, "LayerScale"),
        ({"image_size": (32, 64)}, "square"),
    ],
)
def test_unsupported_model_is_not_written(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        write_mae(net(**settings), tmp_path / "mae.pth")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_other_objectives_and_suffixes_are_not_written(tmp_path: Path) -> None:
    made = MaskedViT(net().model, "masked", Masked(target="pixels"))
    with pytest.raises(ValueError, match=r"masked.*\.model"):
        write_mae(made, tmp_path / "mae.pth")
    with pytest.raises(ValueError, match=r"\.pth"):
        write_mae(made, tmp_path / "mae.safetensors")
