"""Where a run starts: new weights, or published ones with a new head and resampled positions (paper 3.2); its teacher.

Fine-tuning is training that starts elsewhere: nothing else in the loop knows of it.
"""

import hashlib
import logging

import torch
from torch import nn

from plainvit.config import About, Config, Model, Preprocess, ViTConfig, count_steps, differences, pair
from plainvit.data.decode import DataError
from plainvit.data.splits import Splits
from plainvit.models import ResNet, ViT, build
from plainvit.models.masked import check_maskable
from plainvit.runtime.checkpoint import file_hash
from plainvit.weights import inspect_weights, load
from plainvit.weights.reading import resolve as weights_path

log = logging.getLogger("plainvit")
FREE = ("dropout", "stochastic_depth", "init")  # settings that weights do not fix


def starting_model(config: Config) -> tuple[Model, Preprocess]:
    """The model and preprocessing that init implies, by its headers alone; a new head has a single layer."""
    found, _ = inspect_weights(config.init, image_size=config.image_size or None)
    model: Model = found.config
    if config.image_size:
        model = model.replace(image_size=pair(config.image_size))
    if config.head == "zero":
        model = model.without_head()
    return model, Preprocess(**found.about.get("preprocess", {}))


def resolve(config: Config, splits: Splits) -> Config:
    """The config with what it leaves to the data and to the weights filled in: model, preprocessing, steps."""
    classes = len(splits.classes) if config.objective == "classify" else 0
    model, preprocess = config.model, Preprocess()
    if config.init:
        implied, preprocess = starting_model(config)
        model = model or implied
    if model is None:
        raise ValueError(
            "there is no model to train: give --init WEIGHTS (`plainvit weights` lists some), or --model NAME"
        )
    if config.image_size and not config.init and pair(config.image_size) != model.image_size:
        size = " x ".join(map(str, model.image_size))
        raise ValueError(f"image_size {config.image_size} is for init's model, and there is none: this has {size}")
    if config.objective != "classify":
        check_maskable(model, config.objective, config.masked)
        assert isinstance(model, ViTConfig)
        model = model.without_head()  # the encoder alone is trained
    if config.init and config.head == "keep" and model.classes != classes:
        raise DataError(f"{config.init} has {model.classes} classes, {config.data} has {classes}: --head zero")
    if model.classes not in (0, classes):
        raise DataError(f"the model has {model.classes} classes, {config.data} has {classes}: --model.classes 0")
    if config.augment.crop == "random" and any(config.augment.resized_side(side) < side for side in model.image_size):
        size = " x ".join(map(str, model.image_size))
        raise ValueError(
            f"--augment.resize {config.augment.resize:g} is less than the image size {size}: give a multiple, 1.17"
        )
    if (config.augment.mixup or config.augment.cutmix) and config.batch % 2:
        raise ValueError(f"--augment.mixup and --augment.cutmix need an even --batch, got {config.batch}")
    if config.loss == "binary" and config.augment.smoothing and config.objective == "classify":
        raise ValueError("--loss binary cannot be combined with --augment.smoothing: use --augment.smoothing 0")
    return config.replace(
        model=model.replace(classes=classes),
        preprocess=config.preprocess or preprocess,
        steps=_length(config, len(splits.train)),
    )


def _length(config: Config, images: int) -> int:
    if not (config.steps or config.epochs or config.init):
        raise ValueError("the run has no length: give --epochs or --steps")
    steps = count_steps(config, images)
    if not steps:
        raise ValueError(f"{config.epochs:g} epochs of {images} images are less than one batch of {config.batch}")
    for name in ("warmup", "cooldown"):
        if getattr(config.optim, name) >= steps:
            given = f"{getattr(config.optim, name):g}"
            raise ValueError(f"optim.{name} is {given} of only {steps} steps: --optim.{name} 0.1 is a tenth of the run")
    return steps


def init_hash(config: Config) -> str:
    """Of the files that init's weights come from, so that another one under the name is noticed."""
    path = weights_path(config.init)
    if not path.exists():
        raise ValueError(f"there is no file or folder {path} to start from")
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return hashlib.sha256("".join(file_hash(file) for file in files).encode()).hexdigest()[:16]


def initial_model(config: Config, splits: Splits) -> ViT | ResNet:
    """New weights drawn from the seed, or those of init."""
    wanted = config.model
    assert wanted
    assert config.preprocess
    model = build(wanted)
    if config.init:
        model.load_state_dict(_loaded(config, wanted, splits).state_dict())
    else:
        model.initialise(torch.Generator().manual_seed(config.seed))
    if config.head_bias and config.head == "zero" and model.head is not None:
        nn.init.constant_(model.head.bias, config.head_bias)
    model.about = About(preprocess=config.preprocess, class_names=splits.classes if wanted.classes else ())
    return model


def _loaded(config: Config, wanted: Model, splits: Splits) -> ViT | ResNet:
    """init's model as it is wanted; an error where its weights are those of another."""
    model = load(config.init, image_size=wanted.image_size)
    if config.head == "zero":
        model.replace_head(wanted.classes)
    elif model.about.class_names and model.about.class_names != splits.classes:
        words = _another_class(model.about.class_names, splits.classes, config.data)
        raise DataError(f"{config.init} {words}: --head zero")
    odd = {name: both for name, both in differences(model.config, wanted).items() if name not in FREE}
    if odd:
        words = ", ".join(f"{name} {has}, not {asked}" for name, (has, asked) in odd.items())
        raise ValueError(f"{config.init} is another model than asked for: it has {words}")
    return model


def _another_class(names: tuple[str, ...], classes: tuple[str, ...], data: str) -> str:
    """The first of as many classes whose names differ."""
    theirs, ours = next((a, b) for a, b in zip(names, classes, strict=True) if a != b)
    return f"calls a class {theirs!r} that {data} calls {ours!r}"


def load_teacher(config: Config, classes: tuple[str, ...]) -> ViT | ResNet:
    """A model that only answers, of the same classes in the same order."""
    teacher = load(config.teacher)
    count, names = teacher.config.classes, teacher.about.class_names
    if count != len(classes):
        raise DataError(f"the teacher {config.teacher} has {count} classes, the data has {len(classes)}")
    if names and names != classes:
        words = f"the teacher {config.teacher} {_another_class(names, classes, config.data)}"
        if set(names) == set(classes):
            raise DataError(f"{words}: it has the same classes in another order")
        log.warning("%s: classes are taken in their order", words)  # n01440764 and tench are one
    return teacher.eval().requires_grad_(False)
