"""A model, by hand, of what a compilation for a CPU cannot show of a GPU: activations, and bytes between devices.

Estimates: docs/plan.md writes the model out. It takes attention for fused where cuDNN's kernel would take the shapes,
collectives for rings, and weights for gathered again in the backward pass.
"""

import math
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from llmtool.model.mesh import AXES
from llmtool.native_tree import NativeEntry, entries
from llmtool.train.config import RunConfig
from llmtool.train.flops import expert_places
from llmtool.train.loss import CHUNK_BYTES
from llmtool.train.strategy import Placement, rows_per_step

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a number in the products


@dataclass(frozen=True)
class Activations:
    """Bytes on a device. ``kept``: from the forward to the backward pass; ``working``: at the worst moment besides."""

    kept: int
    working: int


def activations(run: RunConfig, placement: Placement, remat: str | None = None) -> Activations:
    """Estimated bytes of a micro-batch on a device under a remat policy (default: the run's)."""
    remat = remat or run.remat
    config, mesh, width = run.model, placement.mesh, WIDTH[run.precision]
    tokens = _tokens(run, placement)
    layers = [_layer(run, placement, config.is_moe(j)) for j in range(config.block_period)]
    repeats = config.n_layers // config.block_period
    everything = sum(sum(layer.values()) for layer in layers)
    kept = repeats * sum(_kept(layer, remat, first=j == 0) for j, layer in enumerate(layers))
    ends = 3 * tokens * config.d_model * width  # the stream before and after the last norm, and its gradient
    ways = _ways(placement, "tensor")
    matrix = config.vocab_size * config.d_model // ways
    logits = min(CHUNK_BYTES, 4 * tokens * config.vocab_size // ways)
    loss = 3 * logits + (width + 4) * matrix
    # one block: its own activations where they are computed again, its gathered weights twice (the next ones come while
    # these are used), and their gradients before they are scattered
    block = sum(_elements(entry, placement) for entry in entries(config).values() if entry.axes[0] == "L") // repeats
    gathered = 3 * width * block if mesh.size > ways else width * block
    again = everything if remat != "none" else everything // len(layers)
    return Activations(int(kept * tokens + ends), int(max(loss, again * tokens + gathered)))


def _layer(run: RunConfig, placement: Placement, is_moe: bool) -> dict[str, float]:
    """Bytes a token of every array that a layer's backward pass reads, when nothing is computed again."""
    config, width, ways = run.model, WIDTH[run.precision], _ways(placement, "tensor")
    d, heads = config.d_model, config.n_heads * config.head_dim / ways
    kv = config.n_kv_heads * config.head_dim / (ways if config.n_kv_heads % ways == 0 else 1)
    found = {"input": d, "norm": d, "q": heads, "k": kv, "v": kv, "attended": heads, "out": d, "norm2": d}
    if is_moe:
        slots, gates = _slots(run, placement)
        d_ff = (config.expert_d_ff or config.d_ff) / ways
        n = 2 if config.experts_gated else 1
        found |= {"router": 2 * config.n_experts * 4 / width, "gates": 2 * gates, "dispatched": slots * d,
                  "experts_up": n * slots * d_ff, "act": n * slots * d_ff, "down": slots * d}
    else:
        n = 2 if config.gated else 1
        found |= {"up": n * config.d_ff / ways, "act": n * config.d_ff / ways}
    sizes = {name: width * size for name, size in found.items()}
    if not fused_attention(run):
        sizes["scores"] = (4 + width) * run.seq_len * config.n_heads / ways
    return sizes


def _kept(layer: dict[str, float], remat: str, first: bool) -> float:
    """Bytes a token that the backward pass finds of a layer; the input of a block's first layer is always among it."""
    stream = layer["input"] if first else 0.0
    match remat:
        case "none":
            return sum(layer.values())
        case "save_dots":
            down = layer["input"] if "up" in layer else 0.0  # of experts, products have a batch axis: not kept
            router = layer.get("router", 0.0) / 2
            return stream + sum(layer.get(name, 0.0) for name in ("q", "k", "v", "out", "up")) + down + router
        case "save_qkv_out":
            return stream + sum(layer[name] for name in ("q", "k", "v", "out"))
    return stream


def fused_attention(run: RunConfig) -> bool:
    """Whether a GPU would run cuDNN's kernel, which never holds the scores (``llmtool.model.attention``)."""
    config = run.model
    fits = config.head_dim % 8 == 0 and config.head_dim <= 128 and not config.extra_softmax_logit
    return run.attention != "xla" and run.precision != "fp32" and fits and run.seq_len % 2 == 0


def communicated(run: RunConfig, placement: Placement) -> dict[str, int]:
    """Estimated bytes that a device sends in a step, by mesh axis."""
    config, width = run.model, WIDTH[run.precision]
    sent = dict.fromkeys(AXES, 0.0)
    for key, entry in entries(config).items():
        for axis, size in _weight_traffic(run, placement, key, entry).items():
            sent[axis] += size
    stream = _tokens(run, placement) * config.d_model * width * run.grad_accum
    again = 1 if run.remat == "full" else 0
    sums = config.n_layers * (4 + again) + 2  # out and down, forward and backward; embedding and output matrix
    sent["tensor"] += sums * _ring_sum(placement, "tensor") * stream
    moe = sum(config.is_moe(layer) for layer in range(config.n_layers))
    if moe and run.capacity_factor is not None:
        trips = 4 + (1 if run.remat != "none" else 0)  # there and back, forward and backward; there again
        sent["fsdp"] += moe * trips * _ring(placement, "fsdp") * stream * _slots(run, placement)[0]
    return {axis: int(size) for axis, size in sent.items()}


def _weight_traffic(run: RunConfig, placement: Placement, key: str, entry: NativeEntry) -> dict[str, float]:
    """Of one weight: gathered for use, its gradients summed, and, where its update is split, gathered after it."""
    width = WIDTH[run.precision]
    size, sent = float(_elements(entry, placement)), dict.fromkeys(AXES, 0.0)
    params, grads, moments = (
        _splits(each[key].spec) for each in (placement.params, placement.grads, placement.moments))
    experts = params[entry.axes.index("E")] if "E" in entry.axes else ()
    if "E" in entry.axes:
        size /= math.prod(_ways(placement, axis) for axis in experts)
    flat = [{axis for names in each for axis in names} - set(experts) for each in (params, grads, moments)]
    rest = size
    for axis in ("fsdp", "data"):
        if axis in experts:
            continue
        ways = _ways(placement, axis)
        if axis in flat[0]:
            sent[axis] += 2 * run.grad_accum * width * _ring(placement, axis) * rest
        if axis in flat[1]:
            sent[axis] += run.grad_accum * width * _ring(placement, axis) * rest
        else:
            sent[axis] += run.grad_accum * width * _ring_sum(placement, axis) * rest
        if axis in flat[2] - flat[0]:
            sent[axis] += 4 * _ring(placement, axis) * rest
        if axis in flat[1]:
            rest /= ways
    return sent


def _splits(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of every axis of an array."""
    return [(names,) if isinstance(names, str) else tuple(names or ()) for names in spec]


def _elements(entry: NativeEntry, placement: Placement) -> int:
    """Numbers of a weight that a device multiplies with: its share over ``tensor`` alone, experts as they lie."""
    spec = _splits(placement.params[entry.key].spec)
    kept = [axis for letter, names in zip(entry.axes, spec, strict=False) for axis in names
            if axis == "tensor" or letter == "E"]
    return math.prod(entry.shape) // math.prod(_ways(placement, axis) for axis in kept)


def _slots(run: RunConfig, placement: Placement) -> tuple[float, float]:
    """Of a token: places among the experts that are computed, and numbers that say which (experts x capacity)."""
    if run.capacity_factor is None:
        return float(run.model.experts_per_token), float(run.model.experts_per_token)
    places, tokens = expert_places(run, placement.mesh.size)
    return places / tokens, float(places)


def _tokens(run: RunConfig, placement: Placement) -> int:
    """Of a micro-batch, on a device."""
    rows = rows_per_step(run, placement.mesh) // run.grad_accum
    return rows * run.seq_len // (_ways(placement, "data") * _ways(placement, "fsdp"))


def _ways(placement: Placement, axis: str) -> int:
    return placement.mesh.shape[axis]


def _ring(placement: Placement, axis: str) -> float:
    """What a device sends of an array in a gather, a scattered sum or an exchange along an axis."""
    return 1 - 1 / _ways(placement, axis)


def _ring_sum(placement: Placement, axis: str) -> float:
    return 2 * _ring(placement, axis)
