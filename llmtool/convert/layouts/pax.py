"""Pax (paxml/praxis): heads unflattened, the output projection stored output-first, norms of GPT zero-centred.

Source: variables that praxis layers create, read off checkpoints that paxml wrote. With repeated layers every
variable of a block carries a leading axis over the repeats.
"""

from llmtool.convert.row import Row, Table, keep
from llmtool.model_config import ModelConfig
from llmtool.params import HALVES, PAIRS

_A, _M = "layers.{l}.attn", "layers.{l}.mlp"
ROOT = "mdl_vars.params.lm"
ROPE = {"half": HALVES, "interleaved": PAIRS}
IGNORED = (r"step", r"opt_states_.*", r"opt_states\..*")


def block(repeat: bool) -> tuple[str, str]:
    """Prefix and suffix of the keys of one layer."""
    return (
        (f"{ROOT}.transformer.repeat.sub.x_layers_{{j}}", "[{i}]")
        if repeat
        else (f"{ROOT}.transformer.x_layers_{{l}}", "")
    )


def scale_shift(config: ModelConfig, norm: str) -> float:
    """What is added to a norm scale on the way into Pax: -1 where it is stored as an offset from one."""
    return -1.0 if norm == "centred" else 0.0


def outside(config: ModelConfig, norm: str) -> tuple[Row, ...]:
    """What is not in a layer: embedding, positions, last norm, softmax. Transformer Engine leaves it as it is."""
    plain = {"rewritten": False}
    rows = [
        keep(f"{ROOT}.position_emb.emb_var", "W D", "positions", **plain),
        keep(f"{ROOT}.final_ln.scale", "D", "norm.scale", shift=scale_shift(config, norm), **plain),
        keep(f"{ROOT}.final_ln.bias", "D", "norm.bias", **plain),
        keep(f"{ROOT}.softmax.logits_ffn.bias.b", "V", "unembed.b", **plain),
    ]
    if config.tied:  # praxis' shared softmax keeps one variable, output-last
        rows.append(keep(f"{ROOT}.softmax.logits_ffn.linear.w", "D V", "embed", **plain))
    else:
        rows += [
            keep(f"{ROOT}.embedding_lookup.emb_var", "V D", "embed", **plain),
            keep(f"{ROOT}.softmax.logits_ffn.linear.w", "D V", "unembed.w", **plain),
        ]
    return tuple(rows)


def attention_norm(prefix: str, end: str, shift: float) -> tuple[Row, Row]:
    return (
        keep(f"{prefix}.layer_norm.scale{end}", "D", f"{_A}.norm.scale", shift=shift, rewritten=False),
        keep(f"{prefix}.layer_norm.bias{end}", "D", f"{_A}.norm.bias", rewritten=False),
    )


def mlp_norm(prefix: str, end: str, shift: float) -> tuple[Row, Row]:
    return (
        keep(f"{prefix}.ff_layer.layer_norm.scale{end}", "D", f"{_M}.norm.scale", shift=shift, rewritten=False),
        keep(f"{prefix}.ff_layer.layer_norm.bias{end}", "D", f"{_M}.norm.bias", rewritten=False),
    )


def attention_biases(config: ModelConfig, prefix: str, end: str, qkv: str) -> tuple[Row, ...]:
    attn, kv = f"{prefix}.self_attention", "K H" if config.n_kv_heads > 1 else "H"
    if qkv == "combined":
        packed = {f"{_A}.{name}.b": "" for name in "qkv"}
        inner: tuple[Row, ...] = (Row(f"{attn}.combined_qkv.b{end}", "J (K G) H", packed, rewritten=False),)
    else:
        inner = (
            keep(f"{attn}.query.b{end}", "(K G) H", f"{_A}.q.b", rewritten=False),
            keep(f"{attn}.key.b{end}", kv, f"{_A}.k.b", rewritten=False),
            keep(f"{attn}.value.b{end}", kv, f"{_A}.v.b", rewritten=False),
        )
    return (*inner, keep(f"{attn}.post.b{end}", "D", f"{_A}.out.b", rewritten=False))


def mlp_biases(prefix: str, end: str) -> tuple[Row, ...]:
    return (
        keep(f"{prefix}.ff_layer.ffn_layer1.bias.b{end}", "F", f"{_M}.up.b", rewritten=False),
        keep(f"{prefix}.ff_layer.ffn_layer1_gate.bias.b{end}", "F", f"{_M}.gate.b", rewritten=False),
        keep(f"{prefix}.ff_layer.ffn_layer2.bias.b{end}", "D", f"{_M}.down.b", rewritten=False),
    )


def table(config: ModelConfig, *, repeat: bool, qkv: str, rope: str, norm: str) -> Table:
    """The rows of one model. ``qkv``: combined (one array; needs K = N) or split; ``rope``: half or interleaved."""
    prefix, end = block(repeat)
    shift = scale_shift(config, norm)
    attn, ffn = f"{prefix}.self_attention", f"{prefix}.ff_layer"
    kv = "D K H" if config.n_kv_heads > 1 else "D H"  # praxis drops the axis of a single kv head
    rows: list[Row] = [*outside(config, norm), *attention_norm(prefix, end, shift)]
    if qkv == "combined":
        rows.append(Row(f"{attn}.combined_qkv.w{end}", "J D (K G) H", {f"{_A}.{name}.w": "" for name in "qkv"}))
    else:
        rows += [
            keep(f"{attn}.query.w{end}", "D (K G) H", f"{_A}.q.w"),
            keep(f"{attn}.key.w{end}", kv, f"{_A}.k.w"),
            keep(f"{attn}.value.w{end}", kv, f"{_A}.v.w"),
        ]
    rows += [
        keep(f"{attn}.post.w{end}", "D (K G) H", f"{_A}.out.w"),
        *attention_biases(config, prefix, end, qkv),
        *mlp_norm(prefix, end, shift),
        keep(f"{ffn}.ffn_layer1_gate.linear.w{end}", "D F", f"{_M}.gate.w"),
        keep(f"{ffn}.ffn_layer1.linear.w{end}", "D F", f"{_M}.up.w"),
        keep(f"{ffn}.ffn_layer2.linear.w{end}", "F D", f"{_M}.down.w"),
        *mlp_biases(prefix, end),
    ]
    return Table("pax", tuple(rows), rope=ROPE[rope], ignored=IGNORED)
