"""The ``.zarray`` of a zarr version 2 array: what it says, checked, and how its grid of chunks is cut.

Format: https://zarr-specs.readthedocs.io (storage specification 2). Of it we take what Pax, T5X and Orbax write: C
order, no filters, chunks named "0.1.2", and tensorstore's extra dtype names such as "bfloat16".
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.convert.stores.base import DTYPES, Index
from llmtool.convert.stores.sniff import refuse_impostors
from llmtool.errors import BadCheckpoint

ARRAY_FILE = ".zarray"
# How much larger than its file a chunk may be: no stream of the codec can unpack to more.
MAX_RATIO = {None: 1, "zstd": 45_000, "gzip": 1100, "zlib": 1100, "blosc": 1 << 31}
_MAX_BYTES = 1 << 20
_MAX_RANK = 32
_SMALL_CHUNK = 1 << 20  # bytes; a larger chunk may be no more than four times its array
_OWN_NAMES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPES = {
    **{dtype.str: dtype for name, dtype in DTYPES.items() if name not in _OWN_NAMES},
    **{name: DTYPES[name] for name in _OWN_NAMES},
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class ArrayMeta:
    """Shape, chunk shape and coding of one array. ``fill`` is what an absent chunk holds; None: none may be absent."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    compressor: str | None = None
    fill: float | int | bool | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // chunk) for n, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of any chunk, unpacked. Chunks at an edge are stored whole."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def dumps(self) -> str:
        """The text of ``.zarray``, as jax and tensorstore write it."""
        compressor = {"id": self.compressor, "level": 1} if self.compressor else None
        content = {
            "chunks": list(self.chunks), "compressor": compressor, "dimension_separator": ".",
            "dtype": _DTYPE_NAMES[self.dtype], "fill_value": None, "filters": None, "order": "C",
            "shape": list(self.shape), "zarr_format": 2,
        }  # fmt: skip
        return json.dumps(content, separators=(",", ":"))


def chunk_name(cell: Index) -> str:
    """``(0, 1)`` -> ``"0.1"``; the one chunk of a scalar is ``"0"``."""
    return ".".join(map(str, cell)) or "0"


def has_dtype(dtype: np.dtype) -> bool:
    """Whether a ``.zarray`` has a name for it."""
    return dtype in _DTYPE_NAMES


def cells(meta: ArrayMeta, shape: tuple[int, ...], index: Index = ()) -> Iterator[Index]:
    """The chunks, by grid position, that meet ``array[index]`` cut to the logical ``shape``."""
    fixed = (range(i // chunk, i // chunk + 1) for i, chunk in zip(index, meta.chunks, strict=False))
    depth = len(index)
    free = (range(-(-n // chunk)) for n, chunk in zip(shape[depth:], meta.chunks[depth:], strict=True))
    return product(*fixed, *free)


def overlap(
    meta: ArrayMeta, shape: tuple[int, ...], cell: Index, index: Index, rows: tuple[int, int] | None = None
) -> tuple[tuple[int | slice, ...], tuple[slice, ...]]:
    """Where in chunk ``cell`` the numbers of ``array[index]`` lie, and where in that slot they go.

    ``shape`` is the array's logical one. With ``rows`` only that range of the slot's first axis is meant, and the
    second answer counts from its beginning.
    """
    depth = len(index)
    inner: list[int | slice] = [i % length for i, length in zip(index, meta.chunks, strict=False)]
    target: list[slice] = []
    for position, length, n in zip(cell[depth:], meta.chunks[depth:], shape[depth:], strict=True):
        start, stop = rows if rows and not target else (0, n)
        begin, end = max(position * length, start), min((position + 1) * length, stop)
        inner.append(slice(begin - position * length, end - position * length))
        target.append(slice(begin - start, end - start))
    return tuple(inner), tuple(target)


def read_meta(path: Path) -> ArrayMeta:
    """Parse and check a ``.zarray``. Raises BadCheckpoint naming the field, what was found and what is read."""
    refuse_impostors(path)
    if path.stat().st_size > _MAX_BYTES:
        raise BadCheckpoint(f"{path}: {path.stat().st_size} bytes, too large for a .zarray")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not valid JSON ({str(error)[:100]})") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path}: expected a JSON object")

    def wrong(field: str, expected: str) -> BadCheckpoint:
        return BadCheckpoint(f"{path}: {field} is {str(content.get(field))[:60]!a}; only {expected} is read")

    for field, allowed in (("zarr_format", [2]), ("order", ["C"]), ("filters", [None, []])):
        if content.get(field) not in allowed:
            raise wrong(field, str(allowed[0]))
    if content.get("dimension_separator", ".") != ".":
        raise wrong("dimension_separator", '"."')
    shape: Any = content.get("shape")
    chunks: Any = content.get("chunks")
    if not _naturals(shape, 0):
        raise wrong("shape", f"a list of up to {_MAX_RANK} natural numbers whose product a file can hold")
    if not _naturals(chunks, 1) or len(chunks) != len(shape):
        raise wrong("chunks", "one positive number a dimension")
    name = content.get("dtype")
    if not isinstance(name, str) or name not in _DTYPES:
        raise wrong("dtype", f"one of {', '.join(_DTYPES)}")
    compressor = content.get("compressor")
    codec = compressor.get("id", "?") if isinstance(compressor, dict) else compressor
    if codec is not None and (not isinstance(codec, str) or codec not in MAX_RATIO):
        raise wrong("compressor", f"none or one of {', '.join(name for name in MAX_RATIO if name)}")
    fill = content.get("fill_value")
    if isinstance(fill, str):
        fill = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(fill, fill)
    if not isinstance(fill, float | int | None):
        raise wrong("fill_value", "null or a number")
    meta = ArrayMeta(tuple(shape), tuple(chunks), _DTYPES[name], codec, fill)
    try:
        with np.errstate(over="ignore"):
            filled = np.asarray(0 if fill is None else fill, meta.dtype).astype(np.float64)
        if fill is not None and math.isfinite(fill) and not np.isfinite(filled):
            raise OverflowError(fill)
    except (ValueError, TypeError, OverflowError) as error:
        raise wrong("fill_value", f"null or a number that {meta.dtype} has") from error
    if meta.chunk_nbytes > max(4 * math.prod(shape) * meta.dtype.itemsize, _SMALL_CHUNK):
        raise wrong("chunks", f"chunks not much larger than the array of shape {shape}")
    return meta


def _naturals(values: Any, least: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= _MAX_RANK
        and all(type(n) is int and n >= least for n in values)
        and math.prod(values) < 1 << 59
    )
