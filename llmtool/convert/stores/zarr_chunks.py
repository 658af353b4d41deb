"""Unpacking one compressed chunk in bounded memory: the caller owns the buffer, the codec fills it or is refused."""

import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmtool.convert.stores.base import Index
from llmtool.convert.stores.files import MappedFile, octets
from llmtool.convert.stores.zarr_meta import ArrayMeta, chunk_name
from llmtool.errors import BadCheckpoint, BadTarget

_PIECE = 64 << 10  # compressed bytes given to zlib at once: at most 66 MB come out


def unpack(path: Path, meta: ArrayMeta, cell: Index, out: np.ndarray) -> None:
    """Fill ``out`` (dtype and chunk shape of ``meta``, C-contiguous) from the chunk file. Raises BadCheckpoint."""
    try:
        _CODECS[meta.compressor or ""](path / chunk_name(cell), octets(out), path, meta, cell)
    except ValueError as error:
        raise BadCheckpoint(
            f"{path / chunk_name(cell)}: damaged: {error}. The chunk should unpack to {meta.chunk_nbytes} bytes."
        ) from error


def unpack_to_disk(path: Path, meta: ArrayMeta, cell: Index, scratch: Path | None) -> np.ndarray:
    """The unpacked chunk as a map of a nameless file in ``scratch`` (default: the system's), so that slices are cheap.

    The file's space is given back with the last view of the array.
    """
    with tempfile.TemporaryFile(dir=scratch) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, meta.chunk_nbytes)  # a full disk is an error now, not a crash later
        except OSError as error:
            raise BadTarget(
                f"{scratch or tempfile.gettempdir()}: no room for {meta.chunk_nbytes} bytes to unpack "
                f"{path / chunk_name(cell)} ({error.strerror}). Set TMPDIR to a disk with room."
            ) from error
        out = np.memmap(file, meta.dtype, "w+", shape=meta.chunks)
    plain = out.view(np.ndarray)
    unpack(path, meta, cell, plain)
    return plain


def _zstd(file: Path, out: memoryview, *_: object) -> None:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True) as stream:
            filled = 0
            while filled < len(out) and (count := stream.readinto(out[filled:])):
                filled += count
            if filled < len(out) or stream.read(1):
                raise ValueError("it holds fewer bytes" if filled < len(out) else "it holds more bytes")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _deflate(file: Path, out: memoryview, *_: object) -> None:
    unpacker = zlib.decompressobj(wbits=47)  # gzip or zlib, whichever its header says
    filled = 0
    try:
        with file.open("rb") as stream:
            while not unpacker.eof and (piece := stream.read(_PIECE)):
                part = unpacker.decompress(piece, len(out) - filled + 1)
                if filled + len(part) > len(out) or unpacker.unconsumed_tail:
                    raise ValueError("it holds more bytes")
                out[filled : filled + len(part)] = part
                filled += len(part)
            if unpacker.unused_data or stream.read(1):
                raise ValueError("bytes follow its end")
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if filled < len(out) or not unpacker.eof:
        raise ValueError("it holds fewer bytes")


def _blosc(file: Path, out: memoryview, array: Path, meta: ArrayMeta, cell: Index) -> None:
    """Through tensorstore, once the frame's own header (sizes at bytes 4 and 12) has been held against the file."""
    import tensorstore

    head = MappedFile(file).bytes(0, 16)
    size, packed = int.from_bytes(head[4:8], "little"), int.from_bytes(head[12:16], "little")
    if len(head) < 16 or size != len(out) or packed != file.stat().st_size:
        raise ValueError(f"its header speaks of {size} bytes from {packed}")
    begin = [i * chunk for i, chunk in zip(cell, meta.chunks, strict=True)]
    store = tensorstore.open({"driver": "zarr", "kvstore": {"driver": "file", "path": str(array)}}, open=True).result()
    part = store[tuple(slice(b, min(b + c, n)) for b, c, n in zip(begin, meta.chunks, meta.shape, strict=True))]
    whole = np.frombuffer(out, np.uint8).view(meta.dtype).reshape(meta.chunks)
    whole[tuple(slice(0, n) for n in part.shape)] = part.read().result()


_CODECS: dict[str, Callable[[Path, memoryview, Path, ArrayMeta, Index], None]] = {
    "zstd": _zstd, "gzip": _deflate, "zlib": _deflate, "blosc": _blosc,
}  # fmt: skip
