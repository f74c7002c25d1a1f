"""A model that only answers, as fast as the machine at hand can.

    model = plainvit.load("B_16.npz", optimise=True)
    logits = model(images)                    # fp32 [B, K]
    model.agreement(images)                   # share of images whose first choice is the plain model's
    model.ways                                # how it computes, by the batch: {8: Way("bf16", "compiled")}

Which way is fastest depends on the CPU or GPU, on torch and on the batch, so it is not guessed: at the first batch of a
size the ways are timed in turns on a model as wide with few blocks, those that fail or disagree are left out, and the
answer is kept in the user's cache. A way that needs a compiler is not taken where there is none.
"""

import copy
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from plainvit import __version__, device
from plainvit.config import Model, ViTConfig, to_json
from plainvit.disk import read_json, write_text
from plainvit.models import ResNet, ViT, build
from plainvit.models.fp8 import in_fp8, why_not

ROUNDS = 5  # of timing
APART = {"fp32": 0.05, "bf16": 0.05, "fp8": 0.75}  # of the logits' spread: how far a way may lie from fp32, 2 blocks
log = logging.getLogger("plainvit")


@dataclass(frozen=True)
class Way:
    """How a pass is computed."""

    precision: Literal["fp32", "bf16", "fp8"]  # fp8: of the blocks' products, where that was asked for
    code: Literal["eager", "compiled", "graphs"]  # graphs: compiled, and a small batch's kernels started at once


PLAIN = Way("fp32", "eager")
FP8 = Way("fp8", "compiled"), Way("fp8", "graphs")


def ways_on(place: torch.device) -> tuple[Way, ...]:
    """What to try, the plain one first."""
    if place.type == "cuda":
        return PLAIN, Way("bf16", "compiled"), Way("bf16", "graphs")
    low = (Way("bf16", "compiled"),) if cpu_computes_bf16() else ()
    return PLAIN, Way("fp32", "compiled"), *low


def cpu_computes_bf16() -> bool:
    """Whether oneDNN has bf16 products for this CPU, and they do not kill the process."""
    supported: Callable[[], bool] | None = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(supported and supported()) and not device.cpu_bf16_refused()


class Optimised(nn.Module):
    """A plain model's answers, without gradients; `config` and `about` are the model's own.

    fp8 lets it multiply by fp8 where that is fastest and there; a line says so where it is not.
    """

    def __init__(self, model: ViT | ResNet, *, fp8: bool = False) -> None:
        super().__init__()
        self.training = False  # as its parts
        self.fp8 = fp8
        self.model = model.eval().requires_grad_(False)
        self.config, self.about = model.config, model.about
        self.ways: dict[int, Way] = {}
        self._low: dict[str, ViT | ResNet] = {}  # in bf16 or fp8, once a way wants it
        self._calls: dict[tuple[int, str], Callable[[Tensor], Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        return self._answer("forward", images)

    def features(self, images: Tensor) -> Tensor:
        return self._answer("features", images)

    @torch.no_grad()
    def agreement(self, images: Tensor) -> float:
        """The share of images whose most probable class is that of the plain model."""
        plain = self.model(images)
        return (self(images).argmax(-1) == plain.argmax(-1)).float().mean().item()

    @torch.no_grad()
    def _answer(self, what: str, images: Tensor) -> Tensor:
        size = len(images)
        if size not in self.ways:
            self.ways[size] = choose(self.config, size, place_of(self.model), *self._asked())
        way = self.ways[size]
        if (size, what) not in self._calls:
            self._calls[size, what] = prepared(self._in(way), way, what)
        with torch.autocast(images.device.type, enabled=False):  # the precision is chosen already
            return self._calls[size, what](images).float().clone()  # a graph's own memory is written anew next time

    def _in(self, way: Way) -> ViT | ResNet:
        if way.precision == "fp32":
            return self.model
        if way.precision not in self._low:
            self._low[way.precision] = lowered(self.model, way)
        return self._low[way.precision]

    def _asked(self) -> tuple[Way, ...]:
        """Ways beyond those that everybody gets."""
        if not self.fp8:
            return ()
        resnet = "fp8 is for the blocks of a ViT, this model is a ResNet" if isinstance(self.model, ResNet) else ""
        reason = resnet or why_not(place_of(self.model))
        if reason and not self.ways:
            log.warning("%s: answers are as with optimise=True", reason)
        return () if reason else FP8

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """On another device nothing of what was chosen holds."""
        self.ways, self._calls, self._low = {}, {}, {}
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> "Optimised":
        if mode:
            raise ValueError("an optimised model only answers: load it without optimise=True to train it")
        return super().train(mode)


def place_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def lowered(model: ViT | ResNet, way: Way) -> ViT | ResNet:
    """The model itself, or a copy in the way's precision."""
    if way.precision == "fp32":
        return model
    if way.precision == "fp8":
        assert isinstance(model, ViT)
        return in_fp8(model)
    return copy.deepcopy(model).bfloat16()


def prepared(model: ViT | ResNet, way: Way, what: str) -> Callable[[Tensor], Tensor]:
    if isinstance(model, ViT):
        model.take_shortcuts()
    call: Callable = model if what == "forward" else model.features
    if way.code == "eager":
        return call
    if way.code == "graphs":
        return torch.compile(call, dynamic=False, mode="reduce-overhead")
    compiled = torch.compile(call, dynamic=False)
    return frozen(compiled) if place_of(model).type == "cpu" else compiled


def frozen(compiled: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Weights as constants of compiled code, which packs them as a CPU's products like them.

    Dynamo asks the compiler's configuration about that when it meets a parameter: torch.compile's options come later,
    and `{"freezing": True}` among them does nothing.
    """
    from torch._inductor import config

    def answer(images: Tensor) -> Tensor:
        with config.patch(freezing=True), torch.no_grad():
            return compiled(images)

    return answer


# Choosing -------------------------------------------------------------------------------------------------------------


def choose(config: Model, batch: int, place: torch.device, *also: Way) -> Way:
    """The fastest way for such a batch, from the cache where it was found before. `also`: what else may be tried."""
    folder = device.cache_folder()
    file = folder / f"way-{_identity(config, batch, place, *also)}.json"
    known = read_json(file)
    if set(known) == {"precision", "code"} and Way(**known) in (*ways_on(place), *also):
        return Way(**known)
    way = fastest(config, batch, place, *also)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(asdict(way)))
    except OSError:  # a home that cannot be written to costs the timing again, nothing else
        pass
    return way


def _identity(config: Model, batch: int, place: torch.device, *also: Way) -> str:
    cpu = f"{device.processor()}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else cpu
    said = [__version__, torch.__version__, name, batch, to_json(short(config).replace(classes=8)), *map(asdict, also)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def short(config: Model) -> Model:
    """With few blocks, which all cost the same."""
    if isinstance(config, ViTConfig):
        return config.replace(depth=min(config.depth, 2))
    return config.replace(blocks=tuple(1 for _ in config.blocks))


@torch.no_grad()
def fastest(config: Model, batch: int, place: torch.device, *also: Way) -> Way:
    """Of those that run and agree with fp32, by the median of a few rounds in turns."""
    with torch.random.fork_rng():  # whoever asks for an answer keeps their random numbers
        torch.manual_seed(0)
        plain = build(short(config).replace(classes=8)).eval()
        head = plain.head
        assert head is not None
        nn.init.normal_(head.weight, std=0.1)  # which starts as zeros
        images = torch.randint(0, 256, (batch, config.channels, *config.image_size), dtype=torch.uint8)
    plain, images = plain.to(place), images.to(place)
    expected = plain(images).float()
    calls: dict[Way, Callable[[Tensor], Tensor]] = {}
    for way in (*ways_on(place), *also):
        try:
            call = prepared(lowered(plain, way), way, "forward")
            apart = (call(images).float() - expected).abs().max()
        except Exception as error:  # no compiler, a GPU too old, a bug of theirs: the plain way is always there
            log.debug("%s does not run here: %s", way, (str(error).splitlines() or [""])[0])
            continue
        if apart <= APART[way.precision] * max(expected.std(), 1e-6):
            calls[way] = call
    times = {way: statistics.median(values) for way, values in _timed(calls, images).items()}
    return min(times, key=lambda way: times[way])


def _timed(calls: dict[Way, Callable[[Tensor], Tensor]], images: Tensor) -> dict[Way, list[float]]:
    found: dict[Way, list[float]] = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            call(images)
            _finish(images)
            started = time.perf_counter()
            call(images)
            _finish(images)
            found[way].append(time.perf_counter() - started)
    return found


def _finish(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()
