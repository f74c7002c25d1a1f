"""What all tests share: the CPU is made safe before torch is loaded, and hypothesis is repeatable."""

from plainvit import device

device.set_environment()  # must come before torch is loaded

import gc  # noqa: E402
from collections.abc import Generator  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import small_runs  # noqa: E402
import torch  # noqa: E402

from plainvit.runtime import display  # noqa: E402

display.ACTIVITY_DELAY = 3600.0  # so that what is printed does not depend on the load
torch.set_num_threads(1)  # for models this small a second thread only waits
hypothesis.settings.register_profile("plainvit", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("plainvit")


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write a report of one line: figures take longer than small runs."""
    small_runs.without_figures(monkeypatch)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of small_runs.config() when nothing goes wrong."""
    return small_runs.complete_run(small_runs.config(), tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations write no figures and no report.html, which take longer than a small model."""
    monkeypatch.setattr("plainvit.analyse.evaluation.write_evaluation", lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is loaded with the tests stays; to look through it for garbage, over and over, took a tenth of the time."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or what is not taken down at the end is told of as leaked
