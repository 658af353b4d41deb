"""RMSNorm and LayerNorm, in float32 also when the products are bfloat16. Scales are plain: y = x̂ · scale (+ bias)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from llmtool.model.part import Part


class Norm(Part):
    """Normalises the last axis; which norm is the config's."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        eps, x = self.config.norm_eps, x_BTD.astype(self.compute.wide)
        assert eps is not None
        if self.config.norm == "layernorm":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
        x = x * self.weight("scale", x.dtype)
        bias = self.optional_weight("bias", x.dtype)
        return (x if bias is None else x + bias).astype(x_BTD.dtype)


class PreNorm(Part):
    """A place in the tree that holds a norm and nothing else: ``mlp`` of a layer whose experts lie under ``moe``."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return Norm(self.config, self.compute, f"{self.path}.norm", name="norm")(x_BTD)
