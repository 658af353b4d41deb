"""What a loader reads: the sources of a run opened, and the order of their rows settled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from llmtool.errors import BadData, Contradiction, MissingFact
from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.train.config import DataConfig
from llmtool.train.data.collect import collect
from llmtool.train.data.documents import Stream, Texts
from llmtool.train.data.open import open_texts
from llmtool.train.data.order import Mixture, Union, derive
from llmtool.train.data.planned import PlannedRows
from llmtool.train.data.rows import Pipeline, make_pipeline
from llmtool.train.data.synthetic import SyntheticRows
from llmtool.train.data.tokens import TokenFiles
from llmtool.train.data.words import Word, parse_word

SMALL = 8 << 20  # bytes of text that are tokenized at the start rather than as they come
RowSource = PlannedRows | SyntheticRows | Texts | Stream


@dataclass(frozen=True)
class Plan:
    """Everything that rows depend on; goes to the workers.

    ``order``: a row's number -> source and the number among its rows. ``rows``: how many in all (None: no end).
    """

    sources: tuple[RowSource, ...]
    seeds: tuple[int, ...]
    order: Callable[[int], tuple[int, int]]
    pipeline: Pipeline
    tokenizer: Tokenizer | None
    buffer: int
    vocab_size: int | None
    rows: int | None

    @property
    def lanes(self) -> tuple[int, ...]:
        """The sources that are read as they come."""
        return tuple(i for i, source in enumerate(self.sources) if isinstance(source, Texts | Stream))


def make_plan(data: DataConfig, *, tokenizer: Tokenizer | None, seq_len: int, batch: int, seed: int,
              vocab_size: int | None, validation: bool, max_batches: int | None, small: int) -> Plan:
    """Open the sources of ``data`` (or its validation sources). ``batch``: rows of the global batch.

    Raises LlmtoolError for what cannot be read, and for a tokenizer that does not belong to the model or the files.
    """
    texts = data.validation if validation else data.sources
    if not texts:
        raise BadData(f"no {'validation ' * validation}data; expected at least one source, such as jsonl:FILE")
    if seq_len < 2:
        raise BadData(f"rows of {seq_len} tokens; expected at least 2")
    words = [parse_word(text) for text in texts]
    tokens = [TokenFiles(word.path) if word.kind == "tokens" else None for word in words]
    files = [each for each in tokens if each is not None]
    _check_vocabularies(tokenizer, files, vocab_size)
    pipeline = _pipeline(data.pipeline, seq_len, tokenizer, files, words)
    seeds = [derive(seed, data.seed, "validation" if validation else "training", i) for i in range(len(words))]
    finite = validation or data.epochs is not None
    most = None if max_batches is None else max_batches * batch

    def open_rows(word: Word, files: TokenFiles | None, own: int) -> RowSource:
        shuffle = None if validation else own
        if files is not None:
            return _not_empty(PlannedRows(files, pipeline, shuffle), word)
        if word.kind == "synthetic":
            return SyntheticRows(seq_len, _synthetic_size(tokenizer, vocab_size), own)
        if tokenizer is None:
            raise MissingFact(f"{word}: text needs a tokenizer; name one with --tokenizer (data.tokenizer)")
        source = open_texts(word, data.text_field)
        few = isinstance(source, Texts) and len(source) < 4 * batch  # too few to be shared out over the batch
        if finite or few or (source.n_bytes is not None and source.n_bytes <= small):
            enough = most * pipeline.room if validation and most is not None else None
            return _not_empty(PlannedRows(collect(source, tokenizer, str(word), enough), pipeline, shuffle), word)
        return source

    sources = [open_rows(*each) for each in zip(words, tokens, seeds, strict=True)]
    sizes = [len(source) for source in sources if isinstance(source, PlannedRows)]
    known = len(sizes) == len(sources)
    rows = None
    if finite and known:
        rows = ceil(sum(sizes) * (1 if validation or data.epochs is None else data.epochs))
    elif data.epochs is not None and not validation:
        raise BadData("synthetic data has no end, so no epochs; say how many steps")
    order: Callable[[int], tuple[int, int]]
    if known and (validation or all(word.weight is None for word in words)):
        order = Union(sizes, None if validation else derive(seed, data.seed, "order"))
    else:
        order = Mixture([1.0 if word.weight is None else word.weight for word in words])
    if most is not None:
        rows = most if rows is None else min(rows, most)
    return Plan(tuple(sources), tuple(seeds), order, pipeline, tokenizer, data.shuffle_buffer, vocab_size, rows)


def _pipeline(kind: str, seq_len: int, tokenizer: Tokenizer | None, files: Sequence[TokenFiles],
              words: Sequence[Word]) -> Pipeline:
    if tokenizer is not None:
        bos, eos, adds_bos = tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos
    elif files:
        told = files[0].tokenizer
        bos, eos, adds_bos = told["bos_id"], told["eos_id"], told["adds_bos"]
    elif all(word.kind == "synthetic" for word in words):
        bos, eos, adds_bos = None, 0, False  # synthetic documents do not end
    else:
        raise MissingFact("text needs a tokenizer; name one with --tokenizer (data.tokenizer)")
    return make_pipeline(kind, seq_len, bos=bos, eos=eos, adds_bos=adds_bos)


def _check_vocabularies(tokenizer: Tokenizer | None, files: Sequence[TokenFiles], vocab_size: int | None) -> None:
    for each in files:
        each.check_tokenizer(tokenizer.sha if tokenizer is not None else files[0].tokenizer["sha256"])
    for size, what in [(each.vocab_size, str(each.folder)) for each in files] + (
            [(tokenizer.size, "the tokenizer")] if tokenizer is not None else []):
        if vocab_size is not None and size > vocab_size:
            raise Contradiction(f"{what} has {size} entries, but the model's embedding {vocab_size} rows; give the "
                                "model's own tokenizer, or set model.vocab_size")


def _synthetic_size(tokenizer: Tokenizer | None, vocab_size: int | None) -> int:
    size = vocab_size or (tokenizer.size if tokenizer is not None else None)
    if size is None:
        raise MissingFact("synthetic data need a vocabulary's size; give vocab_size or a tokenizer")
    return size


def _not_empty(rows: PlannedRows, word: Word) -> PlannedRows:
    if not len(rows):
        raise BadData(f"{word}: empty; expected documents with text")
    return rows
