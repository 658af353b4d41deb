"""What every module of the decoder is: a place in the native tree, and weights read off the canonical table there.

No shape is written in the modules. A part asks for ``"w"`` at its path and gets the array that the table gives a
model of this config, or None where such a model has none; einsums are spelt with the table's letters.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from llmtool.model.sharding import constrain
from llmtool.model_config import ModelConfig
from llmtool.native_tree import NativeEntry, entries


@dataclass(frozen=True)
class Compute:
    """How a model is computed, as opposed to what it is.

    ``capacity_factor`` bounds the tokens an expert takes in each of ``expert_groups`` equal groups of the batch, the
    rest are dropped; None drops nothing, so that a token's result does not depend on its batch.

    For training: ``remat`` names what the backward pass keeps of a block's forward pass (``decoder.REMAT``),
    ``dropout`` is that of every layer's input, active where the "dropout" rng is given, and ``weights_in_host`` says
    that the weights lie in host memory, from where each layer's come as it is computed.
    """

    dtype: Any = jnp.float32
    mesh: Mesh | None = None
    capacity_factor: float | None = None
    expert_groups: int = 1
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    remat: str = "none"
    dropout: float = 0.0
    weights_in_host: bool = False

    @property
    def wide(self) -> Any:
        """The dtype of norms, angles, softmaxes and logits: float32, or float64 where that is asked for."""
        return jnp.promote_types(self.dtype, jnp.float32)


class Part(nn.Module):
    """A module at ``path`` of the native tree (``layers.block_0.attn``)."""

    config: ModelConfig
    compute: Compute = Compute()
    path: str = ""

    def entry(self, name: str) -> NativeEntry | None:
        """The tree's entry ``name`` under this part, if there is one; of one layer, which is all that a scan shows."""
        entry = entries(self.config).get(f"{self.path}.{name}" if self.path else name)
        if entry is None or entry.axes[0] != "L":
            return entry
        return replace(entry, axes=entry.axes[1:], shape=entry.shape[1:])

    def optional_weight(self, name: str, dtype: Any = None) -> jax.Array | None:
        """The weight ``name`` in the compute dtype or ``dtype``; None where this model has none."""
        entry = self.entry(name)
        return None if entry is None else self._weight(name, entry, dtype)

    def weight(self, name: str, dtype: Any = None) -> jax.Array:
        """The weight ``name``, which every model with this part has."""
        entry = self.entry(name)
        assert entry is not None, f"{self.path}.{name}"
        return self._weight(name, entry, dtype)

    def _weight(self, name: str, entry: NativeEntry, dtype: Any) -> jax.Array:
        w = self.param(name, _initial(name), entry.shape)
        if self.compute.weights_in_host:
            w = jax.device_put(w, jax.memory.Space.Device)
        return w.astype(dtype or self.compute.dtype)

    def linear(self, name: str, x: jax.Array, inputs: str = "D") -> jax.Array:
        """``x`` (axes ``B T`` and ``inputs``) through the weight and bias at ``name``."""
        return Linear(self.config, self.compute, f"{self.path}.{name}", name=name)(x, inputs)

    def shard(self, x: jax.Array, axes: str) -> jax.Array:
        """Pin how an activation with these axis letters lies on the mesh."""
        return constrain(x, tuple(axes), self.compute.mesh)


class Linear(Part):
    """A product over the table's input axes, plus the bias if there is one. Every projection of the model is one."""

    @nn.compact
    def __call__(self, x: jax.Array, inputs: str, out_dtype: Any = None) -> jax.Array:
        entry = self.entry("w")
        assert entry is not None, self.path
        axes = "".join(entry.axes)
        outputs = axes.removeprefix(inputs)
        y = product(f"BT{inputs},{axes}->BT{outputs}", x, self.weight("w"), out_dtype)
        bias = self.optional_weight("b", y.dtype)
        return self.shard(y if bias is None else y + bias, f"BT{outputs}")


def product(spec: str, x: jax.Array, w: jax.Array, out_dtype: Any = None) -> jax.Array:
    """``einsum`` summed in at least float32, in ``out_dtype`` (default: that of ``x``).

    On CPU a bfloat16 product asked for in float32 and then rounded is over twice as fast as one asked for in
    bfloat16; the numbers are the same.
    """
    out_dtype = out_dtype or x.dtype
    wanted = jnp.promote_types(x.dtype, jnp.float32) if jax.default_backend() == "cpu" else out_dtype
    return jnp.einsum(spec, x, w, preferred_element_type=wanted).astype(out_dtype)


@jax.custom_vjp
def lookup(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Rows of a table. Its gradient is summed in float32 and rounded once: a row may be read thousands of times."""
    return jnp.take(table_VD, ids_BT, axis=0)


def _lookup_forward(table_VD: jax.Array, ids_BT: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return lookup(table_VD, ids_BT), (table_VD, ids_BT)


def _lookup_backward(read: tuple[jax.Array, jax.Array], grad_BTD: jax.Array) -> tuple[jax.Array, None]:
    table_VD, ids_BT = read
    wide = jnp.promote_types(table_VD.dtype, jnp.float32)
    sums_VD = jnp.zeros(table_VD.shape, wide).at[ids_BT].add(grad_BTD.astype(wide))
    return sums_VD.astype(table_VD.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def _initial(name: str) -> nn.initializers.Initializer:
    match name:
        case "scale":
            return nn.initializers.ones
        case "b" | "bias" | "relative_bias":
            return nn.initializers.zeros
    return nn.initializers.normal(0.02)
