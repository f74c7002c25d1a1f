"""Weights from format to format and back, bit for bit; what a format cannot hold, by a table written by hand.

The table below says, from the libraries' own classes, which parts of which model each format lacks. The names of our
own format are frozen in golden/keys_plainvit.txt, its description of a file in golden/metadata_v1.json. Files are read
here by safetensors, NumPy and torch, not by plainvit.
"""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import tiny
import torch
from peer_models import timm_bit, timm_hybrid
from torch import Tensor

import plainvit
from plainvit.config import About, Preprocess
from plainvit.names import configure
from plainvit.weights import convert, inspect_weights
from plainvit.weights.files import CHECKSUM
from plainvit.weights.writing import UnsupportedPartError

GOLDEN = Path(__file__).parent / "golden"
State = dict[str, Tensor]


# Which format holds which model ---------------------------------------------------------------------------------------

# format: file name, format's name, and what a bare file cannot say
FORMATS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plainvit": ("m.safetensors", "plainvit", {}),
    "google": ("m.npz", "google", {}),
    "timm": ("m.safetensors", "timm", {}),
    "timm pth": ("m.pth", "timm", {"heads": 4}),
    "timm folder": ("folder", "timm", {}),
    "transformers": ("folder", "transformers", {}),
    "torchvision": ("m.safetensors", "torchvision", {}),
    "torchvision pth": ("m.pth", "torchvision", {"heads": 4}),
}


def exact(**settings: Any) -> partial[Any]:
    return partial(tiny.vit, numerics="timm", **{"image_size": 32} | settings)


def tanh(**settings: Any) -> partial[Any]:
    return partial(tiny.vit, numerics="google", **{"image_size": 32} | settings)


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
NO_CLASS = {"class_token": False, "posemb_prefix": "none"}
HYBRID = partial(tiny.hybrid, blocks=(1,), patch=2, image_size=(32, 32))
MODELS: dict[str, partial[Any]] = {
    "exact GELU": exact(),
    "tanh GELU": tanh(),
    "eps 1e-12": exact(norm_eps=1e-12),
    "ReLU": exact(activation="relu"),
    "ImageNet pixels": tanh(**IMAGENET),
    "distilled": exact(distillation=True),
    "registers with rows": exact(registers=3, posemb_prefix="all"),
    "registers without rows": exact(registers=3, posemb_prefix="none"),
    "registers, class row": exact(registers=3),
    "one register with a row": exact(registers=1, posemb_prefix="all"),
    "LayerScale": exact(layer_scale=0.1),
    "hidden layer": exact(representation=20),
    "hidden layer, tanh GELU": tanh(representation=20),
    "pooler without head": tanh(representation=20, classes=0),
    "average, no class token": tanh(**NO_CLASS, pool="average"),
    "average, fc_norm": exact(pool="average", norm_pooled=True),
    "average, class token, norm": exact(pool="average"),
    "attention pooling": tanh(**NO_CLASS, pool="attention"),
    "attention pooling, class token": tanh(pool="attention"),
    "no rows before the patches": tanh(posemb_prefix="none"),
    "rectangle": exact(image_size=(24, 40)),
    "hybrid, timm's": partial(HYBRID, numerics="timm"),
    "hybrid, Google's": HYBRID,
    "BiT, timm's": partial(tiny.bit, blocks=(1,), numerics="timm"),
    "BiT, Google's": partial(tiny.bit, torch.float16, (2, 2, 2, 2)),  # the smallest that has one of BiT's own shapes
    "2-D positions": tanh(posemb="2d"),
    "no positions": tanh(posemb="none"),
    "relative positions": tanh(posemb="relative"),
    "positions at every layer": tanh(posemb_at="every"),
    "post-norm": tanh(norm="post"),
    "axial": tanh(axial=True, class_token=False, pool="average"),
}
# The parts of each model, besides its activation, that a format does not support. big_vision has a class token only
# where it is read out
UNSUPPORTED_PARTS = """
model                          | google             | timm        | timm folder | transformers     | torchvision
exact GELU                     |                    |             |             |                  |
tanh GELU                      |                    |             |             |                  |
eps 1e-12                      | norm_eps           | norm_eps    | norm_eps    |                  | norm_eps
ReLU                           |                    |             |             |                  |
ImageNet pixels                | normalization      |             |             |                  |
distilled                      | distillation       |             |             |                  | distillation
registers with rows            | registers          |             |             | registers        | registers
registers without rows         | registers          |             |             | posemb registers | posemb registers
registers, class row           | registers          | registers   | registers   | registers        | registers
one register with a row        | registers          |             |             |                  | registers
LayerScale                     | layer_scale        |             |             | layer_scale      | layer_scale
hidden layer                   |                    | pre_logits  | pre_logits  | pre_logits       |
hidden layer, tanh GELU        |                    | pre_logits  | pre_logits  | pre_logits       |
pooler without head            |                    | pre_logits  | pre_logits  |                  |
average, no class token        |                    |             |             |                  | pool
average, fc_norm               | pool               |             |             | pool             | pool
average, class token, norm     | pool               | pool        |             | pool             | pool
attention pooling              |                    |             |             | head             | pool
attention pooling, class token | pool               |             |             | head pool        | pool
no rows before the patches     |                    |             |             | posemb           | posemb
rectangle                      |                    |             |             |                  | image_size
hybrid, timm's                 | standardize        |             |             |                  | stem
hybrid, Google's               |                    | standardize | standardize | standardize      | stem
BiT, timm's                    | blocks standardize |             |             | resnet           | resnet
BiT, Google's                  |                    | standardize | standardize | resnet           | resnet
2-D positions                  | posemb             | posemb      | posemb      | posemb           | posemb
no positions                   | posemb             |             |             | posemb           | posemb
relative positions             | posemb             | posemb      | posemb      | posemb           | posemb
positions at every layer       | posemb_at          | posemb_at   | posemb_at   | posemb_at        | posemb_at
post-norm                      | norm               | norm        | norm        | norm             | norm
axial                          | axial              | axial       | axial       | axial            | axial pool
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in UNSUPPORTED_PARTS.strip().splitlines()]
LACKING = {row[0]: dict(zip(ROWS[0][1:], row[1:], strict=True)) for row in ROWS[1:]}
ACTIVATIONS = {"google": "gelu_tanh", "timm": "gelu", "torchvision": "gelu"}  # a folder can state another


def list_lacking(name: str, format_: str) -> set[str]:
    """The parts that a format does not support; .safetensors and .pth files of a library support the same."""
    library, settings = format_.removesuffix(" pth"), MODELS[name].keywords
    activation = settings.get("activation", "gelu" if settings.get("numerics") == "timm" else "gelu_tanh")
    other = "BiT" not in name and activation != ACTIVATIONS.get(library, activation)
    return {*LACKING[name].get(library, "").split(), *(("activation",) if other else ())}


# timm's config.json has to name one of its own models, and these shapes are none
NAMELESS = ("hybrid, timm's", "BiT, timm's")
# models that go through bare PyTorch files as well, whose weights are those of the safetensors
ALSO_BARE = ("exact GELU", "distilled", "registers with rows", "average, fc_norm", "hybrid, timm's", "BiT, timm's")
# torchvision always has a head to load; the rest of these cases is beside the point
UNSAID = {"pooler without head": ("torchvision",), "average, class token, norm": ("timm folder",)}


def holders(name: str) -> list[str]:
    """The formats that can hold a model, by the table."""
    able = [format_ for format_ in FORMATS if not list_lacking(name, format_)]
    out = [f"{f}{suffix}" for f in UNSAID.get(name, ()) for suffix in ("", " pth")]
    out += ["timm pth", "torchvision pth"] if name not in ALSO_BARE else []
    return [f for f in able if f not in out and not (f == "timm folder" and name in NAMELESS)]


@cache
def model_of(name: str) -> Any:
    """Built once: saving leaves a model as it was, which is tested below."""
    return MODELS[name]()


def save_as(model: Any, folder: Path, format_: str, **settings: Any) -> Path:
    file, word, _ = FORMATS[format_]
    folder.mkdir()
    return plainvit.save(model, folder / file, format=word, **settings)


def raw(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What is in a file, read without plainvit: {name: (dtype, shape, bytes)}."""
    path = path / "model.safetensors" if path.is_dir() else path
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            return {name: (str(archive[name].dtype), archive[name].shape, archive[name].tobytes()) for name in archive}
    read = partial(torch.load, weights_only=True) if path.suffix == ".pth" else safetensors.torch.load_file
    return {
        name: (str(x.dtype), tuple(x.shape), x.contiguous().view(torch.uint8).numpy().tobytes())
        for name, x in read(path).items()
    }


@pytest.mark.parametrize("name", tiny.mostly_slow(MODELS, 8))
def test_roundtrip_is_bit_exact(tmp_path: Path, name: str) -> None:
    """A -> B -> A, for every ordered pair of formats that can hold the model."""
    model, able = model_of(name), holders(name)
    assert "plainvit" in able
    for a in able:
        (tmp_path / a).mkdir()
        first = save_as(model, tmp_path / a / "first", a)
        meant, wanted = meaning(first, a, model), raw(first)
        for b in (other for other in able if other != a):
            between = tmp_path / a / b
            back = tmp_path / a / f"{b} back"
            between.mkdir()
            back.mkdir()
            middle = convert(first, between / FORMATS[b][0], FORMATS[b][1], **hints(a, model))
            last = convert(middle, back / FORMATS[a][0], FORMATS[a][1], **hints(b, model))
            assert raw(last) == wanted, (a, b)
            if "pth" not in a + b:  # a bare PyTorch file forgets what is not weights
                assert meaning(last, a, model) == meant, (a, b)


def hints(format_: str, model: Any) -> dict[str, Any]:
    """A bare file of a ViT does not say its heads, nor the sides of a rectangle; nor does Google's of the latter."""
    given = dict(FORMATS[format_][2]) if hasattr(model.config, "heads") else {}
    grid = getattr(model.config, "grid", (1, 1))
    bare = "pth" in format_ or format_ == "google"
    if bare and getattr(model.config, "posemb", "") == "none":
        given["image_size"] = model.config.image_size
    elif bare and grid[0] != grid[1]:
        given["grid"] = grid
    return given


def meaning(path: Path, format_: str, model: Any) -> Any:
    return inspect_weights(path, **hints(format_, model))[0].config


UNSUPPORTED = [(name, format_) for name in MODELS for format_ in FORMATS if list_lacking(name, format_)]


@pytest.mark.parametrize(("name", "format_"), UNSUPPORTED)
def test_unsupported_parts_are_named_and_nothing_is_written(tmp_path: Path, name: str, format_: str) -> None:
    with pytest.raises(UnsupportedPartError) as caught:
        save_as(model_of(name), tmp_path / "out", format_)
    assert set(caught.value.parts) == list_lacking(name, format_)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


# Parts of other families, which neither Google's code nor torchvision has
OTHER_PARTS: dict[str, Any] = {"gated": True, "rotary": "eva02", "qk_norm": True, "norm_kind": "rms", "projection": 8}
OTHER_PARTS |= {"norm_embedding": "patches", "norm_inner": "mlp", "norm_final": False, "block_bias": "no_k"}
OTHER_PARTS |= {"embedding_bias": False}


@pytest.mark.parametrize("format_", ["google", "torchvision"])
@pytest.mark.parametrize("part", OTHER_PARTS)
def test_parts_of_other_families_are_not_written(tmp_path: Path, part: str, format_: str) -> None:
    build = tanh if format_ == "google" else exact
    with pytest.raises(UnsupportedPartError) as caught:
        save_as(build(**{part: OTHER_PARTS[part]})(), tmp_path / "out", format_)
    assert caught.value.parts == (part,)


DINOV2: dict[str, Any] = {"layer_scale": 0.1, "classes": 0}
# (format, settings that the format has in other combinations, the part that it does not have in this one)
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("timm folder", {"rotary": "axial", "activation": "gelu_tanh"}, "activation"),
    ("timm folder", {"posemb": "bias", "block_bias": "no_k", "activation": "relu"}, "activation"),
    ("timm folder", {"rotary": "eva02", "block_bias": "no_k", "rotary_grid": 7}, "rotary_grid"),
    ("timm folder", {"block_bias": "no_k", "pool": "attention"}, "pool"),
    ("timm", {"norm_embedding": "tokens", "embedding_bias": False, "norm_eps": 1e-5, "gated": True}, "gated"),
    ("transformers", DINOV2 | {"gated": True, "mlp_dim": 32}, "activation"),
    ("transformers", DINOV2 | {"pool": "token+average"}, "pool"),
    ("transformers", DINOV2 | {"image_size": (24, 40)}, "image_size"),
    ("transformers", {"pool": "attention", "classes": 0}, "pool"),
    ("transformers", {"distillation": True, "classes": 0}, "distillation"),
    ("transformers", {"posemb": "bias", "block_bias": "no_k", "layer_scale": 0.1, "pool": "average"}, "pool"),
]


@pytest.mark.parametrize(("format_", "settings", "part"), TOGETHER)
def test_parts_that_a_format_does_not_combine_are_not_written(
    tmp_path: Path, format_: str, settings: dict[str, Any], part: str
) -> None:
    with pytest.raises(UnsupportedPartError) as caught:
        save_as(exact(**settings)(), tmp_path / "out", format_)
    assert part in caught.value.parts


@pytest.mark.parametrize("format_", ["google", "timm"])
@pytest.mark.parametrize("kind", ["hybrid", "BiT"])
def test_resnet_with_other_padding_is_not_written(tmp_path: Path, kind: str, format_: str) -> None:
    """Hybrids pad as TensorFlow's SAME and BiT symmetrically, at Google and in timm; the names do not show it."""
    if kind == "BiT":
        config = configure("BiT-R26x1", numerics=format_).replace(blocks=(1,), padding="same")
    else:
        base = configure("R50x1+ViT-B/16", numerics=format_)
        stem = base.stem.replace(blocks=(1,), padding="symmetric")
        config = base.replace(stem=stem, image_size=16, patch=4, **tiny.SHAPE)
    with pytest.raises(UnsupportedPartError, match="padding"):
        plainvit.save(tiny.filled(config, torch.float32), tmp_path / "m.safetensors", format=format_)


@pytest.mark.parametrize("format_", ["plainvit", "google", "timm", "transformers", "torchvision"])
@pytest.mark.parametrize("dtype", tiny.mostly_slow([torch.bfloat16, torch.float16, torch.float32, torch.float64], 3))
def test_convert_keeps_the_dtype(tmp_path: Path, dtype: torch.dtype, format_: str) -> None:
    model = (tanh() if format_ == "google" else exact())().to(dtype)
    first = plainvit.save(model, tmp_path / "first.safetensors")
    for source, target in (("plainvit", format_), (format_, "plainvit")):
        name = FORMATS[target][0]
        (tmp_path / target).mkdir(exist_ok=True)
        first = convert(first, tmp_path / target / f"{source} {name}", target)
    assert {kind for kind, _, _ in raw(first).values()} == {str(dtype)}
    loaded = plainvit.load(first, dtype=None).state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in model.state_dict().items())


# Dropping -------------------------------------------------------------------------------------------------------------


def dropped(model: Any, folder: Path, format_: str, *parts: str) -> Any:
    """The model as the file has it that was written without these parts; with them it is an error that names them."""
    with pytest.raises(UnsupportedPartError, match="--drop") as caught:
        save_as(model, folder / "unsupported", format_)
    assert set(caught.value.parts) == set(parts)
    path = save_as(model, folder / "out", format_, drop=parts)
    return plainvit.load(path, dtype=None, **FORMATS[format_][2])


def same_weights(loaded: Any, expected: State) -> None:
    state = loaded.state_dict()
    assert set(state) == set(expected)
    for name, x in expected.items():
        assert torch.equal(state[name], x), name


# (format, part, our model, what the library has in its place)
REPLACED: list[tuple[str, str, Callable[[], Any], dict[str, Any]]] = [
    ("google", "activation", exact(), {"activation": "gelu_tanh"}),
    ("timm", "activation", tanh(), {"activation": "gelu"}),
    ("torchvision", "activation", tanh(), {"activation": "gelu"}),
    ("timm", "activation", exact(gated=True), {"activation": "silu"}),
    ("google", "norm_eps", tanh(norm_eps=1e-12), {"norm_eps": 1e-6}),
    ("timm", "norm_eps", exact(norm_eps=1e-12), {"norm_eps": 1e-6}),
    ("timm folder", "norm_eps", exact(norm_eps=1e-12), {"norm_eps": 1e-6}),
    ("torchvision", "norm_eps", exact(norm_eps=1e-12), {"norm_eps": 1e-6}),
    ("google", "normalization", tanh(**IMAGENET), {"mean": (0.5,) * 3, "std": (0.5,) * 3}),
]


@pytest.mark.parametrize(("format_", "part", "build", "expected"), REPLACED)
def test_dropped_arithmetic_is_replaced_by_the_librarys(
    tmp_path: Path, format_: str, part: str, build: Callable[[], Any], expected: dict[str, Any]
) -> None:
    model = build()
    loaded = dropped(model, tmp_path, format_, part)
    assert loaded.config == model.config.replace(**expected)
    same_weights(loaded, model.state_dict())


@pytest.mark.parametrize("format_", ["timm", "timm folder", "transformers"])
def test_dropping_pre_logits_drops_the_head(tmp_path: Path, format_: str, caplog: pytest.LogCaptureFixture) -> None:
    model = exact(representation=20)()
    loaded = dropped(model, tmp_path, format_, "pre_logits")
    assert (loaded.config.representation, loaded.config.classes) == (0, 0)
    same_weights(loaded, {n: x for n, x in model.state_dict().items() if not n.startswith(("head.", "pre_logits."))})
    assert "dropped pre_logits, and the head that reads it" in caplog.text


AIMV2: dict[str, Any] = {"norm_kind": "rms", "norm_embedding": "patches", "block_bias": "none", "gated": True}
AIMV2 |= {"pool": "average", "class_token": False, "posemb_prefix": "none", "activation": "silu", "classes": 0}


@pytest.mark.parametrize(
    ("format_", "settings"), [("google", {}), ("transformers", {}), ("transformers", AIMV2), ("torchvision", {})]
)
def test_dropped_layer_scale_is_merged_into_the_layers_before(
    tmp_path: Path, format_: str, settings: dict[str, Any]
) -> None:
    model = (tanh if format_ == "google" else exact)(layer_scale=0.1, **settings)()
    loaded = dropped(model, tmp_path, format_, "layer_scale")
    images = tiny.images(size=(32, 32))
    with torch.inference_mode():
        expected = model(images)
        assert tiny.difference(loaded(images), expected) < 1e-6 * expected.abs().max()
    assert loaded.config.layer_scale is None


@pytest.mark.parametrize("kind", ["hybrid", "BiT"])
def test_dropped_standardization_is_replaced_by_timms(tmp_path: Path, kind: str) -> None:
    """The file then means what timm computes with it: for timm, and for plainvit that reads it back."""
    model = tiny.bit(blocks=(1, 1)) if kind == "BiT" else tiny.hybrid(blocks=(1, 1), image_size=(32, 32))
    parts = ("standardize",) if kind == "BiT" else ("standardize", "activation")
    loaded = dropped(model, tmp_path, "timm", *parts)
    peer = timm_bit((1, 1)) if kind == "BiT" else timm_hybrid((1, 1))
    peer.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "m.safetensors"), strict=True)
    images = tiny.images(size=(32, 32))
    with torch.inference_mode():
        assert tiny.difference(loaded(images), peer(images * 2 - 1)) < 1e-10


@pytest.mark.parametrize("part", ["stem", "pool", "registers", "distillation", "resnet", "axial", "image_size"])
def test_essential_parts_cannot_be_dropped(tmp_path: Path, part: str) -> None:
    with pytest.raises(ValueError, match=f"--drop {part}") as caught:
        plainvit.save(exact()(), tmp_path / "m.pth", format="timm", drop=(part,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "nearest"), [({"format": "timm", "drop": ("activaton",)}, "activation"), ({"format": "tim"}, "timm")]
)
def test_misspelt_words_name_the_nearest(tmp_path: Path, arguments: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ValueError, match=f"nearest: {nearest}"):
        plainvit.save(exact()(), tmp_path / "m.pth", **arguments)


def test_a_folder_supports_what_a_bare_file_of_timm_does_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"write a folder, .* or add --drop activation"):
        plainvit.save(tanh()(), tmp_path / "m.pt", format="timm")
    for name in ("m", "m-1.5"):
        assert plainvit.load(plainvit.save(tanh()(), tmp_path / name, format="timm")).config.activation == "gelu_tanh"


@pytest.mark.parametrize("library", ["plainvit", "google", "timm", "transformers"])
def test_an_unknown_suffix_is_an_error(tmp_path: Path, library: str) -> None:
    with pytest.raises(ValueError, match=f"--format {library} writes .*another name than m.xyz"):
        plainvit.save(tanh()(), tmp_path / "m.xyz", format=library)


# Names of our own format ----------------------------------------------------------------------------------------------

ONE: dict[str, Any] = {"depth": 1, "image_size": 32}


KINDS: dict[str, Callable[[], Any]] = {
    "ViT": exact(**ONE),
    "hidden layer": exact(representation=20, **ONE),
    "distilled": exact(distillation=True, **ONE),
    "registers and LayerScale": exact(registers=3, posemb_prefix="all", layer_scale=0.1, **ONE),
    "attention pooling": exact(pool="attention", **ONE),
    "2-D positions": tanh(posemb="2d", **ONE),
    "relative positions": tanh(posemb="relative", **ONE),
    "hybrid": partial(tiny.hybrid, torch.float32, blocks=(1, 1), image_size=(32, 32), depth=1),
    "BiT": partial(tiny.bit, torch.float32, (1, 1)),
}


def test_names_are_the_golden_ones(tmp_path: Path) -> None:
    """Files of earlier versions must load; names of other formats are compared with their libraries."""
    golden: dict[str, dict[str, str]] = {}
    for line in (GOLDEN / "keys_plainvit.txt").read_text().splitlines():
        if title := re.fullmatch(r"\[(.+)\]", line):
            names = golden[title[1]] = {}
        elif line:
            name, shape = line.rsplit(" ", 1)
            names[name] = shape
    assert golden.keys() == KINDS.keys()
    for kind, build in KINDS.items():
        path = plainvit.save(build(), tmp_path / "m.safetensors")
        shapes = {name: "x".join(map(str, shape)) for name, (_, shape, _) in raw(path).items()}
        assert shapes == golden[kind], kind


# The description in our files -----------------------------------------------------------------------------------------


def described_model() -> Any:
    """A hybrid with all that a description can hold, so that a renamed field shows."""
    base = configure("R50x1+ViT-B/16", classes=2, numerics="timm")
    stem = base.stem.replace(blocks=(1,))
    settings: dict[str, Any] = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 16, "patch": (2, 4)}
    settings |= {"image_size": (8, 32), "stochastic_depth": 0.25, "dropout": 0.5, "layer_scale": 0.125}
    settings |= {"registers": 1, "posemb_prefix": "all", "mean": (0.25, 0.5, 0.75), "std": (0.125, 0.25, 0.5)}
    model = tiny.filled(base.replace(stem=stem, **settings), torch.float32)
    prepared = Preprocess(resize="crop", crop=0.75, interpolation="lanczos", antialias=False)
    model.about = About(
        family="test", preprocess=prepared, class_names=("Katze", "Hündin"), sources={"heads": "the golden file"}
    )
    return model


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata()


def golden_description() -> dict[str, Any]:
    return json.loads((GOLDEN / "metadata_v1.json").read_text(encoding="utf-8"))


def test_the_description_is_the_golden_one(tmp_path: Path) -> None:
    path = plainvit.save(described_model(), tmp_path / "m.safetensors")
    written, golden = json.loads(metadata(path)["plainvit"]), golden_description()
    assert written | {"config": written["config"] | golden["config"]} == written  # later settings have defaults
    assert written | {"config": None} == golden | {"config": None}
    assert set(metadata(path)) == {"plainvit", CHECKSUM}


def write_described(path: Path, description: dict[str, Any], model: Any) -> Path:
    safetensors.torch.save_file(model.state_dict(), path, {"plainvit": json.dumps(description)})
    return path


def test_file_of_schema_1_loads(tmp_path: Path) -> None:
    """The golden description, not one written by this version, says what the weights mean."""
    model = described_model()
    golden = golden_description()
    loaded = plainvit.load(write_described(tmp_path / "m.safetensors", golden, model))
    assert (loaded.config, loaded.about) == (model.config, model.about)
    same_weights(loaded, model.state_dict())
