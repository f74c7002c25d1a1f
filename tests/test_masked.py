"""Masked prediction: masks, targets, and no leak of hidden pixels; compared with NumPy and transformers' ViTMAE.

Masks are counted, targets computed again in NumPy, losses by the published formulas over whole images, and gradients
say what a prediction has seen.
"""

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from peers import scramble
from torch import Tensor

import plainvit
from plainvit.config import Config, Masked, ViTConfig
from plainvit.data.loader import Batch
from plainvit.models import ViT
from plainvit.models.masked import Decoder, MaskedViT, check_maskable
from plainvit.models.vit import patchify
from plainvit.names import configure
from plainvit.train.masked_objective import PredictPatches

SMALL = {"depth": 2, "width": 16, "heads": 2}  # of the decoder
PIXELS = Masked(target="pixels", **SMALL)


def objective(name: Any = "masked", masked: Masked | None = None, seed: int = 0, **settings: Any) -> PredictPatches:
    """On 24 x 40 images in 8 x 8 patches: a grid of 3 x 5, with random weights everywhere."""
    model = tiny.vit(classes=0, **settings)
    net = PredictPatches(model, Config(objective=name, masked=masked or Masked(**SMALL), seed=seed))
    scramble(net)
    return net.double().eval()


def batch(images: Tensor) -> Batch:
    return Batch(images, torch.zeros(len(images), dtype=torch.long), np.arange(len(images)))


def photos(count: int, size: tuple[int, int] = (24, 40)) -> Tensor:
    """uint8, with flat areas, black and white among them."""
    x = (tiny.images(count, size, seed=3) * 255).round().byte()
    x[0], x[1] = 255, 0
    return x


# Masks ----------------------------------------------------------------------------------------------------------------


def draw(net: PredictPatches, images: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(images)
    order, source = net.hide(0, torch.full_like(place, 5), place)
    return order, source


@pytest.mark.parametrize(("ratio", "hidden"), [(0.5, 98), (0.15, 30), (0.75, 147)])
def test_every_image_hides_the_same_number_of_patches(ratio: float, hidden: int) -> None:
    net = objective(masked=Masked(ratio=ratio), image_size=112)
    order, source = draw(net, 300)
    n = 14 * 14
    assert net.hidden_count == hidden
    assert torch.equal(order.sort(1).values, torch.arange(n).expand(300, n))  # a permutation each
    corrupted = torch.zeros(300, n, dtype=torch.bool).scatter(1, order[:, :hidden], True)
    assert (source == torch.arange(n))[~corrupted].all()
    often = corrupted.double().mean(0)  # of each place; a binomial share of 300 images
    assert (often - ratio).abs().max() < 5 * math.sqrt(ratio * (1 - ratio) / 300)


def test_hidden_patches_are_80_percent_masked_10_replaced_10_kept() -> None:
    images, k, n = 400, 98, 196
    order, source = draw(objective(image_size=112), images)
    hidden = order[:, :k]
    fate = source.gather(1, hidden)
    for chosen, share in (((fate < 0), 0.8), ((fate >= 0) & (fate != hidden), 0.1), (fate == hidden, 0.1)):
        counts, sigma = chosen.sum(1).double(), math.sqrt(k * share * (1 - share))
        assert abs(float(counts.mean()) - k * share) < 4 * sigma / math.sqrt(images)
        assert float(counts.std()) == pytest.approx(sigma, rel=0.15)  # drawn for each patch by itself
        assert (counts - k * share).abs().max() < 5 * sigma  # in every image
    moved = (fate >= 0) & (fate != hidden)
    away = ((fate - hidden) % n)[moved]
    assert away.min() >= 1
    assert float(away.double().mean()) == pytest.approx(n / 2, rel=0.03)  # any other patch, each as likely


def test_masks_depend_on_seed_step_and_position_in_the_global_batch() -> None:
    images, whole = photos(8), objective()
    both = []
    for rank in range(2):
        part = objective()
        part.rank = rank
        both.append(part.make_inputs(batch(images[rank * 4 : rank * 4 + 4]), 7))
    for together, parts in zip(whole.make_inputs(batch(images), 7), zip(*both, strict=True), strict=True):
        assert torch.equal(together, torch.cat(parts))
    first = whole.make_inputs(batch(images), 7)[1]
    assert not torch.equal(first, whole.make_inputs(batch(images), 8)[1])
    assert not torch.equal(first, objective(seed=1).make_inputs(batch(images), 7)[1])


def test_masks_of_held_out_images_depend_on_the_image_alone() -> None:
    images, index = photos(6), np.array([5, 2, 9, 4, 1, 7])
    order = objective(seed=3).make_held_out_inputs(images, index)[1]
    again = objective(seed=4).make_held_out_inputs(images[[4, 1]], index[[4, 1]])[1]
    assert torch.equal(order[[4, 1]], again)


# Targets --------------------------------------------------------------------------------------------------------------


def cells_by_numpy(image: np.ndarray, patch: int, cells: int) -> np.ndarray:
    """The 512-way colors [n, cells^2] of an image [3, H, W] in bytes, one cell after the other."""
    side, colors = patch // cells, []
    for top in range(0, image.shape[1], patch):
        for left in range(0, image.shape[2], patch):
            one = []
            for y in range(top, top + patch, side):
                for x in range(left, left + patch, side):
                    mean = image[:, y : y + side, x : x + side].astype(np.float64).mean((1, 2))
                    red, green, blue = (int(value) >> 5 for value in mean)  # the three highest of eight bits
                    one.append(red * 64 + green * 8 + blue)
            colors.append(one)
    return np.array(colors)


@pytest.mark.parametrize(("target", "cells"), [("color", 1), ("colors16", 4)])
def test_colors_equal_numpy(target: Any, cells: int) -> None:
    net, images = objective(masked=Masked(target=target)), photos(4)
    places = torch.arange(15).flip(0).expand(4, -1)
    wanted = np.stack([cells_by_numpy(image, 8, cells) for image in images.numpy()])[:, ::-1]

    def colors(pixels: Tensor) -> np.ndarray:
        return net.make_color_targets(pixels, places).numpy()

    assert np.array_equal(colors(images), wanted)
    assert wanted.max() == 511
    assert np.array_equal(colors(images.double() / 255)[:2], wanted[:2])  # white and black
    assert np.mean(colors(images.float() / 255) == wanted) > 0.99  # but for ties of rounding


@pytest.mark.parametrize("normalize", [False, True])
def test_pixels_equal_numpy(normalize: bool) -> None:
    net = objective("mae", PIXELS.replace(normalize=normalize), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    images, places = tiny.images(2), torch.tensor([[14, 0, 6], [3, 2, 1]])
    x = (images.numpy() - np.reshape((0.4, 0.5, 0.6), (3, 1, 1))) / np.reshape((0.2, 0.3, 0.4), (3, 1, 1))
    for row, targets in zip(range(2), net.make_pixel_targets(images, places).numpy(), strict=True):
        for place, one in zip(places[row].tolist(), targets, strict=True):
            top, left = place // 5 * 8, place % 5 * 8
            wanted = x[row, :, top : top + 8, left : left + 8]
            if normalize:
                wanted = (wanted - wanted.mean()) / np.sqrt(wanted.var(ddof=1) + 1e-6)
            assert np.abs(one.reshape(3, 8, 8) - wanted).max() < 1e-12


def answers_for_all(net: PredictPatches, images: Tensor, source: Tensor) -> Tensor:
    """The linear decoder on every token of a corrupted image, by hand."""
    model = net.model
    assert net.mask is not None
    x = model.embed_patches(patchify(model.normalize(images).to(model.embedding.weight.dtype), model.config.patch))
    rows = [
        torch.stack([net.mask[0] if s < 0 else one[s] for s in places]) for one, places in zip(x, source, strict=True)
    ]
    x = torch.cat([model.class_token.expand(len(x), -1, -1), torch.stack(rows)], 1) + model.positions[0].table
    for block in model.blocks:
        x = block(x)
    return net.decoder(model.norm(x)[:, 1:])


@pytest.mark.parametrize("target", ["color", "colors16", "pixels"])
def test_paper_loss_counts_corrupted_patches_only(target: Any) -> None:
    net = objective("masked", Masked(target=target))
    images = photos(3) if target != "pixels" else tiny.images(3)
    _, order, source = net.make_inputs(batch(images), 0)
    loss, right = net(images, order, source)
    answers = answers_for_all(net, images, source).detach().numpy()
    hidden = order[:, : net.hidden_count].numpy()
    if target == "pixels":
        wanted = patchify((images - 0.5) / 0.5, (8, 8)).numpy()
        errors = ((answers - wanted) ** 2).mean(2)
    else:
        cells = 1 if target == "color" else 4
        wanted = np.stack([cells_by_numpy(image, 8, cells) for image in images.numpy()])
        logits = answers.reshape(*wanted.shape, 512)
        top = logits.max(-1, keepdims=True)
        logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        errors = -np.take_along_axis(logs, wanted[..., None], -1)[..., 0].mean(2)
        correct = (logits.argmax(-1) == wanted).mean(2)
        assert float(right) == pytest.approx(np.take_along_axis(correct, hidden, 1).mean(1).sum())
    assert loss.item() == pytest.approx(np.take_along_axis(errors, hidden, 1).mean(), rel=1e-6)


# Encoders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"posemb": "2d"},
        {"posemb": "sincos2d"},
        {"posemb": "none"},
        {"class_token": False, "pool": "average"},
        {"registers": 2},
        {"registers": 1, "posemb_prefix": "all"},
        {"posemb_prefix": "none"},
        {"norm_pooled": True, "pool": "average"},
    ],
    ids=str,
)
def test_mae_encoder_equals_plain_vit_on_a_subset(settings: dict[str, Any]) -> None:
    net, images = objective("mae", PIXELS.replace(ratio=0.75), **settings), tiny.images(3)
    order = net.make_inputs(batch(images), 0)[1]
    model, first = net.model, net.model.config.prefix
    whole = model.embed(images)
    visible = order[:, net.hidden_count :]
    rows = [torch.cat((one[:first], one[first + places])) for one, places in zip(whole, visible, strict=True)]
    x = torch.stack(rows)
    for block in model.blocks:
        x = block(x)
    actual = net.encode_visible(images, order)
    assert actual.shape[1] == first + 15 - math.ceil(0.75 * 15)
    assert tiny.difference(actual, model.norm(x)) < 1e-12


def find_visible(net: PredictPatches, images: Tensor, *masks: Tensor) -> Tensor:
    """[B, n]: whether any prediction depends on a patch's pixels."""
    images = images.clone().requires_grad_()
    answers = net.predict(images, *masks)
    (gradient,) = torch.autograd.grad((answers * torch.randn_like(answers)).sum(), images)
    return patchify(gradient, (8, 8)).abs().amax(2) > 0


def test_predictions_depend_on_visible_pixels_only() -> None:
    net, images = objective("mae", PIXELS.replace(ratio=0.6)), tiny.images(4)
    _, *masks = net.make_inputs(batch(images), 0)
    hidden = torch.zeros(4, 15, dtype=torch.bool).scatter(1, masks[0][:, : net.hidden_count], True)
    assert torch.equal(find_visible(net, images, *masks), ~hidden)


@pytest.mark.parametrize("name", ["masked", "mae"])
@pytest.mark.parametrize("settings", [{}, {"pool": "attention", "class_token": False}, {"norm_pooled": True}])
def test_every_trained_parameter_has_a_gradient(name: Any, settings: dict[str, Any]) -> None:
    """As DDP needs it."""
    net = objective(name, **settings)
    loss, _ = net(*net.make_inputs(batch(photos(3)), 0))
    loss.backward()
    assert [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None] == []


# transformers ---------------------------------------------------------------------------------------------------------


def peer(normalize: bool) -> Any:
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    shape |= {"image_size": 32, "patch_size": 8, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2}
    shape |= {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 128}
    config = transformers.ViTMAEConfig(**shape, mask_ratio=0.75, norm_pix_loss=normalize)
    model = transformers.ViTMAEForPreTraining(config).double().eval()
    scramble(model)
    return model


def from_peer(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """ViTMAE's weights in our names; pixels (row, column, channel) become (channel, row, column)."""
    renamed: dict[str, Tensor] = {
        "model.class_token": state["vit.embeddings.cls_token"][0],
        "model.positions.0.table": state["vit.embeddings.position_embeddings"][0],
        "model.embedding.weight": state["vit.embeddings.patch_embeddings.projection.weight"].flatten(1),
        "model.embedding.bias": state["vit.embeddings.patch_embeddings.projection.bias"],
        "decoder.mask_token": state["decoder.mask_token"][0],
        "decoder.positions": state["decoder.decoder_pos_embed"][0],
    }
    layers = {"vit.layers": "model.blocks", "decoder.decoder_layers": "decoder.blocks"}
    norms = {"layernorm_before": "norm1", "layernorm_after": "norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    for leaf in ("weight", "bias"):
        renamed[f"model.norm.{leaf}"] = state[f"vit.layernorm.{leaf}"]
        renamed[f"decoder.embedding.{leaf}"] = state[f"decoder.decoder_embed.{leaf}"]
        renamed[f"decoder.norm.{leaf}"] = state[f"decoder.decoder_norm.{leaf}"]
        pixels = state[f"decoder.decoder_pred.{leaf}"]
        renamed[f"decoder.prediction.{leaf}"] = pixels.unflatten(0, (8, 8, 3)).movedim(2, 0).flatten(0, 2)
        for theirs, ours in layers.items():
            for i in range(2):
                qkv = [state[f"{theirs}.{i}.attention.{letter}_proj.{leaf}"] for letter in "qkv"]
                renamed[f"{ours}.{i}.attention.qkv.{leaf}"] = torch.cat(qkv)
                renamed[f"{ours}.{i}.attention.out.{leaf}"] = state[f"{theirs}.{i}.attention.o_proj.{leaf}"]
                for name, own in norms.items():
                    renamed[f"{ours}.{i}.{own}.{leaf}"] = state[f"{theirs}.{i}.{name}.{leaf}"]
    return renamed


@pytest.mark.parametrize("normalize", [False, True])
def test_mae_equals_transformers(normalize: bool) -> None:
    theirs = peer(normalize)
    shape = {"width": 48, "depth": 2, "heads": 4, "mlp_dim": 96, "mean": (0.0,), "std": (1.0,)}
    model = plainvit.create("ViT-Ti/8", 0, 32, numerics="transformers", dtype=torch.float64, **shape)
    assert isinstance(model, ViT)
    masked = Masked(ratio=0.75, target="pixels", normalize=normalize, depth=2, width=32, heads=4)
    net = PredictPatches(model, Config(objective="mae", masked=masked)).double().eval()
    net.load_state_dict(from_peer(theirs.state_dict()))
    images, noise = tiny.images(3, (32, 32)), torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    said = theirs(images, noise=noise)
    order = noise.argsort(dim=1).roll(12, 1)  # theirs lists what is kept first
    loss, _ = net(images, order)
    assert loss.item() == pytest.approx(said.loss.item(), rel=1e-10)
    pixels = said.logits.unflatten(2, (8, 8, 3)).movedim(4, 2).flatten(2)
    hidden = order[:, :12].unsqueeze(2).expand(-1, -1, 192)
    assert tiny.difference(net.predict(images, order), pixels.gather(1, hidden)) < 1e-10
    loss.backward()
    said.loss.backward()
    for name, gradient in from_peer(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
        | {name: torch.zeros_like(p) for name, p in theirs.named_parameters() if p.grad is None}
    ).items():
        if "positions" not in name:  # fixed there
            actual = net.get_parameter(name).grad
            assert actual is not None
            assert (actual - gradient).abs().max() < 1e-9, name


def test_decoder_is_initialized_as_published() -> None:
    net = MaskedViT(tiny.vit(torch.float32, classes=0), "mae", PIXELS.replace(width=128, heads=4))
    net.initialize(torch.Generator().manual_seed(0))
    assert isinstance(net.decoder, Decoder)
    assert net.decoder.mask_token.std().item() == pytest.approx(0.02, rel=0.2)
    assert net.decoder.prediction.weight.std().item() == pytest.approx(math.sqrt(2 / (128 + 192)), rel=0.05)
    assert (net.decoder.norm.weight == 1).all()
    assert not net.decoder.prediction.bias.any()
    linear = MaskedViT(tiny.vit(torch.float32, classes=0), "masked", Masked())
    assert not linear.decoder.weight.any()  # as heads do


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "mae"])
def test_compiled_predictions_are_equal(name: Any) -> None:
    net = objective(name, Masked(**SMALL) if name == "masked" else PIXELS).float()
    tensors = net.make_inputs(batch(photos(4)), 0)
    compiled = torch.compile(net, dynamic=False, fullgraph=True)
    assert compiled(*tensors)[0].item() == pytest.approx(net(*tensors)[0].item(), rel=1e-5)


# Figures --------------------------------------------------------------------------------------------------------------


def test_figure_of_a_perfect_prediction_is_the_image() -> None:
    """Answers that are the targets themselves paint what was there; colors the middle of their range."""
    images, places = photos(3), torch.tensor([[0, 7], [1, 2], [14, 3]])
    for masked in (PIXELS, PIXELS.replace(normalize=True)):
        net = objective("mae", masked, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
        painted = net.to_pixels(net.make_pixel_targets(images, places), images, places)
        wanted = patchify(images.double() / 255, (8, 8)).gather(1, places.unsqueeze(2).expand(-1, -1, 192))
        assert (painted - wanted).abs().max() < 1e-6
    for target, cells in (("color", 1), ("colors16", 4)):
        net = objective("masked", Masked(target=target))
        answers = torch.nn.functional.one_hot(net.make_color_targets(images, places), 512).flatten(2).float()
        painted = net.to_pixels(answers, images, places).view(3, 2, 3, cells, 8 // cells, cells, 8 // cells)
        mean = (images.double() / 255).view(3, 3, 3, 8, 5, 8).permute(0, 2, 4, 1, 3, 5).reshape(3, 15, 3, 8, 8)
        mean = torch.stack([one[rows] for one, rows in zip(mean, places, strict=True)]).view_as(painted)
        assert (painted.mean((4, 6)) - mean.mean((4, 6))).abs().max() <= 16.5 / 255


# Errors ---------------------------------------------------------------------------------------------------------------

PLAIN = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=(8, 8), image_size=(32, 32), classes=0)


@pytest.mark.parametrize(
    ("model", "name", "masked", "words"),
    [
        (PLAIN.replace(image_size=(8, 8)), "masked", Masked(), "ratio.*1 x 1"),
        (PLAIN.replace(image_size=(8, 16)), "masked", Masked(ratio=0.9), "ratio.*1 x 2"),
        (PLAIN.replace(channels=1, mean=(0.5,), std=(0.5,)), "masked", Masked(), "--masked.target pixels"),
        (PLAIN.replace(patch=(2, 2)), "masked", Masked(target="colors16"), "2 x 2.*--masked.target"),
        (configure("BiT-R50x1"), "mae", Masked(), "ResNet"),
        (configure("R50x1+ViT-B/16"), "mae", Masked(), "hybrid"),
        (PLAIN.replace(posemb="relative"), "mae", Masked(), "posemb"),
        (PLAIN.replace(posemb_at="every"), "mae", Masked(), "posemb"),
    ],
)
def test_unsupported_model_is_a_one_line_error(model: Any, name: str, masked: Masked, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check_maskable(model, name, masked)
    assert "\n" not in str(caught.value)
