"""Orders that are functions of a seed and a number, so that a position is all there is to save."""

import hashlib
from collections.abc import Sequence

import numpy as np

from llmtool.errors import BadData

_PERIOD = 10_000  # rows in which a mixture's shares are met


def derive(seed: int, *path: object) -> int:
    """A 32-bit seed for one purpose."""
    return int.from_bytes(hashlib.sha256(repr((seed, *path)).encode()).digest()[:4], "little")


def shuffled(index: int, size: int, seed: int, in_pass: int) -> int:
    """Where ``index`` goes in the permutation of 0 … size - 1 that belongs to a seed and a pass; no memory needed."""
    from grain.experimental import index_shuffle

    return index_shuffle(index=index, max_index=size - 1, seed=derive(seed, "pass", in_pass), rounds=4)


class Mixture:
    """Sources by weight: which of them gives row number e of a run, and which of its own rows that is.

    Sources take turns so that none is ever far behind or ahead of its share: the next row goes to the one that lags
    most. The pattern repeats every 10,000 rows.
    """

    def __init__(self, weights: Sequence[float]):
        share = np.asarray(weights, np.float64) / np.sum(weights)
        if share.min() * _PERIOD < 0.5:
            raise BadData(f"a source has {share.min():.2g} of the mixture's weight; expected at least "
                          f"{1 / _PERIOD:g}, or leave it out")
        self.turns, credit = np.empty(_PERIOD, np.int64), np.zeros(len(share))
        for row in range(_PERIOD):
            credit += share
            self.turns[row] = turn = int(np.argmax(credit))
            credit[turn] -= 1
        ones = self.turns[:, None] == np.arange(len(share))
        self.before = np.concatenate([np.zeros((1, len(share)), np.int64), np.cumsum(ones, axis=0)])  # [period + 1, S]

    def __call__(self, row: int) -> tuple[int, int]:
        periods, at = divmod(row, _PERIOD)
        source = int(self.turns[at])
        return source, periods * int(self.before[-1, source]) + int(self.before[at, source])


class Union:
    """Sources of known sizes as one: every row of each once in a pass. ``seed`` None: one source after the other."""

    def __init__(self, sizes: Sequence[int], seed: int | None):
        self.sizes, self.seed = sizes, seed
        self.first = np.cumsum([0, *sizes])

    def __call__(self, row: int) -> tuple[int, int]:
        in_pass, index = divmod(row, int(self.first[-1]))
        if self.seed is not None and len(self.sizes) > 1:
            index = shuffled(index, int(self.first[-1]), self.seed, in_pass)
        source = int(np.searchsorted(self.first, index, "right")) - 1
        return source, in_pass * self.sizes[source] + index - int(self.first[source])


def turned(batch: int, place: int, size: int) -> int:
    """The number of the row that stands at ``place`` of a batch of ``size``.

    Each batch holds rows batch · size … in an order that turns by one from batch to batch, so that a source of a
    mixture comes to every place: lanes belong to places, and none may starve.
    """
    return batch * size + (place + batch) % size
