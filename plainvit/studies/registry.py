"""All studies by name, and studies from a user's file.

    plainvit study positions                  plainvit study my.py:STUDY

A user's file is executed: use only files that you trust.
"""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plainvit.recipes import import_file

if TYPE_CHECKING:  # loads torch
    from plainvit.studies.study import Study

FILES = ("choices", "data_size", "transfer", "compute", "scaling", "optimizers", "learned_structure", "masked", "speed")


def studies() -> "dict[str, Study]":
    defined = [study for file in FILES for study in importlib.import_module(f"plainvit.studies.{file}").STUDIES]
    return {study.name: study for study in sorted(defined, key=lambda study: study.number)}


def own_study(word: str) -> "Study":
    """The study FILE.py:STUDY; its name must be a valid and unused folder name."""
    from plainvit.studies.study import Study

    stem, _, name = word.rpartition(".py")
    file, name = Path(f"{stem}.py"), name.removeprefix(":")
    if not file.is_file():
        raise ValueError(f"file {file} of study {word} does not exist")
    defined = {key: value for key, value in vars(import_file(file)).items() if isinstance(value, Study)}
    if name not in defined:
        known = ", ".join(defined) or "no studies"
        raise ValueError(f"{file} has no study {name!r}: use FILE.py:STUDY; it defines {known}")
    study = defined[name]
    if not re.fullmatch(r"\w[\w-]*", study.name) or study.name in (*studies(), "runs", "all"):
        raise ValueError(f"{file}: invalid or reserved study name {study.name!r}: choose another, such as 'my-study'")
    if getattr(study.measure, "__name__", "<lambda>") == "<lambda>":
        raise ValueError(f"{file}: the measure of {name} must be a function with a name, by which results are stored")
    return replace(study, spec=word)
