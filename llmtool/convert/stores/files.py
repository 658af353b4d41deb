"""Arrays in plain files: mapped for reading, written in place."""

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.convert.stores.base import Index
from llmtool.convert.stores.sniff import refuse_impostors


class MappedFile:
    """A file mapped read-only. Arrays over it are views: they cost address space, not memory.

    The map lives as long as its last array, so there is nothing to close.
    """

    def __init__(self, path: Path):
        refuse_impostors(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.path = path
        self.size = len(self._map)

    def bytes(self, offset: int, count: int) -> bytes:
        """A copy of ``count`` bytes from ``offset``; fewer where the file ends."""
        return self._map[offset : offset + count]

    def array(
        self, dtype: np.dtype, shape: tuple[int, ...], offset: int, strides: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A read-only view at a byte offset, strides in bytes (default: C order). The caller has checked sizes."""
        if 0 in shape:
            return frozen(np.empty(shape, dtype))
        return np.ndarray(shape, dtype, self._map, offset, strides)


def at(x: np.ndarray, index: Index) -> np.ndarray:
    """``x[index]`` over leading axes: a view, and an array even where a single number is left."""
    where: tuple[Any, ...] = (*index, ...)
    return x[where]


def frozen(x: np.ndarray) -> np.ndarray:
    """``x`` itself, made read-only: what every source returns, view or not."""
    x.flags.writeable = False
    return x


def octets(x: np.ndarray) -> memoryview:
    """The bytes of a C-contiguous array without a copy. (Dtypes of ml_dtypes have no buffer protocol of their own.)"""
    return x.reshape(-1).view(np.uint8).data


class OutputFile:
    """A new file, written at any offset from any thread. Left open by a failed run, it closes without a word."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def resize(self, size: int) -> None:
        """Give the file its size; what is not written reads as zeros."""
        os.ftruncate(self._descriptor, size)

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        write_at(self._descriptor, data, offset)

    def close(self) -> None:
        """Force the file onto the disk and close it."""
        os.fsync(self._descriptor)
        self.__del__()

    def __del__(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)


def write_at(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Threads may write to one file at once: there is no shared position."""
    data = memoryview(data)
    while data:  # Linux writes at most 2 GiB a call
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """Force many files at once: a journal commits those that wait together in one go."""
    with ThreadPoolExecutor(32) as pool:
        for _ in pool.map(sync, paths):
            pass
