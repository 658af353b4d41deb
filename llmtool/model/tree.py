"""Flat keys and nested trees: ``layers.block_0.attn.q.w`` is where flax nests it."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that flax wants as ``{"params": tree}``."""
    return unflatten_dict(dict(flat), sep=".")


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`nest`."""
    return flatten_dict(tree, sep=".")
