"""Batches for training, each process its own rows of them, with a position that can be saved."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import numpy as np

from llmtool.errors import Contradiction
from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.train.batch import Batch
from llmtool.train.config import DataConfig
from llmtool.train.data.iterate import Rows
from llmtool.train.data.plan import SMALL, Plan, make_plan
from llmtool.train.data.planned import PlannedRows

SCHEMA = "llmtool.data/1"
_BATCHES_AHEAD = 2


class LoadedBatch(Batch):
    """A Batch that remembers which documents its rows are of; ``record_ids`` tells them."""

    records: tuple[tuple[tuple[int, int], ...], ...] = ()


def record_ids(batch: Batch) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each row of a batch from a Loader, (source, document) of each document that it has tokens of."""
    return batch.records if isinstance(batch, LoadedBatch) else ()


def make_loader(
    data: DataConfig,
    *,
    tokenizer: Tokenizer | None,
    seq_len: int,
    rows_per_process: int,
    process_index: int = 0,
    process_count: int = 1,
    seed: int = 0,
    vocab_size: int | None = None,
    validation: bool = False,
    max_batches: int | None = None,
    small: int = SMALL,
) -> "Loader":
    """Batches of ``rows_per_process`` rows of ``seq_len``: this process's share of the global batch.

    Which rows a global batch has depends on ``data``, ``seed`` and the global batch's size alone, not on how many
    processes share it. ``vocab_size`` is the model's, against which tokenizers and tokens are checked; synthetic data
    without a tokenizer need it. ``validation``: ``data.validation`` once, in order, instead of ``data.sources``.
    ``max_batches`` ends the data early. Text sources of at most ``small`` bytes, validation sets, and all sources where
    ``data.epochs`` is given, are tokenized at the start. Without weights, sources of known sizes are read as one; else
    in turns by weight. The last batch of finite data is filled up with rows of padding.

    Raises LlmtoolError where a source cannot be read or does not fit the tokenizer or the model; so does ``next``.
    """
    global_batch = rows_per_process * process_count
    plan = make_plan(data, tokenizer=tokenizer, seq_len=seq_len, batch=global_batch, seed=seed, vocab_size=vocab_size,
                     validation=validation, max_batches=max_batches, small=small)
    run = {"batch": global_batch, "seq_len": seq_len, "pipeline": data.pipeline, "seed": [seed, data.seed],
           "tokenizer": tokenizer.sha if tokenizer is not None else None, "sources": _sizes(plan),
           "buffer": data.shuffle_buffer}
    return Loader(plan, run, rows_per_process, process_index, data.workers)


def merge_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One state out of those that the processes of a run have at the same step; any number of processes can go on from
    it. Raises Contradiction where they are not of one step of one run."""
    first, *others = states
    lanes = dict(first["lanes"])
    for other in others:
        if (other["batches"], other["run"]) != (first["batches"], first["run"]):
            raise Contradiction("data positions of different steps or runs cannot be joined; expected those that the "
                                "processes of one run saved at one step")
        lanes |= other["lanes"]
    return first | {"lanes": lanes}


class Loader(Iterator[Batch]):
    """An iterator of Batch. ``batches``: how many there are from the beginning (None: no end)."""

    def __init__(self, plan: Plan, run: dict[str, Any], rows: int, process_index: int, workers: int):
        self.plan, self.run, self.rows, self.first = plan, run, rows, rows * process_index
        # A lane belongs to one worker, so workers must divide the rows where there are lanes.
        self.workers = max(n for n in range(workers + 1) if not n or not plan.lanes or rows % n == 0)
        self.batches = None if plan.rows is None else math.ceil(plan.rows / run["batch"])
        self.done = 0
        self.cursors = np.zeros((rows, len(plan.lanes), 2), np.int64)
        self._rows: Any = None

    @property
    def batches_per_epoch(self) -> float | None:
        """Global batches in one pass over all sources; None where nobody knows."""
        sizes = [len(source) for source in self.plan.sources if isinstance(source, PlannedRows)]
        return sum(sizes) / self.run["batch"] if len(sizes) == len(self.plan.sources) else None

    def __next__(self) -> Batch:
        if self.batches is not None and self.done >= self.batches:
            self.close()
            raise StopIteration
        if self._rows is None:
            self._rows = iter(self._dataset())
        rows = [next(self._rows) for _ in range(self.rows)]
        self.done += 1
        self.cursors = np.stack([row["cursor"] for row in rows]).reshape(self.cursors.shape)
        batch = LoadedBatch(*(np.stack([row[name] for row in rows]) for name in Batch._fields))
        batch.records = tuple(tuple((int(row["source"]), int(document)) for document in row["documents"])
                              for row in rows)
        return batch

    def state(self) -> dict[str, Any]:
        """The position behind the batch that was given last, fit for JSON. Where sources are read as they come, it
        tells of this process's rows only: see ``merge_states``."""
        lanes = {str(self.first + at): cursors for at, cursors in enumerate(self.cursors.tolist())}
        return {"schema": SCHEMA, "run": self.run, "batches": self.done, "lanes": lanes if self.plan.lanes else {}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, of this run on any number of processes. Raises Contradiction for another run's."""
        told = state.get("run", {})
        if state.get("schema") != SCHEMA:
            raise Contradiction(f"a data position of schema {state.get('schema')!r}; expected {SCHEMA!r}")
        if differing := [key for key in self.run if told.get(key) != self.run[key]]:
            raise Contradiction("the data position was saved by another run: " + "; ".join(
                f"{key} was {told.get(key)}, is {self.run[key]}" for key in differing)
                + ". Go on with the same, or start without --resume")
        if self.plan.lanes:
            places = [str(self.first + at) for at in range(self.rows)]
            if missing := [place for place in places if place not in state["lanes"]]:
                raise Contradiction(f"the data position tells nothing of rows {', '.join(missing[:5])} of the batch; "
                                    "it was saved by one process of several, expected all of them (merge_states)")
            self.cursors = np.array([state["lanes"][place] for place in places], np.int64).reshape(self.cursors.shape)
        self.close()
        self.done = state["batches"]

    def close(self) -> None:
        """End workers and threads; the next batch starts them again."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def _dataset(self) -> grain.IterDataset:
        rows: grain.IterDataset = Rows(self.plan, self.first, self.rows, self.run["batch"], self.done, self.cursors)
        ahead = _BATCHES_AHEAD * self.rows
        if not self.workers:
            return grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=ahead)
        from absl import flags

        if not flags.FLAGS.is_parsed():  # Grain reads its flags, and whoever did not start as an absl app has none
            flags.FLAGS.mark_as_parsed()
        return rows.mp_prefetch(grain.MultiprocessingOptions(
            num_workers=self.workers, per_worker_buffer_size=math.ceil(ahead / self.workers)))


def _sizes(plan: Plan) -> list[int | None]:
    """Rows, or documents, of each source: data that have changed are not the same run's."""
    return [len(source) if hasattr(source, "__len__") else None for source in plan.sources]
