"""Hugging Face: one matrix a projection, (out, in), rope halves; GPT-2's Conv1D matrices are (in, out).

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


_FAMILIES: dict[str, tuple[Callable[[], tuple[Row, ...]], tuple[str, ...]]] = {
    "llama": (_llama, (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)),
    "gpt": (_gpt2, (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)),
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
        rows.append(keep("lm_head.weight", "V D", "embed", copy_of=rows[0].slot, optional=True))
    if prefix != "transformer.":
        rows = [replace(row, slot=row.slot.replace("transformer.", prefix, 1)) for row in rows]
        ignored = tuple(pattern.replace(r"transformer\.", prefix, 1) for pattern in ignored)
    return Table("hf", tuple(rows), ignored=ignored)


def unsupported(config: ModelConfig) -> list[str]:
    """What of a model the family's Hugging Face class has no place for, each by name."""
    llama = config.family == "llama"
    position = "rope" if llama else "learned"
    checks = {
        f"{config.position} positions ({config.family} has {position} ones)": config.position not in (position, None),
        f"{config.norm} in the {config.family} family": config.norm != ("rmsnorm" if llama else "layernorm"),
        f"a feed-forward block {'without' if llama else 'with'} a gate": config.gated != llama,
        "an output bias": config.unembed_bias,
        "attention biases on some projections only": config.qkv_bias != config.attn_out_bias,
        "a GPT-2 without biases": not llama and not (config.qkv_bias and config.mlp_bias),
    }
    return [what for what, lost in checks.items() if lost]
