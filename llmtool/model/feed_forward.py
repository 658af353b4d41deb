"""The dense feed-forward block: gated (SwiGLU and kin) or plain."""

from collections.abc import Callable, Mapping
from functools import partial

import flax.linen as nn
import jax

from llmtool.model.norm import Norm
from llmtool.model.part import Part

ACTIVATIONS: Mapping[str | None, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class FeedForward(Part):
    """Norm and projections. The gate branch, where there is one, is the activated one."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        act = ACTIVATIONS[self.config.activation]
        x_BTD = Norm(self.config, self.compute, f"{self.path}.norm", name="norm")(x_BTD)
        up_BTF = self._wide(self.linear("up", x_BTD))
        hidden_BTF = act(self._wide(self.linear("gate", x_BTD))) * up_BTF if self.config.gated else act(up_BTF)
        return self.linear("down", hidden_BTF.astype(x_BTD.dtype), inputs="F")

    def _wide(self, x_BTF: jax.Array) -> jax.Array:
        """On CPU the activation is computed in float32: in bfloat16 every single operation would round, for twice the
        time. Accelerators fuse it as it is."""
        return x_BTF.astype(self.compute.wide) if jax.default_backend() == "cpu" else x_BTF
