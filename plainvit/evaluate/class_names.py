"""Class names of models and data: read them, and match them.

    plainvit evaluate weights.safetensors --data photos/ --class-names names.txt

Names are matched exactly, else without case and punctuation, else by their first synonym ("tench, Tinca tinca").
WordNet ids match the names of ImageNet. Classes that are numbers are matched by number.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plainvit.data.decode import DataError
from plainvit.data.imagenet import class_names as imagenet_names
from plainvit.data.imagenet import wordnet_ids
from plainvit.data.sources import Source

log = logging.getLogger("plainvit")
SIZE_LIMIT = 2**24  # bytes of a file of class names
IMAGENET_CLASSES = 1000


def read_class_names(path: Path, classes: int) -> tuple[str, ...]:
    """Names from a file: one per line, or a JSON list. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"--class-names {path}: there is no such file")
    if path.stat().st_size > SIZE_LIMIT:
        raise ValueError(f"--class-names {path} is above the limit of {SIZE_LIMIT >> 20} MiB")
    try:
        text = path.read_text(encoding="utf-8").strip()
        names = json.loads(text) if text.startswith("[") else text.splitlines()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--class-names {path} has neither one name per line nor a JSON list: {error}") from error
    if len(names) != classes:
        raise ValueError(f"--class-names {path} has {len(names):,} names, but the model has {classes:,} classes")
    return tuple(str(name).strip() for name in names)


def default_class_names(classes: int, source: str) -> tuple[str, ...]:
    """Names for a model without names: ImageNet-1k's for 1,000 classes, else numbers."""
    if classes != IMAGENET_CLASSES:
        return tuple(map(str, range(classes)))
    log.warning("note: %s has 1,000 classes without names: ImageNet-1k's are used (or --class-names)", source)
    return imagenet_names()


# Matching -------------------------------------------------------------------------------------------------------------


def match_classes(source: Source, classes: int, names: Sequence[str]) -> np.ndarray:
    """The model's class of each class of the data; raises DataError where they cannot be matched.

    Args:
        source: The data.
        classes: The number of classes of the model.
        names: Names of the model's classes, if known; numbers count as unknown.
    """
    theirs, data = source.classes, source.spec or "the data"
    names = () if are_numbers(names) else names
    matches = _match_names(theirs, names)
    missing = [name for name, match in zip(theirs, matches, strict=True) if match is None]
    if not missing and len(set(matches)) == len(matches):
        if len(theirs) < len(names):
            log.warning("note: the classes of %s are %d of the model's %d, by name", data, len(theirs), len(names))
        elif matches != list(range(len(matches))):
            log.warning("note: the model's classes are in another order than those of %s: matched by name", data)
        return np.array(matches, int)
    in_place = len(theirs) == classes and all(match in (None, position) for position, match in enumerate(matches))
    if len(missing) < len(theirs) and not in_place:
        wrong = f"{len(missing):,} of the {len(theirs):,} classes" if missing else "two equal classes"
        raise DataError(
            f"the model's class names lack {wrong} of {data}{f', such as {missing[0]!r}' if missing else ''}: "
            "rename the class folders, or give the model's names with --class-names FILE"
        )
    if are_numbers(theirs) and max(map(int, theirs)) < classes:
        if names or len(theirs) != classes or list(theirs) != sorted(theirs):  # 0 to 9 have one order, 0 to 10 two
            log.warning("note: the classes of %s are matched by number", data)
        return np.array([int(name) for name in theirs])
    if len(theirs) != classes:
        raise DataError(
            f"the model has {classes:,} classes, but {data} has {len(theirs):,}: use data with the model's classes, "
            "fine-tune the model, or give the model's names with --class-names FILE"
        )
    kind = "other class names" if names else "no class names"
    problem = "the model has %s: the classes of %s are matched by their order (0 is %r); check it, or use --class-names"
    log.warning(problem, kind, data, theirs[0])
    return np.arange(classes)


def _match_names(theirs: Sequence[str], names: Sequence[str]) -> list[int | None]:
    exact = {name: label for label, name in enumerate(names)}
    loose: dict[str, set[int]] = {}
    for label, name in enumerate(names):
        for key in {_simplify(name), _simplify(name.partition(",")[0])}:
            loose.setdefault(key, set()).add(label)
    if is_imagenet(names):
        exact = {**dict(zip(imagenet_names(), range(IMAGENET_CLASSES), strict=True)), **exact}
        exact |= dict(zip(wordnet_ids(), range(IMAGENET_CLASSES), strict=True))
        for label, name in enumerate(imagenet_names()):
            loose.setdefault(_simplify(name), set()).add(label)
    matches: list[int | None] = []
    for name in theirs:
        wordnet = re.match(r"n\d{8}(?!\d)", name)  # also of folders such as n01440764_tench
        near = loose.get(_simplify(name), set()) | loose.get(_simplify(name.partition(",")[0]), set())
        match = exact.get(name, exact.get(wordnet[0]) if wordnet else None)
        matches.append(match if match is not None or len(near) != 1 else next(iter(near)))
    return matches


def is_imagenet(names: Sequence[str]) -> bool:
    """Whether these are ImageNet-1k's classes in its order: WordNet ids, or most of the readable names."""
    if len(names) != IMAGENET_CLASSES:
        return False
    firsts = [_simplify(name.partition(",")[0]) for name in names]
    same = sum(first == _simplify(name) for first, name in zip(firsts, imagenet_names(), strict=True))
    return tuple(names) == wordnet_ids() or same > IMAGENET_CLASSES // 2


def _simplify(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name.casefold()).strip()


def are_numbers(names: Sequence[str]) -> bool:
    return bool(names) and all(name.isdecimal() and name.isascii() for name in names)
