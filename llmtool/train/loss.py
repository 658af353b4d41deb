"""Cross-entropy straight from the final states, a stretch of positions at a time.

The logits of a whole batch, [B, T, V] in float32, are the largest array of a small model's step. Here only those of a
stretch exist at once. Their gradient is linear in what comes from above, a scalar, so it is worked out in the same
pass, while the logits are there: three products with the output matrix in all, and none repeated.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmtool.model.decoder import full_products
from llmtool.model.part import product
from llmtool.model.sharding import RULES, spec

CHUNK_BYTES = 256 << 20  # of float32 logits, on each device


class Unembed(NamedTuple):
    """The output matrix and the bias if there is one, in the dtype that their gradients are to have."""

    w: jax.Array
    b_V: jax.Array | None = None


class Sums(NamedTuple):
    """Float32 scalars over all positions, each times its weight: cross-entropy (nats) and lse²."""

    xent: jax.Array
    squared_lse: jax.Array


@dataclass(frozen=True)
class _Plan:
    axes: str  # of the matrix: VD or DV
    n_chunks: int
    groups: int  # of rows, one for each device along the batch: their gradients are added once, at the end
    mesh: Mesh | None
    z_weight: float


def cross_entropy(
    x_BTD: jax.Array,
    unembed: Unembed,
    axes: str,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    z_weight: float = 0.0,
    mesh: Mesh | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[jax.Array, Sums]:
    """(Σ w·(xent + z_weight·lse²), the sums apart), of which the first has gradients: for states and matrix.

    ``axes`` is the matrix's: "VD" or "DV". Sums, not means: who calls knows the denominator. z-loss: Chowdhery et al.,
    PaLM (2204.02311).
    """
    n_rows, n_positions, _ = x_BTD.shape
    names = tuple(name for name in RULES["B"] if mesh is not None and name in mesh.shape)
    groups = math.prod(mesh.shape[name] for name in names) if mesh is not None else 1
    groups = groups if n_rows % groups == 0 else 1
    ways = mesh.shape.get("tensor", 1) if mesh is not None else 1
    row_bytes = 4 * n_rows // groups * unembed.w.shape[axes.index("V")] // ways
    length = max(1, min(n_positions, chunk_bytes // max(row_bytes, 1)))
    n_chunks = -(-n_positions // length)
    padding = -n_positions % n_chunks  # weight nothing
    x_BTD, targets_BT, weights_BT = (
        jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x
        for x in (x_BTD, targets_BT, weights_BT)
    )
    plan = _Plan(axes, n_chunks, groups, mesh, z_weight)
    return _cross_entropy(plan, x_BTD, unembed, targets_BT, weights_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    plan: _Plan, x_BTD: jax.Array, unembed: Unembed, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, Sums]:
    def chunk(sums: Sums, index: jax.Array) -> tuple[Sums, None]:
        *_, new = _chunk(plan, index, x_BTD, narrow, targets_BT, weights_BT)
        return _add(sums, new), None

    narrow = _narrow(plan, unembed, x_BTD.dtype)
    sums, _ = jax.lax.scan(chunk, _zero(), jnp.arange(plan.n_chunks))
    return sums.xent + plan.z_weight * sums.squared_lse, sums


def _forward(
    plan: _Plan, x_BTD: jax.Array, unembed: Unembed, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[tuple[jax.Array, Sums], tuple[jax.Array, Unembed]]:
    """The loss, and the gradients that a cotangent of 1 would give."""
    narrow = _narrow(plan, unembed, x_BTD.dtype)

    def chunk(carried: tuple[Sums, jax.Array, jax.Array | None], index: jax.Array) -> tuple[tuple, jax.Array]:
        sums, w_gVD, b_V = carried
        x_gbtD, logits, lse, hit, weight, new = _chunk(plan, index, x_BTD, narrow, targets_BT, weights_BT)
        pull = 1.0 + 2.0 * plan.z_weight * lse
        grad = weight[..., None] * (jnp.exp(logits - lse[..., None]) * pull[..., None] - hit)
        b_V = None if b_V is None else b_V + jnp.sum(grad, axis=(0, 1, 2))
        grad = grad.astype(x_BTD.dtype)
        with full_products(x_BTD.dtype):
            w_gVD = w_gVD + product(f"gbtV,gbtD->g{plan.axes}", grad, x_gbtD, w_gVD.dtype)
            x_grad = product(f"gbtV,{plan.axes}->gbtD", grad, narrow.w)
        return (_add(sums, new), w_gVD, b_V), x_grad

    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    w_gVD = _grouped(plan, jnp.zeros((plan.groups, *unembed.w.shape), wide))
    b_V = None if unembed.b_V is None else jnp.zeros_like(unembed.b_V)
    start = (_zero(), w_gVD, b_V)
    (sums, w_gVD, b_V), x_ngbtD = jax.lax.scan(chunk, start, jnp.arange(plan.n_chunks))
    x_grad = jnp.moveaxis(x_ngbtD, 0, 2).reshape(x_BTD.shape)
    w_grad = jnp.sum(w_gVD, axis=0).astype(unembed.w.dtype)
    grads = Unembed(w_grad, b_V)
    return (sums.xent + plan.z_weight * sums.squared_lse, sums), (x_grad, grads)


def _backward(
    plan: _Plan, grads: tuple[jax.Array, Unembed], above: tuple[jax.Array, Sums]
) -> tuple[jax.Array, Unembed, None, None]:
    """The second output is a report: nothing is asked to follow its gradient."""
    x_grad, unembed = jax.tree.map(lambda g: (above[0] * g).astype(g.dtype), grads)
    return x_grad, unembed, None, None


_cross_entropy.defvjp(_forward, _backward)


def _chunk(
    plan: _Plan, index: jax.Array, x_BTD: jax.Array, unembed: Unembed, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Sums]:
    """States [g, b, t, D], logits and whether each is the target's [g, b, t, V], log Σ exp and weights [g, b, t]."""
    length = x_BTD.shape[1] // plan.n_chunks

    def stretch(x: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(x, index * length, length, axis=1)
        return _grouped(plan, part.reshape(plan.groups, -1, *part.shape[1:]))

    x_gbtD, target, weight = stretch(x_BTD), stretch(targets_BT), stretch(weights_BT)
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    with full_products(x_BTD.dtype):
        logits = product(f"gbtD,{plan.axes}->gbtV", x_gbtD, unembed.w, wide)
    if unembed.b_V is not None:
        logits = logits + unembed.b_V
    # A comparison instead of a gather: it joins the loop over V, and V may be split over devices.
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3) == target[..., None]
    lse = jax.nn.logsumexp(logits, axis=-1)
    xent = lse - jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    sums = Sums(jnp.sum(weight * xent), jnp.sum(weight * jnp.square(lse)))
    return x_gbtD, logits, lse, hit, weight, sums


def _narrow(plan: _Plan, unembed: Unembed, dtype: Any) -> Unembed:
    """The matrix in the compute dtype, split along the vocabulary only: gathered once, not in every stretch."""
    w = unembed.w.astype(dtype)
    if plan.mesh is not None:
        places = spec(tuple(plan.axes), w.shape, plan.mesh, {"V": RULES["V"]})
        w = jax.lax.with_sharding_constraint(w, NamedSharding(plan.mesh, places))
    return Unembed(w, unembed.b_V)


def _grouped(plan: _Plan, x: jax.Array) -> jax.Array:
    """Keep the first axis on the devices of the batch."""
    if plan.mesh is None:
        return x
    names = tuple(name for name in RULES["B"] if name in plan.mesh.shape) if plan.groups > 1 else None
    unsaid = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, PartitionSpec(names, *unsaid)))


def _zero() -> Sums:
    return Sums(jnp.float32(0), jnp.float32(0))


def _add(a: Sums, b: Sums) -> Sums:
    return Sums(a.xent + b.xent, a.squared_lse + b.squared_lse)
