"""The peers: how each library's ViT is built, given plainvit's weights, and tuned.

timm, transformers and torchvision make the same model from plainvit's config, and start from plainvit's weights through
the tables of plainvit/weights. Each is measured in two forms:

as shipped   eager, its own defaults: fp32 weights under bf16 autocast, torch's default attention backend and AdamW
tuned        torch.compile, bf16 autocast, fused AdamW, cuDNN's attention off: it gave NaN gradients

On a CPU all is fp32. A library that is not installed raises MissingError, with the line that installs it.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.config import ViTConfig
from plainvit.weights import timm as timm_names
from plainvit.weights import torchvision as torchvision_names
from plainvit.weights.layout import Layout, emit, make_layout

RATE = 1e-4  # of every optimiser here
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's


class MissingError(ImportError):
    """A peer that is not installed."""


def build_timm(c: ViTConfig) -> nn.Module:
    library = importlib.import_module("timm.models.vision_transformer")
    shape = {"embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "mlp_ratio": c.mlp_dim / c.width}
    shape |= {"act_layer": c.activation}  # of the same name there
    return library.VisionTransformer(img_size=c.image_size, patch_size=c.patch, num_classes=c.classes, **shape)


def build_torchvision(c: ViTConfig) -> nn.Module:
    if c.activation != "gelu":
        raise ValueError(f"torchvision's ViT has no activation {c.activation}")
    library = importlib.import_module("torchvision.models.vision_transformer")
    shape = {"num_layers": c.depth, "num_heads": c.heads, "hidden_dim": c.width, "mlp_dim": c.mlp_dim}
    return library.VisionTransformer(image_size=c.image_size[0], patch_size=c.patch[0], num_classes=c.classes, **shape)


def build_transformers(c: ViTConfig) -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.ViTConfig(
        image_size=c.image_size[0],
        patch_size=c.patch[0],
        hidden_size=c.width,
        num_hidden_layers=c.depth,
        num_attention_heads=c.heads,
        intermediate_size=c.mlp_dim,
        hidden_act={"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[c.activation],
        layer_norm_eps=c.norm_eps,  # its own 1e-12 is another function, of the same cost
        num_labels=c.classes,
    )
    return library.ViTForImageClassification(config)


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "timm": build_timm,
    "transformers": build_transformers,
    "torchvision": build_torchvision,
}


def layout_of(library: str, model: nn.Module, config: ViTConfig) -> Layout:
    """plainvit's names against those of the model in memory."""
    if library == "transformers":  # whose newer versions have other names in memory than in files
        return make_layout("transformers", model.state_dict(), prefix="vit.")
    return {"timm": timm_names, "torchvision": torchvision_names}[library].layout_for(config)


def build(library: str, config: ViTConfig, weights: Mapping[str, Tensor], device: str) -> nn.Module:
    """The library's model of a config, with plainvit's weights: images [B, 3, H, W], normalised, to logits [B, K]."""
    if importlib.util.find_spec(library) is None:
        raise MissingError(f"{library} is not installed: pip install {library}")
    with torch.device(device):  # weights are drawn, and thrown away, where that is fast
        model = PEERS[library](config)
    names = config.replace(activation="gelu")  # which is no part of the weights
    model.load_state_dict(emit(layout_of(library, model, names), weights, names))
    return Logits(model)


class Logits(nn.Module):
    """A tensor out of whatever a library answers with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found = self.model(images)
        return found if isinstance(found, Tensor) else found.logits


class Labelled(nn.Module):
    """Cross-entropy together with the model, so that a compiler sees both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


@contextlib.contextmanager
def cudnn_attention(on: bool) -> Iterator[None]:
    """torch's own default, or off: global, since compiled code does not always honour a narrower choice."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def cast(device: str) -> torch.autocast:
    """bf16 on a GPU; on a CPU nothing changes."""
    kind = device.split(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


class PeerStep:
    """Whole training steps of one peer on batches in turn: forward, cross-entropy, backward, AdamW, zero."""

    def __init__(
        self,
        library: str,
        config: ViTConfig,
        weights: Mapping[str, Tensor],
        data: list[tuple[Tensor, Tensor]],
        *,
        device: str,
        tuned: bool,
        compiled: bool,
        mode: str = "default",
    ) -> None:
        self.model = Labelled(build(library, config, weights, device).train())
        self.forward: Callable[..., Tensor] = self.model
        if tuned and compiled:
            self.forward = torch.compile(self.model, dynamic=False, mode=mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=tuned or None)
        self.data, self.number = data, 0
        self.cast: Callable[[], Any] = partial(cast, device)
        self.around: Callable[[], Any] = partial(cudnn_attention, not tuned)

    def __call__(self) -> Tensor:
        images, labels = self.data[self.number % len(self.data)]
        self.number += 1
        if self.forward is not self.model:
            torch.compiler.cudagraph_mark_step_begin()  # for the modes that replay graphs
        with self.cast():
            loss = self.forward(images, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def close(self) -> None:
        """What holds memory goes."""
        del self.forward, self.model, self.optimizer, self.data
