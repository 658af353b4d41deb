"""The choices of a training run. What a model *is* stands in ModelConfig; here is what one does with it.

Frozen dataclasses, made by presets and derived with ``dataclasses.replace``; ``--set path=value`` and a TOML file
change single fields (see :mod:`llmtool.train.overrides`).
"""

from dataclasses import dataclass, field
from typing import Literal

from llmtool.model_config import ModelConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay.

    ``kind``: "pax" is praxis' Adam (bias correction folded into the decays, optional per-tensor cap of the update's RMS
    before decay); "adamw" is torch's and ColossalAI's. ``clip_norm`` is the global gradient norm (None: no clipping);
    a step whose gradients are not finite is skipped and counted. ``cap_qkv_together``: for the cap, q, k and v of a
    layer are one tensor, which is how Pax stores them when each query head has its own key head.
    """

    kind: Literal["pax", "adamw"] = "adamw"
    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    update_rms_cap: float | None = None
    cap_qkv_together: bool = False


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate's factor over optimizer steps (0-based count of updates done).

    "pax": 0 at the first update, linear to 1 at ``warmup_steps``, held until ``decay_start``, cosine to ``min_ratio``
    at ``decay_end``. "cosine": ``(step + 1) / warmup_steps`` up to 1, then cosine to ``min_ratio`` at the last step
    (ColossalAI). "constant": 1, after a linear warm-up if there is one.
    """

    kind: Literal["pax", "cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_start: int | None = None
    decay_end: int | None = None
    min_ratio: float = 0.1


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from. ``sources``: ``kind:path`` words (``jsonl:…``, ``text:…``, ``tokens:…``, ``tfds:…``,
    ``hf:…``, ``synthetic``), each with an optional weight (``0.7*jsonl:…``). ``pipeline``: "packed" (EOS between
    documents, packed, nothing attends across) or "pax" (128 documents joined, seq_len - 1 tokens and EOS a row)."""

    sources: tuple[str, ...] = ("synthetic",)
    pipeline: Literal["packed", "pax"] = "packed"
    tokenizer: str | None = None
    text_field: str = "text"
    epochs: float | None = None
    shuffle_buffer: int = 10_000
    workers: int = 0
    seed: int = 0
    validation: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeshConfig:
    """Device mesh shapes over (data, fsdp, tensor): within a node or slice (ICI) times across them (DCN). None: all
    devices on the strategy's own axis."""

    ici: tuple[int, int, int] | None = None
    dcn: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class CheckpointConfig:
    """Save every ``every_steps`` steps or ``every_minutes`` minutes (whichever comes first; None: not so), keep the
    newest ``keep``; also on SIGTERM and at the end."""

    every_steps: int | None = 1000
    every_minutes: float | None = None
    keep: int = 3


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation in the loop: validation loss over ``validation_batches`` batches and LAMBADA, every N steps."""

    every_steps: int | None = None
    validation_batches: int = 16
    lambada: str | None = None           # data, as for ``llmtool eval lambada --data``
    lambada_every_steps: int | None = None
    lambada_limit: int | None = None
    lambada_protocol: Literal["lm-eval", "pax"] = "lm-eval"


@dataclass(frozen=True)
class RunConfig:
    """One run. ``batch_per_device`` may be fractional (0.5: two devices share a row, with tensor parallelism)."""

    name: str
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvalConfig = EvalConfig()
    steps: int = 1000
    seq_len: int = 2048
    batch_per_device: float = 1.0
    grad_accum: int = 1
    strategy: Literal["ddp", "zero2", "fsdp", "tensor", "hybrid"] = "fsdp"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    precision: Literal["bf16", "fp32", "fp16"] = "bf16"
    remat: Literal["none", "full", "save_dots", "save_qkv_out"] = "none"
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    capacity_factor: float | None = None  # of experts; None drops nothing
    expert_groups: int = 1
    aux_loss_weight: float = 0.0          # of the MoE load balance, each MoE layer
    z_loss_weight: float = 0.0
    loss_over: Literal["counted", "all"] = "counted"  # denominator: counted targets, or every position (GLaM's preset)
    init_std: float = 0.02
    dropout: float = 0.0
    seed: int = 0
    log_every: int = 10
    notes: tuple[str, ...] = field(default=())  # how the preset was decided where sources disagree
