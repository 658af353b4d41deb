"""Strategies: what each device holds, that all compute the same, host memory, meshes and shares of the batch."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from llmtool.errors import Contradiction
from llmtool.model_config import ModelConfig
from llmtool.native_tree import entries
from llmtool.train.config import MeshConfig, OptimizerConfig, RunConfig
from llmtool.train.state import TrainState, abstract_state, init_state, state_shardings
from llmtool.train.step import make_gradients, make_step, to_devices
from llmtool.train.strategy import HOST, STRATEGIES, place, reader, rows_per_step, run_mesh
from tests.test_train_step import here, rows, tiny

MODEL = replace(tiny().model, vocab_size=32, n_heads=8, n_kv_heads=8, d_ff=24)  # all that is split divides by 8
GLAM = ModelConfig(
    family="glam", vocab_size=32, d_model=16, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=4, d_ff=24, norm="rmsnorm",
    gated=True, position="t5", tied=True, norm_eps=1e-6, activation="gelu_tanh", n_experts=4, experts_per_token=2,
    expert_d_ff=24, expert_activation="relu", block_period=2, moe_layers_in_block=(0,), relative_buckets=8,
    relative_max_distance=16, extra_softmax_logit=True, scale_query=False, scale_logits=True)


def strategy(name: Any, **changes: Any) -> RunConfig:
    return tiny(model=MODEL, strategy=name, batch_per_device=1, **changes)


def held(arrays: dict[str, jax.Array]) -> int:
    """Bytes of arrays on the first device."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in arrays.values() for s in x.addressable_shards if s.device == first)


def expected_bytes(ways: dict[str, int]) -> int:
    """Bytes a device holds where axis letters are split so many ways; vectors are whole."""
    total = 0
    for entry in entries(MODEL).values():
        axes = [axis for axis in entry.axes if axis != "L"]
        parts = math.prod(ways.get(axis, 1) for axis in set(axes)) if len(axes) > 1 else 1
        total += 4 * math.prod(entry.shape) // parts
    return total


OVER_FSDP, OVER_TENSOR = {"D": 8}, {"K": 8, "F": 8, "V": 8}
BOTH = {"K": 4, "F": 4, "V": 4, "D": 2}
FOUR_WAYS = {"K": 4, "F": 4, "V": 4}
HELD: dict[tuple[str, tuple[int, int, int] | None], tuple[dict[str, int], dict[str, int], dict[str, int]]] = {
    ("ddp", None): ({}, {}, {}),
    ("zero2", None): ({}, OVER_FSDP, OVER_FSDP),
    ("zero2", (4, 2, 1)): ({}, OVER_FSDP, OVER_FSDP),
    ("fsdp", None): (OVER_FSDP, OVER_FSDP, OVER_FSDP),
    ("fsdp", (4, 2, 1)): ({"D": 2}, {"D": 2}, {"D": 2}),
    ("tensor", None): (OVER_TENSOR, OVER_TENSOR, OVER_TENSOR),
    ("hybrid", None): (FOUR_WAYS, FOUR_WAYS, FOUR_WAYS),
    ("hybrid", (1, 2, 4)): (BOTH, BOTH, BOTH),
}


@pytest.mark.parametrize(
    ("name", "ici"),
    [key if key[0] == "hybrid" or key[1] is None else pytest.param(*key, marks=pytest.mark.slow) for key in HELD],
)
def test_bytes_on_each_device(name: str, ici: tuple[int, int, int] | None) -> None:
    run = strategy(name, mesh=MeshConfig(ici))
    run = replace(run, batch_per_device=1 if name in ("ddp", "zero2", "fsdp") else 0.5)
    placement = here(run, 8)
    state = init_state(run, placement)
    grads, _ = jax.jit(make_gradients(run, placement))(state, to_devices(rows(rows_per_step(run, placement.mesh)),
                                                                          placement))
    params, gradients, moments = map(expected_bytes, HELD[name, ici])
    assert held(state.params) == params
    assert held(grads) == gradients
    assert held(state.opt.m) == held(state.opt.v) == moments


def series(run: RunConfig, n_devices: int, steps: int, seed: int = 0) -> tuple[list[float], TrainState]:
    """Losses of some steps on the same eight rows each, and the last state."""
    placement = here(run, n_devices)
    state = init_state(run, placement)
    step, losses = make_step(run, placement, state), []
    for i in range(steps):
        state, metrics = step(state, to_devices(rows(8, seed=seed + i), placement, run.grad_accum))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], TrainState]:
    return series(_learning(batch_per_device=8), 1, 20)


def _learning(**changes: Any) -> RunConfig:
    return replace(strategy("fsdp"), **{"optimizer": OptimizerConfig(learning_rate=1e-3), **changes})


MESHES: list[tuple[str, MeshConfig]] = [
    ("ddp", MeshConfig()), ("zero2", MeshConfig()), ("fsdp", MeshConfig()), ("tensor", MeshConfig()),
    ("hybrid", MeshConfig((1, 2, 2), (2, 1, 1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[0] in ("ddp", "tensor") else case for case in MESHES],
)
def test_eight_devices_train_as_one(name: str, mesh: MeshConfig, alone: tuple[list[float], TrainState]) -> None:
    run = _learning(strategy=name, mesh=mesh, batch_per_device=1)
    losses, state = series(run, 8, 20)
    np.testing.assert_allclose(losses, alone[0], atol=1e-5)
    for key, x in state.params.items():
        np.testing.assert_allclose(x, alone[1].params[key], atol=1e-5, err_msg=key)
    places = state_shardings(state, place(run))
    assert jax.tree.map(lambda x: x.sharding, state) == places  # nothing wandered


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "hybrid"])
def test_experts_train_alike_on_any_mesh(name: Any) -> None:
    run = tiny(model=GLAM, strategy=name, capacity_factor=1.0, expert_groups=2, aux_loss_weight=0.01, loss_over="all",
               optimizer=OptimizerConfig(learning_rate=1e-3), batch_per_device=8)
    one, _ = series(run, 1, 3)
    mesh = MeshConfig((2, 2, 2)) if name == "hybrid" else MeshConfig()
    eight, state = series(replace(run, batch_per_device=1, mesh=mesh), 8, 3)
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    if name == "hybrid":  # experts lie over fsdp
        assert state.params["layers.block_0.moe.up"].sharding.spec[1] == "fsdp"


def test_weights_are_drawn_alike_on_any_mesh() -> None:
    one = init_state(strategy("fsdp"), here(strategy("fsdp")))
    eight = init_state(strategy("hybrid"), here(strategy("hybrid"), 8))
    jax.tree.map(np.testing.assert_array_equal, one.params, eight.params)
    again = init_state(replace(strategy("fsdp"), seed=1), here(strategy("fsdp")))
    assert not np.array_equal(one.params["embed"], again.params["embed"])
    tied = replace(strategy("fsdp"), model=replace(MODEL, tied=True))
    np.testing.assert_array_equal(init_state(tied, here(tied)).params["embed"], one.params["embed"])


def test_glam_is_drawn_as_praxis_draws_it() -> None:
    wide = replace(GLAM, d_model=256, vocab_size=512, head_dim=16, d_ff=512, expert_d_ff=512)
    params = init_state(tiny(model=wide), here(tiny(model=wide))).params
    spread = {key: float(np.std(x)) for key, x in params.items()}
    for key, wanted in {
        "embed": 1.0, "layers.block_0.attn.q.w": (256 * 16) ** -0.5, "layers.block_0.attn.k.w": 256**-0.5,
        "layers.block_0.attn.out.w": 64**-0.5, "layers.block_1.mlp.down.w": 512**-0.5,
        "layers.block_0.moe.up": 256**-0.5, "layers.block_0.moe.down": 512**-0.5,
    }.items():  # fmt: skip
        assert spread[key] == pytest.approx(wanted, rel=0.05), key
    assert np.abs(params["layers.block_0.moe.up"]).max() <= (3 / 256) ** 0.5  # uniform


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_offloaded_arrays_live_in_host_memory_and_train_alike(what: Any) -> None:
    plain, _ = series(strategy("fsdp"), 8, 3)
    run = strategy("fsdp", offload=what)
    losses, state = series(run, 8, 3)
    np.testing.assert_allclose(losses, plain, rtol=1e-6)
    kinds = {name: {x.sharding.memory_kind for x in tree.values()}
             for name, tree in {"m": state.opt.m, "v": state.opt.v, "params": state.params}.items()}
    assert kinds == {"m": {HOST}, "v": {HOST}, "params": {HOST if what == "parameters" else "device"}}
    placement = here(run, 8)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), rows(8))
    text = make_step(run, placement, abstract_state(run)).lower(abstract_state(run), batch).as_text()
    assert HOST in text and "annotate_device_placement" in text


def test_offloading_needs_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtool.train.strategy.HOST", "no_such_memory")
    with pytest.raises(Contradiction, match="do not offer"):
        place(strategy("fsdp", offload="optimizer"), jax.devices())


def test_nodes_follow_each_other_on_every_axis() -> None:
    """ICI x DCN: neighbours along an axis are on one node until its ICI length is used up."""
    mesh = run_mesh(tiny(mesh=MeshConfig((1, 2, 2), (2, 1, 1))), jax.devices())
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    mesh = run_mesh(tiny(mesh=MeshConfig((1, 4, 1), (1, 2, 1))), jax.devices())
    assert [device.id for device in mesh.devices[0, :, 0]] == list(range(8))


def test_a_mesh_that_does_not_fit_names_one_that_does() -> None:
    with pytest.raises(Contradiction, match=r"1,4,1.*for 4 devices, but there are 8; --ici-mesh 1,8,1 would fit"):
        place(strategy("fsdp", mesh=MeshConfig((1, 4, 1))), jax.devices())


def test_rows_are_whole_and_divide() -> None:
    half = replace(strategy("tensor"), batch_per_device=0.5)
    assert rows_per_step(half, here(half, 8).mesh) == 4
    with pytest.raises(Contradiction, match="would fit"):
        rows_per_step(replace(strategy("fsdp"), batch_per_device=0.5), here(strategy("fsdp"), 8).mesh)
    with pytest.raises(Contradiction, match=r"0\.3 rows a device"):
        rows_per_step(replace(strategy("tensor"), batch_per_device=0.3), here(strategy("tensor"), 8).mesh)
    assert reader(here(half, 8).mesh, 4) == (0, 1)


def test_every_strategy_is_tested() -> None:
    assert set(STRATEGIES) == {name for name, _ in HELD} == {name for name, _ in MESHES}
