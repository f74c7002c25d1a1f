"""Every study by its name, in the order of the claims' numbers; and one of the user's own, as FILE.py:STUDY.

    plainvit study positions                  plainvit study my.py:STUDY

A file of the user's is run: name only files that you trust.
"""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plainvit.config import nearest
from plainvit.recipes import run_file

if TYPE_CHECKING:  # which loads torch; the list of files does not
    from plainvit.studies.study import Study

FILES = (
    *("positions", "data_size", "transfer", "regularisation", "compute", "scaling", "pooling", "optimisers", "axial"),
    *("learned", "rollout", "masked", "few_shot", "averaging", "speed", "choices"),
)


def studies() -> "dict[str, Study]":
    found = [study for file in FILES for study in importlib.import_module(f"plainvit.studies.{file}").STUDIES]
    return {study.name: study for study in sorted(found, key=lambda study: study.number)}


def study(name: str) -> "Study":
    known = studies()
    if name not in known:
        raise ValueError(f"there is no study {name!r}; {nearest(name, known)}")
    return known[name]


def own_study(word: str) -> "Study":
    """The study of FILE.py:STUDY, with a name that is not taken and can be a folder's."""
    from plainvit.studies.study import Study

    file, _, name = (word + ":" if word.endswith(".py") else word).rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}, which the study {word} names")
    module = run_file(Path(file))
    made = [one for one, value in vars(module).items() if isinstance(value, Study)]
    if name not in made:
        hint = f"it has {', '.join(made)}" if made else "it has none"
        fault = f"has no study {name!r}" if name else "is a file of studies: name the one too"
        raise ValueError(f"{file} {fault}; {hint}; a study of your own is FILE.py:STUDY")
    found: Study = getattr(module, name)
    if not re.fullmatch(r"\w[\w-]*", found.name) or found.name in (*studies(), "runs", "all"):
        raise ValueError(f"{file}: a study cannot be named {found.name!r}: give it a word of its own, as my-study")
    return replace(found, given=word)
