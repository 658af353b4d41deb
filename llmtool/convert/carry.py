"""Carry out a plan, one step in memory at a time: look at the source, fill the target's buffers, write them.

Reading, permuting and packing are views. The one copy is the one into the output buffer, which is filled in bands
along the target's first axis, so that memory does not follow the size of an array.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from llmtool import axes, params
from llmtool.convert.casting import CastCount, cast_into
from llmtool.convert.kernels import copy_into
from llmtool.convert.plan import Plan
from llmtool.convert.row import JOIN, Bound, Row, Table
from llmtool.convert.stores.base import Sink, Source
from llmtool.convert.stores.files import octets
from llmtool.errors import BadCheckpoint

BAND_BYTES = 32 << 20
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Held:
    """A weight on its way: a view with canonical axes, what its layout added to it, and what rounding took from it."""

    view: np.ndarray
    shift: float = 0.0
    remainder: np.ndarray | None = None

    def exact(self) -> np.ndarray:
        """The weight plus its layout's shift as float64, with the remainder put back."""
        wide = self.view.astype(np.float64)
        return wide if self.remainder is None else wide + self.remainder


@dataclass
class Carried:
    """What happened: a hash of every slot, what casts changed, and what rounding took from shifted scales."""

    hashes: dict[str, str] = field(default_factory=dict)
    casts: dict[str, CastCount] = field(default_factory=dict)
    remainders: dict[str, np.ndarray] = field(default_factory=dict)
    bytes_written: int = 0


def carry(
    plan: Plan, source: Source, sink: Sink, *, remainders: Mapping[str, np.ndarray], progress: Progress | None = None
) -> Carried:
    """Write every target slot of the plan to ``sink``. ``remainders``: by source slot, from an earlier conversion."""
    done = Carried()
    for step in plan.steps:
        held = take(step.reads, source, plan.source, plan.sizes, remainders)
        for write in step.writes:
            _write(write, held, plan, sink, done)
        if progress is not None:
            progress(
                step.writes[0].slot,
                sum(
                    source.tensors[r.key].dtype.itemsize * np.prod(r.row.shape(plan.sizes), dtype=int)
                    for r in step.reads
                ),
            )
    return done


def take(
    reads: tuple[Bound, ...],
    source: Source,
    table: Table,
    sizes: Mapping[str, int],
    remainders: Mapping[str, np.ndarray],
) -> dict[str, Held]:
    """Weight name -> what the source slots hold of it. A second copy of a weight must equal the first."""
    held: dict[str, Held] = {}
    for read in sorted(reads, key=lambda read: read.row.copy_of is not None):
        views = read.row.views(source.read(read.key, read.index), sizes, table.rope)
        rest = remainders.get(read.slot)
        rests = read.row.views(rest, sizes, table.rope) if rest is not None else {}
        for template, name in read.names.items():
            if name in held:
                _same(held[name].view, views[template], read)
            else:
                held[name] = Held(views[template], read.row.shift, rests.get(template))
    return held


def _same(first: np.ndarray, second: np.ndarray, read: Bound) -> None:
    rows = max(1, BAND_BYTES // max(1, first[:1].nbytes))
    for start in range(0, len(first), rows):
        a, b = first[start : start + rows], second[start : start + rows]
        if not np.array_equal(a, b, equal_nan=True):
            raise BadCheckpoint(
                f"{read.slot} differs from {read.row.copy_of}, but the model's config ties them (one matrix for input "
                "and output); if they are meant to differ, say tie_word_embeddings false"
            )


def _write(write: Bound, held: Mapping[str, Held], plan: Plan, sink: Sink, done: Carried) -> None:
    dtype = plan.targets[write.key].dtype
    holds = {template: held[name] for template, name in write.names.items()}
    digest, first_row = xxhash.xxh3_64(), 0
    if any(hold.shift != write.row.shift for hold in holds.values()):
        bands: Iterator[np.ndarray] = iter([_shifted(write, holds, plan, dtype, done)])
    else:
        bands = _bands(write, holds, plan, dtype, done)
    for band in bands:
        digest.update(octets(band))
        sink.write(write.key, write.index, band, first_row)
        first_row += band.shape[0] if band.ndim else 1
        done.bytes_written += band.nbytes
    if plan.targets[write.key].size == 0:
        raise AssertionError(f"{write.slot} is empty")
    done.hashes[write.slot] = digest.hexdigest()
    if rests := {t: h.remainder for t, h in holds.items() if h.remainder is not None and h.shift == write.row.shift}:
        _keep_remainder(write, rests, plan, done)


def _bands(write: Bound, holds: Mapping[str, Held], plan: Plan, dtype: np.dtype, done: Carried) -> Iterator[np.ndarray]:
    """The stored array of one slot, filled from ``holds``, a band of its first dimension at a time."""
    row, sizes, rope = write.row, plan.sizes, plan.target.rope
    for letter, count, part_sizes, shape in _cuts(row, sizes, dtype, rope):
        buffer = np.empty(shape, dtype)
        views = row.views(buffer, part_sizes, rope)
        start = count
        for template, hole in views.items():
            hold = holds[template]
            view = hold.view
            if letter is not None:
                axis = axes.flat(params.pattern(template)).index(letter)
                view = view[(slice(None),) * axis + (slice(start, start + part_sizes[letter]),)]
            _fill(hole, view, write, done)
        yield buffer


def _cuts(
    row: Row, sizes: Mapping[str, int], dtype: np.dtype, rope: tuple[str, ...]
) -> Iterator[tuple[str | None, int, Mapping[str, int], tuple[int, ...]]]:
    """(axis to cut, start, sizes of the band, shape of the band). The axis is the first of the stored pattern that is
    longer than one; a joined axis and a head's rotated features are not cut."""
    shape = row.shape(sizes)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    letter = next((axis for axis in axes.flat(row.groups) if axis == JOIN or sizes[axis] > 1), None)
    first = axes.flat(row.groups[:1])
    if (
        nbytes <= BAND_BYTES
        or letter in (None, JOIN, "H")
        or letter not in first
        or (len(row.parts) > 1 and JOIN in first)
    ):
        yield None, 0, sizes, shape
        return
    assert letter is not None
    length = sizes[letter]
    step = max(1, BAND_BYTES * length // nbytes)
    for start in range(0, length, step):
        part = {**sizes, letter: min(step, length - start)}
        yield letter, start, part, row.shape(part)


def _fill(hole: np.ndarray, view: np.ndarray, write: Bound, done: Carried) -> None:
    if hole.dtype == view.dtype:
        copy_into(hole, view)
    else:
        done.casts.setdefault(write.slot, CastCount()).add(cast_into(hole, view))


def _shifted(write: Bound, holds: Mapping[str, Held], plan: Plan, dtype: np.dtype, done: Carried) -> np.ndarray:
    """The stored array of a slot whose layout shifts scales by another amount than the source's does.

    The sum is taken in float64 and rounded once; what rounding takes away is kept, so that the way back is exact.
    """
    row, sizes = write.row, plan.sizes
    out = np.empty(row.shape(sizes), dtype)
    holes, rests = row.views(out, sizes, plan.target.rope), {}
    for template, hole in holes.items():
        hold = holds[template]
        wanted = hold.exact()
        cast = cast_into(hole, wanted + (row.shift - hold.shift))
        lost = wanted - (hole.astype(np.float64) - (row.shift - hold.shift))
        if np.any(lost):
            rests[template] = lost
            done.casts.setdefault(write.slot, CastCount()).add(
                CastCount(values=cast.values, changed=int(np.count_nonzero(lost)), overflow=cast.overflow)
            )
    if rests:
        _keep_remainder(write, rests, plan, done)
    return out


def _keep_remainder(write: Bound, rests: Mapping[str, np.ndarray], plan: Plan, done: Carried) -> None:
    kept = np.zeros(write.row.shape(plan.sizes), np.float64)
    for template, hole in write.row.views(kept, plan.sizes, plan.target.rope).items():
        if template in rests:
            hole[...] = rests[template]
    done.remainders[write.slot] = kept


def read_weight(
    step_reads: tuple[Bound, ...],
    name: str,
    source: Source,
    table: Table,
    sizes: Mapping[str, int],
    remainders: Mapping[str, np.ndarray],
) -> np.ndarray:
    """One canonical weight (plain, unshifted): a view where its layout stores it plainly, else a small copy."""
    hold = take(step_reads, source, table, sizes, remainders)[name]
    if hold.shift == 0 and hold.remainder is None:
        return hold.view
    return (hold.exact() - hold.shift).astype(np.float64 if hold.view.dtype == np.float64 else np.float32)
