"""The rows of one process as a Grain data set: in this process, or dealt out to workers."""

from typing import Any

import grain
import numpy as np

from llmtool.errors import BadData
from llmtool.train.data.documents import Stream, Texts
from llmtool.train.data.lanes import Lanes, Reader, StreamReader, TextsReader
from llmtool.train.data.order import turned
from llmtool.train.data.plan import Plan
from llmtool.train.data.planned import PlannedRows
from llmtool.train.data.rows import Row, blank
from llmtool.train.data.synthetic import SyntheticRows


class Rows(grain.IterDataset):
    """Rows at places ``first`` to ``first + count`` of global batches of ``batch``, from batch ``start`` on.

    ``cursors`` [count, sources read as they come, 2]: where each place's lanes stand. Each row brings where its place
    stands after it, so a position can be told from the rows that were taken, however many were made ahead.
    """

    def __init__(self, plan: Plan, first: int, count: int, batch: int, start: int, cursors: np.ndarray):
        super().__init__()
        self.plan, self.first, self.count, self.batch = plan, first, count, batch
        self.start, self.cursors = start, cursors
        self.slice = slice(0, None, 1)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain's way to say which rows are this worker's: every ``sl.step``-th."""
        self.slice = sl

    def __iter__(self) -> "RowIterator":
        return RowIterator(self)


class RowIterator(grain.DatasetIterator):
    """One worker's rows."""

    def __init__(self, rows: Rows):
        super().__init__()
        self.of, self.next, self.step = rows, rows.slice.start or 0, rows.slice.step or 1
        places = [i for i in range(rows.count) if self.step == 1 or i % self.step == self.next % self.step]
        self.cursors = rows.cursors.copy()
        self.lanes = {source: self._open(n, source, places) for n, source in enumerate(rows.plan.lanes)}

    def __next__(self) -> dict[str, Any]:
        rows, plan = self.of, self.of.plan
        batches, at = divmod(self.next, rows.count)
        self.next += self.step
        place = rows.first + at
        number = turned(rows.start + batches, place, rows.batch)
        if plan.rows is not None and number >= plan.rows:
            source, row = -1, blank(plan.pipeline.seq_len)
        else:
            source, own = plan.order(number)
            chosen = plan.sources[source]
            if isinstance(chosen, PlannedRows | SyntheticRows):
                row = chosen.row(own)
            else:
                row = self.lanes[source].row(place)
                self.cursors[at, plan.lanes.index(source)] = self.lanes[source].cursors[place]
        self._check(row, source)
        return row._asdict() | {"source": source, "cursor": self.cursors[at].copy()}

    def get_state(self) -> dict[str, Any]:
        """Grain asks for it; the loader tells its position itself."""
        return {"next": self.next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Only to where it is: a loader begins anew instead."""
        if state != self.get_state():
            raise ValueError("rows cannot be turned back; make a new loader and restore its state")

    def _open(self, n: int, source: int, places: list[int]) -> Lanes:
        rows, plan = self.of, self.of.plan
        assert plan.tokenizer is not None
        cursors = {rows.first + at: (int(rows.cursors[at, n, 0]), int(rows.cursors[at, n, 1])) for at in places}
        chosen = plan.sources[source]
        reader: Reader
        if isinstance(chosen, Texts):
            reader = TextsReader(chosen, plan.tokenizer, plan.seeds[source])
        else:
            assert isinstance(chosen, Stream)
            done = {lane: cursor[0] for lane, cursor in cursors.items()}
            reader = StreamReader(chosen, plan.tokenizer, plan.seeds[source], plan.buffer, rows.batch, done)
        return Lanes(reader, plan.pipeline, rows.batch, cursors)

    def _check(self, row: Row, source: int) -> None:
        size = self.of.plan.vocab_size
        if size is None:
            return
        largest = max(int(row.ids.max()), int(row.targets.max()))
        if largest >= size or min(int(row.ids.min()), int(row.targets.min())) < 0:
            raise BadData(f"source {source + 1}, documents {row.documents.tolist()[:3]}: has token {largest}; expected "
                          f"0 to {size - 1}, the rows of the model's embedding. The file is damaged, or of another "
                          "tokenizer")
