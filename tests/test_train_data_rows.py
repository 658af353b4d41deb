"""Packing: whatever the documents and the row length, each token is read once, asked for once, and seen by its own."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool.errors import BadData, MissingFact
from llmtool.train.data import lanes as lanes_module
from llmtool.train.data.lanes import Lanes, Reader
from llmtool.train.data.order import Mixture, Union, shuffled, turned
from llmtool.train.data.planned import PlannedRows
from llmtool.train.data.rows import Packed, Pax, Pipeline, Row, make_pipeline
from llmtool.train.data.synthetic import SyntheticRows
from llmtool.train.data.tokens import MemoryTokens
from tests.bytes_tokenizer import BOS, EOS, Bytes

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(3, 99), max_size=23), min_size=1, max_size=12)
lengths = st.integers(2, 17)
bos = st.sampled_from([BOS, None])


@pytest.fixture(scope="module", autouse=True)
def soon_tired_of_empty_documents() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module, "_EMPTY", 100)
        yield


def in_memory(docs: Documents) -> MemoryTokens:
    offsets = np.cumsum([0, *map(len, docs)])
    return MemoryTokens(np.array([token for doc in docs for token in doc], np.uint16), offsets)


def pairs(docs: Documents, bos: int | None) -> list[tuple[int, int]]:
    """(read, asked for), worked out one document at a time."""
    out = []
    for doc in docs:
        whole = [*([] if bos is None else [bos]), *doc, EOS]
        out += list(pairwise(whole))
    return out


def counted(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [(int(i), int(t)) for row in rows for i, t, w in zip(row.ids, row.targets, row.weights, strict=True) if w]


def all_rows(docs: Documents, pipeline: Pipeline) -> list[Row]:
    plan = PlannedRows(in_memory(docs), pipeline, None)
    return [plan.row(n) for n in range(len(plan))]


@given(documents, lengths, bos)
def test_packed_loses_and_doubles_nothing(docs: Documents, seq_len: int, bos: int | None) -> None:
    rows = all_rows(docs, Packed(seq_len, bos, EOS))
    assert counted(rows) == pairs(docs, bos)
    assert all(row.weights.all() for row in rows[:-1])  # padding in the last row only
    for row in rows:
        assert {a.shape for a in row[:5]} == {(seq_len,)}
        assert [a.dtype for a in row[:5]] == [np.int32, np.int32, np.float32, np.int32, np.int32]


@given(documents, lengths, bos)
def test_packed_segments_and_positions(docs: Documents, seq_len: int, bos: int | None) -> None:
    owner = [n for n, doc in enumerate(docs) for _ in pairs([doc], bos)]
    for number, row in enumerate(all_rows(docs, Packed(seq_len, bos, EOS))):
        mine = owner[number * seq_len:(number + 1) * seq_len]
        changes = [i for i in range(len(mine)) if i == 0 or mine[i] != mine[i - 1]]
        expected = [sum(c <= i for c in changes) for i in range(len(mine))]
        assert row.segments.tolist() == expected + [0] * (seq_len - len(mine))
        assert row.positions[:len(mine)].tolist() == [i - max(c for c in changes if c <= i) for i in range(len(mine))]
        assert row.documents.tolist() == [mine[c] for c in changes]
        assert not any(part[len(mine):].any() for part in row[:5])


def test_packed_by_hand() -> None:
    first, second = all_rows([[10, 11, 12], [20, 21]], Packed(4, BOS, EOS))
    assert first.ids.tolist() == [BOS, 10, 11, 12] and first.targets.tolist() == [10, 11, 12, EOS]
    assert second.ids.tolist() == [BOS, 20, 21, 0] and second.targets.tolist() == [20, 21, EOS, 0]
    assert second.segments.tolist() == [1, 1, 1, 0] and second.weights.tolist() == [1, 1, 1, 0]
    row, = all_rows([[10, 11], [20, 21, 22]], Packed(6, None, EOS))
    assert row.ids.tolist() == [10, 11, 20, 21, 22, 0] and row.targets.tolist() == [11, EOS, 21, 22, EOS, 0]
    assert row.segments.tolist() == [1, 1, 2, 2, 2, 0] and row.positions.tolist() == [0, 1, 0, 1, 2, 0]


@given(documents, lengths, st.integers(1, 5))
def test_pax_joins_cuts_and_ends(docs: Documents, seq_len: int, group: int) -> None:
    pipeline = Pax(seq_len, None, EOS)
    pipeline.group = group
    expected = []
    for start in range(0, len(docs), group):
        joined = [token for doc in docs[start:start + group] for token in doc]
        expected += [joined[i:i + seq_len - 1] for i in range(0, len(joined), seq_len - 1)]
    rows = all_rows(docs, pipeline)
    assert len(rows) == len(expected)
    for row, tokens in zip(rows, expected, strict=True):
        n, rest = len(tokens) + 1, [0] * (seq_len - len(tokens) - 1)
        assert row.targets.tolist() == [*tokens, EOS, *rest]
        assert row.ids.tolist() == [0, *tokens, *rest]
        assert row.weights.tolist() == row.segments.tolist() == [1] * n + rest
        assert row.positions.tolist() == [*range(n), *rest]


def test_pax_joins_128() -> None:
    rows = all_rows([[7]] * 130, Pax(2048, None, EOS))
    assert [int(row.weights.sum()) for row in rows] == [129, 3]
    assert all_rows([[7] * 3000], Pax(2048, None, EOS))[0].targets.tolist() == [7] * 2047 + [EOS]


@settings(max_examples=30)
@given(documents, lengths, bos, st.integers(0, 2**32 - 1))
def test_shuffled_rows_are_the_same_rows_in_every_pass(docs: Documents, seq_len: int, bos: int | None, seed: int
                                                       ) -> None:
    pipeline = Packed(seq_len, bos, EOS)
    plain = PlannedRows(in_memory(docs), pipeline, None)
    mixed = PlannedRows(in_memory(docs), pipeline, seed)
    expected = sorted(plain.row(n).targets.tobytes() for n in range(len(plain)))
    for in_pass in range(3):
        numbers = range(in_pass * len(plain), (in_pass + 1) * len(plain))
        assert sorted(mixed.row(n).targets.tobytes() for n in numbers) == expected


class InTurn(Reader):
    """Documents in their order, over and over."""

    def __init__(self, docs: Documents):
        super().__init__(Bytes())
        self.docs = docs

    def read(self, number: int) -> tuple[int, np.ndarray]:
        return number, np.array(self.docs[number % len(self.docs)], np.int32)


some_tokens = documents.filter(any)


@given(some_tokens, lengths, bos, st.integers(1, 4), st.integers(1, 6), st.sampled_from([None, 1, 3]))
def test_lanes_give_what_rows_by_index_would(docs: Documents, seq_len: int, bos: int | None, lanes: int, rows: int,
                                             group: int | None) -> None:
    pipeline: Pipeline = Packed(seq_len, bos, EOS) if group is None else Pax(seq_len, bos, EOS)
    pipeline.group = group
    read = Lanes(InTurn(docs), pipeline, lanes, {lane: (0, 0) for lane in range(lanes)})
    for lane in range(lanes):
        try:
            found = [read.row(lane) for _ in range(rows)]
        except BadData:  # this lane's documents are all empty
            assert not any(docs[(lane + k * lanes) % len(docs)] for k in range(len(docs)))
            continue
        needed = [docs[(lane + k * lanes) % len(docs)] for k in range(read.cursors[lane][0] + 1 + (group or 0))]
        for got, want in zip(found, all_rows(needed, pipeline), strict=False):
            assert all(np.array_equal(a, b) for a, b in zip(got[:5], want[:5], strict=True))


@given(some_tokens, lengths, st.integers(0, 6), st.sampled_from([None, 2]))
def test_lanes_go_on_from_any_position(docs: Documents, seq_len: int, stop: int, group: int | None) -> None:
    pipeline: Pipeline = Packed(seq_len, BOS, EOS) if group is None else Pax(seq_len, BOS, EOS)
    pipeline.group = group
    whole = Lanes(InTurn(docs), pipeline, 1, {0: (0, 0)})
    before = [whole.row(0) for _ in range(stop)]
    again = Lanes(InTurn(docs), pipeline, 1, dict(whole.cursors))
    assert len(before) == stop
    for _ in range(4):
        assert all(np.array_equal(a, b) for a, b in zip(whole.row(0), again.row(0), strict=True))


def test_documents_without_text_end_with_an_error() -> None:
    with pytest.raises(BadData, match="no text"):
        Lanes(InTurn([[]]), Packed(8, None, EOS), 1, {0: (0, 0)}).row(0)


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 30_000))
def test_a_mixture_keeps_its_shares(weights: list[float], rows: int) -> None:
    mixture = Mixture(weights)
    share = np.array(weights) / sum(weights)
    source, own = mixture(rows)
    assert abs(own - rows * share[source]) <= 2 + 2 * rows / 10_000
    counts = [0] * len(weights)
    for row in range(200):
        source, own = mixture(row)
        assert own == counts[source]  # its rows in order, none left out
        counts[source] += 1
        assert np.abs(counts - (row + 1) * share).max() < len(weights)


def test_a_share_too_small_to_be_drawn_is_an_error() -> None:
    with pytest.raises(BadData, match=r"at least 0\.0001"):
        Mixture([1e-9, 1])


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([None, 0, 7]))
def test_a_union_has_every_row_once_in_a_pass(sizes: list[int], seed: int | None) -> None:
    union, whole = Union(sizes, seed), {(s, n) for s, size in enumerate(sizes) for n in range(size)}
    for in_pass in range(3):
        found = [union(row) for row in range(in_pass * len(whole), (in_pass + 1) * len(whole))]
        assert {(s, n - in_pass * sizes[s]) for s, n in found} == whole


@given(st.integers(1, 16), st.integers(0, 50))
def test_a_batch_is_its_rows_in_a_turned_order(size: int, batch: int) -> None:
    assert sorted(turned(batch, place, size) for place in range(size)) == [*range(batch * size, (batch + 1) * size)]
    assert {turned(b, 0, size) % size for b in range(size)} == set(range(size))  # each place has every remainder


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_a_shuffle_is_a_permutation(size: int, seed: int, in_pass: int) -> None:
    assert sorted(shuffled(i, size, seed, in_pass) for i in range(size)) == [*range(size)]


def test_synthetic_rows_vary_and_can_be_learned() -> None:
    rows = [SyntheticRows(256, 1000, seed=3).row(n) for n in range(20)]
    again = SyntheticRows(256, 1000, seed=3).row(7)
    assert all(np.array_equal(a, b) for a, b in zip(rows[7], again, strict=True))
    assert not np.array_equal(rows[7].ids, SyntheticRows(256, 1000, seed=4).row(7).ids)
    tokens = np.concatenate([row.ids for row in rows])
    assert tokens.min() >= 0 and tokens.max() < 1000 and len(np.unique(tokens)) > 100
    for row in rows:
        assert row.weights.all() and row.positions.tolist() == [*range(256)] and set(row.segments) == {1}
        best = max(np.mean(row.ids[lag:] == row.ids[:-lag]) for lag in range(4, 65))
        assert 0.6 < best < 0.98  # the motif shows through the noise


def test_a_tokenizer_without_eos_is_refused() -> None:
    with pytest.raises(MissingFact, match="EOS"):
        make_pipeline("packed", 8, bos=None, eos=None, adds_bos=False)
    assert make_pipeline("packed", 8, bos=1, eos=2, adds_bos=False).extra == 0
