"""Text embeddings as the head of an image-text tower: logits equal those of transformers' CLIP and SigLIP."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
import torch
import transformers
from peers import scramble
from pictures import encode, photo

import plainvit
from plainvit.cli import main
from plainvit.evaluate.predictor import Predictor

VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 56}
VISION |= {"image_size": 16, "patch_size": 8}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 56, "vocab_size": 50}
NAMES = ["cat", "dog", "owl"]
PROMPTS = torch.tensor([[1, 5, 9, 49], [1, 7, 3, 49], [1, 2, 8, 49]])


def make(kind: str, folder: Path) -> Any:
    config = getattr(transformers, f"{kind}Config")(vision_config=VISION, text_config=TEXT, projection_dim=16)
    peer = getattr(transformers, f"{kind}Model")(config).eval()
    scramble(peer)
    with torch.no_grad():
        peer.logit_scale.fill_(1.5)
    peer.save_pretrained(folder)
    return peer


def write_head(path: Path, embeddings: torch.Tensor, names: Any = NAMES, **scalars: torch.Tensor) -> Path:
    tensors = {"embeddings": embeddings.contiguous(), **scalars}
    safetensors.torch.save_file(tensors, path, {"names": json.dumps(names)})
    return path


@torch.no_grad()
def describe(peer: Any) -> dict[str, torch.Tensor]:
    text = peer.get_text_features(input_ids=PROMPTS)
    embeddings = text if isinstance(text, torch.Tensor) else text.pooler_output
    return {"embeddings": embeddings} | {
        name: getattr(peer, name).detach().reshape(1) for name in ("logit_scale", "logit_bias") if hasattr(peer, name)
    }


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_zero_shot_logits_equal_transformers(tmp_path: Path, kind: str) -> None:
    peer = make(kind, tmp_path / "tower")
    head = write_head(tmp_path / "names.safetensors", **describe(peer))
    model = plainvit.load(tmp_path / "tower", text_head=head)
    images = tiny.images(2, (16, 16), dtype=torch.float32)
    mean, std = (torch.tensor(x)[:, None, None] for x in (model.config.mean, model.config.std))
    with torch.no_grad():
        theirs = peer(input_ids=PROMPTS, pixel_values=(images - mean) / std).logits_per_image
        assert tiny.difference(model(images), theirs) < 1e-4
    assert model.about.class_names == tuple(NAMES)


def test_evaluate_command_classifies_zero_shot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = make("CLIP", tmp_path / "tower")
    head = write_head(tmp_path / "names.safetensors", **describe(peer))
    correct = 0
    predictor = Predictor(plainvit.load(tmp_path / "tower", text_head=head), device="cpu")
    for at, name in enumerate(NAMES):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(3):
            path = tmp_path / "data" / name / f"{number}.png"
            path.write_bytes(encode(photo(20, 24, seed=10 * at + number)))
            correct += predictor(path)[0].label == name
    out, data = str(tmp_path / "out"), str(tmp_path / "data")
    main(["evaluate", str(tmp_path / "tower"), "--data", data, "--text-head", str(head), "--out", out, "--json"])
    assert json.loads(capsys.readouterr().out)["counts"]["top1"] == correct


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_zero_shot_model_is_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    """As it is, or with other text embeddings."""
    peer = make(kind, tmp_path / "tower")
    head = write_head(tmp_path / "n.safetensors", **describe(peer))
    model = plainvit.load(tmp_path / "tower", text_head=head)
    path = plainvit.save(model, tmp_path / "m.safetensors")
    images = tiny.images(2, (16, 16), dtype=torch.float32)
    for again in (plainvit.load(path), plainvit.load(path, text_head=head)):
        assert torch.equal(again(images), model(images))
        assert again.about.class_names == tuple(NAMES)


def test_head_of_a_timm_tower_becomes_its_projection(tmp_path: Path) -> None:
    model = tiny.vit(torch.float32, classes=16, norm_embedding="tokens", embedding_bias=False)
    torch.nn.init.zeros_(model.head.bias)
    projected = model(tiny.images(dtype=torch.float32))
    plainvit.save(model, tmp_path / "tower.safetensors")
    text = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    loaded = plainvit.load(tmp_path / "tower.safetensors", text_head=write_head(tmp_path / "n.safetensors", text))
    expected = 100 * torch.nn.functional.cosine_similarity(projected[:, None], text[None], dim=-1)
    assert tiny.difference(loaded(tiny.images(dtype=torch.float32)), expected) < 1e-3


@pytest.mark.parametrize(
    ("embeddings", "names", "scalars"),
    [
        (torch.zeros(3, 9), NAMES, {}),  # another width
        (torch.ones(3, 16), ["cat", "dog"], {}),
        (torch.ones(3, 16), ["cat", "cat", "owl"], {}),
        (torch.ones(3, 16), {"cat": 1}, {}),
        (torch.ones(16), NAMES, {}),
        (torch.full((3, 16), torch.nan), NAMES, {}),
        (torch.ones(3, 16, dtype=torch.int64), NAMES, {}),
        (torch.ones(3, 16), NAMES, {"logit_scale": torch.tensor([100.0])}),  # not a logarithm
        (torch.ones(3, 16), NAMES, {"logit_scale": torch.ones(2)}),
    ],
)
def test_invalid_text_head_is_an_error(tmp_path: Path, embeddings: torch.Tensor, names: Any, scalars: Any) -> None:
    make("CLIP", tmp_path / "tower")
    head = write_head(tmp_path / "names.safetensors", embeddings, names, **scalars)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        plainvit.load(tmp_path / "tower", text_head=head)


def test_missing_text_head_is_an_error(tmp_path: Path) -> None:
    path = plainvit.save(tiny.vit(torch.float32), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="there is no file"):
        plainvit.load(path, text_head=tmp_path / "missing.safetensors")


def test_other_classes_are_not_supported_with_a_text_head(tmp_path: Path) -> None:
    """A new head of zeros as wide as the embeddings would be taken for timm's projection."""
    peer = make("CLIP", tmp_path / "tower")
    head = write_head(tmp_path / "n.safetensors", **describe(peer))
    with pytest.raises(ValueError, match="--classes"):
        plainvit.load(tmp_path / "tower", classes=16, text_head=head)


def test_classifier_is_no_image_text_tower(tmp_path: Path) -> None:
    path = plainvit.save(tiny.vit(torch.float32), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="classifier of 7 classes"):
        plainvit.load(path, text_head=write_head(tmp_path / "n.safetensors", torch.ones(3, 16)))
