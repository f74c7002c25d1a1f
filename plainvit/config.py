"""Every setting of a training run as frozen dataclasses, to and from JSON; those of models are in model_config.py.

The comments of the fields are the help texts of the command's flags. Neither torch nor anything else of plainvit is
imported here.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

# "as": these names are also part of this module
from plainvit.model_config import RESNET_NUMERICS as RESNET_NUMERICS
from plainvit.model_config import STEM_NUMERICS as STEM_NUMERICS
from plainvit.model_config import VIT_NUMERICS as VIT_NUMERICS
from plainvit.model_config import About as About
from plainvit.model_config import Checked as Checked
from plainvit.model_config import Model as Model
from plainvit.model_config import Preprocess as Preprocess
from plainvit.model_config import ResNetConfig as ResNetConfig
from plainvit.model_config import ViTConfig as ViTConfig
from plainvit.model_config import largest_divisor as largest_divisor
from plainvit.model_config import nearest as nearest
from plainvit.model_config import pair as pair
from plainvit.model_config import pluralize as pluralize
from plainvit.model_config import visible as visible

LOSSES = ("softmax", "sigmoid", "binary")  # train/objectives.py has them
MIN_PIXELS = 8  # augment.resize below this is a factor of the image size


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Random augmentation of training images; the defaults are the paper's pre-training."""

    FLAGS: ClassVar[str] = "--augment."

    #: Random crop: inception (torchvision or TensorFlow), random after a resize (BiT), pad after zero-padding (CIFAR)
    crop: Literal["inception", "inception-tf", "random", "pad", "none"] = "inception"
    area: tuple[float, float] = (0.05, 1.0)  # Crop inception: minimum and maximum fraction of the image area
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # Crop inception: minimum and maximum aspect ratio, width / height
    resize: float = 0.0  # Crop random: size before the crop, as a factor of the image size, or from 8 on in pixels
    pad: int = 4  # Crop pad: zero-padding in pixels
    flip: float = 0.5  # Probability of a horizontal flip
    randaugment: tuple[int, int] = (0, 0)  # RandAugment: number of operations and magnitude (at most 30)
    three_augment: bool = False  # Apply DeiT III's 3-Augment: one of grayscale, solarize, blur
    color: float = 0.0  # Strength of color jitter: brightness, contrast and saturation
    erase: float = 0.0  # Probability of random erasing
    repeats: int = 1  # Copies of each image in an epoch (repeated augmentation)
    mixup: float = 0.0  # Alpha of mixup's beta distribution; 0: off
    cutmix: float = 0.0  # Alpha of CutMix's beta distribution; 0: off
    smoothing: float = 0.0  # Label smoothing

    def __post_init__(self) -> None:
        for name in ("area", "aspect", "randaugment"):
            self._set(name, tuple(getattr(self, name)))
        self._check(
            positive=("repeats",),
            natural=("pad", "randaugment"),
            rates=("color", "smoothing"),
            fractions=("flip", "erase"),
            not_negative=("mixup", "cutmix"),
        )
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(
                "--augment.area and --augment.aspect must be a minimum and a maximum, area within (0, 1]; "
                f"got {self.area}, {self.aspect}"
            )
        if self.crop == "random" and not self.resize:
            raise ValueError("--augment.crop random requires --augment.resize, such as 1.17 (times the image size)")
        if self.resize and self.resize < 1:
            raise ValueError(f"--augment.resize must be a factor of at least 1, or a size in pixels; got {self.resize}")
        if self.randaugment[1] > 30:
            raise ValueError(f"--augment.randaugment: the magnitude must be at most 30, got {self.randaugment[1]}")

    def resized_side(self, side: int) -> int:
        """Pixels to which crop 'random' resizes an image, for a model with this image size."""
        return round(self.resize if self.resize >= MIN_PIXELS else self.resize * side)


@dataclass(frozen=True, kw_only=True)
class Optim(Checked):
    """Optimizer and schedule; the defaults are the paper's pre-training."""

    FLAGS: ClassVar[str] = "--optim."

    name: Literal["adamw", "sgd", "lamb", "muon"] = "adamw"  # Optimizer
    lr: float = 1e-3  # Peak learning rate
    schedule: Literal["constant", "linear", "cosine", "rsqrt", "steps"] = "cosine"  # Learning rate schedule
    warmup: float = 0.0  # Linear warm-up in steps; below 1, as a fraction of the run
    cooldown: float = 0.0  # Linear cool-down to 0 at the end in steps; below 1, as a fraction of the run
    lr_end: float = 0.0  # Final learning rate of schedules linear and cosine
    #: Schedule steps: fractions of the run after which lr is divided by 10
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)
    timescale: float = 10_000.0  # Schedule rsqrt: number of steps in which lr first falls by sqrt(2)
    weight_decay: float = 0.0  # Weight decay of matrices: decoupled and multiplied by lr; for sgd, L2 in the gradient
    betas: tuple[float, float] = (0.9, 0.999)  # Betas of adamw and lamb, and of muon for non-matrix parameters
    eps: float = 1e-8  # Epsilon of adamw and lamb, and of muon for non-matrix parameters
    momentum: float = 0.9  # Momentum of sgd and muon
    clip: float = 1.0  # Maximum global norm of the gradient; 0: no clipping
    layer_decay: float = 1.0  # Factor of the learning rate from each layer to the one below
    grid: tuple[float, ...] = ()  # Learning rates that --search tries
    frozen: tuple[str, ...] = ()  # Patterns of parameters to freeze, such as 'embedding.*' or 'blocks.*'

    def __post_init__(self) -> None:
        for name in ("milestones", "betas", "grid", "frozen"):
            self._set(name, tuple(getattr(self, name)))
        self._check(
            rates=("momentum",),
            not_negative=("warmup", "cooldown", "weight_decay", "lr_end", "clip"),
            above_zero=("eps", "timescale"),
            parts=("layer_decay",),
        )
        for lr in (self.lr, *self.grid):
            if not 0 < lr <= 1e6:
                name = "lr" if lr == self.lr else "grid"
                raise ValueError(f"--optim.{name} must be above 0 and at most 1e6, got {lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--optim.betas must be two numbers in [0, 1), got {self.betas}")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < end < 1 for end in self.milestones):
            raise ValueError(f"--optim.milestones must be increasing fractions between 0 and 1, got {self.milestones}")


@dataclass(frozen=True, kw_only=True)
class Masked(Checked):
    """Masked image modeling: what is hidden and predicted; the defaults are the paper's (B.1.2).

    depth, width and heads describe MAE's decoder; the other objectives predict from each token with one linear layer.
    """

    FLAGS: ClassVar[str] = "--masked."

    ratio: float = 0.5  # Fraction of the patches of each image to mask (MAE 0.75)
    #: What to predict: the patch's mean color (512 classes), that of 4 x 4 cells, or all pixels by L2
    target: Literal["color", "colors16", "pixels"] = "color"
    normalize: bool = False  # Target pixels: normalize each patch by its own mean and std, as MAE
    depth: int = 8  # Number of blocks of MAE's decoder
    width: int = 512  # Width of MAE's decoder
    heads: int = 16  # Number of attention heads of MAE's decoder

    def __post_init__(self) -> None:
        self._check(positive=("depth", "width", "heads"))
        if not 0 < self.ratio < 1:
            raise ValueError(f"--masked.ratio must be above 0 and below 1, got {self.ratio:g}; the paper uses 0.5")
        if self.normalize and self.target != "pixels":
            raise ValueError(f"--masked.normalize requires --masked.target pixels, got {self.target!r}")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"--masked.width {self.width} must be divisible by 4 and by --masked.heads {self.heads}")


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """One training run: a recipe returns it, the run folder stores it, and every field is a flag."""

    FLAGS: ClassVar[str] = "--"

    recipe: str = ""  # Name of the recipe, or FILE.py:FUNCTION
    model: ViTConfig | ResNetConfig | None = None  # Model to train; None: the model of init
    init: str = ""  # Weights to start from: file, run folder, hf:org/name or name from `plainvit weights`
    image_size: int = 0  # Height and width of the training images in pixels; 0: the model's own
    #: Head: zero-initialized as in the paper, a linear classifier fitted to frozen features, or that of the weights
    head: Literal["zero", "linear", "keep"] = "zero"
    data: str = ""  # Training data: folder, list, shards, hf:org/dataset, known dataset, digits or shapes
    data_root: str = ""  # Folder with the known datasets, each in a folder of its name
    exclude: str = ""  # File with images to leave out, as `plainvit data check --save` writes it
    train_fraction: float = 1.0  # Fraction of each class to train on (smaller subsets are contained in larger ones)
    holdout: float = 0.0  # Fraction of the training images to hold out for validation, chosen by their content
    search_holdout: float = 0.1  # Fraction of the training images to hold out while --search runs
    epochs: float = 0.0  # Number of epochs; with --init and no recipe's value: 20, at least 200 steps
    steps: int = 0  # Number of steps, in place of epochs
    hours: float = 0.0  # Time limit in hours, to which steps and schedule are fitted; 0: none (finetune on a CPU: 0.17)
    batch: int = 512  # Images per step, over all devices
    micro_batch: int = 0  # Images per forward pass on a device (gradient accumulation); 0: what fits
    #: Training objective: classify labels, or predict masked patches as in the ViT paper or MAE
    objective: Literal["classify", "masked", "mae"] = "classify"
    masked: Masked = Masked()  # Masked image modeling
    #: Loss: softmax, sigmoid (summed over classes), binary (averaged, 0/1 targets), or FILE.py:FUNCTION for your own
    loss: str = "softmax"
    head_bias: float = 0.0  # Initial bias of a new head, such as -10 for sigmoid with 21k classes
    class_weights: bool = False  # Weight each class by the inverse of its number of images
    teacher: str = ""  # Weights of a teacher whose predicted classes are learned too (DeiT's hard distillation)
    optim: Optim = Optim()
    augment: Augment = Augment()
    preprocess: Preprocess | None = None  # Preprocessing for evaluation; None: that of init, or the default
    ema: float = 0.0  # Decay of an average of the weights, used as final weights, such as 0.9999; 0: off
    ema_window: float = 0.0  # Averaging window as a fraction of the run, in place of --ema: 0.1 is about the last tenth
    evaluations: int = 20  # Number of evaluations during the run, each with a checkpoint, evenly spaced
    save_every: int = 0  # Steps between additional checkpoints; 0: none
    keep: int = 2  # Number of most recent checkpoints to keep, in addition to the best
    patience: int = 0  # Stop after this many evaluations without improvement and keep the best weights; 0: never
    max_skipped_steps: int = 3  # Number of steps with a non-finite loss or gradient to skip before the run stops
    seed: int = 0  # Seed of the initial weights, the image order and the augmentation
    device: str = "auto"  # Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one
    #: Precision of the computation (weights stay fp32); auto: bf16 on a GPU, and for finetune on a CPU if it is faster
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    #: Compile the model with torch.compile; auto: on a GPU, if the run is long enough to save time
    compile: Literal["auto", "on", "off"] = "auto"
    graphs: Literal["auto", "off"] = "auto"  # Capture training steps as CUDA graphs; auto: small models on a single GPU
    #: Use fused kernels and skip unused computation; off: plain PyTorch
    fast_path: Literal["auto", "off"] = "auto"
    workers: int = -1  # Number of processes that read images; -1 chooses by the number of cores
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()  # Also log metrics to these
    parallel: Literal["ddp", "fsdp"] = "ddp"  # Several devices: replicate the model (ddp) or shard it (fsdp)
    recompute: bool = False  # Recompute activations in the backward pass: less memory, a third more compute
    timeout: float = 600.0  # Seconds that a process waits for the others before it fails

    # Settings that may change on resume: they do not change the result
    OPERATIONAL: ClassVar[frozenset[str]] = frozenset(
        {
            *("data_root", "hours", "save_every", "keep", "device", "compile", "graphs", "fast_path"),
            *("workers", "track", "parallel", "recompute", "timeout"),
        }
    )

    def __post_init__(self) -> None:
        self._set("track", tuple(self.track))
        self._check(
            positive=("batch", "evaluations", "keep"),
            natural=("steps", "micro_batch", "save_every", "patience", "max_skipped_steps", "seed", "image_size"),
            rates=("holdout", "search_holdout", "ema", "ema_window"),
            not_negative=("epochs", "hours"),
            above_zero=("timeout",),
            parts=("train_fraction",),
        )
        if self.seed >= 2**63:
            raise ValueError(f"--seed must be below 2^63, got {self.seed}")
        if self.workers < -1:
            raise ValueError(f"--workers must be at least 0, or -1 to choose automatically; got {self.workers}")
        if self.micro_batch and self.batch % self.micro_batch:
            near = largest_divisor(self.batch, self.micro_batch)
            raise ValueError(
                f"--batch {self.batch} is not divisible by --micro-batch {self.micro_batch}; nearest: {near}"
            )
        if self.ema and self.ema_window:
            raise ValueError(
                f"--ema {self.ema:g} and --ema-window {self.ema_window:g} cannot be combined "
                "(a recipe may have set one): use --ema 0 or --ema-window 0"
            )
        if self.objective != "classify":
            self._check_unlabeled()
        if self.loss not in LOSSES and ".py:" not in self.loss:
            raise ValueError(f"--loss {self.loss!r} is unknown; one of: {', '.join(LOSSES)}, or FILE.py:FUNCTION")
        for name in self.track:
            if name not in ("tensorboard", "wandb"):
                raise ValueError(f"--track {name!r} is unknown; one of: tensorboard, wandb")

    def _check_unlabeled(self) -> None:
        """Self-supervised objectives support neither labels nor averaged weights."""
        changes = {
            "--teacher ''": self.teacher,
            "--no-class-weights": self.class_weights,
            "--head zero": self.head == "keep",
            "--augment.mixup 0": self.augment.mixup,
            "--augment.cutmix 0": self.augment.cutmix,
            "--augment.smoothing 0": self.augment.smoothing,
            "--ema 0": self.ema,
            "--ema-window 0": self.ema_window,
        }
        needed = [flag for flag, is_set in changes.items() if is_set]
        if needed:
            problem = f"--objective {self.objective} does not support labels or averaged weights"
            raise ValueError(f"{problem}: add {' '.join(needed)}")

    def decay(self, steps: int) -> float:
        """Decay of the averaged weights: ema, or computed from ema_window."""
        return max(1 - 1 / (self.ema_window * steps), 0.0) if self.ema_window else self.ema


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """What a recipe may depend on: the training images of a dataset."""

    images: int
    classes: int
    side: int  # median of the shorter sides, in pixels
    is_gray: bool = False


@dataclass(frozen=True, kw_only=True)
class Probes(Checked):
    """Classifiers on frozen features (`plainvit probe`); the few-shot defaults are big_vision's."""

    FLAGS: ClassVar[str] = "--"

    method: tuple[Literal["fewshot", "knn", "linear"], ...] = ("fewshot",)  # One or more of fewshot, knn, linear
    shots: tuple[int, ...] = (1, 5, 10, 25)  # Few-shot: training images per class (a class with fewer uses all)
    seeds: int = 3  # Few-shot: number of random draws of these images
    l2: float = 1024.0  # Few-shot: regularization (big_vision: 2^10)
    k: tuple[int, ...] = ()  # k-NN: numbers of neighbors; default: 1 5 10 20 100 200, as far as there are images
    #: Linear probe: regularization; the best on a fifth of the training images is used
    linear_l2: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)

    def __post_init__(self) -> None:
        self._check(positive=("shots", "seeds", "k"))
        for name in ("method", "shots", "linear_l2"):
            if not getattr(self, name):
                raise ValueError(f"{self._flag(name)} is empty: give at least one value")
        if self.l2 <= 0 or min(self.linear_l2) < 0:
            raise ValueError("--l2 must be above 0, --linear-l2 at least 0")


_KINDS: dict[str, type[Checked]] = {
    "vit": ViTConfig,
    "resnet": ResNetConfig,
    "preprocess": Preprocess,
    "augment": Augment,
    "optim": Optim,
    "masked": Masked,
    "run": Config,
}


FINETUNE_EPOCHS, MIN_FINETUNE_STEPS = 20.0, 200  # defaults with init; in fewer steps a head of zeros learns little


def count_steps(config: Config, images: int) -> int:
    """Number of steps of a run on this many images: steps, or epochs, or the default for fine-tuning."""
    if config.init and not config.steps and not config.epochs:
        return max(int(FINETUNE_EPOCHS * images / config.batch), MIN_FINETUNE_STEPS)
    return config.steps or int(config.epochs * images / config.batch)


def to_json(config: Checked) -> dict[str, Any]:
    """A config as JSON values with its kind; nested configs too."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(config, cls))
    return {"kind": kind} | {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return to_json(value)
    return list(value) if isinstance(value, tuple) else value


def _parse(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_json(value, _KINDS)
    return tuple(value) if isinstance(value, list) else value


def from_json(values: Mapping[str, Any], kinds: Iterable[str] = ("vit", "resnet")) -> Any:
    """The config that `to_json` wrote: a model, unless other kinds are given. Unknown settings are errors."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"model kind {kind!r} is unknown; {nearest(str(kind), kinds)}")
    fields = {name: _parse(value) for name, value in values.items() if name != "kind"}
    known = [field.name for field in dataclasses.fields(_KINDS[kind])]
    for name in fields:
        if name not in known:
            raise ValueError(f"unknown setting {name!r} in a {kind} config; {nearest(name, known)}")
    try:
        return _KINDS[kind](**fields)
    except (TypeError, AttributeError, OverflowError) as error:  # a value of another type, or too large a number
        raise ValueError(f"invalid {kind} config: {error}") from error


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 0.001}} -> {"optim.lr": 0.001}, as the flags are named."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def differences(old: Checked, new: Checked, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields that differ between two configs, with both values: {'optim.lr': (0.001, 0.01)}."""
    changed: dict[str, tuple[Any, Any]] = {}
    if type(old) is not type(new):
        return {f"{prefix}kind": (type(old).__name__, type(new).__name__)}
    for field in dataclasses.fields(old):
        old_value, new_value = getattr(old, field.name), getattr(new, field.name)
        if isinstance(old_value, Checked) and isinstance(new_value, Checked):
            changed |= differences(old_value, new_value, f"{prefix}{field.name}.")
        elif old_value != new_value:
            changed[prefix + field.name] = (old_value, new_value)
    return changed
