"""Batch prediction on a Ray cluster with Ray Data; the rows equal those of one machine.

    plainvit predict runs/photos /shared/photos --out results.jsonl --engine ray [--address HOST:PORT]

The model is sent through Ray. Images are not: every machine reads them from the same paths, and needs the same version
of plainvit. Errors are returned as values, as Ray prints the full traceback of an exception. A cluster started here
requires a random token, keeps its dashboard on the loopback interface, sends no usage data, and ends with the job.
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
from plainvit.evaluate.predict import MemoryFault, OutputBatches, PredictionJob
from plainvit.evaluate.predictor import Predictor
from plainvit.runtime.launch import environment_set

THREADS = 4  # per copy of the model on CPUs
MAX_BLOCKS = 10_000  # largest number of tasks of a job
# Environment of a cluster started here, read when Ray is imported. The last setting, meant for Windows and macOS, keeps
# all ports on the loopback interface.
LOCAL_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
FAULTS: dict[str, type[ValueError]] = {"DataError": DataError, "MemoryFault": MemoryFault, "ValueError": ValueError}
log = logging.getLogger("plainvit")


@dataclass(frozen=True)
class Cluster:
    """A connected cluster and the number of copies of the model; call it to predict."""

    ray: ModuleType
    copies: int
    threads: int
    device: str

    def precision(self, name: str) -> Literal["fp32", "bf16"]:
        return "bf16" if choose_precision(name, self.device) is torch.bfloat16 else "fp32"

    def __call__(self, job: PredictionJob, source: Source, steps: np.ndarray) -> OutputBatches:
        """Yields the rows of these steps as they are ready. For GPUs, tasks on any CPU decode ahead."""
        data = self.ray.data
        gpus = self.device != "cpu"
        work = self.ray.put(_Decoding(source, job))
        made = data.from_items([int(step) for step in steps], override_num_blocks=min(len(steps), MAX_BLOCKS))
        if gpus:
            made = made.map_batches(_decoded, fn_args=(work,), batch_size=1, num_cpus=1)
        made = made.map_batches(
            _Answering,
            fn_constructor_args=(self.ray.put(_Packed.of(job, self.device)), work),
            compute=data.ActorPoolStrategy(min_size=1, max_size=self.copies),
            batch_size=1,
            **({"num_gpus": 1} if gpus else {"num_cpus": self.threads}),
        )
        try:
            for row in made.iter_rows():
                if row["fault"]:
                    raise _decode_error(row["fault"])
                yield int(row["step"]), pa.ipc.open_stream(row["rows"]).read_all()
        except self.ray.exceptions.RayError as error:  # such as a lost machine or no memory left
            raise ValueError(f"the Ray job failed: {_last_line(error)}") from error


@contextlib.contextmanager
def connect_cluster(address: str | None, device: str = "auto") -> Iterator[Cluster]:
    """Connects to a cluster or, without an address, starts one on this machine for the block."""
    address = address or os.environ.get("RAY_ADDRESS")
    settings = {**LOCAL_CLUSTER, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with environment_set({"RAY_BACKEND_LOG_LEVEL": "fatal", **({} if address else settings)}):
        ray = _import_ray()
        was_connected = ray.is_initialized()
        try:
            if not was_connected:
                _connect(ray, address)
            yield _size_cluster(ray, device)
        finally:
            if not was_connected:
                ray.shutdown()


def _connect(ray: ModuleType, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        with _mute_stderr():
            ray.init("local", dashboard_host="127.0.0.1", **options)
        return
    try:
        _check_address(address)
        with _mute_stderr():
            connection = ray.init(address, **options)
        _warn_without_token(connection.address_info)
    except (OSError, ray.exceptions.RayError) as error:
        raise ValueError(f"cannot connect to a Ray cluster at --address {address}: {_last_line(error)}") from error


@contextlib.contextmanager
def _mute_stderr() -> Iterator[None]:
    """Ray's core writes to standard error at any log level."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _check_address(address: str) -> None:
    """Raises OSError if nothing listens at the address, which Ray would retry for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            pass


def _import_ray() -> ModuleType:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install 'ray[data]>=2.52'") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray


def _size_cluster(ray: ModuleType, device: str) -> Cluster:
    """One copy of the model per GPU; without GPUs one per THREADS cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device != "cpu" and gpus:
        return Cluster(ray, gpus, 1, "cuda")
    if device not in ("auto", "cpu"):
        raise ValueError(f"--device {device} is not available: the cluster has no GPU; use --device cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise ValueError("the Ray cluster has no free CPU")
    threads = min(*cores, THREADS)
    return Cluster(ray, sum(count // threads for count in cores), threads, "cpu")


def _warn_without_token(info: Any) -> None:
    """Warns if anybody who can reach the cluster can run code on it."""
    page = info.get("webui_url") or ""
    if not _requires_token(page):
        public = f", and its dashboard is at {page}" if page and not page.startswith(("127.", "localhost")) else ""
        log.warning("this Ray cluster requires no token%s: start it with RAY_AUTH_MODE=token", public)


def _requires_token(page: str) -> bool:
    """Asks the dashboard; without one, whether this process has used a token."""
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
    """A job to send: the model on the CPU and the settings of its Predictor."""

    model: Any
    settings: dict[str, Any]
    top: int
    version: str

    @classmethod
    def of(cls, job: PredictionJob, device: str) -> "_Packed":
        one = job.predictor
        precision = "bf16" if one.dtype is torch.bfloat16 else "fp32"
        settings = {"device": device, "precision": precision, "preprocess": one.preprocess, "batch": one.batch}
        model = one.model if one.device == "cpu" else copy.deepcopy(one.model).cpu()
        return cls(model, settings, job.top, __version__)


class _Decoding:
    """Decodes the images of any step."""

    def __init__(self, source: Source, job: PredictionJob) -> None:
        one = job.predictor
        self.source, self.samples = source, list(_sample_files(source))
        self.batches = Evaluate(source, np.arange(len(source)), one.batch, one.size, one.preprocess)

    def check(self) -> None:
        """Raises DataError on a machine without the files; otherwise each image would be a row with an error."""
        for path in self.samples:
            if not os.path.exists(path):  # noqa: PTH110 - any name
                raise DataError(f"{socket.gethostname()} has no file {path}: use a path that all machines share")


def _sample_files(source: Source) -> Iterator[str]:
    """One existing file of each part of the source."""
    for part in source.sources if isinstance(source, Inputs) else [source]:
        yield from itertools.islice(filter(os.path.exists, part.files()), 1)


def _decoded(batch: dict[str, Any], work: Any) -> dict[str, Any]:
    """Ray task: decodes the images of one step."""
    import ray

    decoding: _Decoding = ray.get(work)
    pixels, bad, fault = b"", [], ""
    try:
        decoding.check()
        images, _, _, bad = decoding.batches[int(batch["item"][0])]
        pixels = images.numpy().tobytes()
    except Exception as error:
        fault = _encode_error(error)
    return {"item": batch["item"], "pixels": [pixels], "bad": [json.dumps(bad)], "fault": [fault]}


class _Answering:
    """Ray actor: one copy of the model."""

    def __init__(self, packed: Any, work: Any) -> None:
        self.packed, self.sent = packed, work

    @functools.cached_property
    def job(self) -> PredictionJob:
        import ray

        found: _Packed = ray.get(self.packed)
        if found.version != __version__:
            raise ValueError(f"{socket.gethostname()} has plainvit {__version__}, but the job needs {found.version}")
        model = found.model.to(choose_device(found.settings["device"]))
        return PredictionJob(Predictor(model, **found.settings), found.top)

    @functools.cached_property
    def work(self) -> _Decoding:
        import ray

        found: _Decoding = ray.get(self.sent)
        found.check()
        return found

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows, fault = b"", str(batch["fault"][0]) if "fault" in batch else ""
        try:
            rows = b"" if fault else self._predict(batch)
        except Exception as error:
            fault = _encode_error(error)
        return {"step": [int(batch["item"][0])], "rows": [rows], "fault": [fault]}

    def _predict(self, batch: dict[str, Any]) -> bytes:
        step, size = int(batch["item"][0]), self.job.batch
        images, bad = self._unpack(batch) if "pixels" in batch else itemgetter(0, 3)(self.work.batches[step])
        reasons, positions = dict(bad), range(step * size, step * size + len(images))
        names, errors = [self.work.source.name(at) for at in positions], [reasons.get(at) for at in positions]
        table = self.job.rows(self.job.ask(images), names, errors)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()

    def _unpack(self, batch: dict[str, Any]) -> tuple[Tensor, list[tuple[int, str]]]:
        pixels = torch.frombuffer(bytearray(batch["pixels"][0]), dtype=torch.uint8)
        return pixels.view(-1, 3, *self.job.predictor.size), json.loads(batch["bad"][0])


def _encode_error(error: Exception) -> str:
    """An error as JSON: type and message. Ray keeps the log of the machine."""
    log.exception("this step failed")
    kind = next((name for name, one in FAULTS.items() if isinstance(error, one)), "")
    return json.dumps([kind, str(error) if kind else f"the Ray job failed: {type(error).__name__}: {error}"])


def _decode_error(fault: str) -> Exception:
    kind, message = json.loads(fault)
    return FAULTS.get(kind, ValueError)(message)


def _last_line(error: BaseException) -> str:
    """Ray's messages contain a traceback; the cause is in the last line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
