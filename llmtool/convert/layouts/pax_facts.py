"""What the names and shapes of a Pax or TE folder tell of its model, and which variant of the layout it is."""

import re
from collections.abc import Callable, Mapping

from llmtool.convert.facts import Facts
from llmtool.convert.layouts.pax import ROOT
from llmtool.convert.stores.base import TensorSpec
from llmtool.errors import BadCheckpoint, CannotHold

_LAYER = re.compile(
    rf"{re.escape(ROOT)}\.transformer\.(?:(?P<repeat>repeat\.sub\.)x_layers_|x_layers_)(?P<n>\d{{1,6}})\.(?P<rest>.*)"
)
_TE = "transformerlayer.cld."
Get = Callable[[str], tuple[int, ...] | None]
_UNKNOWN = {
    "self_attention.per_dim_scale.per_dim_scale": "a learned query scale per dimension (per_dim_scale)",
}


# Dimensions of the arrays that sizes are read from, without the axis of repeats (two numbers: GLaM flattens heads).
_RANKS = {
    "embedding_lookup.emb_var": (2,), "position_emb.emb_var": (2,), "softmax.logits_ffn.linear.w": (2,),
    "softmax.embedding.w": (2,), "self_attention.combined_qkv.w": (4,), "self_attention.query.w": (2, 3),
    "self_attention.key.w": (2, 3), "self_attention.relative_bias.wrb": (2,), "ff_layer.ffn_layer1.linear.w": (2,),
    "ff_layer.gate": (2,), "ff_layer.wi_0": (3,), "attention.out.kernel": (2,), "attention.kv.kernel": (3,),
    "attention.key.kernel": (2,), "mlp.wi_kernel": (3,),
}  # fmt: skip


def _check_ranks(tensors: Mapping[str, TensorSpec], where: str) -> None:
    for key, spec in tensors.items():
        match = _LAYER.fullmatch(key)
        stacked = bool(match and match["repeat"])
        name = match["rest"].removeprefix(_TE) if match else key.removeprefix(f"{ROOT}.")
        ranks = [n + stacked for n in _RANKS.get(name, (len(spec.shape) - stacked,))]
        if len(spec.shape) not in ranks or len(spec.shape) < stacked or (name in _RANKS and not spec.size):
            expected = " or ".join(map(str, ranks)) if name in _RANKS else "1 or more"
            raise BadCheckpoint(
                f"{where}: {key} has shape {list(spec.shape)}; expected {expected} dimensions, none empty"
            )


def pax_facts(tensors: Mapping[str, TensorSpec], where: str) -> tuple[str, dict[str, str], Facts]:
    """(layout name, the layout's keys that the files show, facts of the model). Works for ``pax`` and ``te``."""
    try:
        return _facts(tensors, where)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadCheckpoint(f"{where}: arrays have Pax's names, but not the shapes of a model ({error})") from error


def _facts(tensors: Mapping[str, TensorSpec], where: str) -> tuple[str, dict[str, str], Facts]:
    _check_ranks(tensors, where)
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    repeats: set[bool] = set()
    for key, spec in tensors.items():
        if match := _LAYER.fullmatch(key):
            repeats.add(match["repeat"] is not None)
            layers.setdefault(int(match["n"]), {})[match["rest"]] = spec.shape
    if not layers or len(repeats) != 1:
        raise BadCheckpoint(
            f"{where}: no Pax layers ({ROOT}.transformer.x_layers_0.… or …repeat.sub.x_layers_0.…); "
            f"found {', '.join(list(tensors)[:3]) or 'no arrays'}"
        )
    if sorted(layers) != list(range(len(layers))):
        raise BadCheckpoint(f"{where}: layers {sorted(layers)[:12]} are not numbered 0 to {len(layers) - 1}")
    repeat = repeats.pop()
    first = layers[0]
    if repeat:
        first = {name: shape[1:] for name, shape in first.items()}
    for name, what in _UNKNOWN.items():
        if name in first:
            raise CannotHold(f"{where}: {what}: no layout table of this version holds them")
    te = any(name.startswith(_TE) for name in first)
    get = {name.removeprefix(_TE): shape for name, shape in first.items()}.get
    outer = {
        key.removeprefix(f"{ROOT}."): spec.shape for key, spec in tensors.items() if key.startswith(f"{ROOT}.")
    }.get

    facts: Facts = {
        "n_layers": next(iter(layers[0].values()))[0] if repeat and len(layers) == 1 else len(layers),
        "tied": outer("embedding_lookup.emb_var") is None,
        "norm": "layernorm" if outer("final_ln.bias") else "rmsnorm",
        "unembed_bias": outer("softmax.logits_ffn.bias.b") is not None,
        "position": "learned" if outer("position_emb.emb_var") else None,
        "max_positions": (outer("position_emb.emb_var") or [None])[0],
    }
    if repeat and len(layers) > 1:
        facts["n_layers"] = len(layers) * next(iter(layers[0].values()))[0]
        facts["block_period"] = len(layers)
    if softmax := outer("softmax.logits_ffn.linear.w"):
        facts["d_model"], facts["vocab_size"] = softmax
    facts["family"] = "llama" if facts["norm"] == "rmsnorm" else "gpt"
    options = {"repeat": "yes" if repeat else "no"}
    if shared := outer("softmax.embedding.w"):
        facts["vocab_size"], facts["d_model"] = shared
        inner = [{n: s[1:] if repeat else s for n, s in layers[j].items()} for j in range(len(layers))]
        _glam_layers(inner, facts, options)
    else:
        (_te_layer if te else _pax_layer)(get, facts, options)
    return "te" if te else "pax", options, facts


def _pax_layer(get: Get, facts: Facts, options: dict[str, str]) -> None:
    attn, ffn = "self_attention.", "ff_layer."
    if combined := get(f"{attn}combined_qkv.w"):
        facts["n_heads"], facts["head_dim"] = combined[-2:]
        facts["n_kv_heads"] = facts["n_heads"]
        options["qkv"] = "combined"
    elif query := get(f"{attn}query.w"):
        facts["n_heads"], facts["head_dim"] = query[-2:]
        key = get(f"{attn}key.w") or ()
        facts["n_kv_heads"] = key[1] if len(key) == 3 else 1
        options["qkv"] = "split"
    facts["d_ff"] = (get(f"{ffn}ffn_layer1.linear.w") or [None])[-1]
    facts["gated"] = get(f"{ffn}ffn_layer1_gate.linear.w") is not None
    facts["qkv_bias"] = any(get(f"{attn}{name}.b") for name in ("combined_qkv", "query"))
    facts["attn_out_bias"] = get(f"{attn}post.b") is not None
    facts["mlp_bias"] = get(f"{ffn}ffn_layer1.bias.b") is not None


def _glam_layers(layers: list[dict[str, tuple[int, ...]]], facts: Facts, options: dict[str, str]) -> None:
    """GLaM: some layers of each block have experts, the others a gated feed-forward."""
    experts = ["ff_layer.gate" in layer for layer in layers]
    period = facts.get("block_period") or next(
        k for k in range(1, len(experts) + 1) if len(experts) % k == 0 and experts == experts[:k] * (len(experts) // k)
    )
    facts["block_period"], facts["moe_layers_in_block"] = period, tuple(j for j in range(period) if experts[j])
    facts["family"], facts["n_kv_heads"] = "glam", None
    options["qkv"] = "split"
    for layer in layers:
        if bias := layer.get("self_attention.relative_bias.wrb"):
            facts["n_heads"], facts["relative_buckets"] = bias
            facts["head_dim"] = layer["self_attention.query.w"][1] // bias[0]
            facts["n_kv_heads"] = layer["self_attention.key.w"][1] // facts["head_dim"]
        if gate := layer.get("ff_layer.gate"):
            facts["n_experts"] = gate[1]
            facts["expert_d_ff"] = layer["ff_layer.wi_0"][2]
            facts["experts_gated"] = "ff_layer.wi_gate_0" in layer
        if up := layer.get("ff_layer.ffn_layer1.linear.w"):
            facts["d_ff"], facts["gated"] = up[1], "ff_layer.ffn_layer1_gate.linear.w" in layer
    if facts["n_kv_heads"] is None or "d_ff" not in facts:
        raise CannotHold("a GLaM without relative position biases or without a dense layer: no layout table holds it")


def _te_layer(get: Get, facts: Facts, options: dict[str, str]) -> None:
    wi, query, kv = get("mlp.wi_kernel"), get("attention.query.kernel"), get("attention.kv.kernel")
    if get("attention.qkv.kernel"):
        options["qkv"] = "qkv_packed"
    elif kv:
        options["qkv"] = "kv_packed"
    elif query:
        options["qkv"] = "separate"
    if wi and len(wi) == 3:
        facts["d_ff"] = wi[2]
        facts["gated"] = wi[1] == 2
    options["bias"] = "pax_split" if get("self_attention.query.b") else "pax" if get("self_attention.post.b") else "te"
    options["ln"] = "pax" if get("layer_norm.scale") else "te"
    facts["qkv_bias"] = any(
        get(name)
        for name in (
            "attention.qkv.bias",
            "attention.query.bias",
            "self_attention.query.b",
            "self_attention.combined_qkv.b",
        )
    )
    facts["attn_out_bias"] = bool(get("attention.out.bias") or get("self_attention.post.b"))
    facts["mlp_bias"] = bool(get("mlp.wo_bias") or get("ff_layer.ffn_layer2.bias.b"))


def te_widths(tensors: Mapping[str, TensorSpec]) -> tuple[int | None, int | None]:
    """(N·H, K·H) of the first layer of a TE folder: all that its flattened kernels tell of heads."""
    n_h = k_h = None
    for key, spec in tensors.items():
        if key.endswith("cld.attention.out.kernel"):
            n_h = spec.shape[-2]
        elif key.endswith(("cld.attention.kv.kernel", "cld.attention.key.kernel")):
            k_h = spec.shape[-1]
    return n_h, k_h if k_h is not None else n_h
