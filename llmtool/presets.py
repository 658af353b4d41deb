"""Published models by name: their facts and where each number comes from.

The numbers of Llama and Mistral are those of their makers' params.json and config.json; those of ``gpt-126m``,
``gpt-5b``, ``gpt-175b`` and of GLaM are the Pax presets for GPUs (paxml ``contrib/gpu/scripts_gpu/configs.py``).
"""

import difflib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from llmtool import axes, params
from llmtool.errors import UnknownPreset
from llmtool.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class ModelFacts:
    """A preset: the facts of a model, and where they come from."""

    config: ModelConfig
    provenance: str


def _llama(vocab_size: int, d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, context: int, *,
           eps: float = 1e-5, theta: float = 1e4, scale: float | None = None, tied: bool = False,
           bos: int | None = 1, eos: int = 2, pad: int | None = None) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, n_heads=n_heads,
        n_kv_heads=n_kv_heads, head_dim=d_model // n_heads, d_ff=d_ff, norm="rmsnorm", gated=True, position="rope",
        tied=tied, norm_eps=eps, activation="silu", rope_theta=theta,
        rope_scaling=None if scale is None else RopeScaling(scale, 1.0, 4.0, 8192),
        max_positions=context, bos_id=bos, eos_id=eos, pad_id=pad)


def _llama3(d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, *, context: int,
            scale: float | None = None, tied: bool = False) -> ModelConfig:
    return _llama(128256, d_model, n_layers, n_heads, n_kv_heads, d_ff, context, theta=5e5, scale=scale, tied=tied,
                  bos=128000, eos=128001)


def _gpt(vocab_size: int, d_model: int, n_layers: int, n_heads: int, context: int, *, bos: int, eos: int,
         pad: int | None) -> ModelConfig:
    return ModelConfig(
        family="gpt", vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads,
        head_dim=d_model // n_heads, d_ff=4 * d_model, norm="layernorm", gated=False, position="learned", tied=True,
        norm_eps=1e-5, activation="gelu_tanh", max_positions=context, qkv_bias=True, attn_out_bias=True, mlp_bias=True,
        bos_id=bos, eos_id=eos, pad_id=pad)


def _pax_gpt(vocab_size: int, d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    return _gpt(vocab_size, d_model, n_layers, n_heads, 2048, bos=0, eos=1, pad=0)  # ids of the C4 SentencePiece model


def _gpt2(d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    return _gpt(50257, d_model, n_layers, n_heads, 1024, bos=50256, eos=50256, pad=None)


def _glam(d_model: int, n_layers: int, n_heads: int, context: int) -> ModelConfig:
    """Every second layer, the first included, has 64 experts without a gate; the others a gated feed-forward."""
    return ModelConfig(
        family="glam", vocab_size=50304, d_model=d_model, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads,
        head_dim=d_model // n_heads, d_ff=4 * d_model, norm="rmsnorm", gated=True, position="t5", tied=True,
        norm_eps=1e-6, activation="gelu_tanh", max_positions=context, n_experts=64, experts_per_token=2,
        expert_d_ff=4 * d_model, expert_activation="relu", block_period=2, moe_layers_in_block=(0,),
        relative_buckets=32, relative_max_distance=128, extra_softmax_logit=True, scale_query=False, scale_logits=True,
        bos_id=0, eos_id=1, pad_id=0)


_LLAMA1 = "Meta's params.json (norm_eps included); width by Meta's rule; context from the LLaMA paper"
_LLAMA1_30B = "the LLaMA paper's sizes; norm_eps as in the 7B and 13B releases, not checked against the file"
_LLAMA2 = "Meta's params.json; width by Meta's rule; context from the Llama 2 paper"
_LLAMA3 = "Meta's params.json; ids from its tokenizer; context from its model card"
_LLAMA31 = "Meta's params.json; rope factor 8 as in Meta's code; context from its model card"
_LLAMA32 = "config.json of the Hugging Face release: rope factor 32, tied (Meta's code says 8 and ships a copy)"
_PAX = "paxml contrib/gpu/scripts_gpu/configs.py, class {}; token ids of its C4 SentencePiece model"
_PAX_GLAM = _PAX + "; layers as praxis' glam.py builds them"
_HUB = "config.json of the Hugging Face release"

MODELS: Mapping[str, ModelFacts] = {
    "llama1-7b": ModelFacts(_llama(32000, 4096, 32, 32, 32, 11008, 2048, eps=1e-6), _LLAMA1),
    "llama1-13b": ModelFacts(_llama(32000, 5120, 40, 40, 40, 13824, 2048, eps=1e-6), _LLAMA1),
    "llama1-30b": ModelFacts(_llama(32000, 6656, 60, 52, 52, 17920, 2048, eps=1e-6), _LLAMA1_30B),
    "llama1-65b": ModelFacts(_llama(32000, 8192, 80, 64, 64, 22016, 2048), _LLAMA1),
    "llama2-7b": ModelFacts(_llama(32000, 4096, 32, 32, 32, 11008, 4096), _LLAMA2),
    "llama2-13b": ModelFacts(_llama(32000, 5120, 40, 40, 40, 13824, 4096), _LLAMA2),
    "llama2-70b": ModelFacts(_llama(32000, 8192, 80, 64, 8, 28672, 4096), _LLAMA2),
    "codellama-34b": ModelFacts(_llama(32000, 8192, 48, 64, 8, 22016, 16384, theta=1e6),
                                "the Code Llama paper; sizes as published, not checked against the file"),
    "llama3-8b": ModelFacts(_llama3(4096, 32, 32, 8, 14336, context=8192), _LLAMA3),
    "llama3-70b": ModelFacts(_llama3(8192, 80, 64, 8, 28672, context=8192), _LLAMA3),
    "llama3.1-8b": ModelFacts(_llama3(4096, 32, 32, 8, 14336, context=131072, scale=8.0), _LLAMA31),
    "llama3.1-70b": ModelFacts(_llama3(8192, 80, 64, 8, 28672, context=131072, scale=8.0), _LLAMA31),
    "llama3.1-405b": ModelFacts(_llama3(16384, 126, 128, 8, 53248, context=131072, scale=8.0),
                                _LLAMA31 + "; 8 kv heads (the 16-shard release stores each twice)"),
    "llama3.2-1b": ModelFacts(_llama3(2048, 16, 32, 8, 8192, context=131072, scale=32.0, tied=True), _LLAMA32),
    "llama3.2-3b": ModelFacts(_llama3(3072, 28, 24, 8, 8192, context=131072, scale=32.0, tied=True), _LLAMA32),
    "mistral-7b-v0.3": ModelFacts(_llama(32768, 4096, 32, 32, 8, 14336, 32768, theta=1e6), _HUB + " (no window)"),
    "tinyllama-1.1b": ModelFacts(_llama(32000, 2048, 22, 32, 4, 5632, 2048), _HUB),
    "smollm2-135m": ModelFacts(_llama(49152, 576, 30, 9, 3, 1536, 8192, theta=1e5, tied=True, pad=2),
                               "metadata of the instruct model's GGUF release"),
    "gpt2": ModelFacts(_gpt2(768, 12, 12), _HUB),
    "gpt2-medium": ModelFacts(_gpt2(1024, 24, 16), _HUB),
    "gpt2-large": ModelFacts(_gpt2(1280, 36, 20), _HUB),
    "gpt2-xl": ModelFacts(_gpt2(1600, 48, 25), _HUB),
    "gpt-126m": ModelFacts(_pax_gpt(50304, 768, 12, 12), _PAX.format("GPT126MBase")),
    "gpt-5b": ModelFacts(_pax_gpt(50304, 4096, 24, 32), _PAX.format("GPT5BBase")),
    "gpt-175b": ModelFacts(_pax_gpt(50257, 12288, 96, 96), _PAX.format("GPT175BBase")),
    "glam-126m-64e": ModelFacts(_glam(768, 12, 12, 2048), _PAX_GLAM.format("GLaM126M64EBase")),
    "glam-64b-64e": ModelFacts(_glam(8192, 64, 64, 2048),
                               _PAX_GLAM.format("GLaM64B64EBase") + "; context by NVIDIA's page, the class says 1024"),
}


def preset(name: str) -> ModelConfig:
    """The facts of a published model; raises UnknownPreset with the nearest names."""
    if name not in MODELS:
        raise UnknownPreset(f"no preset is called {name!r}; {near(name)}")
    return MODELS[name].config


def near(name: str) -> str:
    """A hint for a misspelt preset: the nearest names, else all."""
    close = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(MODELS)}"


def of_the_sizes_of(config: ModelConfig) -> str | None:
    """The preset with the same sizes, norm epsilon and rope base, scaled or not: the release that a file comes from."""
    def signature(c: ModelConfig) -> tuple[object, ...]:
        return (c.family, c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff, c.norm_eps,
                c.rope_theta, c.rope_scaling is None)
    return next((name for name, facts in MODELS.items() if signature(facts.config) == signature(config)), None)


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied output matrix counts once."""
    sizes = params.sizes(config)
    counts = Counter(weight.template for weight in params.weights(config))
    return sum(count * math.prod(sizes[letter] for letter in axes.flat(axes.parse(params.TABLE[template])))
               for template, count in counts.items())
