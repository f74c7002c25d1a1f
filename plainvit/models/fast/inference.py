"""A model for inference only, as fast as the machine at hand allows.

    model = plainvit.load("B_16.npz", optimize=True)
    logits = model(images)                    # fp32 [B, K]
    model.agreement(images)                   # fraction of images whose top-1 is that of the plain model
    model.choices                             # how it computes, per batch size: {8: Choice("bf16", "compiled")}

Which choice is fastest depends on the CPU or GPU, on torch and on the batch size, so it is measured: at the first batch
of a size, all choices are timed in turns on a model of the same width with two blocks. A choice that fails (because
there is no compiler, say) or disagrees with fp32 is left out.
"""

import copy
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from plainvit import device
from plainvit.config import Model, ViTConfig
from plainvit.errors import first_line
from plainvit.models import ResNet, ViT, build
from plainvit.models.fast import accelerate
from plainvit.models.fast.fp8 import convert_to_fp8, explain_unsupported

ROUNDS = 5  # of timing
TOLERANCE = {"fp32": 0.05, "bf16": 0.05, "fp8": 0.75}  # largest difference from fp32, in std of the logits
log = logging.getLogger("plainvit")


@dataclass(frozen=True)
class Choice:
    """How a forward pass is computed."""

    precision: Literal["fp32", "bf16", "fp8"]  # fp8: only the blocks' matmuls, and only on request
    code: Literal["eager", "compiled", "graphs"]  # graphs: compiled, with all kernels of a batch launched at once


PLAIN = Choice("fp32", "eager")
FP8 = Choice("fp8", "compiled"), Choice("fp8", "graphs")


def list_choices(target: torch.device) -> tuple[Choice, ...]:
    """What to try on a device, the plain model first."""
    if target.type == "cuda":
        return PLAIN, Choice("bf16", "compiled"), Choice("bf16", "graphs")
    low = (Choice("bf16", "compiled"),) if cpu_computes_bf16() else ()
    return PLAIN, Choice("fp32", "compiled"), *low


def cpu_computes_bf16() -> bool:
    """Whether bf16 is faster than fp32 on this CPU, as measured, and does not crash this process."""
    return not device.is_cpu_bf16_unsafe() and device.measure_cpu().prefers_bf16


class InferenceModel(nn.Module):
    """Logits and features of a plain model, without gradients; `config` and `about` are the model's own.

    fp8 adds the fp8 choices where the GPU supports them; where it does not, a warning says why.
    """

    def __init__(self, model: ViT | ResNet, *, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8
        self.model = model.eval().requires_grad_(False)
        self.training = False
        self.config, self.about = model.config, model.about
        self.choices: dict[int, Choice] = {}
        self._cast: dict[str, ViT | ResNet] = {}  # by precision
        self._calls: dict[tuple[int, str], Callable[[Tensor], Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        return self._run("forward", images)

    def features(self, images: Tensor) -> Tensor:
        return self._run("features", images)

    @torch.no_grad()
    def agreement(self, images: Tensor) -> float:
        """The fraction of images whose most probable class is that of the plain model."""
        return (self(images).argmax(-1) == self.model(images).argmax(-1)).float().mean().item()

    @torch.no_grad()
    def _run(self, method: str, images: Tensor) -> Tensor:
        size = len(images)
        with torch.autocast(images.device.type, enabled=False):  # the precision is a part of the choice
            if size not in self.choices:
                self.choices[size] = measure(self.config, size, device_of(self.model), self._extra_choices())
            choice = self.choices[size]
            if (size, method) not in self._calls:
                if choice.precision not in self._cast:
                    self._cast[choice.precision] = cast_model(self.model, choice)
                self._calls[size, method] = compile_call(self._cast[choice.precision], choice, method)
            return self._calls[size, method](images).float().clone()  # a CUDA graph overwrites its output next time

    def _extra_choices(self) -> tuple[Choice, ...]:
        if not self.fp8:
            return ()
        is_resnet = isinstance(self.model, ResNet)
        reason = "fp8 is for ViTs, this model is a ResNet" if is_resnet else explain_unsupported(device_of(self.model))
        if reason and not self.choices:
            log.warning("%s: continuing as with optimize=True", reason)
        return () if reason else FP8

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """After a move to another device everything is measured again."""
        self.choices, self._calls, self._cast = {}, {}, {}
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> "InferenceModel":
        if mode:
            raise ValueError("a model loaded with optimize=True cannot be trained: load it without")
        return super().train(mode)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def cast_model(model: ViT | ResNet, choice: Choice) -> ViT | ResNet:
    """The model itself for fp32, else a copy in the precision of the choice; with the fast modules."""
    if choice.precision == "fp8":
        assert isinstance(model, ViT)
        return accelerate(convert_to_fp8(model))
    return accelerate(model if choice.precision == "fp32" else copy.deepcopy(model).bfloat16())


def compile_call(model: ViT | ResNet, choice: Choice, method: str) -> Callable[[Tensor], Tensor]:
    call: Callable = model if method == "forward" else model.features
    if choice.code == "eager":
        return call
    if choice.code == "graphs":
        return torch.compile(call, dynamic=False, mode="reduce-overhead")
    compiled = torch.compile(call, dynamic=False)
    return pack_weights(compiled) if device_of(model).type == "cpu" else compiled


def pack_weights(compiled: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Makes the weights constants of the compiled code, which packs them in the layout that CPU matmuls prefer.

    Dynamo reads the global configuration when it meets a parameter, before torch.compile's options apply, so
    `{"freezing": True}` among these does nothing.
    """
    from torch._inductor import config

    def call(images: Tensor) -> Tensor:
        with config.patch(freezing=True), torch.no_grad():
            return compiled(images)

    return call


@torch.no_grad()
def measure(config: Model, batch: int, target: torch.device, extra: tuple[Choice, ...] = ()) -> Choice:
    """The fastest choice for a batch size, among those that run and agree with fp32."""
    small = shrink(config).replace(classes=8)
    with torch.random.fork_rng():  # the caller's random numbers stay as they are
        torch.manual_seed(0)
        plain = build(small).eval()
        assert plain.head is not None
        nn.init.normal_(plain.head.weight, std=0.1)  # it starts as zeros
        images = torch.randint(0, 256, (batch, config.channels, *config.image_size), dtype=torch.uint8)
    plain, images = plain.to(target), images.to(target)
    expected = plain(images).float()
    calls: dict[Choice, Callable[[Tensor], Tensor]] = {}
    for choice in (*list_choices(target), *extra):
        try:
            call = compile_call(cast_model(plain, choice), choice, "forward")
            difference = (call(images).float() - expected).abs().max()
        except Exception as error:  # no compiler, an old GPU, a compiler bug: the plain model always works
            log.debug("%s does not run here: %s", choice, first_line(error))
            continue
        if difference <= TOLERANCE[choice.precision] * max(expected.std(), 1e-6):
            calls[choice] = call
    times = {choice: statistics.median(values) for choice, values in time_choices(calls, images).items()}
    return min(times, key=lambda choice: times[choice])


def shrink(config: Model) -> Model:
    """The same model with two blocks, or one unit per stage: all blocks cost the same."""
    if isinstance(config, ViTConfig):
        return config.replace(depth=min(config.depth, 2))
    return config.replace(blocks=tuple(1 for _ in config.blocks))


def time_choices(calls: dict[Choice, Callable[[Tensor], Tensor]], images: Tensor) -> dict[Choice, list[float]]:
    times: dict[Choice, list[float]] = {choice: [] for choice in calls}
    for _ in range(ROUNDS):
        for choice, call in calls.items():
            call(images)
            _synchronize(images)
            started = time.perf_counter()
            call(images)
            _synchronize(images)
            times[choice].append(time.perf_counter() - started)
    return times


def _synchronize(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()
