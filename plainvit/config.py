"""Every setting of plainvit as frozen dataclasses, to and from JSON.

A config is checked when it is made: a model that could not run is never described. Errors are one line that says
what is wrong and how to mend it. Nothing of plainvit is imported here, and neither is torch.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

# What the other libraries compute with the same weights: facts of each code base, chosen by one word in `create`.
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
STEM_NUMERICS: dict[str, dict[str, Any]] = {  # the hybrids' ResNet is other code at Google than BiT
    "google": {"standardise": "std+1e-5", "norm_eps": 1e-6},
    "timm": {"standardise": "var+1e-8", "norm_eps": 1e-5},
}


MOST_NAMED = 24  # names that an error lists whole


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The end of an error message about an unknown name: what the user may have meant."""
    known = list(known)
    by_lower = {word.lower(): word for word in known}
    close = [by_lower[word] for word in difflib.get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]
    if close:
        return f"nearest: {', '.join(close)}"
    few = known[:count] if len(known) > MOST_NAMED else known
    return f"{'one of' if few == known else 'such as'}: {', '.join(few)}"


#: Control characters but the newline, marks that change the direction of writing, and halves of characters
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text for a terminal: what would move its cursor, change its colours or hide a part is shown as an escape."""
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def pair(size: int | Iterable[int]) -> tuple[int, int]:
    """One number means a square; a rectangle is (height, width)."""
    both = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Iterable) else (size,)
    if len(both) != 2 or not all(isinstance(side, int) for side in both):
        raise ValueError(f"a size is one whole number or (height, width), got {size!r}")
    return both


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Checks shared by every config: a choice is one of its words, a count a whole number, a rate within [0, 1)."""

    def _check(self, *, positive: Iterable[str] = (), natural: Iterable[str] = (), rates: Iterable[str] = ()) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name} {value!r} is unknown; {nearest(str(value), get_args(hint))}")
            if hint is bool and not isinstance(value, bool):
                raise ValueError(f"{name} is True or False, got {value!r}")
            if hint is float or (hint == float | None and value is not None):
                number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                if not number or (name.endswith("_eps") and value <= 0):
                    raise ValueError(
                        f"{name} must be a number{' above 0' if name.endswith('_eps') else ''}, got {value!r}"
                    )
        for names, low in ((positive, 1), (natural, 0)):
            for name in names:
                value = getattr(self, name)
                for number in value if isinstance(value, tuple) else (value,):
                    if not isinstance(number, int) or number < low:
                        raise ValueError(f"{name} must be a whole number of at least {low}, got {value}")
        for name in rates:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: only __post_init__ may normalise a field

    def _set_pixels(self, channels: int) -> None:
        """One mean or std may stand for all channels."""
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            values = values * channels if len(values) == 1 else values
            if len(values) != channels:
                raise ValueError(
                    f"{name} has {len(values)} values for {channels} channels; give one, or one per channel"
                )
            self._set(name, values)
            if not all(math.isfinite(value) for value in values) or (name == "std" and min(values) <= 0):
                raise ValueError(f"{name} must be finite{', and above 0' if name == 'std' else ''}, got {values}")

    def replace(self, **changes: Any) -> Self:
        """The same config with some fields changed; a misspelt field is an error that names the nearest."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no setting {name!r}; {nearest(name, known)}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Checked):
    """A BiT ResNet, or with preactivation=False the convolutional stem of a hybrid (then classes are not used)."""

    blocks: tuple[int, ...]  # units in each stage; () is the root alone
    widen: int = 1  # the k of R50xk
    classes: int = 1000  # 0: in a run as many as the data has, else features only
    image_size: tuple[int, int] = (224, 224)  # height and width in pixels
    channels: int = 3  # of the images
    preactivation: bool = True
    padding: Literal["symmetric", "same"] = "symmetric"  # "same" is TensorFlow's: asymmetric under stride 2
    standardise: Literal["std+1e-5", "var+1e-8", "var+1e-10"] = "var+1e-10"
    norm_eps: float = 1e-5
    init: Literal["google", "timm"] = "google"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        self._set("image_size", pair(self.image_size))
        self._set("blocks", tuple(self.blocks))
        self._check(positive=("blocks", "widen", "image_size", "channels"), natural=("classes",))
        if len(self.blocks) > 4:
            raise ValueError(f"a ResNet has at most 4 stages, got blocks {self.blocks}")
        self._set_pixels(self.channels)

    @property
    def stride(self) -> int:
        """Image pixels per cell of the feature map: the root divides by 4, each stage after the first by 2."""
        return 4 * 2 ** max(len(self.blocks) - 1, 0)

    @property
    def width(self) -> int:
        """Channels of the last feature map."""
        return 64 * self.widen * (4 * 2 ** (len(self.blocks) - 1) if self.blocks else 1)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Checked):
    """A Vision Transformer in the paper's words."""

    # Every default is the paper's

    width: int = 768  # of each token's vector
    depth: int = 12  # number of blocks
    heads: int = 12  # of attention in each block; they divide the width
    mlp_dim: int = 3072  # width of the hidden layer of each block's MLP
    patch: tuple[int, int] = (16, 16)  # in pixels, or in cells of the stem's feature map
    image_size: tuple[int, int] = (224, 224)  # height and width in pixels
    channels: int = 3  # of the images
    classes: int = 1000  # 0: in a run as many as the data has, else features only
    representation: int = 0  # width of the pre-training head's hidden tanh layer; 0: a single linear head
    pool: Literal["token", "average", "attention"] = "token"  # what the head reads: class token, mean, a query's
    class_token: bool = True  # a learned token before the patches
    distillation: bool = False  # DeiT's second token, with a head of its own
    registers: int = 0  # further learned tokens before the patches
    posemb: Literal["none", "1d", "2d", "relative", "sincos2d"] = "1d"  # position embedding; sincos2d is fixed
    posemb_at: Literal["stem", "every", "shared"] = "stem"  # once; at every layer; one table at every layer
    posemb_prefix: Literal["none", "class", "all"] = "class"  # which tokens before the patches have a row (1d)
    norm: Literal["pre", "post"] = "pre"  # LayerNorm before attention and MLP, or after each is added
    norm_pooled: bool = False  # the final norm acts on the pooled vector (timm's fc_norm), not on all tokens
    norm_eps: float = 1e-6  # of LayerNorm
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu"] = "gelu_tanh"  # of the MLPs
    dropout: float = 0.0  # after the embedding, attention and each layer of an MLP
    #: rate of the last block; grows linearly from 0 at the first. From 0.2 on the images of a micro-batch are drawn
    #: together, each at its rate, unless shortcuts are off
    stochastic_depth: float = 0.0
    layer_scale: float | None = None  # LayerScale's initial value; None: without
    axial: bool = False  # each block becomes one along rows and one along columns (paper D.6)
    stem: ResNetConfig | None = None  # a hybrid's ResNet
    init: Literal["google", "timm"] = "google"
    mean: tuple[float, ...] = (0.5,)  # pixels in [0, 1] enter as (x - mean) / std
    std: tuple[float, ...] = (0.5,)

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
            raise ValueError(f"heads {self.heads} must divide width {self.width}; nearest: {', '.join(map(str, near))}")
        for side, stride in zip(self.image_size, self.stride, strict=True):
            if side % stride:
                below, above = side // stride * stride, math.ceil(side / stride) * stride
                near = f"{below} or {above}" if below else f"{above}"
                size = " x ".join(map(str, self.image_size))
                raise ValueError(f"image size {size} is not divisible by the patch of {stride}; nearest: {near}")
        parts = {"2d": 2, "sincos2d": 4}.get(self.posemb, 1)
        if self.width % parts or self.width < 2 * parts:
            need = f"a width divisible by {parts}, of at least {2 * parts}"
            raise ValueError(f"posemb {self.posemb!r} needs {need}, got {self.width}")
        if self.stem and (self.stem.channels != self.channels or self.stem.preactivation):
            raise ValueError("a hybrid's stem has the image's channels and preactivation=False")

    def _check_combinations(self) -> None:
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool 'token' needs class_token=True; use pool='average' without one")
        if self.distillation and (self.pool != "token" or self.representation or self.norm_pooled):
            raise ValueError("distillation=True needs pool='token', representation=0 and norm_pooled=False")
        if self.posemb_at != "stem" and self.posemb in ("none", "relative"):
            raise ValueError(
                f"posemb {self.posemb!r} has no table to add at {self.posemb_at!r}; leave posemb_at 'stem'"
            )
        if self.axial and (self.prefix or self.posemb == "relative"):
            raise ValueError(
                "axial=True works on the patch grid alone: class_token=False, registers=0, pool 'average' or "
                "'attention', posemb not 'relative'"
            )
        if self.norm == "post" and self.norm_pooled:
            raise ValueError("norm 'post' ends every block with a norm; norm_pooled needs norm 'pre'")

    @property
    def stride(self) -> tuple[int, int]:
        """Pixels of the image per token."""
        stem = self.stem.stride if self.stem else 1
        return self.patch[0] * stem, self.patch[1] * stem

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.image_size[0] // self.stride[0], self.image_size[1] // self.stride[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class, distillation, registers, in this order."""
        return self.class_token + self.distillation + self.registers

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def reads_one_token(self) -> bool:
        """Whether the class token alone is looked at after the last block."""
        plain = self.norm == "pre" and not self.axial and self.posemb != "relative"
        return plain and self.pool == "token" and not self.distillation

    @property
    def prefix_rows(self) -> int:
        """Tokens before the patches that have a row in a 1-D position table."""
        return {"none": 0, "class": self.class_token + self.distillation, "all": self.prefix}[self.posemb_prefix]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Checked):
    """How a photo becomes the model's image; the size, mean and std are the model's own."""

    #: squash: both sides to the size, aspect ignored; crop: the short side to size / crop, then a centre crop;
    #: squash-crop: both sides to size / crop, aspect ignored, then a centre crop
    resize: Literal["squash", "crop", "squash-crop"] = "squash"
    crop: float = 1.0  # with a centre crop: the side that is kept, as a share of the resized one
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"  # how pixels are resampled
    antialias: bool = True  # of an image that becomes smaller; nearest never does, lanczos always

    def __post_init__(self) -> None:
        self._check()
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1, got {self.crop}")


LEAST_PIXELS = 8  # augment.resize below this is a multiple of the image size


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """What happens to a training image at random."""

    # Every default is the paper's pre-training

    #: inception: a part of the area by torchvision's sampling or by TensorFlow's; random: resize by `resize`, then a
    #: random crop of the image size (BiT); pad: a random crop of the image's size from a border of `pad` zeros
    #: (CIFAR), resized where the model's size is another
    crop: Literal["inception", "inception-tf", "random", "pad", "none"] = "inception"
    area: tuple[float, float] = (0.05, 1.0)  # inception: least and most share of the image's area
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # inception: least and most width by height
    resize: float = 0.0  # random: what is cropped from: a multiple of the image size (448 / 384), or pixels from 8 on
    pad: int = 4  # pad: pixels of the border
    flip: float = 0.5  # probability of mirroring left and right
    randaugment: tuple[int, int] = (0, 0)  # operations, magnitude of 30
    three_augment: bool = False  # DeiT III: one of grey, solarise, blur
    colour: float = 0.0  # jitter of brightness, contrast and saturation, each by up to this share
    erase: float = 0.0  # probability of erasing a rectangle
    repeats: int = 1  # repeated augmentation
    mixup: float = 0.0  # alpha of its beta distribution
    cutmix: float = 0.0  # alpha of its beta distribution
    smoothing: float = 0.0  # of the labels

    def __post_init__(self) -> None:
        for name in ("area", "aspect", "randaugment"):
            self._set(name, tuple(getattr(self, name)))
        self._check(positive=("repeats",), natural=("pad", "randaugment"), rates=("colour", "smoothing"))
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)}")
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"area {self.area} and aspect {self.aspect} are (least, most), areas within (0, 1]")
        if self.crop == "random" and not self.resize:
            raise ValueError("crop 'random' needs augment.resize, such as 1.17 times the image size")
        if self.resize and self.resize < 1:
            raise ValueError(
                f"augment.resize is a multiple of the image size, at least 1, or pixels; got {self.resize}"
            )
        if min(self.mixup, self.cutmix) < 0:
            raise ValueError("mixup and cutmix are alphas of a beta distribution: 0 (off) or above")
        if self.randaugment[1] > 30:
            raise ValueError(f"randaugment's magnitude is at most 30, got {self.randaugment[1]}")

    def resized_side(self, side: int) -> int:
        """Pixels to which crop 'random' resizes an image for a model with images of this side."""
        return round(self.resize if self.resize >= LEAST_PIXELS else self.resize * side)


@dataclass(frozen=True, kw_only=True)
class About(Checked):
    """What weights mean beyond the model: their origin, how photos are prepared, what the classes are called."""

    family: str = "plainvit"
    preprocess: Preprocess = Preprocess()
    class_names: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # setting -> where its value was learned


Model = ViTConfig | ResNetConfig


@dataclass(frozen=True, kw_only=True)
class Optim(Checked):
    """How the weights move."""

    # Every default is the paper's pre-training

    name: Literal["adamw", "sgd", "lamb", "muon"] = "adamw"
    lr: float = 1e-3  # at its highest
    schedule: Literal["constant", "linear", "cosine", "rsqrt", "steps"] = "cosine"
    warmup: float = 0.0  # steps of linear warm-up; below 1, a share of the run
    cooldown: float = 0.0  # steps of a linear descent to 0 at the end; below 1, a share of the run
    lr_end: float = 0.0  # where the schedules "linear" and "cosine" end
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)  # schedule "steps": shares of the run after which lr is a tenth
    timescale: float = 10_000.0  # schedule "rsqrt": steps in which it falls by sqrt(2)
    weight_decay: float = 0.0  # of weight matrices only; decoupled and multiplied by lr, for sgd added to the gradient
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw and lamb, and of muon's part for what is no matrix
    eps: float = 1e-8  # of adamw, lamb and muon's part
    momentum: float = 0.9  # of sgd and muon
    clip: float = 1.0  # greatest global norm of the gradient; 0: not clipped
    layer_decay: float = 1.0  # each layer's lr is this times that of the layer above it
    grid: tuple[float, ...] = ()  # rates that --search tries on held-out training images
    frozen: tuple[str, ...] = ()  # patterns of weights that stay as they are, such as 'embedding.*' or 'blocks.*'
    lora: int = 0  # rank of low-rank updates that are trained in place of the blocks' matrices; 0: none

    def __post_init__(self) -> None:
        for name in ("milestones", "betas", "grid", "frozen"):
            self._set(name, tuple(getattr(self, name)))
        self._check(natural=("lora",), rates=("momentum",))
        for lr in (self.lr, *self.grid):
            if not 0 < lr <= 1e6:
                raise ValueError(f"lr must be above 0 and at most a million, got {lr}")
        for name in ("warmup", "cooldown", "weight_decay", "lr_end", "clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers of at least 0 and below 1, got {self.betas}")
        if not 0 < self.layer_decay <= 1 or self.eps <= 0 or self.timescale <= 0:
            raise ValueError("layer_decay is above 0 and at most 1; eps and timescale are above 0")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < share < 1 for share in self.milestones):
            raise ValueError(f"milestones are rising shares of the run, between 0 and 1, got {self.milestones}")


@dataclass(frozen=True, kw_only=True)
class Masked(Checked):
    """What self-supervision hides of an image and asks for in return; the class's defaults are the paper's (B.1.2).

    The depth, width and heads are of MAE's decoder, as it was published; the other objectives read a patch's answer
    off its token by one linear layer.
    """

    ratio: float = 0.5  # share of the patches of each image that is hidden; MAE 0.75, SimMIM 0.6
    unit: int = 1  # side, in patches, of the squares that are hidden together; SimMIM 2
    #: one of 512 colours for the patch's mean, or for each cell of a 4 x 4 grid in it; or all pixels, by L2 (SimMIM L1)
    target: Literal["colour", "colours16", "pixels"] = "colour"
    normalise: bool = False  # pixels: each patch by its own mean and std, as MAE does
    depth: int = 8  # of MAE's decoder: number of blocks
    width: int = 512  # of MAE's decoder
    heads: int = 16  # of MAE's decoder

    def __post_init__(self) -> None:
        self._check(positive=("unit", "depth", "width", "heads"))
        if not 0 < self.ratio < 1:
            raise ValueError(f"masked.ratio must be above 0 and below 1, got {self.ratio:g}: the paper hides 0.5")
        if self.normalise and self.target != "pixels":
            raise ValueError(f"masked.normalise is of pixels, the target is {self.target!r}: --masked.target pixels")
        if self.width % self.heads or self.width % 4:
            raise ValueError(f"masked.width {self.width} must be divisible by 4 and by masked.heads {self.heads}")


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """One training run, whole: a recipe returns it, the run folder keeps it, every field is a flag."""

    recipe: str = ""  # its name, or FILE.py:FUNCTION
    model: ViTConfig | ResNetConfig | None = None  # None: the model of init. Its classes follow the data where 0
    init: str = ""  # weights to start from: a file, a run folder, hf:org/name or a published name
    image_size: int = 0  # height and width to train init's model at, positions resampled; 0: its own
    head: Literal["zero", "keep"] = "zero"  # of init: replaced by one of zeros (the paper's), or kept
    data: str = ""  # a folder, a list, shards, hf:org/dataset, a known set, digits or shapes
    data_root: str = ""  # where known sets lie, each in a folder of its name
    exclude: str = ""  # a list of images to leave out, as `plainvit data check --save` writes it
    share: float = 1.0  # of the training images of each class that is trained on; a smaller share lies in a larger one
    holdout: float = 0.0  # share of the training images, of each class, that is not trained on but validates
    search_holdout: float = 0.1  # the same while --search tries the rates of optim.grid
    epochs: float = 0.0  # length of the run; from init, without one: 20 epochs, of few images 200 steps
    steps: int = 0  # length of the run in place of epochs
    hours: float = 0.0  # to train for: steps and schedule are shortened to fit, again if the machine slows down; 0: any
    batch: int = 512  # images a step, over all devices
    micro_batch: int = 0  # images at once on a device, gradients accumulated; 0: what fits
    #: labels; or of hidden patches: the paper's masked patch prediction, MAE's, SimMIM's
    objective: Literal["classify", "masked", "mae", "simmim"] = "classify"
    masked: Masked = Masked()  # what the objectives masked, mae and simmim hide of an image and ask for
    loss: Literal["softmax", "sigmoid", "binary"] = "softmax"  # sigmoid: sum over classes; binary: mean, of 0 or 1
    head_bias: float = 0.0  # initial bias of a new head, such as -10 with sigmoid over 21k classes
    class_weights: bool = False  # weigh each class by the inverse of its number of images
    teacher: str = ""  # weights of a teacher to distil from
    distil: Literal["hard", "soft"] = "hard"  # the teacher's choice as a second label, or its whole distribution
    temperature: float = 1.0  # of soft distillation
    optim: Optim = Optim()
    augment: Augment = Augment()
    preprocess: Preprocess | None = None  # for evaluation; None: that of init, or the default
    ema: float = 0.0  # decay of the averaged weights that are evaluated and delivered, such as 0.9999; 0: none
    ema_window: float = 0.0  # the same as a share of the run, a ninth at most: 0.1 is about its last tenth
    evaluations: int = 20  # how often the run is validated and a checkpoint saved, evenly spread
    save_every: int = 0  # steps between further checkpoints
    keep: int = 2  # newest checkpoints that are kept, besides the best
    patience: int = 0  # stop after so many evaluations without a better one, and deliver the best; 0: never
    bad_steps: int = 3  # steps with a loss or gradient that is not finite are skipped, so many; then the run ends
    seed: int = 0  # of new weights, the order of the images and their augmentation
    device: str = "auto"  # cpu, cuda, cuda:1; auto: a GPU where there is one
    #: of the arithmetic, weights stay fp32; auto: bf16 on a GPU; fp8: bf16, and the products of a ViT's blocks in fp8
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"  # by torch.compile; auto: on a GPU
    graphs: Literal["auto", "off"] = "auto"  # CUDA graphs of a step; auto: of small ones, on a single GPU
    #: our own kernels, no work that no result needs, stochastic depth from 0.2 on drawn jointly; off: plain PyTorch
    shortcuts: Literal["auto", "off"] = "auto"
    workers: int = -1  # processes that read images; -1: as many as suit the machine
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()  # where else the metrics go
    parallel: Literal["ddp", "fsdp"] = "ddp"  # over several devices: the model on each, or a part of it on each
    recompute: bool = False  # blocks run again in the backward pass, which saves memory and costs a third more
    sharded: bool = False  # under fsdp each process saves its own part of a checkpoint, in place of the first all
    timeout: float = 300.0  # seconds that a process waits for the others before it gives up

    # What may change between start and resume without changing the result
    OPERATIONAL: ClassVar[frozenset[str]] = frozenset(
        {
            *("data_root", "hours", "save_every", "keep", "device", "compile", "graphs", "shortcuts"),
            *("workers", "track", "parallel", "recompute", "sharded", "timeout"),
        }
    )

    def __post_init__(self) -> None:
        self._set("track", tuple(self.track))
        self._check(
            positive=("batch", "evaluations", "keep"),
            natural=("steps", "micro_batch", "save_every", "patience", "bad_steps", "seed", "image_size"),
            rates=("holdout", "search_holdout", "ema", "ema_window"),
        )
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        for name in ("epochs", "hours"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.workers < -1 or self.temperature <= 0 or self.timeout <= 0:
            raise ValueError("workers is a number of processes, or -1; temperature and timeout are above 0")
        if self.micro_batch and self.batch % self.micro_batch:
            near = max(n for n in range(1, self.micro_batch + 1) if self.batch % n == 0)
            raise ValueError(f"a batch of {self.batch} is not divisible by micro_batch {self.micro_batch}; try {near}")
        if self.ema and self.ema_window:
            raise ValueError("ema and ema_window say the same in two ways: give one of them")
        if self.objective != "classify":
            self._check_unlabelled()
        for name in self.track:
            if name not in ("tensorboard", "wandb"):
                raise ValueError(f"track {name!r} is unknown; one of: tensorboard, wandb")

    def _check_unlabelled(self) -> None:
        """What needs labels, or weights that are judged alone, is no part of self-supervision."""
        augment = self.augment
        parts = {"teacher": self.teacher, "class_weights": self.class_weights, "head": self.head == "keep"}
        parts |= {f"augment.{name}": getattr(augment, name) for name in ("mixup", "cutmix", "smoothing")}
        parts |= {"ema": self.ema, "ema_window": self.ema_window}
        given = [name for name, value in parts.items() if value]
        if given:
            raise ValueError(f"objective {self.objective!r} knows no labels, averages no weights: without {given[0]}")

    def decay(self, steps: int) -> float:
        """Of the averaged weights: as given, or so that the window is a share of the run."""
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


FINETUNE_EPOCHS, LEAST_STEPS = 20.0, 200  # from init: in fewer steps a head that begins at zeros learns little


def length(config: Config, images: int) -> int:
    """The steps of a run on so many images: those asked for, or its epochs; from init, with neither, enough."""
    if config.init and not config.steps and not config.epochs:
        return max(int(FINETUNE_EPOCHS * images / config.batch), LEAST_STEPS)
    return config.steps or int(config.epochs * images / config.batch)


def to_json(config: Checked) -> dict[str, Any]:
    """A config as plain JSON values, with its kind; configs inside it likewise."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(config, cls))
    return {"kind": kind} | {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return to_json(value)
    return list(value) if isinstance(value, tuple) else value


def from_json(values: Mapping[str, Any], kinds: Iterable[str] = ("vit", "resnet")) -> Any:
    """The config that `to_json` wrote: a model unless other kinds are asked for. Nothing unknown is guessed at."""
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
            raise ValueError(f"a {kind} config has no setting {name!r}; {nearest(name, known)}")
    try:
        return _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"the {kind} config is not well formed: {error}") from error


def differences(old: Checked, new: Checked, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Field by field, what differs between two configs: {'optim.lr': (0.001, 0.01)}."""
    found: dict[str, tuple[Any, Any]] = {}
    if type(old) is not type(new):
        return {f"{prefix}kind": (type(old).__name__, type(new).__name__)}
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if isinstance(before, Checked) and isinstance(after, Checked):
            found |= differences(before, after, f"{prefix}{field.name}.")
        elif before != after:
            found[prefix + field.name] = (before, after)
    return found
