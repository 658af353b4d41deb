"""Writing folders of zarr arrays as jax and tensorstore write them: plain chunks in place, packed ones as a stream."""

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llmtool.convert.stores.base import Index, TensorSpec
from llmtool.convert.stores.files import OutputFile, octets, sync_all, write_at
from llmtool.convert.stores.ledger import Ledger
from llmtool.convert.stores.sniff import is_plain_name
from llmtool.convert.stores.zarr_meta import ARRAY_FILE, ArrayMeta, cells, chunk_name, has_dtype, overlap
from llmtool.errors import CannotHold

Box = tuple[int | slice, ...]  # one entry a dimension of a chunk


class ZarrSink:
    """Writes each array into a folder of its name.

    ``chunks`` gives chunk shapes; an array without one is a single chunk or, if packed, one chunk a slot. Plain chunks
    take slots and bands of any shape. With ``compressor="zstd"`` a slot must consist of whole chunks, since a packed
    chunk cannot be written into; bands are packed as they come, so that memory holds one band. Raises CannotHold for a
    dtype without a name in zarr and for a name that cannot be a folder's.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorSpec],
        chunks: Mapping[str, tuple[int, ...]] | None = None,
        compressor: Literal["zstd"] | None = None,
    ):
        for key, spec in tensors.items():
            if not has_dtype(spec.dtype):
                raise CannotHold(f"{key}: zarr has no name for dtype {spec.dtype}")
            if not is_plain_name(key):
                raise CannotHold(f"{key[:100]!a}: cannot be the name of a folder, as zarr arrays need")
        self._folder = folder
        self._tensors = dict(tensors)
        self._ledger = Ledger(self._tensors)
        self._compressor = compressor
        self._chunks = dict(chunks or {})
        self._metas: dict[str, ArrayMeta] = {}
        self._written: set[Path] = set()
        self._packings: dict[Path, _Packing] = {}
        self._lock = threading.Lock()

    def _meta(self, key: str, depth: int) -> ArrayMeta:
        """Decided by the first slot, whose index is ``depth`` long."""
        with self._lock:
            if key not in self._metas:
                shape = self._tensors[key].shape
                slot = (1,) * depth + shape[depth:] if self._compressor else shape
                chunks = self._chunks.get(key) or tuple(max(n, 1) for n in slot)
                self._metas[key] = ArrayMeta(shape, chunks, self._tensors[key].dtype, self._compressor)
                (self._folder / key).mkdir()
            return self._metas[key]

    def write(self, key: str, index: Index, x: np.ndarray, first_row: int = 0) -> None:
        self._ledger.enter(key, index, x, first_row)
        meta = self._meta(key, len(index))
        rows = (first_row, first_row + len(x)) if x.ndim else None
        if self._compressor and any(length > 1 for length in meta.chunks[: len(index)]):
            raise AssertionError(f"{key}{list(index)}: is only a part of a packed chunk of shape {list(meta.chunks)}")
        for cell in cells(meta, meta.shape, index):
            box, target = overlap(meta, meta.shape, cell, index, rows)
            if any(part.start >= part.stop for part in target):
                continue
            path = self._folder / key / chunk_name(cell)
            where: tuple[Any, ...] = (*target, ...)
            if self._compressor:
                self._pack(path, meta, cell, box, x[where])
            else:
                self._place(path, meta, box, x[where])

    def _place(self, path: Path, meta: ArrayMeta, box: Box, part: np.ndarray) -> None:
        with self._lock:
            self._written.add(path)
        write_part(path, meta, box, part)

    def _pack(self, path: Path, meta: ArrayMeta, cell: Index, box: Box, part: np.ndarray) -> None:
        with self._lock:
            packing = self._packings.get(path) or _Packing(path, meta)
            self._packings[path] = packing
        if packing.add(box, part, [n - i * length for n, i, length in zip(meta.shape, cell, meta.chunks, strict=True)]):
            del self._packings[path]

    def close(self) -> None:
        self._ledger.close()
        for key in self._tensors:
            path = self._folder / key / ARRAY_FILE
            path.write_text(self._meta(key, 0).dumps())
            self._written |= {path, path.parent}
        sync_all([*self._written, self._folder])


class _Packing:
    """One chunk on its way through the compressor, fed bands of rows in order."""

    def __init__(self, path: Path, meta: ArrayMeta):
        import zstandard

        self._meta = meta
        self._path = path
        self._stream = zstandard.ZstdCompressor(level=1).compressobj(size=meta.chunk_nbytes)
        self._file = OutputFile(path)
        self._rows = self._end = 0

    def add(self, box: Box, part: np.ndarray, room: list[int]) -> bool:
        """Feed ``part``, which is ``chunk[box]``. True if this was the last of the chunk's ``room`` for numbers."""
        chunks = self._meta.chunks
        axis = next((axis for axis, item in enumerate(box) if isinstance(item, slice)), None)
        if axis is None:  # one number
            self._feed(part)
            return self._finish()
        rows = box[axis]
        assert isinstance(rows, slice)
        if rows.start != self._rows:
            raise AssertionError(f"{self._path}: a band begins at row {rows.start}, expected {self._rows}")
        wide = (rows.stop - rows.start, *chunks[axis + 1 :])
        if part.shape != wide:  # at an edge: chunks are stored whole
            padded = np.zeros(wide, self._meta.dtype)
            padded[tuple(slice(0, n) for n in part.shape)] = part
            part = padded
        self._feed(np.ascontiguousarray(part))
        self._rows = rows.stop
        if self._rows < min(chunks[axis], room[axis]):
            return False
        self._feed(np.zeros((chunks[axis] - self._rows, *chunks[axis + 1 :]), self._meta.dtype))
        return self._finish()

    def _feed(self, part: np.ndarray) -> None:
        self._append(self._stream.compress(octets(part)))

    def _append(self, packed: bytes) -> None:
        self._file.write(packed, self._end)
        self._end += len(packed)

    def _finish(self) -> bool:
        self._append(self._stream.flush())
        self._file.close()
        return True


def write_part(path: Path, meta: ArrayMeta, box: Box, part: np.ndarray) -> None:
    """Write ``part`` to ``chunk[box]`` of a plain chunk's file. Processes may do so at once, each its own box."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, meta.chunk_nbytes)  # a grown file reads as zeros: the padding of an edge
        if part.shape == meta.chunks:
            write_at(descriptor, octets(np.ascontiguousarray(part)), 0)
        else:
            _write_box(descriptor, meta, box, part)
    finally:
        os.close(descriptor)


def _write_box(descriptor: int, meta: ArrayMeta, box: Box, part: np.ndarray) -> None:
    """Write ``part`` to ``chunk[box]``. Its innermost whole axes form runs of bytes; the axes outside are walked."""
    starts = [item if isinstance(item, int) else item.start for item in box]
    extents = [1 if isinstance(item, int) else item.stop - item.start for item in box]
    block = np.ascontiguousarray(part).reshape(extents)
    outer = len(extents)  # axes [outer:] are whole, axis outer - 1 is a range: one run covers them all
    while outer > 0 and extents[outer - 1] == meta.chunks[outer - 1]:
        outer -= 1
    outer = max(outer - 1, 0)
    steps = [math.prod(meta.chunks[axis + 1 :]) * meta.dtype.itemsize for axis in range(len(extents))]
    for place in np.ndindex(*extents[:outer]):
        first = (*(s + i for s, i in zip(starts, place, strict=False)), *starts[outer:])
        write_at(descriptor, octets(block[place]), sum(i * step for i, step in zip(first, steps, strict=True)))
