"""Decide everything about a conversion from names, shapes and dtypes alone, before a byte of a weight is read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from llmtool import params
from llmtool.convert.row import Bound, StoredShapes, Table
from llmtool.convert.stores.base import DTYPES, TensorSpec
from llmtool.errors import PlanError
from llmtool.model_config import ModelConfig

WEIGHT_DTYPES = frozenset(
    DTYPES[name] for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
)


@dataclass(frozen=True)
class Step:
    """The smallest set of reads that completes a set of writes. Memory is bounded by the largest step."""

    reads: tuple[Bound, ...]
    writes: tuple[Bound, ...]


@dataclass(frozen=True)
class Plan:
    """A conversion, decided. ``targets`` are the stored arrays of the target in file order."""

    source: Table
    target: Table
    config: ModelConfig
    steps: tuple[Step, ...]
    targets: Mapping[str, TensorSpec]
    dtypes: Mapping[str, np.dtype]  # weight name -> dtype that it has, or had before a layout widened it
    widened: Mapping[str, np.dtype]  # weight name -> dtype before this conversion widened it
    bytes_read: int

    @property
    def sizes(self) -> dict[str, int]:
        return params.sizes(self.config)


def check_source(table: Table, config: ModelConfig, tensors: Mapping[str, TensorSpec]) -> tuple[list[Bound], list[str]]:
    """The slots that the files hold, and everything in which the files differ from what the table expects."""
    bounds = table.bind(config)
    expected = StoredShapes.of(bounds, params.sizes(config)).shapes
    optional = {bound.key for bound in bounds if bound.row.optional}
    problems = [
        f"unknown array {key} {list(tensors[key].shape)}: no row of the {table.name} layout names it"
        for key in tensors
        if key not in expected and not table.is_ignored(key)
    ]
    for key, shape in expected.items():
        if key not in tensors:
            problems += [] if key in optional else [f"missing array {key}: expected shape {list(shape)}"]
        elif tensors[key].shape != shape:
            problems.append(f"array {key} has shape {list(tensors[key].shape)}; the model's sizes mean {list(shape)}")
        elif tensors[key].dtype not in WEIGHT_DTYPES:
            problems.append(
                f"array {key} holds {tensors[key].dtype}, not floating-point weights (a quantised checkpoint?)"
            )
    return [bound for bound in bounds if bound.key in tensors], problems


def make_plan(
    source: Table,
    target: Table,
    config: ModelConfig,
    tensors: Mapping[str, TensorSpec],
    *,
    dtype: np.dtype | None = None,
    restore: Mapping[str, np.dtype] | None = None,
    title: str = "cannot convert",
) -> Plan:
    """Match the two tables. ``dtype``: of every target array, or None to keep what each weight has; ``restore``:
    dtypes that weights had before an earlier conversion widened them. Raises PlanError with every problem found."""
    reads, problems = check_source(source, config, tensors)
    writes = [bound for bound in target.bind(config) if not bound.row.optional]
    wanted = [weight.name for weight in params.weights(config)]
    givers = {name: read for read in reads if not read.row.copy_of for name in read.names.values()}
    takers = {name for write in writes for name in write.names.values()}
    problems += [f"the {target.name} layout has no place for {name}" for name in wanted if name not in takers]
    if config.rotary_fraction != 1 and source.rope != target.rope:
        problems.append(
            f"rope turns {config.rotary_fraction:.0%} of each head, and the {source.name} and {target.name} "
            "layouts order turned features differently"
        )
    if problems:
        raise PlanError(f"{title}: {len(problems)} problem{'s' if len(problems) > 1 else ''}", problems)

    own = {name: tensors[read.key].dtype for name, read in givers.items()}
    before = own | dict(restore or {})
    shifts = {name: read.row.shift for name, read in givers.items()}
    targets: dict[str, TensorSpec] = {}
    widened: dict[str, np.dtype] = {}
    shapes = StoredShapes.of(writes, params.sizes(config)).shapes
    stored: dict[str, np.dtype] = {}
    for write in writes:
        names = list(write.names.values())
        shifted = [name for name in names if shifts[name] != write.row.shift]
        kept = common_dtype((before if shifted else own)[name] for name in names)
        if dtype is None and kept.itemsize < 4 and any(before[name] == own[name] for name in shifted):
            widened |= dict.fromkeys(names, kept)
            kept = np.dtype(np.float32)  # adding 1 to a half-precision value would lose bits
        elif not shifted:
            widened |= {name: before[name] for name in names if before[name] != own[name]}
        stored[write.key] = common_dtype([stored.get(write.key, dtype or kept), dtype or kept])
    for key, shape in shapes.items():
        targets[key] = TensorSpec(stored[key], shape)
    steps = tuple(_steps(reads, writes))
    return Plan(
        source,
        target,
        config,
        steps,
        targets,
        before,
        widened,
        sum(tensors[key].nbytes for key in {read.key for read in reads}),
    )


def common_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """The smallest dtype that holds every value of all of them."""
    out: np.dtype | None = None
    for dtype in dtypes:
        out = dtype if out in (None, dtype) else np.dtype(np.float64 if np.float64 in (out, dtype) else np.float32)
    assert out is not None
    return out


def _steps(reads: list[Bound], writes: list[Bound]) -> Iterable[Step]:
    """Group slots that travel together: a packed array on either side ties its weights."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for bound in (*writes, *reads):
        first, *rest = bound.names.values()
        for other in rest:
            parent[find(other)] = find(first)
    groups: dict[str, tuple[list[Bound], list[Bound]]] = {}
    for side, bounds in enumerate((reads, writes)):
        for bound in bounds:
            groups.setdefault(find(next(iter(bound.names.values()))), ([], []))[side].append(bound)
    order = {id(write): position for position, write in enumerate(writes)}
    steps = [Step(tuple(r), tuple(w)) for r, w in groups.values()]
    return sorted(steps, key=lambda step: order[id(step.writes[0])])
