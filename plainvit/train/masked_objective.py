"""The objective of masked prediction: draws the masked patches and what replaces them; targets, loss, evaluation.

    plainvit train masked-cifar10             plainvit train mae-cifar10
    plainvit finetune --init runs/RUN         the final model is a plain ViT without a head

The paper (4.6, B.1.2) corrupts 50 % of the patch embeddings: 80 % of these become a learned mask embedding, 10 %
another patch's, 10 % stay. It leaves details open. Here each image has exactly that fraction hidden, so that shapes are
fixed; each hidden patch is corrupted independently, as in BERT; the other patch is one of the same image, so that the
rest of a batch does not matter; a color's 3 bits are the highest of the mean's 8.
Masks follow from (seed, step, position in the batch), those of held-out images from the image alone.
"""

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.analyse.masked import draw_masked
from plainvit.config import Config, Preprocess
from plainvit.data.decode import DataError, ImageError
from plainvit.data.loader import Batch
from plainvit.data.order import uniforms
from plainvit.data.transforms import as_floats, preprocess_image
from plainvit.evaluate.classify import EvaluationSet
from plainvit.models.inference import NonFiniteError, eval_mode
from plainvit.models.masked import CELLS, COLORS, MaskedViT, take
from plainvit.models.vit import ViT, patchify
from plainvit.train.state import autocast

if TYPE_CHECKING:
    from plainvit.runtime.folder import Folder

SALT = 0x6D61736B  # masks and crops use different random numbers
SHOWN = 6  # images in a figure
MASK, OTHER = 0.8, 0.1  # fractions of the hidden patches; the rest stays


class PredictPatches(MaskedViT):
    """The objective: the mean loss over hidden patches and images."""

    def __init__(self, model: ViT, config: Config, rank: int = 0) -> None:
        assert config.objective != "classify"
        super().__init__(model, config.objective, config.masked)
        if model.pool is not None:  # nothing is pooled, and DDP needs a gradient for every trained parameter
            model.pool.requires_grad_(False)
        self.config, self.rank = config, rank
        self.initialize(torch.Generator().manual_seed(config.seed))

    def make_inputs(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        """(images, order) and, unless hidden patches are dropped, the source of each token."""
        count, device = len(batch.images), batch.images.device
        position = torch.arange(self.rank * count, (self.rank + 1) * count, device=device)  # in the global batch
        return batch.images, *self.hide(self.config.seed, torch.full_like(position, step), position)

    def make_held_out_inputs(self, images: Tensor, index: np.ndarray) -> tuple[Tensor, ...]:
        """The same for held-out images, whose masks depend on their index alone."""
        position = torch.from_numpy(index).to(images.device)
        return images, *self.hide(0, torch.full_like(position, -1), position)

    def hide(self, seed: int, step: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """(order [B, n],) with the hidden patches first; and source [B, n] for `predict` unless they are dropped."""
        n, k, B = math.prod(self.model.config.grid), self.hidden_count, len(position)
        u = uniforms(seed ^ SALT, step, position, n + (2 * k if self.objective == "masked" else 0))
        order = u[:, :n].argsort(dim=1, stable=True)  # [B, n]
        if self.objective == "mae":
            return (order,)
        hidden = order[:, :k]
        kind, distance = u[:, n:].view(B, 2, k).unbind(1)
        other = (hidden + 1 + (distance * (n - 1)).long().clamp(max=n - 2)) % n  # any but the patch itself
        source = torch.where(kind < MASK, -1, torch.where(kind < MASK + OTHER, other, hidden))
        return order, torch.arange(n, device=order.device).expand(B, n).scatter(1, hidden, source)

    def forward(self, images: Tensor, order: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(mean loss, images times the fraction of correct colors); the latter is NaN for pixels."""
        predicted = self.predict(images, order, source)
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        hidden = order[:, : self.hidden_count]
        if self.masked.target == "pixels":
            loss = F.mse_loss(predicted, self.make_pixel_targets(images, hidden))
            return loss, loss.new_full((), float("nan"))
        targets = self.make_color_targets(images, hidden)  # [B, k, cells]
        logits = predicted.view(*targets.shape, COLORS)
        correct = (logits.argmax(-1) == targets).float().mean((1, 2)).sum()
        return F.cross_entropy(logits.flatten(0, 2), targets.flatten()), correct

    def make_color_targets(self, images: Tensor, hidden: Tensor) -> Tensor:
        """The mean color of each cell of each patch, as one of 512: [B, k, cells]."""
        (P, Q), c = self.model.config.patch, CELLS[self.masked.target]
        x = take(patchify(images, (P, Q)), hidden)  # [B, k, 3*P*Q]
        x = x.view(*hidden.shape, 3, c, P // c, c, Q // c)
        if x.dtype is torch.uint8:  # exact
            level = x.sum((4, 6), dtype=torch.int32) // (32 * (P // c) * (Q // c))
        else:
            level = (x.mean((4, 6)) * (255 / 32)).floor().clamp(0, 7)
        r, g, b = level.long().flatten(3).unbind(2)  # each [B, k, c*c]
        return r * 64 + g * 8 + b

    def make_pixel_targets(self, images: Tensor, hidden: Tensor) -> Tensor:
        """Normalized pixels, with --masked.normalize each patch by its own mean and std: [B, k, C*P*Q]."""
        x = take(patchify(self.model.normalize(images), self.model.config.patch), hidden)
        if not self.masked.normalize:
            return x
        mean, std = compute_patch_moments(x)
        return (x - mean) / std

    @torch.no_grad()
    def show(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The images, the corrupted images, and the images with predicted patches, each uint8 [B, H, W, 3]."""
        images, order = tensors[:2]
        hidden = order[:, : self.hidden_count]
        patches = patchify(as_floats(images), self.model.config.patch)  # [B, n, C*P*Q]
        identity = torch.arange(order.shape[1], device=order.device).expand_as(order)
        source = tensors[2] if len(tensors) > 2 else identity.scatter(1, hidden, -1)
        gray = torch.full_like(patches, 0.5)
        corrupted = torch.where((source < 0).unsqueeze(-1), gray, take(patches, source.clamp(min=0)))
        pixels = self.to_pixels(self.predict(*tensors).float(), images, hidden)
        filled = patches.scatter(1, hidden.unsqueeze(-1).expand_as(pixels), pixels)
        return self._image(patches), self._image(corrupted), self._image(filled)

    def to_pixels(self, predicted: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """Predictions as pixels in [0, 1]: [B, k, C*P*Q]; normalized patches get their true mean and std."""
        (B, k), (P, Q) = hidden.shape, self.model.config.patch
        if self.masked.target == "pixels":
            x = take(patchify(self.model.normalize(images), (P, Q)), hidden)
            mean, std = compute_patch_moments(x) if self.masked.normalize else (0.0, 1.0)
            channels = self.model.normalize
            x = (predicted * std + mean).view(B * k, -1, P, Q)
            return (x * channels.std.value.to(x) + channels.mean.value.to(x)).reshape(B, k, -1)
        c = CELLS[self.masked.target]
        color = predicted.view(B, k, c * c, COLORS).argmax(-1)
        level = torch.stack((color // 64, color // 8 % 8, color % 8), 2).view(B, k, 3, c, c)
        x = (level + 0.5) * (32 / 255)  # the middle of each range
        return x.repeat_interleave(P // c, 3).repeat_interleave(Q // c, 4).flatten(2)

    def _image(self, patches: Tensor) -> Tensor:
        (h, w), (P, Q) = self.model.config.grid, self.model.config.patch
        x = patches.view(len(patches), h, w, -1, P, Q).permute(0, 1, 4, 2, 5, 3).reshape(-1, h * P, w * Q, 3)
        return (x.clamp(0, 1) * 255).round().byte()


def compute_patch_moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of each patch over its pixels and channels, by MAE's formula."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()


# Held-out images ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate_masked(objective: PredictPatches, evaluation_set: EvaluationSet) -> dict[str, float]:
    """The loss, and for target color the accuracy, over all held-out images, split over the processes."""
    world = evaluation_set.world
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)  # loss, correct, images, unreadable
    with eval_mode(objective):
        for batch in evaluation_set.batches():
            good = ~np.isin(batch.index, [index for index, _ in batch.bad])
            images = batch.images[torch.from_numpy(good).to(batch.images.device)]
            count = len(images)
            sums[3] += len(batch.bad)
            if count:
                with autocast(objective.config, images.device):
                    loss, correct = objective(*objective.make_held_out_inputs(images, batch.index[good]))
                sums[:3] += torch.stack((loss * count, correct, torch.full_like(loss, count))).double()
    loss, correct, images, unreadable = world.sum(sums).tolist()
    if not images:
        raise DataError(f"no image of the {evaluation_set.source.split} split can be read")
    if not math.isfinite(loss):
        raise NonFiniteError(f"the loss on {int(images):,} held-out images is {loss:g}: lower --optim.lr")
    accuracy = {} if math.isnan(correct) else {"accuracy": correct / images}
    return {"loss": loss / images, **accuracy, "images": int(images), "unreadable": int(unreadable)}


def validate_masked(
    objective: PredictPatches, evaluation_set: EvaluationSet, folder: "Folder", step: int
) -> dict[str, float]:
    """The metrics of a validation during training; also draws figures/."""
    metrics = evaluate_masked(objective, evaluation_set)
    if evaluation_set.world.is_main and folder.writes:
        draw_predictions(objective, evaluation_set, folder.path, step)
    return {name: value for name, value in metrics.items() if name in ("loss", "accuracy")}


@torch.no_grad()
def draw_predictions(objective: PredictPatches, evaluation_set: EvaluationSet, folder: Path, step: int) -> None:
    """Draws a few held-out images, evenly spaced and always the same."""
    preprocess: Preprocess = objective.model.about.preprocess
    images, index = [], []
    for position in np.unique(np.linspace(0, len(evaluation_set.source) - 1, SHOWN).astype(int)).tolist():
        with contextlib.suppress(ImageError, OSError):
            images.append(preprocess_image(evaluation_set.source.read(position), preprocess, evaluation_set.size))
            index.append(position)
    if images:
        batch = torch.stack(images).to(evaluation_set.world.device)
        with eval_mode(objective), autocast(objective.config, batch.device):
            shown = objective.show(objective.make_held_out_inputs(batch, np.array(index)))
        draw_masked(folder, step, [part.cpu().numpy() for part in shown])
