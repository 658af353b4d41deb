"""The loader: the same global batches for any number of processes, and exactly where it was after a restart."""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtool.errors import BadData, Contradiction, LlmtoolError, MissingFact
from llmtool.train.batch import Batch
from llmtool.train.config import DataConfig
from llmtool.train.data import make_loader, merge_states, record_ids, tokenize
from llmtool.train.data.loader import Loader
from tests.bytes_tokenizer import BOS, EOS, FIRST, Bytes
from tests.small_tokenizers import sentencepiece_model, write_json_tokenizer

TEXTS = [f"document {i}: " + "every word of it counts " * (i * 7 % 5) for i in range(57)]
KINDS = ("jsonl, small", "jsonl", "gz", "tokens", "mixture", "synthetic")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("sources")
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in TEXTS)
    (folder / "plain.jsonl").write_text(lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_json_tokenizer(folder / "tokenizer")
    tokenize([str(folder / "plain.jsonl")], folder / "tokens", tokenizer=folder / "tokenizer", shards=3)
    told = json.loads((folder / "tokens" / "tokens.json").read_text())
    told["tokenizer"]["sha256"], told["vocab_size"] = Bytes().sha, Bytes.size
    (folder / "tokens" / "tokens.json").write_text(json.dumps(told))
    plain, packed, tokens = (f"{folder}/{name}" for name in ("plain.jsonl", "packed.jsonl.gz", "tokens"))
    return {"jsonl, small": (plain,), "jsonl": (plain,), "gz": (packed,), "tokens": (tokens,),
            "mixture": (f"0.5*{plain}", f"2*{packed}", f"1*{tokens}"), "synthetic": ("synthetic",)}


@pytest.fixture
def loader(sources: dict[str, tuple[str, ...]]) -> Iterator[Callable[..., Loader]]:
    """A loader of a kind; sources are read as they come unless they are small."""
    with ExitStack() as stack:
        def make(kind: str, *, processes: int = 1, index: int = 0, batch: int = 4, tokenizer: Any = None,
                 pipeline: str = "packed", **options: Any) -> Loader:
            given = {name: options.pop(name) for name in ("epochs", "workers", "seed", "validation_words")
                     if name in options}
            config = DataConfig(given.pop("validation_words", sources[kind]), shuffle_buffer=10,
                                pipeline=pipeline, **given)  # type: ignore[arg-type]
            made = make_loader(config, tokenizer=tokenizer or Bytes(), seq_len=24,
                               rows_per_process=batch // processes, process_index=index, process_count=processes,
                               small=1 << 20 if kind == "jsonl, small" else 0, **options)
            stack.callback(made.close)
            return made
        yield make


def take(loader: Loader, n: int) -> list[Batch]:
    return [next(loader) for _ in range(n)]


def same(a: Sequence[Batch], b: Sequence[Batch]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    ) and [record_ids(each) for each in a] == [record_ids(each) for each in b]


def joined(parts: Sequence[Sequence[Batch]]) -> list[Batch]:
    return [Batch(*(np.concatenate(arrays) for arrays in zip(*at, strict=True))) for at in zip(*parts, strict=True)]


@pytest.mark.parametrize("pipeline", ["packed", "pax"])
@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_the_batches_of_one(kind: str, pipeline: str, loader: Callable[..., Loader]) -> None:
    alone = take(loader(kind, pipeline=pipeline), 12)
    for processes in (2, 4):
        parts = [take(loader(kind, pipeline=pipeline, processes=processes, index=i), 12) for i in range(processes)]
        for a, b in zip(alone, joined(parts), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        records = [sum((record_ids(batch) for batch in at), ()) for at in zip(*parts, strict=True)]
        assert records == [record_ids(batch) for batch in alone]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 15), pipeline=st.sampled_from(["packed", "pax"]), before=st.sampled_from([1, 2, 4]),
       after=st.sampled_from([1, 2, 4]))
def test_resumed_on_any_number_of_processes(kind: str, loader: Callable[..., Loader], stop: int, pipeline: str,
                                            before: int, after: int) -> None:
    unbroken = take(loader(kind, pipeline=pipeline), stop + 5)[stop:]
    first = [loader(kind, pipeline=pipeline, processes=before, index=i) for i in range(before)]
    for each in first:
        take(each, stop)
    state = json.loads(json.dumps(merge_states(each.state() for each in first)))
    second = [loader(kind, pipeline=pipeline, processes=after, index=i) for i in range(after)]
    for each in second:
        each.restore(state)
    for a, b in zip(unbroken, joined([take(each, 5) for each in second]), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_can_be_turned_back(kind: str, loader: Callable[..., Loader]) -> None:
    one = loader(kind)
    take(one, 3)
    state = one.state()
    after = take(one, 4)
    one.restore(state)
    assert same(take(one, 4), after)


@pytest.mark.parametrize("kind", ["jsonl, small", "jsonl", "gz", "tokens", "mixture"])
def test_seeds_change_the_order(kind: str, loader: Callable[..., Loader]) -> None:
    assert same(take(loader(kind, seed=1), 3), take(loader(kind, seed=1), 3))
    assert not same(take(loader(kind, seed=1), 3), take(loader(kind, seed=2), 3))


@pytest.mark.parametrize("kind", ["jsonl, small", "tokens"])
@pytest.mark.parametrize("epochs", [1, 2, 0.5])
def test_epochs_read_every_token_as_often(kind: str, epochs: float, loader: Callable[..., Loader]) -> None:
    one = loader(kind, epochs=epochs)
    batches = list(one)
    assert len(batches) == one.batches == np.ceil(np.ceil(epochs * one.batches_per_epoch * 4) / 4)
    assert {batch.ids.shape for batch in batches} == {(4, 24)}
    found = Counter(pair for batch in batches for pair in zip(
        batch.ids[batch.weights > 0].tolist(), batch.targets[batch.weights > 0].tolist(), strict=True))
    if kind == "jsonl, small" and epochs != 0.5:
        whole = [[BOS, *(FIRST + byte for byte in text.encode()), EOS] for text in TEXTS]
        expected = Counter(pair for doc in whole for pair in pairwise(doc))
        assert found == Counter({pair: n * int(epochs) for pair, n in expected.items()})
    seen = {document for batch in batches for row in record_ids(batch) for source, document in row if source == 0}
    assert epochs < 1 or seen == set(range(len(TEXTS)))


@pytest.mark.parametrize("kind", ["jsonl", "gz"])
def test_a_pass_of_what_is_read_as_it_comes_has_every_document(kind: str, loader: Callable[..., Loader]) -> None:
    one, seen = loader(kind), Counter()
    while not seen or min(seen.values()) < 2 or len(seen) < len(TEXTS):
        for row in record_ids(next(one)):
            seen.update({document % len(TEXTS) for _, document in row})
        assert max(seen.values()) < 100
    assert set(seen) == set(range(len(TEXTS)))


def test_the_order_of_a_stream_is_shuffled_within_the_buffer(loader: Callable[..., Loader]) -> None:
    one = loader("gz", batch=1)
    seen = list(dict.fromkeys(document for _ in range(120) for row in record_ids(next(one)) for _, document in row))
    assert sorted(seen[:10]) == [*range(10)] and seen[:10] != [*range(10)]
    assert sorted(seen[10:20]) == [*range(10, 20)]


@pytest.mark.parametrize("kind", ["jsonl", "gz"])
def test_a_process_decodes_its_share_only(kind: str, loader: Callable[..., Loader]) -> None:
    tokenizers = [Bytes() for _ in range(4)]
    for index, tokenizer in enumerate(tokenizers):
        take(loader(kind, processes=4, index=index, tokenizer=tokenizer), 4)
    read = [Counter(tokenizer.encoded) for tokenizer in tokenizers]
    assert all(sum(each.values()) < len(TEXTS) / 2 for each in read)
    assert not set(read[0]) & set(read[1])


def test_validation_is_read_once_in_order(sources: dict[str, tuple[str, ...]]) -> None:
    config = DataConfig(("synthetic",), validation=sources["gz"])
    def make(**options: Any) -> Loader:
        return make_loader(config, tokenizer=Bytes(), seq_len=24, rows_per_process=4, validation=True, **options)

    batches = list(make())
    documents = [document for n, batch in enumerate(batches)
                 for at in range(4) for _, document in record_ids(batch)[(at - n) % 4]]
    assert documents == sorted(documents) and set(documents) == set(range(len(TEXTS)))
    assert same(list(make(seed=5)), batches)
    assert same(list(make(max_batches=2)), batches[:2])


def test_a_mixture_keeps_its_weights(loader: Callable[..., Loader]) -> None:
    one = loader("mixture", batch=2)
    counts = Counter(row[0][0] for batch in take(one, 70) for row in record_ids(batch))
    assert counts == {0: 20, 1: 80, 2: 40}


def test_sources_of_known_sizes_are_read_as_one(tmp_path: Path) -> None:
    for name, n in (("a", 3), ("b", 30)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * 23}) + "\n" for _ in range(n)))
    words = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    one = make_loader(DataConfig(words, epochs=1), tokenizer=Bytes(), seq_len=24, rows_per_process=3)
    counts = Counter(row[0] for batch in one for row in record_ids(batch))
    assert counts == {(0, n): 1 for n in range(3)} | {(1, n): 1 for n in range(30)}
    assert one.batches == 11


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "mixture"])
def test_workers_change_nothing(kind: str, loader: Callable[..., Loader], tmp_path: Path) -> None:
    tokenizer = _real(tmp_path)
    alone, worked = loader(kind, tokenizer=tokenizer), loader(kind, tokenizer=tokenizer, workers=2)
    expected = take(alone, 8)
    assert same(take(worked, 3), expected[:3])
    state = worked.state()
    assert state == json.loads(json.dumps(state))
    worked.restore(state)
    assert same(take(worked, 5), expected[3:])


def _real(folder: Path) -> Any:
    """Workers find no classes of the tests."""
    from llmtool.evaluate.tokenizer import load_tokenizer

    (folder / "small.model").write_bytes(sentencepiece_model(300))
    tokenizer = load_tokenizer(folder / "small.model")
    tokenizer.sha = Bytes().sha
    return tokenizer


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "good"}) + "\n" + "{bad\n" * 40)
    one = make_loader(DataConfig((str(tmp_path / "a.jsonl"),), workers=2), tokenizer=_real(tmp_path), seq_len=24,
                      rows_per_process=2, small=0)
    with pytest.raises(BadData, match=r"a\.jsonl:\d+: not JSON"):
        take(one, 3)
    one.close()


def test_workers_divide_rows_that_come_from_lanes(loader: Callable[..., Loader]) -> None:
    assert loader("jsonl", batch=6, workers=4).workers == 3
    assert loader("jsonl", batch=1, workers=4).workers == 1
    assert loader("tokens", batch=6, workers=4).workers == 4


@pytest.mark.parametrize("change", [{"batch": 8}, {"seed": 9}, {"pipeline": "pax"},
                                    {"tokenizer": Bytes(sha="cd" * 32)}])
def test_the_position_of_another_run_is_refused(change: dict[str, Any], loader: Callable[..., Loader]) -> None:
    one = loader("jsonl")
    take(one, 2)
    with pytest.raises(Contradiction, match="another run"):
        loader("jsonl", **change).restore(one.state())


def test_a_position_of_one_process_of_several_is_refused(loader: Callable[..., Loader]) -> None:
    one, other = (loader("jsonl", processes=2, index=i) for i in range(2))
    take(one, 2)
    with pytest.raises(Contradiction, match="merge_states"):
        other.restore(one.state())
    with pytest.raises(Contradiction, match="different steps"):
        merge_states([one.state(), other.state()])
    with pytest.raises(Contradiction, match="schema"):
        one.restore({"lanes": {}})


def test_what_does_not_belong_together(sources: dict[str, tuple[str, ...]]) -> None:
    def make(words: tuple[str, ...], tokenizer: Any = None, **options: Any) -> Loader:
        return make_loader(DataConfig(words, **{k: options.pop(k) for k in ("epochs",) if k in options}),
                           tokenizer=tokenizer, seq_len=24, rows_per_process=2, **options)

    with pytest.raises(Contradiction, match="SHA-256"):
        make(sources["tokens"], Bytes(sha="00" * 32))
    with pytest.raises(Contradiction, match=r"259 entries.*100 rows"):
        make(sources["jsonl"], Bytes(), vocab_size=100)
    with pytest.raises(Contradiction, match=r"259 entries.*100 rows"):
        make(sources["tokens"], vocab_size=100)
    with pytest.raises(MissingFact, match="tokenizer"):
        make(sources["jsonl"])
    with pytest.raises(MissingFact, match="vocab"):
        make(("synthetic",))
    with pytest.raises(BadData, match="no end"):
        make(("synthetic",), Bytes(), epochs=1)
    with pytest.raises(BadData, match="no validation data"):
        make(("synthetic",), Bytes(), validation=True)
    with pytest.raises(LlmtoolError, match="no data"):
        make((), Bytes())


def test_a_token_beyond_the_vocabulary_is_found(sources: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    folder = Path(sources["tokens"][0])
    copy = tmp_path / "tokens"
    copy.mkdir()
    for file in folder.iterdir():
        data = file.read_bytes()
        (copy / file.name).write_bytes(b"\xff" * len(data) if file.suffix == ".tokens" else data)
    one = make_loader(DataConfig((str(copy),)), tokenizer=Bytes(), seq_len=24, rows_per_process=2, vocab_size=259)
    with pytest.raises(BadData, match="token 65535"):
        next(one)
    one.close()


def test_token_files_need_no_tokenizer(sources: dict[str, tuple[str, ...]]) -> None:
    one = make_loader(DataConfig(sources["tokens"]), tokenizer=None, seq_len=24, rows_per_process=2)
    assert next(one).ids.shape == (2, 24)
    one.close()
