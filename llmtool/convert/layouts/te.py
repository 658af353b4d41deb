"""Transformer Engine's layers inside Pax: heads flattened, q k v and gate up side by side on an axis of their own.

Source: variables of TE's flax ``TransformerLayer`` as its praxis wrapper names them, checked against NVIDIA's
converter and TE's own modules. What is not in a layer keeps its Pax name.
"""

from llmtool.convert.layouts import pax
from llmtool.convert.row import Row, Table, keep
from llmtool.model_config import ModelConfig

_A, _M = "layers.{l}.attn", "layers.{l}.mlp"


def table(
    config: ModelConfig, *, repeat: bool, qkv: str, gate: str, rope: str, norm: str, bias: str = "te", ln: str = "te"
) -> Table:
    """The rows of one model.

    ``qkv``: qkv_packed (needs K = N), kv_packed or separate. ``gate``: act_first (TE 1.8 and newer compute the
    activation of the first half of ``wi_kernel``) or linear_first (NVIDIA's converter). ``bias`` and ``ln``: "pax"
    leaves biases or norms of the layers under their Pax names, as NVIDIA's ``--skip-bias`` and ``--skip-ln`` do.
    """
    outer, end = pax.block(repeat)
    prefix = f"{outer}.transformerlayer.cld"
    shift = pax.scale_shift(config, norm)
    head = "qkv" if qkv == "qkv_packed" else "query"
    branches = ([f"{_M}.gate", f"{_M}.up"] if gate == "act_first" else [f"{_M}.up", f"{_M}.gate"]) if config.gated else [
        f"{_M}.up"]

    rows: list[Row] = [*pax.outside(config, norm)]
    if ln == "pax":
        rows += pax.attention_norm(outer, end, shift)
    else:
        rows += [
            keep(f"{prefix}.attention.{head}.scale{end}", "D", f"{_A}.norm.scale", shift=shift, rewritten=False),
            keep(f"{prefix}.attention.{head}.ln_bias{end}", "D", f"{_A}.norm.bias", rewritten=False),
        ]
    rows += _projections(prefix, end, qkv, "w", "kernel")
    rows.append(keep(f"{prefix}.attention.out.kernel{end}", "(K G H) D", f"{_A}.out.w"))
    if bias == "te":
        rows += _projections(prefix, end, qkv, "b", "bias")
        rows.append(keep(f"{prefix}.attention.out.bias{end}", "D", f"{_A}.out.b", rewritten=False))
    else:
        rows += pax.attention_biases(config, outer, end, "combined" if qkv == "qkv_packed" else "split")
    if ln == "pax":
        rows += pax.mlp_norm(outer, end, shift)
    else:
        rows += [
            keep(f"{prefix}.mlp.scale{end}", "D", f"{_M}.norm.scale", shift=shift, rewritten=False),
            keep(f"{prefix}.mlp.ln_bias{end}", "D", f"{_M}.norm.bias", rewritten=False),
        ]
    rows += [
        Row(f"{prefix}.mlp.wi_kernel{end}", "D J F", {f"{branch}.w": "" for branch in branches}),
        keep(f"{prefix}.mlp.wo_kernel{end}", "F D", f"{_M}.down.w"),
    ]
    if bias == "te":
        rows += [
            Row(f"{prefix}.mlp.wi_bias{end}", "J F", {f"{branch}.b": "" for branch in branches}, rewritten=False),
            keep(f"{prefix}.mlp.wo_bias{end}", "D", f"{_M}.down.b", rewritten=False),
        ]
    else:
        rows += pax.mlp_biases(outer, end)
    return Table("te", tuple(rows), rope=pax.ROPE[rope], ignored=pax.IGNORED)


def _projections(prefix: str, end: str, qkv: str, kind: str, name: str) -> list[Row]:
    """Rows of q, k and v: kernels ("w") or biases ("b")."""
    attn, lead = f"{prefix}.attention", "D " if kind == "w" else ""
    facts = {} if kind == "w" else {"rewritten": False}

    def packed(key: str, names: str) -> Row:
        heads = "K G H" if "q" in names else "K H"
        return Row(f"{attn}.{key}.{name}{end}", f"{lead}J ({heads})", {f"{_A}.{n}.{kind}": "" for n in names}, **facts)

    query = keep(f"{attn}.query.{name}{end}", f"{lead}(K G H)", f"{_A}.q.{kind}", **facts)
    match qkv:
        case "qkv_packed":
            return [packed("qkv", "qkv")]
        case "kv_packed":
            return [query, packed("kv", "kv")]
        case _:
            return [query] + [
                keep(f"{attn}.{key}.{name}{end}", f"{lead}(K H)", f"{_A}.{n}.{kind}", **facts)
                for key, n in (("key", "k"), ("value", "v"))
            ]
