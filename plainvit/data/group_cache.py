"""Cache of decoded parquet row groups, in memory that a process shares with its forked data workers.

To read one image, parquet decodes its whole row group (up to thousands of images). Each group is decoded once for all
workers together. Memory is bounded by `limit`; groups that do not fit are not cached.
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
    """Bytes that one process may cache: `most`, or a quarter of the machine's memory, divided by its ranks."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, total // 4) // max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)


class GroupCache:
    """Bytes by (group, row). Create it before workers are forked, so that they share it.

    Two workers may store the same group at the same time: both write the same bytes, so no lock is needed.
    """

    def __init__(self, rows: Sequence[int], sizes: Sequence[int], limit: int) -> None:
        self._rows = list(rows)
        space = (OFFSET * (count + 1) + max(size, 0) for count, size in zip(rows, sizes, strict=True))
        self._starts = list(itertools.accumulate(space, initial=0))
        self._limit = limit
        self._handle = _open_shared_file()
        weakref.finalize(self, os.close, self._handle)
        self._stored = mmap.mmap(-1, len(self._rows) or 1)  # shared memory: one flag per group

    def fits(self, group: int) -> bool:
        return self._starts[group + 1] <= self._limit

    def read(self, group: int, row: int) -> bytes | None:
        """The bytes of a row; None if the group is not stored."""
        if not self._stored[group]:
            return None
        start = self._starts[group]
        begin, end = np.frombuffer(os.pread(self._handle, 2 * OFFSET, start + OFFSET * row), np.int64).tolist()
        return os.pread(self._handle, end - begin, start + OFFSET * (self._rows[group] + 1) + begin)

    def store(self, group: int, pieces: Iterable[pa.Array]) -> bool:
        """Store all rows of a group; returns False if they do not fit."""
        start, stop = self._starts[group], self._starts[group + 1]
        position = first = start + OFFSET * (self._rows[group] + 1)
        offsets = [np.zeros(1, np.int64)]
        try:
            for piece in pieces:
                data, ends = _pack(piece)
                if position + len(data) > stop:  # larger than stated: parquet stores equal images once
                    return False
                self._write(data, position)
                offsets.append(ends + (position - first))
                position += len(data)
            all_offsets = np.concatenate(offsets)
            if len(all_offsets) != self._rows[group] + 1:
                return False
            self._write(all_offsets.tobytes(), start)
        except OSError:  # no space left
            return False
        self._stored[group] = 1
        return True

    def _write(self, data: bytes | memoryview, position: int) -> None:
        while len(data):
            written = os.pwrite(self._handle, data, position)
            data, position = memoryview(data)[written:], position + written


def _open_shared_file() -> int:
    """Open a file without a name, which disappears with the process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("plainvit")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pack(piece: pa.Array) -> tuple[memoryview, np.ndarray]:
    """(bytes of all rows, end offset of each row); null rows have no bytes."""
    binary = piece.cast(pa.large_binary()).fill_null(b"")
    offsets = np.frombuffer(binary.buffers()[1], np.int64)[binary.offset : binary.offset + len(binary) + 1]
    data = binary.buffers()[2]
    return memoryview(data if data is not None else b"")[offsets[0] : offsets[-1]], offsets[1:] - offsets[0]
