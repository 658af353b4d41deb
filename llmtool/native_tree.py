"""The tree of the model, the trainer and the ``native`` layout, read off the canonical table.

Per-layer weights are stacked, so that a compiler sees one block whatever the depth: a model of L layers whose kinds
repeat with period k has k stacks, one a position j of the block, each over the L/k repeats, and the canonical layer
is ``repeat * k + j``. Experts are stacked below that. Everything else keeps the canonical name and axes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from llmtool import params
from llmtool.model_config import ModelConfig


@dataclass(frozen=True)
class NativeEntry:
    """One array of the tree: ``layers.block_0.attn.q.w`` with axes ``L D K G H``, L the repeats of the block."""

    key: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]


def _key(template: str, block: int) -> str:
    return template.replace("layers.{l}", f"layers.block_{block}").replace(".{e}", "")


def address(weight: params.Weight, config: ModelConfig) -> tuple[str, tuple[int, ...]]:
    """The key that holds a canonical weight, and the weight's index over that array's leading (stacked) axes."""
    if weight.layer is None:
        return weight.name, ()
    repeat, block = divmod(weight.layer, config.block_period)
    return _key(weight.template, block), (repeat,) if weight.expert is None else (repeat, weight.expert)


@cache
def entries(config: ModelConfig) -> Mapping[str, NativeEntry]:
    """Every array of a model of this config, by key, in the table's order."""
    sizes = params.sizes(config) | {"L": config.n_layers // config.block_period}
    out: dict[str, NativeEntry] = {}
    for weight in params.weights(config):
        key, index = address(weight, config)
        if key not in out:
            axes = ("L", "E")[: len(index)] + tuple(params.TABLE[weight.template].split())
            out[key] = NativeEntry(key, axes, tuple(sizes[axis] for axis in axes))
    return out


def members(config: ModelConfig) -> dict[str, dict[tuple[int, ...], params.Weight]]:
    """The inverse of :func:`address`: for every key, which canonical weight sits at which leading index."""
    out: dict[str, dict[tuple[int, ...], params.Weight]] = {}
    for weight in params.weights(config):
        key, index = address(weight, config)
        out.setdefault(key, {})[index] = weight
    return out
