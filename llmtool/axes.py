"""Axis patterns: the only way in which a layout may reorder numbers.

A pattern names the axes of an array in order; parentheses merge axes into one dimension. ``"(K G H) D"`` is a
matrix whose rows run over kv heads, then over the queries of each, then over head features. Two patterns over the
same axes define a bijection, so a conversion written as patterns is undone without anyone writing the way back.

The project's letters (also in einsums, array suffixes and mesh rules):

    B batch   T query time   S key time   V vocabulary   D model   F feed-forward   L layers   E experts   r rank
    N query heads = (K G)    K kv heads   G queries per kv head    H head features  W learned positions (a table)
    R rope halves (2)        P rope pairs (H of a rotated weight is (R P) or (P R)) U buckets of relative positions
    J join: where a layout lays several weights side by side along one axis
"""

import math
import re
from collections.abc import Mapping
from functools import cache

import numpy as np

Groups = tuple[tuple[str, ...], ...]
_TOKEN = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@cache
def parse(pattern: str) -> Groups:
    """``"(K G H) D"`` -> ``(("K", "G", "H"), ("D",))``."""
    return tuple(tuple((inner or single).split()) for inner, single in _TOKEN.findall(pattern))


def flat(groups: Groups) -> tuple[str, ...]:
    """The axes of a pattern in storage order, brackets forgotten."""
    return tuple(axis for group in groups for axis in group)


def shape(groups: Groups, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The stored shape: one dimension a group."""
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups)


def substitute(groups: Groups, spans: Mapping[str, tuple[str, ...]]) -> Groups:
    """Replace single axes by spans of axes, inside whatever dimension they sit in."""
    return tuple(tuple(new for axis in group for new in spans.get(axis, (axis,))) for group in groups)


def opened(x: np.ndarray, groups: Groups, sizes: Mapping[str, int]) -> np.ndarray:
    """``x`` with every axis on its own. Always a view: splitting a dimension never moves data."""
    return x.reshape([sizes[axis] for axis in flat(groups)])


def ordered(x: np.ndarray, have: tuple[str, ...], want: tuple[str, ...]) -> np.ndarray:
    """A view of ``x`` (axes ``have``) with axes ``want``; axes that only one side names must have length 1.

    An axis of length 1 carries no order, so a layout may leave it out: Pax drops K where a model has one kv head.
    """
    for position in reversed([i for i, axis in enumerate(have) if axis not in want]):
        x = x[(slice(None),) * position + (0,)] if x.shape[position] == 1 else _refuse(have[position], x)
    have = tuple(axis for axis in have if axis in want)
    for axis in want:
        if axis not in have:
            x, have = x[..., None], (*have, axis)
    return x.transpose([have.index(axis) for axis in want])


def _refuse(axis: str, x: np.ndarray) -> np.ndarray:
    raise ValueError(
        f"axis {axis} of an array of shape {x.shape} is longer than 1 and has no place in the other pattern"
    )
