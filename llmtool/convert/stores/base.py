"""What a store of arrays offers: a source reads named arrays, a sink writes them, neither knows what they mean."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

Index = tuple[int, ...]

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one stored array, known before a byte of it is read."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array in memory."""
        return self.size * self.dtype.itemsize


class Source(Protocol):
    """Named arrays in files. ``tensors`` comes from headers alone; sizes there are backed by the files' sizes."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        """``array[index]`` over leading axes; a read-only view of the mapped file where the format allows it."""
        ...

    def where(self, key: str) -> str:
        """The file that holds ``key``, for messages."""
        ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Where named arrays are written. All names, dtypes and shapes were given to the constructor."""

    def write(self, key: str, index: Index, x: np.ndarray, first_row: int = 0) -> None:
        """Store the C-contiguous ``x`` as ``array[index][first_row:first_row + len(x)]``, ``index`` over leading axes.

        Every element is written once; the bands of one slot come in order and from one thread.
        """
        ...

    def close(self) -> None:
        """Finish headers and indices and fsync every file. Called once, after the last write."""
        ...
