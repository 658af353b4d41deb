"""What a model is: the facts that its weights alone, or its weights and its sidecar, tell.

A field that is ``None`` is not known. Pax and TE folders do not say their norm epsilon or their rope base, for
instance; whoever needs such a fact calls :meth:`ModelConfig.require`, which names what is missing.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from llmtool.errors import Contradiction, MissingFact

MOST_PARTS = 1 << 17  # layers times experts
Family = Literal["llama", "gpt", "gpt_neox", "mixtral", "glam"]
Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Position = Literal["rope", "learned", "sinusoidal", "t5", "none"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rope frequencies (transformers: ``rope_type`` "llama3").

    ``original_context`` is in tokens; the factors are ratios of wavelength to it. Source: Meta's llama-models,
    ``apply_scaling``, and transformers' ``_compute_llama3_parameters``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """Facts of one decoder-only model. Sizes are counts (of tokens, features, heads, layers)."""

    family: Family
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm: Norm
    gated: bool  # the feed-forward block has a gate branch
    position: Position | None
    tied: bool  # the output matrix is the embedding
    norm_eps: float | None = None
    activation: Activation | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # share of head_dim that rope turns
    max_positions: int | None = None  # context length; for learned positions, the table's length
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    unembed_bias: bool = False
    parallel_residual: bool = False  # attention and feed-forward read the same input (GPT-NeoX)
    # mixture of experts
    n_experts: int = 0
    experts_per_token: int = 0
    expert_d_ff: int | None = None
    experts_gated: bool = False
    expert_activation: Activation | None = None
    block_period: int = 1  # layers repeat with this period: canonical index = repeat * period + j
    moe_layers_in_block: tuple[int, ...] = ()  # which j of a block have experts instead of a dense feed-forward
    relative_buckets: int = 0  # T5 relative bias
    relative_max_distance: int = 0
    extra_softmax_logit: bool = False  # adds exp(0) to the attention denominator (GLaM)
    scale_query: bool = True  # multiply queries by 1/sqrt(head_dim)
    scale_logits: bool = False  # multiply logits by 1/sqrt(d_model) (GLaM)
    # tokens, kept for the sidecars
    bos_id: int | None = None
    eos_id: int | tuple[int, ...] | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "block_period"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise Contradiction(f"model config: {name} is {value!r}; expected a positive whole number")
        if self.n_layers * max(1, self.n_experts) > MOST_PARTS:  # each is listed by name
            raise Contradiction(
                f"model config: {self.n_layers} layers of {self.n_experts} experts; at most {MOST_PARTS} make a model"
            )
        if self.n_heads % self.n_kv_heads:
            raise Contradiction(
                f"model config: n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise Contradiction(f"model config: head_dim {self.head_dim} is odd, but rope turns pairs of features")
        if self.n_layers % self.block_period:
            raise Contradiction(
                f"model config: {self.n_layers} layers do not divide into blocks of {self.block_period}"
            )

    def require(self, *names: str, why: str) -> None:
        """Raise :class:`MissingFact` naming every field of ``names`` that is not known."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise MissingFact(
                f"{why} needs {', '.join(missing)}, which the checkpoint does not tell; "
                "give --model-config FILE|PRESET (a config.json, a params.json or a preset's name)"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (absolute index) has experts."""
        return self.n_experts > 0 and layer % self.block_period in self.moe_layers_in_block

    def to_json(self) -> dict[str, Any]:
        """Every field that differs from its default, plus those without one, as JSON values."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                out[field.name] = dataclasses.asdict(value) if isinstance(value, RopeScaling) else value
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str) -> "ModelConfig":
        """The inverse of :meth:`to_json`; an unknown or missing key is an error that names it and ``where``."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - set(fields)):
            raise Contradiction(f"{where}: unknown model config fields: {', '.join(unknown)}")
        if missing := [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in data]:
            raise MissingFact(f"{where}: model config fields are missing: {', '.join(missing)}")
        values = dict(data)
        try:
            if values.get("rope_scaling") is not None:
                values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
            for name in ("moe_layers_in_block", "eos_id"):
                if isinstance(values.get(name), list):
                    values[name] = tuple(values[name])
            return cls(**values)
        except Contradiction as error:
            raise Contradiction(f"{where}: {error}") from error
        except TypeError as error:
            raise Contradiction(f"{where}: not a model config: {error}") from error
