"""The peers: the same ViT in timm, transformers and torchvision, with plainvit's weights.

Each is measured in two forms:

default      eager, fp32 weights under bf16 autocast, PyTorch's default attention backends and AdamW
tuned        torch.compile, bf16 autocast, fused AdamW, without cuDNN attention, whose gradients became NaN

On a CPU everything is fp32.
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
from plainvit.weights.layout import Layout, make_layout, to_format

LEARNING_RATE = 1e-4  # of every system


def build_timm(c: ViTConfig) -> nn.Module:
    library = importlib.import_module("timm.models.vision_transformer")
    shape = {"embed_dim": c.width, "depth": c.depth, "num_heads": c.heads, "mlp_ratio": c.mlp_dim / c.width}
    return library.VisionTransformer(img_size=c.image_size, patch_size=c.patch, num_classes=c.classes, **shape)


def build_torchvision(c: ViTConfig) -> nn.Module:
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
        layer_norm_eps=c.norm_eps,  # its default of 1e-12 gives other logits at the same cost
        num_labels=c.classes,
    )
    return library.ViTForImageClassification(config)


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "timm": build_timm,
    "transformers": build_transformers,
    "torchvision": build_torchvision,
}


def find_layout(library: str, model: nn.Module, config: ViTConfig) -> Layout:
    """plainvit's parameter names -> those of the peer's model in memory."""
    if library == "transformers":  # newer versions have other names in memory than in files
        return make_layout("transformers", model.state_dict(), prefix="vit.")
    return {"timm": timm_names, "torchvision": torchvision_names}[library].layout_for(config)


def build_peer(library: str, config: ViTConfig, weights: Mapping[str, Tensor], device: str) -> nn.Module:
    """The library's model with plainvit's weights: normalized images [B, 3, H, W] -> logits [B, K]."""
    if importlib.util.find_spec(library) is None:
        raise ImportError(f"{library} is not installed: pip install {library}")
    with torch.device(device):  # the initial weights are drawn there, which is faster than on the host
        model = PEERS[library](config)
    model.load_state_dict(to_format(find_layout(library, model, config), weights, config))
    return LogitsModel(model)


class LogitsModel(nn.Module):
    """Returns the logits as a tensor: transformers returns an object."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(images)
        return output if isinstance(output, Tensor) else output.logits


class LossModel(nn.Module):
    """Model and cross-entropy in one module, so that both are compiled together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


@contextlib.contextmanager
def set_cudnn_attention(enabled: bool) -> Iterator[None]:
    """Sets the global switch: compiled code does not always respect `sdpa_kernel`."""
    previous = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(previous)


def autocast(device: str) -> torch.autocast:
    """bf16 on a GPU, nothing on a CPU."""
    kind = device.split(":")[0]
    return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


class PeerStep:
    """Training steps of a peer: forward, cross-entropy, backward, AdamW, zero_grad."""

    def __init__(
        self,
        library: str,
        config: ViTConfig,
        weights: Mapping[str, Tensor],
        batches: list[tuple[Tensor, Tensor]],
        *,
        device: str,
        tuned: bool,
        compiled: bool,
    ) -> None:
        self.model = LossModel(build_peer(library, config, weights, device).train())
        self.forward: Callable[..., Tensor] = self.model
        if tuned and compiled:
            self.forward = torch.compile(self.model, dynamic=False)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=tuned or None)
        self.batches, self.number = batches, 0
        self.autocast: Callable[[], Any] = partial(autocast, device)
        self.attention_context: Callable[[], Any] = partial(set_cudnn_attention, not tuned)

    def __call__(self) -> Tensor:
        images, labels = self.batches[self.number % len(self.batches)]
        self.number += 1
        with self.autocast():
            loss = self.forward(images, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def close(self) -> None:
        """Frees the memory."""
        del self.forward, self.model, self.optimizer, self.batches
