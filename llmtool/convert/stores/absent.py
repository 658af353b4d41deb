"""A source whose names and shapes are known while its weights are not there: an index or a config without shards."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llmtool.convert.stores.base import Index, TensorSpec
from llmtool.errors import BadCheckpoint


class AbsentSource:
    """Answers what headers would; refuses to read."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorSpec], why: str):
        self.tensors = tensors
        self._path, self.why = path, why

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        raise BadCheckpoint(f"{self._path}: {self.why}; {key} cannot be read")

    def where(self, key: str) -> str:
        return str(self._path)

    def close(self) -> None:
        pass
