"""Rows as documents come: where their lengths are not known before they are read.

Each place of the global batch is a *lane* with documents of its own: lane j of B has documents j, j + B, j + 2B, … of
the shuffled order, and packs them one after the other. A process reads the lanes of its places only; what a lane gives
depends on B, not on the number of processes. A lane's position is two numbers: how many of its documents are done, and
how many places of the one that is not.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from llmtool.errors import BadData
from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.train.data.documents import Stream, Texts, encode
from llmtool.train.data.order import shuffled
from llmtool.train.data.rows import Piece, Pipeline, Row

_EMPTY = 100_000  # documents without a token, one after the other: there is nothing to train on


class Reader(ABC):
    """Documents in the order of a run, which has no end: ``number`` counts over all passes and lanes."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @abstractmethod
    def read(self, number: int) -> tuple[int, np.ndarray]:
        """The document's name (an int64, the same in every pass if it has an index) and its tokens."""


class TextsReader(Reader):
    """Every pass in an order of its own."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, seed: int):
        super().__init__(tokenizer)
        self.texts, self.seed = texts, seed

    def read(self, number: int) -> tuple[int, np.ndarray]:
        in_pass, at = divmod(number, len(self.texts))
        index = shuffled(at, len(self.texts), self.seed, in_pass)
        return index, encode(self.tokenizer, self.texts.text(index), self.texts.where(index))


class StreamReader(Reader):
    """A stream is read in blocks of ``buffer`` records, and each block in an order of its own.

    Numbers are asked for lane by lane, each lane's own in order. Records of other processes' lanes are read past, not
    decoded; those of lanes that lag are kept until they are asked for. ``cursors``: the next document of each lane.
    """

    def __init__(self, stream: Stream, tokenizer: Tokenizer, seed: int, buffer: int, lanes: int,
                 cursors: dict[int, int]):
        super().__init__(tokenizer)
        self.stream, self.seed, self.buffer, self.lanes, self.cursors = stream, seed, buffer, lanes, cursors
        first = min(done * lanes + lane for lane, done in cursors.items())
        self.block = first // buffer
        self.kept: dict[int, tuple[int, Any]] = {}
        self.source = self._from(self.block * buffer)

    def read(self, number: int) -> tuple[int, np.ndarray]:
        while number not in self.kept:
            self._next_block()
        name, record = self.kept.pop(number)
        return name, encode(self.tokenizer, self.stream.text(record), self.stream.where(record))

    def _next_block(self) -> None:
        start = self.block * self.buffer
        records = [next(self.source) for _ in range(self.buffer)]
        for at in range(self.buffer):
            done, lane = divmod(start + at, self.lanes)
            if done >= self.cursors.get(lane, done + 1):
                index = shuffled(at, self.buffer, self.seed, self.block)
                self.kept[start + at] = start + index, records[index]
        self.block += 1

    def _from(self, number: int) -> Iterator[Any]:
        """Records from ``number`` on, over and over."""
        while True:
            count = 0
            for record in self.stream.records():
                count += 1
                if number:
                    number -= 1
                else:
                    yield record
            if not count:
                raise BadData("a stream of the data is empty; expected documents")
            number %= count


class Lanes:
    """The lanes of a source that one process, or one worker of it, reads. ``cursors``: lane -> (documents done, places
    done of the next)."""

    def __init__(self, reader: Reader, pipeline: Pipeline, lanes: int, cursors: dict[int, tuple[int, int]]):
        self.reader, self.pipeline, self.lanes, self.cursors = reader, pipeline, lanes, cursors
        self.open: dict[int, tuple[int, np.ndarray]] = {}

    def row(self, lane: int) -> Row:
        """The lane's next row; moves its cursor behind it."""
        done, place = self.cursors[lane]
        pieces: list[Piece] = []
        room, empty = self.pipeline.room, 0
        while room:
            if lane not in self.open:
                self.open[lane] = self.reader.read(done * self.lanes + lane)
            name, tokens = self.open[lane]
            stop = min(place + room, len(tokens) + self.pipeline.extra)
            if stop > place:
                pieces.append(Piece(name, tokens, place, stop))
                room, empty = room - (stop - place), 0
            place = stop
            if place == len(tokens) + self.pipeline.extra:
                del self.open[lane]
                done, place, empty = done + 1, 0, empty + 1
                if empty > _EMPTY:
                    raise BadData(f"{_EMPTY:,} documents in a row have no text; expected some to train on")
                if self.pipeline.group and done % self.pipeline.group == 0 and pieces:
                    break
        self.cursors[lane] = done, place
        return self.pipeline.row(pieces)
