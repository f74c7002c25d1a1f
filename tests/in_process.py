"""Workers of studies that run in this process, for tests."""

from concurrent.futures import Future
from typing import Any

from plainvit.studies.execute import Settings, run_studies
from plainvit.studies.runs import Job, execute
from plainvit.studies.study import Study
from plainvit.studies.verdict import Verdict


def run_study(study: Study, settings: Settings, workers: Any = None) -> Verdict:
    """Run one study. Raises the reason if there is no verdict."""
    ((_, verdict),) = run_studies([study], settings, workers or InProcess())
    if isinstance(verdict, Exception):
        raise verdict
    return verdict


class InProcess:
    """Workers with the interface of `plainvit.studies.queue.Workers`."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.running: dict[Future, tuple[Job, None]] = {}
        self.started: list[Job] = []

    @property
    def free(self) -> tuple[None, ...]:
        return (None,) * (self.count - len(self.running))

    def execute(self, job: Job) -> dict[str, Any]:
        return execute(job)

    def start(self, job: Job) -> None:
        future: Future = Future()
        self.started.append(job.for_worker())
        try:
            future.set_result(self.execute(job.for_worker()))
        except (ValueError, OSError) as error:
            future.set_exception(error)
        self.running[future] = job, None

    def wait(self) -> list[tuple[Job, Future]]:
        ended = [(job, future) for future, (job, _) in self.running.items()]
        self.running.clear()
        return ended
