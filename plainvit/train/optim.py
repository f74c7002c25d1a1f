"""Optimizers, parameter groups for weight and layer decay, averaged weights.

AdamW and SGD are PyTorch's own. LAMB, which it lacks, and Muon, which it runs matrix by matrix, are written here.
Each step sets its learning rate (schedule.py), so there is no scheduler state to save.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, _foreach_add_, _foreach_lerp_, _foreach_mul_, nn  # pyright: ignore

from plainvit.config import Optim
from plainvit.models import ResNet, ViT
from plainvit.runtime.parallel import shard_like


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Kernels have weight decay, and Muon orthogonalizes them; biases, norms, tokens and positions have none."""
    return parameter.ndim >= 2 and name.rsplit(".", 1)[-1] == "weight"


def find_depth(name: str, layers: int) -> int:
    """Depth for layer decay: 0 before the blocks, 1 to `layers` for blocks, `layers` + 1 after them."""
    name = name.replace("body.", "").replace("stages.", "blocks.")
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    early = ("embedding", "stem", "class_token", "distillation_token", "registers", "positions", "root")
    return 0 if name.startswith(early) else layers + 1


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freezes the parameters whose names match. Raises ValueError for a pattern without a match."""
    for pattern in patterns:
        matching = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"--optim.frozen {pattern!r} matches no parameter: `plainvit inspect` lists their names")
        for parameter in matching:
            parameter.requires_grad_(False)


def group_parameters(model: ViT | ResNet, optim: Optim, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict]:
    """Parameter groups of equal weight decay and learning rate factor ("scale"), in a fixed order."""
    layers = len(model.blocks) if isinstance(model, ViT) else len(model.body.stages)
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        scale = optim.layer_decay ** (layers + 1 - find_depth(name, layers))
        decay = optim.weight_decay if has_weight_decay(name, parameter) else 0.0
        grouped.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": parameters, "scale": scale, "weight_decay": decay, "lr": 0.0}
        for (scale, decay), parameters in grouped.items()
    ]


class Optimizers:
    """One optimizer; for Muon two: Muon for the blocks' matrices and AdamW for the rest."""

    def __init__(
        self, model: ViT | ResNet, named: Iterable[tuple[str, nn.Parameter]], optim: Optim, *, graphs: bool = False
    ) -> None:
        """graphs: learning rates are tensors on the device, as CUDA graphs need them."""
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not named:
            raise ValueError("--optim.frozen leaves nothing to train: remove a pattern")
        self.optim, self.parameters = optim, [parameter for _, parameter in named]
        self._names = {parameter: name for name, parameter in named}
        self._views: dict[nn.Parameter, list[nn.Parameter]] = {}  # a matrix -> views that are updated separately
        fused = self.parameters[0].is_cuda
        adam = {"betas": optim.betas, "eps": optim.eps, "fused": fused, "capturable": graphs}
        make_groups = partial(group_parameters, model, optim)
        match optim.name:
            case "adamw":
                self.all: list[torch.optim.Optimizer] = [torch.optim.AdamW(make_groups(named), **adam)]
            case "sgd":
                self.all = [torch.optim.SGD(make_groups(named), momentum=optim.momentum, fused=fused)]
            case "lamb":
                self.all = [Lamb(make_groups(named), optim.betas, optim.eps)]
            case "muon":
                matrices = [(name, p) for name, p in named if is_for_muon(name, p)]
                others = [(name, p) for name, p in named if not is_for_muon(name, p)]
                if not matrices:
                    raise ValueError("--optim.name muon needs matrices of ViT blocks to train: use --optim.name adamw")
                split = [(name, part) for name, p in matrices for part in self._split(name, p)]
                self.all = [Muon(make_groups(split), optim.momentum)]
                if others:
                    self.all.append(torch.optim.AdamW(make_groups(others), **adam))
        if graphs:
            for optimizer in self.all:
                for group in optimizer.param_groups:
                    group["lr"] = torch.zeros((), device=self.parameters[0].device)

    def _split(self, name: str, parameter: nn.Parameter) -> list[nn.Parameter]:
        """q, k and v share a matrix, but are orthogonalized separately: views of it."""
        if not name.endswith("qkv.weight"):
            return [parameter]
        self._views[parameter] = [nn.Parameter(view) for view in parameter.detach().chunk(3)]
        self._names |= {part: f"{name}.{which}" for part, which in zip(self._views[parameter], "qkv", strict=True)}
        return self._views[parameter]

    def set_rate(self, lr: float) -> None:
        for optimizer in self.all:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * group["scale"])
                else:
                    group["lr"] = lr * group["scale"]

    def step(self) -> None:
        for parameter, parts in self._views.items():
            assert parameter.grad is not None
            for part, gradient in zip(parts, parameter.grad.chunk(3), strict=True):
                part.grad = gradient
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """All optimizer state as tensors, named PARAMETER:STATE."""
        return {
            f"{self._names[parameter]}:{name}": value if isinstance(value, Tensor) else torch.tensor(value)
            for optimizer in self.all
            for parameter in list_parameters(optimizer)
            for name, value in optimizer.state.get(parameter, {}).items()
        }

    def load(self, stored: Mapping[str, Tensor], updates: int) -> None:
        """Restores what `state` returned after so many updates. Raises ValueError if it is not of these optimizers."""
        left = dict(stored)
        for optimizer in self.all:
            # Counters are on the host, except for kernels that read them on the device
            on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
            for parameter in list_parameters(optimizer):
                prefix, names = self._names[parameter], list_state_names(optimizer)
                tensors = {name: left.pop(f"{prefix}:{name}") for name in names if f"{prefix}:{name}" in left}
                if not tensors:  # a parameter without gradients has no state
                    continue
                shapes = {name: torch.Size() if name == "step" else parameter.shape for name in names}
                is_float = all(value.is_floating_point() for value in tensors.values())
                if not is_float or {name: value.shape for name, value in tensors.items()} != shapes:
                    raise ValueError(f"the optimizer's state of {prefix} is incomplete, or of another shape or type")
                optimizer.state[parameter] = {
                    name: shard_like(value, parameter) if value.ndim or on_device else value.clone()
                    for name, value in tensors.items()
                }
        if left:
            raise ValueError(f"the optimizer state has an unexpected {min(left)}")
        if updates and not stored and any(list_state_names(optimizer) for optimizer in self.all):
            raise ValueError("the optimizer state is missing")


def is_for_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains a parameter: the blocks' matrices. AdamW trains embedding, head and convolutions."""
    return parameter.ndim == 2 and "blocks." in name and has_weight_decay(name, parameter)


def list_state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of an optimizer's state per parameter."""
    if isinstance(optimizer, torch.optim.SGD | Muon):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    return "step", "exp_avg", "exp_avg_sq"


def list_parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


class Lamb(torch.optim.Optimizer):
    """Adam's step, scaled for each tensor that decays by the ratio of its norm to the step's (arXiv 1904.00962).

    As DeiT III ran it: bias-corrected, decay inside the step, no ratio for tensors without decay.
    """

    def __init__(self, params: list[dict], betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                count = float(state["step"])
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - first)
                square = state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                scale = (square / (1 - second**count)).sqrt_().add_(group["eps"])
                update = mean / (1 - first**count) / scale
                if group["weight_decay"]:
                    update.add_(parameter, alpha=group["weight_decay"])
                    size, length = parameter.norm(), update.norm()
                    update.mul_(torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size)))
                parameter.add_(update, alpha=-group["lr"])


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized before it is added (Jordan 2024), with steps as large as AdamW's.

    Equal to torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but all matrices of a shape are computed together:
    on an H200 a step of ViT-S takes 3.7 ms, torch's 31.3.
    """

    def __init__(self, params: list[dict], momentum: float) -> None:
        super().__init__(params, {"momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step(group, shape, parameters)

    def _step(self, group: dict, shape: torch.Size, parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        buffers = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in parameters]
        _foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        nesterov = torch.lerp(torch.stack(gradients), torch.stack(buffers), group["momentum"])  # [n, A, B]
        updates = orthogonalize(nesterov).to(gradients[0].dtype) * (-group["lr"] * 0.2 * max(shape) ** 0.5)
        _foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        _foreach_add_(parameters, list(updates.unbind()))


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Roughly the nearest orthogonal matrices [n, A, B], in bf16: a quintic Newton-Schulz iteration."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Average:
    """Exponential moving average of the weights. Its window is at most a ninth of the run so far, as in TensorFlow."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, own = decay, model.state_dict()
        self.weights = {name: p.detach().clone() for name, p in own.items()}
        self._both = list(self.weights.values()), [p.detach() for p in own.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the model's current weights."""
        decay = min(self.decay, (1 + step) / (10 + step))
        _foreach_lerp_(*self._both, 1 - decay)
