"""Cores and memory that this process may use, next to the other processes of a run on the same machine."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMORY_FRACTION = 0.3  # of the free memory that the processes of a machine may fill with images


def count_cores() -> int:
    """Cores that this process may run on: a job of a cluster often has only some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_local_processes() -> int:
    """Processes of this run on this machine, as torchrun sets it."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)


def available_memory() -> int:
    """Free memory of the machine, including its page cache, or of the container that the process runs in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: assume that half of the memory is free
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(min(free, limit - used + int(statistics["inactive_file"])), 0)  # the page cache gives way
    except (OSError, ValueError, KeyError):  # no container, or "max": no limit
        return free


def memory_budget() -> float:
    """Bytes of images that this process may keep in memory."""
    return MEMORY_FRACTION * available_memory() / count_local_processes()
