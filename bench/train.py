"""How fast training is on a CPU, beside transformers and torch: the same model, batch, precision and AdamW.

    JAX_PLATFORMS=cpu python bench/train.py

One process, one run. Everything is measured in rounds (peak, ours, theirs, peak, …), so that a slow minute of the
machine falls on all alike; medians are printed. Compilation and first steps are left out. Ours is the step of
`llmtool pretrain` (float32 parameters and moments, products in the dtype named); theirs is the model that transformers
builds from the same sizes, its own attention (sdpa), torch.optim.AdamW (fused) and, for bf16, autocast.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from llmtool.model_config import ModelConfig
from llmtool.presets import parameter_count, preset
from llmtool.train.batch import Batch
from llmtool.train.config import OptimizerConfig, RunConfig, ScheduleConfig
from llmtool.train.flops import measured_peak, training_flops
from llmtool.train.state import abstract_state, init_state
from llmtool.train.step import make_step, to_devices
from llmtool.train.strategy import place

DTYPE = {"fp32": "float32", "bf16": "bfloat16"}
LLAMA_25M = replace(preset("llama2-7b"), vocab_size=16000, d_model=384, n_layers=8, n_heads=6, n_kv_heads=6,
                    head_dim=64, d_ff=1024, max_positions=512)
GPT_LAYERS = replace(preset("gpt-126m"), n_layers=2, vocab_size=8192)  # the preset's layer, two of them
DEPTHS = (2, 4, 8, 16)  # of the LLaMA: is the time of a step linear in layers?
Step = Callable[[], float]


def main() -> None:
    """Measure and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=DTYPE, nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-depths", action="store_true")
    args = parser.parse_args()
    tokens = args.rows * args.seq_len
    print(f"{args.rows} rows of {args.seq_len} tokens a step, {args.rounds} rounds, medians\n")
    print("| model | precision | ours, tokens/s | theirs, tokens/s | ratio | ours, GFLOP/s | matmul peak | share |")
    print("|---|---|---|---|---|---|---|---|")
    for name, config in (("LLaMA", LLAMA_25M), ("gpt-126m's layers", GPT_LAYERS)):
        for precision in args.precision:
            run = training_run(config, precision, args.rows, args.seq_len)
            ours, theirs = our_step(run), None if args.no_peer else their_step(run)
            times: dict[str, list[float]] = {"peak": [], "ours": [], "theirs": []}
            for _ in range(args.rounds):
                times["peak"].append(measured_peak(DTYPE[precision]))
                times["ours"].append(clocked(ours))
                if theirs is not None:
                    times["theirs"].append(clocked(theirs))
            peak, mine = (statistics.median(times[key]) for key in ("peak", "ours"))
            other = statistics.median(times["theirs"]) if theirs else None
            speed = training_flops(run).model * tokens / mine
            print(f"| {name}, {parameter_count(config) / 1e6:.1f} M | {precision} | {tokens / mine:.0f} | "
                  + ("– | – |" if other is None else f"{tokens / other:.0f} | {other / mine:.2f} × |")
                  + f" {speed / 1e9:.0f} | {peak / 1e9:.0f} | {speed / peak:.2f} |", flush=True)
    if not args.no_depths:
        depths(args.rows, args.seq_len, args.rounds)


def depths(rows: int, seq_len: int, rounds: int) -> None:
    """Seconds of a step by number of layers, against the straight line through the shallowest and the deepest."""
    steps = {n: our_step(training_run(replace(LLAMA_25M, n_layers=n), "fp32", rows, seq_len)) for n in DEPTHS}
    times: dict[int, list[float]] = {n: [] for n in steps}
    for _ in range(rounds):
        for n, step in steps.items():
            times[n].append(clocked(step))
    median = {n: statistics.median(each) for n, each in times.items()}
    first, last = min(median), max(median)
    slope = (median[last] - median[first]) / (last - first)
    print("\n| layers | seconds a step | the line says | off by |\n|---|---|---|---|")
    for n, seconds in median.items():
        line = median[first] + slope * (n - first)
        print(f"| {n} | {seconds:.3f} | {line:.3f} | {seconds / line - 1:+.1%} |")


def training_run(config: ModelConfig, precision: Any, rows: int, seq_len: int) -> RunConfig:
    """AdamW with clipping at 1, a constant learning rate, nothing recomputed, plain causal rows."""
    run = RunConfig("bench", config, OptimizerConfig(), ScheduleConfig("constant"), seq_len=seq_len,
                    batch_per_device=float(rows), precision=precision, strategy="ddp")
    return replace(run, data=replace(run.data, pipeline="pax"))  # one document a row: no mask but the causal one


def our_step(run: RunConfig) -> Step:
    """One step of ours, compiled and run twice before; the loss."""
    placement = place(run, jax.devices()[:1])
    step, state = make_step(run, placement, abstract_state(run)), init_state(run, placement)
    batch = to_devices(Batch(*_rows(run), *_plain(run)), placement)

    def go() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    go(), go()
    return go


def _rows(run: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    shape = (int(run.batch_per_device), run.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, run.model.vocab_size, shape, dtype=np.int32)
    return ids[:, :-1], ids[:, 1:]


def _plain(run: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (int(run.batch_per_device), run.seq_len)
    return (np.ones(shape, np.float32), np.ones(shape, np.int32),
            np.broadcast_to(np.arange(run.seq_len, dtype=np.int32), shape))


def their_step(run: RunConfig) -> Step:
    """One step of transformers' model under torch, run twice before; the loss."""
    import torch

    model = _their_model(run.model, run.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids, targets = (torch.from_numpy(x.astype(np.int64)) for x in _rows(run))

    def go() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=run.precision == "bf16"):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    go(), go()
    return go


def _their_model(config: ModelConfig, seq_len: int) -> Any:
    import transformers

    if config.family == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers, num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads, head_dim=config.head_dim, max_position_embeddings=seq_len,
            rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied, attn_implementation="sdpa"))
    else:
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=config.vocab_size, n_embd=config.d_model, n_layer=config.n_layers, n_head=config.n_heads,
            n_inner=config.d_ff, n_positions=config.max_positions, activation_function="gelu_new", resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa"))
    theirs = sum(p.numel() for p in made.parameters())
    assert theirs == parameter_count(config), (theirs, parameter_count(config))
    return made.train()


def clocked(run: Step) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
