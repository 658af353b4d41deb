"""Requests to rows, and rows to few shapes of batch.

Requests with the same context share one row: the context, then each different continuation as a branch of its own,
which the other branches do not see. A continuation of one token needs no branch, as the context's last position
already predicts it. Rows are gathered by length into few shapes, each compiled once, so that little is padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmtool.evaluate.requests import Request

GRANULE = 4  # lengths are multiples of it: fewer shapes to choose from, and even, as fused kernels want them
MAX_SHAPES = 12
SHAPE_SHARE = 0.005  # of all tokens: what one more shape has to save at least


@dataclass(frozen=True)
class Row:
    """What the model reads at once for the requests of one group.

    ``branches`` has one number an id, 0 for the context. ``places`` has, for each request (an index into the
    requests), the positions whose logits predict its continuation, and those ids.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    branches: tuple[int, ...]
    places: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def length(self) -> int:
        """Positions that are computed."""
        return len(self.ids)

    @property
    def branched(self) -> bool:
        """Whether plain causal attention would not do: a second continuation would see the first."""
        return self.branches[-1] > 1

    @property
    def scored(self) -> dict[int, list[int]]:
        """Position -> the ids whose probability is asked there, each once."""
        out: dict[int, list[int]] = {}
        for positions, ids in self.places.values():
            for position, token in zip(positions, ids, strict=True):
                asked = out.setdefault(position, [])
                if token not in asked:
                    asked.append(token)
        return out


def make_rows(requests: Sequence[Request]) -> list[Row]:
    """One row a group, in the order of the groups' first requests."""
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.group, []).append(index)
    return [_row({index: requests[index] for index in members}) for members in groups.values()]


def _row(members: dict[int, Request]) -> Row:
    """A continuation whose ids but the last begin those of another is read off the other's branch."""
    context = next(iter(members.values())).context
    tails: dict[tuple[int, ...], int] = {}  # what a branch reads -> where it begins
    begin = len(context)
    ids, positions, branches = [*context], [*range(begin)], [0] * begin
    for tail in sorted({request.continuation[:-1] for request in members.values()}, key=len, reverse=True):
        if tail and not any(other[: len(tail)] == tail for other in tails):
            tails[tail] = len(ids)
            ids += tail
            positions += range(begin, begin + len(tail))
            branches += [len(tails)] * len(tail)
    places = {}
    for index, request in members.items():
        tail = request.continuation[:-1]
        start = next((at for other, at in tails.items() if other[: len(tail)] == tail), 0)
        places[index] = ((begin - 1, *range(start, start + len(tail))), request.continuation)
    return Row(tuple(ids), tuple(positions), tuple(branches), places)


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch: rows (B), tokens a row (T), places a row whose logits are computed (M), ids asked there (K)."""

    rows: int
    length: int
    places: int
    asked: int
    branched: bool


@dataclass(frozen=True)
class Batch:
    """Some rows, to be padded to a shape."""

    shape: Shape
    rows: tuple[Row, ...]

    def arrays(self) -> dict[str, np.ndarray]:
        """``ids`` [B, T], ``at`` [B, M], ``targets`` [B, M, K]; ``positions`` and ``branches`` [B, T] if branched.

        All int32; padding is 0 and stands on the right.
        """
        shape = self.shape
        out = {
            "ids": np.zeros((shape.rows, shape.length), np.int32),
            "at": np.zeros((shape.rows, shape.places), np.int32),
            "targets": np.zeros((shape.rows, shape.places, shape.asked), np.int32),
        }
        if shape.branched:
            out |= {name: np.zeros((shape.rows, shape.length), np.int32) for name in ("positions", "branches")}
        for b, row in enumerate(self.rows):
            out["ids"][b, : row.length] = row.ids
            if shape.branched:
                out["positions"][b, : row.length] = row.positions
                out["branches"][b, : row.length] = row.branches
            for m, (position, tokens) in enumerate(row.scored.items()):
                out["at"][b, m] = position
                out["targets"][b, m, : len(tokens)] = tokens
        return out

    def readings(self) -> Iterator[tuple[int, int, list[tuple[int, int]], tuple[int, ...]]]:
        """For each request: its index, its row b, the (m, k) of each id of its continuation, and these ids."""
        for b, row in enumerate(self.rows):
            scored = row.scored
            place = {position: m for m, position in enumerate(scored)}
            for index, (positions, ids) in row.places.items():
                cells = [(place[at], scored[at].index(token)) for at, token in zip(positions, ids, strict=True)]
                yield index, b, cells, ids


def plan_batches(rows: Sequence[Row], batch_tokens: int, ways: int = 1, shape_tokens: int = 0) -> list[Batch]:
    """Batches of at most ``batch_tokens`` padded tokens (but at least ``ways`` rows), the largest rows first.

    The number of rows of a batch is a multiple of ``ways``, the devices that share it. The lengths are chosen so that
    the padded tokens are fewest, for as many shapes as are worth compiling: ``shape_tokens`` are how many tokens could
    be computed in the time that it takes to compile one.
    """
    batches = []
    for branched in (False, True):
        kind = sorted((row for row in rows if row.branched == branched), key=lambda row: row.length, reverse=True)
        for bucket in _buckets(kind, batch_tokens, ways, shape_tokens):
            size, count = _size(len(bucket), _padded(bucket[0].length), batch_tokens, ways)
            shape = Shape(
                rows=size,
                length=_padded(bucket[0].length),
                places=max(len(row.scored) for row in bucket),
                asked=max(len(tokens) for row in bucket for tokens in row.scored.values()),
                branched=branched,
            )
            batches += [Batch(shape, tuple(bucket[i * size : (i + 1) * size])) for i in range(count)]
    return sorted(batches, key=lambda batch: batch.shape.length, reverse=True)


def _padded(length: int) -> int:
    return -(-length // GRANULE) * GRANULE


def _size(n_rows: int, length: int, batch_tokens: int, ways: int) -> tuple[int, int]:
    """Rows of a batch and number of batches, all as full as can be."""
    most = max(1, batch_tokens // (length * ways)) * ways
    count = -(-n_rows // most)
    size = -(-n_rows // (count * ways)) * ways
    return size, -(-n_rows // size)


def _buckets(rows: list[Row], batch_tokens: int, ways: int, shape_tokens: int) -> list[list[Row]]:
    """Cut rows, longest first, where the padded tokens plus the cost of each shape are least."""
    if not rows:
        return []
    lengths = [_padded(row.length) for row in rows]
    edges = [0, *(i for i in range(1, len(rows)) if lengths[i] != lengths[i - 1]), len(rows)]

    def cost(i: int, j: int) -> int:
        length = lengths[edges[i]]
        size, count = _size(edges[j] - edges[i], length, batch_tokens, ways)
        return size * count * length

    n = len(edges) - 1
    costs = {(i, j): cost(i, j) for i in range(n) for j in range(i + 1, n + 1)}
    least = {0: (0, [0])}  # edge reached -> tokens so far, and the edges cut at; with exactly k shapes
    best: tuple[float, list[int]] | None = None
    for k in range(1, min(MAX_SHAPES, n) + 1):
        reached = {}
        for j in range(k, n + 1):
            tokens, i = min((tokens + costs[i, j], i) for i, (tokens, _) in least.items() if i < j)
            reached[j] = tokens, [*least[i][1], j]
        least = reached
        tokens, cuts = least[n]
        weighed = tokens * (1 + SHAPE_SHARE * k) + shape_tokens * k
        if best is None or weighed < best[0]:
            best = weighed, cuts
    assert best is not None
    return [rows[edges[i] : edges[j]] for i, j in zip(best[1], best[1][1:], strict=False)]
