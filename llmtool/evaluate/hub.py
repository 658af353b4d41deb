"""Evaluation sets by their name on the Hugging Face hub, through the ``datasets`` library."""

from collections.abc import Iterator
from typing import Any

from llmtool.errors import BadData, MissingExtra
from llmtool.evaluate.items import Task

_SPLIT = {"lambada": "test", "boolq": "validation"}


def read_hub(name: str, task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of ``OWNER/NAME[:CONFIG]``, test for LAMBADA and validation for BoolQ, each with where it stands."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(f"{name}: no such file; to read a data set of the hub, `pip install datasets`") from error
    path, _, config = name.partition(":")
    if task == "boolq" and path.endswith("super_glue"):
        config = config or "boolq"
    try:
        rows = datasets.load_dataset(path, config or None, split=_SPLIT[task])
    except Exception as error:  # of the library, of its transport, of the builder: they share no base
        raise BadData(f"{name}: neither a file nor a data set of the hub that can be had from here "
                      f"({type(error).__name__}: {str(error).splitlines()[0][:200]}). Without a network, fetch it "
                      f"elsewhere with `llmtool data get {task}` and name the file with --data") from error
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", {key: row[key] for key in row if key in _FIELDS}


_FIELDS = frozenset(("text", "passage", "question", "answer", "label", "title"))
