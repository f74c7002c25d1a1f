"""BiT ResNets (arXiv 1912.11370) and the ResNet that feeds a hybrid: standardized convolutions and GroupNorm.

    model = plainvit.create("BiT-R50x1")
    model = plainvit.create("R50x1+ViT-B/16")     # its stem is a Body of this file

As in Google's code, BiT is pre-activation (v2) with symmetric padding, and the hybrid's stem is post-activation (v1)
with TensorFlow's SAME padding. Letters: B batch, C channels, K classes.
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plainvit.config import About, ResNetConfig
from plainvit.models.buffers import Normalize
from plainvit.models.init import initialize_resnet
from plainvit.models.trace import Trace, note, number_layers


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """TensorFlow's SAME: zeros for ceil(size / stride) outputs; an odd one goes to the end."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads) if any(pads) else x


class StdConv(nn.Conv2d):
    """A convolution that standardizes its kernels to mean 0 and variance 1 per output channel."""

    def __init__(self, config: ResNetConfig, c_in: int, c_out: int, kernel: int, stride: int = 1) -> None:
        padding = kernel // 2 if config.padding == "symmetric" else 0
        super().__init__(c_in, c_out, kernel, stride, padding, bias=False)
        self.same = config.padding == "same"
        where, eps = config.standardize.split("+")
        self.eps_on_std, self.eps = where == "std", float(eps)

    def standardized(self) -> Tensor:
        """The kernels as they are applied."""
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        scale = var.sqrt() + self.eps if self.eps_on_std else (var + self.eps).sqrt()
        return (self.weight - mean) / scale

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = pad_same(x, self.kernel_size[0], self.stride[0]) if self.same else x
        return F.conv2d(x, self.standardized(), None, self.stride, self.padding)


def group_norm(config: ResNetConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, config.norm_eps)


class PreUnit(nn.Module):
    """BiT's bottleneck: norm and ReLU before each convolution; the shortcut's projection reads the first of them."""

    def __init__(self, config: ResNetConfig, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        middle = c_out // 4
        self.norm1, self.conv1 = group_norm(config, c_in), StdConv(config, c_in, middle, 1)
        self.norm2, self.conv2 = group_norm(config, middle), StdConv(config, middle, middle, 3, stride)
        self.norm3, self.conv3 = group_norm(config, middle), StdConv(config, middle, c_out, 1)
        self.projection = StdConv(config, c_in, c_out, 1, stride) if c_in != c_out or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        shortcut = x if self.projection is None else self.projection(y)
        y = F.relu(self.norm2(self.conv1(y)))
        y = F.relu(self.norm3(self.conv2(y)))
        return shortcut + self.conv3(y)


class PostUnit(nn.Module):
    """The hybrid's bottleneck: norm after each convolution, ReLU after the sum."""

    def __init__(self, config: ResNetConfig, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        middle = c_out // 4
        self.conv1, self.norm1 = StdConv(config, c_in, middle, 1), group_norm(config, middle)
        self.conv2, self.norm2 = StdConv(config, middle, middle, 3, stride), group_norm(config, middle)
        self.conv3, self.norm3 = StdConv(config, middle, c_out, 1), group_norm(config, c_out)
        projects = c_in != c_out or stride > 1
        self.projection = StdConv(config, c_in, c_out, 1, stride) if projects else nn.Identity()
        self.norm_projection = group_norm(config, c_out) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.norm_projection(self.projection(x))
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(shortcut + self.norm3(self.conv3(y)))


class Body(nn.Module):
    """Pixels [B, C, H, W] to the last feature map [B, config.width, H / stride, W / stride]."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        c = 64 * config.widen
        self.root = StdConv(config, config.channels, c, 7, 2)
        self.root_norm = None if config.preactivation else group_norm(config, c)
        unit = PreUnit if config.preactivation else PostUnit
        self.stages = nn.ModuleList()
        for stage, count in enumerate(config.blocks):
            c_out = 256 * config.widen * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            inputs = [c] + [c_out] * (count - 1)
            self.stages.append(
                nn.Sequential(*(unit(config, i, c_out, s) for i, s in zip(inputs, strides, strict=True)))
            )
            c = c_out
        self.norm = group_norm(config, c) if config.preactivation else None

    def forward(self, x: Tensor, trace: Trace | None = None) -> Tensor:
        x = note(trace, "root", self.pool_root(self.root(x)))  # [B, 64 * widen, H/4, W/4]
        for number, stage in enumerate(self.stages, 1):
            x = note(trace, f"stage{number}", stage(x))
        return x if self.norm is None else F.relu(self.norm(x))

    def pool_root(self, x: Tensor) -> Tensor:
        x = x if self.root_norm is None else F.relu(self.root_norm(x))
        # BiT pads with zeros, which may be the maximum; max_pool2d pads with -inf. After the hybrid's ReLU both agree.
        x = pad_same(x, 3, 2) if self.config.padding == "same" else F.pad(x, (1, 1, 1, 1))
        return F.max_pool2d(x, 3, 2)

    def trace_names(self) -> list[str]:
        return ["root", *(f"stage{number}" for number in range(1, len(self.stages) + 1))]


class ResNet(nn.Module):
    """Images to logits: a Body, average pooling and one linear head."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config, self.about = config, About()
        self.normalize = Normalize(config.mean, config.std)
        self.body = Body(config)
        self.head = nn.Linear(config.width, config.classes) if config.classes else None
        self.initialize()

    def initialize(self, generator: torch.Generator | None = None) -> Self:
        """Draws all weights by the scheme `config.init`; does nothing on the meta device."""
        if not self.body.root.weight.is_meta:
            initialize_resnet(self, self.config.init, generator)
        return self

    def forward(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """Logits [B, K]. Images may have any size; the config's is a default."""
        if trace is not None:
            trace.check(self.trace_names())
        x = note(trace, "pooled", self.feature_map(images, trace).mean((2, 3)))  # [B, C]
        return x if self.head is None else note(trace, "logits", self.head(x))

    def features(self, images: Tensor, layers: Sequence[int] | None = None) -> Tensor | list[Tensor]:
        """The pooled representation [B, C]; or the feature maps after the chosen stages (0 is the first)."""
        if layers is None:
            return self.feature_map(images).mean((2, 3))
        names = [f"stage{layer + 1}" for layer in number_layers(layers, len(self.body.stages))]
        trace = Trace(*names)
        self.feature_map(images, trace)
        return [trace[name] for name in names]

    def feature_map(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        x = self.normalize.convert(images, self.body.root.weight)
        return note(trace, "encoded", self.body(note(trace, "pixels", x), trace))  # [B, C, H/32, W/32]

    def replace_head(self, classes: int) -> Self:
        """For transfer: replaces the head by one of zeros."""
        root = self.body.root.weight
        self.config = self.config.replace(classes=classes)
        self.head = nn.Linear(self.config.width, classes, device=root.device, dtype=root.dtype) if classes else None
        for parameter in self.head.parameters() if self.head else ():
            nn.init.zeros_(parameter)
        return self

    def trace_names(self) -> list[str]:
        return ["pixels", *self.body.trace_names(), "encoded", "pooled", *(("logits",) if self.head else ())]
