"""The one table that every layout, the trainer's tree, shardings and adapters are read off.

One logical weight has one name and one axis string: input axes first, nothing fused, one entry per layer. ``{l}`` is
the absolute layer, ``{e}`` an expert. Rotated weights (q and k) keep their head features as rope HALVES: the feature
pairs that rope turns together are ``(j, j + H/2)``, as in Hugging Face files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmtool import axes
from llmtool.model_config import ModelConfig

HALVES, PAIRS = ("R", "P"), ("P", "R")  # the two ways to order the features of a head that rope turns

TABLE: Mapping[str, str] = {
    "embed": "V D",
    "positions": "W D",
    "layers.{l}.attn.norm.scale": "D",
    "layers.{l}.attn.norm.bias": "D",
    "layers.{l}.attn.q.w": "D K G H",
    "layers.{l}.attn.q.b": "K G H",
    "layers.{l}.attn.k.w": "D K H",
    "layers.{l}.attn.k.b": "K H",
    "layers.{l}.attn.v.w": "D K H",
    "layers.{l}.attn.v.b": "K H",
    "layers.{l}.attn.out.w": "K G H D",
    "layers.{l}.attn.out.b": "D",
    "layers.{l}.attn.relative_bias": "K G U",
    "layers.{l}.mlp.norm.scale": "D",
    "layers.{l}.mlp.norm.bias": "D",
    "layers.{l}.mlp.gate.w": "D F",
    "layers.{l}.mlp.gate.b": "F",
    "layers.{l}.mlp.up.w": "D F",
    "layers.{l}.mlp.up.b": "F",
    "layers.{l}.mlp.down.w": "F D",
    "layers.{l}.mlp.down.b": "D",
    "layers.{l}.moe.router": "D E",
    "layers.{l}.moe.{e}.gate": "D X",
    "layers.{l}.moe.{e}.up": "D X",
    "layers.{l}.moe.{e}.down": "X D",
    "norm.scale": "D",
    "norm.bias": "D",
    "unembed.w": "D V",
    "unembed.b": "V",
}
ROTATED = frozenset(f"layers.{{l}}.attn.{name}.{part}" for name in "qk" for part in "wb")
SCALES = frozenset(name for name in TABLE if name.endswith("norm.scale"))


@dataclass(frozen=True)
class Weight:
    """One logical weight of one model."""

    name: str  # layers.3.attn.q.w
    template: str  # layers.{l}.attn.q.w
    layer: int | None = None
    expert: int | None = None


def sizes(config: ModelConfig) -> dict[str, int]:
    """The length of every axis letter."""
    return {
        "V": config.vocab_size,
        "D": config.d_model,
        "F": config.d_ff,
        "X": config.expert_d_ff or config.d_ff,
        "E": config.n_experts,
        "K": config.n_kv_heads,
        "G": config.n_heads // config.n_kv_heads,
        "H": config.head_dim,
        "R": 2,
        "P": config.head_dim // 2,
        "U": config.relative_buckets,
        "W": config.max_positions or 0,
    }


def _present(template: str, config: ModelConfig, layer: int) -> bool:
    """Whether a model of this config has this weight (in this layer)."""
    layernorm, moe = config.norm == "layernorm", config.is_moe(layer)
    _, _, part = template.partition("layers.{l}.")
    match (part or template).split("."):
        case ["embed"] | ["norm", "scale"] | ["attn" | "mlp", "norm", "scale"]:
            return True
        case ["positions"]:
            return config.position == "learned"
        case ["norm", "bias"] | ["attn" | "mlp", "norm", "bias"]:
            return layernorm
        case ["unembed", kind]:
            return not config.tied if kind == "w" else config.unembed_bias
        case ["attn", "relative_bias"]:
            return config.relative_buckets > 0
        case ["attn", "out", kind]:
            return kind == "w" or config.attn_out_bias
        case ["attn", _, kind]:
            return kind == "w" or config.qkv_bias
        case ["moe", "router"]:
            return moe
        case ["moe", _, role]:
            return moe and (role != "gate" or config.experts_gated)
        case ["mlp", role, kind]:
            return not moe and (role != "gate" or config.gated) and (kind == "w" or config.mlp_bias)
    raise AssertionError(template)


def weights(config: ModelConfig) -> Iterator[Weight]:
    """Every logical weight that a model of this config has, in the table's order, layer by layer."""
    before: list[str] = []
    inside: list[str] = []
    after: list[str] = []
    for template in TABLE:
        (inside if "{l}" in template else after if inside else before).append(template)
    yield from (Weight(t, t) for t in before if _present(t, config, 0))
    for layer in range(config.n_layers):
        for template in (t for t in inside if _present(t, config, layer)):
            if "{e}" in template:
                yield from (Weight(template.format(l=layer, e=e), template, layer, e) for e in range(config.n_experts))
            else:
                yield Weight(template.format(l=layer), template, layer)
    yield from (Weight(t, t) for t in after if _present(t, config, 0))


def pattern(template: str, rope: tuple[str, ...] = HALVES) -> axes.Groups:
    """The axes of a canonical weight, one a dimension; H of a rotated weight is spelt out in ``rope`` order."""
    groups = axes.substitute(axes.parse(TABLE[template]), {"H": rope} if template in ROTATED else {})
    return tuple((axis,) for axis in axes.flat(groups))
