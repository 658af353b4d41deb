"""GGUF (llama.cpp) of LLaMA-shaped models, read only: one matrix a projection, (out, in), rope pairs.

Source: tensor names of the ``gguf`` package for the ``llama`` architecture; q and k are in Meta's order.
"""

from llmtool.convert.row import Row, Table, keep
from llmtool.model_config import ModelConfig
from llmtool.params import PAIRS

_A, _M = "layers.{l}.attn", "layers.{l}.mlp"


def table(config: ModelConfig) -> Table:
    """The rows of one model."""
    layer = "blk.{l}"
    rows: list[Row] = [
        keep("token_embd.weight", "V D", "embed"),
        keep(f"{layer}.attn_norm.weight", "D", f"{_A}.norm.scale"),
        keep(f"{layer}.attn_q.weight", "(K G H) D", f"{_A}.q.w"),
        keep(f"{layer}.attn_q.bias", "(K G H)", f"{_A}.q.b"),
        keep(f"{layer}.attn_k.weight", "(K H) D", f"{_A}.k.w"),
        keep(f"{layer}.attn_k.bias", "(K H)", f"{_A}.k.b"),
        keep(f"{layer}.attn_v.weight", "(K H) D", f"{_A}.v.w"),
        keep(f"{layer}.attn_v.bias", "(K H)", f"{_A}.v.b"),
        keep(f"{layer}.attn_output.weight", "D (K G H)", f"{_A}.out.w"),
        keep(f"{layer}.attn_output.bias", "D", f"{_A}.out.b"),
        keep(f"{layer}.ffn_norm.weight", "D", f"{_M}.norm.scale"),
        keep(f"{layer}.ffn_gate.weight", "F D", f"{_M}.gate.w"),
        keep(f"{layer}.ffn_gate.bias", "F", f"{_M}.gate.b"),
        keep(f"{layer}.ffn_up.weight", "F D", f"{_M}.up.w"),
        keep(f"{layer}.ffn_up.bias", "F", f"{_M}.up.b"),
        keep(f"{layer}.ffn_down.weight", "D F", f"{_M}.down.w"),
        keep(f"{layer}.ffn_down.bias", "D", f"{_M}.down.b"),
        keep("output_norm.weight", "D", "norm.scale"),
        keep("output.weight", "V D", "unembed.w"),
    ]
    if config.tied:
        rows.append(keep("output.weight", "V D", "embed", copy_of="token_embd.weight", optional=True))
    return Table("gguf", tuple(rows), rope=PAIRS, ignored=(r"rope_freqs\.weight",))
