"""From what the files tell, what the user tells and what a layout takes for granted to one model config."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtool.convert.sidecars.json_file import model_of
from llmtool.errors import Contradiction
from llmtool.model_config import ModelConfig

Facts = dict[str, Any]
_FIELDS = {f.name: f for f in dataclasses.fields(ModelConfig)}
_REQUIRED = [name for name, f in _FIELDS.items() if f.default is dataclasses.MISSING]


@dataclass
class Resolved:
    """A model config, or None while sizes that every config needs are unknown; and what was assumed or is missing."""

    config: ModelConfig | None
    facts: Facts
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve(
    where: str,
    found: Mapping[str, Any],
    *,
    told: Facts | None = None,
    expected: Mapping[str, Any] | None = None,
    recorded: ModelConfig | None = None,
    assumed: Mapping[str, Any] | None = None,
    whose: str = "",
) -> Resolved:
    """Put facts together. The files come first; ``told`` (--model-config) and ``expected`` (flags) may add to them
    and may not contradict them; ``recorded`` (a manifest) fills gaps, and so does ``assumed``, which is noted with
    ``whose`` it is."""
    facts = {name: value for name, value in found.items() if value is not None}
    problems = []
    for source, values in (
        ("the model config given", told or {}),
        ("the flags", dict(expected or {})),
    ):
        for name, value in values.items():
            if value is None:
                continue
            if name in facts and facts[name] != value:
                problems.append(f"{name} is {facts[name]!r} in {where}, but {value!r} in {source}")
            facts.setdefault(name, value)
    if problems:
        raise Contradiction(
            "\n".join(problems) if len(problems) == 1 else "facts disagree:\n  - " + "\n  - ".join(problems)
        )
    if recorded is not None:
        for name in _FIELDS:
            if getattr(recorded, name) is not None:
                facts.setdefault(name, getattr(recorded, name))
    taken = []
    for name, value in (assumed or {}).items():
        if facts.get(name) is None:
            facts[name] = value
            taken.append(f"{name} {value}")
    notes = [f"not in the files, and taken from what {whose} have: {', '.join(taken)}"] if taken else []
    missing = [name for name in _REQUIRED if name not in facts and name != "position"]
    facts.setdefault("position", None)
    config = None if missing else model_of(facts, where)
    optional = {"norm_eps": True, "rope_theta": facts.get("position") == "rope", "activation": True, "position": True}
    missing += [name for name, needed in optional.items() if needed and facts.get(name) is None]
    return Resolved(config, facts, missing, notes)


def known_facts(config: ModelConfig) -> Facts:
    """The fields of a config that are known."""
    return {name: value for name, value in vars(config).items() if value is not None}
