"""What a model is: ViTConfig and ResNetConfig as frozen dataclasses, and the checks that every config shares.

A config is checked when it is created. Errors are one line: what is wrong and how to fix it. The comments of the fields
are the help texts of the command's flags. Neither torch nor anything of plainvit is imported here.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

# What each library computes with the same weights; `create(numerics=...)` selects one
VIT_NUMERICS: dict[str, dict[str, Any]] = {
    "google": {"activation": "gelu_tanh", "norm_eps": 1e-6},  # flax's nn.gelu is the tanh form
    "timm": {"activation": "gelu", "norm_eps": 1e-6},
    "torchvision": {"activation": "gelu", "norm_eps": 1e-6},
    "open_clip": {"activation": "gelu", "norm_eps": 1e-5},
    "transformers": {"activation": "gelu", "norm_eps": 1e-12},
}
RESNET_NUMERICS: dict[str, dict[str, Any]] = {
    "google": {"standardize": "var+1e-10", "norm_eps": 1e-5},
    "timm": {"standardize": "var+1e-8", "norm_eps": 1e-5},
}
STEM_NUMERICS: dict[str, dict[str, Any]] = {  # Google's hybrids use a ResNet implementation other than BiT's
    "google": {"standardize": "std+1e-5", "norm_eps": 1e-6},
    "timm": {"standardize": "var+1e-8", "norm_eps": 1e-5},
}


MAX_LISTED = 24  # an error lists all names if there are at most this many


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The end of an error message about an unknown name: the closest known names."""
    known = list(known)
    by_lower = {other.lower(): other for other in known}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]
    if close:
        return f"nearest: {', '.join(close)}"
    listed = known[:count] if len(known) > MAX_LISTED else known
    return f"{'one of' if listed == known else 'such as'}: {', '.join(listed)}"


#: Control characters except newline, marks that change the writing direction, and lone surrogates
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text that is safe to print: characters that control a terminal are escaped."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def pluralize(count: float, singular: str, plural: str = "") -> str:
    """A count with its noun, such as "1 image" and "2,000 images"; `plural` if it is not the singular with an s."""
    return f"{count:,.0f} {singular if count == 1 else plural or singular + 's'}"


def pair(size: int | Iterable[int]) -> tuple[int, int]:
    """(height, width) of a size given as one number (a square) or as a pair."""
    if isinstance(size, int):
        return size, size
    sides = tuple(size) if isinstance(size, Iterable) else ()
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise ValueError(f"a size must be an integer or (height, width), got {size!r}")
    return sides


def join_or(values: Iterable[object]) -> str:
    """1, 5 or 13"""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def largest_divisor(total: int, most: int) -> int:
    """The largest divisor of `total` up to `most`; 0 if `most` is below 1."""
    return max((n for n in range(1, min(most, total) + 1) if total % n == 0), default=0)


# What a number may have to be, in words and as a check
BOUNDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "positive": ("an integer of at least 1", lambda value: isinstance(value, int) and value >= 1),
    "natural": ("an integer of at least 0", lambda value: isinstance(value, int) and value >= 0),
    "rates": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    "fractions": ("between 0 and 1", lambda value: 0 <= value <= 1),
    "not_negative": ("at least 0", lambda value: value >= 0),
    "above_zero": ("above 0", lambda value: value > 0),
    "parts": ("above 0 and at most 1", lambda value: 0 < value <= 1),
}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Base of every config: its fields are checked when it is created."""

    FLAGS: ClassVar[str] = ""  # Start of the flags of its fields; "" for models, which are also created without flags

    def _flag(self, name: str) -> str:
        """How an error names a field: as its flag, if it has one."""
        return f"{self.FLAGS}{name.replace('_', '-')}" if self.FLAGS else name

    def _check(self, **names: Iterable[str]) -> None:
        """Check the types of all fields, and the fields named for each of `BOUNDS`."""
        for name, hint in get_type_hints(type(self)).items():
            self._check_type(name, hint)
        for bound, fields in names.items():
            text, is_valid = BOUNDS[bound]
            for name in fields:
                value = getattr(self, name)
                numbers = value if isinstance(value, tuple) else (value,)
                for number in numbers:
                    if not is_valid(number):
                        whole = f" in {value}" if isinstance(value, tuple) else ""
                        raise ValueError(f"{self._flag(name)} must be {text}, got {number}{whole}")

    def _check_type(self, name: str, hint: Any) -> None:
        value = getattr(self, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ValueError(f"{self._flag(name)} {value!r} is unknown; {nearest(str(value), get_args(hint))}")
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{self._flag(name)} must be True or False, got {value!r}")
        if hint is float or (hint == float | None and value is not None):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or (name.endswith("_eps") and value <= 0):
                above = " above 0" if name.endswith("_eps") else ""
                raise ValueError(f"{self._flag(name)} must be a number{above}, got {value!r}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen: only __post_init__ may normalize a field

    def _set_pixels(self, channels: int) -> None:
        """Expand mean and std to one value per channel, and check them."""
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            values = values * channels if len(values) == 1 else values
            if len(values) != channels:
                raise ValueError(
                    f"{name} has {len(values)} values for {channels} channels: give one value, or one per channel"
                )
            for value in values:
                if not math.isfinite(value):
                    raise ValueError(f"{name} must be a finite number, got {value}")
                if name == "std" and value <= 0:
                    raise ValueError(f"std must be above 0, got {value}")
            self._set(name, values)

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
    standardize: Literal["std+1e-5", "var+1e-8", "var+1e-10"] = "var+1e-10"  # Denominator of weight standardization
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

    def without_head(self) -> Self:
        return self.replace(classes=0)

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
    #: Input of the head: class token, mean of patches, attention pooling, or the first two concatenated
    pool: Literal["token", "average", "attention", "token+average"] = "token"
    class_token: bool = True  # Prepend a learned class token to the patches
    distillation: bool = False  # Add DeiT's distillation token, with its own head
    registers: int = 0  # Number of register tokens (learned, prepended to the patches)
    #: Kind of position embedding; sincos2d is not learned, bias is BEiT's
    posemb: Literal["none", "1d", "2d", "relative", "sincos2d", "bias"] = "1d"
    posemb_at: Literal["stem", "every", "shared"] = "stem"  # Where it is added: once, per layer, or one for all layers
    posemb_prefix: Literal["none", "class", "all"] = "class"  # Prepended tokens that have a 1d position embedding
    norm: Literal["pre", "post"] = "pre"  # LayerNorm before attention and MLP, or after the residual sum
    norm_pooled: bool = False  # Apply the final norm after pooling (timm's fc_norm)
    norm_eps: float = 1e-6  # Epsilon of LayerNorm
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "gelu_tanh"  # Activation of the MLPs
    dropout: float = 0.0  # Dropout rate after the embedding, attention and each layer of the MLPs
    stochastic_depth: float = 0.0  # Stochastic depth rate of the last block; grows linearly from 0 at the first
    layer_scale: float | None = None  # Initial value of LayerScale; None: no LayerScale
    #: Rotary positions of queries and keys: none, or those of EVA-02, DINOv3, PE or RoPE-ViT (axial)
    rotary: Literal["none", "eva02", "dinov3", "pe", "axial"] = "none"
    rotary_grid: int = 16  # Rows and columns that eva02 and pe positions are scaled to
    norm_kind: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    norm_embedding: Literal["none", "patches", "tokens"] = "none"  # Norm of the patches, or of all tokens (CLIP)
    norm_inner: Literal["none", "mlp", "both"] = "none"  # Norm before the last layer of MLPs, or of attention too
    norm_final: bool = True  # Apply a norm after the last block
    qk_norm: bool = False  # Normalize queries and keys per head
    gated: bool = False  # Gated MLPs (SwiGLU with activation silu)
    block_bias: Literal["all", "no_k", "no_qkv", "none"] = "all"  # Which linear layers of the blocks have a bias
    embedding_bias: bool = True  # Bias of the patch embedding
    projection: int = 0  # Width of the linear projection of image-text towers; 0: none
    cosine_head: bool = False  # Normalize the features before the head (zero-shot classification)
    axial: bool = False  # Replace each block by axial attention along rows, then columns (paper D.6)
    stem: ResNetConfig | None = None  # ResNet stem of a hybrid
    init: Literal["google", "timm"] = "google"  # Initialization scheme of the weights
    mean: tuple[float, ...] = (0.5,)  # Mean that is subtracted from pixels in [0, 1]
    std: tuple[float, ...] = (0.5,)  # Standard deviation that pixels are divided by

    def __post_init__(self) -> None:
        for name in ("image_size", "patch"):
            self._set(name, pair(getattr(self, name)))
        counts = ("width", "depth", "heads", "mlp_dim", "patch", "image_size", "channels", "rotary_grid")
        self._check(
            positive=counts,
            natural=("classes", "representation", "registers", "projection"),
            rates=("dropout", "stochastic_depth"),
        )
        self._set_pixels(self.channels)
        self._check_width()
        self._check_image_size()
        if self.stem:
            self._check_stem(self.stem)
        self._check_pooling()
        self._check_positions()

    def _check_width(self) -> None:
        if self.width % self.heads:
            divisors = [n for n in range(1, min(self.width, 1024) + 1) if self.width % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.heads))[:3])
            width = max(round(self.width / self.heads), 1) * self.heads
            fix = f"use heads {join_or(near)}, or width {width}"
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: {fix}")
        parts = {"2d": 2, "sincos2d": 4}.get(self.posemb, 1)
        if self.width % parts or self.width < 2 * parts:
            needed = f"at least {2 * parts} and divisible by {parts}"
            raise ValueError(f"posemb {self.posemb} requires a width of {needed}, got {self.width}")
        if self.rotary != "none" and self.width // self.heads % 4:
            raise ValueError(
                f"rotary {self.rotary} requires heads of a width divisible by 4, got {self.width // self.heads}"
            )

    def _check_image_size(self) -> None:
        height, width = self.image_size
        for name, side, stride in zip(("height", "width"), self.image_size, self.stride, strict=True):
            if side % stride:
                multiples = (side // stride * stride, math.ceil(side / stride) * stride)
                usable = join_or(size for size in multiples if size)
                fix = f"use image {'size' if height == width else name} {usable}"
                if self.stem is None:
                    fix += f", or a patch size that divides {side}"
                raise ValueError(f"image size {height} x {width} is not divisible by the patch size {stride}: {fix}")

    def _check_stem(self, stem: ResNetConfig) -> None:
        if stem.channels != self.channels:
            raise ValueError(f"the stem has {stem.channels} channels, the model {self.channels}: use the same number")
        if stem.preactivation:
            raise ValueError("the stem of a hybrid requires preactivation off")

    def _check_pooling(self) -> None:
        if self.pool.startswith("token") and not self.class_token:
            raise ValueError(f"pool {self.pool} requires a class token: use pool average, or turn class_token on")
        if self.distillation and (self.pool != "token" or self.representation or self.norm_pooled):
            raise ValueError("distillation requires pool token, representation 0 and norm_pooled off")
        if self.norm_pooled and (self.norm == "post" or not self.norm_final or self.pool == "token+average"):
            raise ValueError("norm_pooled requires norm pre, norm_final on and a pool other than token+average")
        if self.projection and (self.representation or self.distillation or self.pool == "token+average"):
            others = "representation 0, distillation off and a pool other than token+average"
            raise ValueError(f"projection requires {others}")

    def _check_positions(self) -> None:
        if self.posemb_at != "stem" and self.posemb in ("none", "relative", "bias"):
            raise ValueError(f"posemb {self.posemb} does not support posemb_at {self.posemb_at}: use posemb_at stem")
        if self.posemb == "bias" and (not self.class_token or self.prefix != 1):
            raise ValueError("posemb bias requires class_token on, distillation off and registers 0")
        if self.axial and (self.prefix or self.posemb in ("relative", "bias") or self.rotary != "none"):
            raise ValueError(
                "axial requires class_token off, registers 0, pool average or attention, rotary none, and a posemb "
                "other than relative or bias"
            )

    def without_head(self) -> Self:
        """The config without anything after pooling: hidden layer, projection and head."""
        return self.replace(classes=0, representation=0, projection=0, cosine_head=False)

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
        plain = self.norm == "pre" and not self.axial and self.has_plain_attention
        return plain and self.pool == "token" and not self.distillation

    @property
    def has_plain_attention(self) -> bool:
        """Whether attention is the paper's, which the fast path computes by its own kernels."""
        plain = self.block_bias == "all" and not self.qk_norm and self.rotary == "none" and self.norm_inner != "both"
        return plain and self.posemb not in ("relative", "bias")

    @property
    def has_plain_mlp(self) -> bool:
        return not self.gated and self.norm_inner == "none" and self.block_bias != "none"

    @property
    def feature_width(self) -> int:
        """Width of the vector that the head reads."""
        return self.representation or self.projection or self.width * (2 if self.pool == "token+average" else 1)

    @property
    def prefix_rows(self) -> int:
        """Number of tokens before the patches that have a 1-D position embedding."""
        return {"none": 0, "class": self.class_token + self.distillation, "all": self.prefix}[self.posemb_prefix]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Checked):
    """Resizing of photos for evaluation; the size, mean and std belong to the model."""

    #: How to resize: squash ignores the aspect, crop takes the short side and a center crop, squash-crop does both
    resize: Literal["squash", "crop", "squash-crop"] = "squash"
    crop: float = 1.0  # Side kept by the center crop, as a fraction of the resized side
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"  # Interpolation when resizing
    antialias: bool = True  # Antialias when downsizing (nearest never does, lanczos always)

    def __post_init__(self) -> None:
        self._check(parts=("crop",))


@dataclass(frozen=True, kw_only=True)
class About(Checked):
    """Metadata of weights: format family, preprocessing, class names."""

    family: str = "plainvit"
    preprocess: Preprocess = Preprocess()
    class_names: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # setting -> where its value comes from


Model = ViTConfig | ResNetConfig
