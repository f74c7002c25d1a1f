"""Not written yet."""

from plainvit.studies.study import Study

STUDIES: tuple[Study, ...] = ()
