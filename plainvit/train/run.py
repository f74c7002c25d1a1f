"""One run from start to end, in a run folder.

    result = plainvit.fit(plainvit.recipe("digits"))        result.folder, result.metrics["test"]["top1"]
    plainvit train digits

The same call again resumes an unfinished run, and does nothing for a finished one. `resume_check.py` decides which of
the two it is, `setup.py` builds what the run needs, `loop.py` trains, `finalize.py` evaluates and writes the report.
"""

import hashlib
import json
import logging
import signal
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plainvit.analyse.report import write_report
from plainvit.config import Config, Model, ResNetConfig, to_json
from plainvit.data.known import SETS
from plainvit.data.splits import Splits, find_data_problems, open_splits
from plainvit.errors import exit_code, first_line
from plainvit.models import ResNet, ViT
from plainvit.names import SIZES
from plainvit.recipes import list_recipes, recipe
from plainvit.runtime.display import format_duration, print_line, show_activity
from plainvit.runtime.distributed import LostError, World, join, raise_lost_peer, wait_for_agent
from plainvit.runtime.folder import Folder, describe_changes, describe_environment, read_results
from plainvit.train.finalize import finalize
from plainvit.train.linear_head import find_first
from plainvit.train.loop import train
from plainvit.train.micro_batch import explain_out_of_memory
from plainvit.train.nonfinite import DivergedError
from plainvit.train.resume_check import check_resumable
from plainvit.train.search import check_search, search_rates
from plainvit.train.setup import build_training
from plainvit.train.signals import InterruptedRunError, Terminated, handle_signals, raise_on_termination
from plainvit.train.state import Training, resume
from plainvit.train.time_budget import TimeBudget
from plainvit.train.transfer import complete_config, hash_init
from plainvit.weights import load

log = logging.getLogger("plainvit")


@dataclass
class TrainingResult:
    """The result of a run: its folder, the metrics of each split, and the model."""

    folder: Path
    metrics: dict[str, Any]
    model: ViT | ResNet


@dataclass
class Options:
    """How a run is carried out, apart from its config."""

    force: bool = False
    quiet: bool = False
    bare: bool = False


def fit(
    config: Config,
    out: str | Path | None = None,
    *,
    force: bool = False,
    search: bool = False,
    quiet: bool = False,
    bare: bool = False,
) -> TrainingResult:
    """Trains a model.

    Args:
        config: What to train, such as `plainvit.recipe("digits")`.
        out: The run folder; runs/RECIPE-HASH if not given. An unfinished run in it is resumed.
        force: Resume although the config or the data changed.
        search: First try the rates of optim.grid on held-out training images.
        quiet: Print nothing but warnings.
        bare: Read no test images and write no report, as for one of many runs of a study.

    Returns:
        The run folder, the metrics of each split, and the model.
    """
    world, options = join(config.device, config.timeout), Options(force, quiet, bare)
    try:
        with raise_lost_peer(world):
            with show_activity(f"reading the list of images of {config.data}", quiet=quiet or not world.is_main):
                config, splits = world.run_on_all_ranks(
                    lambda: open_run(config, options), lambda both: name_run(both[0]) + str(both[1].description)
                )
            if search:
                check_search(config)
            path = Path(out) if out else Path("runs") / name_run(config)
            with world.run_on_all_ranks(lambda: Folder(path, writes=world.is_main)) as folder:
                if search:
                    config = search_learning_rate(world, folder, config, options)
                result = train_in_folder(world, folder, config, splits, options)
            world.barrier()  # nobody leaves while another process still works
            return result
    except LostError:
        wait_for_agent()
        raise
    finally:
        world.leave()


def open_run(config: Config, options: Options) -> tuple[Config, Splits]:
    """The data, and the config with what it leaves to the data and the weights filled in."""
    if not options.force:
        check_recipe(config)
    splits = open_splits(config)
    if options.bare:
        splits.test = None
    return complete_config(config, splits), splits


def check_recipe(config: Config) -> None:
    """Raises ValueError if the recipe is tuned for a known dataset and another one is given."""
    if config.recipe not in list_recipes():
        return
    tuned_for = recipe(config.recipe).data
    given = config.data.partition(":")[0]  # digits:01234 is a part of digits
    known = (*SETS, "digits")
    if tuned_for in known and given != tuned_for and (given in known or tuned_for == "digits"):
        problem = f"recipe {config.recipe!r} is tuned for {tuned_for}, not for {config.data}"
        raise ValueError(f"{problem}: choose another from `plainvit recipes '*'`, or give --force")


def name_run(config: Config) -> str:
    """The recipe and a hash of all settings that decide the result."""
    plain = {key: value for key, value in to_json(config).items() if key not in Config.OPERATIONAL}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]
    return f"{Path(config.recipe or 'run').name.replace(':', '-')}-{digest}"


def search_learning_rate(world: World, folder: Folder, config: Config, options: Options) -> Config:
    """The config with the best rate; each rate is a run of its own below the folder."""

    def try_rate(rate_config: Config, splits: Splits, lr: float) -> dict[str, Any]:
        with Folder(folder.path / "search" / f"lr-{lr:g}", writes=world.is_main) as inner:
            return train_in_folder(world, inner, rate_config, splits, options).metrics["val"]

    return search_rates(config, try_rate)


def train_in_folder(world: World, folder: Folder, config: Config, splits: Splits, options: Options) -> TrainingResult:
    """The run itself. However it ends, status.json says so; what is invalid at the start leaves nothing behind."""
    is_finished = world.run_on_all_ranks(
        lambda: check_resumable(config, splits, folder, force=options.force, bare=options.bare)
    )
    world.barrier()  # all have read the folder before the main process writes into it
    if is_finished:
        log.warning("%s is finished: nothing to do", folder.path)
        return TrainingResult(folder.path, read_results(folder.path), load(folder.path / "model.safetensors"))
    is_quiet = options.quiet or not world.is_main
    with show_activity("loading the model and the images", quiet=is_quiet):
        run = world.run_on_all_ranks(
            lambda: build_training(config, splits, folder, quiet=is_quiet, world=world, force=options.force)
        )
    if not is_quiet:
        print_line(describe_plan(config, splits))
        for problem, fix in find_data_problems(config, splits):
            log.warning("%s: %s", problem, fix)
    if len(set(world.gather_strings(run.loader.mode))) > 1:  # each process chose by the memory that it has
        run.loader.stream()
    resume(run)  # raises an error before anything is written if the checkpoint is of another config
    write_start(run, splits)
    try:
        with closing(run.tracker), raise_lost_peer(world), raise_on_termination(), explain_out_of_memory(run):
            first = train_timed(run, splits)
            model, metrics = finalize(run, splits, first, report=not options.bare)
    except BaseException as error:
        with handle_signals(lambda *_: None, signal.SIGINT, signal.SIGTERM):  # the run ends anyway
            write_end(run, error, report=not options.bare)
        raise
    return TrainingResult(folder.path, metrics, model)


def describe_plan(config: Config, splits: Splits) -> str:
    """What will be trained, in one line."""
    assert config.model
    held_out = f"{len(splits.val):,}" if splits.val else "none"
    images = f"{len(splits.train):,} training images in {len(splits.classes)} classes, {held_out} held out"
    size = " x ".join(map(str, dict.fromkeys(config.model.image_size)))
    limit = f", at most {format_duration(3600 * config.hours)} (--hours {config.hours:g})" if config.hours else ""
    return f"{images}; {name_model(config.model)} at {size} px; {config.steps:,} steps of {config.batch}{limit}"


def name_model(model: Model) -> str:
    """ViT-S/16 and the like; the kind and size for models without a name."""
    if isinstance(model, ResNetConfig):
        return "ResNet"
    sizes = [name for name, fields in SIZES.items() if all(getattr(model, key) == fields[key] for key in fields)]
    if not sizes:
        return f"ViT of width {model.width}, depth {model.depth} and patch {model.stride[0]}"
    return f"ViT-{sizes[0]}/{model.stride[0]}"


def write_start(run: Training, splits: Splits) -> None:
    """The data, config, environment and status of the run, before its first step."""
    folder, config = run.folder, run.config
    data = splits.description | {"loading": run.loader.mode}
    if config.init:
        data["init"] = hash_init(config)
    folder.write("data.json", data)
    folder.write("config.json", to_json(config))
    at_start = folder.read("environment.json")
    now = describe_environment(run.world.device) | {"processes": run.world.size}
    folder.write("environment.json", at_start or now)
    if run.checkpoints.steps() and not run.quiet:
        changes = describe_changes(at_start, now)
        if changes:
            log.warning("%s since the run started: the samples are the same, the bits are not", changes)
    folder.write_status("running", folder.read("status.json").get("step", 0), config.steps)


def train_timed(run: Training, splits: Splits) -> dict[str, Any] | None:
    """Trains within --hours; environment.json then has the time of all parts of the run."""
    try:
        first = find_first(run, splits.train) if run.config.head == "linear" else None
        if first and first.get("top1") == 1.0 and not run.progress.step:  # finalize.choose_model would keep it anyway
            note = "training is skipped: every held-out image is correct already (--holdout 0 trains)"
            print_line(note, quiet=run.quiet)
            return first
        train(run, TimeBudget(run) if run.config.hours else None)
        return first
    finally:
        run.folder.write("environment.json", run.folder.read("environment.json") | {"seconds": round(run.seconds, 1)})


def write_end(run: Training, error: BaseException, report: bool) -> None:
    """status.json of a run that did not finish, and a report unless it failed."""
    state, code = classify_end(error)
    reason = first_line(error)
    if str(error) and not isinstance(error, ValueError | OSError | Terminated):  # such as KeyError: 'loss'
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, LostError) and run.folder.read("status.json").get("state") == "running":
        run.folder.writes = True  # the main process may be the one that is gone
    run.folder.write_status(state, run.progress.step, run.steps, reason, code)
    if run.world.is_main and report and state != "failed":
        write_report(run.folder.path)


def classify_end(error: BaseException) -> tuple[str, int]:
    """The state in status.json and the exit code of a run that ends with this error."""
    if isinstance(error, InterruptedRunError | Terminated):
        return "interrupted", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + signal.SIGINT
    if isinstance(error, DivergedError):
        return "diverged", error.exit_code
    return "failed", exit_code(error) if isinstance(error, ValueError | OSError) else 1
