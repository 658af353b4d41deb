"""What ``--model-config FILE|PRESET`` means: a config.json, a params.json, our own file, a manifest, or a preset."""

import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool import presets
from llmtool.convert.facts import Facts, known_facts
from llmtool.convert.sidecars.hf_config import config_from_hf
from llmtool.convert.sidecars.json_file import MOST_PARTS, read_json
from llmtool.convert.sidecars.meta_params import config_from_params
from llmtool.errors import BadCheckpoint, Contradiction, UnknownPreset
from llmtool.model_config import ModelConfig, RopeScaling

SCHEMA = "llmtool.model/1"
_ANY = presets.preset("gpt2")  # any model: its fields are those of all
NAMES = ("llmtool-manifest.json", "config.json", "params.json")  # tried in this order in a folder


def load_model_config(
    text: str, *, d_ff: int | None = None, vocab_size: int | None = None, notes: list[str] | None = None
) -> ModelConfig:
    """The model that ``text`` names: a path that exists (a file, or a folder with one), else a preset.

    ``d_ff`` and ``vocab_size``, where the weights tell them, complete a params.json. Raises UnknownPreset with the
    nearest names where nothing is called so.
    """
    path = Path(text)
    if path.is_dir():
        found = [path / name for name in NAMES if (path / name).is_file()]
        if not found:
            raise UnknownPreset(f"{path}: a folder without any of {', '.join(NAMES)}; give a file or a preset's name")
        path = found[0]
    elif not path.exists():
        if text in presets.MODELS:
            return presets.preset(text)
        raise UnknownPreset(f"{text!r} is neither a file nor a preset; {presets.near(text)}")
    data, where = read_json(path), str(path)
    inner = data.get("model")
    if data.get("schema") == SCHEMA:
        return config_from_ours({key: value for key, value in data.items() if key != "schema"}, where)
    if isinstance(inner, Mapping) and "family" in inner:
        return config_from_ours(inner, f"{where}: model")
    if "model_type" in data or "architectures" in data:
        return config_from_hf(data, where, notes)
    if "dim" in data or (isinstance(inner, Mapping) and "dim" in inner):
        return config_from_params(data, where, d_ff=d_ff, vocab_size=vocab_size, notes=notes)
    raise BadCheckpoint(
        f"{where}: holds no model config that we know; expected model_type (Hugging Face), dim (Meta), "
        f'or "schema": "{SCHEMA}" (ours)'
    )


def load_facts(text: str) -> Facts:
    """The facts that ``text`` names: as :func:`load_model_config`, and a JSON file of ours may hold a few alone, such
    as ``{"norm_eps": 1e-5}`` for a Pax folder that lacks no other."""
    path = Path(text)
    if path.is_file():
        data = read_json(path)
        ours = {key: value for key, value in data.items() if key != "schema"}
        if data.get("schema") == SCHEMA or ("schema" not in data and ours.keys() <= vars(_ANY).keys() and ours):
            return {name: value for name, value in _checked(ours, str(path)).items() if value is not None}
    return known_facts(load_model_config(text))


def config_from_ours(data: Mapping[str, Any], where: str) -> ModelConfig:
    """A ModelConfig from its own JSON, with the type of every field checked."""
    _checked(data, where)
    return ModelConfig.from_json(dict(data), where)


def _checked(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a ModelConfig as it holds them, each of the right type; an unknown one is an error."""
    if strange := sorted(data.keys() - vars(_ANY).keys()):
        raise Contradiction(f"{where}: unknown model config fields: {', '.join(strange)}")
    for name, hint in typing.get_type_hints(ModelConfig).items():
        if name in data and not _fits(data[name], hint):
            raise BadCheckpoint(f"{where}: {name} is {str(data[name])[:60]!r}; expected {_words(hint)}")
    scaling = data.get("rope_scaling") or {}
    if strange := sorted(scaling.keys() - typing.get_type_hints(RopeScaling).keys()):
        raise Contradiction(f"{where}: unknown fields of rope_scaling: {', '.join(strange)}")
    for name, hint in typing.get_type_hints(RopeScaling).items() if scaling else ():
        if name not in scaling or not _fits(scaling[name], hint):
            raise BadCheckpoint(
                f"{where}: rope_scaling.{name} is {str(scaling.get(name))[:60]!r}; expected {_words(hint)}"
            )
    for name in ("n_layers", "n_experts"):
        if data.get(name, 0) > MOST_PARTS:
            raise BadCheckpoint(f"{where}: {name} is {data[name]}; expected at most {MOST_PARTS}")
    out = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return out | ({"rope_scaling": RopeScaling(**scaling)} if scaling else {})


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value can be a field annotated ``hint``."""
    match typing.get_origin(hint):
        case typing.Literal:
            return value in typing.get_args(hint)
        case types.UnionType | typing.Union:
            return any(_fits(value, choice) for choice in typing.get_args(hint))
        case origin if origin is tuple:
            return isinstance(value, list | tuple) and all(type(item) is int for item in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, Mapping) if hint is RopeScaling else type(value) is hint


def _words(hint: Any) -> str:
    """An annotation as an error message says it."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return " or ".join(_words(choice) for choice in typing.get_args(hint)) or getattr(hint, "__name__", str(hint))
