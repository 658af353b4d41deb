"""The decoder: every family is this one module under another config.

Its parameter tree is :mod:`llmtool.native_tree`: ``layers.block_{j}`` stacked over the repeats of a block and scanned,
so that compile time does not grow with depth.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from llmtool.errors import Contradiction
from llmtool.model.attention import Attention, Context
from llmtool.model.feed_forward import FeedForward
from llmtool.model.moe import Experts
from llmtool.model.norm import Norm, PreNorm
from llmtool.model.part import Linear, Part, lookup, product
from llmtool.model.position import packed_positions, relative_buckets, rope_angles, sinusoids
from llmtool.model_config import ModelConfig

# What the backward pass finds of a block's forward pass; the rest it computes again. "none": everything is kept.
REMAT: Mapping[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "save_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_qkv_out": jax.checkpoint_policies.save_only_these_names("q", "k", "v", "out"),
}


class Layer(Part):
    """Attention and feed-forward on the residual stream."""

    is_moe: bool = False

    @nn.compact
    def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
        def part(kind: type[Part], name: str) -> Part:
            return kind(self.config, self.compute, f"{self.path}.{name}", name=name)

        after_BTD = x_BTD + part(Attention, "attn")(x_BTD, context)
        input_BTD = x_BTD if self.config.parallel_residual else after_BTD
        if self.is_moe:
            y_BTD = part(Experts, "moe")(part(PreNorm, "mlp")(input_BTD), context.valid_BT)
        else:
            y_BTD = part(FeedForward, "mlp")(input_BTD)
        return self.shard(after_BTD + y_BTD, "BTD")


class Block(Part):
    """One repeat of the layers: what the scan goes over."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, None]:
        for j in range(self.config.block_period):
            path = f"{self.path}.block_{j}"
            if self.compute.dropout:
                quiet = not self.has_rng("dropout")
                x_BTD = nn.Dropout(self.compute.dropout, deterministic=quiet, name=f"dropout_{j}")(x_BTD)
            x_BTD = Layer(self.config, self.compute, path, self.config.is_moe(j), name=f"block_{j}")(x_BTD, context)
        return x_BTD, None


class Decoder(Part):
    """Token ids to logits: ``Decoder(config, Compute(dtype)).apply({"params": tree}, ids_BT)``.

    Norms, softmaxes, sums and logits are float32 also where the products are bfloat16; float32 means full float32
    products on accelerators too. (float64 throughout, under ``jax.enable_x64``, tells whose rounding a difference is.)
    """

    def setup(self) -> None:
        check_forward(self.config)
        self.embed = self.weight("embed")
        self.position_table = self.optional_weight("positions")
        stack = nn.scan(
            _kept(Block, self.compute.remat),
            variable_axes={"params": 0, "adapters": 0, "losses": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.config.n_layers // self.config.block_period,
        )
        self.layers = stack(self.config, self.compute, "layers")
        self.norm = Norm(self.config, self.compute, "norm")
        if not self.config.tied:
            self.unembed = Linear(self.config, self.compute, "unembed")

    def __call__(
        self,
        ids_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        logits_at_BM: jax.Array | None = None,
    ) -> jax.Array:
        """Logits, float32 [B, T, V]; [B, M, V] at the places ``logits_at_BM`` (indices into T) if given.

        ``segment_ids_BT`` keeps packed documents from seeing each other, 0 being padding; positions then start anew in
        each, unless given. Right padding needs no segments, since nothing looks ahead.
        """
        x_BTD = self.hidden(ids_BT, positions_BT, segment_ids_BT)
        if logits_at_BM is not None:
            x_BTD = jnp.take_along_axis(x_BTD, logits_at_BM[..., None], axis=1)
        return self.logits(x_BTD)

    def hidden(
        self,
        ids_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        branches_BT: jax.Array | None = None,
    ) -> jax.Array:
        """The stream after the last norm, [B, T, D] in the compute dtype: what :meth:`logits` reads.

        ``branches_BT`` lets several continuations of one text share a row: the text is branch 0, which all see; a
        continuation sees the text and itself. Their positions must then be given.
        """
        config, n_tokens = self.config, ids_BT.shape[1]
        if positions_BT is None:
            plain_1T = jnp.arange(n_tokens)[None]
            positions_BT = plain_1T if segment_ids_BT is None else packed_positions(segment_ids_BT)
            if self.position_table is not None and n_tokens > len(self.position_table):
                raise Contradiction(f"{n_tokens} tokens a row, but the model has {len(self.position_table)} positions")
        x_BTD = lookup(self.shard(self.embed, "VD"), ids_BT)
        if self.position_table is not None:
            x_BTD = x_BTD + lookup(self.position_table, positions_BT)
        elif config.position == "sinusoidal":
            x_BTD = x_BTD + sinusoids(positions_BT, config.d_model, self.compute.wide).astype(x_BTD.dtype)
        with full_products(self.compute.dtype):
            context = self._context(n_tokens, positions_BT, segment_ids_BT, branches_BT)
            x_BTD, _ = self.layers(self.shard(x_BTD, "BTD"), context)
        return self.norm(x_BTD)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Float32 logits [B, T, V] of any number T of final states."""
        if self.config.scale_logits:
            x_BTD = x_BTD * self.config.d_model**-0.5
        with full_products(self.compute.dtype):
            if self.config.tied:
                return self.shard(product("BTD,VD->BTV", x_BTD, self.embed, self.compute.wide), "BTV")
            return self.unembed(x_BTD, "D", self.compute.wide)

    def _context(
        self,
        n_tokens: int,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        branches_BT: jax.Array | None,
    ) -> Context:
        config = self.config
        causal_BTS = jnp.tril(jnp.ones((1, n_tokens, n_tokens), bool))
        mask_BTS = causal_BTS if config.extra_softmax_logit else None
        if segment_ids_BT is not None:
            mask_BTS = causal_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
        if branches_BT is not None:
            seen_BTS = (branches_BT[:, None, :] == 0) | (branches_BT[:, :, None] == branches_BT[:, None, :])
            mask_BTS = seen_BTS & (causal_BTS if mask_BTS is None else mask_BTS)
        buckets = config.relative_buckets
        return Context(
            rope=rope_angles(config, positions_BT, self.compute.wide) if config.position == "rope" else None,
            mask_BTS=mask_BTS,
            buckets_BTS=relative_buckets(positions_BT, buckets, config.relative_max_distance) if buckets else None,
            valid_BT=None if segment_ids_BT is None else segment_ids_BT != 0,
        )


def _kept(block: type[Block], remat: str) -> type[Block]:
    if remat == "none":
        return block
    rematerialised: type[Block] = nn.remat(block, policy=REMAT[remat], prevent_cse=False)  # within a scan it is safe
    return rematerialised


def check_forward(config: ModelConfig) -> None:
    """Raise :class:`~llmtool.errors.MissingFact` where a fact that the arithmetic needs is not known."""
    needed = ["norm_eps", "position"]
    if config.position == "rope":
        needed.append("rope_theta")
    if any(not config.is_moe(j) for j in range(config.block_period)):
        needed.append("activation")
    if config.moe_layers_in_block:
        needed.append("expert_activation")
    config.require(*needed, why="running the model")


def full_products(dtype: object) -> AbstractContextManager:
    """Accelerators shorten float32 products unless told not to."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()
