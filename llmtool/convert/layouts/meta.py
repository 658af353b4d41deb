"""Meta's consolidated files: one matrix a projection, (out, in), rope pairs, split over model-parallel ranks.

Source: the parallel layers of Meta's llama and llama3 model code; the embedding is split by width (Llama 1 and 2) or
by vocabulary (Llama 3). Norms are replicated.
"""

from llmtool.convert.row import Row, Table, keep
from llmtool.errors import CannotHold
from llmtool.model_config import ModelConfig
from llmtool.params import PAIRS

_A, _M = "layers.{l}.attn", "layers.{l}.mlp"
COLUMN, ROW = 0, 1  # the dimension that ranks split: outputs (ColumnParallel) or inputs (RowParallel)


def table(config: ModelConfig, split: str = "width") -> Table:
    """The rows of one model; ``split`` says how ranks share the embedding: by "width" or by "vocab"."""
    if lost := unsupported(config):
        raise CannotHold("the meta layout cannot hold " + "; nor ".join(lost))
    layer = "layers.{l}"
    rows: list[Row] = [
        keep("tok_embeddings.weight", "V D", "embed", shard_axis=1 if split == "width" else 0),
        keep(f"{layer}.attention_norm.weight", "D", f"{_A}.norm.scale"),
        keep(f"{layer}.attention.wq.weight", "(K G H) D", f"{_A}.q.w", shard_axis=COLUMN),
        keep(f"{layer}.attention.wk.weight", "(K H) D", f"{_A}.k.w", shard_axis=COLUMN),
        keep(f"{layer}.attention.wv.weight", "(K H) D", f"{_A}.v.w", shard_axis=COLUMN),
        keep(f"{layer}.attention.wo.weight", "D (K G H)", f"{_A}.out.w", shard_axis=ROW),
        keep(f"{layer}.ffn_norm.weight", "D", f"{_M}.norm.scale"),
        keep(f"{layer}.feed_forward.w1.weight", "F D", f"{_M}.gate.w", shard_axis=COLUMN),
        keep(f"{layer}.feed_forward.w3.weight", "F D", f"{_M}.up.w", shard_axis=COLUMN),
        keep(f"{layer}.feed_forward.w2.weight", "D F", f"{_M}.down.w", shard_axis=ROW),
        keep("norm.weight", "D", "norm.scale"),
    ]
    if config.tied:  # Meta's files always carry the output matrix
        rows.append(keep("output.weight", "V D", "embed", shard_axis=COLUMN, copy_of="tok_embeddings.weight"))
    else:
        rows.append(keep("output.weight", "V D", "unembed.w", shard_axis=COLUMN))
    return Table(
        "meta",
        tuple(rows),
        rope=PAIRS,
        ignored=(r"rope\.freqs", r"layers\.\d+\.attention\.inner_attention\.rope\.freqs"),
    )


def unsupported(config: ModelConfig) -> list[str]:
    """What of a model Meta's files have no place for, each by name."""
    checks = {
        f"a model of the {config.family} family": config.family != "llama",
        "layernorm": config.norm != "rmsnorm",
        "a feed-forward block without a gate": not config.gated,
        "attention biases": config.qkv_bias or config.attn_out_bias,
        "feed-forward biases": config.mlp_bias,
        "an output bias": config.unembed_bias,
    }
    return [what for what, lost in checks.items() if lost]
