"""Mixture of experts: a router sends every token to its k best experts, whose answers are summed by gate.

Without a capacity nothing is dropped (Mixtral, and any evaluation). With one, each expert takes so many tokens of a
group and the rest pass by on the residual alone, as GLaM trains: Du et al., GLaM (2112.06905); Lepikhin et al., GShard
(2006.16668); numbers as praxis' ``top2_gating_on_logits``.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from llmtool.model.feed_forward import ACTIVATIONS
from llmtool.model.part import Part, product
from llmtool.model.sharding import RULES

Matrices = tuple[jax.Array | None, jax.Array, jax.Array]  # gate, up, down, all experts of each

_BATCH_AXES = RULES["B"]


class Experts(Part):
    """Router and experts. Sows ``losses/load_balance``: E² · mean over groups and experts of share · probability."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array | None) -> jax.Array:
        config, compute = self.config, self.compute
        router_DE, up, down = (self.weight(name) for name in ("router", "up", "down"))
        gate = self.optional_weight("gate")
        groups = compute.expert_groups
        x_GSD = x_BTD.reshape(groups, -1, config.d_model)
        valid_GS = jnp.ones(x_GSD.shape[:2], bool) if valid_BT is None else valid_BT.reshape(x_GSD.shape[:2])
        probs_GSE = jax.nn.softmax(product("GSD,DE->GSE", x_GSD, router_DE, compute.wide))
        weight_GSk, expert_GSk = jax.lax.top_k(probs_GSE, config.experts_per_token)
        weight_GSk = weight_GSk / (jnp.sum(weight_GSk, axis=-1, keepdims=True) + 1e-9)
        self.sow("losses", "load_balance", _load_balance(probs_GSE, expert_GSk[..., 0], valid_GS))
        if compute.capacity_factor is None:
            y = self._undropped(x_BTD, weight_GSk, expert_GSk, (gate, up, down))
        else:
            combine_GSEC = combine_weights(
                weight_GSk, expert_GSk, valid_GS, config.n_experts,
                capacity(x_GSD.shape[1], config.n_experts, compute.capacity_factor),
            ).astype(compute.dtype)
            x_EGCD = product("GSEC,GSD->EGCD", (combine_GSEC > 0).astype(compute.dtype), x_GSD)
            y_EGCD = self._expert("EGC", "E", x_EGCD, gate, up, down)
            y = product("GSEC,EGCD->GSD", combine_GSEC, y_EGCD)
        return y.reshape(x_BTD.shape)

    def _expert(
        self, rows: str, experts: str, x: jax.Array, gate: jax.Array | None, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """The expert's feed-forward over ``x`` (axes ``rows`` D), for one expert or for all (``experts`` = E)."""
        act = ACTIVATIONS[self.config.expert_activation]
        into, out = f"{rows}D,{experts}DX->{rows}X", f"{rows}X,{experts}XD->{rows}D"
        hidden = product(into, x, up)
        hidden = act(hidden) if gate is None else act(product(into, x, gate)) * hidden
        return product(out, hidden, down)

    def _undropped(
        self, x_BTD: jax.Array, weight: jax.Array, expert: jax.Array, matrices: Matrices
    ) -> jax.Array:
        """Every token through all its experts; each device sorts the tokens of its own batch rows."""
        chosen = (*x_BTD.shape[:2], self.config.experts_per_token)
        args = (x_BTD, weight.astype(x_BTD.dtype).reshape(chosen), expert.reshape(chosen), matrices)
        mesh = self.compute.mesh
        if mesh is None:
            return self._in_blocks(*args)
        names = tuple(name for name in _BATCH_AXES if name in mesh.shape)
        if x_BTD.shape[0] % math.prod(mesh.shape[name] for name in names):
            return self._in_blocks(*args)
        rows, whole = PartitionSpec(names), PartitionSpec()
        local = jax.shard_map(
            self._in_blocks, mesh=mesh, in_specs=(rows, rows, rows, whole), out_specs=rows, axis_names=set(names)
        )
        return local(*args)

    def _in_blocks(
        self, x_BTD: jax.Array, weight_BTk: jax.Array, expert_BTk: jax.Array, matrices: Matrices
    ) -> jax.Array:
        """Choices laid out by expert, each expert's run padded to whole blocks, one product a block.

        So the arithmetic is that of k experts a token, and not of all E, with static shapes.
        """
        (gate, up, down), n_experts, d_model = matrices, self.config.n_experts, x_BTD.shape[-1]
        expert_c = expert_BTk.reshape(-1)  # c: choices, k for each token
        k = expert_BTk.shape[-1]
        size = max(8, min(256, expert_c.size // n_experts))
        n_blocks = -(-expert_c.size // size) + n_experts
        chosen_cE = jax.nn.one_hot(expert_c, n_experts, dtype=jnp.int32)
        rank_c = jnp.sum((jnp.cumsum(chosen_cE, axis=0) - 1) * chosen_cE, axis=1)
        end_E = jnp.cumsum(-(-jnp.sum(chosen_cE, axis=0) // size))  # in blocks
        start_E = jnp.pad(end_E[:-1], (1, 0))
        slot_c = start_E[expert_c] * size + rank_c
        rows_cD = jnp.repeat(x_BTD.reshape(-1, d_model), k, axis=0)
        x_nbD = jnp.zeros((n_blocks * size, d_model), x_BTD.dtype).at[slot_c].set(rows_cD)
        expert_n = jnp.minimum(jnp.sum(end_E <= jnp.arange(n_blocks)[:, None], axis=1), n_experts - 1)

        def block(task: tuple[jax.Array, jax.Array]) -> jax.Array:
            x_bD, e = task
            return self._expert("b", "", x_bD, None if gate is None else gate[e], up[e], down[e])

        y_nbD = jax.lax.map(block, (x_nbD.reshape(n_blocks, size, d_model), expert_n))
        y_cD = y_nbD.reshape(-1, d_model)[slot_c]
        return product("BTkD,BTk->BTD", y_cD.reshape(*expert_BTk.shape, d_model), weight_BTk)


def capacity(group_tokens: int, n_experts: int, factor: float) -> int:
    """Tokens that an expert takes from a group: the floor of its even share times ``factor``, up to a multiple of 4
    when more than 1, else 1 (praxis)."""
    share = int(group_tokens * factor / n_experts)
    return -(-share // 4) * 4 if share > 1 else 1


def combine_weights(
    weight_GSk: jax.Array, expert_GSk: jax.Array, valid_GS: jax.Array, n_experts: int, n_slots: int
) -> jax.Array:
    """The gate of each token at its slot of each expert, [G, S, E, C]; 0 where dropped or padding.

    Tokens queue in order; second choices queue behind all the first choices that were taken.
    """
    combine_GSEC = jnp.zeros((*weight_GSk.shape[:2], n_experts, n_slots), weight_GSk.dtype)
    taken_GE = jnp.zeros((weight_GSk.shape[0], n_experts), jnp.int32)
    for choice in range(weight_GSk.shape[2]):
        chosen_GSE = jax.nn.one_hot(expert_GSk[..., choice], n_experts, dtype=jnp.int32) * valid_GS[..., None]
        slot_GSE = jnp.cumsum(chosen_GSE, axis=1) - 1 + taken_GE[:, None]
        kept_GSE = chosen_GSE * (slot_GSE < n_slots)
        taken_GE = taken_GE + jnp.sum(kept_GSE, axis=1)
        gate_GSE = kept_GSE * weight_GSk[..., choice, None]
        combine_GSEC = combine_GSEC + gate_GSE[..., None] * jax.nn.one_hot(slot_GSE, n_slots, dtype=gate_GSE.dtype)
    return combine_GSEC


def _load_balance(probs_GSE: jax.Array, first_GS: jax.Array, valid_GS: jax.Array) -> jax.Array:
    """How unevenly first choices fall (1 when even), before capacity. Means run over all positions, padding too."""
    n_experts = probs_GSE.shape[-1]
    valid_GS1 = valid_GS[..., None].astype(probs_GSE.dtype)
    share_GE = jnp.mean(jax.nn.one_hot(first_GS, n_experts, dtype=probs_GSE.dtype) * valid_GS1, axis=1)
    prob_GE = jnp.mean(probs_GSE * valid_GS1, axis=1)
    return jnp.mean(share_GE * prob_GE) * n_experts**2
