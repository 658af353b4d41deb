"""How fast is a run? Its step on made-up rows, timed after the first few."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from llmtool.errors import BadRun
from llmtool.presets import parameter_count
from llmtool.train.checking import check_run
from llmtool.train.config import RunConfig
from llmtool.train.data import make_loader
from llmtool.train.flops import colossalai_flops, megatron_flops
from llmtool.train.loop import share
from llmtool.train.state import abstract_state, init_state
from llmtool.train.step import make_step, to_devices
from llmtool.train.strategy import place, rows_per_step
from llmtool.train.throughput import Speedometer


def benchmark(run: RunConfig, *, skip: int = 2, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """Time ``run.steps`` steps after ``skip`` that are not counted; schema "llmtool.benchmark/1". Nothing is saved.

    The clock runs from the end of the last skipped step to the end of the last step, making batches included.
    """
    run = check_run(replace(run, data=replace(run.data, sources=("synthetic",), tokenizer=None, epochs=None)))
    if skip < 1:
        raise BadRun("the first step compiles; at least one must be skipped")
    placement = place(run)
    rows, index, count = share(run, placement)
    loader = make_loader(run.data, tokenizer=None, seq_len=run.seq_len, rows_per_process=rows, process_index=index,
                         process_count=count, seed=run.seed, vocab_size=run.model.vocab_size)
    state, step = init_state(run, placement), make_step(run, placement, abstract_state(run))
    seconds: list[float] = []
    began = time.perf_counter()
    for number in range(skip + run.steps):
        state, metrics = step(state, to_devices(next(loader), placement, run.grad_accum))
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
        on_step(number + 1)
    loader.close()
    timed, loss = seconds[skip:], float(metrics["loss"])
    mean = sum(timed) / len(timed)
    sequences = rows_per_step(run, placement.mesh)
    speed = Speedometer.of(run)
    read = speed.read(run.steps, mean, sequences * run.seq_len / mean)
    return {
        "schema": "llmtool.benchmark/1",
        "name": run.name,
        "parameters": parameter_count(run.model),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "mesh": {axis: size for axis, size in placement.mesh.shape.items()},
        "strategy": run.strategy,
        "precision": run.precision,
        "seq_len": run.seq_len,
        "sequences_per_step": sequences,
        "steps": run.steps,
        "skipped": skip,
        "first_step_seconds": seconds[0],
        "step_seconds": mean,
        "fastest_step_seconds": min(timed),
        "sequences_per_second": read["sequences_per_second"],
        "tokens_per_second": read["tokens_per_second"],
        "flops_per_token": speed.flops,
        "colossalai_flops_per_token": colossalai_flops(run),
        "megatron_flops_per_token": megatron_flops(run),
        "tflops_per_device": read["tflops_per_device"],
        "mfu": read["mfu"],
        "max_memory_bytes": read["memory_bytes"],
        "loss": loss if math.isfinite(loss) else None,
    }
