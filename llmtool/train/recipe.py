"""A named run whose every number knows its source."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmtool.errors import BadRun
from llmtool.model_config import ModelConfig
from llmtool.train.config import RunConfig
from llmtool.train.overrides import paths, with_values

DEFAULT = "llmtool's default"


@dataclass(frozen=True)
class Layer:
    """Choices (path -> value) that one source makes."""

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A run as layers of choices, the later over the earlier. Called, it gives the RunConfig.

    ``strict`` is laid on top where one asks for what Pax' code does, against what its page says; None for runs that
    do not come from Pax.
    """

    name: str
    summary: str
    model: ModelConfig
    model_source: str
    layers: tuple[Layer, ...]
    strict: tuple[Layer, ...] | None = None
    notes: tuple[str, ...] = ()

    def __call__(self, strict_pax: bool = False) -> RunConfig:
        values = {path: value for layer in self._laid(strict_pax) for path, value in layer.values.items()}
        return with_values(RunConfig(self.name, self.model, notes=self.notes), values)

    def provenance(self, strict_pax: bool = False) -> dict[str, str]:
        """Where each choice comes from: path -> source, ``model`` for the model's facts as a whole."""
        chosen = {path: layer.source for layer in self._laid(strict_pax) for path in layer.values}
        named = [path for path in paths() if path not in ("name", "notes") and not path.startswith("model.")]
        return {"model": self.model_source} | {path: chosen.get(path, DEFAULT) for path in named}

    def over(self, name: str, summary: str, *layers: Layer, notes: tuple[str, ...] = ()) -> "Recipe":
        """A recipe derived from this one by more layers, which also win over the strict ones."""
        strict = None if self.strict is None else (*self.strict, *layers)
        return replace(self, name=name, summary=summary, layers=(*self.layers, *layers), strict=strict,
                       notes=(*self.notes, *notes))

    def _laid(self, strict_pax: bool) -> tuple[Layer, ...]:
        if not strict_pax:
            return self.layers
        if self.strict is None:
            raise BadRun(f"{self.name} does not come from Pax: --strict-pax is for gpt-* and glam-*")
        return self.layers + self.strict
