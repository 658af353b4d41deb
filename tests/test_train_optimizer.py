"""Schedules and optimizers against what praxis and torch computed."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmtool.train import optimizer
from llmtool.train.config import OptimizerConfig, ScheduleConfig
from llmtool.train.schedule import learning_rate

GOLDEN = Path(__file__).parent / "fixtures" / "golden" / "praxis_optimizer"
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
SETTINGS = json.loads((GOLDEN / "presets_lr.json").read_text())
# Where each of praxis' variables would lie in our tree: repeats are stacks under layers.block_*.
PLACES = {"emb.w": "embed", "ffn.linear.w": "layers_like.w", "ffn.bias.b": "bias", "ln.scale": "norm.scale",
          "repeat.sub.w": "layers.block_0.mlp.up.w"}
TOLERANCE = 2e-6


def choices(settings: dict) -> tuple[OptimizerConfig, ScheduleConfig]:
    """praxis' settings in our words."""
    cap = settings["clip_threshold"]
    config = OptimizerConfig(
        kind="pax", learning_rate=settings["learning_rate"], b1=settings["beta1"], b2=settings["beta2"],
        eps=settings["epsilon"], eps_root=settings["epsilon_root"], weight_decay=settings["weight_decay"],
        clip_norm=settings["clip_gradient_norm_to_value"], update_rms_cap=cap if cap > 0 else None)
    if settings["schedule"] == "Constant":
        return config, ScheduleConfig("constant")
    return config, ScheduleConfig("pax", *(settings[name] for name in (
        "warmup_steps", "decay_start", "decay_end", "min_ratio")))


def tree(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, jax.Array]:
    """The arrays under ``prefix`` in our places; of the state, whichever of praxis' two groups holds them."""
    return {ours: jnp.asarray(array) for theirs, ours in PLACES.items() for name, array in arrays.items()
            if name.startswith(prefix) and name.endswith(f"params.{theirs}")}


def moments(arrays: dict[str, np.ndarray], prefix: str, which: str) -> dict[str, jax.Array]:
    return tree({n: a for n, a in arrays.items() if f"].{which}." in n}, prefix)


def assert_close(found: dict, expected: dict, what: str, updates: dict | None = None) -> None:
    """To 2e-6 of each number (of a parameter: and of its update), plus float32's rounding of the tensor's largest."""
    assert set(found) == set(expected) == set(PLACES.values()), what
    for name, array in expected.items():
        size = np.abs(array) + (0.0 if updates is None else np.abs(updates[name]))
        excess = np.abs(found[name] - array) - TOLERANCE * size
        assert excess.max() <= 1.2e-7 * np.abs(array).max(), f"{what} {name}"


@pytest.mark.parametrize("case", CASES)
def test_praxis_steps(case: str) -> None:
    """Eight real steps each: five gradients, NaN, inf, one gradient again; parameters, m, v, count, lr and norms."""
    arrays, told = dict(np.load(GOLDEN / f"{case}.npz")), json.loads((GOLDEN / f"{case}.json").read_text())
    config, schedule = choices(told["settings"])
    peak = told["lr_override"] or config.learning_rate
    lr_fn = learning_rate(schedule, peak, told["settings"]["num_train_steps"])
    step = jax.jit(lambda g, s, p: optimizer.update(g, s, p, lr_fn, config))
    params = tree(arrays, "init.")
    state = optimizer.init(params)._replace(
        count=jnp.int32(told["init_count"]), m=moments(arrays, "initstate.", "m"), v=moments(arrays, "initstate.", "v"))
    for i, expected in enumerate(told["steps"]):
        assert state.count == expected["count_before"]
        before = (params, state.m, state.v)
        params, state, metrics = step(tree(arrays, f"step{i}.grad."), state, params)
        updates = tree(arrays, f"step{i}.update.")
        assert_close(params, tree(arrays, f"step{i}.param."), f"step {i} param", updates)
        assert_close(state.m, moments(arrays, f"step{i}.state.", "m"), f"step {i} m")
        assert_close(state.v, moments(arrays, f"step{i}.state.", "v"), f"step {i} v")
        assert metrics["lr"] == pytest.approx(expected["lr"], rel=TOLERANCE)
        raw = expected["learning/raw_grad_norm_aggregate"]
        np.testing.assert_allclose(metrics["grad_norm"], raw, rtol=TOLERANCE)
        valid = expected["learning/is_valid_step_aggregate"] == 1.0
        assert metrics["update_skipped"] == (not valid)
        clipped = expected["learning/clipped_grad_norm_aggregate"] if valid else 0.0
        assert metrics["clipped_norm"] == pytest.approx(clipped, rel=TOLERANCE)
        if not valid:
            jax.tree.map(np.testing.assert_array_equal, before, (params, state.m, state.v))
    assert state.skipped == 2
    assert state.count == told["init_count"] + 6


@pytest.mark.parametrize("preset", SETTINGS["settings"])
def test_learning_rates_of_the_pax_presets(preset: str) -> None:
    settings, curve = SETTINGS["settings"][preset], SETTINGS["lr_curve"][preset]
    config, schedule = choices(settings)
    lr_fn = jax.jit(learning_rate(schedule, config.learning_rate, settings["num_train_steps"]))
    found = lr_fn(jnp.array(curve["steps"], jnp.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, curve["lr"], rtol=TOLERANCE)
    assert lr_fn(jnp.int32(curve["steps"][1])) == pytest.approx(curve["lr"][1], rel=TOLERANCE)


def test_cosine_is_torchs_after_the_warmup() -> None:
    import torch

    warmup, total, peak = 7, 50, 3e-4
    lr_fn = learning_rate(ScheduleConfig("cosine", warmup_steps=warmup), peak, total)
    found = np.asarray(lr_fn(jnp.arange(total + 5)))
    np.testing.assert_allclose(found[:warmup], peak * np.arange(1, warmup + 1) / warmup, rtol=TOLERANCE)
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(dummy, total - warmup, eta_min=0.1 * peak)
    for step in range(warmup, total + 1):
        assert found[step] == pytest.approx(theirs.get_last_lr()[0], rel=1e-5), step
        dummy.step()
        theirs.step()
    np.testing.assert_allclose(found[total:], 0.1 * peak, rtol=TOLERANCE)


@pytest.mark.parametrize(("schedule", "expected"), [
    (ScheduleConfig("constant"), [1, 1, 1, 1, 1]),
    (ScheduleConfig("constant", warmup_steps=4), [0.25, 0.5, 0.75, 1, 1]),
    (ScheduleConfig("cosine", warmup_steps=10), [0.1, 0.2, 0.3, 0.4, 0.5]),  # a warm-up longer than the run
    (ScheduleConfig("cosine", min_ratio=0.0), [1, math.cos(math.pi / 8) ** 2, 0.5, math.sin(math.pi / 8) ** 2, 0]),
    (ScheduleConfig("pax", warmup_steps=2), [0, 0.5, 1, 0.55, 0.1]),  # decays from the warm-up to the end
    (ScheduleConfig("pax"), [1, 0.1 + 0.9 * math.cos(math.pi / 8) ** 2, 0.55, 0.1 + 0.9 * math.sin(math.pi / 8) ** 2,
                             0.1]),
])
def test_schedules_by_hand(schedule: ScheduleConfig, expected: list[float]) -> None:
    found = learning_rate(schedule, 2.0, 4)(jnp.arange(5))
    np.testing.assert_allclose(found, 2.0 * np.array(expected), rtol=1e-6, atol=1e-7)


def random_tree(seed: int, scale: float = 1.0) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (5, 4), "layers": {"block_0": {"attn": {"q": {"w": (2, 4, 3)}}}}, "norm": {"scale": (4,)}}
    return jax.tree.map(lambda shape: jnp.asarray(scale * rng.normal(size=shape), jnp.float32), shapes,
                        is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_adamw_is_torchs(clip: float | None, eps: float) -> None:
    import torch

    config = OptimizerConfig(kind="adamw", learning_rate=1e-2, clip_norm=clip, eps=eps)
    lr_fn = learning_rate(ScheduleConfig("constant"), config.learning_rate, 1)
    params = random_tree(0)
    theirs = [torch.nn.Parameter(torch.tensor(np.asarray(leaf))) for leaf in jax.tree.leaves(params)]
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=eps, weight_decay=0.1)
    state, step = optimizer.init(params), jax.jit(lambda g, s, p: optimizer.update(g, s, p, lr_fn, config))
    for i in range(20):
        grads = random_tree(1 + i, scale=10.0 ** (i % 4 - 2))
        for parameter, grad in zip(theirs, jax.tree.leaves(grads), strict=True):
            parameter.grad = torch.tensor(np.asarray(grad))
        norm = torch.nn.utils.clip_grad_norm_(theirs, clip or math.inf)
        reference.step()
        params, state, metrics = step(grads, state, params)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=TOLERANCE)
        for ours, parameter in zip(jax.tree.leaves(params), theirs, strict=True):
            np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=TOLERANCE, atol=4e-7)
    for ours, parameter in zip(jax.tree.leaves(state.m), theirs, strict=True):
        np.testing.assert_allclose(ours, reference.state[parameter]["exp_avg"].numpy(), rtol=1e-5, atol=1e-7)


PAX = OptimizerConfig(kind="pax", learning_rate=1.0, eps=1e-6, weight_decay=0.0, clip_norm=None, update_rms_cap=0.5)


def first_step(grads: dict, config: OptimizerConfig) -> dict:
    """What the first update with lr 1 takes off parameters that are 0."""
    params = jax.tree.map(jnp.zeros_like, grads)
    new, _, _ = optimizer.update(grads, optimizer.init(params), params, lambda count: jnp.float32(1.0), config)
    return jax.tree.map(jnp.negative, new)


def test_the_cap_acts_on_each_repeat_of_a_stack_and_on_other_tensors_whole() -> None:
    """With a large eps, updates are g / eps: repeat 0 stays under the cap, repeat 1 is cut to it."""
    config = replace(PAX, eps=1.0)
    small, large = jnp.full((3,), 0.1), jnp.full((3,), 9.0)
    both = jnp.stack([small, large])
    found = first_step({"layers": {"block_0": {"w": both}}, "norm": both, "layers.block_12.up": both}, config)
    expected = np.array([[0.1 / 1.1] * 3, [0.5] * 3])
    np.testing.assert_allclose(found["layers"]["block_0"]["w"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["layers.block_12.up"], expected, rtol=1e-6)
    whole = np.array([[0.1 / 1.1] * 3, [0.9] * 3])
    np.testing.assert_allclose(found["norm"], whole * 0.5 / np.sqrt(np.mean(whole**2)), rtol=1e-6)


def test_q_k_and_v_may_be_capped_as_one_tensor() -> None:
    config = replace(PAX, eps=1.0)
    grads = {f"layers.block_0.attn.{name}.w": jnp.full((2, 4), g) for name, g in
             (("q", 9.0), ("k", 1.0), ("v", 0.0), ("out", 9.0))}
    apart, together = first_step(grads, config), first_step(grads, replace(config, cap_qkv_together=True))
    np.testing.assert_allclose(apart["layers.block_0.attn.k.w"], 0.5, rtol=1e-6)
    rms = math.sqrt((0.9**2 + 0.5**2) / 3)
    np.testing.assert_allclose(together["layers.block_0.attn.q.w"], 0.9 * 0.5 / rms, rtol=1e-6)
    np.testing.assert_allclose(together["layers.block_0.attn.k.w"], 0.5 * 0.5 / rms, rtol=1e-6)
    np.testing.assert_allclose(together["layers.block_0.attn.out.w"], 0.5, rtol=1e-6)


@pytest.mark.parametrize("kind", ["pax", "adamw"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_one_bad_number_changes_nothing(kind: str, bad: float) -> None:
    """1e30 is finite, but the norm overflows: a step of that size is no better than infinity."""
    config = OptimizerConfig(kind=kind)  # type: ignore[arg-type]
    lr_fn = learning_rate(ScheduleConfig("constant"), 1e-2, 1)
    params = random_tree(0)
    params, state, _ = optimizer.update(random_tree(1), optimizer.init(params), params, lr_fn, config)
    grads = random_tree(2)
    grads["norm"]["scale"] = grads["norm"]["scale"].at[2].set(bad)
    new_params, new_state, metrics = optimizer.update(grads, state, params, lr_fn, config)
    jax.tree.map(np.testing.assert_array_equal, (params, state.m, state.v), (new_params, new_state.m, new_state.v))
    assert (new_state.count, new_state.skipped, metrics["update_skipped"], metrics["clipped_norm"]) == (1, 1, 1, 0)


def test_a_gradient_of_zero_decays_and_moves_nothing_else() -> None:
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1)
    params = {"w": jnp.ones(3)}
    new, state, metrics = optimizer.update(
        {"w": jnp.zeros(3)}, optimizer.init(params), params, lambda count: jnp.float32(0.5), config)
    np.testing.assert_allclose(new["w"], 0.95)
    assert (metrics["grad_norm"], metrics["update_skipped"], state.count) == (0, 0, 1)


def test_state_is_float32_and_only_of_what_moves() -> None:
    """bfloat16 parameters and gradients; a sub-tree on its own moves as it does beside others."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_tree(0))
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_tree(1))
    config = OptimizerConfig(clip_norm=None)
    lr_fn = learning_rate(ScheduleConfig("constant"), 1e-2, 1)
    whole, state, _ = optimizer.update(grads, optimizer.init(params), params, lr_fn, config)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.m, state.v))} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(whole)} == {jnp.dtype("bfloat16")}
    part, part_state, _ = optimizer.update(
        grads["layers"], optimizer.init(params["layers"]), params["layers"], lr_fn, config)
    jax.tree.map(np.testing.assert_array_equal, part, whole["layers"])
    assert jax.tree.structure(part_state.m) == jax.tree.structure(params["layers"])
