"""Batch prediction on a Ray cluster with Ray Data; the rows equal those of one machine.

    plainvit predict runs/photos /shared/photos --out results.jsonl --engine ray [--address HOST:PORT]

The model is sent through Ray. Images are not: every machine reads them from the same paths, and needs the same version
of plainvit. Errors are returned as values, as Ray prints the full traceback of an exception. A cluster started here
requires a random token, listens on the loopback interface only, sends no usage data, and ends with the job.
https://docs.ray.io/en/latest/data/batch_inference.html, https://docs.ray.io/en/latest/ray-security/token-auth.html
"""

import contextlib
import copy
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from plainvit import __version__
from plainvit.data.decode import DataError
from plainvit.data.sources import Source
from plainvit.device import choose_device, choose_precision
from plainvit.evaluate.inputs import Inputs
from plainvit.evaluate.predict import OutputBatches, PredictionJob, predict_locally
from plainvit.evaluate.predictor import Predictor

THREADS = 4  # per copy of the model on CPUs
BATCHES_PER_CALL = 32  # batches per call on a GPU: each call starts the processes that decode
MAX_BLOCKS = 10_000  # largest number of tasks of a job
# Environment of a cluster started here, read when Ray is imported. The last setting, meant for Windows and macOS, keeps
# all ports on the loopback interface.
LOCAL_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Errors of an actor that are raised here with their own type, by which the command chooses its exit code
ERRORS: dict[str, type[Exception]] = {cls.__name__: cls for cls in (DataError, torch.OutOfMemoryError, ValueError)}
log = logging.getLogger("plainvit")


@dataclass(frozen=True)
class Cluster:
    """A connected cluster and the number of copies of the model; call it to predict."""

    ray: ModuleType
    device: str
    copies: int
    cores: int  # of each copy: threads of the model on a CPU, processes that decode for a GPU

    def precision(self, name: str) -> Literal["fp32", "bf16"]:
        return "bf16" if choose_precision(name, self.device) is torch.bfloat16 else "fp32"

    def __call__(self, job: PredictionJob, source: Source, steps: np.ndarray) -> OutputBatches:
        """Yields the rows of these steps as they are ready."""
        data, on_gpu = self.ray.data, self.device != "cpu"
        work = Work.pack(job, source, self.device, self.cores if on_gpu else 0)
        rows = data.from_items([int(step) for step in steps], override_num_blocks=min(len(steps), MAX_BLOCKS))
        rows = rows.map_batches(
            ModelActor,
            fn_constructor_args=(self.ray.put(work),),
            compute=data.ActorPoolStrategy(min_size=1, max_size=self.copies),
            batch_size=BATCHES_PER_CALL if on_gpu else 1,
            num_cpus=self.cores,
            **({"num_gpus": 1} if on_gpu else {}),
        )
        try:
            for row in rows.iter_rows():
                if row["error"]:
                    raise ERRORS.get(row["kind"], ValueError)(row["error"])
                yield int(row["step"]), pa.ipc.open_stream(row["rows"]).read_all()
        except self.ray.exceptions.RayError as error:  # such as a lost machine or no memory left
            raise ValueError(f"the Ray job failed: {_last_line(error)}") from error


@contextlib.contextmanager
def environment_set(settings: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, and restores their old values at the end of the block."""
    old_values = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in old_values.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def connect_cluster(address: str | None, device: str = "auto") -> Iterator[Cluster]:
    """Connects to a cluster or, without an address, starts one on this machine for the block."""
    address = address or os.environ.get("RAY_ADDRESS")
    settings = {} if address else {**LOCAL_CLUSTER, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with environment_set({"RAY_BACKEND_LOG_LEVEL": "fatal", **settings}):
        ray = _import_ray()
        was_connected = ray.is_initialized()
        try:
            if not was_connected:
                _connect(ray, address)
            yield _size_cluster(ray, device)
        finally:
            if not was_connected:
                ray.shutdown()


def _import_ray() -> ModuleType:
    try:
        import ray  # pyright: ignore
        import ray.data  # pyright: ignore
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install 'ray[data]>=2.52'") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def _connect(ray: ModuleType, address: str | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        ray.init("local", dashboard_host="127.0.0.1", **options)
        return
    host, _, port = address.rpartition("/")[2].rpartition(":")
    try:
        if host and port.isdigit():  # Ray would retry for minutes if nothing listens there
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, **options)
    except (OSError, ray.exceptions.RayError) as error:
        raise ValueError(f"cannot connect to a Ray cluster at --address {address}: {_last_line(error)}") from error


def _size_cluster(ray: ModuleType, device: str) -> Cluster:
    """One copy of the model per GPU; without GPUs one per THREADS cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [(int(node["GPU"]), int(node.get("CPU", 0))) for node in nodes if node.get("GPU", 0) >= 1]
    if device != "cpu" and gpus:
        return Cluster(ray, "cuda", sum(count for count, _ in gpus), min(cores // count for count, cores in gpus))
    if device not in ("auto", "cpu"):
        raise ValueError(f"--device {device} is not available: the cluster has no GPU; use --device cpu")
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise ValueError("the Ray cluster has no free CPU")
    threads = min(*cores, THREADS)
    return Cluster(ray, "cpu", sum(count // threads for count in cores), threads)


# On the cluster's machines --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What every machine gets: the model on the CPU, the settings of its Predictor, and where the images are."""

    model: Any
    settings: dict[str, Any]
    top: int
    source: Source
    samples: tuple[str, ...]  # one existing file of each input
    workers: int  # processes that decode
    version: str = __version__

    @classmethod
    def pack(cls, job: PredictionJob, source: Source, device: str, workers: int) -> "Work":
        local = job.predictor
        precision = "bf16" if local.dtype is torch.bfloat16 else "fp32"
        settings = {"device": device, "precision": precision, "preprocess": local.preprocess, "batch": local.batch}
        settings["class_names"] = local.class_names if job.top else None
        model = local.model if local.device == "cpu" else copy.deepcopy(local.model).cpu()
        samples: list[str] = []
        for part in source.sources if isinstance(source, Inputs) else [source]:
            existing = filter(os.path.exists, part.files())
            samples += itertools.islice(existing, 1)
        return cls(model, settings, job.top, source, tuple(samples), workers)

    def open_job(self) -> PredictionJob:
        """Raises ValueError if the version differs or files are missing."""
        host = socket.gethostname()
        if self.version != __version__:
            raise ValueError(
                f"{host} has plainvit {__version__}, but the job needs {self.version}: "
                "install the same version on all machines"
            )
        for path in self.samples:
            if not os.path.exists(path):  # noqa: PTH110 - any name
                raise DataError(f"{host} has no file {path}: use a path that all machines share")
        model = self.model.to(choose_device(self.settings["device"]))
        return PredictionJob(Predictor(model, **self.settings), self.top)


class ModelActor:
    """Ray actor: one copy of the model, which predicts some steps as a single machine would."""

    def __init__(self, work: Any) -> None:
        self.sent, self.job = work, None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        import ray  # pyright: ignore

        work: Work = ray.get(self.sent)
        try:
            self.job = self.job or work.open_job()
            outputs = list(predict_locally(self.job, work.source, np.asarray(batch["item"]), work.workers))
            steps, tables = zip(*outputs, strict=True)
            none = [""] * len(steps)
            return {"step": list(steps), "rows": [_to_bytes(table) for table in tables], "kind": none, "error": none}
        except Exception as error:
            log.exception("these steps failed")  # Ray keeps the log of the machine
            kind = next((name for name, cls in ERRORS.items() if isinstance(error, cls)), "")
            message = str(error) if kind else f"the Ray job failed: {type(error).__name__}: {error}"
            return {"step": [-1], "rows": [b""], "kind": [kind], "error": [message]}


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def _last_line(error: BaseException) -> str:
    """Ray's messages contain a traceback; the cause is in the last line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
