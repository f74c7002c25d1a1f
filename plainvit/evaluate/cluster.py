"""The same questions answered by the machines of a Ray cluster, through Ray Data; the same rows come back.

    plainvit predict runs/photos /shared/photos --out results.jsonl --engine ray [--address HOST:PORT]

The model travels through Ray; the pictures do not: every machine reads them under the same paths, and has the same
plainvit. What goes wrong over there comes back as a value: of an exception Ray would print the whole way it took, to
standard output too. A cluster that is started here asks for a token that nobody else has, keeps its dashboard on the
loopback interface, reports no usage, and ends with the job.
https://docs.ray.io/en/latest/data/batch_inference.html, https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

import contextlib
import copy
import functools
import itertools
import json
import logging
import os
import secrets
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from plainvit import __version__
from plainvit.data.decode import DataError
from plainvit.data.sources import Source
from plainvit.data.workers import Evaluate
from plainvit.device import choose_device, choose_precision
from plainvit.evaluate.inputs import Inputs
from plainvit.evaluate.predict import Answered, MemoryFault, Question
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.launch import environment_set

THREADS = 4  # of one copy of the model on CPUs: more copies take more memory, more threads wait for each other
BLOCKS = 10_000  # most tasks of a job
# Of a cluster that is started here. The last one, meant for Windows and macOS, keeps all its ports on the loopback
# interface; like all of Ray's constants it is read once, when Ray is imported.
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
FAULTS: dict[str, type[ValueError]] = {"DataError": DataError, "MemoryFault": MemoryFault, "ValueError": ValueError}
log = logging.getLogger("plainvit")


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process has joined, and how many copies of a model it runs. Called, it answers."""

    ray: ModuleType
    copies: int
    threads: int
    device: str

    def precision(self, name: str) -> Literal["fp32", "bf16"]:
        return "bf16" if choose_precision(name, self.device) is torch.bfloat16 else "fp32"

    def __call__(self, question: Question, source: Source, steps: np.ndarray) -> Answered:
        """The rows of these steps as they are ready. On GPUs, tasks on any CPU decode ahead of them."""
        data = self.ray.data
        gpus = self.device != "cpu"
        work = self.ray.put(_Decoding(source, question))
        made = data.from_items([int(step) for step in steps], override_num_blocks=min(len(steps), BLOCKS))
        if gpus:
            made = made.map_batches(_decoded, fn_args=(work,), batch_size=1, num_cpus=1)
        made = made.map_batches(
            _Answering,
            fn_constructor_args=(self.ray.put(_Packed.of(question, self.device)), work),
            compute=data.ActorPoolStrategy(min_size=1, max_size=self.copies),
            batch_size=1,
            **({"num_gpus": 1} if gpus else {"num_cpus": self.threads}),
        )
        try:
            for row in made.iter_rows():
                if row["fault"]:
                    raise _raised(row["fault"])
                yield int(row["step"]), pa.ipc.open_stream(row["rows"]).read_all()
        except self.ray.exceptions.RayError as error:  # of Ray itself: a machine that was lost, or had no memory left
            raise ValueError(f"the Ray job failed: {_last_line(error)}") from error


@contextlib.contextmanager
def joined(address: str | None, device: str = "auto") -> Iterator[Cluster]:
    """A running cluster or, without an address, one of this machine alone that ends with the block."""
    address = address or os.environ.get("RAY_ADDRESS")
    ours = {**OURS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with environment_set({"RAY_BACKEND_LOG_LEVEL": "fatal", **({} if address else ours)}):
        ray = _ray()
        was_there = ray.is_initialized()
        try:
            if not was_there:
                _join(ray, address)
            yield _sized(ray, device)
        finally:
            if not was_there:
                ray.shutdown()


def _join(ray: ModuleType, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        with _muted():
            ray.init("local", dashboard_host="127.0.0.1", **options)
        return
    try:
        _knock(address)
        with _muted():
            there = ray.init(address, **options)
        _warn(there.address_info)
    except (OSError, ray.exceptions.RayError) as error:
        raise ValueError(f"no Ray cluster answers at {address}: {_last_line(error)}") from error


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Ray's core tells on standard error, whatever its level, at which level it will tell things."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _knock(address: str) -> None:
    """Ray itself would try an address where nobody answers for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            pass


def _ray() -> ModuleType:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install 'ray[data]>=2.52'") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray


def _sized(ray: ModuleType, device: str) -> Cluster:
    """One copy of the model a GPU or, where there is none, one for every few cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device != "cpu" and gpus:
        return Cluster(ray, gpus, 1, "cuda")
    if device not in ("auto", "cpu"):
        raise ValueError(f"device {device!r} is not there: the cluster has no GPU; --device cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise ValueError("the Ray cluster has no CPU to run on")
    threads = min(*cores, THREADS)
    return Cluster(ray, sum(count // threads for count in cores), threads, "cpu")


def _warn(about: Any) -> None:
    """One line where anybody who can reach the cluster could run anything on it."""
    page = about.get("webui_url") or ""
    if not _asks_for_a_token(page):
        reach = f", and its dashboard answers at {page}" if page and not page.startswith(("127.", "localhost")) else ""
        log.warning("this Ray cluster asks nobody for a token%s: start it with RAY_AUTH_MODE=token", reach)


def _asks_for_a_token(page: str) -> bool:
    """The dashboard's word for it; where there is none, a cluster that let us in without a token has none."""
    if page:
        try:
            with urllib.request.urlopen(f"http://{page}/api/cluster_status", timeout=3):
                return False
        except urllib.error.HTTPError as error:
            return error.code in (401, 403)
        except OSError:
            pass
    return os.environ.get("RAY_AUTH_MODE") == "token"


# On the cluster's machines --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """A question as it travels: the model on the CPU, and how it is to be asked."""

    model: Any
    settings: dict[str, Any]
    top: int
    version: str

    @classmethod
    def of(cls, question: Question, device: str) -> "_Packed":
        asked = question.predictor
        precision = "bf16" if asked.dtype is torch.bfloat16 else "fp32"
        settings = {"device": device, "precision": precision, "preprocess": asked.preprocess, "batch": asked.batch}
        model = asked.model if asked.device == "cpu" else copy.deepcopy(asked.model).cpu()
        return cls(model, settings, question.top, __version__)


class _Decoding:
    """The pictures of any step, and their names."""

    def __init__(self, source: Source, question: Question) -> None:
        asked = question.predictor
        self.source, self.places = source, list(_places(source))
        self.made = Evaluate(source, np.arange(len(source)), asked.batch, asked.size, asked.preprocess)

    def check(self) -> None:
        """A machine that does not see the files would give a row of errors for each."""
        for path in self.places:
            if not os.path.exists(path):  # noqa: PTH110 - any name
                raise DataError(f"{socket.gethostname()} does not see {path}: put the pictures where all machines do")


def _places(source: Source) -> Iterator[str]:
    """One file of each part that this machine sees: what it does not see itself is no fault of another."""
    for part in source.sources if isinstance(source, Inputs) else [source]:
        yield from itertools.islice(filter(os.path.exists, part.files()), 1)


def _decoded(batch: dict[str, Any], work: Any) -> dict[str, Any]:
    """A task: one step's pictures."""
    import ray

    decoding: _Decoding = ray.get(work)
    pixels, bad, fault = b"", [], ""
    try:
        decoding.check()
        images, _, _, bad = decoding.made[int(batch["item"][0])]
        pixels = images.numpy().tobytes()
    except Exception as error:
        fault = _told(error)
    return {"item": batch["item"], "pixels": [pixels], "bad": [json.dumps(bad)], "fault": [fault]}


class _Answering:
    """An actor: one copy of the model."""

    def __init__(self, packed: Any, work: Any) -> None:
        self.packed, self.sent = packed, work

    @functools.cached_property
    def question(self) -> Question:
        import ray

        found: _Packed = ray.get(self.packed)
        if found.version != __version__:
            raise ValueError(f"{socket.gethostname()} has plainvit {__version__}, the job is of {found.version}")
        model = found.model.to(choose_device(found.settings["device"]))
        return Question(Predictor(model, **found.settings), found.top)

    @functools.cached_property
    def work(self) -> _Decoding:
        import ray

        found: _Decoding = ray.get(self.sent)
        found.check()
        return found

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows, fault = b"", str(batch["fault"][0]) if "fault" in batch else ""
        try:
            rows = b"" if fault else self._rows(batch)
        except Exception as error:
            fault = _told(error)
        return {"step": [int(batch["item"][0])], "rows": [rows], "fault": [fault]}

    def _rows(self, batch: dict[str, Any]) -> bytes:
        step, size = int(batch["item"][0]), self.question.batch
        images, bad = self._received(batch) if "pixels" in batch else itemgetter(0, 3)(self.work.made[step])
        wrong, places = dict(bad), range(step * size, step * size + len(images))
        names, errors = [self.work.source.name(at) for at in places], [wrong.get(at) for at in places]
        table = self.question.rows(self.question.ask(images), names, errors)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()

    def _received(self, batch: dict[str, Any]) -> tuple[Tensor, list[tuple[int, str]]]:
        pixels = torch.frombuffer(bytearray(batch["pixels"][0]), dtype=torch.uint8)
        return pixels.view(-1, 3, *self.question.predictor.size), json.loads(batch["bad"][0])


def _told(error: Exception) -> str:
    """An error as it travels: its kind, and its words. Ray keeps the log of whoever had it."""
    log.exception("this step failed")
    kind = next((name for name, one in FAULTS.items() if isinstance(error, one)), "")
    return json.dumps([kind, str(error) if kind else f"the Ray job failed: {type(error).__name__}: {error}"])


def _raised(fault: str) -> Exception:
    kind, words = json.loads(fault)
    return FAULTS.get(kind, ValueError)(words)


def _last_line(error: BaseException) -> str:
    """Ray's errors tell the whole way they took, and at the end what happened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
