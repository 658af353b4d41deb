"""Where arrays lie: one table from axis letters to mesh axes, for weights and activations alike.

Weights are split over ``fsdp`` along the model axis and over ``tensor`` along heads, feed-forward and vocabulary;
expert weights over ``fsdp`` along the experts, so that no device holds them all. The batch is split over ``data`` and
``fsdp``. A mesh axis is given to the first letter, in the table's order, whose length it divides, and to no other
letter of the same array; what nothing fits is held whole.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmtool.model_config import ModelConfig
from llmtool.native_tree import NativeEntry, entries

Rules = Mapping[str, tuple[str, ...]]
# Letters in order of precedence: kv heads before the queries of each (G is split where K does not divide), experts
# before the model axis of their matrices.
RULES: Rules = {
    "B": ("data", "fsdp"),
    "E": ("fsdp",),
    "K": ("tensor",),
    "G": ("tensor",),
    "F": ("tensor",),
    "X": ("tensor",),
    "V": ("tensor",),
    "D": ("fsdp",),
}


def spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, rules: Rules = RULES) -> PartitionSpec:
    """How an array with these axis letters and lengths is split over ``mesh``."""
    taken: set[str] = set()
    placed: dict[int, tuple[str, ...]] = {}
    for letter, names in rules.items():
        names = tuple(name for name in names if name in mesh.shape)
        ways = math.prod(mesh.shape[name] for name in names)
        if letter in axes and ways > 1 and taken.isdisjoint(names) and shape[axes.index(letter)] % ways == 0:
            placed[axes.index(letter)] = names
            taken.update(names)
    return PartitionSpec(*(placed.get(i) for i in range(len(axes))))


def weight_sharding(entry: NativeEntry, mesh: Mesh, rules: Rules = RULES) -> NamedSharding:
    """Where a weight lies. Vectors stay whole: gathering them would cost more than they save."""
    unstacked = len(entry.axes) - (entry.axes[0] == "L")
    parts = PartitionSpec() if unstacked == 1 else spec(entry.axes, entry.shape, mesh, rules)
    return NamedSharding(mesh, parts)


def weight_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where every weight of the native tree lies, by flat key."""
    return {key: weight_sharding(entry, mesh) for key, entry in entries(config).items()}


def constrain(x: jax.Array, axes: tuple[str, ...], mesh: Mesh | None) -> jax.Array:
    """Pin an activation to the table inside a jitted function. The model axis of an activation is never split."""
    if mesh is None:
        return x
    letters = tuple("" if axis == "D" else axis for axis in axes)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(letters, x.shape, mesh)))
