"""The learning rate as a pure function of the number of updates done."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llmtool.train.config import ScheduleConfig

Schedule = Callable[[jax.Array], jax.Array]


def learning_rate(schedule: ScheduleConfig, peak: float, total_steps: int) -> Schedule:
    """A jit-able function: 0-based count of updates done -> learning rate, float32, of the same shape.

    Where "pax" leaves ``decay_start`` or ``decay_end`` open they are ``warmup_steps`` and ``total_steps``. "cosine"
    reaches ``min_ratio`` at ``total_steps``, one after the last update, as ColossalAI's does.
    Source: praxis ``LinearRampupCosineDecay``; colossalai ``CosineAnnealingWarmupLR``.
    """
    warmup, floor = schedule.warmup_steps, schedule.min_ratio

    def pax(step: jax.Array) -> jax.Array:
        start = warmup if schedule.decay_start is None else schedule.decay_start
        end = total_steps if schedule.decay_end is None else schedule.decay_end
        return jnp.where(step < start, jnp.minimum(step / max(warmup, 1), 1.0), _cosine(step, start, end, floor))

    def cosine(step: jax.Array) -> jax.Array:
        return jnp.where(step < warmup, (step + 1) / max(warmup, 1), _cosine(step, warmup, total_steps, floor))

    def constant(step: jax.Array) -> jax.Array:
        return jnp.minimum((step + 1) / max(warmup, 1), 1.0)

    factor = {"pax": pax, "cosine": cosine, "constant": constant}[schedule.kind]
    return lambda step: jnp.float32(peak) * factor(jnp.asarray(step)).astype(jnp.float32)


def _cosine(step: jax.Array, start: int, end: int, floor: float) -> jax.Array:
    """Half a cosine from 1 at ``start`` to ``floor`` at ``end``, flat on both sides."""
    done = jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
