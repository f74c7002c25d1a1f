"""Decoded row groups of parquet files, in memory that a process shares with its forked data workers.

A parquet image can be read only by decoding its row group, up to thousands of images. Each group is decoded once and
kept for all workers together: memory is bounded by `limit`, whatever their number. Groups beyond it are not kept.
"""

import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

OFFSET = 8  # bytes of one offset


def memory_limit(most: int) -> int:
    """Bytes that one process may keep for its data: `most` or a quarter of the machine, shared by its ranks."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, machine // 4) // max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)


class GroupCache:
    """Rows of bytes by (group, row). Create it before the workers are forked: only then do they share it.

    Two workers may store the same group at the same time: both write the same bytes, so nothing is locked.
    """

    def __init__(self, rows: Sequence[int], sizes: Sequence[int], limit: int) -> None:
        self._rows = list(rows)
        needed = (OFFSET * (count + 1) + max(size, 0) for count, size in zip(rows, sizes, strict=True))
        self._starts = list(itertools.accumulate(needed, initial=0))
        self._limit = limit
        self._handle = _open_shared_file()
        weakref.finalize(self, os.close, self._handle)
        self._stored = mmap.mmap(-1, len(self._rows) or 1)  # anonymous and shared: a flag for each group

    def fits(self, group: int) -> bool:
        return self._starts[group + 1] <= self._limit

    def read(self, group: int, row: int) -> bytes | None:
        """None where the group is not stored."""
        if not self._stored[group]:
            return None
        start = self._starts[group]
        begin, end = np.frombuffer(os.pread(self._handle, 2 * OFFSET, start + OFFSET * row), np.int64).tolist()
        return os.pread(self._handle, end - begin, start + OFFSET * (self._rows[group] + 1) + begin)

    def store(self, group: int, pieces: Iterable[pa.Array]) -> bool:
        """The rows of a group, piece by piece; False where there is no room for them."""
        start, stop = self._starts[group], self._starts[group + 1]
        place = first = start + OFFSET * (self._rows[group] + 1)
        offsets = [np.zeros(1, np.int64)]
        try:
            for piece in pieces:
                data, ends = _pack(piece)
                if place + len(data) > stop:  # equal images that the file stores once
                    return False
                self._write(data, place)
                offsets.append(ends + (place - first))
                place += len(data)
            found = np.concatenate(offsets)
            if len(found) != self._rows[group] + 1:
                return False
            self._write(found.tobytes(), start)
        except OSError:  # no space left
            return False
        self._stored[group] = 1
        return True

    def _write(self, data: bytes | memoryview, place: int) -> None:
        while len(data):
            written = os.pwrite(self._handle, data, place)
            data, place = memoryview(data)[written:], place + written


def _open_shared_file() -> int:
    """Without a name, so that nothing is left behind whatever happens to the process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("plainvit")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pack(piece: pa.Array) -> tuple[memoryview, np.ndarray]:
    """(the bytes of all rows, the end of each); a null has no bytes."""
    wide = piece.cast(pa.large_binary()).fill_null(b"")
    offsets = np.frombuffer(wide.buffers()[1], np.int64)[wide.offset : wide.offset + len(wide) + 1]
    data = wide.buffers()[2]
    return memoryview(data if data is not None else b"")[offsets[0] : offsets[-1]], offsets[1:] - offsets[0]
