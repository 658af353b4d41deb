"""The target of a conversion: its full layout word, its table, its store and its sidecars."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmtool import axes
from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.layout_word import LAYOUTS, Word, parse_size
from llmtool.convert.layouts import hf, meta, native, te
from llmtool.convert.layouts.pax_glam import pax_table
from llmtool.convert.pax_folder import metadata_json
from llmtool.convert.plan import Plan
from llmtool.convert.row import Table
from llmtool.convert.sidecars.hf_config import config_to_hf
from llmtool.convert.sidecars.meta_params import params_from_config
from llmtool.convert.stores.base import Sink, TensorSpec
from llmtool.convert.stores.pickled import MetaSink
from llmtool.convert.stores.safetensors import SafetensorsSink
from llmtool.convert.stores.zarr import ZarrSink
from llmtool.errors import CannotHold, UnknownLayout
from llmtool.model_config import ModelConfig

LLAMA3_THETA = 500_000  # Llama 3 was the first to split its embedding by vocabulary, and to use this rope base


def full_word(word: Word, config: ModelConfig, source: Checkpoint) -> Word:
    """The target's layout word with every key that matters for this model: said, inherited or by default.

    From Pax to Pax or TE, what only describes the Pax model (repeat, rope, norm, format) is inherited."""
    if not LAYOUTS[word.name].writable:
        raise UnknownLayout(
            f"the {word.name} layout is read only; write one of: "
            + ", ".join(name for name, info in LAYOUTS.items() if info.writable)
        )
    mha = config.n_kv_heads == config.n_heads
    match word.name:
        case "hf":
            return word.with_(shard_size="5GB")
        case "meta":
            by_vocabulary = (config.rope_theta or 0) >= LLAMA3_THETA
            return word.with_(shards="1", split="vocab" if by_vocabulary else "width")
        case "pax" | "te":
            if source.layout in ("pax", "te"):
                kept = ("repeat", "rope", "norm", "format") + (("qkv",) if source.layout == word.name else ())
                word = word.with_(**{key: source.word.options[key] for key in kept if key in source.word.options})
            norm = "centred" if config.norm == "layernorm" else "direct"
            rope = "half" if config.family == "gpt_neox" else "interleaved"
            word = word.with_(repeat="no", rope=rope, norm=norm, format="zarr")
            mha = mha and config.family != "glam"
            if word.options.get("bias") == "pax" and (not mha or source.word.options.get("qkv") == "split"):
                word = Word(word.name, {**word.options, "bias": "pax_split"})  # they stay as they are in the source
            if word.name == "pax":
                return _relevant(word.with_(qkv="combined" if mha else "split"), config)
            word = word.with_(qkv="qkv_packed" if mha else "kv_packed", gate="act_first", bias="te", ln="te")
            return _relevant(word, config)
        case _:
            return word


def _relevant(word: Word, config: ModelConfig) -> Word:
    """The word without what makes no difference to this model, so that equal outputs have equal words."""
    options = {key: word.options[key] for key in LAYOUTS[word.name].keys if key in word.options}
    if not config.gated:
        options.pop("gate", None)
    if config.position not in ("rope", None):
        options.pop("rope", None)
    if "bias" in options and not (
        config.qkv_bias or config.attn_out_bias or config.mlp_bias or config.norm == "layernorm"
    ):
        options["bias"] = "te"
    return Word(word.name, options)


def table_of(word: Word, config: ModelConfig) -> Table:
    """The rows of the target. Raises CannotHold for what the variant cannot express."""
    options = word.options
    if options.get("qkv") in ("combined", "qkv_packed") and config.n_kv_heads != config.n_heads:
        raise CannotHold(
            f"{word.name}:qkv={options['qkv']} needs as many kv heads as heads; the model has "
            f"{config.n_kv_heads} and {config.n_heads}"
        )
    if word.name == "meta" and (shards := int(options["shards"])) > 1:  # Meta's code gives every rank whole heads
        for count, what in ((config.n_heads, "heads"), (config.n_kv_heads, "key/value heads")):
            if count % shards:
                raise CannotHold(f"meta:shards={shards} does not fit: {count} {what} do not divide into {shards}")
    match word.name:
        case "hf":
            return hf.table(config)
        case "meta":
            return meta.table(config, options["split"])
        case "native":
            return native.table(config)
    rope = options.get("rope", "interleaved")
    if word.name == "te" and config.family not in ("llama", "gpt"):
        raise CannotHold(
            f"the te layout cannot hold a {config.family} model: Transformer Engine's layer has no "
            "parallel residual, no partial rotary embedding and no experts in Pax"
        )
    if config.family == "mixtral":
        raise CannotHold("the pax layout cannot hold a mixtral model: praxis' experts drop tokens over their capacity")
    given: dict[str, Any] = {
        "repeat": options["repeat"] == "yes",
        "qkv": options["qkv"],
        "rope": rope,
        "norm": options["norm"],
    }
    if word.name == "pax":
        return pax_table(config, **given)
    return te.table(config, **given, gate=options.get("gate", "act_first"), bias=options["bias"], ln=options["ln"])


def open_sink(word: Word, folder: Path, plan: Plan, step: int) -> Sink:
    """The store that the plan's arrays go to, in a folder that is to become the target."""
    match word.name:
        case "hf":
            size = parse_size(word.options["shard_size"])
            assert size is not None
            return SafetensorsSink(folder, plan.targets, size)
        case "meta":
            axis = {bound.key: bound.row.shard_axis for bound in plan.target.bind(plan.config)}
            return MetaSink(folder, plan.targets, int(word.options["shards"]), lambda key, _: axis[key])
        case "native":
            folder = folder / "params"
            folder.mkdir()
            return ZarrSink(folder, plan.targets, _layer_chunks(plan))
    state = state_folder(word, folder, step)
    state.mkdir(parents=True, exist_ok=True)
    return ZarrSink(state, plan.targets, _kernel_chunks(word.number("chunk"), plan))


def state_folder(word: Word, folder: Path, step: int) -> Path:
    """Where a Pax target keeps its arrays."""
    match word.options["format"]:
        case "bare":
            return folder
        case "flat":
            return folder / "checkpoints" / f"checkpoint_{step:08d}"
    return folder / "checkpoints" / f"checkpoint_{step:08d}" / "state"


def _layer_chunks(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """One chunk a layer (and expert), so that a process restores its layers without the others."""
    out = {}
    for bound in plan.target.bind(plan.config):
        shape = plan.targets[bound.key].shape
        out[bound.key] = (1,) * len(bound.index) + shape[len(bound.index) :]
    return out


def _kernel_chunks(length: int | None, plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """NVIDIA's --kernel-chunk-size: rewritten kernels are cut along the model dimension."""
    out: dict[str, tuple[int, ...]] = {}
    for bound in plan.target.bind(plan.config) if length else ():
        groups: axes.Groups = bound.row.groups
        if bound.row.rewritten and ("D",) in groups:
            chunk = list(plan.targets[bound.key].shape)
            chunk[len(bound.index) + groups.index(("D",))] = min(length or 0, plan.config.d_model)
            out[bound.key] = tuple(chunk)
    return out


def check_sidecars(word: Word, config: ModelConfig, dtype: str, source: Checkpoint) -> Mapping[str, str]:
    """Text files of the target that say what the model is. Raises what the target's sidecar cannot say or lacks."""
    base = dict(source.sidecar) if source.sidecar is not None and source.layout == word.name else None
    match word.name:
        case "hf":
            return {"config.json": json.dumps(config_to_hf(config, dtype, base), indent=2) + "\n"}
        case "meta":
            return {"params.json": json.dumps(params_from_config(config, base)) + "\n"}
        case "native":
            return {"model.json": json.dumps({"schema": "llmtool.model/1", **config.to_json()}, indent=1) + "\n"}
    return {}


def finish_pax(word: Word, folder: Path, plan: Plan, step: int, step_dtype: np.dtype) -> None:
    """The step counter and the metadata of a Pax checkpoint."""
    spec = {"step": TensorSpec(step_dtype, ())}
    state = state_folder(word, folder, step)
    sink = ZarrSink(state, spec)
    sink.write("step", (), np.array(step, step_dtype))
    sink.close()
    if word.options["format"] == "zarr":
        metadata = state.parent / "metadata"
        metadata.mkdir()
        (metadata / "metadata").write_text(metadata_json(plan.targets), encoding="utf-8")
