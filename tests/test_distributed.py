"""Several processes on loopback against one: the same samples, losses and weights; deaths, restarts, other layouts."""

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_runs
import torch
from torch import Tensor

import plainvit
from plainvit.cli import main
from plainvit.device import choose_device
from plainvit.runtime.checkpoint import Checkpoints, tensor_hash
from plainvit.runtime.distributed import LostError, World, losses_told
from plainvit.runtime.folder import metrics
from plainvit.runtime.watchdog import _who_is_missing
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


def train(
    folder: Path, *flags: str, steps: int = 12, save: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *flags, steps=steps, save=save),
        env=ENVIRONMENT | options,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def command(folder: Path, *flags: str, steps: int = 12, save: int = 0) -> list[str]:
    recipe = folder.parent / f"recipe_{steps}_{save}.py"
    recipe.write_text(RECIPE.replace("STEPS", str(steps)).replace("SAVE", str(save)))
    return [sys.executable, "-m", "plainvit", "train", f"{recipe}:recipe", "--out", str(folder), *flags]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def state(folder: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(folder / "checkpoints", 9).newest()
    assert found
    return found[0]


def numbers(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process: this one, whose torch is loaded."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        small_runs.without_figures(patch)
        main(command(folder, "--device", "cpu")[3:])
    return folder


LAYOUTS = {
    "ddp": (),
    "fsdp": ("--parallel", "fsdp"),
    "sharded": ("--parallel", "fsdp", "--sharded"),
    "micro": ("--micro-batch", "4"),
    "fsdp-micro-recompute": ("--parallel", "fsdp", "--micro-batch", "8", "--recompute"),
}


FAST = ("sharded",)


@pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_two_processes_equal_one(layout: str, alone: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--devices", "2", *LAYOUTS[layout])
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-6)
    expected, found = state(alone), state(tmp_path / "run")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        if "qkv.bias" not in name:  # the gradient of a key's bias is rounding, of which Adam makes whole steps
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert numbers(tmp_path / "run")["test"]["images"] == 360
    assert numbers(tmp_path / "run")["test"]["nll"] == pytest.approx(numbers(alone)["test"]["nll"], rel=1e-4)
    assert done.stdout.count("test: ") == 1
    said = json.loads((tmp_path / "run" / "environment.json").read_text())["command"]
    assert said == shlex.join(["plainvit", *done.args[3:]])
    assert html.escape(said) in (tmp_path / "run" / "report.html").read_text()
    model = plainvit.load(tmp_path / "run")
    assert model.config.classes == 10


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_fifty_steps_of_two_processes_equal_one(parallel: str, tmp_path: Path) -> None:
    train(tmp_path / "one", steps=50)
    train(tmp_path / "two", "--devices", "2", "--parallel", parallel, steps=50)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == len(two) == 50
    assert two[:20] == pytest.approx(one[:20], rel=1e-5)
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
def test_two_processes_agree_on_what_the_hours_allow(tmp_path: Path) -> None:
    """Each measures a step by its own clock; runs of different lengths would wait for each other for ever."""
    done = train(tmp_path / "run", "--devices", "2", "--hours", "0.001", "--timeout", "15", steps=100_000)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"0.001 hours allow \d+ of 100000 steps", done.stderr)) == 1
    said = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (said["state"], said["step"]) == ("done", len(losses(tmp_path / "run")))


def stop_at(folder: Path, step: int, *flags: str, steps: int = 12) -> None:
    """A run that is told to end once it has come to a step; it saves there or a little later."""
    child = subprocess.Popen(command(folder, *flags, steps=steps, save=1), env=ENVIRONMENT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(losses(folder)) < step and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)


@pytest.mark.slow
def test_one_then_two_then_one_process_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, steps=60, save=1).returncode == 0
    stop_at(parts, 10, steps=60)
    first = len(losses(parts))
    stop_at(parts, first + 10, "--devices", "2", "--parallel", "fsdp", "--sharded", steps=60)
    second = len(losses(parts))
    assert 10 <= first < second < 60, "each part of the run must be real"
    done = train(parts, steps=60, save=1)
    assert done.returncode == 0, done.stderr
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    assert [line["step"] for line in metrics(parts) if "loss" in line] == list(range(1, 61))


def workers_of(agent: int) -> list[int]:
    """Processes that torchrun's agent has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            words = (path.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if parent == agent and b"plainvit" in words:
            found.append(int(path.parent.name))
    return sorted(found)


def kill_and_wait(folder: Path, kills: int, *flags: str, steps: int) -> subprocess.Popen[str]:
    """Kills one of the two ranks, by turns, whenever the run has moved on since the last time."""
    line = command(folder, "--devices", "2", "--restarts", str(kills), *flags, steps=steps, save=2)
    agent = subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for number in range(kills):
        before, dead = len(losses(folder)), time.monotonic() + 60
        while (len(losses(folder)) <= before or len(workers_of(agent.pid)) < 2) and agent.poll() is None:
            assert time.monotonic() < dead, "the run does not go on"
            time.sleep(0.02)
        if agent.poll() is None:
            os.kill(workers_of(agent.pid)[number % 2], signal.SIGKILL)
    return agent


def killed(folder: Path, whole: Path, kills: int, steps: int) -> None:
    assert train(whole, "--devices", "2", steps=steps, save=2).returncode == 0
    agent = kill_and_wait(folder, kills, steps=steps)
    _, err = agent.communicate(timeout=180)
    assert agent.returncode == 0, err
    assert tensor_hash(state(folder)) == tensor_hash(state(whole))
    assert losses(folder) == losses(whole)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_to_the_same_end(tmp_path: Path) -> None:
    killed(tmp_path / "killed", tmp_path / "whole", kills=2, steps=200)


@pytest.mark.slow
def test_ten_killed_ranks_are_restarted_to_the_same_end(tmp_path: Path) -> None:
    killed(tmp_path / "killed", tmp_path / "whole", kills=10, steps=1500)


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_leaves_nobody_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = command(folder, "--devices", "2", steps=3000)
    agent = subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while len(losses(folder)) < 5 and agent.poll() is None:
        time.sleep(0.02)
    workers = workers_of(agent.pid)
    assert len(workers) == 2
    agent.send_signal(signal.SIGTERM)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 143
    assert "death signal" not in err, "a line of PyTorch's own"
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    assert Checkpoints(folder / "checkpoints", 9).newest()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.slow
def test_a_killed_launcher_leaves_nobody_behind(tmp_path: Path) -> None:
    """SIGKILL, which it cannot pass on: its processes save and end, and the run can go on."""
    folder = tmp_path / "run"
    agent = subprocess.Popen(
        command(folder, "--devices", "2", steps=3000), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while len(losses(folder)) < 5 and agent.poll() is None:
        time.sleep(0.02)
    workers, deadline = workers_of(agent.pid), time.monotonic() + 30
    assert len(workers) == 2
    agent.kill()
    _, err = agent.communicate(timeout=30)  # whose end is that of the last process
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "processes outlive the launcher"
        time.sleep(0.1)
    said = json.loads((folder / "status.json").read_text())
    assert (said["state"], said["exit_code"]) == ("interrupted", 143)
    assert Checkpoints(folder / "checkpoints", 9).steps() == [said["step"]]
    assert f"saved at step {said['step']}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("signals", "number"),
    [
        ([[], [], []], 0),
        ([[], [signal.SIGINT], []], signal.SIGINT),
        ([[signal.SIGINT]] * 3, signal.SIGINT),
        ([[], [], [signal.SIGTERM]], signal.SIGTERM),
        ([[signal.SIGINT], [signal.SIGINT], [signal.SIGTERM]], signal.SIGTERM),
    ],
)
def test_what_three_processes_say_of_a_step_adds_up(signals: list[list[int]], number: int) -> None:
    """The mean of the losses, all the images that were right, the norm that all know; one SIGTERM outweighs SIGINTs."""
    shares: list[Tensor] = []

    def kept(share: Tensor) -> Tensor:
        shares.append(share)
        return share

    for loss, came in enumerate(signals):
        run: Any = SimpleNamespace(world=SimpleNamespace(size=3, sum=kept), signals=came)
        launched = PendingStep(run, torch.tensor((loss, 5.0 + loss, 0.7)))
    launched.values = torch.stack(shares).sum(0)
    assert launched.read() == pytest.approx((1.0, 18.0, 0.7, number))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_ends_all_and_is_called_by_its_name(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    agent = subprocess.Popen(
        command(folder, "--devices", "2", steps=3000), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while len(losses(folder)) < 5 and agent.poll() is None:
        time.sleep(0.02)
    os.kill(workers_of(agent.pid)[1], number)
    _, err = agent.communicate(timeout=60)
    assert f"plainvit: {number.name}: saved at step" in err
    said = json.loads((folder / "status.json").read_text())
    assert (said["state"], said["exit_code"], agent.returncode) == ("interrupted", 128 + number, 128 + number)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_the_rank_that_died_is_named_and_what_follows(tmp_path: Path, restarts: int) -> None:
    folder = tmp_path / "run"
    line = command(folder, "--devices", "2", "--restarts", str(restarts), steps=300, save=2)
    agent = subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while len(losses(folder)) < 5 and agent.poll() is None:
        time.sleep(0.02)
    dead = next(pid for pid in workers_of(agent.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(dead, signal.SIGKILL)
    _, err = agent.communicate(timeout=120)
    (said,) = [line for line in lines(err) if "rank 1" in line]
    follows = "all start again from the last checkpoint, restart 1 of 1" if restarts else "the same command goes on"
    assert said.startswith(f"plainvit: rank 1 was ended by SIGKILL; {follows}")
    assert agent.returncode == (0 if restarts else 128 + signal.SIGKILL), err
    assert ("resumed from step" in err) == bool(restarts)
    assert "/" not in "".join(lines(err)), "no path of PyTorch's source"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_status_tells_of_a_killed_rank_with_the_exit_code_of_the_command(tmp_path: Path, rank: int) -> None:
    """Also where it is the first, who writes it, that was killed."""
    agent, workers = begun(tmp_path / "run")
    os.kill(workers[rank], signal.SIGKILL)
    agent.communicate(timeout=60)
    said = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (said["state"], said["exit_code"], agent.returncode) == ("failed", 137, 137)
    assert said["reason"].startswith(f"rank {rank} was ended by SIGKILL; the same command goes on")


@pytest.mark.slow
def test_status_tells_of_processes_that_could_not_hear_a_signal(tmp_path: Path) -> None:
    """They stand still, and the launcher is told to end: it kills them after a while, which is not waited for here."""
    agent, workers = begun(tmp_path / "run")
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    agent.send_signal(signal.SIGTERM)
    time.sleep(1)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    _, err = agent.communicate(timeout=60)
    said = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (said["state"], said["exit_code"], agent.returncode) == ("interrupted", 143, 143), err
    assert said["reason"] == "SIGTERM; the same command goes on from the last checkpoint"


def begun(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher whose run has made steps, and its processes in the order of their ranks."""
    agent = subprocess.Popen(
        command(folder, "--devices", "2", steps=3000, save=2), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while len(losses(folder)) < 5 and agent.poll() is None:
        time.sleep(0.02)
    ranks = {b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes(): pid for pid in workers_of(agent.pid)}
    return agent, [ranks[False], ranks[True]]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ([(5, 9), (5, 7)], [(5, 12), (5, 7)], "rank 1 last heard of at step 5"),
        (
            [(5, 9), (4, 7), (-1, 0)],
            [(5, 12), (4, 7), (-1, 0)],
            "rank 1 last heard of at step 4, rank 2 not heard of at any step",
        ),
        ([(5, 9), (4, 7), (5, 1)], [(5, 12), (4, 9), (5, 3)], "rank 1 is behind, at step 4"),
    ],
)
def test_who_is_missing_is_said_in_words(
    before: list[tuple[int, int]], after: list[tuple[int, int]], words: str
) -> None:
    assert _who_is_missing(0, before, after) == words


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("[/w/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711", None),
        ("NCCL error in: /w/ProcessGroupNCCL.cpp:3356, remote process exited", "NCCL error in: remote process exited"),
    ],
)
def test_a_loss_is_told_without_the_place_in_the_source(error: str, reason: str | None) -> None:
    with pytest.raises(LostError) as caught, losses_told(World(2, 4)):
        raise RuntimeError(error)
    told = f"rank 2 lost another process of the run: {reason or 'Connection closed by peer [10.0.0.7]:4711'}; "
    assert str(caught.value) == told + "the same command goes on from the last checkpoint"


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """SIGSTOP: alive for the agent, but silent. The other rank names it, with its own stack, and the run ends."""
    folder = tmp_path / "run"
    line = command(folder, "--devices", "2", "--timeout", "6", steps=5000)
    agent = subprocess.Popen(line, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while len(losses(folder)) < 5 and agent.poll() is None:
        time.sleep(0.02)
    time.sleep(1.5)  # each tells of its step about once a second
    workers = workers_of(agent.pid)
    stopped = max(workers)
    rank = next(int(v) for v in re.findall(rb"(?:^|\0)RANK=(\d)", Path(f"/proc/{stopped}/environ").read_bytes()))
    os.kill(stopped, signal.SIGSTOP)
    started, note = time.monotonic(), folder / f"stalled-rank-{1 - rank}.txt"
    while not note.is_file() and time.monotonic() - started < 6 + 10:
        time.sleep(0.1)
    assert note.is_file(), "it must be named within ten seconds of the timeout"
    os.kill(stopped, signal.SIGCONT)  # the agent's SIGTERM waits for that; without, it would kill it after 30 s
    _, err = agent.communicate(timeout=60)
    assert agent.returncode != 0
    assert f"rank {rank} last heard of at step " in err
    said = json.loads((folder / "status.json").read_text())
    assert (said["state"], said["exit_code"], agent.returncode) == ("failed", 5, 5)
    assert f"plainvit: {said['reason']}; stacks in {note}" in err
    stacks = note.read_text()
    assert "gradients" in stacks
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


# bad input ------------------------------------------------------------------------------------------------------------


def lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("plainvit: ")]


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_refused_once(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--devices", "2", "--batch", "33", "--augment.mixup", "0")
    assert done.returncode == 2
    assert len(lines(done.stderr)) == 1
    assert "33" in done.stderr
    assert "2 processes" in done.stderr


def test_more_processes_than_gpus_are_refused_before_they_start(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--devices", "2", "--device", "cuda")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no GPU" in done.stderr


@pytest.mark.parametrize(
    ("device", "local", "beside", "expected"),
    [("cuda", 1, 2, "cuda:1"), ("auto", 0, 2, "cuda:0"), ("cuda:1", 0, 1, "cuda:1"), ("cpu", 1, 2, "cpu")],
)
def test_each_process_has_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, local: int, beside: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(device, local, beside) == expected


@pytest.mark.parametrize(("device", "beside"), [("cuda:1", 2), ("cuda:0", 2), ("cuda:2", 1), ("cuda", 3)])
def test_a_device_that_processes_would_share_or_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, beside: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="GPU"):
        choose_device(device, 0, beside)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--devices", "2", "--device", "cpu", "--out", "run"],
        ["evaluate", "run", "--data", "digits", "--devices", "2", "--device", "cpu"],
    ],
)
def test_the_launched_processes_get_the_arguments_of_main(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Not those of the program that calls it."""
    monkeypatch.setattr(sys, "argv", ["another-program", "--its", "words"])
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr("plainvit.runtime.launch.launch", lambda *given: launched.append(given) or 7)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 7
    assert launched == [(words, 2, 0, "cpu")]


@pytest.mark.slow
def test_muon_is_not_for_sharded_matrices(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--devices", "2", "--parallel", "fsdp", "--optim.name", "muon")
    assert done.returncode == 2
    assert len(lines(done.stderr)) == 1
    assert "--parallel ddp" in done.stderr


def start_rank(folder: Path, rank: int, port: int, *flags: str) -> subprocess.Popen[str]:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = ENVIRONMENT | {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(command(folder, *flags), env=environment, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_ranks_with_different_configs_are_refused(tmp_path: Path) -> None:
    port = free_port()
    both = [start_rank(tmp_path / "run", rank, port, "--seed", str(rank)) for rank in (0, 1)]
    errors = [one.communicate(timeout=60)[1] for one in both]
    assert [one.returncode for one in both] == [2, 2]
    assert len(lines("".join(errors))) == 1
    assert "differ in their config" in errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rendezvous_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    one = start_rank(tmp_path / "run", 1, free_port(), "--timeout", "1")
    _, err = one.communicate(timeout=60)
    assert one.returncode == 2
    assert "cannot meet the others at 127.0.0.1" in lines(err)[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_agents_on_loopback_are_one_run(alone: Path, tmp_path: Path) -> None:
    """The line of the docs for several machines, with two of them on this one."""
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
