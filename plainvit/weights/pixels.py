"""Mean, std, resize, crop and interpolation: set by the caller, or assumed and reported.

plainvit.load("m.pth", mean=0.5, std=0.5, crop=0.9)        plainvit evaluate m.pth --mean 0.5 --std 0.5 --crop 0.9
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from plainvit.config import nearest
from plainvit.weights.layout import DetectedModel
from plainvit.weights.shapes import GIVEN

HALF: dict[str, Any] = {"mean": (0.5,), "std": (0.5,)}
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP: dict[str, Any] = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
SIDECARS = ("config.json", "open_clip_config.json", "the image processor's config")
STATED = (*SIDECARS, GIVEN)  # sources that are no assumption start with one


class Pixels(TypedDict, total=False):
    """How an image becomes the model's input. None: as the file says, or by the convention of its format."""

    mean: float | Sequence[float] | None
    std: float | Sequence[float] | None
    resize: Literal["squash", "crop", "squash-crop"] | None
    crop: float | None
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] | None
    antialias: bool | None


def set_pixels(detected: DetectedModel, pixels: Pixels) -> None:
    """Replaces the settings that the caller gives."""
    for name in pixels:
        if name not in Pixels.__annotations__:
            raise TypeError(f"load() has no argument {name!r}; {nearest(name, Pixels.__annotations__)}")
    given: dict[str, Any] = {name: value for name, value in pixels.items() if value is not None}
    if not given:
        return
    detected.sources = {"std": find_source(detected, "std")} | detected.sources | dict.fromkeys(given, GIVEN)
    for name in {"mean", "std"} & given.keys():
        value = given.pop(name)
        values = (value,) if isinstance(value, int | float) else tuple(value)
        detected.config = detected.config.replace(**{name: values})
    detected.preprocess = detected.preprocess.replace(**given)
    if "crop" in given and detected.preprocess.resize == "squash":
        raise ValueError("--crop needs a center crop: add --resize crop or --resize squash-crop")


def find_source(detected: DetectedModel, name: str) -> str:
    """The source of a preprocessing setting."""
    group = "mean" if name in ("mean", "std") else "preprocess"
    return detected.sources.get(name, detected.sources.get(group, detected.default))


def list_assumptions(detected: DetectedModel) -> list[str]:
    """A note for each setting that is an assumption, and one for all about pixels."""
    settings = {name: source for name, source in detected.sources.items() if name not in ("mean", "preprocess")}
    notes = [f"{name}: {source}" for name, source in settings.items() if source.startswith("assumed")]
    pixels = _describe_pixels(detected)
    return [*notes, pixels] if pixels else notes


def _describe_pixels(detected: DetectedModel) -> str:
    """One line with what neither the file, nor one next to it, nor the caller states about pixels; "" if nothing."""
    preprocess = detected.preprocess
    values: dict[str, object] = {
        "mean": " ".join(map(str, _merge_equal(detected.config.mean))),
        "std": " ".join(map(str, _merge_equal(detected.config.std))),
        "resize": preprocess.resize,
        "crop": f"{preprocess.crop:.4g}",
        "interpolation": preprocess.interpolation + ("" if preprocess.antialias else " without antialias"),
    }
    if preprocess.resize == "squash":
        del values["crop"]
    sources = {name: find_source(detected, name) for name in values}
    sources = {name: source for name, source in sources.items() if not source.startswith(STATED)}
    if not sources:
        return ""
    settings = ", ".join(f"{name} {values[name]}" for name in sources)
    flags = ", ".join(f"--{name}" for name in sources)
    reasons = (source.removeprefix("assumed: ").removeprefix("that of ") for source in sources.values())
    why = "; ".join(dict.fromkeys(reasons))
    how = "if it was trained with others (for `train` and `serve`: with `convert`)"
    return f"assumed {settings}, as in {why}; set {flags} {how}"


def _merge_equal(values: tuple[float, ...]) -> tuple[float, ...]:
    return values[:1] if len(set(values)) == 1 else values
