"""Device choice and CPU workarounds, with a made-up cpuinfo and child processes that crash as on a faulty CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from children import in_child

import plainvit
from plainvit import device
from plainvit.config import Config
from plainvit.device import CpuSpeed
from plainvit.names import configure
from plainvit.train import transfer
from plainvit.train.doctor import describe_bf16

DIES = "import os, signal; os.kill(os.getpid(), signal.{name})"


@pytest.fixture
def cpuinfo(tmp_path: Path) -> Path:
    """A CPU that advertises AMX for bf16."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu sse avx512f amx_bf16 amx_tile\nbogomips\t: 1\n")
    return file


class Probe:
    """Code for a child process that leaves a mark each time it runs."""

    def __init__(self, folder: Path, code: str) -> None:
        self.marks = folder / "marks"
        self.code = f"open({str(self.marks)!r}, 'a').write('x')\n{code}"

    @property
    def runs(self) -> int:
        return len(self.marks.read_text()) if self.marks.exists() else 0


@pytest.mark.parametrize("signal", ["SIGILL", ""])
def test_the_result_of_the_probe_is_cached_per_cpu(cpuinfo: Path, tmp_path: Path, signal: str) -> None:
    probe = Probe(tmp_path, DIES.format(name=signal) if signal else "")
    for _ in range(2):
        assert device.crashes_in_bf16(cpuinfo, probe.code, tmp_path / "cache") is bool(signal)
    assert probe.runs == 1  # the second answer came from the cache
    cpuinfo.write_text(cpuinfo.read_text().replace("amx_tile", "amx_tile amx_int8"))
    assert device.crashes_in_bf16(cpuinfo, probe.code, tmp_path / "cache") is bool(signal)
    assert probe.runs == 2


@pytest.mark.parametrize("code", ["raise SystemExit(1)", DIES.format(name="SIGKILL")])
def test_another_failure_of_the_probe_is_not_cached(cpuinfo: Path, tmp_path: Path, code: str) -> None:
    """No torch, or no memory: not caused by the CPU, so the next call probes again."""
    probe = Probe(tmp_path, code)
    for _ in range(2):
        assert device.crashes_in_bf16(cpuinfo, probe.code, tmp_path / "cache") is False
    assert probe.runs == 2


@pytest.mark.parametrize("flags", ["flags\t\t: fpu sse avx512f avx512_bf16 amx_tile\n", "Features\t: fp asimd\n", ""])
def test_a_cpu_without_amx_is_not_probed(tmp_path: Path, flags: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{flags}")
    probe = Probe(tmp_path, DIES.format(name="SIGILL"))
    for path in (file, tmp_path / "absent"):
        assert device.crashes_in_bf16(path, probe.code, tmp_path / "cache") is False
    assert probe.runs == 0


@pytest.mark.parametrize("broken", ["", "[]", '{"other": 1}'])
def test_a_damaged_cache_is_rewritten(cpuinfo: Path, tmp_path: Path, broken: str) -> None:
    probe, cache = Probe(tmp_path, DIES.format(name="SIGILL")), tmp_path / "cache"
    assert device.crashes_in_bf16(cpuinfo, probe.code, cache)
    (file,) = cache.iterdir()
    file.write_text(broken)
    assert device.crashes_in_bf16(cpuinfo, probe.code, cache)
    assert json.loads(file.read_text()) == {"crash": "SIGILL"}
    assert list(cache.iterdir()) == [file]  # no temporary files are left


def test_the_probe_runs_with_amx_enabled(cpuinfo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX disabled the probe would never crash."""
    monkeypatch.setenv(device.ISA_VARIABLE, device.ISA_BELOW_AMX)
    probe = f"import os, signal; os.environ.get({device.ISA_VARIABLE!r}) or os.kill(os.getpid(), signal.SIGILL)"
    assert device.crashes_in_bf16(cpuinfo, probe, tmp_path / "cache") is True


# bf16 against fp32 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected", "prefers"),
    [
        (DIES.format(name="SIGILL"), CpuSpeed(crash="SIGILL"), False),
        (DIES.format(name="SIGKILL"), CpuSpeed(), False),  # no memory: unknown
        ('print(\'{"fp32": 0.02, "bf16": 0.1}\')', CpuSpeed(0.02, 0.1), False),  # AVX2: five times slower
        ('print(\'{"fp32": 0.11, "bf16": 0.1}\')', CpuSpeed(0.11, 0.1), False),  # not worth the rounding
        ('print(\'{"fp32": 0.05, "bf16": 0.025}\')', CpuSpeed(0.05, 0.025), True),
        ("print('{\"fp32\": 0.05}')", CpuSpeed(), False),
    ],
)
def test_bf16_is_preferred_where_a_child_measures_it_faster(
    tmp_path: Path, code: str, expected: CpuSpeed, prefers: bool
) -> None:
    speed = device.measure_cpu(code, tmp_path)
    assert speed == expected
    assert speed.prefers_bf16 is prefers
    assert describe_bf16(speed).startswith("used") is prefers
    assert expected.crash in describe_bf16(speed)


def test_the_measurement_runs_and_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = device.measure_cpu(cache=tmp_path)
    assert first.crash or min(first.fp32, first.bf16) > 0
    monkeypatch.setattr(subprocess, "run", None)
    device.measure_cpu.cache_clear()
    assert device.measure_cpu(cache=tmp_path) == first


@pytest.mark.parametrize(
    ("changes", "speed", "expected"),
    [
        ({}, CpuSpeed(2.0, 1.0), "bf16"),
        ({}, CpuSpeed(1.0, 5.0), "auto"),
        ({}, CpuSpeed(crash="SIGILL"), "auto"),
        ({"precision": "fp32"}, CpuSpeed(2.0, 1.0), "fp32"),
        ({"head": "zero"}, CpuSpeed(2.0, 1.0), "auto"),
        ({"init": ""}, CpuSpeed(2.0, 1.0), "auto"),
    ],
)
def test_fine_tuning_on_a_cpu_uses_bf16_where_it_is_faster(
    changes: dict[str, Any], speed: CpuSpeed, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "measure_cpu", lambda: speed)
    config = Config(**{"init": "weights.npz", "head": "linear", "device": "cpu"} | changes)
    chosen = "bf16" if transfer.prefers_bf16(config, configure("ViT-Ti/16")) else config.precision
    assert chosen == expected
    assert not transfer.prefers_bf16(config, configure("ViT-Ti/16", width=96))  # too narrow to gain


# When AMX is disabled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads_torch", "kills", "busy", "given", "expected"),
    [
        (False, True, True, None, (device.ISA_BELOW_AMX, "passive")),
        (False, False, False, None, (None, None)),
        (False, True, True, "x", ("x", "x")),
        (True, True, True, None, (None, None)),  # too late
    ],
)
def test_the_environment_is_set_before_torch(
    loads_torch: bool,
    kills: bool,
    busy: bool,
    given: str | None,
    expected: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only on a CPU where bf16 crashes, and only on a busy machine."""
    monkeypatch.setattr(device, "crashes_in_bf16", lambda: kills)
    monkeypatch.setattr(device, "is_busy", lambda: busy)
    variables = (device.ISA_VARIABLE, device.WAIT_VARIABLE)
    for name in variables:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    if not loads_torch:
        monkeypatch.delitem(sys.modules, "torch")
    device.set_environment()
    assert tuple(map(os.environ.get, variables)) == expected


@pytest.mark.parametrize(
    ("load", "running", "busy"),
    [
        (0.4, "4/99", False),
        (3.0, "4/99", True),
        (3.0, "1/99", False),  # it was busy a moment ago
        (3.0, "", True),  # where the moment cannot be seen
    ],
)
def test_a_machine_is_busy_if_others_run_now_and_did(
    load: float, running: str, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    if running:
        (tmp_path / "loadavg").write_text(f"{load} 0.0 0.0 {running} 1")
    assert device.is_busy(tmp_path / "loadavg") is busy


def test_the_package_sets_the_environment_before_loading_models() -> None:
    code = """
import sys, types, plainvit
from plainvit import device
device.set_environment = lambda: print("prepared", "torch" in sys.modules)
class Models(types.ModuleType):
    def __getattr__(self, name):
        print("asked for", name)
sys.modules["plainvit.models"] = Models("plainvit.models")
plainvit.create
"""
    assert in_child(code, ONEDNN_MAX_CPU_ISA=None).splitlines() == ["prepared False", "asked for create"]


# Models where bf16 would crash ----------------------------------------------------------------------------------------


@pytest.fixture
def bf16_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch had been loaded before AMX could be disabled, on a CPU where bf16 crashes."""
    monkeypatch.setattr(device, "is_cpu_bf16_unsafe", lambda: True)


@pytest.mark.usefixtures("bf16_crashes")
@pytest.mark.parametrize(("make", "size"), [(tiny.vit, (24, 40)), (tiny.hybrid, (48, 80)), (tiny.bit, (32, 32))])
def test_bf16_is_rejected_where_it_would_crash(make: Any, size: tuple[int, int]) -> None:
    model, images = make(torch.bfloat16), tiny.images(size=size, dtype=torch.float32)
    for call in (model, model.features):
        with pytest.raises(RuntimeError, match=device.ISA_VARIABLE):
            call(images)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=device.ISA_VARIABLE):
        make(torch.float32)(images)


def test_creating_a_model_disables_cudnn_attention() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    plainvit.create("ViT-Ti/8", image_size=32, **tiny.SHAPE)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
