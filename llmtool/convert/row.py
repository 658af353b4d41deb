"""A row of a layout table: how one stored array keeps one or several logical weights.

A row is read in both directions by one function: :meth:`Row.views` looks at a stored array and gives, for every
weight in it, a view with the weight's canonical axes. Reading takes values out of such views, writing puts values
into them; no inverse is written anywhere.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmtool import axes, params
from llmtool.model_config import ModelConfig

JOIN = "J"
_INDEX = re.compile(r"(?P<key>.*?)(?:\[(?P<index>[^\]]*)\])?", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One stored array (or one slice of a stacked one) of a layout.

    ``slot`` is its key in the files; ``{l}`` is the absolute layer, ``{i}``/``{j}`` the repeat of the layer's block
    and its place in the block, ``{e}`` an expert; ``key[{i}]`` is a slice along a leading axis. ``parts`` maps each
    weight to the axes that it takes along the join letter J ("" is one entry); ``shift`` is added to a weight on the
    way into the layout (a zero-centred norm scale: -1). ``shard_axis`` is the dimension that Meta's ranks split.
    """

    slot: str
    pattern: str
    parts: Mapping[str, str]
    shift: float = 0.0
    shard_axis: int | None = None
    copy_of: str | None = None  # another row already holds the same weight: written as a copy, compared when read
    optional: bool = False  # may be absent when read; never written
    rewritten: bool = True  # NVIDIA's converter rewrites this kernel (it then gets --kernel-chunk-size)

    @property
    def groups(self) -> axes.Groups:
        return axes.parse(self.pattern)

    def widths(self, sizes: Mapping[str, int]) -> list[int]:
        """How much of J each part takes."""
        return [math.prod(sizes[axis] for axis in span.split()) for span in self.parts.values()]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The stored shape of one slot."""
        return axes.shape(self.groups, {**sizes, JOIN: sum(self.widths(sizes))})

    def views(self, x: np.ndarray, sizes: Mapping[str, int], rope: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Template of each weight -> a view of the stored ``x`` with its canonical axes (rope HALVES)."""
        widths = self.widths(sizes)
        x = axes.opened(x, self.groups, {**sizes, JOIN: sum(widths)})
        names = axes.flat(self.groups)
        out, start = {}, 0
        for (template, span), width in zip(self.parts.items(), widths, strict=True):
            part, start = x, start + width
            if JOIN in names:
                part = part[(slice(None),) * names.index(JOIN) + (slice(start - width, start),)]
            spans = {JOIN: tuple(span.split())} | ({"H": rope} if template in params.ROTATED else {})
            groups = axes.substitute(tuple((name,) for name in names), spans)
            have = axes.flat(groups)
            part = part.reshape([sizes[axis] for axis in have])
            out[template] = axes.ordered(part, have, axes.flat(params.pattern(template)))
        return out


def keep(slot: str, pattern: str, template: str, **facts: Any) -> Row:
    """A row that holds one weight."""
    return Row(slot, pattern, {template: ""}, **facts)


@dataclass(frozen=True)
class Bound:
    """A row pinned to one layer (and expert)."""

    row: Row
    key: str
    index: tuple[int, ...]
    names: Mapping[str, str]  # template -> weight name

    @property
    def slot(self) -> str:
        """Key and index as text, as in messages and the manifest."""
        return self.key + (f"[{','.join(map(str, self.index))}]" if self.index else "")


def slot_key(slot: str) -> tuple[str, tuple[int, ...]]:
    """``"key[3,0]"`` -> ``("key", (3, 0))``: the inverse of :attr:`Bound.slot`."""
    match = _INDEX.fullmatch(slot)
    assert match is not None
    return match["key"], tuple(int(n) for n in match["index"].split(",")) if match["index"] else ()


@dataclass(frozen=True)
class Table:
    """A layout's rows for one model, and the order in which it keeps the features that rope turns."""

    name: str
    rows: tuple[Row, ...]
    rope: tuple[str, ...] = params.HALVES
    ignored: tuple[str, ...] = ()  # patterns of keys that carry nothing a model needs
    notes: tuple[str, ...] = ()

    def bind(self, config: ModelConfig) -> list[Bound]:
        """Every slot of a model of this config: rows without their weight in this model fall away."""
        present = {weight.name for weight in params.weights(config)}
        before: list[Row] = []
        inside: list[Row] = []
        after: list[Row] = []
        for row in self.rows:
            (inside if "{l}" in next(iter(row.parts)) else after if inside else before).append(row)
        out = [bound for row in before for bound in _bind(row, config, present, None)]
        for layer in range(config.n_layers):
            out += [bound for row in inside for bound in _bind(row, config, present, layer)]
        return out + [bound for row in after for bound in _bind(row, config, present, None)]

    def is_ignored(self, key: str) -> bool:
        """Whether a stored key is known to carry nothing."""
        return any(re.fullmatch(pattern, key) for pattern in self.ignored)


def _bind(row: Row, config: ModelConfig, present: Iterable[str], layer: int | None) -> Iterator[Bound]:
    experts = range(config.n_experts) if "{e}" in next(iter(row.parts)) else (None,)
    for expert in experts:
        facts = {"l": layer, "e": expert}
        if layer is not None:
            facts |= {"i": layer // config.block_period, "j": layer % config.block_period}
        names = {template: template.format(**facts) for template in row.parts}
        held = [name in present for name in names.values()]
        if all(held):
            yield Bound(row, *slot_key(row.slot.format(**facts)), names)
        else:
            assert not any(held), f"{row.slot} holds weights of which this model has only some: {names}"


@dataclass
class StoredShapes:
    """The full shape of every stored array, gathered from its slots."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, bounds: Iterable[Bound], sizes: Mapping[str, int]) -> "StoredShapes":
        leading: dict[str, tuple[int, ...]] = {}
        inner: dict[str, tuple[int, ...]] = {}
        for bound in bounds:
            seen = leading.get(bound.key, (0,) * len(bound.index))
            leading[bound.key] = tuple(max(a, b + 1) for a, b in zip(seen, bound.index, strict=True))
            inner[bound.key] = bound.row.shape(sizes)
        return cls({key: leading[key] + inner[key] for key in leading})
