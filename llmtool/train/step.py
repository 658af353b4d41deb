"""One step of training, the same for pretraining, full fine-tuning and adapters: a pure function, compiled once."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from llmtool.errors import Contradiction
from llmtool.model.decoder import Decoder
from llmtool.model.part import Compute
from llmtool.model.tree import nest
from llmtool.train import optimizer
from llmtool.train.batch import Batch
from llmtool.train.config import RunConfig
from llmtool.train.loss import Sums, Unembed, cross_entropy
from llmtool.train.schedule import learning_rate
from llmtool.train.state import Trainable, TrainState, everything, state_shardings
from llmtool.train.strategy import HOST, Placement

DTYPES = {"bf16": jnp.bfloat16, "fp32": jnp.float32, "fp16": jnp.float16}
Params = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def run_model(run: RunConfig, placement: Placement) -> Decoder:
    """The decoder as this run computes it. Raises :class:`Contradiction` for a kernel that is not to be had."""
    if run.attention == "cudnn" and jax.default_backend() != "gpu":
        raise Contradiction(f"--attention cudnn needs a GPU; this is {jax.default_backend()}: say xla or auto")
    if run.attention == "cudnn" and run.precision == "fp32":
        raise Contradiction("--attention cudnn computes in bf16 or fp16; --precision is fp32: say xla or auto")
    compute = Compute(
        dtype=DTYPES[run.precision],
        mesh=placement.mesh,
        capacity_factor=run.capacity_factor,
        expert_groups=run.expert_groups,
        attention=run.attention,
        remat=run.remat,
        dropout=run.dropout,
        weights_in_host=run.offload == "parameters",
    )
    return Decoder(run.model, compute)


def make_step(
    run: RunConfig, placement: Placement, state: TrainState, trainable: Trainable = everything
) -> StepFunction:
    """The compiled step, ``(state, batch) -> (state, metrics)``; the state given is used up.

    Batches are those of :func:`to_devices`; ``state`` may be abstract. Metrics are float32 scalars: ``loss`` (all terms
    over the run's denominator), ``xent`` (nats a counted target), ``aux_loss``, ``tokens`` (sum of weights), those of
    the optimizer, and ``skipped`` so far. A step whose gradients are not finite, or in which no target counts, changes
    nothing but the counts.
    """
    places = state_shardings(state, placement)
    gradients = make_gradients(run, placement, trainable)
    lr_fn = learning_rate(run.schedule, run.optimizer.learning_rate, run.steps)

    def centre(key: str) -> float:
        """What weight decay pulls a weight to. Pax stores LayerNorm's scales minus one, so there it is one for them."""
        centred = run.optimizer.kind == "pax" and run.model.norm == "layernorm" and key.endswith("norm.scale")
        return 1.0 if centred else 0.0

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics = gradients(state, batch)
        moving = {key: _on_device(state.params[key], placement.moments[key]) - centre(key) for key in grads}
        moments = [{key: _on_device(x, placement.moments[key]) for key, x in tree.items()}
                   for tree in (state.opt.m, state.opt.v)]
        opt = state.opt._replace(m=moments[0], v=moments[1])
        moved, opt, told = optimizer.update(grads, opt, moving, lr_fn, run.optimizer)
        moved = {key: p + centre(key) for key, p in moved.items()}
        scale = state.loss_scale
        if scale is not None:
            scale = scale.after(jnp.isfinite(told["grad_norm"]) | (metrics["tokens"] == 0))
            metrics["loss_scale"] = scale.value
        metrics |= told | {"skipped": opt.skipped.astype(jnp.float32)}
        after = replace(state, step=state.step + 1, params={**state.params, **moved}, opt=opt, loss_scale=scale)
        return after, metrics

    return jax.jit(
        step, in_shardings=(places, placement.batch), out_shardings=(places, placement.everywhere), donate_argnums=0
    )


def make_gradients(
    run: RunConfig, placement: Placement, trainable: Trainable = everything
) -> Callable[[TrainState, Batch], tuple[dict[str, jax.Array], Metrics]]:
    """``(state, batch) -> (gradients of the leaves that move, float32, metrics)``, not compiled.

    Losses are summed over micro-batches and devices and divided once, by the count of all: how the batch is cut makes
    no difference. The MoE loss is the mean of the micro-batches'. Gradients are NaN where no target counts.
    """
    model = run_model(run, placement)

    def gradients(state: TrainState, batch: Batch) -> tuple[dict[str, jax.Array], Metrics]:
        n_micro = batch.ids.shape[0]
        counted = jnp.sum(batch.weights)
        denominator = jnp.maximum(counted, 1.0) if run.loss_over == "counted" else jnp.float32(batch.ids.size)
        frozen = {key: leaf for key, leaf in state.params.items() if not trainable(key)}
        moving = {key: leaf for key, leaf in state.params.items() if trainable(key)}
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.value
        rng = jax.random.fold_in(state.rng, state.step)

        def loss(moving: Params, micro: Batch, index: jax.Array) -> tuple[jax.Array, Metrics]:
            total, sums, aux = losses(run, model, {**frozen, **moving}, micro, jax.random.fold_in(rng, index))
            aux = run.aux_loss_weight * aux / n_micro
            value = total / denominator + aux
            return value * scale, {"loss": value, "xent": sums.xent, "aux_loss": aux}

        def one(micro: Batch, index: jax.Array) -> tuple[dict[str, jax.Array], Metrics]:
            grads, metrics = jax.grad(loss, has_aux=True)(moving, micro, index)
            return {key: _on_device(g, placement.grads[key]).astype(jnp.float32) for key, g in grads.items()}, metrics

        def add(summed: Any, numbered: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, summed, one(*numbered)), None

        first = jax.tree.map(lambda x: x[0], batch)
        grads, metrics = one(first, jnp.int32(0))
        if n_micro > 1:
            rest = jax.tree.map(lambda x: x[1:], batch)
            (grads, metrics), _ = jax.lax.scan(add, (grads, metrics), (rest, jnp.arange(1, n_micro)))
        usable = jnp.where(counted > 0, 1.0 / scale, jnp.nan)
        metrics |= {"tokens": counted, "xent": metrics["xent"] / jnp.maximum(counted, 1.0)}
        return {key: g * usable for key, g in grads.items()}, metrics

    return gradients


def losses(
    run: RunConfig, model: Decoder, params: Params, micro: Batch, rng: jax.Array | None = None
) -> tuple[jax.Array, Sums, jax.Array]:
    """Of one micro-batch [B, T]: cross-entropy with its z-loss, summed over the targets; the sums apart; and the
    experts' load-balance losses, summed over layers."""
    x_BTD, sown = model.apply(
        {"params": nest(params)},
        micro.ids,
        *_documents(run, micro),
        method=Decoder.hidden,
        mutable=["losses"],
        rngs={"dropout": rng} if run.dropout and rng is not None else None,
    )
    if run.model.scale_logits:
        x_BTD = x_BTD * run.model.d_model**-0.5
    matrix, axes = ("embed", "VD") if run.model.tied else ("unembed.w", "DV")
    unembed = Unembed(params[matrix], params.get("unembed.b"))
    if run.offload == "parameters":
        unembed = jax.tree.map(lambda w: jax.device_put(w, jax.memory.Space.Device), unembed)
    total, sums = cross_entropy(
        x_BTD, unembed, axes, jnp.asarray(micro.targets), jnp.asarray(micro.weights),
        z_weight=run.z_loss_weight, mesh=model.compute.mesh,
    )  # fmt: skip
    aux = sum((jnp.sum(leaf) for leaf in jax.tree.leaves(sown)), jnp.float32(0))
    return total, sums, aux


def make_evaluation(run: RunConfig, placement: Placement) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """The compiled ``(params, batch) -> (Σ w·cross-entropy in nats, Σ w)``; no dropout, and no other loss terms."""
    model = run_model(run, placement)

    def evaluate(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        def one(micro: Batch) -> jax.Array:
            _, sums, _ = losses(run, model, params, micro)
            return sums.xent

        return jnp.sum(jax.lax.map(one, batch)), jnp.sum(batch.weights)

    return jax.jit(evaluate, out_shardings=placement.everywhere)


def to_devices(batch: Batch, placement: Placement, n_micro: int = 1) -> Batch:
    """This process's rows [R, T] -> its share of the global arrays [micro-batch, B, T]."""
    return Batch(*(
        jax.make_array_from_process_local_data(placement.batch, np.reshape(x, (n_micro, -1, x.shape[-1])))
        for x in batch
    ))


def _documents(run: RunConfig, micro: Batch) -> tuple[jax.Array | None, jax.Array | None]:
    """Positions and segments, where rows hold several documents; else neither, which lets fused kernels run. Experts
    must be told of padding in any case, for it takes no capacity."""
    if run.data.pipeline == "packed" or run.model.n_experts:
        return jnp.asarray(micro.positions), jnp.asarray(micro.segments)
    return None, None


def _on_device(x: jax.Array, place: NamedSharding) -> jax.Array:
    """Pin an array to its split, out of host memory if it is there."""
    device = place.with_memory_kind("device") if place.memory_kind == HOST else place
    moved = jax.device_put(x, jax.memory.Space.Device) if jax.typeof(x).memory_space == jax.memory.Space.Host else x
    return jax.lax.with_sharding_constraint(moved, device)
