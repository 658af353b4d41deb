"""Hugging Face: one matrix a projection, (out, in), rope halves. GPT-2's Conv1D matrices are (in, out); GPT-NeoX packs
q, k and v head by head.

Source: the files that transformers writes (``save_pretrained``); checked against samples that it wrote.
"""

from collections.abc import Callable
from dataclasses import replace

from llmtool.convert.row import Row, Table, keep
from llmtool.errors import CannotHold
from llmtool.model_config import ModelConfig

_A, _M = "layers.{l}.attn", "layers.{l}.mlp"


def _llama() -> tuple[Row, ...]:
    layer = "model.layers.{l}"
    rows = [
        keep("model.embed_tokens.weight", "V D", "embed"),
        keep(f"{layer}.input_layernorm.weight", "D", f"{_A}.norm.scale"),
        keep(f"{layer}.self_attn.q_proj.weight", "(K G H) D", f"{_A}.q.w"),
        keep(f"{layer}.self_attn.q_proj.bias", "(K G H)", f"{_A}.q.b"),
        keep(f"{layer}.self_attn.k_proj.weight", "(K H) D", f"{_A}.k.w"),
        keep(f"{layer}.self_attn.k_proj.bias", "(K H)", f"{_A}.k.b"),
        keep(f"{layer}.self_attn.v_proj.weight", "(K H) D", f"{_A}.v.w"),
        keep(f"{layer}.self_attn.v_proj.bias", "(K H)", f"{_A}.v.b"),
        keep(f"{layer}.self_attn.o_proj.weight", "D (K G H)", f"{_A}.out.w"),
        keep(f"{layer}.self_attn.o_proj.bias", "D", f"{_A}.out.b"),
        keep(f"{layer}.post_attention_layernorm.weight", "D", f"{_M}.norm.scale"),
    ]
    for stored, ours, pattern in (("gate", "gate", "F D"), ("up", "up", "F D"), ("down", "down", "D F")):
        rows += [
            keep(f"{layer}.mlp.{stored}_proj.weight", pattern, f"{_M}.{ours}.w"),
            keep(f"{layer}.mlp.{stored}_proj.bias", pattern.split()[0], f"{_M}.{ours}.b"),
        ]
    rows += [
        keep("model.norm.weight", "D", "norm.scale"),
        keep("lm_head.weight", "V D", "unembed.w"),
    ]
    return tuple(rows)


def _gpt2() -> tuple[Row, ...]:
    layer = "transformer.h.{l}"
    qkv = {kind: {f"{_A}.{name}.{kind}": ("K G" if name == "q" else "K") for name in "qkv"} for kind in "wb"}
    return (
        keep("transformer.wte.weight", "V D", "embed"),
        keep("transformer.wpe.weight", "W D", "positions"),
        keep(f"{layer}.ln_1.weight", "D", f"{_A}.norm.scale"),
        keep(f"{layer}.ln_1.bias", "D", f"{_A}.norm.bias"),
        Row(f"{layer}.attn.c_attn.weight", "D (J H)", qkv["w"]),
        Row(f"{layer}.attn.c_attn.bias", "(J H)", qkv["b"]),
        keep(f"{layer}.attn.c_proj.weight", "(K G H) D", f"{_A}.out.w"),
        keep(f"{layer}.attn.c_proj.bias", "D", f"{_A}.out.b"),
        keep(f"{layer}.ln_2.weight", "D", f"{_M}.norm.scale"),
        keep(f"{layer}.ln_2.bias", "D", f"{_M}.norm.bias"),
        keep(f"{layer}.mlp.c_fc.weight", "D F", f"{_M}.up.w"),
        keep(f"{layer}.mlp.c_fc.bias", "F", f"{_M}.up.b"),
        keep(f"{layer}.mlp.c_proj.weight", "F D", f"{_M}.down.w"),
        keep(f"{layer}.mlp.c_proj.bias", "D", f"{_M}.down.b"),
        keep("transformer.ln_f.weight", "D", "norm.scale"),
        keep("transformer.ln_f.bias", "D", "norm.bias"),
        keep("lm_head.weight", "V D", "unembed.w"),
    )


def _gpt_neox() -> tuple[Row, ...]:
    layer = "gpt_neox.layers.{l}"
    rows = [keep("gpt_neox.embed_in.weight", "V D", "embed")]
    for stored, ours in (("input_layernorm", _A), ("post_attention_layernorm", _M)):
        rows += [
            keep(f"{layer}.{stored}.weight", "D", f"{ours}.norm.scale"),
            keep(f"{layer}.{stored}.bias", "D", f"{ours}.norm.bias"),
        ]
    for name, pattern, kind in (("weight", "(K G J H) D", "w"), ("bias", "(K G J H)", "b")):  # q, k, v of each head
        parts = {f"{_A}.{n}.{kind}": "" for n in "qkv"}
        rows.append(Row(f"{layer}.attention.query_key_value.{name}", pattern, parts))
    for stored, ours, pattern in (
        ("attention.dense", f"{_A}.out", "D (K G H)"),
        ("mlp.dense_h_to_4h", f"{_M}.up", "F D"),
        ("mlp.dense_4h_to_h", f"{_M}.down", "D F"),
    ):
        rows += [
            keep(f"{layer}.{stored}.weight", pattern, f"{ours}.w"),
            keep(f"{layer}.{stored}.bias", pattern.split()[0], f"{ours}.b"),
        ]
    return (
        *rows,
        keep("gpt_neox.final_layer_norm.weight", "D", "norm.scale"),
        keep("gpt_neox.final_layer_norm.bias", "D", "norm.bias"),
        keep("embed_out.weight", "V D", "unembed.w"),
    )


def _mixtral() -> tuple[Row, ...]:
    moe = "model.layers.{l}.block_sparse_moe"
    return (
        *_llama(),
        keep(f"{moe}.gate.weight", "E D", "layers.{l}.moe.router"),
        keep(f"{moe}.experts.{{e}}.w1.weight", "X D", "layers.{l}.moe.{e}.gate"),
        keep(f"{moe}.experts.{{e}}.w3.weight", "X D", "layers.{l}.moe.{e}.up"),
        keep(f"{moe}.experts.{{e}}.w2.weight", "D X", "layers.{l}.moe.{e}.down"),
    )


_ROTARY_BUFFER = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
_FAMILIES: dict[str, tuple[Callable[[], tuple[Row, ...]], tuple[str, ...]]] = {
    "llama": (_llama, (_ROTARY_BUFFER,)),
    "gpt": (_gpt2, (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)),
    "gpt_neox": (_gpt_neox, (r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)),
    "mixtral": (_mixtral, (_ROTARY_BUFFER,)),
}


def table(config: ModelConfig, prefix: str = "transformer.") -> Table:
    """The rows of one model. ``prefix`` is "" for old GPT-2 files, whose keys begin with ``h.0``."""
    if config.family not in _FAMILIES:
        raise CannotHold(f"the hf layout has no table for the {config.family} family; it has: {', '.join(_FAMILIES)}")
    build, ignored = _FAMILIES[config.family]
    if lost := unsupported(config):
        raise CannotHold("the hf layout cannot hold " + "; nor ".join(lost))
    rows = list(build())
    if config.tied:  # some files repeat the embedding as lm_head; it must then be the same
        output = next(row.slot for row in rows if "unembed.w" in row.parts)
        rows.append(keep(output, "V D", "embed", copy_of=rows[0].slot, optional=True))
    if prefix != "transformer.":
        rows = [replace(row, slot=row.slot.replace("transformer.", prefix, 1)) for row in rows]
        ignored = tuple(pattern.replace(r"transformer\.", prefix, 1) for pattern in ignored)
    return Table("hf", tuple(rows), ignored=ignored)


def unsupported(config: ModelConfig) -> list[str]:
    """What of a model the family's Hugging Face class has no place for, each by name."""
    llama = config.family in ("llama", "mixtral")
    position = "learned" if config.family == "gpt" else "rope"
    mha = config.n_heads == config.n_kv_heads
    checks = {
        f"{config.position} positions ({config.family} has {position} ones)": config.position not in (position, None),
        f"{config.norm} in the {config.family} family": config.norm != ("rmsnorm" if llama else "layernorm"),
        f"a feed-forward block {'without' if llama else 'with'} a gate": config.gated != llama,
        "an output bias": config.unembed_bias,
        "attention biases on some projections only": config.qkv_bias != config.attn_out_bias,
        f"a {config.family} without feed-forward biases": not llama and not config.mlp_bias,
        "a GPT-2 without attention biases": config.family == "gpt" and not config.qkv_bias,
        f"a {config.family} with fewer kv heads than heads": not llama and not mha,
    }
    return [what for what, lost in checks.items() if lost]
