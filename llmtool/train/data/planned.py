"""Rows by index: where documents' lengths are known, any row can be made without the ones before it."""

from bisect import bisect_right

import numpy as np

from llmtool.train.data.order import shuffled
from llmtool.train.data.rows import Piece, Pipeline, Row
from llmtool.train.data.tokens import Tokens


class PlannedRows:
    """All rows of ``tokens`` in file order; each pass reads them in another order (``seed`` None: in this one).

    Rows are shuffled, not documents: what shares a packed row does not matter to the loss, and the offsets in the files
    are all that is needed to find a row, whatever their number.
    """

    def __init__(self, tokens: Tokens, pipeline: Pipeline, seed: int | None):
        self.tokens, self.pipeline, self.seed = tokens, pipeline, seed
        group = pipeline.group or max(len(tokens), 1)
        self.group_starts = np.array([self._start(i) for i in (*range(0, len(tokens), group), len(tokens))], np.int64)
        rows = -(-np.diff(self.group_starts) // pipeline.room)
        self.row_starts = np.cumsum([0, *rows])  # first row of each group

    def __len__(self) -> int:
        return int(self.row_starts[-1])

    def row(self, number: int) -> Row:
        """Row ``number`` over all passes."""
        in_pass, index = divmod(number, len(self))
        if self.seed is not None:
            index = shuffled(index, len(self), self.seed, in_pass)
        group = int(np.searchsorted(self.row_starts, index, "right")) - 1
        at = int(self.group_starts[group]) + (index - int(self.row_starts[group])) * self.pipeline.room
        end = min(at + self.pipeline.room, int(self.group_starts[group + 1]))
        document = bisect_right(range(len(self.tokens) + 1), at, key=self._start) - 1
        pieces = []
        while at < end:
            start, after = self._start(document), self._start(document + 1)
            stop = min(after, end)
            if stop > at:
                pieces.append(Piece(document, self.tokens.tokens(document), at - start, stop - start))
            at, document = stop, document + 1
        return self.pipeline.row(pieces)

    def _start(self, document: int) -> int:
        """Places before a document."""
        return self.tokens.offset(document) + self.pipeline.extra * document
