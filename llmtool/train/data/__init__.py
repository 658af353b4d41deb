"""Rows of tokens for training: sources, packing, mixtures and a loader whose position can be saved.

The library: ``make_loader`` gives batches; ``tokenize`` makes token files; ``train_tokenizer`` a SentencePiece model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtool.train.data.loader import Loader, make_loader, merge_states, record_ids
    from llmtool.train.data.tokenizer_training import train_tokenizer
    from llmtool.train.data.tokenizing import tokenize

__all__ = ["Loader", "make_loader", "merge_states", "record_ids", "tokenize", "train_tokenizer"]

_HOMES = {"tokenize": "tokenizing", "train_tokenizer": "tokenizer_training"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'loader')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
