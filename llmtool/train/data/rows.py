"""From documents to rows of one length: the two pipelines.

A document gives a stretch of *places*, one for each pair (id read, id asked for). A row is a run of at most ``room``
places over one document after another. How many places a document of n tokens has is n + ``extra``, so a row can be
found from the documents' lengths alone (:mod:`llmtool.train.data.planned`), or filled as they come
(:mod:`llmtool.train.data.lanes`): both give the row here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmtool.errors import MissingFact


class Row(NamedTuple):
    """One row of a Batch, each array [T]; ``documents``: those it has places of, int64."""

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    documents: np.ndarray


class Piece(NamedTuple):
    """Places ``start`` to ``stop`` of a document; ``tokens`` are all of it, without special tokens."""

    document: int
    tokens: np.ndarray
    start: int
    stop: int


class Pipeline(ABC):
    """``room``: places of a row. ``group``: documents after which a new row begins in any case (None: never)."""

    def __init__(self, seq_len: int, room: int, extra: int, group: int | None):
        self.seq_len, self.room, self.extra, self.group = seq_len, room, extra, group

    @abstractmethod
    def row(self, pieces: Sequence[Piece]) -> Row:
        """The row of at most ``room`` places; what is left of it is padding of weight 0."""


class Packed(Pipeline):
    """Documents packed without a gap, each a segment of its own with positions from 0 on.

    Every document is read after BOS, where the tokenizer puts one, and its last token is asked for EOS; EOS itself is
    never read, since nothing follows it in its segment. A document that does not fit goes on in a later row, as a
    segment of its own there: no token is lost, and padding is only in the last row of all.
    """

    def __init__(self, seq_len: int, bos: int | None, eos: int):
        super().__init__(seq_len, room=seq_len, extra=0 if bos is None else 1, group=None)
        self.bos, self.eos = bos, eos

    def row(self, pieces: Sequence[Piece]) -> Row:
        row = blank(self.seq_len, pieces)
        at = 0
        for segment, piece in enumerate(pieces, 1):
            length = piece.stop - piece.start
            span = slice(at, at + length)
            told = self._tokens(piece)
            row.ids[span], row.targets[span] = told[:-1], told[1:]
            row.weights[span], row.segments[span], row.positions[span] = 1, segment, np.arange(length)
            at += length
        return row

    def _tokens(self, piece: Piece) -> np.ndarray:
        """Ids of the piece's places and the last one's target. Place p reads token p - 1 after BOS, else token p."""
        first, after = piece.start - self.extra, piece.stop - self.extra + 1
        parts = [piece.tokens[max(first, 0):after]]
        if first < 0:
            parts.insert(0, np.array([self.bos]))
        if after > len(piece.tokens):
            parts.append(np.array([self.eos]))
        return np.concatenate(parts)


class Pax(Pipeline):
    """The Pile as the Pax GPT recipes read it: 128 documents joined with nothing between, cut into seq_len - 1 tokens,
    EOS put after each cut. Read is what is asked for, shifted right behind BOS (id 0 where the tokenizer has none).

    One segment a row: documents attend to each other. The last row of the 128 is shorter, and padded. Every place that
    is not padding counts, told by place, so that a token whose id is 0 counts too.
    Source: NVIDIA rosetta, pax scripts_gpu/tasks.py; t5 reduce_concat_tokens and split_tokens.
    """

    DOCUMENTS = 128

    def __init__(self, seq_len: int, bos: int | None, eos: int):
        super().__init__(seq_len, room=seq_len - 1, extra=0, group=self.DOCUMENTS)
        self.bos, self.eos = bos or 0, eos

    def row(self, pieces: Sequence[Piece]) -> Row:
        row = blank(self.seq_len, pieces)
        if pieces:
            tokens = np.concatenate([piece.tokens[piece.start:piece.stop] for piece in pieces])
            length = len(tokens) + 1
            row.targets[:length] = [*tokens, self.eos]
            row.ids[:length] = [self.bos, *tokens]
            row.weights[:length], row.segments[:length], row.positions[:length] = 1, 1, np.arange(length)
        return row


def blank(seq_len: int, pieces: Sequence[Piece] = ()) -> Row:
    """A row of padding, to be filled."""
    ids, targets, segments, positions = np.zeros((4, seq_len), np.int32)
    documents = np.array([piece.document for piece in pieces], np.int64)
    return Row(ids, targets, np.zeros(seq_len, np.float32), segments, positions, documents)


def make_pipeline(kind: str, seq_len: int, *, bos: int | None, eos: int | None, adds_bos: bool) -> Pipeline:
    """"packed" or "pax". Raises MissingFact where the tokenizer has no EOS."""
    if eos is None:
        raise MissingFact("the tokenizer has no EOS, which ends documents; expected one (eos_token in its "
                          "tokenizer_config.json), or another tokenizer")
    return Packed(seq_len, bos if adds_bos else None, eos) if kind == "packed" else Pax(seq_len, bos, eos)
