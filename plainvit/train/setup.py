"""From a config to a `Training`: model, objective, optimizer, loader, and how a step is computed."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from plainvit.config import Config, ResNetConfig, ViTConfig
from plainvit.data.loader import Loader
from plainvit.data.splits import Splits
from plainvit.device import choose_device
from plainvit.evaluate.classify import EvaluationSet, classify
from plainvit.models import ViT, has_fast_path
from plainvit.models.recompute import recompute_activations
from plainvit.planning.devices import H200
from plainvit.planning.plan import describe_step
from plainvit.planning.step_time import EAGER, step_seconds
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.display import format_duration, print_line
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import Folder
from plainvit.runtime.parallel import replicate, shard
from plainvit.runtime.track import Tracker
from plainvit.train.finalize import make_predictor, open_evaluation_set
from plainvit.train.graphs import Graph, GraphedGradients, can_use_graphs
from plainvit.train.masked_objective import PredictPatches, validate_masked
from plainvit.train.objectives import Classify
from plainvit.train.optim import Average, Optimizers, freeze
from plainvit.train.state import Training, autocast, uses_fsdp
from plainvit.train.step import Gradients
from plainvit.train.transfer import load_teacher, make_initial_model

MULTI_STAGE_WIDTH = 1024  # widest row of which three stages fit into the shared memory of any GPU
# Measured on an H200 (docs/results.md)
COMPILE_SECONDS = 30.0  # without compiled code in the cache
GAIN = 1 / EAGER  # how much faster compiled steps of B/16 are
# Narrow models gain more: timm's Ti/16 1.48, the recipe cifar10 at batch 512 1.77 (20.5 and 11.6 ms)
NARROW_WIDTH, NARROW_GAIN = 256, 1.48


def build_training(
    config: Config,
    splits: Splits,
    folder: Folder,
    *,
    quiet: bool = False,
    world: World | None = None,
    force: bool = False,
) -> Training:
    """Everything that a run needs, as it is before its first step."""
    world = world or World(device=choose_device(config.device))
    objective = build_objective(config, splits, world)
    uses_graphs = can_use_graphs(config, world)
    named = [(name.removeprefix("model."), parameter) for name, parameter in objective.named_parameters()]
    optimizers = Optimizers(objective.model, named, config.optim, graphs=uses_graphs)
    has_average = bool(config.ema or config.ema_window)
    loader = build_loader(config, splits, folder, world, force=force)
    compiles, note = choose_compile(config, world.device, world.size)
    if note:
        print_line(note, quiet=quiet or not world.is_main)
    gradients = build_gradients(config, objective, optimizers, world, compiles=compiles)
    validation = open_evaluation_set(config, splits.val, world) if splits.val else None
    return Training(
        config=config,
        objective=objective,
        optimizers=optimizers,
        average=Average(objective.model, config.decay(config.steps)) if has_average else None,
        loader=loader,
        folder=folder,
        checkpoints=Checkpoints(folder.path / "checkpoints", config.keep, world),
        world=world,
        gradients=GraphedGradients(gradients, optimizers) if uses_graphs else gradients,
        update=Graph(optimizers.step) if uses_graphs else optimizers.step,
        validation=validation,
        evaluate=build_evaluation(config, objective, validation, folder) if validation else None,
        tracker=Tracker(config.track if world.is_main else (), folder.path, config),
        quiet=quiet or not world.is_main,
        is_compiled=compiles,
    )


def build_loader(config: Config, splits: Splits, folder: Folder, world: World, *, force: bool) -> Loader:
    """Images are in memory or read from disk as when the run began."""
    assert config.model
    loading = folder.read("data.json").get("loading")
    return Loader(
        splits.train,
        batch=config.batch,
        size=config.model.image_size,
        augment=config.augment,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        workers=None if config.workers < 0 else config.workers,
        device=world.device,
        mode=loading if loading in ("resident", "cached", "streamed") else "auto",
        force=force,
    )


def build_objective(config: Config, splits: Splits, world: World) -> Classify | PredictPatches:
    """The model with its loss: accelerated, and sharded for FSDP."""
    check_combinations(config, world)
    model = make_initial_model(config, splits).to(world.device)
    if config.precision == "fp8":
        from plainvit.models.fast.fp8 import use_fp8

        assert isinstance(model, ViT)
        use_fp8(model)
    freeze(model, config.optim.frozen)
    if config.objective == "classify":
        counts = torch.bincount(torch.from_numpy(splits.train.labels).long(), minlength=len(splits.classes))
        teacher = load_teacher(config, splits.classes).to(world.device) if config.teacher else None
        objective = Classify(model, config, counts, teacher)
    else:
        assert isinstance(model, ViT)
        objective = PredictPatches(model, config, world.rank)
    accelerate_objective(objective.to(world.device), config)
    if uses_fsdp(config, world):
        shard(model, world)
    return objective


def check_combinations(config: Config, world: World) -> None:
    """Raises ValueError for settings that do not work together, or not on this machine."""
    if uses_fsdp(config, world):
        if config.objective != "classify":
            raise ValueError(f"--objective {config.objective} does not support --parallel fsdp: use --parallel ddp")
        if config.optim.name == "muon":
            raise ValueError("--optim.name muon does not support --parallel fsdp: use --parallel ddp")
    if config.precision == "fp8":
        check_fp8(config, world)


def check_fp8(config: Config, world: World) -> None:
    if not has_fast_path():
        raise ValueError("--precision fp8 needs plainvit.models.fast, which is not installed: use --precision bf16")
    from plainvit.models.fast.fp8 import explain_unsupported

    reason = explain_unsupported(world.device)
    if isinstance(config.model, ResNetConfig):
        reason = "--precision fp8 is not supported for ResNets"
    if uses_fsdp(config, world):
        reason = "--precision fp8 is not supported with --parallel fsdp, which splits rows (--parallel ddp works)"
    if reason:
        raise ValueError(f"{reason}: use --precision bf16")


def accelerate_objective(objective: nn.Module, config: Config) -> None:
    """Attaches the fast modules, unless --fast-path off; and recomputed activations for --recompute."""
    if config.fast_path == "auto" and has_fast_path():
        from plainvit.models.fast import accelerate

        on_gpu = next(objective.parameters()).is_cuda  # on a CPU it saves no time
        accelerate(objective, low_precision_residual=on_gpu)
    if config.recompute:
        recompute_activations(objective)


def build_gradients(
    config: Config, objective: nn.Module, optimizers: Optimizers, world: World, *, compiles: bool
) -> Gradients:
    """Forward and backward pass, with DDP and torch.compile around the plain objective."""
    on_gpu, has_fsdp = world.device.startswith("cuda"), uses_fsdp(config, world)
    ddp: Any = replicate(objective, world) if world.size > 1 and not has_fsdp else None
    forward: Any = ddp or objective
    if compiles:
        options = choose_compiler_options(config) if on_gpu else None
        forward = torch.compile(forward, dynamic=False, options=options)

    def synchronize(is_last: bool) -> AbstractContextManager:
        """Processes exchange gradients with the last micro-batch only."""
        if has_fsdp:
            objective.model.set_requires_gradient_sync(is_last)  # pyright: ignore
        return contextlib.nullcontext() if is_last or not ddp else ddp.no_sync()

    cast = partial(autocast, config, torch.device(world.device))
    return Gradients(forward, optimizers.parameters, cast, config.optim.clip, synchronize)


def choose_compile(config: Config, device: str, processes: int = 1) -> tuple[bool, str]:
    """Whether to compile, and a line that says why not.

    auto is off on a CPU, and on a GPU where the run is too short to save the time that compiling takes. Steps are as
    long as `plainvit plan --on h200` estimates: on a slower GPU compiling saves more.
    """
    if config.compile != "auto" or not device.startswith("cuda"):
        return config.compile == "on", ""
    assert config.model
    seconds = sum(step_seconds(describe_step(config, config.model, processes), H200).values())
    steps = min(config.steps, 3600 * config.hours / seconds) if config.hours else config.steps
    is_narrow = isinstance(config.model, ViTConfig) and config.model.width <= NARROW_WIDTH
    gain = NARROW_GAIN if is_narrow else GAIN
    saved = steps * seconds * (gain - 1)
    if saved > COMPILE_SECONDS:
        return True, ""
    note = f"not compiled: {steps:,.0f} steps would save about {format_duration(saved)}"
    return False, f"{note}, compiling takes about {format_duration(COMPILE_SECONDS)} (--compile on compiles anyway)"


def choose_compiler_options(config: Config) -> dict[str, Any] | None:
    """On a GPU, LayerNorm's backward kernel loads its next rows while it sums the current ones.

    0.16 ms instead of 0.21 for S/16 at batch 1024 on an H200.
    """
    if config.fast_path == "off" or not isinstance(config.model, ViTConfig) or config.model.width > MULTI_STAGE_WIDTH:
        return None
    return {"triton.mix_order_reduction_allow_multi_stages": True}


def build_evaluation(
    config: Config, objective: Classify | PredictPatches, validation: EvaluationSet, folder: Folder
) -> Callable[[int], dict[str, float]]:
    """Step -> metrics of the model as it is then, on held-out images."""
    if isinstance(objective, PredictPatches):
        return lambda step: validate_masked(objective, validation, folder, step)
    predictor = make_predictor(config, objective.model, validation.world.device, folder.path)
    return lambda _: classify(predictor, validation).numbers()
