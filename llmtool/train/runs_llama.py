"""LLaMA 1, 2 and 3 from scratch, as ColossalAI's llama2 example trains them.

Its script has LLaMA 2's 7b, 13b and 70b alone; the numbers of the others are those of the papers: LLaMA (2302.13971),
Llama 2 (2307.09288), Llama 3 (2407.21783). Script: colossalai ``examples/language/llama2`` at 862fbaaa6.
"""

from typing import Any

from llmtool.presets import MODELS
from llmtool.train.recipe import Layer, Recipe

_SCRIPT = "ColossalAI examples/language/llama2/pretrain.py, its default"
_BENCHMARK = "ColossalAI examples/language/llama2/benchmark.py and scripts/"
_BATCH = 1 << 22  # tokens: the 4M of all these papers
_NOTES = (
    "steps: published tokens over batches of 4 Mi tokens; set grad_accum so that yours holds as many",
    "precision: the script's default is fp16 with loss scaling (--precision fp16)",
    "data.pipeline: the script neither packs nor masks padding out of the loss; here rows are packed",
    "remat, attention: off in the script unless -g and -a are given",
    "optimizer.clip_norm: the script's hybrid_parallel plugin never receives it and does not clip",
)
_COMMON = (
    Layer(_SCRIPT, {
        "optimizer.kind": "adamw", "optimizer.b1": 0.9, "optimizer.b2": 0.95, "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0, "schedule.kind": "cosine",
        "schedule.warmup_steps": 2000, "schedule.min_ratio": 0.1, "batch_per_device": 2.0,
        "checkpoint.every_steps": 1000, "grad_accum": 1}),
    Layer(f"{_SCRIPT}: the gemini plugin, all state sharded over all devices", {"strategy": "fsdp", "mesh.ici": None}),
    Layer("transformers' LlamaConfig, which the script builds", {"init_std": 0.02}),
    Layer("llmtool's choice: no loss scaling to go wrong", {"precision": "bf16"}),
    Layer("no data is shipped; say where it lies with --data", {"data.sources": ()}),
)
_REMAT = Layer(f"{_BENCHMARK}: -g, without which the activations do not fit", {"remat": "full"})


def _llama(name: str, peak: float, tokens: float, paper: str, *layers: Layer, notes: tuple[str, ...] = ()) -> Recipe:
    facts = MODELS[name]
    generation, _, size = name.partition("-")
    large = (_REMAT,) if facts.config.d_model > 5120 else ()
    return Recipe(
        name, f"LLaMA {generation[-1]} {size.upper()} from scratch, {tokens / 1e12:g} T tokens", facts.config,
        facts.provenance,
        (*_COMMON,
         Layer(paper, {"optimizer.learning_rate": peak, "seq_len": facts.config.max_positions,
                       "steps": round(tokens / _BATCH)}),
         *large, *layers),
        notes=(*notes, *_NOTES))


def _llama1(size: str, peak: float, tokens: float) -> Recipe:
    note = () if size in ("7b", "13b") else ("the README names this size, the script never had it",)
    return _llama(f"llama1-{size}", peak, tokens, "the LLaMA paper, table 2 and section 2", notes=note)


def _llama2(size: str, peak: float) -> Recipe:
    return _llama(f"llama2-{size}", peak, 2e12, "the Llama 2 paper, table 1 and section 2.2", notes=(
        "optimizer.eps: the paper says 1e-5, the script 1e-8, which is followed",
        "model.norm_eps: the script leaves transformers' 1e-6; Meta's 1e-5 is followed"))


def _llama3(size: str, peak: float) -> Recipe:
    told = Layer("the Llama 3 paper, section 3.4, on the 405B; for this size it does not tell",
                 {"schedule.warmup_steps": 8000, "schedule.min_ratio": 0.01})
    paper = "the Llama 3 paper, table 3 and section 3; context of the first release"
    return _llama(f"llama3-{size}", peak, 15e12, paper, told,
                  notes=("no script of the seeds trains Llama 3: what its paper leaves open is LLaMA 2's",))


def _scripted(recipe: Recipe) -> Layer:
    """What ColossalAI's benchmark scripts say of a size."""
    values: dict[str, Any] = {"steps": 5, "remat": "full"}
    return Layer(_BENCHMARK, values | ({"batch_per_device": 16.0} if recipe.name.endswith("-7b") else {}))


RUNS = (
    *(_llama1(size, 3e-4, 1e12) for size in ("7b", "13b")),
    *(_llama1(size, 1.5e-4, 1.4e12) for size in ("30b", "65b")),
    *(_llama2(size, 3e-4) for size in ("7b", "13b")), _llama2("70b", 1.5e-4),
    _llama3("8b", 3e-4), _llama3("70b", 1.5e-4),
)
BENCHMARKS = {recipe.name: _scripted(recipe) for recipe in RUNS}
