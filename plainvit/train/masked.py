"""Masked prediction: what is hidden, what is asked for, and how the answers look.

    plainvit train masked-cifar10             plainvit train mae-cifar10
    plainvit finetune --init runs/RUN         what is delivered is a plain ViT without a head

The paper (4.6, B.1.2) corrupts 50 % of the patch embeddings: 80 % of these become a learned mask embedding, 10 %
another patch's, 10 % stay. It leaves open, and here: each image has exactly that share hidden, so that shapes are
fixed, and what becomes of a hidden patch is drawn for each by itself, as in BERT; the other patch is one of the same
image, so that the rest of a batch does not matter; a colour's 3 bits are the highest of the mean's 8.
Masks follow from (seed, step, place in the batch), those of held-out images from the image alone.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plainvit.config import Config
from plainvit.data.loader import Batch
from plainvit.data.order import uniforms
from plainvit.data.transforms import as_floats
from plainvit.models.masked import CELLS, COLOURS, MaskedViT, take
from plainvit.models.vit import ViT, patchify

SALT = 0x6D61736B  # masks are drawn from other numbers than crops
MASK, OTHER = 0.8, 0.1  # of the corrupted patches; the rest is kept


class PredictPatches(MaskedViT):
    """The objective: a loss over the hidden patches alone, mean over these and over images."""

    def __init__(self, model: ViT, config: Config, rank: int = 0) -> None:
        assert config.objective != "classify"
        super().__init__(model, config.objective, config.masked)
        self.seed, self.rank = config.seed, rank
        self.initialise(torch.Generator().manual_seed(config.seed))

    def prepare(self, batch: Batch, step: int) -> tuple[Tensor, ...]:
        """(images, order) and, where tokens stay, what stands in each place."""
        count, device = len(batch.images), batch.images.device
        place = torch.arange(self.rank * count, (self.rank + 1) * count, device=device)  # in the global batch
        return batch.images, *self.hide(self.seed, torch.full_like(place, step), place)

    def prepare_held_out(self, images: Tensor, index: np.ndarray) -> tuple[Tensor, ...]:
        """The same of images whose masks never change, whatever the seed."""
        place = torch.from_numpy(index).to(images.device)
        return images, *self.hide(0, torch.full_like(place, -1), place)

    def hide(self, seed: int, step: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        """(order [B, n],) with the hidden patches first; and source [B, n] for `predict`, unless they are dropped."""
        units, k = len(self.squares), self.hidden
        u = uniforms(seed ^ SALT, step, place, units + (2 * k if self.objective == "masked" else 0))
        order = self.squares[u[:, :units].argsort(dim=1, stable=True)].flatten(1)  # [B, n]
        if self.objective == "mae":
            return (order,)
        hidden, (B, n) = order[:, :k], order.shape
        fate = torch.full_like(hidden, -1)
        if self.objective == "masked":
            which, far = u[:, units:].view(B, 2, k).unbind(1)
            other = (hidden + 1 + (far * (n - 1)).long().clamp(max=n - 2)) % n  # any but the patch itself
            fate = torch.where(which < MASK, fate, torch.where(which < MASK + OTHER, other, hidden))
        return order, torch.arange(n, device=order.device).expand(B, n).scatter(1, hidden, fate)

    def forward(self, images: Tensor, order: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(mean loss, images times the share of colours that is right); of pixels none is right or wrong: NaN."""
        answers = self.predict(images, order, source)
        answers = answers.to(torch.promote_types(answers.dtype, torch.float32))
        hidden = order[:, : self.hidden]
        if self.masked.target == "pixels":
            off = answers - self.pixels(images, hidden)
            loss = (off.abs() if self.objective == "simmim" else off.square()).mean()
            return loss, loss.new_full((), float("nan"))
        wanted = self.colours(images, hidden)  # [B, k, cells]
        logits = answers.view(*wanted.shape, COLOURS)
        right = (logits.argmax(-1) == wanted).float().mean((1, 2)).sum()
        return F.cross_entropy(logits.flatten(0, 2), wanted.flatten()), right

    def colours(self, images: Tensor, places: Tensor) -> Tensor:
        """The mean colour of each cell of each patch, as one of 512: [B, k, cells]."""
        (P, Q), c = self.model.config.patch, CELLS[self.masked.target]
        x = take(patchify(images, (P, Q)), places)  # [B, k, 3*P*Q]
        x = x.view(*places.shape, 3, c, P // c, c, Q // c)
        if x.dtype is torch.uint8:  # exact
            level = x.sum((4, 6), dtype=torch.int32) // (32 * (P // c) * (Q // c))
        else:
            level = (x.mean((4, 6)) * (255 / 32)).floor().clamp(0, 7)
        r, g, b = level.long().flatten(3).unbind(2)  # each [B, k, c*c]
        return r * 64 + g * 8 + b

    def pixels(self, images: Tensor, places: Tensor) -> Tensor:
        """Pixels as the model sees them, perhaps each patch by its own mean and std: [B, k, C*P*Q]."""
        x = take(patchify(self.model.normalise(images), self.model.config.patch), places)
        if not self.masked.normalise:
            return x
        mean, std = own_scale(x)
        return (x - mean) / std

    @torch.no_grad()
    def show(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The images, what was left of them, and what was predicted in the gaps, each uint8 [B, H, W, 3]."""
        images, order = tensors[:2]
        hidden = order[:, : self.hidden]
        patches = patchify(as_floats(images), self.model.config.patch)  # [B, n, C*P*Q]
        whole = torch.arange(order.shape[1], device=order.device).expand_as(order)
        source = tensors[2] if len(tensors) > 2 else whole.scatter(1, hidden, -1)
        grey = torch.full_like(patches, 0.5)
        corrupted = torch.where((source < 0).unsqueeze(-1), grey, take(patches, source.clamp(min=0)))
        painted = self.painted(self.predict(*tensors).float(), images, hidden)
        filled = patches.scatter(1, hidden.unsqueeze(-1).expand_as(painted), painted)
        return self._image(patches), self._image(corrupted), self._image(filled)

    def painted(self, answers: Tensor, images: Tensor, places: Tensor) -> Tensor:
        """Answers as pixels in [0, 1]: [B, k, C*P*Q]. A patch's own mean and std, which are not predicted, are lent."""
        (B, k), (P, Q) = places.shape, self.model.config.patch
        if self.masked.target == "pixels":
            x = take(patchify(self.model.normalise(images), (P, Q)), places)
            mean, std = own_scale(x) if self.masked.normalise else (0.0, 1.0)
            channels = self.model.normalise
            x = (answers * std + mean).view(B * k, -1, P, Q)
            return (x * channels.std.value.to(x) + channels.mean.value.to(x)).reshape(B, k, -1)
        c = CELLS[self.masked.target]
        colour = answers.view(B, k, c * c, COLOURS).argmax(-1)
        level = torch.stack((colour // 64, colour // 8 % 8, colour % 8), 2).view(B, k, 3, c, c)
        x = (level + 0.5) * (32 / 255)  # the middle of each range
        return x.repeat_interleave(P // c, 3).repeat_interleave(Q // c, 4).flatten(2)

    def _image(self, patches: Tensor) -> Tensor:
        (h, w), (P, Q) = self.model.config.grid, self.model.config.patch
        x = patches.view(len(patches), h, w, -1, P, Q).permute(0, 1, 4, 2, 5, 3).reshape(-1, h * P, w * Q, 3)
        return (x.clamp(0, 1) * 255).round().byte()


def own_scale(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of each patch over its pixels and channels, by MAE's formula."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()
