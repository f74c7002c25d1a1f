"""Workers of studies that run in this process, for tests."""

from concurrent.futures import Future
from typing import Any

from plainvit.studies.execute import Settings, run_studies
from plainvit.studies.runs import Task, execute
from plainvit.studies.study import Study
from plainvit.studies.verdict import Verdict


def run_study(study: Study, settings: Settings, workers: Any = None) -> Verdict:
    """Run one study. Raises the reason if there is no verdict."""
    ((_, verdict),) = run_studies([study], settings, workers or InProcess())
    if isinstance(verdict, Exception):
        raise verdict
    return verdict


class InProcess:
    """Workers with the interface of `plainvit.studies.runs.Workers`."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.running: dict[Future, tuple[Task, None]] = {}
        self.names: list[str] = []
        self.measured: list[tuple[Any, ...]] = []

    @property
    def free(self) -> tuple[None, ...]:
        return (None,) * (self.count - len(self.running))

    def execute(self, task: Task) -> dict[str, Any]:
        return execute(task)

    def start(self, task: Task) -> None:
        future: Future = Future()
        self.names.append(task.folder.name)
        self.measured.append(task.measures)
        try:
            future.set_result(self.execute(task))
        except (ValueError, OSError) as error:
            future.set_exception(error)
        self.running[future] = task, None

    def wait(self, seconds: float | None = None) -> list[tuple[Task, Future]]:  # noqa: ARG002
        ended = [(task, future) for future, (task, _) in self.running.items()]
        self.running.clear()
        return ended

    def terminate(self) -> None:
        raise AssertionError("nothing is left running")
