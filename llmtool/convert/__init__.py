"""Conversion between layouts: ``convert_checkpoint``, ``open_checkpoint``, ``diff_checkpoints``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtool.convert.comparing import diff_checkpoints
    from llmtool.convert.converting import convert_checkpoint
    from llmtool.convert.opening import open_checkpoint

__all__ = ["convert_checkpoint", "diff_checkpoints", "open_checkpoint"]

_HOMES = {"convert_checkpoint": "converting", "diff_checkpoints": "comparing", "open_checkpoint": "opening"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
