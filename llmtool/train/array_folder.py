"""Sharded arrays in folders of zarr arrays, as the ``native`` layout has them: written by every process, its own part.

Chunks are plain, one a layer, so that processes write their parts of one chunk side by side, and a reader of any mesh
takes what its devices hold.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from llmtool.convert.stores.files import sync_all
from llmtool.convert.stores.zarr import ZarrSource
from llmtool.convert.stores.zarr_meta import ARRAY_FILE, ArrayMeta, chunk_name
from llmtool.convert.stores.zarr_sink import write_part
from llmtool.errors import BadState

Bounds = tuple[tuple[int, int], ...]
_SHOWN = 10  # of each kind of difference


@dataclass(frozen=True)
class HostCopy:
    """What this process holds of some arrays, copied to host memory: (key, where in the array, values)."""

    metas: Mapping[str, ArrayMeta]
    stacked: Mapping[str, int]
    parts: tuple[tuple[str, Bounds, np.ndarray], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, jax.Array], stacked: Mapping[str, int]) -> "HostCopy":
        """A copy of the shards that this process is the first to hold; safe from donation once it is made.

        ``stacked`` says how many leading axes of an array (layers, experts) get a chunk for each of their indices.
        """
        for x in arrays.values():
            x.copy_to_host_async()
        metas = {key: _meta(x, stacked.get(key, 0)) for key, x in arrays.items()}
        return cls(metas, dict(stacked), tuple(
            (key, _bounds(shard.index, x.shape), np.array(shard.data))
            for key, x in arrays.items() for shard in x.addressable_shards if shard.replica_id == 0
        ))  # fmt: skip

    def write(self, folder: Path, headers: bool) -> None:
        """Write the parts into ``folder``, and the arrays' headers too if ``headers``; durable when it returns."""
        written = {folder, *(folder / key for key in self.metas)}
        for key, meta in self.metas.items():
            (folder / key).mkdir(parents=True, exist_ok=True)
            if headers:
                (folder / key / ARRAY_FILE).write_text(meta.dumps())
                written.add(folder / key / ARRAY_FILE)
        for key, bounds, part in self.parts:
            depth = self.stacked.get(key, 0)
            for offset in np.ndindex(part.shape[:depth]):
                cell = tuple(low + i for (low, _), i in zip(bounds, offset, strict=False))
                inner = tuple(slice(low, high) for low, high in bounds[depth:])
                box = (*(slice(0, 1),) * depth, *inner)
                path = folder / key / chunk_name((*cell, *(0,) * len(inner)))
                write_part(path, self.metas[key], box, part[offset][(None,) * depth])
                written.add(path)
        sync_all(written)


def read_arrays(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], stacked: Mapping[str, int], title: str
) -> dict[str, jax.Array]:
    """Arrays in the places that ``wanted`` gives (``sharding`` set), on any mesh; a process reads what its devices
    hold.

    Raises :class:`BadState`, ``title`` first, with what is missing, not asked for, or of another shape or dtype.
    """
    source = ZarrSource(folder)
    check_same({key: (spec.shape, spec.dtype) for key, spec in source.tensors.items()}, wanted, title)
    out = {}
    for key, spec in wanted.items():
        depth = stacked.get(key, 0)

        assert spec.sharding is not None
        device = spec.sharding.with_memory_kind("device")
        part = partial(_part, source, key, spec, depth)
        out[key] = jax.device_put(jax.make_array_from_callback(spec.shape, device, part), spec.sharding)
    return out


def _part(
    source: ZarrSource, key: str, spec: jax.ShapeDtypeStruct, depth: int, index: tuple[slice, ...] | None
) -> np.ndarray:
    assert index is not None  # None stands for a device that holds nothing
    bounds = _bounds(index, spec.shape)
    x = np.empty([high - low for low, high in bounds], spec.dtype)
    inner = tuple(slice(*pair) for pair in bounds[depth:])
    for offset in np.ndindex(x.shape[:depth]):
        slot = tuple(low + i for (low, _), i in zip(bounds, offset, strict=False))
        x[offset] = source.read(key, slot)[inner]
    return x


def check_same(
    stored: Mapping[str, tuple[tuple[int, ...], np.dtype]], wanted: Mapping[str, jax.ShapeDtypeStruct], title: str
) -> None:
    """Raise :class:`BadState` where names, shapes or dtypes differ: a short list of each kind."""
    missing = [f"missing: {key} {list(wanted[key].shape)}" for key in wanted if key not in stored]
    extra = [f"not of this run: {key} {list(stored[key][0])}" for key in stored if key not in wanted]
    differing = [
        f"{key} is {stored[key][1]} {list(stored[key][0])}, this run's is {wanted[key].dtype} {list(wanted[key].shape)}"
        for key in wanted
        if key in stored and stored[key] != (wanted[key].shape, np.dtype(wanted[key].dtype))
    ]
    if problems := list(_short(missing)) + list(_short(extra)) + list(_short(differing)):
        raise BadState(title, problems, shown=len(problems))


def _short(problems: list[str]) -> Iterator[str]:
    yield from problems[:_SHOWN]
    if len(problems) > _SHOWN:
        yield f"and {len(problems) - _SHOWN} more of the kind"


def _meta(x: jax.Array, depth: int) -> ArrayMeta:
    chunks = (1,) * depth + x.shape[depth:]
    assert math.prod(x.shape), "arrays of a train state hold something"
    return ArrayMeta(x.shape, chunks, np.dtype(x.dtype))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
