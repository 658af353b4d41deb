"""A twin of each family that learns something in about a minute on two CPU cores."""

from dataclasses import replace
from typing import Any

from llmtool.model_config import ModelConfig
from llmtool.presets import preset
from llmtool.train.recipe import Layer, Recipe

_SIZES = "llmtool's choice: about a million parameters, for a tokenizer of at most 512 pieces"
_SMALL: dict[str, Any] = {"vocab_size": 512, "d_model": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4,
                          "head_dim": 32, "d_ff": 512, "max_positions": 128, "bos_id": 1, "eos_id": 2, "pad_id": 0}
_COMMON = Layer("llmtool's choice: about a minute on two cores", {
    "optimizer.learning_rate": 3e-3, "schedule.kind": "cosine", "schedule.warmup_steps": 20, "steps": 300,
    "seq_len": 128, "batch_per_device": 16.0, "precision": "fp32", "log_every": 10, "checkpoint.every_steps": 100,
    "evaluation.every_steps": 100, "evaluation.validation_batches": 8, "data.shuffle_buffer": 1000, "data.sources": ()})


def _tiny(name: str, family: str, config: ModelConfig, *layers: Layer) -> Recipe:
    return Recipe(name, f"{family} of a million parameters, about a minute on two CPU cores", config, _SIZES,
                  (_COMMON, *layers), notes=("model.vocab_size: give your tokenizer's size where it is larger",))


def gpt_tiny() -> Recipe:
    """GPT: LayerNorm, learned positions, biases, GELU, tied."""
    pax = Layer("as in gpt-126m", {"optimizer.kind": "pax", "data.pipeline": "pax", "init_std": 0.023})
    return _tiny("gpt-tiny", "GPT", replace(preset("gpt-126m"), **_SMALL), pax)


def llama_tiny() -> Recipe:
    """LLaMA 2 with grouped queries."""
    return _tiny("llama-tiny", "LLaMA", replace(preset("llama2-7b"), **_SMALL | {"n_kv_heads": 2, "d_ff": 352}))


def glam_tiny() -> Recipe:
    """GLaM: every second layer has experts, with a capacity."""
    experts = Layer("as in glam-126m-64e, but for the number of groups", {
        "optimizer.kind": "pax", "data.pipeline": "pax", "capacity_factor": 2.0, "expert_groups": 8,
        "aux_loss_weight": 0.01 / 2, "loss_over": "all"})
    sizes = _SMALL | {"d_ff": 256, "expert_d_ff": 256, "n_experts": 8}
    return _tiny("glam-tiny", "GLaM", replace(preset("glam-126m-64e"), **sizes), experts)


def mixtral_tiny() -> Recipe:
    """Mixtral: every layer has gated experts, and no token is dropped."""
    config = replace(
        preset("mistral-7b-v0.3"), **_SMALL | {"n_kv_heads": 2, "d_ff": 176}, family="mixtral", n_experts=4,
        experts_per_token=2, expert_d_ff=176, experts_gated=True, expert_activation="silu", moe_layers_in_block=(0,))
    return _tiny("mixtral-tiny", "Mixtral", config,
                 Layer("router_aux_loss_coef of transformers' MixtralConfig", {"aux_loss_weight": 0.001}))


def neox_tiny() -> Recipe:
    """GPT-NeoX: attention and feed-forward side by side, rope on a quarter of the features."""
    config = replace(
        preset("gpt-126m"), **_SMALL, family="gpt_neox", position="rope", rope_theta=1e4, rotary_fraction=0.25,
        parallel_residual=True, tied=False, activation="gelu")
    return _tiny("neox-tiny", "GPT-NeoX", config)


RUNS = (gpt_tiny(), llama_tiny(), glam_tiny(), mixtral_tiny(), neox_tiny())
