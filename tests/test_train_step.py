"""One step: praxis' own numbers, how a batch is cut, what counts, what moves, and each precision."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmtool.errors import Contradiction
from llmtool.model.decoder import REMAT
from llmtool.model_config import ModelConfig
from llmtool.train.batch import Batch
from llmtool.train.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from llmtool.train.loss import Unembed, cross_entropy
from llmtool.train.state import FIRST_SCALE, TrainState, abstract_state, init_state
from llmtool.train.step import make_evaluation, make_gradients, make_step, run_model, to_devices
from llmtool.train.strategy import Placement, place
from tests.train_golden import CASES, golden

RELATIVE, GRADIENT = 2e-6, 3e-4
QUICK = ("pax_gpt__packed", "pax_llama_gqa__padded", "pax_glam__packed_cf2_oracleloss")
SOME_CASES = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def tiny(**changes: Any) -> RunConfig:
    """A two-layer LLaMA of 16 features and rows of 8 tokens, in float32."""
    model = ModelConfig(
        family="llama", vocab_size=29, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24,
        norm="rmsnorm", gated=True, position="rope", tied=False, norm_eps=1e-5, activation="silu", rope_theta=1e4)
    run = RunConfig("tiny", model, OptimizerConfig(learning_rate=1e-2), ScheduleConfig("constant"), DataConfig(),
                    steps=20, seq_len=8, batch_per_device=4, strategy="ddp", precision="fp32")
    return replace(run, **changes)


def rows(n: int, length: int = 8, vocab: int = 29, seed: int = 0, counts: list[int] | None = None) -> Batch:
    """Random rows of one document each; ``counts`` says how many targets of each row count."""
    ids = np.random.default_rng(seed).integers(1, vocab, (n, length + 1), dtype=np.int32)
    weights = np.ones((n, length), np.float32)
    for row, count in enumerate(counts or ()):
        weights[row, count:] = 0
    positions = np.tile(np.arange(length, dtype=np.int32), (n, 1))
    return Batch(ids[:, :-1], ids[:, 1:], weights, np.ones((n, length), np.int32), positions)


def here(run: RunConfig, n_devices: int = 1) -> Placement:
    return place(run, jax.devices()[:n_devices])


def gradients(run: RunConfig, batch: Batch, n_devices: int = 1, trainable: Any = lambda key: True) -> Any:
    placement = here(run, n_devices)
    state = init_state(run, placement, trainable)
    return jax.jit(make_gradients(run, placement, trainable))(state, to_devices(batch, placement, run.grad_accum))


def norm(tree: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in tree.values())))


def difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, np.ndarray]:
    return {key: np.asarray(a[key], np.float64) - np.asarray(b[key], np.float64) for key in b}


# -- praxis ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SOME_CASES)
def test_gradients_are_those_of_praxis(case: str) -> None:
    told = golden(case)
    placement = here(told.run)
    state = init_state(told.run, placement, params={key: jnp.asarray(x) for key, x in told.before.items()})
    grads, metrics = jax.jit(make_gradients(told.run, placement))(state, to_devices(told.batch, placement))
    np.testing.assert_allclose(metrics["loss"], told.steps[0]["loss"], rtol=RELATIVE)
    total = norm(told.grads)
    for key, expected in told.grads.items():
        error, size = np.linalg.norm(grads[key] - expected), np.linalg.norm(expected)
        if key.endswith("attn.k.b"):  # adds the same to all scores of a query: its true gradient is 0
            assert max(size, np.linalg.norm(grads[key])) < 1e-6 * total
        else:
            assert error <= GRADIENT * size, key


@pytest.mark.parametrize("case", SOME_CASES)
def test_six_steps_are_those_of_praxis(case: str) -> None:
    """Adam's first steps turn the sign of a rounding error into a whole step, so that from the fourth loss on the
    golden numbers are only as sharp as they are under a change of the weights by half a unit in the last place."""
    told = golden(case)
    placement = here(told.run)
    step = make_step(told.run, placement, abstract_state(told.run))

    def six(start: dict[str, np.ndarray]) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
        state, seen = init_state(told.run, placement, params={key: jnp.asarray(x) for key, x in start.items()}), []
        for _ in told.steps:
            state, metrics = step(state, to_devices(told.batch, placement))
            seen.append({key: float(x) for key, x in metrics.items()})
        return seen, {key: np.asarray(x) for key, x in state.params.items()}

    losses, params = six(told.before)
    sign = np.random.default_rng(0)
    nudged = {key: x * (1 + np.float32(2**-24) * sign.choice([-1, 1], x.shape).astype(np.float32))
              for key, x in told.before.items()}
    (nudged_losses, nudged_params), noise = six(nudged), 0.0
    for i, (ours, nearby, wanted) in enumerate(zip(losses, nudged_losses, told.steps, strict=True)):
        noise = max(noise, abs(ours["loss"] - nearby["loss"]) / wanted["loss"]) if i > 2 else 0.0
        assert abs(ours["loss"] - wanted["loss"]) <= max(RELATIVE, 10 * noise) * wanted["loss"], i
        np.testing.assert_allclose(ours["lr"], wanted["learning/lr_aggregate_scalar"], rtol=RELATIVE)
    np.testing.assert_allclose(losses[0]["grad_norm"], told.steps[0]["learning/raw_grad_norm_aggregate_scalar"],
                               rtol=GRADIENT)
    for tree in (params, nudged_params, told.before, told.after):  # the key's bias moves at random: its gradient is 0
        for key in [key for key in tree if key.endswith("attn.k.b")]:
            del tree[key]
    error, way = norm(difference(params, told.after)), norm(difference(told.before, told.after))
    assert error <= max(GRADIENT * way, 3 * norm(difference(params, nudged_params)))
    assert error <= 0.02 * way


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "length", "chunk", "tied", "bias", "z"),
    [(1, 1, 1, True, False, 0.0), (3, 13, 5, True, True, 0.3), (2, 12, 4, False, True, 0.0),
     (2, 7, 9, False, False, 0.3), (4, 7, 0, True, False, 0.3)],
)  # fmt: skip
def test_loss_in_stretches_is_the_plain_loss(
    rows: int, length: int, chunk: int, tied: bool, bias: bool, z: float
) -> None:
    keys = jax.random.split(jax.random.key(rows * length), 5)
    x, w = jax.random.normal(keys[0], (rows, length, 6)), jax.random.normal(keys[1], (11, 6))
    b = jax.random.normal(keys[2], (11,)) if bias else None
    targets = jax.random.randint(keys[3], (rows, length), 0, 11)
    weights = jax.random.uniform(keys[4], (rows, length)) * (jnp.arange(length) % 3 > 0)

    def plain(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        logits = jnp.einsum("BTD,VD->BTV", x, w) + (0 if b is None else b)
        lse = jax.nn.logsumexp(logits, axis=-1)
        at_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return 0.5 * jnp.sum(weights * (lse - at_target + z * jnp.square(lse)))

    def ours(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        total, _ = cross_entropy(x, Unembed(w if tied else w.T, b), "VD" if tied else "DV", targets, weights,
                                 z_weight=z, chunk_bytes=chunk * rows * 11 * 4)
        return 0.5 * total

    over = (0, 1, 2) if bias else (0, 1)
    expected, found = (jax.jit(jax.value_and_grad(f, over))(x, w, b) for f in (plain, ours))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), found, expected)


def test_no_array_of_all_logits_exists() -> None:
    """1,024 positions and 4,096 pieces in stretches of 64 KiB: nothing near 16 MiB is in the compiled program."""
    x, w = jnp.zeros((2, 512, 8), jnp.bfloat16), jnp.zeros((4096, 8))
    targets, weights = jnp.zeros((2, 512), jnp.int32), jnp.ones((2, 512))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return cross_entropy(x, Unembed(w), "VD", targets, weights, chunk_bytes=1 << 16)[0]

    memory = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 << 20


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro", "devices"),
    [(4, 1), (2, 2), *(pytest.param(*cut, marks=pytest.mark.slow) for cut in [(2, 1), (1, 2), (1, 4)])],
)
def test_gradient_does_not_depend_on_how_the_batch_is_cut(micro: int, devices: int) -> None:
    batch = rows(4, 12, counts=[1, 9, 2, 12])
    whole, told = gradients(tiny(batch_per_device=4), batch)
    cut = tiny(batch_per_device=4 / micro / devices, grad_accum=micro)
    found, metrics = gradients(cut, batch, devices)
    assert float(metrics["tokens"]) == float(told["tokens"]) == 24
    for name in ("loss", "xent"):
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-6)
    assert norm(difference(found, whole)) <= 1e-6 * norm(whole)


def test_the_mean_is_over_counted_targets() -> None:
    """Pad id = EOS id: two targets count, one of them that EOS; the padding after it does not."""
    ids = np.array([[5, 6, 7, 2, 2, 2, 2, 2, 2]], np.int32)
    weights = np.array([[0, 1, 1, 0, 0, 0, 0, 0]], np.float32)
    batch = rows(1)._replace(ids=ids[:, :-1], targets=ids[:, 1:], weights=weights)
    _, metrics = gradients(tiny(), batch)
    assert float(metrics["tokens"]) == 2
    longer = batch._replace(targets=np.where(weights > 0, batch.targets, 9))
    np.testing.assert_array_equal(gradients(tiny(), longer)[1]["loss"], metrics["loss"])


def test_glam_divides_by_all_positions() -> None:
    batch = rows(2, counts=[3, 8])
    _, counted = gradients(tiny(), batch)
    _, over_all = gradients(tiny(loss_over="all"), batch)
    np.testing.assert_allclose(over_all["loss"] * 16, counted["loss"] * 11, rtol=1e-6)


def test_a_row_that_counts_nothing_adds_nothing_and_such_a_batch_changes_nothing() -> None:
    run = tiny(optimizer=OptimizerConfig(weight_decay=0.5, learning_rate=0.1))
    alone, _ = gradients(run, rows(1, counts=[5]))
    both, metrics = gradients(run, rows(2, counts=[5, 0]))
    assert norm(difference(both, alone)) <= 1e-6 * norm(alone) and np.isfinite(metrics["loss"])
    placement = here(run)
    state = init_state(run, placement)
    step = make_step(run, placement, state)
    state, _ = step(state, to_devices(rows(2, seed=1), placement))
    before = jax.tree.map(np.array, (state.params, state.opt.m, state.opt.count))
    state, metrics = step(state, to_devices(rows(2, counts=[0, 0]), placement))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt.m, state.opt.count), before)
    assert np.isfinite(metrics["loss"]) and float(metrics["tokens"]) == 0
    assert int(state.step) == 2 and float(metrics["skipped"]) == 1


def test_packed_documents_do_not_see_each_other() -> None:
    pair = rows(2)
    joined = Batch(*(np.concatenate([x[:1], x[1:]], axis=1).reshape(1, -1) for x in pair))
    joined = joined._replace(segments=np.repeat([[1, 2]], 8, axis=1).astype(np.int32))
    apart, _ = gradients(tiny(), pair)
    packed, _ = gradients(tiny(), joined)
    assert norm(difference(packed, apart)) <= 2e-6 * norm(apart)


# -- what moves --------------------------------------------------------------------------------------------------------


def test_frozen_leaves_stay_and_own_no_state() -> None:
    run = tiny()

    def trainable(key: str) -> bool:
        return ".attn." in key

    placement = here(run)
    state = init_state(run, placement, trainable)
    assert set(state.opt.m) == set(state.opt.v) == {key for key in state.params if ".attn." in key}
    before = {key: np.array(x) for key, x in state.params.items()}
    full, _ = gradients(run, rows(4))
    part, _ = gradients(run, rows(4), trainable=trainable)
    jax.tree.map(np.testing.assert_array_equal, part, {key: full[key] for key in part})
    np.testing.assert_allclose(
        make_step(run, placement, state, trainable)(state, to_devices(rows(4), placement))[1]["grad_norm"],
        norm(part), rtol=1e-5)
    state = init_state(run, placement, trainable)
    state, _ = make_step(run, placement, state, trainable)(state, to_devices(rows(4), placement))
    for key, x in state.params.items():
        assert np.array_equal(x, before[key]) != trainable(key), key


# -- how it is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", sorted(REMAT))
def test_rematerialised_gradients_are_the_same(remat: Any) -> None:
    plain, _ = gradients(tiny(), rows(4))
    again, _ = gradients(tiny(remat=remat), rows(4))
    assert norm(difference(again, plain)) <= 1e-6 * norm(plain)


def test_remat_policies_keep_what_their_names_say() -> None:
    run = tiny(batch_per_device=16, seq_len=64)

    def kept(remat: Any) -> int:
        placement = here(replace(run, remat=remat))
        state = abstract_state(run)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), rows(16, 64))
        step = make_step(replace(run, remat=remat), placement, state)
        return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    full, qkv, dots, none = map(kept, ("full", "save_qkv_out", "save_dots", "none"))
    assert full < qkv < dots < none


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near(precision: Any) -> None:
    exact, told = gradients(tiny(), rows(8))
    half, metrics = gradients(tiny(precision=precision), rows(8))
    assert all(g.dtype == jnp.float32 for g in half.values())
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=5e-3)
    assert norm(difference(half, exact)) <= (0.02 if precision == "bf16" else 0.004) * norm(exact)


def test_a_frequent_token_keeps_its_gradient_in_bfloat16() -> None:
    """4,096 reads of one row: summed one by one in bfloat16 their gradients would stop adding up."""
    batch = rows(64, 64)
    batch = batch._replace(ids=np.full_like(batch.ids, 3))
    exact, _ = gradients(tiny(), batch)
    half, _ = gradients(tiny(precision="bf16"), batch)
    error = np.linalg.norm(half["embed"][3] - exact["embed"][3]) / np.linalg.norm(exact["embed"][3])
    assert error < 0.05


def test_float16_overflow_halves_the_scale_and_skips() -> None:
    run = tiny(precision="fp16")
    placement = here(run)
    state = init_state(run, placement)
    huge = {**state.params, "unembed.w": jnp.full_like(state.params["unembed.w"], 7e4)}  # inf in float16
    before = {key: np.array(x) for key, x in huge.items()}
    step = make_step(run, placement, state)
    state, metrics = step(state.replace(params=huge), to_devices(rows(4), placement))
    assert float(metrics["loss_scale"]) == FIRST_SCALE / 2 and float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, dict(state.params), before)


@pytest.mark.slow
def test_dropout_differs_by_step_and_not_by_mesh_and_evaluation_has_none() -> None:
    run = tiny(dropout=0.5, batch_per_device=4)
    batch = rows(4)

    def first_losses(n_devices: int) -> list[float]:
        placement = here(replace(run, batch_per_device=4 / n_devices), n_devices)
        state = init_state(run, placement)
        step, seen = make_step(replace(run, optimizer=OptimizerConfig(learning_rate=0.0)), placement, state), []
        for _ in range(2):
            state, metrics = step(state, to_devices(batch, placement))
            seen.append(float(metrics["loss"]))
        return seen

    one, four = first_losses(1), first_losses(4)
    assert abs(one[0] - one[1]) > 1e-4
    np.testing.assert_allclose(one, four, rtol=1e-6)
    placement = here(run)
    params = init_state(run, placement).params
    noisy, plain = (make_evaluation(r, placement)(params, to_devices(batch, placement)) for r in (run, tiny()))
    np.testing.assert_array_equal(noisy[0], plain[0])


@pytest.mark.slow
def test_pax_decays_a_layernorm_scale_towards_one() -> None:
    """praxis stores scale - 1, so that decay leaves a scale of 1 alone; of RMSNorm it stores the scale itself."""
    still = OptimizerConfig("pax", learning_rate=0.1, weight_decay=0.5, eps=1e30)

    def scales(norm: Any, kind: Any) -> np.ndarray:
        run = tiny(model=replace(tiny().model, norm=norm), optimizer=replace(still, kind=kind))
        placement = here(run)
        state = init_state(run, placement)
        state, _ = make_step(run, placement, state)(state, to_devices(rows(4), placement))
        return np.asarray(state.params["norm.scale"])

    np.testing.assert_allclose(scales("layernorm", "pax"), 1.0, rtol=1e-6)
    np.testing.assert_allclose(scales("rmsnorm", "pax"), 0.95, rtol=1e-6)
    np.testing.assert_allclose(scales("layernorm", "adamw"), 0.95, rtol=1e-6)


def test_state_is_donated_and_compiled_once() -> None:
    run = tiny()
    placement = here(run)
    state = init_state(run, placement)
    step = make_step(run, placement, state)
    old: TrainState = state
    for seed in range(3):
        state, _ = step(state, to_devices(rows(4, seed=seed), placement))
    assert all(x.is_deleted() for x in old.params.values())
    assert step._cache_size() == 1


def test_a_kernel_that_is_not_to_be_had_is_refused() -> None:
    with pytest.raises(Contradiction, match="cudnn needs a GPU"):
        run_model(tiny(attention="cudnn"), here(tiny()))
