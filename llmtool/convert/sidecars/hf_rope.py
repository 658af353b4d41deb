"""The rope facts of a config.json, in the spelling of transformers 4 and of transformers 5."""

from collections.abc import Mapping
from typing import Any

from llmtool.convert.sidecars.json_file import Fields
from llmtool.errors import BadCheckpoint, CannotHold, Contradiction
from llmtool.model_config import ModelConfig, RopeScaling

_BLOCKS = ("rope_parameters", "rope_scaling")
_THETA = ("rope_theta", "rotary_emb_base")
_FRACTION = ("partial_rotary_factor", "rotary_pct")
KEYS = frozenset((*_BLOCKS, *_THETA, *_FRACTION))
# key of config.json: field of RopeScaling
_LLAMA3 = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
           "original_max_position_embeddings": "original_context"}
_BLOCK_KEYS = frozenset((*_LLAMA3, "rope_type", "type", *_THETA, *_FRACTION))
_DEFAULT_THETA = {"mixtral": 1e6}     # every other type: 10000
_DEFAULT_FRACTION = {"gpt_neox": 0.25}  # every other type: the whole head


def read(fields: Fields, model_type: str, head_dim: int, assumed: list[str]) -> dict[str, Any]:
    """rope_theta, rope_scaling and rotary_fraction; defaults that were taken are appended to ``assumed``."""
    blocks = [block for key in _BLOCKS if (block := fields.object(key)) is not None]
    for block in blocks:
        if any(isinstance(value, Mapping) for value in block.data.values()):
            raise CannotHold(f"{block.where}: differs between types of layers, which llmtool's models do not")
    scalings = [_scaling(block) for block in blocks]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise Contradiction(f"{fields.where}: rope_parameters and rope_scaling disagree; keep one")
    theta = _one([*blocks, fields], _THETA)
    if theta is None:
        theta = _DEFAULT_THETA.get(model_type, 1e4)
        assumed.append(f"rope_theta ({theta:g})")
    fraction = _one([*blocks, fields], _FRACTION)
    if fraction is None:
        fraction = _DEFAULT_FRACTION.get(model_type, 1.0)
    turned = int(head_dim * fraction)
    if fraction > 1 or turned < 2 or turned % 2:
        raise BadCheckpoint(f"{fields.where}: rope would turn {turned} of the {head_dim} features of a head; "
                            "expected an even number of them")
    if fraction < 1 and model_type != "gpt_neox":
        raise CannotHold(f"{fields.where}: rope turns only {fraction:g} of each head, which {model_type} models do not")
    return {"rope_theta": theta, "rope_scaling": scalings[0] if scalings else None, "rotary_fraction": fraction}


def _one(places: list[Fields], keys: tuple[str, ...]) -> float | None:
    """The one value of a number that may stand in several places."""
    found = {f"{place.where}: {key}": value for place in places for key in keys
             if (value := place.number(key)) is not None}
    if len(set(found.values())) > 1:
        raise Contradiction(" but ".join(f"{place} is {value:g}" for place, value in found.items()) + "; keep one")
    return next(iter(found.values()), None)


def _scaling(block: Fields) -> RopeScaling | None:
    kind = block.text("rope_type") or block.text("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise CannotHold(f"{block.where}: rope scaling {kind!r}; llmtool's models know 'llama3' and 'default'")
    block.need(*_LLAMA3)
    values = {field: block.number(key) for key, field in _LLAMA3.items()}
    values["original_context"] = block.count("original_max_position_embeddings")
    if not values["low_freq_factor"] < values["high_freq_factor"]:  # type: ignore[operator]
        raise BadCheckpoint(f"{block.where}: low_freq_factor is not below high_freq_factor")
    return RopeScaling(**values)  # type: ignore[arg-type]


def write(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """The rope facts as transformers 4 spells them."""
    scaling = config.rope_scaling
    block = scaling and {"rope_type": "llama3", **{key: getattr(scaling, field) for key, field in _LLAMA3.items()}}
    if model_type == "gpt_neox":
        return {"rotary_emb_base": config.rope_theta, "rotary_pct": config.rotary_fraction, "rope_scaling": block}
    return {"rope_theta": config.rope_theta, "rope_scaling": block}


def unknown_in_blocks(data: Mapping[str, Any]) -> list[str]:
    """Keys of the rope blocks that nothing reads, as ``block.key``."""
    return [f"{name}.{key}" for name in _BLOCKS if isinstance(block := data.get(name), Mapping)
            for key in sorted(set(block) - _BLOCK_KEYS)]
