"""The start of a run: new weights, or pretrained ones with a new head and resampled positions (paper 3.2); its teacher.

Fine-tuning is training that starts elsewhere: the loop does not know of it.
"""

import hashlib
import logging

import numpy as np
import torch
from torch import nn

from plainvit.config import About, Config, Model, Preprocess, ViTConfig, count_steps, differences, pair
from plainvit.data.decode import DataError
from plainvit.data.splits import Splits
from plainvit.device import choose_device, is_cpu_bf16_unsafe, measure_cpu
from plainvit.models import ResNet, ViT, build
from plainvit.models.masked import check_maskable
from plainvit.recipes import list_recipes, recipe
from plainvit.runtime.checkpoint import hash_file
from plainvit.weights import inspect_weights, load
from plainvit.weights.reading import locate_weights

log = logging.getLogger("plainvit")
CPU_HOURS, CPU_BATCH = 0.17, 16  # of fine-tuning on a CPU where no length is given: ten minutes
BF16_WIDTH = 192  # of the narrowest model that is fine-tuned in bf16 on a CPU
FREE = ("dropout", "stochastic_depth", "init")  # settings that weights do not fix


def read_starting_model(config: Config) -> tuple[Model, Preprocess]:
    """The model and preprocessing of init, from its headers alone; without a head if a new one replaces it."""
    inspected, _ = inspect_weights(config.init, image_size=config.image_size or None)
    model: Model = inspected.config
    if config.image_size:
        model = model.replace(image_size=pair(config.image_size))
    model = model if config.head == "keep" else model.without_head()
    return model, inspected.preprocess


def complete_config(config: Config, splits: Splits) -> Config:
    """The config with model, preprocessing and steps filled in from the weights and the data."""
    check_classes(config, splits)
    config = choose_cpu_defaults(config)
    classes = len(splits.classes) if config.objective == "classify" else 0
    model, preprocess = choose_architecture(config)
    if model.classes not in (0, classes):
        name, flag = "the model", "--model.classes 0"
        if config.init and config.head == "keep":
            name, flag = config.init, "--head zero"
        raise DataError(f"{name} has {model.classes} classes, but {config.data} has {classes}: use {flag}")
    check_augmentation(config, model)
    if config.patience and splits.val is None:
        raise ValueError("--patience needs held-out images: give --holdout 0.1 to hold out a tenth")
    if config.head == "linear" and not (config.init and classes):
        config = config.replace(head="zero")
    return config.replace(
        model=model.replace(classes=classes),
        precision="bf16" if classes and prefers_bf16(config, model) else config.precision,
        preprocess=config.preprocess or preprocess,
        steps=choose_steps(config, len(splits.train)),
    )


def choose_architecture(config: Config) -> tuple[Model, Preprocess]:
    """The model that is trained, --model or that of init, and the preprocessing of init."""
    model, preprocess = config.model, Preprocess()
    if config.init:
        implied, preprocess = read_starting_model(config)
        model = model or implied
    if model is None:
        length = "" if config.steps or config.epochs else " --epochs 20"
        raise ValueError(
            "no model to train: give --init WEIGHTS (`plainvit weights` lists some), "
            f"or --model NAME{length} to train from scratch"
        )
    if config.image_size:
        model = model.replace(image_size=pair(config.image_size))
    if config.objective != "classify":
        check_maskable(model, config.objective, config.masked)
        model = model.without_head()  # only the encoder is trained
    return model, preprocess


def check_classes(config: Config, splits: Splits) -> None:
    """A classifier needs two classes, and an image of two of them."""
    if config.objective != "classify":
        return
    count, present = len(splits.classes), len(np.unique(splits.train.labels))
    if present < 2:
        name = splits.classes[int(splits.train.labels[0])]
        problem = f"has training images of one class ({name!r})" if count > 1 else f"has one class ({name!r})"
        raise DataError(f"{config.data} {problem}, but training needs two or more: one folder of images for each class")


def choose_cpu_defaults(config: Config) -> Config:
    """Fine-tuning on a CPU takes ten minutes unless a length is given, in small batches unless --batch is given."""
    if config.steps or config.epochs or not is_finetuned_on_cpu(config):
        return config
    config = config.replace(hours=config.hours or CPU_HOURS)
    is_default_batch = config.recipe in list_recipes() and config.batch == recipe(config.recipe).batch
    return config.replace(batch=CPU_BATCH) if is_default_batch else config


def is_finetuned_on_cpu(config: Config) -> bool:
    """Whether a run starts with a linear head on a CPU, the case of a new user with photos and no GPU."""
    return config.head == "linear" and bool(config.init) and choose_device(config.device) == "cpu"


def prefers_bf16(config: Config, model: Model) -> bool:
    """Whether `--precision auto` is bf16 on a CPU: for fine-tuning, where a measured step is faster with it."""
    is_wide = isinstance(model, ViTConfig) and model.width >= BF16_WIDTH
    if config.precision != "auto" or not is_wide or not is_finetuned_on_cpu(config):
        return False
    return not is_cpu_bf16_unsafe() and measure_cpu().prefers_bf16


def check_augmentation(config: Config, model: Model) -> None:
    """Raises ValueError for augmentation that does not work with the image size, the batch or the loss."""
    augment = config.augment
    if augment.crop == "random" and any(augment.resized_side(side) < side for side in model.image_size):
        size = " x ".join(map(str, model.image_size))
        raise ValueError(f"--augment.resize {augment.resize:g} is below the image size {size}: use a factor like 1.17")
    if (augment.mixup or augment.cutmix) and config.batch % 2:
        raise ValueError(f"--augment.mixup and --augment.cutmix need an even --batch, got {config.batch}")
    if config.loss == "binary" and augment.smoothing and config.objective == "classify":
        raise ValueError("--loss binary cannot be combined with --augment.smoothing: use --augment.smoothing 0")


def choose_steps(config: Config, images: int) -> int:
    if not (config.steps or config.epochs or config.init):
        raise ValueError("the run has no length: give --epochs or --steps")
    steps = count_steps(config, images)
    if not steps:
        raise ValueError(
            f"--epochs {config.epochs:g} of {images} images is less than one batch of {config.batch}: use a smaller "
            "--batch or more --epochs"
        )
    for name in ("warmup", "cooldown"):
        value = getattr(config.optim, name)
        if value >= steps:
            raise ValueError(f"--optim.{name} {value:g} is not below the {steps} steps: 0.1 is a tenth of the run")
    return steps


def hash_init(config: Config) -> str:
    """Hash of the files of init, by which changed weights are detected."""
    path = locate_weights(config.init)
    if not path.exists():
        raise ValueError(f"--init {path}: there is no such file or folder")
    files = [path]
    if path.is_dir():
        by_kind = [sorted(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin", "pth")]  # in the order of `load`
        files = by_kind[0] or by_kind[1] or by_kind[2]
    return hashlib.sha256("".join(hash_file(file) for file in files).encode()).hexdigest()[:16]


def make_initial_model(config: Config, splits: Splits) -> ViT | ResNet:
    """New weights drawn from the seed, or those of init."""
    assert config.model
    assert config.preprocess
    model = build(config.model)
    if config.init:
        # The loaded model is not used itself: it has the dropout and stochastic depth of its file
        model.load_state_dict(load_init(config, config.model, splits).state_dict())
    else:
        model.initialize(torch.Generator().manual_seed(config.seed))
    if config.head_bias and config.head == "zero" and model.head is not None:
        nn.init.constant_(model.head.bias, config.head_bias)
    model.about = About(preprocess=config.preprocess, class_names=splits.classes if config.model.classes else ())
    return model


def load_init(config: Config, expected: Model, splits: Splits) -> ViT | ResNet:
    """init's model. Raises ValueError if it is another model than `expected`."""
    model = load(config.init, image_size=expected.image_size)
    if config.head != "keep":
        model.replace_head(expected.classes)
    elif model.about.class_names and model.about.class_names != splits.classes:
        problem = describe_other_class(model.about.class_names, splits.classes, config.data)
        raise DataError(f"{config.init} {problem}: use --head zero")
    changed = {name: both for name, both in differences(model.config, expected).items() if name not in FREE}
    if changed:
        problem = ", ".join(f"it has {name} {has}, not {asked}" for name, (has, asked) in changed.items())
        raise ValueError(
            f"{config.init} is not the model asked for: {problem}; leave out --model, or give other weights"
        )
    return model


def describe_other_class(names: tuple[str, ...], classes: tuple[str, ...], data: str) -> str:
    """Describes the first of equally many classes whose names differ."""
    theirs, ours = next((a, b) for a, b in zip(names, classes, strict=True) if a != b)
    return f"has the class {theirs!r} where {data} has {ours!r}"


def load_teacher(config: Config, classes: tuple[str, ...]) -> ViT | ResNet:
    """The teacher of a distillation: a frozen model with the same classes in the same order."""
    teacher = load(config.teacher)
    count, names = teacher.config.classes, teacher.about.class_names
    if count != len(classes):
        problem = f"--teacher {config.teacher} has {count} classes, but {config.data} has {len(classes)}"
        raise DataError(f"{problem}: use a teacher trained on these classes")
    if names and names != classes:
        problem = f"--teacher {config.teacher} {describe_other_class(names, classes, config.data)}"
        if set(names) == set(classes):
            raise DataError(f"{problem}: it has the same classes in another order")
        log.warning("%s: the classes are matched by their order", problem)  # such as n01440764 and tench
    return teacher.eval().requires_grad_(False)
