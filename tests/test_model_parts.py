"""The pieces of the decoder: positions, buckets, packing, capacity, what a config must tell."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmtool import native_tree, params
from llmtool.errors import Contradiction, MissingFact
from llmtool.model.decoder import Decoder
from llmtool.model.moe import capacity, combine_weights
from llmtool.model.part import product
from llmtool.model.position import packed_positions, relative_buckets, rope_angles, rotate, sinusoids
from llmtool.model.tree import flatten, nest
from llmtool.model_config import ModelConfig, RopeScaling

SIZES = {"vocab_size": 61, "d_model": 24, "n_layers": 4, "n_heads": 6, "n_kv_heads": 3, "head_dim": 8, "d_ff": 40}
LLAMA = ModelConfig("llama", **SIZES, norm="rmsnorm", gated=True, position="rope", tied=False, norm_eps=1e-5,
                    activation="silu", rope_theta=1e4)
GPT = ModelConfig("gpt", **SIZES, norm="layernorm", gated=False, position="learned", tied=True, norm_eps=1e-5,
                  activation="gelu_tanh", max_positions=16, qkv_bias=True, attn_out_bias=True, mlp_bias=True)
GLAM = ModelConfig("glam", **SIZES, norm="rmsnorm", gated=True, position="t5", tied=True, norm_eps=1e-6,
                   activation="gelu_tanh", n_experts=5, experts_per_token=2, expert_d_ff=20, expert_activation="relu",
                   block_period=2, moe_layers_in_block=(0,), relative_buckets=8, relative_max_distance=12,
                   extra_softmax_logit=True, scale_query=False, scale_logits=True)
MIXTRAL = replace(LLAMA, family="mixtral", n_experts=5, experts_per_token=2, expert_d_ff=20, experts_gated=True,
                  expert_activation="silu", moe_layers_in_block=(0,))
CONFIGS = {
    "llama": LLAMA, "gpt": GPT, "sinusoidal": replace(GPT, position="sinusoidal"),
    "no_positions": replace(GPT, position="none"), "glam": GLAM, "mixtral": MIXTRAL,
    "all_biases": replace(LLAMA, qkv_bias=True, attn_out_bias=True, mlp_bias=True, unembed_bias=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def _drawn(config: ModelConfig) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {key: entry.shape for key, entry in native_tree.entries(config).items()}
    return nest({key: (0.2 * random.standard_normal(shape)).astype(np.float32) for key, shape in shapes.items()})


def test_the_tree_that_flax_makes_is_the_native_layout(config: ModelConfig) -> None:
    made = jax.eval_shape(Decoder(config).init, jax.random.key(0), jnp.zeros((1, 4), int))["params"]
    wanted = {key: entry.shape for key, entry in native_tree.entries(config).items()}
    assert {key: x.shape for key, x in flatten(made).items()} == wanted


def test_every_canonical_weight_has_one_address(config: ModelConfig) -> None:
    entries, members = native_tree.entries(config), native_tree.members(config)
    for weight in params.weights(config):
        key, index = native_tree.address(weight, config)
        assert members[key][index] == weight
    for key, entry in entries.items():
        stacked = len(next(iter(members[key])))
        assert set(members[key]) == set(np.ndindex(entry.shape[:stacked]))


def test_a_row_does_not_depend_on_its_batch_nor_on_its_padding(config: ModelConfig) -> None:
    ids = np.random.default_rng(1).integers(0, 61, (3, 12))
    model, tree = Decoder(config), _drawn(config)
    run = jax.jit(model.apply)
    together = run({"params": tree}, ids)
    for row in range(3):
        alone = run({"params": tree}, ids[row : row + 1, :7])
        np.testing.assert_allclose(together[row : row + 1, :7], alone, atol=1e-5)


def test_logits_only_where_asked(config: ModelConfig) -> None:
    ids = np.random.default_rng(1).integers(0, 61, (2, 12))
    at = np.array([[0, 11, 3], [5, 5, 2]])
    run, variables = jax.jit(Decoder(config).apply, static_argnames="method"), {"params": _drawn(config)}
    everywhere = run(variables, ids)
    some = run(variables, ids, logits_at_BM=at)
    np.testing.assert_allclose(some, np.take_along_axis(np.asarray(everywhere), at[..., None], 1), atol=1e-5)
    hidden = run(variables, ids, method="hidden")
    np.testing.assert_allclose(run(variables, hidden, method="logits"), everywhere, atol=1e-5)


def test_packed_documents_do_not_see_each_other(config: ModelConfig) -> None:
    ids = np.random.default_rng(1).integers(0, 61, (1, 12))
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0]])
    run, variables = jax.jit(Decoder(config).apply), {"params": _drawn(config)}
    packed = run(variables, ids, segment_ids_BT=segments)
    np.testing.assert_allclose(packed[:, :5], run(variables, ids[:, :5]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:9], run(variables, ids[:, 5:9]), atol=1e-5)


def test_packed_positions() -> None:
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [3, 4, 4, 4, 5, 5, 5]])
    assert packed_positions(segments).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]]


def test_rope_scaling_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama31, llama32, odd = (8.0, 1.0, 4.0, 8192, 5e5), (32.0, 1.0, 4.0, 8192, 5e5), (4.0, 2.0, 3.0, 64, 1e4)
    for factor, low, high, context, theta in (llama31, llama32, odd):
        told = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": context}
        hf = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=told, max_position_embeddings=10**6)
        expected = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")[0].numpy()
        config = replace(LLAMA, head_dim=128, rope_theta=theta, rope_scaling=RopeScaling(factor, low, high, context))
        _, sine = rope_angles(config, jnp.ones((1, 1), int))
        np.testing.assert_allclose(np.arcsin(sine[0, 0]), np.where(expected > 1, 1, expected), rtol=1e-5)


def test_rope_turns_pairs_and_leaves_the_rest() -> None:
    config = replace(LLAMA, head_dim=12, rotary_fraction=0.5)
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 12)).astype(np.float32)
    cos, sin = rope_angles(config, jnp.arange(5)[None])
    y = np.asarray(rotate(jnp.asarray(x), cos, sin))
    np.testing.assert_array_equal(y[..., 6:], x[..., 6:])
    angles = np.arange(5)[None, :, None, None] * 1e4 ** (-np.arange(3) / 3)
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * angles)
    np.testing.assert_allclose(y[..., :3] + 1j * y[..., 3:6], turned, atol=1e-6)


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 12), (16, 1000)])
def test_buckets_are_those_of_t5(buckets: int, distance: int) -> None:
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    ours = relative_buckets(jnp.arange(300)[None], buckets, distance)[0]
    relative = torch.arange(300)[None, :] - torch.arange(300)[:, None]
    theirs = T5Attention._relative_position_bucket(relative, False, buckets, distance).numpy()
    np.testing.assert_array_equal(ours, theirs)


def test_sinusoids_reach_the_longest_wave() -> None:
    table = sinusoids(jnp.array([[0, 1, 10_000]]), 7)
    np.testing.assert_allclose(table[0, 0], [0, 0, 0, 1, 1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(table[0, 1], [*np.sin([1, 0.01, 1e-4]), *np.cos([1, 0.01, 1e-4]), 0], atol=1e-6)
    np.testing.assert_allclose(table[0, 2, 2], np.sin(1.0), atol=1e-4)


@pytest.mark.parametrize(("tokens", "experts", "factor", "slots"), [
    (24, 3, 0.5, 4), (24, 3, 1.0, 8), (12, 3, 1.0, 4), (8, 8, 1.0, 1), (8, 64, 2.0, 1), (16, 8, 1.0, 4),
    (8192, 64, 2.0, 256),
])
def test_capacity(tokens: int, experts: int, factor: float, slots: int) -> None:
    assert capacity(tokens, experts, factor) == slots


def test_second_choices_queue_behind_first_choices_and_overflow_is_dropped() -> None:
    expert_GSk = jnp.array([[[0, 1], [0, 1], [0, 1], [1, 0], [0, 1]]])
    weight_GSk = jnp.broadcast_to(jnp.array([0.75, 0.25]), (1, 5, 2))
    valid_GS = jnp.array([[True, True, True, True, False]])
    combine_SEC = np.asarray(combine_weights(weight_GSk, expert_GSk, valid_GS, 2, 2))[0]
    expected = np.zeros((5, 2, 2))
    expected[0, 0, 0] = expected[1, 0, 1] = expected[3, 1, 0] = 0.75  # token 2 finds expert 0 full
    expected[0, 1, 1] = 0.25  # expert 1 has a first choice already, so one place is left; expert 0 has none for token 3
    np.testing.assert_array_equal(combine_SEC, expected)


@pytest.mark.parametrize(("config", "field"), [
    (replace(LLAMA, norm_eps=None), "norm_eps"), (replace(LLAMA, rope_theta=None), "rope_theta"),
    (replace(GPT, position=None), "position"), (replace(GPT, activation=None), "activation"),
    (replace(MIXTRAL, expert_activation=None), "expert_activation"),
])
def test_an_unknown_fact_is_named(config: ModelConfig, field: str) -> None:
    with pytest.raises(MissingFact, match=f"running the model needs {field}, which"):
        Decoder(config).apply({"params": _drawn(config)}, np.zeros((1, 4), int))


def test_rows_longer_than_the_position_table_are_refused() -> None:
    with pytest.raises(Contradiction, match="17 tokens a row, but the model has 16 positions"):
        Decoder(GPT).apply({"params": _drawn(GPT)}, np.zeros((1, 17), int))


def test_a_bfloat16_product_is_summed_in_float32() -> None:
    x = jnp.concatenate([jnp.full((1, 1, 1), 256.0), jnp.ones((1, 1, 512))], axis=-1).astype(jnp.bfloat16)
    y = product("BTD,DF->BTF", x, jnp.ones((513, 1), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0, 0]) == 768.0
