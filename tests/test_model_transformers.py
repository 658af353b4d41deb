"""Our decoder against Hugging Face's on random tiny models of every family, float32, to position 200.

Weights are taken from the transformers model by the short table below, not by conversion, so that this file judges the
arithmetic alone. Sizes are pairwise distinct, so that no swap of axes can hide.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from llmtool import params
from llmtool.model.decoder import Decoder
from llmtool.model.load import load_params
from llmtool.model.part import Compute
from llmtool.model_config import ModelConfig, RopeScaling

TOLERANCE = 1e-4
BATCH, TOKENS = 2, 200
SIZES = {"vocab_size": 67, "d_model": 24, "n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "head_dim": 8, "d_ff": 40}
HF_SIZES = {"vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 256}
LLAMA = {"family": "llama", **SIZES, "norm": "rmsnorm", "gated": True, "position": "rope", "tied": False,
         "norm_eps": 1e-5, "activation": "silu", "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


def _llama(hf: dict[str, Any] | None = None, **facts: Any) -> tuple[Any, ModelConfig]:
    theirs = transformers.LlamaConfig(**{**HF_SIZES, "rms_norm_eps": 1e-5, **(hf or {})})
    return theirs, ModelConfig(**{**LLAMA, **facts})


def _gpt2() -> tuple[Any, ModelConfig]:
    hf = transformers.GPT2Config(vocab_size=67, n_embd=24, n_layer=3, n_head=6, n_inner=40, n_positions=211)
    sizes = {**SIZES, "n_kv_heads": 6, "head_dim": 4}
    return hf, ModelConfig("gpt", **sizes, norm="layernorm", gated=False, position="learned", tied=True, norm_eps=1e-5,
                           activation="gelu_tanh", max_positions=211, qkv_bias=True, attn_out_bias=True, mlp_bias=True)


def _neox(parallel: bool) -> tuple[Any, ModelConfig]:
    hf = transformers.GPTNeoXConfig(
        vocab_size=67, hidden_size=48, num_hidden_layers=3, num_attention_heads=6, intermediate_size=40,
        max_position_embeddings=256, rotary_pct=0.5, use_parallel_residual=parallel,
    )
    sizes = {**SIZES, "d_model": 48, "n_kv_heads": 6}
    return hf, ModelConfig("gpt_neox", **sizes, norm="layernorm", gated=False, position="rope", tied=False,
                           norm_eps=1e-5, activation="gelu", rope_theta=1e4, rotary_fraction=0.5, qkv_bias=True,
                           attn_out_bias=True, mlp_bias=True, parallel_residual=parallel)


def _mixtral() -> tuple[Any, ModelConfig]:
    hf = transformers.MixtralConfig(**HF_SIZES, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-5)
    return hf, ModelConfig(**{**LLAMA, "family": "mixtral", "rope_theta": 1e6}, n_experts=5, experts_per_token=2,
                           expert_d_ff=40, experts_gated=True, expert_activation="silu", moe_layers_in_block=(0,))


CASES: dict[str, Callable[[], tuple[Any, ModelConfig]]] = {
    "llama_grouped": _llama,
    "llama_one_kv_head": lambda: _llama({"num_key_value_heads": 1}, n_kv_heads=1),
    "llama_tied": lambda: _llama({"tie_word_embeddings": True, "rms_norm_eps": 1e-6}, tied=True, norm_eps=1e-6),
    "llama_biases": lambda: _llama(
        {"attention_bias": True, "mlp_bias": True}, qkv_bias=True, attn_out_bias=True, mlp_bias=True
    ),
    "llama3": lambda: _llama(
        {"rope_parameters": LLAMA3}, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)
    ),
    "gpt2": _gpt2,
    "neox_parallel": lambda: _neox(True),
    "neox_serial": lambda: _neox(False),
    "mixtral": _mixtral,
}

# canonical name -> where transformers keeps it; the qkv of GPT-2 and GPT-NeoX are packed and come from _packed
PLAIN = {
    "embed": ("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in"),
    "positions": ("transformer.wpe",),
    "norm": ("model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm"),
    "unembed": ("lm_head",),
    "attn.norm": ("input_layernorm", "ln_1"),
    "mlp.norm": ("post_attention_layernorm", "ln_2"),
    "attn.q": ("self_attn.q_proj",), "attn.k": ("self_attn.k_proj",), "attn.v": ("self_attn.v_proj",),
    "attn.out": ("self_attn.o_proj", "attn.c_proj", "attention.dense"),
    "mlp.gate": ("mlp.gate_proj",),
    "mlp.up": ("mlp.up_proj", "mlp.c_fc", "mlp.dense_h_to_4h"),
    "mlp.down": ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h"),
}


class FromTransformers:
    """The canonical weights of a transformers model."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig):
        self.state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
        self.config, self.sizes = config, params.sizes(config)

    def weight(self, name: str) -> np.ndarray:
        """One weight by its canonical name."""
        layer, inner = name.split(".", 2)[1:] if name.startswith("layers.") else ("", name)
        if inner.startswith("moe."):
            return self._expert(int(layer), inner.split(".")[1:])
        stem, _, part = inner.rpartition(".") if "." in inner else (inner, "", "")
        x = self._packed(layer, stem[-1], part) if stem in ("attn.q", "attn.k", "attn.v") else None
        x = self._plain(layer, stem, part) if x is None else x
        template = f"layers.{{l}}.{inner}" if layer else name
        return x.reshape([self.sizes[axis] for axis in params.TABLE[template].split()])

    def _plain(self, layer: str, stem: str, part: str) -> np.ndarray:
        prefixes = [p.format(layer) for p in ("model.layers.{}.", "transformer.h.{}.", "gpt_neox.layers.{}.")]
        kind = {"w": ".weight", "scale": ".weight", "b": ".bias", "bias": ".bias", "": ".weight"}[part]
        names = [prefix + theirs + kind for prefix in (prefixes if layer else [""]) for theirs in PLAIN[stem]]
        (x,) = (self.state[name] for name in names if name in self.state)
        conv1d = self.config.family == "gpt" and layer  # stored [in, out]
        return x.T if part == "w" and not conv1d else x

    def _packed(self, layer: str, which: str, part: str) -> np.ndarray | None:
        kind, at, c = {"w": "weight", "b": "bias"}[part], "qkv".index(which), self.config
        if (x := self.state.get(f"transformer.h.{layer}.attn.c_attn.{kind}")) is not None:
            return np.split(x, 3, axis=-1)[at]
        if (x := self.state.get(f"gpt_neox.layers.{layer}.attention.query_key_value.{kind}")) is not None:
            return np.moveaxis(x.reshape(c.n_heads, 3, c.head_dim, -1)[:, at], -1, 0)
        return None

    def _expert(self, layer: int, rest: list[str]) -> np.ndarray:
        at = f"model.layers.{layer}.mlp."
        if rest == ["router"]:
            return self.state[at + "gate.weight"].T
        expert, role = int(rest[0]), rest[1]
        if role == "down":
            return self.state[at + "experts.down_proj"][expert].T
        return np.split(self.state[at + "experts.gate_up_proj"][expert].T, 2, axis=1)[role == "up"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[ModelConfig, FromTransformers, np.ndarray, np.ndarray]:
    """Config, weights, ids and the logits of transformers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hf, config = CASES[request.param]()
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval()
    with torch.no_grad():
        for x in model.parameters():  # biases are drawn as 0 and norms as 1, which would hide mistakes
            x.add_(0.15 * torch.randn_like(x))
        ids = torch.randint(0, 67, (BATCH, TOKENS))
        logits = model(ids).logits.numpy()
    return config, FromTransformers(model, config), ids.numpy(), logits


def test_logits_are_those_of_transformers(case: tuple[ModelConfig, FromTransformers, np.ndarray, np.ndarray]) -> None:
    config, weights, ids, expected = case
    tree = load_params(weights, config)
    logits = jax.jit(Decoder(config).apply)({"params": tree}, ids)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_near(case: tuple[ModelConfig, FromTransformers, np.ndarray, np.ndarray]) -> None:
    config, weights, ids, expected = case
    if config.family == "llama" and config.rope_scaling is None:
        return  # Mixtral has the same attention and norms
    tree = load_params(weights, config, dtype=jnp.bfloat16)
    logits = jax.jit(Decoder(config, Compute(dtype=jnp.bfloat16)).apply)({"params": tree}, ids)
    assert logits.dtype == jnp.float32
    # The median, since a rounded router may send a token to other experts.
    assert np.median(np.abs(logits - expected)) < 0.02 * expected.std()
