"""How fast evaluation is: items a second and the share of the machine's matmul peak, beside lm-evaluation-harness.

    python bench/evaluate.py --ckpt smollm2/ --lambada lambada_test.jsonl --boolq superglue_val.jsonl

One process, one run. Everything is measured in rounds (peak, ours, theirs, peak, …), so that a slow minute of the
machine falls on all alike; medians are printed. Compilation is timed apart. The peer runs if lm_eval is installed: its
scoring core on the same token ids in float32, at the best of a few batch sizes tried on a part of the items.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from llmtool.evaluate.batching import make_rows, plan_batches
from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.loading import Model
from llmtool.evaluate.protocols import build_requests, judge
from llmtool.evaluate.requests import Request, Score
from llmtool.evaluate.scoring import Limits, batch_limits, score_requests
from llmtool.model_config import ModelConfig

SIZE = 2048  # of the square matrices that tell the peak
DTYPES = ("float32", "bfloat16")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", type=Path, required=True)
    parser.add_argument("--lambada", type=Path, required=True)
    parser.add_argument("--boolq", type=Path, required=True)
    parser.add_argument("--items", type=int, nargs=2, default=(200, 100), metavar=("LAMBADA", "BOOLQ"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()

    n_lambada, n_boolq = args.items
    sets = {"lambada": load_lambada(args.lambada).take(n_lambada), "boolq": load_boolq(args.boolq).take(n_boolq)}
    with Model.open(args.ckpt) as model:
        words = model.tokenizer(None)
        asked = {task: build_requests(data, words, max_length=model.max_length(None)) for task, data in sets.items()}
        params = {dtype: model.params(dtype) for dtype in DTYPES}
    peer = None if args.no_peer else load_peer(args.ckpt)

    runs: dict[tuple[str, str], Callable[[], list[Score]]] = {
        (task, dtype): lambda t=task, d=dtype: score_requests(params[d], model.config, asked[t], dtype=d)
        for task in sets for dtype in DTYPES
    }
    first = {key: clocked(run)[0] for key, run in runs.items()}
    if peer is not None:
        for task, requests in asked.items():
            size = min(peer_sizes(), key=lambda b: clocked(lambda: peer(requests[:32], b))[0])  # noqa: B023
            runs[task, f"lm-eval, batch {size}"] = lambda r=requests, b=size: peer(r, b)

    times: dict[Any, list[float]] = {key: [] for key in [*DTYPES, *runs]}
    scores: dict[Any, list[Score]] = {}
    for _ in range(args.rounds):
        for key, run in runs.items():
            for dtype in DTYPES:
                times[dtype].append(matmul_seconds(dtype))
            seconds, scores[key] = clocked(run)
            times[key].append(seconds)
    report(sets, asked, model.config, batch_limits(params["float32"], None), times, first, scores)


def report(sets: Any, asked: Any, config: ModelConfig, limits: Limits, times: Any, first: Any, scores: Any) -> None:
    """The tables."""
    median = {key: statistics.median(each) for key, each in times.items()}
    peak = {dtype: 2 * SIZE**3 / median[dtype] for dtype in DTYPES}
    for dtype in DTYPES:
        print(f"matmul peak {dtype} ({SIZE}³): {peak[dtype] / 1e9:.0f} GFLOP/s")
    print("\n| task | run | seconds | items/s | against lm-eval | share of peak | padding | first run "
          "| predictions as float32 |\n|---|---|---|---|---|---|---|---|---|")
    for task, data in sets.items():
        rows = make_rows(asked[task])
        flop, real = model_flop(config, asked[task]), sum(row.length for row in rows)
        batches = plan_batches(rows, *limits)
        padding = sum(batch.shape.rows * batch.shape.length for batch in batches) / real - 1
        theirs = next((median[key] for key in median if key[0] == task and key[1].startswith("lm-eval")), None)
        reference = predictions(data, asked[task], scores[task, "float32"])
        for key in (key for key in median if key[0] == task):
            ours = key[1] in DTYPES
            same = sum(a == b for a, b in zip(reference, predictions(data, asked[task], scores[key]), strict=True))
            print("| " + " | ".join([
                task, key[1], f"{median[key]:.2f}", f"{len(data.items) / median[key]:.2f}",
                f"{theirs / median[key]:.2f} ×" if theirs and ours else "",
                f"{flop / median[key] / peak[key[1]]:.2f}" if ours else f"{flop / median[key] / peak['float32']:.2f}",
                f"{padding:.1%}" if ours else "", f"{first[key]:.1f} s" if ours else "",
                f"{same} of {len(reference)}",
            ]) + " |")


def predictions(data: Any, requests: list[Request], scores: list[Score]) -> list[Any]:
    """What each item comes to: right or wrong (LAMBADA), yes or no (BoolQ)."""
    return [outcome.correct if outcome.prediction is None else outcome.prediction
            for outcome in judge(data, requests, scores)]


def model_flop(config: ModelConfig, requests: list[Request]) -> float:
    """Floating-point operations that the answers need: no padding, each context once, logits only where scored."""
    heads = config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    layer = config.d_model * (2 * heads + 2 * kv + (3 if config.gated else 2) * config.d_ff)
    total = 0.0
    for row in make_rows(requests):
        n = row.length
        total += config.n_layers * (2 * n * layer + 2 * 2 * heads * n * (n + 1) / 2)
        total += 2 * len(row.scored) * config.d_model * config.vocab_size
    return total


def matmul_seconds(dtype: str) -> float:
    """One product of square matrices, summed in float32: the median of five."""
    x = jnp.ones((SIZE, SIZE), dtype)
    _product(x).block_until_ready()
    return statistics.median(clocked(lambda: _product(x).block_until_ready())[0] for _ in range(5))


@jax.jit
def _product(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, x, preferred_element_type=jnp.float32)


def clocked(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    began = time.perf_counter()
    out = run()
    return time.perf_counter() - began, out


def peer_sizes() -> tuple[int, ...]:
    """Batch sizes that are tried for the peer."""
    return (1, 8, 16)


def load_peer(checkpoint: Path) -> Callable[[list[Request], int], list[Score]] | None:
    """lm-evaluation-harness' scoring of token ids, if it is installed."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        print("lm_eval is not installed: no comparison\n")
        return None
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    peer = HFLM(pretrained=model, tokenizer=transformers.AutoTokenizer.from_pretrained(checkpoint), batch_size=1)

    def run(requests: list[Request], batch_size: int) -> list[Score]:
        asked = [((str(r.group), str(i)), list(r.context), list(r.continuation)) for i, r in enumerate(requests)]
        found = peer._loglikelihood_tokens(asked, disable_tqdm=True, override_bs=batch_size)
        return [Score((value,), (0.0,), greedy) for value, greedy in found]

    return run


if __name__ == "__main__":
    main()
