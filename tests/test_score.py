"""The scorer: right numbers, whatever the batch, its shape, its branches or the mesh."""

import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtool import params
from llmtool.errors import Contradiction, OutOfMemory
from llmtool.evaluate import score, scoring
from llmtool.evaluate.batching import GRANULE, MAX_SHAPES, make_rows, plan_batches
from llmtool.evaluate.requests import Request, Score
from llmtool.evaluate.results import weights_fingerprint
from llmtool.evaluate.scoring import score_requests
from llmtool.model.decoder import Decoder
from llmtool.model.load import load_params
from llmtool.model.mesh import make_mesh
from llmtool.model.part import Compute
from llmtool.model_config import ModelConfig

SIZES = {"vocab_size": 64, "d_model": 24, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 6, "d_ff": 40}
LLAMA = ModelConfig("llama", **SIZES, norm="rmsnorm", gated=True, position="rope", tied=False, norm_eps=1e-5,
                    activation="silu", rope_theta=1e4)
GPT = ModelConfig("gpt", **SIZES | {"n_kv_heads": 8}, norm="layernorm", gated=False, position="learned", tied=True,
                  norm_eps=1e-5, activation="gelu_tanh", max_positions=64, qkv_bias=True, attn_out_bias=True,
                  mlp_bias=True)
GLAM = ModelConfig("glam", **SIZES | {"n_kv_heads": 8}, norm="rmsnorm", gated=True, position="t5", tied=True,
                   norm_eps=1e-6, activation="gelu_tanh", n_experts=4, experts_per_token=2, expert_d_ff=20,
                   expert_activation="relu", block_period=2, moe_layers_in_block=(0,), relative_buckets=8,
                   relative_max_distance=12, extra_softmax_logit=True, scale_logits=True)
CONFIGS = {"llama": LLAMA, "gpt": GPT, "glam": GLAM}


class Drawn:
    """Weights drawn from their names."""

    def __init__(self, config: ModelConfig):
        self.templates = {w.name: w.template for w in params.weights(config)}
        self.sizes = params.sizes(config)

    def weight(self, name: str) -> np.ndarray:
        """One weight; rotated ones spelt out in halves and pairs, as conversion's views are."""
        template = self.templates[name]
        shape = [self.sizes[axis] for axis in params.TABLE[template].split()]
        x = 0.3 * np.random.default_rng([*name.encode()]).standard_normal(shape, np.float32)
        return x.reshape(*shape[:-1], 2, -1) if template in params.ROTATED else x


def draw_requests(n: int, seed: int = 0) -> list[Request]:
    """``n`` items: one answer of 1 to 3 ids, or two of one id, or three of several with common beginnings."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(64), k=draw.randint(low, high)))

    requests: list[Request] = []
    for item in range(n):
        context, first = ids(1, 30), len(requests)
        match item % 3:
            case 0:
                answers = [ids(1, 3)]
            case 1:
                answers = [ids(1, 1), ids(1, 1)]
            case _:
                stem = ids(1, 2)
                answers = [stem + ids(1, 3), ids(2, 4), stem]
        requests += [Request(item, choice, context, answer, first) for choice, answer in enumerate(answers)]
    return requests


def one_by_one(model: SimpleNamespace, requests: list[Request], cut: int | None = None) -> list[Score]:
    """Each request by a plain forward pass of its own, the log-softmax in float64."""
    forward = jax.jit(Decoder(model.config).apply)
    scores = []
    for request in requests:
        ids = np.zeros((1, 48), np.int32)
        ids[0, : request.length] = request.inputs
        logits = np.asarray(forward({"params": model.params}, ids)[0], np.float64)[:, :cut]
        rows = logits[len(request.context) - 1 : request.length]
        lse = np.log(np.exp(rows).sum(-1))
        told = rows[range(len(rows)), request.continuation]
        greedy = bool((rows.argmax(-1) == request.continuation).all())
        scores.append(Score(tuple(told - lse), tuple(told), greedy))
    return scores


def assert_same(found: list[Score], wanted: list[Score], atol: float = 1e-4) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol, rtol=0)
        np.testing.assert_allclose(one.logits, other.logits, atol=atol, rtol=0)
        assert one.greedy == other.greedy


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> SimpleNamespace:
    config = CONFIGS[request.param]
    made = SimpleNamespace(config=config, params=load_params(Drawn(config), config))
    made.requests = draw_requests(50)
    greedy = [np.argmax(Decoder(config).apply({"params": made.params}, np.array([r.context]))[0, -1])
              for r in made.requests[:3]]
    made.requests += [Request(50 + i, 0, r.context, (int(best),), len(made.requests) + i)
                      for i, (r, best) in enumerate(zip(made.requests[:3], greedy, strict=True))]
    made.scores = one_by_one(made, made.requests)
    return made


def test_scores_are_those_of_plain_forward_passes(model: SimpleNamespace) -> None:
    found = score_requests(model.params, model.config, model.requests)
    assert_same(found, model.scores)
    assert any(each.greedy for each in found)
    for one in found:
        assert one.loglikelihood == pytest.approx(sum(one.logprobs))


def test_a_batch_of_one_gives_the_same(model: SimpleNamespace) -> None:
    seen: list[int] = []
    found = score_requests(model.params, model.config, model.requests, batch_tokens=1, on_scored=seen.extend)
    assert_same(found, model.scores)
    assert sorted(seen) == list(range(len(model.requests)))


@pytest.mark.parametrize(("model", "shape"), [
    ("llama", "data=8"), ("llama", "data=2,fsdp=2,tensor=2"), ("llama", "fsdp=4,tensor=2"),
    ("glam", "data=2,fsdp=2,tensor=2"), pytest.param("gpt", "data=2,fsdp=2,tensor=2", marks=pytest.mark.slow),
    pytest.param("glam", "fsdp=4,tensor=2", marks=pytest.mark.slow),
], indirect=["model"])
def test_meshes_give_the_same(model: SimpleNamespace, shape: str) -> None:
    mesh = make_mesh(shape)
    tree = load_params(Drawn(model.config), model.config, mesh)
    assert_same(score_requests(tree, model.config, model.requests, mesh=mesh, batch_tokens=1024), model.scores)
    assert weights_fingerprint(tree) == weights_fingerprint(model.params)


def test_logits_a_few_places_at_a_time(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 64 * 30)
    assert_same(score_requests(model.params, model.config, model.requests), model.scores)


def test_rows_that_pad_the_vocabulary_get_no_probability(model: SimpleNamespace) -> None:
    requests = [r for r in model.requests if max(r.continuation) < 50]
    key = "embed" if model.config.tied else "unembed"
    tree = dict(model.params)
    tree[key] = (jax.tree.map(lambda x: x.at[50:].set(9.0), tree[key]) if model.config.tied
                 else jax.tree.map(lambda x: x.at[..., 50:].set(9.0), tree[key]))
    inside = [r for r in requests if max(r.context) < 50]
    found = score_requests(tree, model.config, inside, vocabulary=50)
    assert_same(found, one_by_one(model, inside, cut=50))


def test_rounded_logits_tie(model: SimpleNamespace) -> None:
    plain = score_requests(model.params, model.config, model.requests[:20])
    rounded = score_requests(model.params, model.config, model.requests[:20], dtype="bfloat16", round_logits=True)
    for one, other in zip(rounded, plain, strict=True):
        assert all(float(jnp.bfloat16(x)) == x for x in one.logits)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=0.5, rtol=0.1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_padding_alone_harms_no_other(dtype: Any) -> None:
    tree = load_params(Drawn(LLAMA), LLAMA, dtype=dtype)
    apply = jax.jit(Decoder(LLAMA, Compute(dtype)).apply)
    ids = np.zeros((2, 7), np.int32)
    ids[0] = range(1, 8)
    segments = (ids != 0).astype(np.int32)
    both = np.asarray(apply({"params": tree}, ids, None, segments))
    alone = np.asarray(apply({"params": tree}, ids[:1], None, segments[:1]))
    assert np.isfinite(both).all()
    np.testing.assert_allclose(both[0], alone[0], atol=1e-2)


def test_out_of_memory_names_a_batch_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.")

    monkeypatch.setattr(scoring, "scorer", lambda *_: full)
    tree = load_params(Drawn(LLAMA), LLAMA)
    requests = [Request(i, 0, (1,) * 9, (2,), i) for i in range(8)]
    with pytest.raises(OutOfMemory, match=r"8 × 12 tokens.*--batch-tokens 48 \(now 1000\)"):
        score_requests(tree, LLAMA, requests, batch_tokens=1000)
    with pytest.raises(OutOfMemory, match=r"no smaller one.*bfloat16"):
        score_requests(tree, LLAMA, requests, batch_tokens=1)


def test_another_failure_of_the_device_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(scoring, "scorer", lambda *_: broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        score_requests(load_params(Drawn(LLAMA), LLAMA), LLAMA, draw_requests(1))


def test_nothing_asked() -> None:
    assert score_requests({}, LLAMA, []) == []


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.sampled_from([1, 64, 500, 4096]),
       st.sampled_from([1, 2, 8]), st.sampled_from([0, 100, 10_000]))
def test_batches_hold_every_row_once(lengths: list[int], tokens: int, ways: int, shape_tokens: int) -> None:
    rows = make_rows([Request(i, 0, (i,) * n, (1,), i) for i, n in enumerate(lengths)])
    batches = plan_batches(rows, tokens, ways, shape_tokens)
    assert sorted(row.ids for batch in batches for row in batch.rows) == sorted(row.ids for row in rows)
    assert len({batch.shape for batch in batches}) <= MAX_SHAPES
    sizes = [batch.shape.length for batch in batches]
    assert sizes == sorted(sizes, reverse=True)
    for batch in batches:
        shape = batch.shape
        assert shape.rows % ways == 0
        assert shape.length % GRANULE == 0
        assert shape.rows == ways or shape.rows * shape.length <= max(tokens, ways * shape.length)
        assert max(row.length for row in batch.rows) <= shape.length
        assert 0 < len(batch.rows) <= shape.rows


def test_little_is_padding() -> None:
    draw = random.Random(0)
    rows = make_rows([Request(i, 0, (1,) * draw.randint(40, 160), (1,), i) for i in range(400)])
    batches = plan_batches(rows, 2048)
    real = sum(row.length for row in rows)
    assert sum(batch.shape.rows * batch.shape.length for batch in batches) < 1.12 * real


def test_a_context_is_computed_once() -> None:
    context = tuple(range(20))
    one_id = make_rows([Request(0, 0, context, (5,), 0), Request(0, 1, context, (6,), 0)])
    assert [row.ids for row in one_id] == [context]
    nested = make_rows([Request(0, 0, context, (5, 6), 0), Request(0, 1, context, (5, 7, 8), 0)])
    assert [(row.ids, row.branched) for row in nested] == [((*context, 5, 7), False)]
    (forked,) = make_rows([Request(0, 0, context, (5, 6), 0), Request(0, 1, context, (7, 8, 9), 0)])
    assert forked.branched
    assert forked.ids == (*context, 7, 8, 5)
    assert forked.positions[20:] == (20, 21, 20)
    assert forked.branches[20:] == (1, 1, 2)


def test_scores_for_a_task_of_ones_own(oracle: Any) -> None:
    pairs = [([1, 5, 9], [4]), ([1, 5, 9], [7, 8]), ([3], [2])]
    told: list[tuple[str, int, int]] = []
    found = score(oracle / "hf_llama_gqa", pairs, mesh="data=8", progress=lambda *stage: told.append(stage))
    assert [len(each.logprobs) for each in found] == [1, 2, 1]
    assert told[-1] == ("scoring", 3, 3)
    assert found[2].loglikelihood == pytest.approx(score(oracle / "hf_llama_gqa", pairs[2:])[0].loglikelihood, abs=1e-4)


@pytest.mark.parametrize(("pair", "message"), [
    (([], [1]), "context is empty"), (([1], [32]), "no id 32"), (([-1], [2]), "no id -1"),
    (("x", [1]), "two of a kind"), (([1] * 3, [1] * 70), "70 tokens"),
])
def test_pairs_that_cannot_be_scored(pair: Any, message: str, oracle: Any) -> None:
    from llmtool.errors import LlmtoolError

    with pytest.raises(LlmtoolError, match=message):
        score(oracle / "hf_llama_gqa", [pair])


def test_learned_positions_are_not_exceeded(oracle: Any) -> None:
    with pytest.raises(Contradiction, match="learned 8 positions"):
        score(oracle / "hf_gpt2", [([1], [2])], max_length=9)
    long = [(list(range(1, 31)) * 3, [5])]
    (cut,) = score(oracle / "hf_gpt2", long)  # as lm-eval does: the last 8 ids are read
    assert cut.logprobs == pytest.approx(score(oracle / "hf_gpt2", [(long[0][0][-8:], [5])])[0].logprobs, abs=1e-5)
