"""One jitted program that scores requests on any mesh: log-probabilities, logits and greediness of continuations.

The score of a request does not depend on what else is in its batch, on the batch's shape, or on the mesh, but for the
rounding of float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmtool.errors import OutOfMemory
from llmtool.evaluate.batching import Batch, make_rows, plan_batches
from llmtool.evaluate.requests import Request, Score
from llmtool.model.decoder import Decoder
from llmtool.model.part import Compute
from llmtool.model.sharding import RULES, spec
from llmtool.model_config import ModelConfig

DtypeName = Literal["float32", "bfloat16"]
LOGITS_AT_ONCE = 1 << 26  # numbers on one device, 256 MB
_BATCH_TOKENS = {"cpu": 2048, "gpu": 16384, "tpu": 16384}  # a device
_COMPILE_FLOP = {"cpu": 3e10, "gpu": 1e15, "tpu": 1e15}  # about what a device computes while one shape is compiled


def score_requests(
    params: Mapping[str, Any],
    config: ModelConfig,
    requests: Sequence[Request],
    *,
    dtype: DtypeName = "float32",
    mesh: Mesh | None = None,
    batch_tokens: int | None = None,
    vocabulary: int | None = None,
    round_logits: bool = False,
    on_scored: Callable[[Mapping[int, Score]], None] = lambda scores: None,
) -> list[Score]:
    """The scores, parallel to ``requests``; on every process of the mesh, which must all call this together.

    ``params`` is the native tree on ``mesh``. ``batch_tokens`` bounds a batch, over all devices. Ids from
    ``vocabulary`` on are rows that only pad the embedding: they get no probability. ``round_logits`` rounds logits to
    ``dtype`` first, as Pax does. ``on_scored`` is told the scores of each batch by index, the longest batch first.
    Raises :class:`~llmtool.errors.OutOfMemory` with a batch size to try.
    """
    if not requests:
        return []
    limits = batch_limits(params, mesh, batch_tokens)
    run = scorer(config, dtype, mesh, vocabulary, round_logits)
    scores: dict[int, Score] = {}
    for batch in plan_batches(make_rows(requests), *limits):
        try:
            target_BMK, lse_BM, top_BM = jax.device_get(run(params, _placed(batch.arrays(), mesh)))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
                raise _out_of_memory(batch, limits) from error
            raise
        done = {index: _score(b, cells, ids, target_BMK, lse_BM, top_BM) for index, b, cells, ids in batch.readings()}
        on_scored(done)
        scores |= done
    return [scores[index] for index in range(len(requests))]


class Limits(NamedTuple):
    """What :func:`plan_batches` goes by: see there."""

    batch_tokens: int
    ways: int
    shape_tokens: int


def batch_limits(params: Mapping[str, Any], mesh: Mesh | None, batch_tokens: int | None = None) -> Limits:
    """What suits a model on a mesh; ``batch_tokens`` as in :func:`score_requests`."""
    ways = math.prod(mesh.shape.get(axis, 1) for axis in RULES["B"]) if mesh else 1
    backend = jax.default_backend()
    flop_per_token = sum(2 * x.size for x in jax.tree.leaves(params))
    compile_flop = _COMPILE_FLOP[backend] * (mesh.size if mesh else 1)
    return Limits(batch_tokens or ways * _BATCH_TOKENS[backend], ways, int(compile_flop / flop_per_token))


@lru_cache(maxsize=8)  # a second call with the same model and shapes compiles nothing
def scorer(
    config: ModelConfig,
    dtype: DtypeName,
    mesh: Mesh | None = None,
    vocabulary: int | None = None,
    round_logits: bool = False,
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The jitted program: ``(params, arrays of a Batch)`` to logits of the targets [B, M, K], the logarithm of the
    softmax's denominator [B, M] and the likeliest id [B, M], all float32 or int32 and whole on every process."""
    decoder = Decoder(config, Compute(jnp.dtype(dtype).type, mesh))
    whole = NamedSharding(mesh, PartitionSpec()) if mesh else None

    @partial(jax.jit, out_shardings=whole)
    def run(params: Mapping[str, Any], arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        tree = {"params": params}
        x_BTD: Any = decoder.apply(
            tree, arrays["ids"], arrays.get("positions"), None, arrays.get("branches"), method=Decoder.hidden
        )
        x_BMD = jnp.take_along_axis(x_BTD, arrays["at"][..., None], axis=1)

        def ask(asked: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            x_BmD, target_BmK = asked
            logits_BmV: Any = decoder.apply(tree, x_BmD, method=Decoder.logits)
            if round_logits:
                logits_BmV = logits_BmV.astype(dtype).astype(jnp.float32)
            id_V = jnp.arange(config.vocab_size)
            if vocabulary is not None and vocabulary < config.vocab_size:
                logits_BmV = jnp.where(id_V < vocabulary, logits_BmV, -jnp.inf)
            # A sum over the vocabulary, not a gather: the vocabulary may be split over devices.
            chosen_BmKV = jnp.where(id_V == target_BmK[..., None], logits_BmV[:, :, None], 0)
            return jnp.sum(chosen_BmKV, -1), jax.nn.logsumexp(logits_BmV, -1), jnp.argmax(logits_BmV, -1)

        return _in_blocks(ask, x_BMD, arrays["targets"], config.vocab_size, mesh)

    return run


def _in_blocks(
    ask: Callable[..., Any], x_BMD: jax.Array, target_BMK: jax.Array, n_vocab: int, mesh: Mesh | None
) -> Any:
    """``ask`` over few enough places at a time that their logits fit."""
    B, M, _ = x_BMD.shape
    m = max(1, min(M, LOGITS_AT_ONCE * (mesh.size if mesh else 1) // (B * n_vocab)))
    if m == M:
        return ask((x_BMD, target_BMK))
    n = -(-M // m)

    def split(x_BMz: jax.Array) -> jax.Array:
        padded = jnp.pad(x_BMz, ((0, 0), (0, n * m - M), (0, 0)))
        return jnp.moveaxis(padded.reshape(B, n, m, -1), 1, 0)

    def join(x_nBmz: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_nBmz, 0, 1).reshape(B, n * m, *x_nBmz.shape[3:])[:, :M]

    return jax.tree.map(join, jax.lax.map(ask, (split(x_BMD), split(target_BMK))))


def _placed(arrays: dict[str, np.ndarray], mesh: Mesh | None) -> dict[str, Any]:
    """The arrays of a batch on the mesh, each process giving its devices their rows."""
    if mesh is None:
        return dict(arrays)
    return {
        name: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec(("B",) + ("",) * (x.ndim - 1), x.shape, mesh)), x.__getitem__
        )
        for name, x in arrays.items()
    }


def _score(
    b: int, cells: list[tuple[int, int]], ids: tuple[int, ...], target_BMK: np.ndarray, lse_BM: np.ndarray,
    top_BM: np.ndarray,
) -> Score:
    logits = [float(target_BMK[b, m, k]) for m, k in cells]
    return Score(
        logprobs=tuple(logit - float(lse_BM[b, m]) for logit, (m, _) in zip(logits, cells, strict=True)),
        logits=tuple(logits),
        greedy=all(int(top_BM[b, m]) == token for (m, _), token in zip(cells, ids, strict=True)),
    )


def _out_of_memory(batch: Batch, limits: Limits) -> OutOfMemory:
    shape, ways = batch.shape, limits.ways
    what = f"out of device memory in a batch of {shape.rows} × {shape.length} tokens, the longest there is"
    if shape.rows == ways:
        return OutOfMemory(f"{what}, and there is no smaller one; give the model more devices (--mesh fsdp=…,tensor=…) "
                           "or --dtype bfloat16")
    half = max(shape.rows // 2 // ways, 1) * ways * shape.length
    return OutOfMemory(f"{what}; try --batch-tokens {half} (now {limits.batch_tokens})")
