"""Means with their standard errors, as lm-evaluation-harness computes them (its ``api/metrics.py``)."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_RESAMPLES = 100_000
_CHUNK = 1000     # resamples for each seed
_BLOCK = 1 << 20  # numbers drawn at a time, for memory's sake


def mean_stderr(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n − 1) over √n; None for one value, which has none."""
    if len(values) < 2:
        return None
    return float(np.std(np.asarray(values, np.float64), ddof=1) / math.sqrt(len(values)))


def perplexity(loglikelihoods: Sequence[float]) -> float:
    """exp(−mean); infinite where that overflows."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(np.asarray(loglikelihoods, np.float64))))


def perplexity_stderr(loglikelihoods: Sequence[float]) -> float | None:
    """Standard deviation of the perplexity over resamples with replacement; None where it overflows.

    These are the harness's own draws, hence its number: 100,000 resamples in chunks of 1000 that are seeded 0, 1, 2, …,
    each by Python's ``random.Random(seed).choices``. numpy's legacy generator is the same Mersenne Twister, seeded
    alike by a list, and gives the same doubles many times faster.
    """
    values = np.asarray(loglikelihoods, np.float64)
    size = len(values)
    rows = max(1, min(_CHUNK, _BLOCK // size))

    def chunk(seed: int) -> list[float]:
        twister = np.random.RandomState([seed])
        means: list[float] = []
        while len(means) < _CHUNK:
            draws = twister.random_sample((min(rows, _CHUNK - len(means)), size))
            draws *= size
            means += values[draws.astype(np.int32)].mean(axis=1).tolist()
        return means

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        means = np.array(list(pool.map(chunk, range(_RESAMPLES // _CHUNK))))
    with np.errstate(over="ignore", invalid="ignore"):
        spread = float(np.std(np.exp(-means), ddof=1))
    return spread if math.isfinite(spread) else None
