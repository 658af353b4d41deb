"""Weights of any checkpoint, each slice straight to the devices that hold it.

A process reads the parts of each weight that its own devices hold, once each however many of them hold it, one layer
at a time; so what sits in host memory is a few slices of one layer, and never the model.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from llmtool.model.sharding import RULES, Rules, weight_sharding
from llmtool.model.tree import nest
from llmtool.model_config import ModelConfig
from llmtool.native_tree import NativeEntry, entries, members

Index = tuple[slice, ...]


class Weights(Protocol):
    """An open checkpoint, as far as loading is concerned."""

    def weight(self, name: str) -> np.ndarray:
        """One canonical weight in canonical axes, preferably a view that reads nothing until it is sliced.

        The last axis of a rotated weight may be spelt out in two, rope halves and pairs: it is never split.
        """
        ...


def load_params(
    checkpoint: Weights,
    config: ModelConfig,
    mesh: Mesh | None = None,
    dtype: Any = None,
    on_read: Callable[[int], None] = lambda n_bytes: None,
    rules: Rules = RULES,
) -> dict[str, Any]:
    """The native tree on ``mesh`` (default: the first device), nested, ready for ``{"params": tree}``.

    ``dtype`` defaults to that of each weight in the files. ``on_read`` is told the bytes of every slice as it is read,
    for a progress bar; ``rules`` says which axes are split over the mesh. All processes of the mesh must call this
    together.
    """
    mesh = mesh or Mesh(np.array(jax.local_devices()[:1]), ("data",))
    names = {key: {index: weight.name for index, weight in slots.items()} for key, slots in members(config).items()}
    return nest({
        key: _load_entry(checkpoint, entry, names[key], weight_sharding(entry, mesh, rules), dtype, on_read)
        for key, entry in entries(config).items()
    })


def _load_entry(
    checkpoint: Weights,
    entry: NativeEntry,
    names: dict[tuple[int, ...], str],
    sharding: NamedSharding,
    dtype: Any,
    on_read: Callable[[int], None],
) -> jax.Array:
    """One array of the tree: a buffer on every device of this process, filled slot by slot."""
    stacked = len(next(iter(names)))
    buffers: dict[jax.Device, jax.Array] = {}
    for slot, inner, offset, holders in _pieces(entry, sharding, stacked):
        x = checkpoint.weight(names[slot])[inner]
        on_read(x.nbytes)
        # Sent as it lies in memory and turned on the device: numpy transposes far slower than it copies.
        order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
        lying = np.ascontiguousarray(x.transpose(order))
        turn = tuple(int(i) for i in np.argsort(order))
        for device, shape in holders:
            if device not in buffers:
                buffers[device] = jnp.zeros(shape, dtype or x.dtype, device=device)
            piece = jax.device_put(lying, device)
            buffers[device] = _place(buffers[device], piece, np.array(offset, np.int32), turn, shape[stacked:])
    return jax.make_array_from_single_device_arrays(entry.shape, sharding, [*buffers.values()])


def _pieces(
    entry: NativeEntry, sharding: NamedSharding, stacked: int
) -> Iterator[tuple[tuple[int, ...], Index, tuple[int, ...], list[tuple[jax.Device, tuple[int, ...]]]]]:
    """What this process must read of an array, each piece once.

    Yields the slot over the stacked axes, the slice within that weight, where it goes in a device's own buffer (over
    the stacked axes), and the devices that hold it with the shapes of their buffers.
    """
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(entry.shape).items():
        assert index is not None  # None stands for a device that holds nothing, which we never ask for
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, entry.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    for bounds, devices in holders.items():
        shape = tuple(stop - start for start, stop in bounds)
        inner = tuple(slice(*part) for part in bounds[stacked:])
        for offset in np.ndindex(shape[:stacked]):
            slot = tuple(start + i for (start, _), i in zip(bounds, offset, strict=False))
            yield slot, inner, offset, [(device, shape) for device in devices]


@partial(jax.jit, static_argnames=("turn", "shape"), donate_argnums=0)
def _place(
    buffer: jax.Array, x: jax.Array, offset: jax.Array, turn: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array:
    """``buffer[offset] = x.transpose(turn).reshape(shape)`` in the buffer's own memory."""
    x = x.transpose(turn).reshape(shape).astype(buffer.dtype)
    stacked = buffer.ndim - x.ndim
    return jax.lax.dynamic_update_slice(buffer, x[(None,) * stacked], tuple(jnp.pad(offset, (0, x.ndim))))
