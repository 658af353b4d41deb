"""Open a Hugging Face folder (or one safetensors file beside its config.json)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.facts import Facts, resolve
from llmtool.convert.layout_word import Word
from llmtool.convert.layouts import hf
from llmtool.convert.manifest import manifest_of
from llmtool.convert.row import StoredShapes
from llmtool.convert.sidecars.hf_config import config_from_hf
from llmtool.convert.sidecars.json_file import read_json
from llmtool.convert.stores.absent import AbsentSource
from llmtool.convert.stores.base import DTYPES, Source, TensorSpec
from llmtool.convert.stores.pickled import TorchSource
from llmtool.convert.stores.safetensors import SafetensorsSource
from llmtool.errors import BadCheckpoint, MissingFact
from llmtool.model_config import ModelConfig
from llmtool.params import sizes

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def recognises(path: Path) -> bool:
    """Whether a path looks like this layout."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return path.is_dir() and (
        (path / "config.json").is_file()
        or any((path / name).exists() for name in INDICES)
        or any(path.glob("*.safetensors"))
        or any(path.glob("pytorch_model*.bin"))
    )


def open_hf(path: Path, word: Word, told: Facts | None, expected: Mapping[str, Any]) -> Checkpoint:
    """Headers and config of a Hugging Face checkpoint."""
    root = path if path.is_dir() else path.parent
    config_path = root / "config.json"
    data = dict(read_json(config_path)) if config_path.is_file() else None
    notes: list[str] = []
    remarks: list[str] = []
    if data is not None:
        found = dict(vars(config_from_hf(data, str(config_path), remarks)))
        rope = data.get("rope_parameters")
        if "rope_theta" not in data and "rope_theta" not in (rope if isinstance(rope, dict) else {}):
            found |= {name: told[name] for name in ("rope_theta",) if told and name in told}  # a default gives way
    elif told is not None:
        found = {}
    else:
        raise MissingFact(f"{root}: no config.json beside the weights; put it there or give --model-config FILE|PRESET")
    facts = resolve(str(config_path), found, told=told, expected=expected)
    if facts.config is None:
        raise MissingFact(
            f"{root}: there is no config.json, and the model config given does not tell {', '.join(facts.missing)}"
        )
    config = facts.config
    source = _source(path, root, config, data or {}, notes)
    prefix = "" if any(key.startswith(("h.0.", "wte.")) for key in source.tensors) else "transformer."
    for name in getattr(source, "ignored_files", ()):
        notes.append(f"{name} is not named by the index and was not read")
    return Checkpoint(
        path=path,
        word=word.found(str(path)),
        source=source,
        facts=facts.facts,
        config=config,
        root=root,
        build_table=lambda config: hf.table(config, prefix),
        manifest=manifest_of(root, source.tensors, notes),
        sidecar=data,
        missing_facts=facts.missing,
        notes=notes,
        remarks=remarks + facts.notes,
    )


def _source(path: Path, root: Path, config: ModelConfig, data: Mapping[str, Any], notes: list[str]) -> Source:
    if path.is_file() or any(root.glob("*.safetensors")):
        return SafetensorsSource(path)
    if any(root.glob("*.bin")):
        return TorchSource.from_hf_folder(root)
    dtype = DTYPES.get(str(data.get("torch_dtype") or data.get("dtype")), DTYPES["float32"])
    bounds = [bound for bound in hf.table(config).bind(config) if not bound.row.optional]
    shapes = StoredShapes.of(bounds, sizes(config)).shapes
    names = {name for index in INDICES if (root / index).is_file() for name in _weight_map(root / index)}
    tensors = {key: TensorSpec(dtype, shape) for key, shape in shapes.items() if not names or key in names}
    tensors |= {name: TensorSpec(dtype, ()) for name in sorted(names - tensors.keys())}
    notes.append(
        "the weights are not here: shapes follow from config.json" + (", names from the index" if names else "")
    )
    return AbsentSource(root, tensors, "the weight files are missing")


def _weight_map(path: Path) -> Mapping[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict):
        raise BadCheckpoint(f"{path}: no weight_map; expected a table of tensor names and files")
    return names
