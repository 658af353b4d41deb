"""What a change of dtype does to values: counted, never silent."""

from dataclasses import dataclass

import numpy as np


@dataclass
class CastCount:
    """Values of one array, or of a whole checkpoint, that a cast touched. ``overflow``: finite became infinite or
    NaN; ``underflow``: non-zero became zero; ``changed``: all that differ, those two included."""

    values: int = 0
    changed: int = 0
    overflow: int = 0
    underflow: int = 0

    def add(self, other: "CastCount") -> None:
        self.values += other.values
        self.changed += other.changed
        self.overflow += other.overflow
        self.underflow += other.underflow


def widens(source: np.dtype, target: np.dtype) -> bool:
    """Whether every value of ``source`` is a value of ``target``."""
    return source == target or target == np.float64 or (target == np.float32 and source.itemsize < 4)


def _to_odd(x: np.ndarray) -> np.ndarray:
    """float64 as float32, what is lost marked in the last bit: ml_dtypes goes by float32, and would round twice."""
    near = x.astype(np.float32)
    lost = np.isfinite(x) & (near != x)
    near = np.where(lost & (np.abs(near) > np.abs(x)), np.nextafter(near, np.float32(0)), near)
    return (near.view(np.uint32) | lost).view(np.float32)


def cast_into(out: np.ndarray, x: np.ndarray) -> CastCount:
    """Round ``x`` to nearest even into ``out`` (same shape, another dtype) and count what changed."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        narrow = x.dtype == np.float64 and out.dtype not in (np.float32, np.float16)
        out[...] = (_to_odd(x) if narrow else x).astype(out.dtype)
    if widens(x.dtype, out.dtype):
        return CastCount(values=x.size)
    wide = np.dtype(np.float64 if np.float64 in (x.dtype, out.dtype) else np.float32)
    before, after = x.astype(wide), out.astype(wide)
    nan = np.isnan(before)
    return CastCount(
        values=x.size,
        changed=int(np.count_nonzero((before != after) & ~nan)),
        overflow=int(np.count_nonzero(np.isfinite(before) & ~np.isfinite(after))),
        underflow=int(np.count_nonzero((before != 0) & (after == 0))),
    )
