"""Do two checkpoints, in whatever layouts, compute the same? Their logits on the same token ids, compared.

Equal weights are not enough: a layout read with the wrong order of rope features, or the wrong norm epsilon, has equal
weights and other logits. A Hugging Face folder is also run by transformers, which knows nothing of us.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmtool.errors import BadCheckpoint, Contradiction, MissingFact
from llmtool.evaluate.loading import Model, Told
from llmtool.model.decoder import Decoder
from llmtool.model.part import Compute
from llmtool.model_config import ModelConfig

TOLERANCE = 1e-3
ROW = 256  # tokens: late positions tell wrong rope bases and scalings, which early ones hide
TEXT = """The tide had gone out and left the boats lying on the sand, each leaning on its side as if asleep. Old Marta
walked between them with a lantern and a bucket of tar, looking for the places where the winter had opened the seams.
"You are early," said the boy who was mending nets by the wall. "The water will not be back before six."
"Then I have four hours," she answered, "and eleven boats. Work it out: 4 × 60 / 11 is a little under 22 minutes each."
He laughed, put down his needle and came to hold the light. By the time the first thin line of foam showed at the mouth
of the harbour they had done nine of them, their hands were black to the wrist, and the boy had learned that a seam
which looks sound in the morning may still let in the sea at night. In the evening the wind turned to the north."""


@dataclass
class Comparison:
    """Logits of ``a`` against those of ``b``: the largest |Δ|, the largest KL divergence (nats) of the two next-token
    distributions, and the share of positions whose likeliest id is the same."""

    a: str
    b: str
    max_abs_diff: float
    kl: float
    top1_agreement: float


@dataclass
class Verification:
    """``comparisons``: A against B, then each Hugging Face folder as transformers runs it against our own run of it."""

    a: str
    b: str
    tolerance: float
    positions: int
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every comparison is within the tolerance."""
        return all(each.max_abs_diff <= self.tolerance for each in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """JSON values, schema llmtool.verify/1."""
        comparisons = [
            {key: value if not isinstance(value, float) or math.isfinite(value) else None for key, value in row.items()}
            for row in map(asdict, self.comparisons)
        ]
        return {"schema": "llmtool.verify/1", "equal": self.equal, **vars(self), "comparisons": comparisons}


def verify_checkpoints(
    a: str | Path,
    b: str | Path,
    *,
    layout_a: str | None = None,
    layout_b: str | None = None,
    model_config: str | ModelConfig | None = None,
    tokenizer: str | Path | None = None,
    step: int | None = None,
    expected: Mapping[str, Any] | None = None,
    cast: str | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    mesh: str | Mesh | None = None,
    progress: Told = lambda stage, done, total: None,
) -> Verification:
    """Run both in float32 on 256 random ids and, where a tokenizer is found, on 256 of an English text.

    Where the model has fewer positions, more and shorter rows. ``tolerance`` is on logits; ``step``, ``expected`` and
    ``cast`` are of A, whose weights are rounded to ``cast`` first, as a conversion with ``--dtype`` rounded B's. Facts
    that one side lacks are taken from the other. The models are in memory one after the other. Raises Contradiction
    where the two are not models of the same sizes.
    """
    open_a = partial(Model.open, a, layout=layout_a, step=step, expected=expected, mesh=mesh)
    open_b = partial(Model.open, b, layout=layout_b, mesh=mesh)
    with _opened(open_a, open_b, model_config) as (first, second):
        _check_same(first, second, str(a), str(b))
        n_vocab = min(first.config.vocab_size, second.config.vocab_size)
        out = Verification(str(a), str(b), tolerance, 0)
        ids = _ids((first, second), tokenizer, n_vocab, seed, out)
        out.positions = ids.size
        logits_a = _logits(first, ids, cast, progress)[..., :n_vocab]
        logits_b = _logits(second, ids, None, progress)[..., :n_vocab]
        out.comparisons.append(_compare("A", logits_a, "B", logits_b))
        if first.checkpoint.layout == "hf" and cast is None:
            theirs = _by_transformers(first.checkpoint.root, ids, progress)[..., :n_vocab]
            out.comparisons.append(_compare("A by transformers", theirs, "A", logits_a))
        if second.checkpoint.layout == "hf":
            theirs = _by_transformers(second.checkpoint.root, ids, progress)[..., :n_vocab]
            out.comparisons.append(_compare("B by transformers", theirs, "B", logits_b))
    return out


@contextmanager
def _opened(
    open_a: Callable[..., Model], open_b: Callable[..., Model], told: str | ModelConfig | None
) -> Iterator[tuple[Model, Model]]:
    try:
        first = open_a(model_config=told)
    except MissingFact:
        with open_b(model_config=told) as second, open_a(model_config=second.config) as first:
            yield first, second
        return
    with first:
        try:
            second = open_b(model_config=told)
        except MissingFact:
            second = open_b(model_config=first.config)
        with second:
            yield first, second


def _check_same(first: Model, second: Model, a: str, b: str) -> None:
    """Sizes decide whether logits can be compared; all else shows in the logits."""
    sizes = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")
    if differing := [name for name in sizes if getattr(first.config, name) != getattr(second.config, name)]:
        values = ", ".join(f"{n} {getattr(first.config, n)} and {getattr(second.config, n)}" for n in differing)
        raise Contradiction(f"{a} and {b} are models of different sizes: {values}")


def _ids(
    models: Sequence[Model], tokenizer: str | Path | None, n_vocab: int, seed: int, out: Verification
) -> np.ndarray:
    """Rows of token ids, [rows, T]."""
    length = min([ROW, *(model.config.max_positions or ROW for model in models)])
    rows = [*_cut(np.random.default_rng(seed).integers(0, n_vocab, ROW), length)]
    if n_vocab != max(model.config.vocab_size for model in models):
        out.notes.append(f"the embeddings have {models[0].config.vocab_size} and {models[1].config.vocab_size} rows; "
                         f"the first {n_vocab} are compared")
    try:
        words = _first_tokenizer(models, tokenizer)
        text = words.encode(TEXT)
        rows += _cut(np.array((text * -(-ROW // len(text)))[:ROW]) % n_vocab, length)
    except MissingFact:
        out.notes.append("no tokenizer: random ids alone")
    return np.array(rows, np.int32)


def _first_tokenizer(models: Sequence[Model], path: str | Path | None) -> Any:
    """The one told, or that of whichever has one."""
    try:
        return models[0].tokenizer(path)
    except MissingFact:
        return models[1].tokenizer(path)


def _cut(ids: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Whole rows that hold at least all of ``ids``; the last one begins early enough to be whole."""
    for start in range(0, len(ids), length):
        start = min(start, len(ids) - length)
        yield ids[start : start + length]


def _logits(model: Model, ids: np.ndarray, cast: str | None, progress: Told) -> np.ndarray:
    """Float32 logits [rows, T, V] of our own forward pass, a row at a time."""
    params = model.params(cast or "float32", progress)
    decoder = Decoder(model.config, Compute(jnp.float32, model.mesh))
    whole = NamedSharding(model.mesh, PartitionSpec()) if model.mesh else None
    run: Callable[..., jax.Array] = jax.jit(decoder.apply, out_shardings=whole)
    logits = []
    for index, row in enumerate(ids):
        logits.append(np.asarray(run({"params": params}, row[None])[0]))
        progress("running", index + 1, len(ids))
    return np.stack(logits)


def _by_transformers(path: Path, ids: np.ndarray, progress: Told) -> np.ndarray:
    """Float32 logits [rows, T, V] of transformers on the CPU."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    progress("transformers", 0, len(ids))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BadCheckpoint(f"{path}: transformers cannot load it: {error}") from error
    logits = []
    with torch.inference_mode():
        for index, row in enumerate(torch.from_numpy(ids.astype(np.int64))):
            logits.append(model(row[None]).logits[0].numpy())
            progress("transformers", index + 1, len(ids))
    return np.stack(logits)


def _compare(a: str, x: np.ndarray, b: str, y: np.ndarray) -> Comparison:
    """In float64, a row at a time."""
    gap, kl, same = 0.0, 0.0, 0
    for row_x, row_y in zip(x, y, strict=True):
        p, q = (_log_softmax(row.astype(np.float64)) for row in (row_x, row_y))
        with np.errstate(invalid="ignore"):
            gap = max(gap, _largest(np.abs(row_x.astype(np.float64) - row_y)))
            kl = max(kl, _largest(np.sum(np.exp(p) * (p - q), axis=-1)))
        same += int(np.sum(row_x.argmax(-1) == row_y.argmax(-1)))
    return Comparison(a, b, gap, kl, same / (x.shape[0] * x.shape[1]))


def _largest(x: np.ndarray) -> float:
    """The maximum, infinite where something is not a number; rounding makes a KL of nothing a little negative."""
    return float(np.nan_to_num(np.max(x), nan=np.inf, posinf=np.inf)) if x.size else 0.0


def _log_softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

