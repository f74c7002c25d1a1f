"""Every setting of plainvit as frozen dataclasses, to and from JSON.

A config is checked when it is created. Errors are one line: what is wrong and how to fix it. The comments of the fields
are the help texts of the command's flags. Neither torch nor anything of plainvit is imported here.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

# What each library computes with the same weights; `create(numerics=...)` selects one
VIT_NUMERICS: dict[str, dict[str, Any]] = {
    "google": {"activation": "gelu_tanh", "norm_eps": 1e-6},  # flax's nn.gelu is the tanh form
    "timm": {"activation": "gelu", "norm_eps": 1e-6},
    "torchvision": {"activation": "gelu", "norm_eps": 1e-6},
    "transformers": {"activation": "gelu", "norm_eps": 1e-12},
}
RESNET_NUMERICS: dict[str, dict[str, Any]] = {
    "google": {"standardise": "var+1e-10", "norm_eps": 1e-5},
    "timm": {"standardise": "var+1e-8", "norm_eps": 1e-5},
}
STEM_NUMERICS: dict[str, dict[str, Any]] = {  # Google's hybrids use a ResNet implementation other than BiT's
    "google": {"standardise": "std+1e-5", "norm_eps": 1e-6},
    "timm": {"standardise": "var+1e-8", "norm_eps": 1e-5},
}


MAX_LISTED = 24  # an error lists all names if there are at most this many


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The end of an error message about an unknown name: the closest known names."""
    known = list(known)
    by_lower = {one.lower(): one for one in known}
    close = [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]
    if close:
        return f"nearest: {', '.join(close)}"
    listed = known[:count] if len(known) > MAX_LISTED else known
    return f"{'one of' if listed == known else 'such as'}: {', '.join(listed)}"


#: Control characters except newline, marks that change the writing direction, and lone surrogates
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text that is safe to print: characters that control a terminal are escaped."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def pair(size: int | Iterable[int]) -> tuple[int, int]:
    """(height, width) of a size given as one number (a square) or as a pair."""
    both = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Iterable) else (size,)
    if len(both) != 2 or not all(isinstance(side, int) for side in both):
        raise ValueError(f"a size must be an integer or (height, width), got {size!r}")
    return both


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of every config: checks of choices, counts (positive, natural) and rates in [0, 1)."""

    def _check(self, *, positive: Iterable[str] = (), natural: Iterable[str] = (), rates: Iterable[str] = ()) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name} {value!r} is unknown; {nearest(str(value), get_args(hint))}")
            if hint is bool and not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
            if hint is float or (hint == float | None and value is not None):
                valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                if not valid or (name.endswith("_eps") and value <= 0):
                    raise ValueError(
                        f"{name} must be a number{' above 0' if name.endswith('_eps') else ''}, got {value!r}"
                    )
        for names, low in ((positive, 1), (natural, 0)):
            for name in names:
                value = getattr(self, name)
                for number in value if isinstance(value, tuple) else (value,):
                    if not isinstance(number, int) or number < low:
                        raise ValueError(f"{name} must be an integer of at least {low}, got {value}")
        for name in rates:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: only __post_init__ may normalise a field

    def _set_pixels(self, channels: int) -> None:
        """Expand mean and std to one value per channel, and check them."""
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            values = values * channels if len(values) == 1 else values
            if len(values) != channels:
                raise ValueError(
                    f"{name} has {len(values)} values for {channels} channels: give one value, or one per channel"
                )
            self._set(name, values)
            if not all(math.isfinite(value) for value in values) or (name == "std" and min(values) <= 0):
                raise ValueError(f"{name} must be finite{' and above 0' if name == 'std' else ''}, got {values}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. An unknown field is an error that names the nearest."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no setting {name!r}; {nearest(name, known)}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Checked):
    """A BiT ResNet, or with preactivation=False the convolutional stem of a hybrid (which ignores classes)."""

    blocks: tuple[int, ...]  # Number of units in each stage; () is only the root
    widen: int = 1  # Width multiplier, the k of R50xk
    classes: int = 1000  # Number of classes; 0: those of the data in a training run, else no head
    image_size: tuple[int, int] = (224, 224)  # Height and width of the images in pixels
    channels: int = 3  # Number of image channels
    preactivation: bool = True  # Apply norm and ReLU before each convolution (BiT)
    #: Padding of convolutions; same is TensorFlow's, asymmetric at stride 2
    padding: Literal["symmetric", "same"] = "symmetric"
    standardise: Literal["std+1e-5", "var+1e-8", "var+1e-10"] = "var+1e-10"  # Denominator of weight standardization
    norm_eps: float = 1e-5  # Epsilon of GroupNorm
    init: Literal["google", "timm"] = "google"  # Initialization scheme of the weights
    mean: tuple[float, ...] = (0.5,)  # Mean that is subtracted from pixels in [0, 1]
    std: tuple[float, ...] = (0.5,)  # Standard deviation that pixels are divided by

    def __post_init__(self) -> None:
        self._set("image_size", pair(self.image_size))
        self._set("blocks", tuple(self.blocks))
        self._check(positive=("blocks", "widen", "image_size", "channels"), natural=("classes",))
        if len(self.blocks) > 4:
            raise ValueError(f"blocks must have at most 4 stages, got {self.blocks}")
        self._set_pixels(self.channels)

    @property
    def stride(self) -> int:
        """Image pixels per cell of the last feature map: 4 in the root, times 2 for each stage after the first."""
        return 4 * 2 ** max(len(self.blocks) - 1, 0)

    @property
    def width(self) -> int:
        """Number of channels of the last feature map."""
        return 64 * self.widen * (4 * 2 ** (len(self.blocks) - 1) if self.blocks else 1)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Checked):
    """A Vision Transformer; the defaults are ViT-B/16 of the paper."""

    width: int = 768  # Width of the token vectors
    depth: int = 12  # Number of transformer blocks
    heads: int = 12  # Number of attention heads; must divide the width
    mlp_dim: int = 3072  # Width of the hidden layer of the MLPs
    patch: tuple[int, int] = (16, 16)  # Patch height and width, in pixels or in cells of the stem's feature map
    image_size: tuple[int, int] = (224, 224)  # Height and width of the images in pixels
    channels: int = 3  # Number of image channels
    classes: int = 1000  # Number of classes; 0: those of the data in a training run, else no head
    representation: int = 0  # Width of the hidden tanh layer of the head (pre-training); 0: linear head
    #: Input of the head: class token, mean of patches, attention pooling
    pool: Literal["token", "average", "attention"] = "token"
    class_token: bool = True  # Prepend a learned class token to the patches
    distillation: bool = False  # Add DeiT's distillation token, with its own head
    registers: int = 0  # Number of register tokens (learned, prepended to the patches)
    #: Kind of position embedding; sincos2d is not learned
    posemb: Literal["none", "1d", "2d", "relative", "sincos2d"] = "1d"
    posemb_at: Literal["stem", "every", "shared"] = "stem"  # Where it is added: once, per layer, or one for all layers
    posemb_prefix: Literal["none", "class", "all"] = "class"  # Prepended tokens that have a 1d position embedding
    norm: Literal["pre", "post"] = "pre"  # LayerNorm before attention and MLP, or after the residual sum
    norm_pooled: bool = False  # Apply the final norm after pooling (timm's fc_norm)
    norm_eps: float = 1e-6  # Epsilon of LayerNorm
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu"] = "gelu_tanh"  # Activation of the MLPs
    dropout: float = 0.0  # Dropout rate after the embedding, attention and each layer of the MLPs
    stochastic_depth: float = 0.0  # Stochastic depth rate of the last block; grows linearly from 0 at the first
    layer_scale: float | None = None  # Initial value of LayerScale; None: no LayerScale
    axial: bool = False  # Replace each block by axial attention along rows, then columns (paper D.6)
    stem: ResNetConfig | None = None  # ResNet stem of a hybrid
    init: Literal["google", "timm"] = "google"  # Initialization scheme of the weights
    mean: tuple[float, ...] = (0.5,)  # Mean that is subtracted from pixels in [0, 1]
    std: tuple[float, ...] = (0.5,)  # Standard deviation that pixels are divided by

    def __post_init__(self) -> None:
        for name in ("image_size", "patch"):
            self._set(name, pair(getattr(self, name)))
        counts = ("width", "depth", "heads", "mlp_dim", "patch", "image_size", "channels")
        self._check(
            positive=counts,
            natural=("classes", "representation", "registers"),
            rates=("dropout", "stochastic_depth"),
        )
        self._set_pixels(self.channels)
        self._check_shapes()
        self._check_combinations()

    def _check_shapes(self) -> None:
        if self.width % self.heads:
            divisors = [n for n in range(1, min(self.width, 1024) + 1) if self.width % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.heads))[:3])
            raise ValueError(
                f"width {self.width} is not divisible by heads {self.heads}; nearest: {', '.join(map(str, near))}"
            )
        for side, stride in zip(self.image_size, self.stride, strict=True):
            if side % stride:
                below, above = side // stride * stride, math.ceil(side / stride) * stride
                near = f"{below} or {above}" if below else f"{above}"
                size = " x ".join(map(str, self.image_size))
                raise ValueError(f"image size {size} is not divisible by the patch size {stride}; nearest: {near}")
        parts = {"2d": 2, "sincos2d": 4}.get(self.posemb, 1)
        if self.width % parts or self.width < 2 * parts:
            raise ValueError(
                f"posemb {self.posemb!r} requires a width of at least {2 * parts} and divisible by {parts}, "
                f"got {self.width}"
            )
        if self.stem and (self.stem.channels != self.channels or self.stem.preactivation):
            raise ValueError("the stem of a hybrid must have the channels of the images and preactivation=False")

    def _check_combinations(self) -> None:
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool 'token' requires class_token=True: set it, or use pool 'average'")
        if self.distillation and (self.pool != "token" or self.representation or self.norm_pooled):
            raise ValueError("distillation=True requires pool 'token', representation=0 and norm_pooled=False")
        if self.posemb_at != "stem" and self.posemb in ("none", "relative"):
            raise ValueError(
                f"posemb {self.posemb!r} does not support posemb_at {self.posemb_at!r}: use posemb_at 'stem'"
            )
        if self.axial and (self.prefix or self.posemb == "relative"):
            raise ValueError(
                "axial=True requires class_token=False, registers=0, pool 'average' or 'attention', and a posemb "
                "other than 'relative'"
            )
        if self.norm == "post" and self.norm_pooled:
            raise ValueError("norm_pooled=True requires norm 'pre'")

    @property
    def stride(self) -> tuple[int, int]:
        """Image pixels per token, vertically and horizontally."""
        stem = self.stem.stride if self.stem else 1
        return self.patch[0] * stem, self.patch[1] * stem

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: class, distillation, registers, in this order."""
        return self.class_token + self.distillation + self.registers

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def reads_one_token(self) -> bool:
        """Whether only the class token is used after the last block."""
        plain = self.norm == "pre" and not self.axial and self.posemb != "relative"
        return plain and self.pool == "token" and not self.distillation

    @property
    def prefix_rows(self) -> int:
        """Number of tokens before the patches that have a 1-D position embedding."""
        return {"none": 0, "class": self.class_token + self.distillation, "all": self.prefix}[self.posemb_prefix]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Checked):
    """Resizing of photos for evaluation; the size, mean and std belong to the model."""

    #: How to resize: squash ignores the aspect, crop takes the short side and a centre crop, squash-crop does both
    resize: Literal["squash", "crop", "squash-crop"] = "squash"
    crop: float = 1.0  # Side kept by the centre crop, as a fraction of the resized side
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"  # Interpolation when resizing
    antialias: bool = True  # Antialias when downsizing (nearest never does, lanczos always)

    def __post_init__(self) -> None:
        self._check()
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1, got {self.crop}")


LEAST_PIXELS = 8  # augment.resize below this is a factor of the image size


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """Random augmentation of training images; the defaults are the paper's pre-training."""

    #: Random crop: inception (torchvision or TensorFlow), random after a resize (BiT), pad after zero-padding (CIFAR)
    crop: Literal["inception", "inception-tf", "random", "pad", "none"] = "inception"
    area: tuple[float, float] = (0.05, 1.0)  # Crop inception: minimum and maximum fraction of the image area
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # Crop inception: minimum and maximum aspect ratio, width / height
    resize: float = 0.0  # Crop random: size before the crop, as a factor of the image size, or from 8 on in pixels
    pad: int = 4  # Crop pad: zero-padding in pixels
    flip: float = 0.5  # Probability of a horizontal flip
    randaugment: tuple[int, int] = (0, 0)  # RandAugment: number of operations and magnitude (at most 30)
    three_augment: bool = False  # Apply DeiT III's 3-Augment: one of grayscale, solarize, blur
    colour: float = 0.0  # Strength of colour jitter: brightness, contrast and saturation
    erase: float = 0.0  # Probability of random erasing
    repeats: int = 1  # Copies of each image in an epoch (repeated augmentation)
    mixup: float = 0.0  # Alpha of mixup's beta distribution; 0: off
    cutmix: float = 0.0  # Alpha of CutMix's beta distribution; 0: off
    smoothing: float = 0.0  # Label smoothing

    def __post_init__(self) -> None:
        for name in ("area", "aspect", "randaugment"):
            self._set(name, tuple(getattr(self, name)))
        self._check(positive=("repeats",), natural=("pad", "randaugment"), rates=("colour", "smoothing"))
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(
                f"area and aspect must be (minimum, maximum), area within (0, 1]; got {self.area}, {self.aspect}"
            )
        if self.crop == "random" and not self.resize:
            raise ValueError("augment.crop 'random' requires augment.resize, such as 1.17 (times the image size)")
        if self.resize and self.resize < 1:
            raise ValueError(f"augment.resize must be a factor of at least 1, or a size in pixels; got {self.resize}")
        if min(self.mixup, self.cutmix) < 0:
            raise ValueError(f"mixup and cutmix must be at least 0, got {self.mixup} and {self.cutmix}")
        if self.randaugment[1] > 30:
            raise ValueError(f"the magnitude of randaugment must be at most 30, got {self.randaugment[1]}")

    def resized_side(self, side: int) -> int:
        """Pixels to which crop 'random' resizes an image, for a model with this image size."""
        return round(self.resize if self.resize >= LEAST_PIXELS else self.resize * side)


@dataclass(frozen=True, kw_only=True)
class About(Checked):
    """Metadata of weights: format family, preprocessing, class names."""

    family: str = "plainvit"
    preprocess: Preprocess = Preprocess()
    class_names: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # setting -> where its value comes from


Model = ViTConfig | ResNetConfig


@dataclass(frozen=True, kw_only=True)
class Optim(Checked):
    """Optimizer and schedule; the defaults are the paper's pre-training."""

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
    lora: int = 0  # Rank of LoRA updates, trained in place of the blocks' matrices; 0: off

    def __post_init__(self) -> None:
        for name in ("milestones", "betas", "grid", "frozen"):
            self._set(name, tuple(getattr(self, name)))
        self._check(natural=("lora",), rates=("momentum",))
        for lr in (self.lr, *self.grid):
            if not 0 < lr <= 1e6:
                raise ValueError(f"lr must be above 0 and at most 1e6, got {lr}")
        for name in ("warmup", "cooldown", "weight_decay", "lr_end", "clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be above 0 and at most 1, got {self.layer_decay}")
        for name in ("eps", "timescale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < one < 1 for one in self.milestones):
            raise ValueError(f"milestones must be increasing fractions between 0 and 1, got {self.milestones}")


@dataclass(frozen=True, kw_only=True)
class Masked(Checked):
    """Masked image modelling: what is hidden and predicted; the defaults are the paper's (B.1.2).

    depth, width and heads describe MAE's decoder; the other objectives predict from each token with one linear layer.
    """

    ratio: float = 0.5  # Fraction of the patches of each image to mask (MAE 0.75, SimMIM 0.6)
    unit: int = 1  # Side in patches of the squares that are masked together (SimMIM 2)
    #: What to predict: the patch's mean colour (512 classes), that of 4 x 4 cells, or all pixels by L2 (SimMIM L1)
    target: Literal["colour", "colours16", "pixels"] = "colour"
    normalise: bool = False  # Target pixels: normalize each patch by its own mean and std, as MAE
    depth: int = 8  # Number of blocks of MAE's decoder
    width: int = 512  # Width of MAE's decoder
    heads: int = 16  # Number of attention heads of MAE's decoder

    def __post_init__(self) -> None:
        self._check(positive=("unit", "depth", "width", "heads"))
        if not 0 < self.ratio < 1:
            raise ValueError(f"masked.ratio must be above 0 and below 1, got {self.ratio:g}; the paper uses 0.5")
        if self.normalise and self.target != "pixels":
            raise ValueError(f"masked.normalise requires --masked.target pixels, got {self.target!r}")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"masked.width {self.width} must be divisible by 4 and by masked.heads {self.heads}")


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """One training run: a recipe returns it, the run folder stores it, and every field is a flag."""

    recipe: str = ""  # Name of the recipe, or FILE.py:FUNCTION
    model: ViTConfig | ResNetConfig | None = None  # Model to train; None: the model of init
    init: str = ""  # Weights to start from: file, run folder, hf:org/name or name from `plainvit weights`
    image_size: int = 0  # Height and width of the training images in pixels; 0: the model's own
    head: Literal["zero", "keep"] = "zero"  # Head of init: replace it by zeros (as in the paper), or keep it
    data: str = ""  # Training data: folder, list, shards, hf:org/dataset, known dataset, digits or shapes
    data_root: str = ""  # Folder with the known datasets, each in a folder of its name
    exclude: str = ""  # File with images to leave out, as `plainvit data check --save` writes it
    train_fraction: float = 1.0  # Fraction of each class to train on (smaller subsets are contained in larger ones)
    holdout: float = 0.0  # Fraction of the training images, per class, to hold out for validation
    search_holdout: float = 0.1  # Fraction of the training images to hold out while --search runs
    epochs: float = 0.0  # Number of epochs; default with --init: 20, at least 200 steps
    steps: int = 0  # Number of steps, in place of epochs
    hours: float = 0.0  # Time limit: the number of steps and the schedule are shortened to fit; 0: no limit
    batch: int = 512  # Images per step, over all devices
    micro_batch: int = 0  # Images per forward pass on a device (gradient accumulation); 0: what fits
    #: Training objective: classify labels, or predict masked patches as in the ViT paper, MAE or SimMIM
    objective: Literal["classify", "masked", "mae", "simmim"] = "classify"
    masked: Masked = Masked()  # Masked image modelling
    #: Loss: sigmoid sums over classes, binary averages over classes with 0/1 targets
    loss: Literal["softmax", "sigmoid", "binary"] = "softmax"
    head_bias: float = 0.0  # Initial bias of a new head, such as -10 for sigmoid with 21k classes
    class_weights: bool = False  # Weight each class by the inverse of its number of images
    teacher: str = ""  # Weights of a teacher for distillation
    distil: Literal["hard", "soft"] = "hard"  # Distillation target: the teacher's top class, or its distribution
    temperature: float = 1.0  # Temperature of soft distillation
    optim: Optim = Optim()
    augment: Augment = Augment()
    preprocess: Preprocess | None = None  # Preprocessing for evaluation; None: that of init, or the default
    ema: float = 0.0  # Decay of an average of the weights, used as final weights, such as 0.9999; 0: off
    ema_window: float = 0.0  # Averaging window as a fraction of the run, in place of --ema: 0.1 is about the last tenth
    evaluations: int = 20  # Number of evaluations during the run, each with a checkpoint, evenly spaced
    save_every: int = 0  # Steps between additional checkpoints; 0: none
    keep: int = 2  # Number of most recent checkpoints to keep, besides the best
    patience: int = 0  # Stop after this many evaluations without improvement and keep the best weights; 0: never
    max_skipped_steps: int = 3  # Number of steps with a non-finite loss or gradient to skip before the run stops
    seed: int = 0  # Seed of the initial weights, the image order and the augmentation
    device: str = "auto"  # Device to run on: cpu, cuda, cuda:1; auto picks a GPU if there is one
    #: Precision of the computation (weights stay fp32); auto: bf16 on a GPU; fp8: bf16, with fp8 matmuls in ViT blocks
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"  # Compile the model with torch.compile; auto: on a GPU
    graphs: Literal["auto", "off"] = "auto"  # Capture training steps as CUDA graphs; auto: small models on a single GPU
    #: Use fused kernels, skip unused outputs, sample stochastic depth from 0.2 on jointly; off: plain PyTorch
    fast_path: Literal["auto", "off"] = "auto"
    workers: int = -1  # Number of processes that read images; -1 chooses by the number of cores
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()  # Also log metrics to these
    parallel: Literal["ddp", "fsdp"] = "ddp"  # Several devices: replicate the model (ddp) or shard it (fsdp)
    recompute: bool = False  # Recompute activations in the backward pass: less memory, a third more compute
    sharded: bool = False  # Under fsdp, save one checkpoint file per process
    timeout: float = 300.0  # Seconds that a process waits for the others before it fails

    # Settings that may change on resume: they do not change the result
    OPERATIONAL: ClassVar[frozenset[str]] = frozenset(
        {
            *("data_root", "hours", "save_every", "keep", "device", "compile", "graphs", "fast_path"),
            *("workers", "track", "parallel", "recompute", "sharded", "timeout"),
        }
    )

    def __post_init__(self) -> None:
        self._set("track", tuple(self.track))
        self._check(
            positive=("batch", "evaluations", "keep"),
            natural=("steps", "micro_batch", "save_every", "patience", "max_skipped_steps", "seed", "image_size"),
            rates=("holdout", "search_holdout", "ema", "ema_window"),
        )
        if not 0 < self.train_fraction <= 1:
            raise ValueError(f"train_fraction must be above 0 and at most 1, got {self.train_fraction}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        for name in ("epochs", "hours"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.workers < -1:
            raise ValueError(f"workers must be at least 0, or -1 to choose automatically; got {self.workers}")
        for name in ("temperature", "timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.micro_batch and self.batch % self.micro_batch:
            near = max(n for n in range(1, self.micro_batch + 1) if self.batch % n == 0)
            raise ValueError(f"batch {self.batch} is not divisible by micro_batch {self.micro_batch}; nearest: {near}")
        if self.ema and self.ema_window:
            raise ValueError("ema and ema_window cannot be combined: remove one of them")
        if self.objective != "classify":
            self._check_unlabelled()
        for name in self.track:
            if name not in ("tensorboard", "wandb"):
                raise ValueError(f"track {name!r} is unknown; one of: tensorboard, wandb")

    def _check_unlabelled(self) -> None:
        """Self-supervised objectives support neither labels nor averaged weights."""
        augment = self.augment
        unsupported = {"teacher": self.teacher, "class_weights": self.class_weights, "head": self.head == "keep"}
        unsupported |= {f"augment.{name}": getattr(augment, name) for name in ("mixup", "cutmix", "smoothing")}
        unsupported |= {"ema": self.ema, "ema_window": self.ema_window}
        given = [name for name, value in unsupported.items() if value]
        if given:
            raise ValueError(f"{given[0]} is not supported with objective {self.objective!r}: remove it")

    def decay(self, steps: int) -> float:
        """Decay of the averaged weights: ema, or computed from ema_window."""
        return max(1 - 1 / (self.ema_window * steps), 0.0) if self.ema_window else self.ema


_KINDS: dict[str, type[Checked]] = {
    "vit": ViTConfig,
    "resnet": ResNetConfig,
    "preprocess": Preprocess,
    "augment": Augment,
    "optim": Optim,
    "masked": Masked,
    "run": Config,
}


FINETUNE_EPOCHS, LEAST_STEPS = 20.0, 200  # defaults with init; in fewer steps a head of zeros learns little


def count_steps(config: Config, images: int) -> int:
    """Number of steps of a run on this many images: steps, or epochs, or the default for fine-tuning."""
    if config.init and not config.steps and not config.epochs:
        return max(int(FINETUNE_EPOCHS * images / config.batch), LEAST_STEPS)
    return config.steps or int(config.epochs * images / config.batch)


def to_json(config: Checked) -> dict[str, Any]:
    """A config as JSON values with its kind; nested configs too."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(config, cls))
    return {"kind": kind} | {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return to_json(value)
    return list(value) if isinstance(value, tuple) else value


def from_json(values: Mapping[str, Any], kinds: Iterable[str] = ("vit", "resnet")) -> Any:
    """The config that `to_json` wrote: a model, unless other kinds are given. Unknown settings are errors."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"model kind {kind!r} is unknown; {nearest(str(kind), kinds)}")
    fields: dict[str, Any] = {
        name: tuple(value)
        if isinstance(value, list)
        else from_json(value, _KINDS)
        if isinstance(value, Mapping)
        else value
        for name, value in values.items()
        if name != "kind"
    }
    known = [field.name for field in dataclasses.fields(_KINDS[kind])]
    for name in fields:
        if name not in known:
            raise ValueError(f"unknown setting {name!r} in a {kind} config; {nearest(name, known)}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"invalid {kind} config: {error}") from error


def differences(old: Checked, new: Checked, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields that differ between two configs, with both values: {'optim.lr': (0.001, 0.01)}."""
    found: dict[str, tuple[Any, Any]] = {}
    if type(old) is not type(new):
        return {f"{prefix}kind": (type(old).__name__, type(new).__name__)}
    for field in dataclasses.fields(old):
        old_value, new_value = getattr(old, field.name), getattr(new, field.name)
        if isinstance(old_value, Checked) and isinstance(new_value, Checked):
            found |= differences(old_value, new_value, f"{prefix}{field.name}.")
        elif old_value != new_value:
            found[prefix + field.name] = (old_value, new_value)
    return found
