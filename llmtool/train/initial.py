"""Weights to start from: drawn by name, so that they are the same on any mesh and whatever else the model has."""

import math
import zlib

import jax
import jax.numpy as jnp

from llmtool.model_config import ModelConfig
from llmtool.native_tree import NativeEntry, entries

_FAN_IN = {"q": "D", "k": "D", "v": "D", "out": "KGH", "gate": "D", "up": "D", "down": "FX", "router": "D"}


def initial_params(model: ModelConfig, init_std: float, seed: int) -> dict[str, jax.Array]:
    """Float32 weights of the native tree, by flat key. Scales are 1, biases 0, matrices normal with ``init_std``.

    GLaM's differ (praxis ``glam.py``): embedding N(0, 1); q, k, v and out normal with variance 1/fan_in, that of q over
    head_dim too; feed-forward, experts and router uniform within sqrt(3 / fan_in).
    """
    root = jax.random.PRNGKey(seed)
    return {
        key: _draw(model, init_std, entry, jax.random.fold_in(root, zlib.crc32(key.encode())))
        for key, entry in entries(model).items()
    }


def _draw(model: ModelConfig, init_std: float, entry: NativeEntry, key: jax.Array) -> jax.Array:
    name = entry.key.rpartition(".")[2]
    if name == "scale":
        return jnp.ones(entry.shape, jnp.float32)
    if name in ("b", "bias", "relative_bias"):
        return jnp.zeros(entry.shape, jnp.float32)
    if model.family == "glam":
        return _draw_glam(model, entry, key)
    return init_std * jax.random.normal(key, entry.shape, jnp.float32)


def _draw_glam(model: ModelConfig, entry: NativeEntry, key: jax.Array) -> jax.Array:
    role = next((part for part in reversed(entry.key.split(".")) if part in _FAN_IN), None)
    if role is None:
        return jax.random.normal(key, entry.shape, jnp.float32)
    sizes = dict(zip(entry.axes, entry.shape, strict=True))
    fan_in = math.prod(sizes.get(letter, 1) for letter in _FAN_IN[role])
    if ".attn." in entry.key:
        variance = 1.0 / (fan_in * (model.head_dim if role == "q" else 1))
        return math.sqrt(variance) * jax.random.normal(key, entry.shape, jnp.float32)
    bound = math.sqrt(3.0 / fan_in)
    return jax.random.uniform(key, entry.shape, jnp.float32, -bound, bound)
