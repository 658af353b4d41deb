"""Where the parts of a train state lie: strategies as a table, over a mesh of (data, fsdp, tensor).

Heads, feed-forward and vocabulary are always split over ``tensor``, and rows of the batch over ``data`` and ``fsdp``.
A strategy says over which of the latter two each kind of array is split as well, and, where no mesh is given, which
axis gets the devices. So ``tensor`` is ``ddp``, and ``hybrid`` is ``fsdp``, on another mesh.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from llmtool.errors import Contradiction
from llmtool.model.mesh import AXES
from llmtool.model.sharding import RULES, Rules, weight_sharding
from llmtool.native_tree import entries
from llmtool.train.config import RunConfig

HOST = "pinned_host"


@dataclass(frozen=True)
class Strategy:
    """Mesh axes over which the model axis (and experts) of each kind of array is split."""

    params: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()
    moments: tuple[str, ...] = ()


_EVERYTHING = Strategy(("fsdp",), ("fsdp",), ("fsdp",))
STRATEGIES: Mapping[str, Strategy] = {
    "ddp": Strategy(),
    "zero2": Strategy((), ("data", "fsdp"), ("data", "fsdp")),
    "fsdp": _EVERYTHING,
    "tensor": Strategy(),
    "hybrid": _EVERYTHING,
}
_TENSOR_WAYS = 4  # of hybrid without a mesh: ColossalAI's tensor-parallel size, data parallel outside


@dataclass(frozen=True)
class Placement:
    """The mesh and where each array of a run lies on it; the weights' places by key of the native tree."""

    mesh: Mesh
    params: Mapping[str, NamedSharding]
    grads: Mapping[str, NamedSharding]
    moments: Mapping[str, NamedSharding]
    rules: Rules  # of the parameters, for loading them

    @property
    def everywhere(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of a step's rows, [micro-batch, B, T]."""
        return NamedSharding(self.mesh, PartitionSpec(None, RULES["B"]))


def place(run: RunConfig, devices: list[jax.Device] | None = None) -> Placement:
    """Where a run's arrays lie on ``devices`` (default: all, of every process).

    Raises :class:`Contradiction` for a mesh that does not fit the devices, and for offloading where the backend has no
    pinned host memory.
    """
    mesh = run_mesh(run, jax.devices() if devices is None else devices)
    strategy, arrays = STRATEGIES[run.strategy], entries(run.model)
    host_params = run.offload == "parameters"
    if run.offload != "none":
        _check_host_memory(mesh)

    def shardings(split: tuple[str, ...], host: bool) -> dict[str, NamedSharding]:
        rules = rules_for(split)
        found = {key: weight_sharding(entry, mesh, rules) for key, entry in arrays.items()}
        return {key: place.with_memory_kind(HOST) if host else place for key, place in found.items()}

    return Placement(
        mesh,
        shardings(strategy.params, host_params),
        shardings(strategy.grads, False),
        shardings(strategy.moments, run.offload != "none"),
        rules_for(strategy.params),
    )


def rules_for(split: tuple[str, ...]) -> Rules:
    """The model's own rules, the model axis and experts split over ``split`` instead."""
    return {letter: split if names == ("fsdp",) else names for letter, names in RULES.items()}


def run_mesh(run: RunConfig, devices: list[jax.Device]) -> Mesh:
    """ICI x DCN: along every axis, the devices of one node are neighbours, and nodes follow each other.

    Devices come in the order of their processes, so that ``prod(ici)`` of them in a row are a node (or what one takes
    for one).
    """
    n, dcn = len(devices), run.mesh.dcn
    ici = run.mesh.ici or _own_axis(run.strategy, n // math.prod(dcn))
    if math.prod(ici) * math.prod(dcn) != n:
        fitting = _spell(_own_axis(run.strategy, n)) + (" --dcn-mesh 1,1,1" if math.prod(dcn) > 1 else "")
        raise Contradiction(
            f"mesh: ICI {_spell(ici)} times DCN {_spell(dcn)} ({', '.join(AXES)}) is for "
            f"{math.prod(ici) * math.prod(dcn)} devices, but there are {n}; --ici-mesh {fitting} would fit"
        )
    order = [axis for pair in zip(range(3), range(3, 6), strict=True) for axis in pair]
    grid = np.array(devices).reshape(*dcn, *ici).transpose(order)
    shape = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    return Mesh(grid.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rows_per_step(run: RunConfig, mesh: Mesh) -> int:
    """Rows that all devices take in one step, all micro-batches together. Raises where they cannot be shared out."""
    rows = run.batch_per_device * mesh.size
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows != int(rows) or int(rows) % ways or rows < 1:
        raise Contradiction(
            f"{run.batch_per_device:g} rows a device on {mesh.size} devices are {rows:g} rows a micro-batch, which the "
            f"mesh splits {ways} ways (data x fsdp); a batch per device of {ways / mesh.size:g} or a multiple would fit"
        )
    return int(rows) * run.grad_accum


def reader(mesh: Mesh, rows: int) -> tuple[int, int]:
    """(index, count): this process needs the ``index``-th of ``count`` equal parts of every micro-batch of ``rows``.

    Processes that hold the same rows (tensor parallelism across nodes) have the same index.
    """
    where = NamedSharding(mesh, PartitionSpec(RULES["B"])).addressable_devices_indices_map((rows,))
    bounds = {index[0].indices(rows)[:2] for index in where.values() if index is not None}
    start, stop = min(low for low, _ in bounds), max(high for _, high in bounds)
    if sum(high - low for low, high in bounds) != stop - start or start % (stop - start):
        raise Contradiction("mesh: a process's devices must hold neighbouring rows; give --ici-mesh in node order")
    return start // (stop - start), rows // (stop - start)


def _own_axis(strategy: str, n: int) -> tuple[int, int, int]:
    match strategy:
        case "ddp" | "zero2":
            return (n, 1, 1)
        case "tensor":
            return (1, 1, n)
        case "hybrid":
            ways = math.gcd(_TENSOR_WAYS, n)
            return (n // ways, 1, ways)
    return (1, n, 1)


def _check_host_memory(mesh: Mesh) -> None:
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise Contradiction(
            f"--offload needs {HOST} memory, which {device.platform} devices here do not offer (they have: "
            f"{', '.join(kinds)}); leave it out"
        )


def _spell(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))
