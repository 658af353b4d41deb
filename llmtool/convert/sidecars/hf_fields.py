"""Fields of config.json that no fact of ours depends on, each with the reason, and those that make us refuse."""

from collections.abc import Mapping
from typing import Any

from llmtool.convert.sidecars.json_file import Fields
from llmtool.errors import BadCheckpoint, CannotHold

_TRAINING = "for training only"
_RUNTIME = "how a program runs the model, not what it computes"
_OLD_HEADS = "for GPT-2's classification heads"
IGNORED: Mapping[str, str] = {
    "_name_or_path": "where the file came from",
    "transformers_version": "who wrote the file",
    "auto_map": "names Python files; none is run",
    "initializer_range": _TRAINING, "attention_dropout": _TRAINING, "hidden_dropout": _TRAINING,
    "attn_pdrop": _TRAINING, "embd_pdrop": _TRAINING, "resid_pdrop": _TRAINING, "classifier_dropout": _TRAINING,
    "router_aux_loss_coef": _TRAINING, "router_jitter_noise": _TRAINING, "gradient_checkpointing": _TRAINING,
    "use_cache": _RUNTIME, "output_router_logits": _RUNTIME, "output_attentions": _RUNTIME,
    "output_hidden_states": _RUNTIME, "return_dict": _RUNTIME, "use_return_dict": _RUNTIME,
    "chunk_size_feed_forward": _RUNTIME, "use_flash_attn": _RUNTIME, "_attn_implementation": _RUNTIME,
    "_attn_implementation_autoset": _RUNTIME, "_flash_attn_2_enabled": _RUNTIME, "torchscript": _RUNTIME,
    "pretraining_tp": "cuts products into pieces that are summed again",
    "reorder_and_upcast_attn": "the order and precision of one product, not its value",
    "max_sequence_length": "an old name of max_position_embeddings, read by nobody",
    "is_decoder": "a causal model either way",
    "summary_type": _OLD_HEADS, "summary_use_proj": _OLD_HEADS, "summary_activation": _OLD_HEADS,
    "summary_proj_to_labels": _OLD_HEADS, "summary_first_dropout": _OLD_HEADS,
    "id2label": "for classification heads", "label2id": "for classification heads", "num_labels": "the same",
    "problem_type": "for classification heads", "task_specific_params": "suggestions for generation",
    "unsloth_version": "who wrote the file", "unsloth_fixed": "who wrote the file",
    # read only to refuse what they could ask for (below)
    "quantization_config": "must be absent", "sliding_window": "must be null", "use_sliding_window": "must be false",
    "layer_types": "must be full_attention throughout", "add_cross_attention": "must be false",
    "is_encoder_decoder": "must be false", "scale_attn_by_inverse_layer_idx": "must be false",
}
_HEADLESS = ("RewardModel", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_BARE = ("LlamaModel", "MistralModel", "MixtralModel", "GPT2Model", "GPTNeoXModel")
_MUST_BE_OFF = {
    "add_cross_attention": "cross attention",
    "is_encoder_decoder": "an encoder",
    "scale_attn_by_inverse_layer_idx": "attention scaled by the layer's number",
}


def check_supported(fields: Fields, model_types: Mapping[str, Any]) -> str:
    """The model type, if this is a model that we hold; else CannotHold with the reason by name."""
    where = fields.where
    architectures = fields.data.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise BadCheckpoint(f"{where}: architectures is not a list of names")
    for name in architectures:
        if name.endswith(_HEADLESS):
            kind = "a reward model" if name.endswith("RewardModel") else "a classifier"
            raise CannotHold(f"{where}: {name} is {kind}: it has no language-model head, so it is no model for llmtool")
    fields.need("model_type")
    model_type = fields.text("model_type") or ""
    if model_type not in model_types:
        raise CannotHold(f"{where}: model type {model_type!r} is not one that llmtool holds ({', '.join(model_types)})")
    expected = (model_types[model_type].architecture, *_BARE)
    if strange := [name for name in architectures if name not in expected]:
        raise CannotHold(f"{where}: architecture {strange[0]!r} of type {model_type}; expected {expected[0]}")
    if (quantised := fields.object("quantization_config")) is not None:
        raise CannotHold(f"{where}: the weights are quantised ({_method(quantised)}); convert the unquantised original")
    for key, meaning in _MUST_BE_OFF.items():
        if fields.flag(key):
            raise CannotHold(f"{where}: {key} asks for {meaning}, which llmtool's models do not have")
    window = fields.count("sliding_window")
    if window is not None and fields.flag("use_sliding_window") is not False:
        raise CannotHold(f"{where}: attention sees a sliding window of {window} tokens; llmtool's models see all")
    kinds = fields.data.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CannotHold(f"{where}: layer_types asks for other than full_attention, which llmtool's models do not have")
    return model_type


def _method(quantised: Fields) -> str:
    bits = next((f", {n} bits" for n in (4, 8) if quantised.data.get(f"load_in_{n}bit") is True), "")
    return str(quantised.data.get("quant_method") or "method not named")[:40] + bits
