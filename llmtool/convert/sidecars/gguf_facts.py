"""The metadata of a GGUF file as our :class:`ModelConfig`. Source: the key names of the ``gguf`` package."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from llmtool.convert.sidecars.gguf_tokenizer import tokenizer_from_gguf
from llmtool.convert.sidecars.json_file import MOST_PARTS, Fields, model_of, unknown, width_of_a_head
from llmtool.errors import BadCheckpoint, CannotHold, Contradiction, MissingFact
from llmtool.model_config import ModelConfig, RopeScaling

__all__ = ["config_from_gguf", "tokenizer_from_gguf", "unknown_fields"]

_ARCH = "llama"
_MAPPED = frozenset(("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
                     "attention.head_count", "attention.head_count_kv", "attention.key_length",
                     "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
                     "rope.freq_base"))
_REFUSED = {"expert_count": "experts", "attention.sliding_window": "a sliding window"}  # zero means none
_ROPE_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")
_NO_SCALING = ("none", 1, 1.0)
IGNORED = frozenset((*_REFUSED, *_ROPE_SCALING, "rope.scaling.original_context_length", "rope.scaling.finetuned",
                     "expert_used_count", "tensor_data_layout", "use_parallel_residual"))
ROPE_FACTORS = "rope_freqs.weight"  # a tensor, not a field: what Llama 3.1's scaling divides each frequency by


def config_from_gguf(fields: Mapping[str, Any], tensor_names: Collection[str], where: str, *,
                     vocab_size: int | None = None, rope_factors: Sequence[float] | None = None,
                     notes: list[str] | None = None) -> ModelConfig:
    """The model that a GGUF file describes.

    ``fields`` are the metadata as plain values; ``vocab_size`` is the rows of the embedding; ``rope_factors`` are the
    numbers of the tensor ``rope_freqs.weight``, needed where the file has it: they are Llama 3.1's scaling, whose
    parameters are found again from them. Other architectures, experts, windows and other scalings are CannotHold.
    """
    notes = [] if notes is None else notes
    everything = Fields(fields, where)
    everything.need("general.architecture")
    if (arch := everything.text("general.architecture")) != _ARCH:
        raise CannotHold(f"{where}: a GGUF of the architecture {arch!r}; llmtool reads those of {_ARCH!r}")
    own = Fields({key.removeprefix("llama."): _whole(value) for key, value in fields.items()
                  if key.startswith("llama.")}, where)
    for key, meaning in _REFUSED.items():
        if own.data.get(key):
            raise CannotHold(f"{where}: llama.{key} is {own.data[key]}: {meaning}, which llmtool cannot read from GGUF")
    for key in _ROPE_SCALING:
        if own.data.get(key) is not None and own.data[key] not in _NO_SCALING:
            raise CannotHold(f"{where}: llama.{key} is {own.data[key]!r}; llmtool's models know that of Llama 3.1 only")
    own.need("embedding_length", "block_count", "attention.head_count", "feed_forward_length")

    d_model, n_heads = own.count("embedding_length") or 0, own.count("attention.head_count") or 0
    turned = own.count("rope.dimension_count")
    head_dim = own.count("attention.key_length") or width_of_a_head(d_model, n_heads, where)
    if own.count("attention.value_length") not in (None, head_dim):
        raise CannotHold(f"{where}: keys of {head_dim} features but values of {own.count('attention.value_length')}; "
                         "llmtool's models have heads of one width")
    if turned is not None and turned > head_dim:
        raise Contradiction(f"{where}: rope turns {turned} features, but a head has {head_dim}")
    theta = _decimal(own.number("rope.freq_base"))
    if theta is None:
        theta = 1e4
        notes.append(f"{where}: does not say llama.rope.freq_base: 10000, as in llama.cpp")
    config = model_of(dict(
        family="llama", vocab_size=_vocab_size(everything, own, vocab_size), d_model=d_model,
        n_layers=own.count("block_count", MOST_PARTS), n_heads=n_heads,
        n_kv_heads=own.count("attention.head_count_kv") or n_heads, head_dim=head_dim,
        d_ff=own.count("feed_forward_length"), norm="rmsnorm", gated=True, position="rope",
        tied="output.weight" not in tensor_names, norm_eps=_decimal(own.number("attention.layer_norm_rms_epsilon")),
        activation="silu", rope_theta=theta, rope_scaling=_scaling(tensor_names, rope_factors, theta, head_dim, where),
        rotary_fraction=(turned or head_dim) / head_dim, max_positions=own.count("context_length"),
        qkv_bias=_has_bias(tensor_names, ("attn_q", "attn_k", "attn_v"), where),
        attn_out_bias=_has_bias(tensor_names, ("attn_output",), where),
        mlp_bias=_has_bias(tensor_names, ("ffn_gate", "ffn_up", "ffn_down"), where),
        bos_id=everything.token_ids("tokenizer.ggml.bos_token_id"), eos_id=_stops(everything),
        pad_id=everything.token_ids("tokenizer.ggml.padding_token_id")), where)
    if strange := unknown_fields(fields):
        notes.append(f"{where}: fields that are not understood and stay behind: {', '.join(strange)}")
    return config


def unknown_fields(fields: Mapping[str, Any]) -> list[str]:
    """Keys of the model's own part that are neither mapped nor declared ignored."""
    own = [key.removeprefix("llama.") for key in fields if key.startswith("llama.")]
    return [f"llama.{key}" for key in unknown(own, _MAPPED, IGNORED)]


def _whole(value: Any) -> Any:
    """A per-layer list that says the same for every layer, as one value; others stay lists, and no count reads one."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _decimal(value: float | None) -> float | None:
    """The shortest decimal with the same float32: GGUF keeps 1e-05 as 9.999999747378752e-06."""
    return None if value is None else float(str(np.float32(value)))


def _vocab_size(everything: Fields, own: Fields, rows: int | None) -> int:
    said = {"the embedding has": rows, "llama.vocab_size says": own.count("vocab_size")}
    known = {how: size for how, size in said.items() if size is not None}
    if not known and isinstance(tokens := everything.data.get("tokenizer.ggml.tokens"), list):
        known = {"the token list has": len(tokens)}
    if not known:
        raise MissingFact(f"{everything.where}: tells no vocabulary size: no embedding, llama.vocab_size or token list")
    if len(set(known.values())) > 1:
        raise Contradiction(f"{everything.where}: " + ", but ".join(f"{how} {size}" for how, size in known.items()))
    return next(iter(known.values()))


def _stops(everything: Fields) -> int | tuple[int, ...] | None:
    """The end of a text and, in a chat model, of a turn."""
    ids = [everything.token_ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    both = tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
    return both if len(both) > 1 else next(iter(both), None)


def _has_bias(tensor_names: Collection[str], parts: Sequence[str], where: str) -> bool:
    has = [f"blk.0.{part}.bias" in tensor_names for part in parts]
    if any(has) and not all(has):
        raise CannotHold(f"{where}: of {', '.join(parts)} only some have a bias; llmtool's models give all or none one")
    return all(has)


def _scaling(tensor_names: Collection[str], factors: Sequence[float] | None, theta: float, head_dim: int,
             where: str) -> RopeScaling | None:
    """Llama 3.1's scaling, found again from the divisors that it gave; refused where they are not its own."""
    if ROPE_FACTORS not in tensor_names:
        return None
    if factors is None:
        raise MissingFact(f"{where}: has scaled rope ({ROPE_FACTORS}); its numbers are needed to tell the scaling")
    numbers = np.asarray(factors, np.float64)
    if numbers.shape != (head_dim // 2,) or not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise BadCheckpoint(f"{where}: {ROPE_FACTORS} is no list of {head_dim // 2} positive numbers")
    if (numbers == 1).all():
        return None
    largest = round(float(numbers.max()), 4)  # float32 dust
    scaling = RopeScaling(largest, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    expected = [1 / _kept(theta ** (-2 * j / head_dim), scaling) for j in range(head_dim // 2)]
    if not np.allclose(numbers, expected, rtol=1e-4):
        raise CannotHold(f"{where}: {ROPE_FACTORS} is not Llama 3.1's scaling (factor {largest:g}, low 1, high 4, "
                         "original context 8192), which is the one that llmtool's models know")
    return scaling


def _kept(frequency: float, scaling: RopeScaling) -> float:
    """The share of a frequency that Llama 3.1's scaling keeps (transformers: ``_compute_llama3_parameters``)."""
    turns = scaling.original_context * frequency / (2 * math.pi)  # within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = min(1.0, max(0.0, (turns - scaling.low_freq_factor) / span))
    return (1 - smooth) / scaling.factor + smooth
