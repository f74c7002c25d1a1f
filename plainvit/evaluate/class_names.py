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
        raise ValueError(
            f"--class-names {path} has {len(names):,} names, but the model has {classes:,} classes: "
            "give one name per class of the model"
        )
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
    names = () if are_numbers(names) else names
    matches = _match_by_name(source, classes, names)
    if matches is None:
        matches = _match_by_number(source, classes, names)
    return _match_by_order(source, classes, names) if matches is None else matches


def _match_by_name(source: Source, classes: int, names: Sequence[str]) -> np.ndarray | None:
    """None if no name matches, or only those of classes that have the same number in the data and the model."""
    matches = _find_names(source.classes, names)
    missing = [name for name, match in zip(source.classes, matches, strict=True) if match is None]
    if not missing and len(set(matches)) == len(matches):
        if len(matches) < len(names):
            numbers = (source.spec or "the data", len(matches), len(names))
            log.warning("note: the classes of %s are %d of the model's %d, by name", *numbers)
        elif matches != list(range(len(matches))):
            problem = "note: the model's classes are in another order than those of %s: matched by name"
            log.warning(problem, source.spec or "the data")
        return np.array(matches, int)
    same_order = all(match in (None, position) for position, match in enumerate(matches))
    if len(missing) == len(matches) or (same_order and len(matches) == classes):
        return None
    lacking = f"{len(missing):,} of the {len(matches):,} classes" if missing else "two equal classes"
    example = f", such as {missing[0]!r}" if missing else ""
    raise DataError(
        f"the model's class names lack {lacking} of {source.spec or 'the data'}{example}: "
        "rename the class folders, or give the model's names with --class-names FILE"
    )


def _match_by_number(source: Source, classes: int, names: Sequence[str]) -> np.ndarray | None:
    """None if the classes of the data are not numbers of the model's classes."""
    numbers = source.classes
    if not are_numbers(numbers) or max(map(int, numbers)) >= classes:
        return None
    if names or len(numbers) != classes or list(numbers) != sorted(numbers):  # 0 to 9 have one order, 0 to 10 two
        log.warning("note: the classes of %s are matched by number", source.spec or "the data")
    return np.array([int(name) for name in numbers])


def _match_by_order(source: Source, classes: int, names: Sequence[str]) -> np.ndarray:
    data, count = source.spec or "the data", len(source.classes)
    if count != classes:
        theirs = names or [str(label) for label in range(classes)]
        missing = [name for name in source.classes if name not in theirs]
        raise DataError(
            f"the model has the classes {_list_some(theirs)}, but not {_list_some(missing)} of {data}: "
            f"fine-tune the model on {data}, or name all {classes:,} classes of the model with --class-names FILE"
        )
    kind = "other class names" if names else "no class names"
    problem = "the model has %s: the classes of %s are matched by their order (0 is %r); check it, or use --class-names"
    log.warning(problem, kind, data, source.classes[0])
    return np.arange(classes)


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _find_names(data_classes: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """The number of the model's class with the name of each class of the data, or None."""
    exact = {name: label for label, name in enumerate(names)}
    loose: dict[str, set[int]] = {}  # simplified name -> classes
    for label, name in enumerate(names):
        for key in _simplify_synonyms(name):
            loose.setdefault(key, set()).add(label)
    if is_imagenet(names):
        exact = {**dict(zip(imagenet_names(), range(IMAGENET_CLASSES), strict=True)), **exact}
        exact |= dict(zip(wordnet_ids(), range(IMAGENET_CLASSES), strict=True))
        for label, name in enumerate(imagenet_names()):
            loose.setdefault(_simplify(name), set()).add(label)
    return [_find_name(name, exact, loose) for name in data_classes]


def _find_name(name: str, exact: dict[str, int], loose: dict[str, set[int]]) -> int | None:
    if name in exact:
        return exact[name]
    wordnet_id = re.match(r"n\d{8}(?!\d)", name)  # also of folders such as n01440764_tench
    if wordnet_id and wordnet_id[0] in exact:
        return exact[wordnet_id[0]]
    candidates: set[int] = set().union(*(loose.get(key, ()) for key in _simplify_synonyms(name)))
    return candidates.pop() if len(candidates) == 1 else None


def _simplify_synonyms(name: str) -> set[str]:
    """The name and its first synonym, simplified."""
    return {_simplify(name), _simplify(name.partition(",")[0])}


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
