"""Causal self-attention with grouped queries."""

from typing import Literal

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from llmtool.model.norm import Norm
from llmtool.model.part import Part
from llmtool.model.position import rotate


@flax.struct.dataclass
class Context:
    """What all layers share about the batch; computed once, outside the scan over layers.

    B is 1 where every row has the same positions. ``mask_BTS`` is None for plain causal rows; ``valid_BT`` says which
    tokens are not padding, None if all are.
    """

    rope: tuple[jax.Array, jax.Array] | None = None
    mask_BTS: jax.Array | None = None
    buckets_BTS: jax.Array | None = None
    valid_BT: jax.Array | None = None


class Attention(Part):
    """Norm, projections, positions, softmax, projection."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        config, mask_BTS = self.config, context.mask_BTS
        x_BTD = Norm(config, self.compute, f"{self.path}.norm", name="norm")(x_BTD)
        q_BTKGH, k_BSKH, v_BSKH = (checkpoint_name(self.linear(name, x_BTD), name) for name in "qkv")
        if context.rope is not None:
            q_BTKGH, k_BSKH = rotate(q_BTKGH, *context.rope), rotate(k_BSKH, *context.rope)
        bias_BNTS = None
        table_KGU = self.optional_weight("relative_bias")
        if table_KGU is not None:
            assert context.buckets_BTS is not None
            bias_NBTS = jnp.take(table_KGU.reshape(config.n_heads, -1), context.buckets_BTS, axis=1)
            bias_BNTS = jnp.moveaxis(bias_NBTS, 0, 1)
        if config.extra_softmax_logit:
            assert mask_BTS is not None
            k_BSKH, v_BSKH, mask_BTS, bias_BNTS = _silent_key(k_BSKH, v_BSKH, mask_BTS, bias_BNTS)
        q_BTNH = q_BTKGH.reshape(*q_BTKGH.shape[:2], config.n_heads, config.head_dim)
        if x_BTD.dtype == jnp.float16 and jax.default_backend() == "cpu":  # which has no such products of float16
            q_BTNH, k_BSKH, v_BSKH = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
        out_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BSKH, v_BSKH, bias=bias_BNTS,
            mask=None if mask_BTS is None else mask_BTS[:, None],
            is_causal=mask_BTS is None,
            scale=config.head_dim**-0.5 if config.scale_query else 1.0,
            implementation=_implementation(self.compute.attention, q_BTNH, k_BSKH),
        )
        out_BTKGH = out_BTNH.astype(x_BTD.dtype).reshape(q_BTKGH.shape)
        return checkpoint_name(self.linear("out", out_BTKGH, inputs="KGH"), "out")


def _silent_key(
    k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array, bias_BNTS: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """One more key, which everyone sees: zeros answer 0 to every query and add nothing to the sum.

    So the denominator gains exp(0), which is what a fixed extra logit of 0 does, with no softmax of our own.
    """
    one = (0, 1)
    k_BSKH, v_BSKH = (jnp.pad(x, ((0, 0), one, (0, 0), (0, 0))) for x in (k_BSKH, v_BSKH))
    mask_BTS = jnp.pad(mask_BTS, ((0, 0), (0, 0), one), constant_values=True)
    return k_BSKH, v_BSKH, mask_BTS, None if bias_BNTS is None else jnp.pad(bias_BNTS, ((0, 0), (0, 0), (0, 0), one))


def _implementation(
    asked: Literal["auto", "xla", "cudnn"], q_BTNH: jax.Array, k_BSKH: jax.Array
) -> Literal["cudnn", "xla"]:
    """What was asked for; "auto": cuDNN's fused kernel where it takes these shapes, XLA elsewhere."""
    if asked != "auto":
        return asked
    head_dim, half = q_BTNH.shape[-1], q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
    fits = half and head_dim % 8 == 0 and head_dim <= 128 and q_BTNH.shape[1] % 2 == k_BSKH.shape[1] % 2 == 0
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"
