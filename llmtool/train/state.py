"""The train state: everything that a step changes, as one tree."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from llmtool.train import optimizer
from llmtool.train.config import RunConfig
from llmtool.train.initial import initial_params
from llmtool.train.strategy import Placement

Trainable = Callable[[str], bool]  # of a key of the native tree: does this leaf move?
FIRST_SCALE, LARGEST_SCALE, PATIENCE = 2.0**15, 2.0**24, 2000  # of the loss in float16


def everything(key: str) -> bool:
    """All leaves move: pretraining and full fine-tuning."""
    return True


@flax.struct.dataclass
class LossScale:
    """What float16 gradients are multiplied by (float32), and the steps since it last changed (int32)."""

    value: jax.Array
    good_steps: jax.Array

    def after(self, finite: jax.Array) -> "LossScale":
        """Halved after a step whose gradients overflowed, doubled after ``PATIENCE`` that did not."""
        grown = self.good_steps + 1 >= PATIENCE
        up = jnp.where(grown, jnp.minimum(self.value * 2, LARGEST_SCALE), self.value)
        steps = jnp.where(finite & ~grown, self.good_steps + 1, 0)
        return LossScale(jnp.where(finite, up, jnp.maximum(self.value / 2, 1.0)), steps)


@flax.struct.dataclass
class TrainState:
    """``step`` counts batches, ``opt.count`` updates (a skipped step has none). ``params`` and the moments are flat
    dicts by key of the native tree; only leaves that move have moments. ``rng`` is the run's key, from which each
    step draws its own; ``collections`` holds what modules replace rather than optimise, by collection and key."""

    step: jax.Array
    params: dict[str, jax.Array]
    opt: optimizer.OptState
    rng: jax.Array
    loss_scale: LossScale | None = None
    collections: dict[str, dict[str, jax.Array]] = flax.struct.field(default_factory=dict)


def new_state(run: RunConfig, params: Mapping[str, Any], trainable: Trainable = everything) -> TrainState:
    """The state before the first step, around ``params``."""
    scale = LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0)) if run.precision == "fp16" else None
    moving = {key: leaf for key, leaf in params.items() if trainable(key)}
    return TrainState(jnp.int32(0), dict(params), optimizer.init(moving), jax.random.PRNGKey(run.seed + 1), scale)


def abstract_state(run: RunConfig, trainable: Trainable = everything) -> TrainState:
    """Shapes and dtypes of the state, with no array made."""
    return jax.eval_shape(lambda: new_state(run, initial_params(run.model, run.init_std, run.seed), trainable))


def state_shardings(state: TrainState, placement: Placement) -> TrainState:
    """The tree of places that belongs to a state, abstract or not."""
    moments = {key: placement.moments[key] for key in state.opt.m}
    everywhere = jax.tree.map(lambda _: placement.everywhere, state)
    return everywhere.replace(
        params={key: placement.params[key] for key in state.params},
        opt=everywhere.opt._replace(m=moments, v=dict(moments)),
    )


def init_state(
    run: RunConfig,
    placement: Placement,
    trainable: Trainable = everything,
    params: Mapping[str, jax.Array] | None = None,
) -> TrainState:
    """A new state in its places: around ``params``, or around weights drawn for the run's seed."""
    places = state_shardings(abstract_state(run, trainable), placement)
    on_device = jax.tree.map(lambda place: place.with_memory_kind("device"), places)
    if params is None:
        draw = jax.jit(initial_params, static_argnums=(0, 1, 2), out_shardings=on_device.params)
        params = draw(run.model, run.init_std, run.seed)
    begin = jax.jit(new_state, static_argnums=(0, 2), out_shardings=on_device)
    state = begin(run, dict(params), trainable)
    return jax.device_put(state, places)
