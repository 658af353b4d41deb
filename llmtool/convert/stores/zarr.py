"""Folders of zarr arrays, one array a folder: how Pax, T5X and our trainer keep a flat tree of names on disk.

Chunks that are not compressed are plain files of numbers: they are mapped, so an
array of any size is read slice by slice. A compressed chunk must be unpacked whole; where it spans several
slots (layers) that happens once, into a nameless temporary file.
"""

import math
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.convert.stores.base import Index, TensorSpec
from llmtool.convert.stores.files import MappedFile, at, frozen
from llmtool.convert.stores.sniff import refuse_impostors, refuse_odd_name
from llmtool.convert.stores.zarr_chunks import unpack, unpack_to_disk
from llmtool.convert.stores.zarr_meta import ARRAY_FILE, MAX_RATIO, ArrayMeta, cells, chunk_name, overlap, read_meta
from llmtool.convert.stores.zarr_sink import ZarrSink
from llmtool.errors import BadCheckpoint

__all__ = ["ZarrSink", "ZarrSource"]

_CELL = re.compile(r"(?:0|[1-9][0-9]{0,17})(?:\.(?:0|[1-9][0-9]{0,17}))*")
_MAX_ABSENT = 64  # absent chunks for each present one


@dataclass
class _Array:
    folder: Path
    meta: ArrayMeta
    shape: tuple[int, ...]  # the logical one, without padding
    present: set[str]
    unpacked: dict[Index, np.ndarray] = field(default_factory=dict)  # chunks that further slots will ask for
    left: dict[Index, int] = field(default_factory=dict)  # how many slots of such a chunk are still unread
    lock: threading.Lock = field(default_factory=threading.Lock)


class ZarrSource:
    """Every sub-folder with a ``.zarray`` is an array; its key is the folder's name.

    ``unpadded`` gives the true shapes of arrays that were padded to a mesh: what lies beyond is never read. ``scratch``
    is a folder for the temporary files (default: the system's). A chunk of an array without fill value must exist:
    tensorstore writes every chunk of such arrays, also one of zeros, so an absent one is a loss. Raises BadCheckpoint
    for damaged arrays, absurd sizes, and links that lead out of the folder (raw chunks have no header, so any file
    could otherwise be carried off as weights).
    """

    def __init__(
        self, folder: Path, unpadded: Mapping[str, tuple[int, ...]] | None = None, scratch: Path | None = None
    ):
        self.scratch = scratch
        self._root = folder.resolve()
        self._arrays: dict[str, _Array] = {}
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir() and (Path(entry.path) / ARRAY_FILE).exists():
                refuse_odd_name(entry.name, str(folder))
                if entry.is_symlink():
                    self._refuse_escape(Path(entry.path))
                self._arrays[entry.name] = self._open(Path(entry.path), (unpadded or {}).get(entry.name))
        self.tensors: Mapping[str, TensorSpec] = {
            key: TensorSpec(array.meta.dtype, array.shape) for key, array in self._arrays.items()
        }

    def _open(self, folder: Path, unpadded: tuple[int, ...] | None) -> _Array:
        files = list(os.scandir(folder))
        for entry in files:
            if entry.is_symlink():
                self._refuse_escape(Path(entry.path))
        meta = read_meta(folder / ARRAY_FILE)
        shape = meta.shape if unpadded is None else tuple(unpadded)
        if len(shape) != len(meta.shape) or any(n > stored for n, stored in zip(shape, meta.shape, strict=True)):
            raise BadCheckpoint(f"{folder}: stored as {list(meta.shape)}, too small for the true shape {list(shape)}")
        present = set()
        for entry in files:
            if not _CELL.fullmatch(entry.name):
                continue
            cell = tuple(map(int, entry.name.split("."))) if meta.shape else ()
            if len(cell) != len(meta.grid) or any(i >= n for i, n in zip(cell, meta.grid, strict=True)):
                raise BadCheckpoint(
                    f"{entry.path}: outside of the grid {list(meta.grid)} that shape and chunks of .zarray make"
                )
            _check_size(entry, meta)
            present.add(entry.name)
        array = _Array(folder, meta, shape, present)
        _check_holes(array)
        return array

    def _refuse_escape(self, path: Path) -> None:
        if not path.resolve().is_relative_to(self._root):
            raise BadCheckpoint(f"{path}: a link out of the checkpoint, to {path.resolve()}; refused. Copy it in.")

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        array = self._arrays[key]
        spec = self.tensors[key]
        touched = list(islice(cells(array.meta, array.shape, index), 2))
        if len(touched) == 1:  # of one chunk: a view of it
            chunk = self._chunk(array, touched[0], index)
            inner = tuple(i % length for i, length in zip(index, array.meta.chunks, strict=False))
            unpadded: tuple[Any, ...] = (*(slice(0, n) for n in spec.shape[len(index) :]), ...)
            return frozen(at(chunk, inner)[unpadded])
        out = np.empty(spec.shape[len(index) :], spec.dtype)
        for cell in cells(array.meta, array.shape, index):
            chunk = self._chunk(array, cell, index)
            box, target = overlap(array.meta, array.shape, cell, index)
            out[target] = chunk[box]
        return frozen(out)

    def _chunk(self, array: _Array, cell: Index, index: Index) -> np.ndarray:
        """The whole chunk, in a way that makes reading ``index`` of it cheap."""
        meta, name = array.meta, chunk_name(cell)
        if name not in array.present:
            return np.broadcast_to(np.asarray(meta.fill, meta.dtype), meta.chunks)
        if meta.compressor is None:
            return MappedFile(array.folder / name).array(meta.dtype, meta.chunks, 0)
        slots = math.prod(
            min(length, n - i * length)
            for i, length, n in zip(cell[: len(index)], meta.chunks, array.shape, strict=False)
        )
        if slots == 1:
            out = np.empty(meta.chunks, meta.dtype)
            unpack(array.folder, meta, cell, out)
            return out
        with array.lock:
            if cell not in array.unpacked:
                array.unpacked[cell] = unpack_to_disk(array.folder, meta, cell, self.scratch)
                array.left[cell] = slots
            chunk = array.unpacked[cell]
            array.left[cell] -= 1
            if array.left[cell] == 0:  # a sweep over the slots is over: give the disk back
                del array.unpacked[cell]
        return chunk

    def where(self, key: str) -> str:
        return str(self._arrays[key].folder)

    def close(self) -> None:
        """Let go of temporary files; arrays already read stay valid."""
        for array in self._arrays.values():
            array.unpacked.clear()


def _check_size(entry: os.DirEntry[str], meta: ArrayMeta) -> None:
    path, size, ratio = Path(entry.path), entry.stat().st_size if entry.is_file() else 0, MAX_RATIO[meta.compressor]
    if (size != meta.chunk_nbytes) if meta.compressor is None else (size * ratio < meta.chunk_nbytes):
        refuse_impostors(path)
        kind = f"a chunk of {list(meta.chunks)} {meta.dtype}"
        packed = f" that {meta.compressor} can unpack from them" if meta.compressor else ""
        raise BadCheckpoint(f"{path}: {size} bytes, expected {kind}{packed} ({meta.chunk_nbytes} bytes). Cut short?")


def _check_holes(array: _Array) -> None:
    meta = array.meta
    wanted = math.prod(-(-n // length) for n, length in zip(array.shape, meta.chunks, strict=True))
    if not wanted:
        return
    if wanted > _MAX_ABSENT * len(array.present):
        raise BadCheckpoint(
            f"{array.folder}: only {len(array.present)} of {wanted} chunks are there. "
            "Are files missing, or is .zarray wrong?"
        )
    gaps = (name for cell in cells(meta, array.shape) if (name := chunk_name(cell)) not in array.present)
    if meta.fill is None and (some := list(islice(gaps, 3))):
        raise BadCheckpoint(f"{array.folder}: chunk files are missing, first {', '.join(some)} (of {wanted} expected)")
