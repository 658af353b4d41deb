"""The training steps that praxis took (``fixtures/golden/praxis_train``), in our names and words."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmtool import params
from llmtool.convert import open_checkpoint
from llmtool.convert.layouts.pax_glam import pax_table
from llmtool.model_config import ModelConfig
from llmtool.native_tree import address, entries
from llmtool.train.batch import Batch
from llmtool.train.config import DataConfig, OptimizerConfig, RunConfig, ScheduleConfig

FIXTURES = Path(__file__).parent / "fixtures"
FOLDER = FIXTURES / "golden" / "praxis_train"
CASES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Golden:
    """One case: the run that it was, its one batch, the weights before and after, gradients and six steps' numbers."""

    run: RunConfig
    batch: Batch
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    steps: list[dict[str, Any]]


def golden(case: str) -> Golden:
    name, _, kind = case.partition("__")
    told, arrays = json.loads((FOLDER / f"{case}.json").read_text()), dict(np.load(FOLDER / f"{case}.npz"))
    config = _config(name)
    glam, factor, words = config.family == "glam", re.search(r"cf([\d.]+)", kind), told["optimizer"]
    aux = {"oracleloss": 0.01, "presetloss": 0.01 / (config.n_layers // 2)}.get(kind.rpartition("_")[2], 0.0)
    run = RunConfig(
        case, config,
        OptimizerConfig("pax", words["learning_rate"], words["beta1"], words["beta2"], words["epsilon"],
                        words["epsilon_root"], words["weight_decay"], words["clip_gradient_norm_to_value"]),
        ScheduleConfig("pax", 2, 3, 20, 0.1),
        # The LLaMA presets ignore segment ids.
        DataConfig(pipeline="pax" if config.family == "llama" else "packed"),
        steps=6, seq_len=arrays["in.ids"].shape[1], batch_per_device=2, strategy="ddp", precision="fp32",
        capacity_factor=float(factor[1]) if factor else None,
        aux_loss_weight=aux, z_loss_weight=1e-4 if "oracleloss" in kind else 0.0,
        loss_over="all" if glam else "counted",
    )  # fmt: skip
    batch = Batch(*(arrays[f"in.{key}"] for key in ("ids", "labels", "weights", "segment_ids", "segment_pos")))
    return Golden(run, batch, _ours(arrays, "param_after1.", config), _ours(arrays, "param_after6.", config),
                  _ours(arrays, "grad0.", config), told["steps"])  # the first step has learning rate 0


def _config(name: str) -> ModelConfig:
    oracle = FIXTURES / "oracle" / name
    if not oracle.exists():  # repeats of a model that is there unrolled
        oracle = FIXTURES / "oracle" / name.removesuffix("_repeat")
    with open_checkpoint(oracle) as checkpoint:
        config = checkpoint.known_config()
    return replace(config, norm_eps=1e-6 if config.family == "glam" else 1e-5,
                   rope_theta=1e4 if config.position == "rope" else None)


def _ours(arrays: dict[str, np.ndarray], prefix: str, config: ModelConfig) -> dict[str, np.ndarray]:
    """Pax's arrays as those of the native tree."""
    stored = {"mdl_vars.params." + key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    table = pax_table(
        config, repeat=any(".repeat." in key for key in stored),
        qkv="combined" if any("combined_qkv" in key for key in stored) else "split",
        rope="interleaved", norm="centred" if config.norm == "layernorm" else "direct")
    found: dict[str, np.ndarray] = {}
    for bound in table.bind(config):
        if bound.key in stored:
            views = bound.row.views(stored[bound.key][bound.index], params.sizes(config), table.rope)
            shift = bound.row.shift if prefix.startswith("param") else 0.0
            found |= {bound.names[template]: view - np.float32(shift) for template, view in views.items()}
    out = {key: np.zeros(entry.shape, np.float32) for key, entry in entries(config).items()}
    for weight in params.weights(config):
        key, index = address(weight, config)
        out[key][index] = found[weight.name].reshape(out[key][index].shape)
    return out
