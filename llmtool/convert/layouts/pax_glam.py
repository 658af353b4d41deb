"""GLaM in Pax: heads flattened, experts stacked, every second layer dense, one shared embedding.

Source: variables of praxis' GLaM layers (``combine_dims``, output projection input-first), read off a checkpoint that
paxml wrote. The output projection is the other way round than in Pax's GPT and LLaMA.
"""

from llmtool.convert.layouts import pax
from llmtool.convert.layouts.pax import ROOT, block
from llmtool.convert.row import Row, Table, keep
from llmtool.errors import CannotHold
from llmtool.model_config import ModelConfig

_A, _M, _E = "layers.{l}.attn", "layers.{l}.mlp", "layers.{l}.moe"


def rows(repeat: bool) -> tuple[Row, ...]:
    """The rows of one model. With repeated layers the stacked axis runs over blocks."""
    prefix, end = block(repeat)
    expert = "[{i},{e}]" if repeat else "[{e}]"
    attn, ffn = f"{prefix}.self_attention", f"{prefix}.ff_layer"
    return (
        keep(f"{ROOT}.softmax.embedding.w", "V D", "embed"),
        keep(f"{ROOT}.final_ln.scale", "D", "norm.scale"),
        keep(f"{prefix}.layer_norm.scale{end}", "D", f"{_A}.norm.scale"),
        keep(f"{attn}.query.w{end}", "D (K G H)", f"{_A}.q.w"),
        keep(f"{attn}.key.w{end}", "D (K H)", f"{_A}.k.w"),
        keep(f"{attn}.value.w{end}", "D (K H)", f"{_A}.v.w"),
        keep(f"{attn}.post.w{end}", "(K G H) D", f"{_A}.out.w"),
        keep(f"{attn}.relative_bias.wrb{end}", "(K G) U", f"{_A}.relative_bias"),
        keep(f"{ffn}.layer_norm.scale{end}", "D", f"{_M}.norm.scale"),
        keep(f"{ffn}.ffn_layer1_gate.linear.w{end}", "D F", f"{_M}.gate.w"),
        keep(f"{ffn}.ffn_layer1.linear.w{end}", "D F", f"{_M}.up.w"),
        keep(f"{ffn}.ffn_layer2.linear.w{end}", "F D", f"{_M}.down.w"),
        keep(f"{ffn}.gate{end}", "D E", f"{_E}.router"),
        keep(f"{ffn}.wi_gate_0{expert}", "D X", f"{_E}.{{e}}.gate"),
        keep(f"{ffn}.wi_0{expert}", "D X", f"{_E}.{{e}}.up"),
        keep(f"{ffn}.wo_0{expert}", "X D", f"{_E}.{{e}}.down"),
    )


def pax_table(config: ModelConfig, *, repeat: bool, qkv: str, rope: str, norm: str) -> Table:
    """The rows of any model in Pax. GLaM comes in one variant but for ``repeat``."""
    if config.family != "glam":
        return pax.table(config, repeat=repeat, qkv=qkv, rope=rope, norm=norm)
    if qkv == "combined" or norm == "centred":
        raise CannotHold(
            f"GLaM in Pax keeps q, k and v apart and its norm scales as they are, not qkv={qkv}, norm={norm}"
        )
    return Table("pax", rows(repeat), ignored=pax.IGNORED)
