"""Every study by its name, in the order of the claims' numbers."""

import importlib
from typing import TYPE_CHECKING

from plainvit.config import nearest

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
