"""Several processes on one machine: equal to one process, restarted after a kill, ended together."""

import html
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
import small_runs
import torch
from small_runs import losses, status
from torch import Tensor

import plainvit
from plainvit.device import choose_device
from plainvit.runtime.checkpoint import Checkpoints, hash_tensors
from plainvit.runtime.distributed import DisagreementError, LostError, World, join, raise_lost_peer
from plainvit.runtime.folder import read_metrics
from plainvit.train.step import PendingStep

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
RECIPE = """
from plainvit.config import *

def recipe():
    model = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=(4, 4), image_size=(8, 8), classes=0)
    return Config(
        model=model, data="digits", holdout=0.1, steps=STEPS, batch=32, evaluations=2, workers=0, ema=0.9, timeout=60,
        augment=Augment(crop="pad", pad=1, flip=0.0, mixup=0.5), save_every=SAVE,
        optim=Optim(lr=3e-3, warmup=4, weight_decay=0.1),
    )
"""


def train(folder: Path, *flags: str, steps: int = 12, save: int = 0) -> subprocess.CompletedProcess[str]:
    line = command(folder, *flags, steps=steps, save=save)
    return subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)


def start(folder: Path, *flags: str, steps: int, save: int = 0) -> subprocess.Popen[str]:
    """A launcher of two processes, in the background."""
    line = command(folder, "--devices", "2", *flags, steps=steps, save=save)
    return subprocess.Popen(line, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def command(folder: Path, *flags: str, steps: int = 12, save: int = 0) -> list[str]:
    recipe = folder.parent / f"recipe_{steps}_{save}.py"
    recipe.write_text(RECIPE.replace("STEPS", str(steps)).replace("SAVE", str(save)))
    return [sys.executable, "-m", "plainvit", "train", f"{recipe}:recipe", "--out", str(folder), *flags]


def state(folder: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(folder / "checkpoints", 9).read_newest()
    assert found
    return found[0]


def wait_until(happened: Callable[[], object], launcher: subprocess.Popen[Any] | None = None) -> None:
    """Until it happened, or the launcher ended."""
    deadline = time.monotonic() + 60
    while not happened() and (launcher is None or launcher.poll() is None):
        assert time.monotonic() < deadline, "it did not happen within 60 s"
        time.sleep(0.02)


def wait_for_steps(folder: Path, launcher: subprocess.Popen[Any], steps: int = 5) -> None:
    wait_until(lambda: len(losses(folder)) >= steps, launcher)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process: this one, where torch is already loaded."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        small_runs.without_figures(patch)
        assert small_runs.run_command(*command(folder, "--device", "cpu")[3:]) == 0
    return folder


LAYOUTS = {
    "ddp": (),
    "fsdp": ("--parallel", "fsdp"),
    "micro": ("--micro-batch", "4"),
    "fsdp-micro-recompute": ("--parallel", "fsdp", "--micro-batch", "8", "--recompute"),
}


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_two_processes_equal_one(layout: str, alone: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--devices", "2", *LAYOUTS[layout])
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-6)
    expected, found = state(alone), state(tmp_path / "run")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        if "qkv.bias" not in name:  # a key bias has no gradient but rounding, which Adam scales to full steps
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    one, two = (json.loads((path / "results.json").read_text())["test"] for path in (alone, tmp_path / "run"))
    assert two["images"] == 360
    assert two["nll"] == pytest.approx(one["nll"], rel=1e-4)
    assert done.stdout.count("test: ") == 1
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())["command"]
    assert stored == shlex.join(["plainvit", *done.args[3:]])
    assert html.escape(stored) in (tmp_path / "run" / "report.html").read_text()
    assert plainvit.load(tmp_path / "run").config.classes == 10


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_fit_the_linear_head_of_one(tmp_path: Path, parallel: str) -> None:
    model = plainvit.create("ViT-Ti/4", 0, 8, width=16, depth=2, heads=2, mlp_dim=32)
    plainvit.save(model, tmp_path / "w.safetensors")
    flags = ("--init", str(tmp_path / "w.safetensors"), "--head", "linear", "--device", "cpu")
    for name, more in (("one", ()), ("two", ("--devices", "2", "--parallel", parallel))):
        done = train(tmp_path / name, *flags, *more)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("first result on held-out images") == 1
    heads = [plainvit.load(tmp_path / name / "first").head for name in ("one", "two")]
    assert heads[0] is not None
    assert heads[1] is not None
    torch.testing.assert_close(heads[0].weight, heads[1].weight, rtol=1e-3, atol=1e-4)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.slow
def test_two_processes_agree_on_the_number_of_steps_for_hours(tmp_path: Path) -> None:
    """Each measures its own step time; runs of different lengths would deadlock."""
    done = train(tmp_path / "run", "--devices", "2", "--hours", "0.001", "--timeout", "15", steps=100_000)
    assert done.returncode == 0, done.stderr
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["step"]) == ("done", len(losses(tmp_path / "run")))


def stop_at(folder: Path, step: int, *flags: str, steps: int = 12) -> None:
    """Sends SIGTERM once a run has reached a step; it saves there or a little later."""
    child = subprocess.Popen(command(folder, *flags, steps=steps, save=1), env=ENVIRONMENT, stderr=subprocess.PIPE)
    wait_for_steps(folder, child, step)
    child.send_signal(SIGTERM)
    child.communicate(timeout=60)


@pytest.mark.slow
def test_resume_with_another_number_of_processes_sees_the_same_samples(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, steps=60, save=1).returncode == 0
    stop_at(parts, 10, steps=60)
    first = len(losses(parts))
    stop_at(parts, first + 10, "--devices", "2", "--parallel", "fsdp", steps=60)
    second = len(losses(parts))
    assert 10 <= first < second < 60, "each part of the run must make steps"
    done = train(parts, steps=60, save=1)
    assert done.returncode == 0, done.stderr
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    assert [line["step"] for line in read_metrics(parts) if "loss" in line] == list(range(1, 61))


def workers_of(launcher: int) -> list[int]:
    """Training processes of a launcher, in the order of their ranks."""
    found: dict[bytes, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
            rank = re.search(rb"(?:^|\0)RANK=(\d)", (path.parent / "environ").read_bytes())
        except (OSError, ValueError):
            continue
        if parent == launcher and b"plainvit" in words and rank:
            found[rank[1]] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]


def started(folder: Path, *flags: str, steps: int = 3000, save: int = 2) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher whose run has made steps, and its two processes."""
    launcher = start(folder, *flags, steps=steps, save=save)
    wait_for_steps(folder, launcher)
    workers = workers_of(launcher.pid)
    assert len(workers) == 2
    return launcher, workers


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_run_with_killed_ranks_restarts_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    kills, steps = 3, 300
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    assert train(whole, "--devices", "2", steps=steps, save=2).returncode == 0
    launcher = start(folder, "--restarts", str(kills), steps=steps, save=2)
    for number in range(kills):
        known = len(losses(folder))
        wait_until(lambda known=known: len(losses(folder)) > known and len(workers_of(launcher.pid)) == 2, launcher)
        if launcher.poll() is None:
            os.kill(workers_of(launcher.pid)[number % 2], signal.SIGKILL)
    _, err = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, err
    assert f"restart 1 of {kills}" in err
    assert hash_tensors(state(folder)) == hash_tensors(state(whole))
    assert losses(folder) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all"), [(SIGTERM, False), (SIGTERM, True), (signal.SIGKILL, False)])
def test_a_signal_to_the_launcher_saves_and_ends_all_processes(
    tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    """SIGKILL too, which the launcher cannot pass on; and one to every process, as of `scancel`."""
    folder = tmp_path / "run"
    launcher, workers = started(folder, save=0)
    for pid in (*(workers if to_all else ()), launcher.pid):
        os.kill(pid, number)
    _, err = launcher.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, workers)))
    ended = status(folder)
    assert launcher.returncode == (143 if number == SIGTERM else -signal.SIGKILL)
    assert (ended["state"], ended["exit_code"]) == ("interrupted", 143)
    assert Checkpoints(folder / "checkpoints", 9).steps() == [ended["step"]]
    assert "Traceback" not in err
    assert "death signal" not in err, "a line of PyTorch's own"


@pytest.mark.parametrize(
    ("signals", "number"),
    [
        ([[], [], []], 0),
        ([[], [signal.SIGINT], []], signal.SIGINT),
        ([[signal.SIGINT]] * 3, signal.SIGINT),
        ([[], [], [SIGTERM]], SIGTERM),
        ([[signal.SIGINT], [signal.SIGINT], [SIGTERM]], SIGTERM),
    ],
)
def test_three_processes_sum_their_step_results(signals: list[list[int]], number: int) -> None:
    """Mean loss, total of correct images, the common gradient norm; one SIGTERM outweighs SIGINTs."""
    values: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        values.append(tensor)
        return tensor

    for loss, received in enumerate(signals):
        run: Any = SimpleNamespace(world=SimpleNamespace(size=3, sum=record), signals=received)
        step = PendingStep(run, torch.tensor((loss, 5.0 + loss, 0.7)))
    step.values = torch.stack(values).sum(0)
    assert step.read() == pytest.approx((1.0, 18.0, 0.7, number))


@pytest.mark.slow
@pytest.mark.parametrize("number", [SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_ends_all_with_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    launcher, workers = started(tmp_path / "run")
    os.kill(workers[1], number)
    _, err = launcher.communicate(timeout=60)
    assert number.name in err
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["exit_code"], launcher.returncode) == ("interrupted", 128 + number, 128 + number)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_in_status_and_output(tmp_path: Path, rank: int) -> None:
    """Also if it is rank 0, which otherwise writes the status: the other writes that it lost a process."""
    launcher, workers = started(tmp_path / "run")
    os.kill(workers[rank], signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["exit_code"], launcher.returncode) == ("failed", 5, 137)
    assert f"rank {1 - rank} lost another process" in ended["reason"]
    assert any(f"rank {rank} was killed by SIGKILL" in line for line in lines(err))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/w/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711"), True),
        (RuntimeError("NCCL error in: /w/ProcessGroupNCCL.cpp:3356, remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_only_a_lost_connection_becomes_a_lost_error(error: RuntimeError, lost: bool) -> None:
    with (
        pytest.raises(LostError if lost else RuntimeError, match="rank 2" if lost else "mat1"),
        raise_lost_peer(World(2, 4)),
    ):
        raise error


def test_an_error_without_a_message_is_raised_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "gather_strings", lambda _, words: ["", words])
    with pytest.raises(DisagreementError, match="rank 1: TimeoutError"):
        World(1, 2).run_on_all_ranks(small_runs.fail(TimeoutError()))


def test_incomplete_variables_of_torchrun_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        join("cpu", 1.0)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_after_the_timeout(tmp_path: Path) -> None:
    """SIGSTOP: the process is alive for torchrun, but silent."""
    folder = tmp_path / "run"
    launcher, workers = started(folder, "--timeout", "6", steps=5000, save=0)
    os.kill(workers[1], signal.SIGSTOP)
    wait_until(lambda: status(folder)["state"] != "running")
    os.kill(workers[1], signal.SIGCONT)  # so that it gets torchrun's SIGTERM
    launcher.communicate(timeout=60)
    ended = status(folder)
    assert (ended["state"], ended["exit_code"], launcher.returncode) == ("failed", 5, 5)
    assert "rank 0 lost another process" in ended["reason"]
    assert not any(map(is_running, workers))


# bad input ------------------------------------------------------------------------------------------------------------


def lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("plainvit: ")]


@pytest.mark.slow
def test_an_indivisible_batch_is_reported_once(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--devices", "2", "--batch", "33", "--augment.mixup", "0")
    assert done.returncode == 2
    assert len(lines(done.stderr)) == 1
    assert "33" in done.stderr
    assert "2 processes" in done.stderr


@pytest.mark.parametrize(
    ("device", "local", "processes", "expected"),
    [
        ("cuda", 1, 2, "cuda:1"),
        ("auto", 0, 2, "cuda:0"),
        ("cuda:1", 0, 1, "cuda:1"),
        ("cpu", 1, 2, "cpu"),
        ("cuda:1", 0, 2, None),
        ("cuda:2", 0, 1, None),
        ("cuda", 0, 3, None),
    ],
)
def test_each_process_has_its_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, local: int, processes: int, expected: str | None
) -> None:
    """A shared or absent one is an error (None)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if expected:
        assert choose_device(device, local, processes) == expected
    else:
        with pytest.raises(ValueError, match="GPU"):
            choose_device(device, local, processes)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--devices", "2", "--device", "cpu", "--out", "run"],
        ["evaluate", "run", "--data", "digits", "--devices", "2", "--device", "cpu"],
    ],
)
def test_launched_processes_get_the_arguments_of_main_not_of_the_program(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["another-program", "--its", "words"])
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr("plainvit.runtime.launch.launch", lambda *given: launched.append(given) or 7)
    assert small_runs.run_command(*words) == 7
    assert launched == [(words, 2, 0, "cpu")]


def start_rank(folder: Path, rank: int, port: int, *flags: str) -> subprocess.Popen[str]:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = ENVIRONMENT | {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(command(folder, *flags), env=environment, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.slow
def test_ranks_with_different_configs_fail_together(tmp_path: Path) -> None:
    port = free_port()
    both = [start_rank(tmp_path / "run", rank, port, "--seed", str(rank)) for rank in (0, 1)]
    errors = [one.communicate(timeout=60)[1] for one in both]
    assert [one.returncode for one in both] == [2, 2]
    assert len(lines("".join(errors))) == 1
    assert "config" in errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_torchrun_agents_make_one_run(alone: Path, tmp_path: Path) -> None:
    """The command of the docs for several machines, with two of them on this one."""
    port, folder = free_port(), tmp_path / "run"
    inner = command(folder)[2:]  # -m plainvit ...
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run1"]
    agents = [
        subprocess.Popen(
            [*torchrun, *inner], env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-6)
    assert "".join(out for out, _ in said).count("test: ") == 1
