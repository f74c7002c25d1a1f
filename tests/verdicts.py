"""Verdicts of studies on planted results."""

from collections.abc import Callable

from plainvit.studies.study import Results, Study, Verdict, table


def check(planted: Callable[..., Results], study: Study, means: dict[str, float], outcome: str) -> Verdict:
    """The verdict, which two seeds never allow; the table and the figure come out as well."""
    found = planted(study, means)
    verdict = study.decide(found)
    assert verdict.outcome == outcome, verdict.why
    assert study.decide(planted(study, means, seeds=2)).outcome == "not decided"
    assert f"**{outcome}**" in table(study, found, verdict)
    assert study.draw(found).axes
    return verdict
