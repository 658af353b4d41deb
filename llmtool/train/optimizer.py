"""Adam with decoupled weight decay, as pure functions over any tree of parameters.

Two spellings of the same bias correction. "pax" folds it into the decays, so that the moments are the corrected ones:
Adam of praxis (``optimizers.py``, ``_ShardedAdamHelper``). "adamw" keeps raw moments and corrects when they are used:
torch's AdamW and ColossalAI's HybridAdam. A checkpoint's moments therefore belong to their kind.
Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (1711.05101).
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmtool.train.config import OptimizerConfig

_STACKED = re.compile(r"(^|\.)layers\.block_\d+\.")
_QKV = re.compile(r"\battn\.[qkv]\.(?=[wb]$)")
Tree = Any


class OptState(NamedTuple):
    """``count``: updates done; ``skipped``: steps that were not, their gradients not being finite; int32 scalars.

    ``m`` and ``v``: first and second moments in float32, trees like the parameters that move.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    m: Tree
    v: Tree
    skipped: jax.Array


def init(params: Tree) -> OptState:
    """The state before the first update. Give only the leaves that move: frozen ones own no state."""
    def zeros() -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)

    return OptState(jnp.zeros((), jnp.int32), zeros(), zeros(), jnp.zeros((), jnp.int32))


def update(
    grads: Tree, state: OptState, params: Tree, lr_fn: Callable[[jax.Array], jax.Array], config: OptimizerConfig
) -> tuple[Tree, OptState, dict[str, jax.Array]]:
    """One step: (parameters, state, metrics); ``grads``, ``params`` and the moments are trees of one structure.

    Gradients are clipped by their global norm, the update's RMS by ``update_rms_cap`` tensor by tensor (of stacked
    layers, one repeat at a time), and the decay, times the learning rate, is taken off every parameter. Where the
    gradients' norm is not finite nothing changes but ``skipped``. The metrics are float32 scalars; ``clipped_norm``
    is 0 in a skipped step.
    """
    norm = global_norm(grads)
    valid = jnp.isfinite(norm)
    clip = jnp.inf if config.clip_norm is None else config.clip_norm
    scale = jnp.minimum(1.0, clip / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    lr = lr_fn(state.count)
    decay_m, decay_v, correct_m, correct_v = _decays(state.count, config)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
    m = jax.tree.map(lambda m, g: decay_m * m + (1.0 - decay_m) * g, state.m, grads)
    v = jax.tree.map(lambda v, g: decay_v * v + (1.0 - decay_v) * jnp.square(g), state.v, grads)
    steps = jax.tree.map(
        lambda m, v: m * correct_m / (jnp.sqrt(v * correct_v + config.eps_root) + config.eps), m, v
    )
    if config.update_rms_cap is not None:
        steps = _capped(steps, config.update_rms_cap, config.cap_qkv_together)

    def moved(p: jax.Array, step: jax.Array) -> jax.Array:
        wide = p.astype(jnp.float32)
        return (wide - lr * (step + config.weight_decay * wide)).astype(p.dtype)

    def kept(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda n, o: jnp.where(valid, n, o), new, old)

    one = valid.astype(jnp.int32)
    metrics = {
        "lr": lr,
        "grad_norm": norm,
        "clipped_norm": jnp.where(valid, norm * scale, 0.0),
        "update_skipped": (1 - one).astype(jnp.float32),
    }
    new_state = OptState(state.count + one, kept(m, state.m), kept(v, state.v), state.skipped + 1 - one)
    return kept(jax.tree.map(moved, params, steps), params), new_state, metrics


def global_norm(tree: Tree) -> jax.Array:
    """The Euclidean norm of all leaves together, float32."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.float32(0)))


def _decays(count: jax.Array, config: OptimizerConfig) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Decays of m and v in the update after ``count`` ones, and what corrects the bias of the new m and v."""
    t = (count + 1).astype(jnp.float32)
    m_left, v_left = 1.0 - jnp.power(config.b1, t), 1.0 - jnp.power(config.b2, t)
    if config.kind == "adamw":
        return jnp.float32(config.b1), jnp.float32(config.b2), 1.0 / m_left, 1.0 / v_left
    one = jnp.float32(1.0)
    m_decay = config.b1 * (1.0 - jnp.power(config.b1, t - 1.0)) / m_left
    v_decay = config.b2 * (1.0 - jnp.power(config.b2, t - 1.0)) / v_left
    return m_decay, v_decay, one, one


def _capped(steps: Tree, cap: float, qkv_together: bool) -> Tree:
    """Every tensor of ``steps`` scaled down to an RMS of at most ``cap``."""
    flat, structure = jax.tree_util.tree_flatten_with_path(steps)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    groups = [_QKV.sub("attn.qkv.", name) if qkv_together else name for name in names]
    squares: dict[str, jax.Array] = {}  # of each group, [L] where it is stacked
    sizes: dict[str, int] = {}
    for name, group, (_, step) in zip(names, groups, flat, strict=True):
        first = 1 if _STACKED.search(name) else 0
        squares[group] = squares.get(group, 0.0) + jnp.sum(jnp.square(step), axis=range(first, step.ndim))
        sizes[group] = sizes.get(group, 0) + math.prod(step.shape[first:])
    shrink = {group: jnp.maximum(1.0, jnp.sqrt(squares[group] / sizes[group]) / cap) for group in squares}
    capped = [
        step / jnp.reshape(shrink[group], shrink[group].shape + (1,) * (step.ndim - shrink[group].ndim))
        for group, (_, step) in zip(groups, flat, strict=True)
    ]
    return jax.tree.unflatten(structure, capped)
