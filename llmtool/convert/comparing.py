"""Compare two checkpoints in any two layouts, weight by weight."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmtool import params
from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.opening import open_checkpoint
from llmtool.errors import LlmtoolError
from llmtool.model_config import ModelConfig

BAND_BYTES = 32 << 20
FACTS = (
    *("norm_eps", "activation", "position", "rope_theta", "rotary_fraction", "max_positions", "parallel_residual"),
    *("experts_per_token", "expert_activation", "extra_softmax_logit", "scale_query", "scale_logits"),
)


@dataclass
class Diff:
    """``missing`` weights are only in the first, ``extra`` only in the second; ``mismatched`` differ in shape or by
    more than the tolerance; ``dtypes`` lists weights whose dtypes differ (their values may still be equal)."""

    a: str
    b: str
    tolerance: float
    weights: int = 0
    max_abs_diff: float = 0.0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    mismatched: list[dict[str, Any]] = field(default_factory=list)
    dtypes: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both hold the same weights within the tolerance."""
        return not (self.missing or self.extra or self.mismatched)

    def to_json(self) -> dict[str, Any]:
        """JSON values, schema llmtool.diff/1."""
        finite = self.max_abs_diff if np.isfinite(self.max_abs_diff) else None
        return {"schema": "llmtool.diff/1", "equal": self.equal, **vars(self), "max_abs_diff": finite}


def diff_checkpoints(
    a: str | Path,
    b: str | Path,
    *,
    layout_a: str | None = None,
    layout_b: str | None = None,
    model_config: str | ModelConfig | None = None,
    tolerance: float = 0.0,
    step_a: int | None = None,
    step_b: int | None = None,
) -> Diff:
    """Compare every weight of ``a`` with that of ``b``. Values are compared exactly (NaN equals NaN), or up to
    ``tolerance`` in absolute value. Facts that one side lacks (heads of a bare TE folder) are taken from the other;
    facts in which the two differ, though their weights may not, are noted."""
    if not 0 <= tolerance < np.inf:
        raise LlmtoolError(f"tolerance {tolerance}: expected a finite number from 0 up")
    with (
        _open((a, layout_a, step_a), model_config, (b, layout_b, step_b)) as first,
        _open((b, layout_b, step_b), model_config, (a, layout_a, step_a)) as second,
    ):
        out = Diff(str(a), str(b), tolerance, notes=_other_facts(first.known_config(), second.known_config()))
        out.notes += [f"{side.path}: {note}" for side in (first, second) for note in side.notes]
        names = [_names(first), _names(second)]
        out.missing = [name for name in names[0] if name not in names[1]]
        out.extra = [name for name in names[1] if name not in names[0]]
        for name in names[0]:
            if name in names[1]:
                out.weights += 1
                _compare(name, names[0][name], names[1][name], first, second, out)
        return out


Side = tuple[str | Path, str | None, int | None]  # path, layout word, step


def _open(side: Side, told: str | ModelConfig | None, other: Side) -> Checkpoint:
    path, layout, step = side
    checkpoint = open_checkpoint(path, layout=layout, model_config=told, step=step)
    if checkpoint.config is None and told is None:
        checkpoint.close()
        with open_checkpoint(other[0], layout=other[1], step=other[2]) as sibling:
            if sibling.config is not None:
                heads = {name: getattr(sibling.config, name) for name in ("n_heads", "head_dim")}
                return open_checkpoint(path, layout=layout, step=step, expected=heads)
    return checkpoint


def _other_facts(a: ModelConfig, b: ModelConfig) -> list[str]:
    """What both know, differently, and no shape shows: the same weights then compute something else."""
    both = {name: (getattr(a, name), getattr(b, name)) for name in FACTS}
    if None not in both["rope_theta"]:  # who tells the base tells the scaling, or that there is none
        both["rope_scaling"] = (a.rope_scaling, b.rope_scaling)
    return [
        f"{name} is {x!r} in the first and {y!r} in the second; this compares weights, not what they compute"
        for name, (x, y) in both.items()
        if x != y and (None not in (x, y) or name == "rope_scaling")
    ]


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """Weight name -> the canonical weight that holds it: a tied output matrix is the embedding, transposed."""
    config = checkpoint.known_config()
    checkpoint.bounds  # noqa: B018  every problem of the files at once, before any value is read
    names = {weight.name: weight.name for weight in params.weights(config)}
    if config.tied:
        names["unembed.w"] = "embed"
    return names


def _compare(name: str, in_a: str, in_b: str, a: Checkpoint, b: Checkpoint, out: Diff) -> None:
    try:
        x, y = a.weight(in_a), b.weight(in_b)
    except LlmtoolError as error:
        raise type(error)(f"{name}: {error}") from error
    x, y = (x.T if in_a != name else x), (y.T if in_b != name else y)
    if x.shape != y.shape:
        out.mismatched.append({"weight": name, "shape_a": list(x.shape), "shape_b": list(y.shape)})
        return
    if x.dtype != y.dtype:
        out.dtypes.append({"weight": name, "dtype_a": str(x.dtype), "dtype_b": str(y.dtype)})
    worst, differing = 0.0, 0
    rows = max(1, BAND_BYTES // max(1, 8 * x[:1].size)) if x.ndim else 1
    for start in range(0, len(x), rows):
        p, q = x[start : start + rows], y[start : start + rows]
        wide = np.float64 if x.dtype.itemsize >= 4 or y.dtype.itemsize >= 4 else np.float32
        p, q = p.astype(wide), q.astype(wide)
        same = (p == q) | (np.isnan(p) & np.isnan(q))
        if same.all():
            continue
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(p - q))
        gap = np.where(np.isnan(gap), np.inf, gap)
        worst = max(worst, float(gap.max()))
        differing += int(np.count_nonzero(gap > out.tolerance))
    out.max_abs_diff = max(out.max_abs_diff, worst)
    if differing:
        out.mismatched.append(
            {
                "weight": name,
                "max_abs_diff": worst if np.isfinite(worst) else None,
                "values_differing": differing,
                "values": int(x.size),
            }
        )
