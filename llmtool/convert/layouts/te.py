"""Transformer Engine's layers inside Pax: heads flattened, q k v and gate up side by side on an axis of their own.

Source: variables of TE's flax ``TransformerLayer`` as its praxis wrapper names them, checked against NVIDIA's
converter and TE's own modules. What is not in a layer keeps its Pax name.
"""

from dataclasses import replace
from typing import Any

from llmtool.convert.layouts import pax
from llmtool.convert.row import Row, Table, keep
from llmtool.model_config import ModelConfig

_A, _M = "layers.{l}.attn", "layers.{l}.mlp"


def table(
    config: ModelConfig, *, repeat: bool, qkv: str, gate: str, rope: str, norm: str, bias: str = "te", ln: str = "te"
) -> Table:
    """The rows of one model.

    ``qkv``: qkv_packed (needs K = N), kv_packed or separate. ``gate``: act_first (TE 1.8 and newer compute the
    activation of the first half of ``wi_kernel``) or linear_first (NVIDIA's converter). ``bias``: "pax" leaves every
    bias of the layers under its Pax name, as NVIDIA's ``--skip-bias`` does, "pax_split" with q, k and v apart; ``ln``:
    "pax" leaves the norms (``--skip-ln``).
    """
    outer, end = pax.block(repeat)
    prefix = f"{outer}.transformerlayer.cld"
    shift = pax.scale_shift(config, norm)
    head = "qkv" if qkv == "qkv_packed" else "query"
    branches = (
        ([f"{_M}.gate", f"{_M}.up"] if gate == "act_first" else [f"{_M}.up", f"{_M}.gate"])
        if config.gated
        else [f"{_M}.up"]
    )

    kept = bias != "te"
    rows: list[Row] = [*pax.outside(config, norm)]
    rows += _norm(f"{prefix}.attention.{head}", pax.attention_norm(outer, end, shift), end, ln, kept)
    rows += _projections(prefix, end, qkv, "w", "kernel")
    rows.append(keep(f"{prefix}.attention.out.kernel{end}", "(K G H) D", f"{_A}.out.w"))
    if kept:
        rows += pax.attention_biases(config, outer, end, "split" if bias == "pax_split" else "combined")
    else:
        rows += _projections(prefix, end, qkv, "b", "bias")
        rows.append(keep(f"{prefix}.attention.out.bias{end}", "D", f"{_A}.out.b", rewritten=False))
    rows += _norm(f"{prefix}.mlp", pax.mlp_norm(outer, end, shift), end, ln, kept)
    rows += [
        Row(f"{prefix}.mlp.wi_kernel{end}", "D J F", {f"{branch}.w": "" for branch in branches}),
        keep(f"{prefix}.mlp.wo_kernel{end}", "F D", f"{_M}.down.w"),
    ]
    if kept:
        rows += pax.mlp_biases(outer, end)
    else:
        rows += [
            Row(f"{prefix}.mlp.wi_bias{end}", "J F", {f"{branch}.b": "" for branch in branches}, rewritten=False),
            keep(f"{prefix}.mlp.wo_bias{end}", "D", f"{_M}.down.b", rewritten=False),
        ]
    return Table("te", tuple(rows), rope=pax.ROPE[rope], ignored=pax.IGNORED)


def _norm(prefix: str, in_pax: tuple[Row, Row], end: str, ln: str, biases_kept: bool) -> list[Row]:
    """Rows of a norm's scale and bias: in the TE module that it feeds, or as Pax has them."""
    names = (f"{prefix}.scale{end}", f"{prefix}.ln_bias{end}")
    stay = (ln == "pax", ln == "pax" or biases_kept)
    return [row if keeps else replace(row, slot=name) for row, name, keeps in zip(in_pax, names, stay, strict=True)]


def _projections(prefix: str, end: str, qkv: str, kind: str, name: str) -> list[Row]:
    """Rows of q, k and v: kernels ("w") or biases ("b")."""
    attn, lead = f"{prefix}.attention", "D " if kind == "w" else ""
    facts: dict[str, Any] = {} if kind == "w" else {"rewritten": False}

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
