"""From a config to a trained model in a run folder.

    result = plainvit.fit(plainvit.recipe("digits"))        result.folder, result.numbers["test"]["top1"]
    plainvit train digits

The same call again goes on with an unfinished run, and does nothing to a finished one.
"""

import contextlib
import hashlib
import json
import logging
import math
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from plainvit.analyse.report import write_report
from plainvit.config import Config, ResNetConfig, differences, from_json, to_json
from plainvit.data.decode import DataError
from plainvit.data.known import SETS
from plainvit.data.loader import Loader
from plainvit.data.splits import Splits, open_splits, risks
from plainvit.device import choose_device, is_out_of_memory
from plainvit.disk import exit_code_of
from plainvit.evaluate.classify import classify
from plainvit.evaluate.grid import choose_best, warn_at_edge
from plainvit.models import ResNet, ViT, has_fast_path
from plainvit.models.inference import NonFiniteError
from plainvit.models.recompute import recompute_activations
from plainvit.recipes import list_recipes, recipe
from plainvit.runtime.checkpoint import Checkpoints
from plainvit.runtime.distributed import LostError, World, join, let_the_agent_speak, losses_told
from plainvit.runtime.folder import Folder, environment, other_bits, read_results, run_seconds, say_instead
from plainvit.runtime.sharding import shard
from plainvit.runtime.track import tracker
from plainvit.train.deliver import deliver, evaluation_set, predictor_of
from plainvit.train.graphs import WARM, graphs_fit
from plainvit.train.guards import (
    DivergedError,
    InterruptedRunError,
    Terminated,
    choose_micro_batch,
    short_of_memory,
    termination,
)
from plainvit.train.held_out import validate
from plainvit.train.loop import Training, launch, train
from plainvit.train.masked import PredictPatches
from plainvit.train.objectives import Classify, score
from plainvit.train.optim import Average, Optimizers, add_lora, freeze
from plainvit.train.transfer import init_hash, initial_model, load_teacher, resolve
from plainvit.weights import load
from plainvit.weights.files import open_file

log = logging.getLogger("plainvit")


@dataclass
class Fitted:
    """What a run came to: its folder, the numbers of each split, and the model itself."""

    folder: Path
    numbers: dict[str, Any]
    model: ViT | ResNet


def fit(
    config: Config,
    out: str | Path | None = None,
    *,
    force: bool = False,
    search: bool = False,
    quiet: bool = False,
    bare: bool = False,
) -> Fitted:
    """Trains what the config says, in the folder `out`, or in runs/RECIPE-HASH where none is given.

    An unfinished run of the same config goes on; a config or data that changed since is refused, unless forced.
    search tries the rates of optim.grid on held-out training images first. bare: one of many runs that are compared on
    held-out images, so no test image is read and no report is drawn.
    """
    world = join(config.device, config.timeout)
    try:
        with losses_told(world):
            return _fit_with(world, config, out, force, search, quiet, bare)
    except LostError:
        let_the_agent_speak()
        raise
    finally:
        world.leave()


def _fit_with(
    world: World, config: Config, out: str | Path | None, force: bool, search: bool, quiet: bool, bare: bool
) -> Fitted:
    """One run of one or more processes, of which the first owns the folder."""

    def open_all() -> tuple[Config, Splits]:
        if not force:
            _check_data(config)
        splits = open_splits(config)
        if bare:
            splits.test = None
        return resolve(config, splits), splits

    config, splits = world.agree(open_all, lambda both: default_name(both[0]) + str(both[1].described))
    if search:
        _check_search(config)
    path = Path(out) if out else Path("runs") / default_name(config)
    with world.agree(lambda: Folder(path, writes=world.first)) as folder:
        if search:
            config = _searched(world, config, folder, quiet)
        fitted = _fit_in(world, folder, config, splits, force, quiet, bare)
    world.barrier()  # nobody leaves while another is still at work
    return fitted


def _check_data(config: Config) -> None:
    """A recipe for one named set, or for classes of it, is not for another: all was chosen for that one."""
    if config.recipe not in list_recipes():
        return
    meant, given = recipe(config.recipe).data, config.data.partition(":")[0]  # digits:01234 is of digits
    named = (*SETS, "digits")
    if meant in named and given != meant and (given in named or meant == "digits"):
        others = [name for name in list_recipes() if recipe(name).data == config.data]
        hint = f"take one for it ({', '.join(others[:4])}) or " if others else ""
        why = f"the recipe {config.recipe} is for {meant}, its steps, rates and sizes are not for {config.data}"
        raise ValueError(f"{why}: {hint}give --force")


def default_name(config: Config) -> str:
    """The recipe and a hash of all that decides the result: another config is another folder."""
    plain = {key: value for key, value in to_json(config).items() if key not in Config.OPERATIONAL}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
    return f"{Path(config.recipe or 'run').name.replace(':', '-')}-{digest}"


def _fit_in(
    world: World, folder: Folder, config: Config, splits: Splits, force: bool, quiet: bool, bare: bool = False
) -> Fitted:
    """The run itself. However it ends, status.json says so; what is refused before it begins leaves nothing behind."""
    config, finished = world.agree(lambda: _agreed(config, splits, folder, force, bare))
    world.barrier()  # all have read the folder before the first writes into it
    if finished:
        log.warning("%s is finished: nothing is left to do", folder.path)
        return Fitted(folder.path, read_results(folder.path), load(folder.path / "model.safetensors"))
    for risk, mend in () if quiet or not world.first else risks(config, splits):
        log.warning("%s: %s", risk, mend)
    run = world.agree(lambda: prepare(config, splits, folder, quiet, world, force=force))
    if len(set(world.gather_words(run.loader.mode))) > 1:  # each has chosen by the memory that it has
        run.loader.resident = None
    init = {"init": init_hash(config)} if config.init else {}
    folder.write("data.json", splits.described | init | {"loading": run.loader.mode})
    folder.write("config.json", to_json(config))
    begun, now = folder.read("environment.json"), environment(world.device) | {"processes": world.size}
    folder.write("environment.json", begun or now)
    if run.checkpoints.steps() and (other := other_bits(begun, now)) and not run.quiet:
        log.warning("%s since the run began: the same samples, not the same bits", other)
    folder.say("running", folder.read("status.json").get("step", 0), config.steps)
    try:
        with losses_told(world), termination():
            _train(run)
            model, numbers = deliver(run, splits, report=not bare)
    except BaseException as error:
        _tell(run, error, report=not bare)
        raise
    return Fitted(folder.path, numbers, model)


def _tell(run: Training, error: BaseException, report: bool) -> None:
    """status.json, and a report of what there is where it is worth one."""
    stopped = isinstance(error, InterruptedRunError | KeyboardInterrupt | Terminated)
    state = "interrupted" if stopped else "diverged" if isinstance(error, DivergedError) else "failed"
    usual = 130 if stopped else exit_code_of(error) if isinstance(error, ValueError | OSError) else 1
    words, kind = str(error).partition("\n")[0], type(error).__name__
    plain = words and isinstance(error, ValueError | OSError | Terminated)
    reason = words if plain else f"{kind}: {words}".removesuffix(": ")
    code = getattr(error, "exit_code", usual)
    run.folder.say(state, run.progress.step, run.steps, reason, code)
    if isinstance(error, LostError):  # it may be the first that is gone
        say_instead(run.folder.path, state, reason, code)
    if run.world.first and report and state != "failed":
        write_report(run.folder.path)


def _agreed(config: Config, splits: Splits, folder: Folder, force: bool, bare: bool) -> tuple[Config, bool]:
    """(config, whether all is done): refused where the folder's run is another one, unless that is forced."""
    stored, data = folder.read("config.json"), folder.read("data.json")
    if not stored:
        return config, False
    run_seconds(folder.path)  # refused now, not in the middle of the run
    old = from_json(stored, ("run",))
    if config.hours:  # which had set these
        optim = config.optim.replace(warmup=old.optim.warmup, cooldown=old.optim.cooldown)
        config = config.replace(steps=old.steps, optim=optim)
    changed = {name: both for name, both in differences(old, config).items() if name not in Config.OPERATIONAL}
    words = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changed.items())
    due = ("model.safetensors", "results.json", *(() if bare else ("report.html",)))  # made again where one is lost
    done = folder.read("status.json").get("state") == "done" and all((folder.path / name).is_file() for name in due)
    longer = config.steps > old.steps
    done = done and (longer or _has_sound_weights(folder.path))
    if changed and not force:
        raise ValueError(f"{folder.path} holds a run of another config ({words}): give another --out, or --force")
    if done and changed and not longer:
        raise ValueError(f"{folder.path} is finished, by another config ({words}): give another --out")
    fixed = [name for name in changed if _is_fixed(name, *changed[name])]
    if fixed and Checkpoints(folder.path / "checkpoints", 1).steps():
        raise ValueError(f"{', '.join(fixed)} cannot change in a run that has begun ({words}): give another --out")
    if "init" in data and not force and data["init"] != init_hash(config):
        raise ValueError(f"{config.init} has other weights than {folder.path} was begun from: --force goes on")
    if data and {key: data[key] for key in data if key not in ("init", "loading")} != splits.described and not force:
        what = "classes" if data.get("classes") != list(splits.classes) else "images"
        raise DataError(f"the {what} of {config.data} changed since {folder.path} was begun: --force goes on")
    return config, done and not longer


def _has_sound_weights(folder: Path) -> bool:
    """Whether a finished run's final weights are as they were written; if not, a checkpoint makes them again."""
    path = folder / "model.safetensors"
    try:
        open_file(path).check()
        return True
    except ValueError as error:
        if Checkpoints(folder / "checkpoints", 1).newest() is None:
            words = f"{path} is damaged, and {folder} has no sound checkpoint to make it again from"
            raise DataError(f"{words}: copy the file again, or train again with another --out") from error
        log.warning("%s is damaged: it is made again from the newest checkpoint", path)
        return False


def _is_fixed(name: str, before: object, after: object) -> bool:
    """What a checkpoint's tensors cannot follow."""
    free = name.rpartition(".")[2] in ("dropout", "stochastic_depth")
    decoder = tuple(f"masked.{part}" for part in ("target", "depth", "width", "heads"))
    shape = name.startswith("model") or name in ("optim.name", "optim.lora", *decoder)
    shape = shape or (name == "objective" and "mae" in (before, after))
    return (shape and not free) or (name in ("ema", "ema_window") and not (before and after))


def _check_search(config: Config) -> None:
    if not config.optim.grid:
        raise ValueError("--search needs rates to try: --optim.grid 0.001 0.003 0.01 0.03")
    if open_splits(config.replace(holdout=config.search_holdout)).val is None:
        raise ValueError("--search needs held-out images: --search-holdout 0.1 keeps a tenth of them apart")


def _searched(world: World, config: Config, folder: Folder, quiet: bool) -> Config:
    """The paper's search (B.1.1): each rate of the grid on a held-out part of the training images; the best one."""
    found: dict[float, tuple[float, float]] = {}
    held_out = config.replace(holdout=config.search_holdout)
    splits = open_splits(held_out)
    splits.test = None  # read once, by the run that follows
    for lr in config.optim.grid:
        one = held_out.replace(optim=config.optim.replace(lr=lr, grid=()))
        with Folder(folder.path / "search" / f"lr-{lr:g}", writes=world.first) as inner:
            try:
                numbers = _fit_in(world, inner, one, splits, force=False, quiet=quiet).numbers["val"]
            except DivergedError:
                log.warning("search: lr %g diverges", lr)
                found[lr] = -math.inf, 0.0
                continue
        value = f"{numbers['top1']:.2%}" if "top1" in numbers else f"a loss of {numbers['loss']:.4f}"
        log.warning("search: lr %g gives %s on held-out images", lr, value)
        found[lr] = score(numbers), -numbers.get("nll", 0.0)
    if all(top1 == -math.inf for top1, _ in found.values()):
        raise DivergedError("every rate of optim.grid diverges: give lower ones")
    best = choose_best(found)
    equal = sum(top1 == found[best][0] for top1, _ in found.values()) > 1
    log.warning("search: lr %g is taken%s", best, ", of the equal ones that with the lowest NLL" if equal else "")
    warn_at_edge(best, found, "search: lr", "extend --optim.grid")
    return config.replace(optim=config.optim.replace(lr=best))


def prepare(
    config: Config,
    splits: Splits,
    folder: Folder,
    quiet: bool = False,
    world: World | None = None,
    *,
    force: bool = False,
) -> Training:
    """Model, objective, optimiser and loader of a run, as they are before its first step.

    Images are in memory or read from disk as when the run began: the two are resized slightly differently.
    """
    world = world or World(device=choose_device(config.device))
    loading = folder.read("data.json").get("loading")
    assert config.model
    loader = Loader(
        splits.train,
        batch=config.batch,
        size=config.model.image_size,
        augment=config.augment,
        seed=config.seed,
        rank=world.rank,
        world=world.size,
        workers=None if config.workers < 0 else config.workers,
        device=world.device,
        mode=loading if loading in ("resident", "streamed") else "auto",
        force=force,
    )
    objective = _objective(config, splits, world)
    model, averages = objective.model, bool(config.ema or config.ema_window)
    run = Training(
        config=config,
        objective=objective,
        optimizers=Optimizers(model, _trained(objective), config.optim, graphs=graphs_fit(config, world)),
        average=Average(model, config.decay(config.steps)) if averages else None,  # of few steps too: they may be more
        loader=loader,
        folder=folder,
        track=tracker(config.track if world.first else (), folder.path, config),
        quiet=quiet,
        world=world,
    )
    if splits.val:
        run.validation = validation = evaluation_set(config, splits.val, world)
        if isinstance(objective, PredictPatches):
            run.evaluate = lambda: validate(run, validation)
        else:
            predictor = predictor_of(run, model)
            run.evaluate = lambda: classify(predictor, validation).numbers()
    return run


def _objective(config: Config, splits: Splits, world: World) -> Classify | PredictPatches:
    """The model with its loss, in parts where FSDP is asked for."""
    if config.precision == "fp8":
        _check_fp8(config, world)
    model = initial_model(config, splits).to(world.device)
    if config.optim.lora:
        if not isinstance(model, ViT):
            raise ValueError("optim.lora is for ViTs: a ResNet has no blocks of matrices")
        add_lora(model, config.optim.lora, config.seed)
    if config.precision == "fp8":
        from plainvit.models.fast.fp8 import use_fp8

        assert isinstance(model, ViT)
        use_fp8(model)
    freeze(model, config.optim.frozen)
    if config.objective != "classify":
        assert isinstance(model, ViT)
        if world.size > 1 and config.parallel == "fsdp":
            raise ValueError(f"fsdp cuts up a model that is called whole, {config.objective!r} calls it in parts: ddp")
        return _attach_speed(PredictPatches(model, config, world.rank).to(world.device), config)
    counts = torch.bincount(torch.from_numpy(splits.train.labels).long(), minlength=len(splits.classes))
    teacher = load_teacher(config, splits.classes).to(world.device) if config.teacher else None
    objective = _attach_speed(Classify(model, config, counts, teacher).to(world.device), config)
    if world.size > 1 and config.parallel == "fsdp":
        if config.optim.name == "muon" or config.optim.lora:
            raise ValueError("muon and lora work on whole matrices, which fsdp cuts into rows: --parallel ddp")
        shard(model, world)
    return objective


def _attach_speed(objective: Any, config: Config) -> Any:
    """The fast modules of models/fast, unless --shortcuts off; and recomputed activations for --recompute."""
    if config.shortcuts == "auto" and has_fast_path():
        from plainvit.models.fast import accelerate

        accelerate(objective, low_precision_residual=True)
    return recompute_activations(objective) if config.recompute else objective


def _check_fp8(config: Config, world: World) -> None:
    """What cannot be trained by fp8 products, in a line that says what can."""
    if not has_fast_path():
        raise ValueError("--precision fp8 needs plainvit.models.fast, which is not installed")
    from plainvit.models.fast.fp8 import why_not

    reason = why_not(world.device)
    if isinstance(config.model, ResNetConfig):
        reason = "fp8 is for the blocks of a ViT, this model is a ResNet"
    elif config.optim.lora:
        reason = "fp8 would round away what optim.lora adds to a matrix"
    elif world.size > 1 and config.parallel == "fsdp":
        reason = "fp8 scales whole rows and columns, and fsdp cuts them up; --parallel ddp does not, or else"
    if reason:
        raise ValueError(f"{reason}: --precision bf16")


def _trained(objective: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """All that learns: the model's weights by the model's own names, and what else the objective has."""
    return [(name.removeprefix("model."), parameter) for name, parameter in objective.named_parameters()]


def _train(run: Training) -> None:
    """With the time that it took added to that of earlier parts of the run."""
    started, spent = time.monotonic(), run.folder.begin_part()
    try:
        if run.config.hours:
            run.ends = started + 3600 * run.config.hours - spent
        if run.config.hours and not run.checkpoints.steps():
            _shorten(run, 3600 * run.config.hours - spent)
        train(run)
    except RuntimeError as error:  # beyond the gradients: in the optimiser's first step, in a validation
        if not is_out_of_memory(error):
            raise
        raise short_of_memory(run, None, 0) from error
    finally:
        run.folder.end_part(spent + time.monotonic() - started)


def _shorten(run: Training, left: float) -> None:
    """Fewer steps where --hours are too few for all, warm-up and cooldown in proportion. Measured, not guessed."""
    config = run.config
    times = torch.tensor([_time_a_step(run), _time_an_evaluation(run)], dtype=torch.float64, device=run.world.device)
    step, evaluation = (run.world.sum(times) / run.world.size).tolist()  # the same in all processes
    steps = max(int((left * 0.95 - evaluation * config.evaluations) / step), 1)
    if steps >= run.steps:
        return
    if run.world.first:
        log.warning("%g hours allow %d of %d steps, at %.3f s a step", config.hours, steps, run.steps, step)
    share = steps / run.steps
    parts = {name: getattr(config.optim, name) for name in ("warmup", "cooldown")}
    parts = {name: value * share if value >= 1 else value for name, value in parts.items()}
    run.config = config.replace(steps=steps, optim=config.optim.replace(**parts))
    if run.average:
        run.average.decay = run.config.decay(steps)
    run.folder.write("config.json", to_json(run.config))
    run.folder.say("running", run.progress.step, run.steps)


def _time_a_step(run: Training) -> float:
    """Seconds, data included, without the first ones, which compile and warm up; a tenth more for the update.

    The median: a moment of other work on the machine must not cut the run, which is shortened later if need be.
    """
    times: list[float] = []
    run.objective.train()
    for batch in run.loader.batches(0, WARM + 6):
        tensors = run.objective.prepare(batch, 0)
        run.progress.micro_batch = run.progress.micro_batch or choose_micro_batch(run, tensors)
        launch(run, tensors).read()
        run.optimizers.zero()
        times.append(time.perf_counter())
    return 1.1 * statistics.median(after - before for before, after in pairwise(times[WARM:]))


def _time_an_evaluation(run: Training) -> float:
    started = time.perf_counter()
    if run.evaluate:
        with contextlib.suppress(NonFiniteError):  # said where it counts, at the first validation
            run.evaluate()
    return time.perf_counter() - started
