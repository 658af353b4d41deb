"""config.json of Hugging Face and our :class:`ModelConfig`, one into the other, from one table of rows.

Reading follows the rows of the model's type; writing follows the same rows back and then reads its own result, so that
a fact for which config.json has no place is refused by name, whatever the fact. Reads the spelling of transformers 4
(``torch_dtype``, ``rope_theta`` and ``rope_scaling``) and 5 (``dtype``, ``rope_parameters``); writes the former, which
both understand. Source of names and defaults: transformers 4.46 and 5.24, the configuration class of each type.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmtool.convert.sidecars import hf_rope
from llmtool.convert.sidecars.hf_fields import IGNORED, check_supported
from llmtool.convert.sidecars.json_file import MOST_PARTS, Fields, model_of, unknown, width_of_a_head
from llmtool.errors import BadCheckpoint, CannotHold, Contradiction
from llmtool.model_config import ModelConfig

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
NEEDED = object()  # a row without a default: a config.json that lacks it is refused

Facts = dict[str, Any]


def _count(fields: Fields, key: str) -> Any:
    return fields.count(key)


def _parts(fields: Fields, key: str) -> Any:
    return fields.count(key, MOST_PARTS)


def _number(fields: Fields, key: str) -> Any:
    return fields.number(key)


def _flag(fields: Fields, key: str) -> Any:
    return fields.flag(key)


def _ids(fields: Fields, key: str) -> Any:
    return fields.token_ids(key)


def _one_id(fields: Fields, key: str) -> Any:
    ids = fields.token_ids(key)
    if isinstance(ids, tuple) and len(ids) > 1:
        raise BadCheckpoint(f"{fields.where}: {key} lists {len(ids)} ids; expected one")
    return ids[0] if isinstance(ids, tuple) else ids


def _activation(fields: Fields, key: str) -> Any:
    name = fields.text(key)
    if name is not None and name not in ACTIVATIONS:
        raise CannotHold(f"{fields.where}: {key} is {name!r}; llmtool's models know {', '.join(ACTIVATIONS)}")
    return None if name is None else ACTIVATIONS[name]


@dataclass(frozen=True)
class Row:
    """One fact: the fields of ModelConfig that it sets, and the keys of config.json that say it (the first is written).

    ``absent`` is what transformers takes where no key is there: a value, or a function of the facts so far.
    ``said`` tells whether taking it deserves a note. A row without keys is a fact that follows from others.
    """

    fields: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[Fields, str], Any] = _count
    absent: Any = NEEDED
    said: bool = False


@dataclass(frozen=True)
class ModelType:
    """A ``model_type``: the class it names, the facts it fixes, and its rows."""

    architecture: str
    fixed: Mapping[str, Any]
    rows: tuple[Row, ...]

    def keys(self) -> set[str]:
        """Every key of config.json that a row reads."""
        return {key for row in self.rows for key in row.keys}


def _width_of_a_head(facts: Facts, where: str) -> int:
    return width_of_a_head(facts["d_model"], facts["n_heads"], where)


def _as_heads(facts: Facts, where: str) -> int:
    return facts["n_heads"]


def _tokens(bos: int, eos: int) -> tuple[Row, ...]:
    return (Row(("bos_id",), ("bos_token_id",), _one_id, bos, said=True),
            Row(("eos_id",), ("eos_token_id",), _ids, eos, said=True),
            Row(("pad_id",), ("pad_token_id",), _one_id, None))


_HEADS = (Row(("vocab_size",), ("vocab_size",)), Row(("d_model",), ("hidden_size",)),
          Row(("n_layers",), ("num_hidden_layers",), _parts), Row(("n_heads",), ("num_attention_heads",)))
_TIED = Row(("tied",), ("tie_word_embeddings",), _flag, False)
_CONTEXT = Row(("max_positions",), ("max_position_embeddings",), absent=None)
_HEAD_DIM = Row(("head_dim",), ("head_dim",), absent=_width_of_a_head)
_FFN, _ACT = Row(("d_ff",), ("intermediate_size",)), Row(("activation",), ("hidden_act",), _activation, "silu", True)
_MLP_BIAS = Row(("mlp_bias",), ("mlp_bias",), _flag, False)


def _attention_bias(absent: bool) -> Row:
    return Row(("qkv_bias", "attn_out_bias"), ("attention_bias",), _flag, absent)


def _rms_eps(absent: float) -> Row:
    return Row(("norm_eps",), ("rms_norm_eps",), _number, absent, said=True)


_LLAMA = {"family": "llama", "norm": "rmsnorm", "gated": True, "position": "rope"}
MODEL_TYPES: Mapping[str, ModelType] = {
    "llama": ModelType("LlamaForCausalLM", _LLAMA, (
        *_HEADS, Row(("n_kv_heads",), ("num_key_value_heads",), absent=_as_heads), _HEAD_DIM,
        _FFN, _ACT, _rms_eps(1e-6), _CONTEXT, _TIED, _attention_bias(False), _MLP_BIAS, *_tokens(1, 2))),
    # without its window, Mistral is Llama under another name
    "mistral": ModelType("MistralForCausalLM", _LLAMA, (
        *_HEADS, Row(("n_kv_heads",), ("num_key_value_heads",)), _HEAD_DIM,
        _FFN, _ACT, _rms_eps(1e-6), _CONTEXT, _TIED, *_tokens(1, 2))),
    "mixtral": ModelType(
        "MixtralForCausalLM",
        {**_LLAMA, "family": "mixtral", "experts_gated": True, "moe_layers_in_block": (0,)}, (
            *_HEADS, Row(("n_kv_heads",), ("num_key_value_heads",)), _HEAD_DIM,
            Row(("d_ff", "expert_d_ff"), ("intermediate_size",)),
            Row(("activation", "expert_activation"), ("hidden_act",), _activation, "silu", True),
            Row(("n_experts",), ("num_local_experts",), _parts), Row(("experts_per_token",), ("num_experts_per_tok",)),
            _rms_eps(1e-5), _CONTEXT, _TIED, *_tokens(1, 2))),
    "gpt2": ModelType(
        "GPT2LMHeadModel",
        {"family": "gpt", "norm": "layernorm", "gated": False, "position": "learned",
         "qkv_bias": True, "attn_out_bias": True, "mlp_bias": True}, (
            Row(("vocab_size",), ("vocab_size",)), Row(("d_model",), ("n_embd", "hidden_size")),
            Row(("n_layers",), ("n_layer", "num_hidden_layers"), _parts),
            Row(("n_heads",), ("n_head", "num_attention_heads")),
            Row(("n_kv_heads",), (), absent=_as_heads),
            Row(("head_dim",), (), absent=_width_of_a_head),
            Row(("d_ff",), ("n_inner",), absent=lambda facts, where: 4 * facts["d_model"]),
            Row(("activation",), ("activation_function",), _activation, "gelu_tanh", said=True),
            Row(("norm_eps",), ("layer_norm_epsilon",), _number, 1e-5, said=True),
            Row(("max_positions",), ("n_positions", "n_ctx", "max_position_embeddings")),
            Row(("scale_query",), ("scale_attn_weights",), _flag, True),
            Row(("tied",), ("tie_word_embeddings",), _flag, True), *_tokens(50256, 50256))),
    "gpt_neox": ModelType(
        "GPTNeoXForCausalLM",
        {"family": "gpt_neox", "norm": "layernorm", "gated": False, "position": "rope", "mlp_bias": True}, (
            *_HEADS, Row(("n_kv_heads",), (), absent=_as_heads),
            Row(("head_dim",), (), absent=_width_of_a_head), _FFN,
            Row(("activation",), ("hidden_act",), _activation, "gelu", said=True),
            Row(("norm_eps",), ("layer_norm_eps",), _number, 1e-5, said=True), _CONTEXT, _attention_bias(True),
            Row(("parallel_residual",), ("use_parallel_residual",), _flag, True), _TIED, *_tokens(0, 2))),
}
WRITTEN_TYPE = {"llama": "llama", "gpt": "gpt2", "gpt_neox": "gpt_neox", "mixtral": "mixtral"}  # by family
_WRITTEN_ACTIVATION = {"silu": "silu", "gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
_OUR_KEYS = {"model_type", "architectures", "torch_dtype", "dtype"}


def config_from_hf(data: Mapping[str, Any], where: str, notes: list[str] | None = None) -> ModelConfig:
    """The model that a config.json describes.

    Raises CannotHold for what our models do not do (another family, quantised weights, a reward head, a window, rope
    scaling other than llama3), MissingFact, Contradiction or BadCheckpoint for a config that is incomplete or wrong.
    What was assumed and what was not understood is appended to ``notes``, one sentence each.
    """
    fields = Fields(data, where)
    name = check_supported(fields, MODEL_TYPES)
    model_type = MODEL_TYPES[name]
    assumed: list[str] = []
    facts: Facts = dict(model_type.fixed)
    fields.need(*(row.keys[0] for row in model_type.rows
                  if row.absent is NEEDED and all(data.get(key) is None for key in row.keys)))
    for row in model_type.rows:
        facts |= dict.fromkeys(row.fields, _read_row(fields, row, facts, assumed))
    if facts["position"] == "rope":
        facts |= hf_rope.read(fields, name, facts["head_dim"], assumed)
    config = model_of(facts, where)
    if notes is not None:
        if assumed:
            notes.append(f"{where}: does not say {', '.join(assumed)}: transformers' defaults")
        if strange := unknown_fields(data):
            notes.append(f"{where}: fields that are not understood and stay behind: {', '.join(strange)}")
    return config


def _read_row(fields: Fields, row: Row, facts: Facts, assumed: list[str]) -> Any:
    found = {key: value for key in row.keys if (value := row.read(fields, key)) is not None}
    if len(set(found.values())) > 1:
        both = " but ".join(f"{key} is {value}" for key, value in found.items())
        raise Contradiction(f"{fields.where}: {both}; they say the same thing, so keep one")
    if found:
        return next(iter(found.values()))
    if row.read in (_ids, _one_id) and any(key in fields.data for key in row.keys):
        return None  # an explicit null means that there is no such token
    value = row.absent(facts, fields.where) if callable(row.absent) else row.absent
    if row.said:
        assumed.append(f"{row.keys[0]} ({value})")
    return value


def unknown_fields(data: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that are neither mapped nor declared ignored; of its rope blocks too, as ``block.key``."""
    model_type = MODEL_TYPES.get(str(data.get("model_type")))
    mapped: Iterable[str] = model_type.keys() if model_type else ()
    return unknown(data, mapped, hf_rope.KEYS, IGNORED, _OUR_KEYS) + hf_rope.unknown_in_blocks(data)


def config_to_hf(config: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json of a model whose weights are stored as ``dtype`` ("float32", "float16", "bfloat16").

    ``base`` is the config.json of the source, where it had one: what we do not model is kept from it. Raises
    MissingFact where a fact is not known, CannotHold naming each fact that this model type cannot say.
    """
    if config.family not in WRITTEN_TYPE:
        raise CannotHold(f"Hugging Face has no model of the family {config.family}; choose another target layout")
    base_type = MODEL_TYPES.get(str((base or {}).get("model_type")))
    if base is None or base_type is None or base_type.fixed["family"] != config.family:
        base, name = {}, WRITTEN_TYPE[config.family]
    else:
        name = base["model_type"]
    model_type = MODEL_TYPES[name]
    needed = ["norm_eps", "activation"] + ["rope_theta"] * (config.position == "rope")
    config.require(*needed, why="config.json")

    written: dict[str, Any] = {"architectures": [model_type.architecture], "model_type": name, "torch_dtype": dtype}
    for row in model_type.rows:
        value = getattr(config, row.fields[0])
        if row.read is _activation:
            value = _same_spelling(base.get(row.keys[0]), value)
        if value is not None or row.read in (_ids, _one_id):
            value = list(value) if isinstance(value, tuple) else value
            written |= {key: value for key in row.keys if key == row.keys[0] or key in base}
    if model_type.fixed["position"] == "rope":
        written |= hf_rope.write(config, name)
    replaced = model_type.keys() | hf_rope.KEYS | _OUR_KEYS | {"auto_map"}  # auto_map names Python files; none travel
    kept = {key: written.get(key, value) for key, value in base.items() if key in written or key not in replaced}
    out = kept | written
    _refuse_what_was_lost(config, config_from_hf(out, "the config.json to write"), name)
    return out


def _same_spelling(before: Any, activation: str) -> str:
    """The source's own name of the activation where it means the same; else the usual one."""
    same = isinstance(before, str) and ACTIVATIONS.get(before) == activation
    return before if same else _WRITTEN_ACTIVATION[activation]


def _refuse_what_was_lost(config: ModelConfig, read_back: ModelConfig, name: str) -> None:
    lost = [f"{field.name} {want!r} (it would mean {got!r})" for field in dataclasses.fields(config)
            if (want := getattr(config, field.name)) != (got := getattr(read_back, field.name))]
    if lost:
        raise CannotHold(f"a config.json of the type {name} cannot say {'; '.join(lost)}; choose another target layout")
