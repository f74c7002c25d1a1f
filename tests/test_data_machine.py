"""Memory of this process, from planted files of the kernel."""

from pathlib import Path

import pytest

from plainvit.data import machine
from plainvit.data.machine import available_memory, memory_budget


def plant_cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(machine, "CGROUP", folder)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("900000\n")
    (folder / "memory.stat").write_text("anon 100000\nfile 800000\ninactive_file 700000\n")


def test_the_page_cache_of_a_container_is_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a data set was read once, it fills the container."""
    plant_cgroup(tmp_path, monkeypatch, "1000000")
    assert available_memory() == 800_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert memory_budget() == pytest.approx(80_000)


def test_memory_is_known_without_a_limit_or_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_cgroup(tmp_path, monkeypatch, "max")
    assert available_memory() > 2**20

    def read_text(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", read_text)  # as on macOS
    assert available_memory() > 2**20
