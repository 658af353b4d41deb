"""Where a token stands: rope angles, sinusoids, T5's relative buckets, and positions of packed rows."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmtool.model_config import ModelConfig, RopeScaling


def packed_positions(segment_ids_BT: jax.Array) -> jax.Array:
    """Positions that start at 0 again wherever the segment changes."""
    index_T = jnp.arange(segment_ids_BT.shape[1])
    previous_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BT = jnp.where(segment_ids_BT != previous_BT, index_T, 0)
    return index_T - jax.lax.cummax(start_BT, axis=1)


def rope_angles(config: ModelConfig, positions_BT: jax.Array, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, [B, T, P] in ``dtype``, of the angles that turn the first 2P features of a head.

    Source: Su et al., RoFormer (2104.09864); partial rotation as in GPT-NeoX.
    """
    assert config.rope_theta is not None
    rotated = int(config.head_dim * config.rotary_fraction)
    exponents_P = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    frequencies_P = 1.0 / config.rope_theta**exponents_P
    if config.rope_scaling is not None:
        frequencies_P = _stretched(frequencies_P, config.rope_scaling)
    angles_BTP = positions_BT[..., None].astype(dtype) * frequencies_P.astype(dtype)
    return jnp.cos(angles_BTP), jnp.sin(angles_BTP)


def _stretched(frequencies_P: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: slow waves are slowed further, fast ones kept, those between blended.

    Source: Meta's llama-models, ``apply_scaling``.
    """
    turns_P = scaling.original_context * frequencies_P / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_P = np.clip((turns_P - low) / (high - low), 0.0, 1.0)
    return frequencies_P * (kept_P + (1 - kept_P) / scaling.factor)


def rotate(x_BTKGH: jax.Array, cos_BTP: jax.Array, sin_BTP: jax.Array) -> jax.Array:
    """Turn the feature pairs (j, j + P) of every head, in float32; features past 2P stay as they are."""
    pairs = cos_BTP.shape[-1]
    heads = (1,) * (x_BTKGH.ndim - 3)
    cos, sin = (t.reshape(*t.shape[:2], *heads, pairs) for t in (cos_BTP, sin_BTP))
    first, second, rest = jnp.split(x_BTKGH, (pairs, 2 * pairs), axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x_BTKGH.dtype), rest], axis=-1)


def sinusoids(positions_BT: jax.Array, d_model: int, dtype: Any = jnp.float32) -> jax.Array:
    """Fixed position vectors, [B, T, D] in ``dtype``: sines, then cosines, of wavelengths 2π to 2π · 10,000.

    Source: praxis, ``PositionalEmbedding`` (unlike Vaswani et al., the longest wavelength is reached).
    """
    n = d_model // 2
    frequencies_n = np.exp(-np.arange(n) * (math.log(10_000.0) / max(n - 1, 1)))
    angles_BTn = positions_BT[..., None].astype(dtype) * frequencies_n.astype(dtype)
    table_BTD = jnp.concatenate([jnp.sin(angles_BTn), jnp.cos(angles_BTn)], axis=-1)
    return jnp.pad(table_BTD, ((0, 0), (0, 0), (0, d_model % 2)))


def relative_buckets(positions_BT: jax.Array, n_buckets: int, max_distance: int) -> jax.Array:
    """T5's causal buckets, int32 [B, T, S]: half for each of the nearest distances, half spaced by logarithm.

    Source: Raffel et al., T5 (1910.10683), ``_relative_position_bucket`` with ``bidirectional=False``.
    """
    distance_BTS = jnp.maximum(positions_BT[:, :, None] - positions_BT[:, None, :], 0)
    exact = n_buckets // 2
    far_BTS = jnp.log(jnp.maximum(distance_BTS, exact).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far_BTS = exact + (far_BTS * (n_buckets - exact)).astype(jnp.int32)
    return jnp.where(distance_BTS < exact, distance_BTS, jnp.minimum(far_BTS, n_buckets - 1))
