"""Every setting of plainvit as frozen dataclasses, to and from JSON.

A config is checked when it is made: a model that could not run is never described. Errors are one line that says
what is wrong and how to mend it. Nothing of plainvit is imported here, and neither is torch.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

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


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The end of an error message about an unknown name: what the user may have meant."""
    known = list(known)
    by_lower = {word.lower(): word for word in known}
    close = [by_lower[word] for word in difflib.get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]
    return f"nearest: {', '.join(close)}" if close else f"one of: {', '.join(known)}"


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
    classes: int = 1000  # 0: features only
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
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
    """A Vision Transformer in the paper's words; every default is the paper's."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072
    patch: tuple[int, int] = (16, 16)  # in pixels, or in cells of the stem's feature map
    image_size: tuple[int, int] = (224, 224)
    channels: int = 3
    classes: int = 1000  # 0: features only
    representation: int = 0  # width of the pre-training head's hidden tanh layer; 0: a single linear head
    pool: Literal["token", "average", "attention"] = "token"
    class_token: bool = True
    distillation: bool = False  # DeiT's second token, with a head of its own
    registers: int = 0
    posemb: Literal["none", "1d", "2d", "relative", "sincos2d"] = "1d"
    posemb_at: Literal["stem", "every", "shared"] = "stem"  # once; at every layer; one table at every layer
    posemb_prefix: Literal["none", "class", "all"] = "class"  # which tokens before the patches have a row (1d)
    norm: Literal["pre", "post"] = "pre"
    norm_pooled: bool = False  # the final norm acts on the pooled vector (timm's fc_norm), not on all tokens
    norm_eps: float = 1e-6
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu"] = "gelu_tanh"
    dropout: float = 0.0
    stochastic_depth: float = 0.0  # of the last block; grows linearly from 0 at the first
    layer_scale: float | None = None  # LayerScale's initial value
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
    def prefix_rows(self) -> int:
        """Tokens before the patches that have a row in a 1-D position table."""
        return {"none": 0, "class": self.class_token + self.distillation, "all": self.prefix}[self.posemb_prefix]


@dataclass(frozen=True, kw_only=True)
class Preprocess(Checked):
    """How a photo becomes the model's image; the size, mean and std are the model's own."""

    resize: Literal["squash", "crop"] = "squash"  # to the size, aspect ignored; or short side, then centre crop
    crop: float = 1.0  # with "crop": the side that is kept, as a share of the resized short side
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        self._check()
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop must be above 0 and at most 1, got {self.crop}")


@dataclass(frozen=True, kw_only=True)
class Augment(Checked):
    """What happens to a training image at random; every default is the paper's pre-training."""

    # inception: 5-100 % of the area, aspect 3/4-4/3, by torchvision's sampling or by TensorFlow's;
    # random: square resize to `resize`, then a random crop (BiT); pad: a random crop from a zero border (CIFAR)
    crop: Literal["inception", "inception-tf", "random", "pad", "none"] = "inception"
    area: tuple[float, float] = (0.05, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    resize: int = 0
    pad: int = 4
    flip: float = 0.5
    randaugment: tuple[int, int] = (0, 0)  # operations, magnitude of 30
    three_augment: bool = False  # DeiT III: one of grey, solarise, blur
    colour: float = 0.0  # jitter of brightness, contrast and saturation, each by up to this share
    erase: float = 0.0  # probability of erasing a rectangle
    repeats: int = 1  # repeated augmentation
    mixup: float = 0.0  # alpha of its beta distribution
    cutmix: float = 0.0
    smoothing: float = 0.0  # of the labels

    def __post_init__(self) -> None:
        for name in ("area", "aspect", "randaugment"):
            self._set(name, tuple(getattr(self, name)))
        self._check(positive=("repeats",), natural=("resize", "pad", "randaugment"), rates=("colour", "smoothing"))
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)}")
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"area {self.area} and aspect {self.aspect} are (least, most), areas within (0, 1]")
        if self.crop == "random" and not self.resize:
            raise ValueError("crop 'random' needs resize: the side of the square that it crops from")
        if min(self.mixup, self.cutmix) < 0:
            raise ValueError("mixup and cutmix are alphas of a beta distribution: 0 (off) or above")
        if self.randaugment[1] > 30:
            raise ValueError(f"randaugment's magnitude is at most 30, got {self.randaugment[1]}")


@dataclass(frozen=True, kw_only=True)
class About(Checked):
    """What weights mean beyond the model: their origin, how photos are prepared, what the classes are called."""

    family: str = "plainvit"
    preprocess: Preprocess = Preprocess()
    class_names: tuple[str, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # setting -> where its value was learned


Model = ViTConfig | ResNetConfig
_KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}


def to_json(config: Model) -> dict[str, Any]:
    """A config as plain JSON values, with its kind."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(config, cls))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    if isinstance(config, ViTConfig) and config.stem:
        plain["stem"] = to_json(config.stem)
    return {"kind": kind, **plain}


def from_json(values: Mapping[str, Any]) -> Model:
    """The config that `to_json` wrote; an unknown kind or field is an error, not a guess."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"model kind {kind!r} is unknown; {nearest(str(kind), _KINDS)}")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else from_json(value) if isinstance(value, Mapping) else value
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
