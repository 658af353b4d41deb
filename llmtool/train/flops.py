"""Floating-point operations of a training step, counted from the model's shape, and what a device can do at most.

An operation is a multiplication or an addition: a product of [m, k] and [k, n] has 2·m·k·n. Only products count, as in
every published formula; docs/plan.md writes ours out. Beside it stand two that people compare with: ColossalAI's
(``performance_evaluator.py``) and Megatron-LM's (Narayanan et al., 2104.04473, equation 3).
"""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from llmtool.model.moe import capacity
from llmtool.model_config import ModelConfig
from llmtool.presets import parameter_count
from llmtool.train.config import RunConfig

BACKWARD = 2  # products of the backward pass for one of the forward: towards the inputs and towards the weights
_GIB = 1 << 30


@dataclass(frozen=True)
class Flops:
    """FLOPs a token. ``forward``: of one forward pass, by part, as the mathematics needs it. ``hardware``: of training
    as it is computed: with what the backward pass repeats, and what experts with a capacity need besides."""

    forward: Mapping[str, float]
    hardware: float

    @property
    def model(self) -> float:
        """Of training, nothing repeated: what model FLOP/s and MFU are counted from."""
        return (1 + BACKWARD) * sum(self.forward.values())


def training_flops(run: RunConfig, *, devices: int | None = None, causal: bool = True) -> Flops:
    """FLOPs a token of a run's step on ``devices`` (default: those of its mesh; only what experts with a capacity cost
    depends on them). ``causal`` as of :func:`forward_flops`."""
    config, devices = run.model, devices or mesh_devices(run)
    repeats = config.n_layers // config.block_period
    total = (1 + BACKWARD) * _unembed(config)
    for j in range(config.block_period):
        layer = _layer(config, run.seq_len, config.is_moe(j), causal) | _with_capacity(run, j, devices)
        again = _recomputed(run, layer, last=j == config.block_period - 1)
        sent = layer.get("dispatch", 0.0)  # the places themselves have no gradient
        total += repeats * ((1 + BACKWARD) * sum(layer.values()) - sent + again)
    return Flops(forward_flops(config, run.seq_len, causal=causal), total)


def forward_flops(config: ModelConfig, seq_len: int, *, causal: bool = True) -> dict[str, float]:
    """FLOPs a token of one forward pass, by part, averaged over a row of ``seq_len`` tokens.

    ``causal``: a query meets (T + 1)/2 keys on average, the masked half not being worth computing; else all T, which is
    what a kernel without that knowledge does. Experts: the chosen ones alone, sent there and back at no cost.
    """
    total: dict[str, float] = {}
    for j in range(config.block_period):
        for part, value in _layer(config, seq_len, config.is_moe(j), causal).items():
            total[part] = total.get(part, 0.0) + value * (config.n_layers // config.block_period)
    return total | {"unembed": _unembed(config)}


def _layer(config: ModelConfig, seq_len: int, is_moe: bool, causal: bool) -> dict[str, float]:
    d, heads, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    keys = (seq_len + 1) / 2 if causal else seq_len + config.extra_softmax_logit
    found = {"qkv": 2.0 * d * (heads + 2 * kv), "attention": 2 * 2 * heads * keys, "out": 2.0 * heads * d}
    if not is_moe:
        return found | {"up": 2.0 * d * config.d_ff * (1 + config.gated), "down": 2.0 * config.d_ff * d}
    wide = config.experts_per_token * (config.expert_d_ff or config.d_ff)
    return found | {"router": 2.0 * d * config.n_experts, "experts_up": 2.0 * d * wide * (1 + config.experts_gated),
                    "experts_down": 2.0 * wide * d}


def _with_capacity(run: RunConfig, j: int, devices: int) -> dict[str, float]:
    """What experts with a capacity cost instead: each of their places, and a product to fill them and one to empty."""
    config = run.model
    if run.capacity_factor is None or not config.is_moe(j):
        return {}
    places, tokens = expert_places(run, devices)
    layer, ratio = _layer(config, run.seq_len, True, True), places / tokens / config.experts_per_token
    moved = 2.0 * places * config.d_model
    return {"experts_up": layer["experts_up"] * ratio, "experts_down": layer["experts_down"] * ratio,
            "dispatch": moved, "combine": moved}


def mesh_devices(run: RunConfig) -> int:
    """Devices of the run's own mesh; 1 where it has none."""
    return math.prod(run.mesh.ici or (1,)) * math.prod(run.mesh.dcn)


def expert_places(run: RunConfig, devices: int) -> tuple[int, int]:
    """Of a group: places of all experts together, and tokens. The run has a capacity factor."""
    assert run.capacity_factor is not None
    tokens = max(round(run.batch_per_device * devices * run.seq_len) // run.expert_groups, 1)
    return capacity(tokens, run.model.n_experts, run.capacity_factor) * run.model.n_experts, tokens


# Of a layer, what each policy has computed again. Not the last product of a block: nobody asks for its result.
_AGAIN: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "full": ("qkv", "attention", "out", "up", "down", "router", "dispatch", "experts_up", "experts_down", "combine"),
    # products with a batch axis: over heads, groups, experts
    "save_dots": ("attention", "dispatch", "experts_up", "experts_down", "combine"),
    "save_qkv_out": ("attention", "up", "down", "router", "dispatch", "experts_up", "experts_down", "combine"),
}


def _recomputed(run: RunConfig, layer: Mapping[str, float], last: bool) -> float:
    skipped = ("down", "combine", *(("out",) if run.model.parallel_residual else ())) if last else ()
    return sum(layer.get(part, 0.0) for part in _AGAIN[run.remat] if part not in skipped)


def _unembed(config: ModelConfig) -> float:
    return 2.0 * config.d_model * config.vocab_size


def colossalai_flops(run: RunConfig) -> float:
    """FLOPs a token as ColossalAI's benchmark counts them: 2 a parameter, times 3, or 4 with recomputation."""
    return 2.0 * parameter_count(run.model) * _passes(run)


def megatron_flops(run: RunConfig) -> float:
    """FLOPs a token as Megatron counts them, for a GPT with a feed-forward of 4·d, nothing grouped and nothing gated:
    24·(3 or 4)·L·d²·(1 + T/(6·d) + V/(16·L·d)). Written for 4: with 3, the output matrix counts three quarters."""
    m = run.model
    rest = 1 + run.seq_len / (6 * m.d_model) + m.vocab_size / (16 * m.n_layers * m.d_model)
    return 24.0 * _passes(run) * m.n_layers * m.d_model**2 * rest


def _passes(run: RunConfig) -> int:
    return 3 if run.remat == "none" else 4


@dataclass(frozen=True)
class Device:
    """An accelerator as its data sheet has it: dense FLOP/s of bf16 and fp16 products and of float32 ones (without
    TF32), bytes of memory."""

    half: float
    single: float
    memory: int


# The first name found in the device's kind counts. Sources: NVIDIA's data sheets, without sparsity; 2:4 doubles them.
DEVICES: Mapping[str, Device] = {
    "B200": Device(2250e12, 75e12, 180 * _GIB),
    "GH200": Device(989.4e12, 66.9e12, 96 * _GIB),
    "H200": Device(989.4e12, 66.9e12, 141 * _GIB),
    "H100 PCIe": Device(756e12, 51.2e12, 80 * _GIB),
    "H100": Device(989.4e12, 66.9e12, 80 * _GIB),
    "H800": Device(989.4e12, 66.9e12, 80 * _GIB),
    "A100-SXM4-40GB": Device(312e12, 19.5e12, 40 * _GIB),
    "A100-PCIE-40GB": Device(312e12, 19.5e12, 40 * _GIB),
    "A100": Device(312e12, 19.5e12, 80 * _GIB),
    "A800": Device(312e12, 19.5e12, 80 * _GIB),
    "L40S": Device(362e12, 91.6e12, 48 * _GIB),
    "L40": Device(181e12, 90.5e12, 48 * _GIB),
    "A10G": Device(70e12, 31.5e12, 24 * _GIB),
    "A10": Device(125e12, 31.2e12, 24 * _GIB),
    "L4": Device(121e12, 30.3e12, 24 * _GIB),
    "V100": Device(125e12, 15.7e12, 32 * _GIB),  # fp16 alone: it has no bf16 units
}  # fmt: skip


def peak_flops(device_kind: str, precision: str) -> float | None:
    """FLOP/s of a device at most, by the name that JAX gives it (``device.device_kind``); None where it is not known.

    ``precision``: that of the run, bf16, fp16 or fp32.
    """
    found = next((device for name, device in DEVICES.items() if name in device_kind), None)
    if found is None:
        return None
    return found.single if precision == "fp32" else found.half


def measured_peak(dtype: str = "float32", size: int = 2048, rounds: int = 5) -> float:
    """FLOP/s of a product of two square matrices on the first device, summed in float32: the median of ``rounds``.

    What a CPU can do at most depends on its cores, its clock and its neighbours; so it is measured.
    """
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    x = jnp.ones((size, size), dtype)
    product(x).block_until_ready()

    def seconds() -> float:
        began = time.perf_counter()
        product(x).block_until_ready()
        return time.perf_counter() - began

    return 2 * size**3 / statistics.median(seconds() for _ in range(rounds))
