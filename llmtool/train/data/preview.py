"""Rows for people to read: what a row's tokens are, and which of them the loss counts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.train.batch import Batch


@dataclass(frozen=True)
class Segment:
    """One document, or part of one, in a row. ``runs``: its tokens as text, cut where counting begins or ends.

    The first id is only read, so it is a run that does not count; each later token is the target of the one before.
    """

    row: int
    segment: int
    tokens: int
    counted: int
    runs: tuple[tuple[bool, str], ...]


def preview(batch: Batch, tokenizer: Tokenizer | None) -> Iterator[Segment]:
    """The segments of a batch's rows in order, padding left out. Without a tokenizer, ids stand for pieces."""
    for number, (ids, targets, weights, segments) in enumerate(
            zip(batch.ids, batch.targets, batch.weights, batch.segments, strict=True)):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            (at,) = np.nonzero(segments == segment)
            tokens = [int(ids[at[0]]), *targets[at].tolist()]
            counts = [False, *(weights[at] > 0).tolist()]
            pieces = tokenizer.pieces(tokens) if tokenizer is not None else [f"{token} " for token in tokens]
            yield Segment(number, segment, len(at), sum(counts), tuple(_runs(counts, pieces)))


def _runs(counts: list[bool], pieces: list[str]) -> Iterator[tuple[bool, str]]:
    start = 0
    for at in range(1, len(counts) + 1):
        if at == len(counts) or counts[at] != counts[start]:
            yield counts[start], "".join(pieces[start:at])
            start = at
