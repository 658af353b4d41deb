"""Zero-shot evaluation: tokenizers, data sets, protocols, and the scorer that answers their requests.

The library: ``evaluate_lambada``, ``evaluate_boolq``, ``score`` for tasks of your own, ``verify_checkpoints``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtool.evaluate.evaluator import evaluate_boolq, evaluate_lambada, score
    from llmtool.evaluate.verify import verify_checkpoints

__all__ = ["evaluate_boolq", "evaluate_lambada", "score", "verify_checkpoints"]

_HOMES = {"evaluate_boolq": "evaluator", "evaluate_lambada": "evaluator", "score": "evaluator",
          "verify_checkpoints": "verify"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
