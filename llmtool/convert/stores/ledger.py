"""Bookkeeping of a sink: each slot of each array is written once, in the promised dtype and shape."""

import threading
from collections.abc import Mapping

import numpy as np

from llmtool.convert.stores.base import Index, TensorSpec


class Ledger:
    """Checks writes against the specs given to a sink. A breach is a bug of ours, hence AssertionError."""

    def __init__(self, tensors: Mapping[str, TensorSpec]):
        self._tensors = tensors
        self._left = {key: spec.size for key, spec in tensors.items()}
        self._seen: set[tuple[str, Index, int]] = set()
        self._lock = threading.Lock()

    def enter(self, key: str, index: Index, x: np.ndarray, first_row: int = 0) -> None:
        """Note that rows of ``array[index]`` from ``first_row`` on are about to be written from ``x``."""
        spec = self._tensors[key]
        slot = spec.shape[len(index) :]
        fits = x.shape[1:] == slot[1:] and x.ndim == len(slot) and (not slot or first_row + len(x) <= slot[0])
        if x.dtype != spec.dtype or not fits or not x.flags.c_contiguous:
            got = f"{x.dtype}{x.shape} at row {first_row}"
            raise AssertionError(f"{key}{list(index)}: promised C-contiguous {spec.dtype}{slot}, got {got}")
        if len(index) > len(spec.shape) or not all(0 <= i < n for i, n in zip(index, spec.shape, strict=False)):
            raise AssertionError(f"{key}{list(index)}: outside of {spec.shape}")
        with self._lock:
            if (key, index, first_row) in self._seen or self._left[key] < x.size:
                raise AssertionError(f"{key}{list(index)} from row {first_row}: written twice")
            self._seen.add((key, index, first_row))
            self._left[key] -= x.size

    def close(self) -> None:
        """Every slot must have been written."""
        if missing := [key for key, left in self._left.items() if left]:
            raise AssertionError(f"closed before all was written: {len(missing)} arrays, first {missing[:3]}")
