"""What a run needs, for devices that are not there: its real step, compiled for as many CPU devices, and counted.

No weight is ever allocated: state and batch are shapes. State bytes are exact; what depends on a GPU's own kernels and
collectives is estimated (:mod:`llmtool.train.estimates`) and said to be so. The formulas: docs/plan.md.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from llmtool.errors import Contradiction
from llmtool.model.decoder import REMAT
from llmtool.native_tree import entries
from llmtool.presets import parameter_count
from llmtool.train import estimates
from llmtool.train.batch import Batch
from llmtool.train.checking import check_run
from llmtool.train.config import RunConfig
from llmtool.train.flops import colossalai_flops, megatron_flops, training_flops
from llmtool.train.state import abstract_state
from llmtool.train.step import make_step
from llmtool.train.strategy import Placement, place, rows_per_step

STATE_WIDTH = 4  # bytes: parameters, gradients and moments are float32


def absent_devices(n: int) -> list[jax.Device]:
    """``n`` CPU devices to compile for. Nothing may have used JAX in this process before, unless it has so many."""
    jax.config.update("jax_platforms", "cpu")
    with suppress(RuntimeError):  # devices have been counted already
        jax.config.update("jax_num_cpu_devices", n)
    devices = jax.devices("cpu")
    if len(devices) < n:
        raise Contradiction(f"--devices {n}: this process has JAX on {len(devices)} devices already; plan in a new one")
    return devices[:n]


def plan(
    run: RunConfig, devices: list[jax.Device], *, memory: int = 80 * 10**9, compiled: bool = True
) -> dict[str, Any]:
    """What ``run`` needs on each of ``devices``, as an object of schema "llmtool.plan/1" (docs/json.md).

    ``memory`` is a device's, in bytes. ``compiled``: compile the step, which proves that it can be and checks the state
    bytes; else only count. Raises LlmtoolError for a run that could not start on these devices.
    """
    check_run(run)
    placement = place(run, devices)
    rows = rows_per_step(run, placement.mesh)
    state, flops = state_bytes(run, placement), training_flops(run, devices=len(devices))
    kept = {policy: estimates.activations(run, placement, policy) for policy in ("none", *REMAT)}
    mine = kept[run.remat]
    on_device = sum(size for name, size in state.items() if name not in _in_host(run))
    again = state["gradients"] if run.grad_accum > 1 else 0  # those of a micro-batch beside their sum
    total = on_device + again + mine.kept + mine.working
    a_step = rows * run.seq_len
    return {
        "schema": "llmtool.plan/1",
        "name": run.name,
        "parameters": parameter_count(run.model),
        "devices": len(devices),
        "mesh": dict(placement.mesh.shape),
        "strategy": run.strategy,
        "offload": run.offload,
        "remat": run.remat,
        "precision": run.precision,
        "rows_per_step": rows,
        "tokens_per_step": a_step,
        "state": {**state, "host": sum(state[name] for name in _in_host(run))},
        "flops": {
            "forward_per_token": {name: int(value) for name, value in flops.forward.items() if value},
            "model_per_token": flops.model,
            "hardware_per_token": flops.hardware,
            "model_per_step": flops.model * a_step,
            "model_per_step_and_device": flops.model * a_step / len(devices),
            "colossalai_per_token": colossalai_flops(run),
            "megatron_per_token": megatron_flops(run),
        },
        "estimates": {
            "fused_attention": estimates.fused_attention(run),
            "activations": {policy: vars(each) for policy, each in kept.items()},
            "sent_per_step": estimates.communicated(run, placement),
            "total": total,
            "memory": memory,
            "fits": total <= memory,
            "spare": memory - total,
        },
        "compiled": _compiled(run, placement, state) if compiled else None,
    }


def state_bytes(run: RunConfig, placement: Placement) -> dict[str, int]:
    """Bytes on the fullest device, wherever they lie: of parameters, of their gradients, and of both moments."""
    def held(places: Mapping[str, NamedSharding]) -> int:
        return sum(STATE_WIDTH * math.prod(places[key].shard_shape(entry.shape))
                   for key, entry in entries(run.model).items())

    return {"parameters": held(placement.params), "gradients": held(placement.grads),
            "moments": 2 * held(placement.moments)}


def _in_host(run: RunConfig) -> tuple[str, ...]:
    match run.offload:
        case "optimizer":
            return ("moments",)
        case "parameters":
            return ("parameters", "moments")
    return ()


def _compiled(run: RunConfig, placement: Placement, state: Mapping[str, int]) -> dict[str, Any]:
    """What the compiler says of the step: of its arguments exactly, of the rest as a CPU would run it."""
    run = replace(run, attention="xla")  # cuDNN's kernel is not to be had here
    abstract: Any = abstract_state(run)
    rows = rows_per_step(run, placement.mesh) // run.grad_accum
    shape = (run.grad_accum, rows, run.seq_len)
    kinds = ("int32", "int32", "float32", "int32", "int32")
    batch: Any = Batch(*(jax.ShapeDtypeStruct(shape, kind) for kind in kinds))  # type: ignore[arg-type]
    began = time.perf_counter()
    program = make_step(run, placement, abstract).lower(abstract, batch).compile()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - began
    analysis = program.memory_analysis()
    counters = abstract.replace(params={}, opt=abstract.opt._replace(m={}, v={}))
    return {
        "seconds": seconds,
        "argument_bytes": analysis.argument_size_in_bytes + analysis.host_argument_size_in_bytes,
        "reused_bytes": analysis.alias_size_in_bytes + analysis.host_alias_size_in_bytes,
        "state_bytes": state["parameters"] + state["moments"]
        + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(counters)),
    }
