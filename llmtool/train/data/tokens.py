"""Documents as tokens, with their lengths known: in memory, or in files mapped into memory.

A folder of token files has ``tokens.json`` and, for each shard, ``shard-00000.tokens`` (the tokens of all its documents
without special tokens, uint16 or uint32, little-endian) and ``shard-00000.offsets`` (uint64: where each document begins
among them, and one more for the end).
"""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.errors import BadData, Contradiction
from llmtool.train.data.words import SIDECAR

SCHEMA = "llmtool.tokens/1"


class Tokens(ABC):
    """Documents by index, as ids without special tokens."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of documents."""

    @abstractmethod
    def offset(self, index: int) -> int:
        """Tokens before document ``index``; with ``len(self)``, all tokens."""

    @abstractmethod
    def tokens(self, index: int) -> np.ndarray:
        """The tokens of a document, a view."""


class MemoryTokens(Tokens):
    """``ids`` [tokens], ``offsets`` [documents + 1]."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        self.ids, self.offsets = ids, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def offset(self, index: int) -> int:
        return int(self.offsets[index])

    def tokens(self, index: int) -> np.ndarray:
        return self.ids[self.offsets[index]:self.offsets[index + 1]]


def token_dtype(vocab_size: int) -> str:
    """The smallest dtype that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenFiles(Tokens):
    """A folder that ``llmtool data tokenize`` wrote. Raises BadData where a file is not what ``tokens.json`` says."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        told = _sidecar(self.folder / SIDECAR)
        self.dtype, self.vocab_size = np.dtype(told["dtype"]).newbyteorder("<"), told["vocab_size"]
        self.tokenizer: dict[str, Any] = told["tokenizer"]
        self.shards = [(self.folder / shard["tokens_file"], self.folder / shard["offsets_file"])
                       for shard in told["shards"]]
        for shard, (tokens, offsets) in zip(told["shards"], self.shards, strict=True):
            _check_size(tokens, shard["tokens"] * self.dtype.itemsize)
            _check_size(offsets, (shard["documents"] + 1) * 8)
        self.first = np.cumsum([0, *(shard["documents"] for shard in told["shards"])])
        self.before = np.cumsum([0, *(shard["tokens"] for shard in told["shards"])])
        if (int(self.first[-1]), int(self.before[-1])) != (told["documents"], told["tokens"]):
            raise BadData(f"{self.folder / SIDECAR}: the shards' counts do not add up to its own")
        self._mapped: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}

    def __len__(self) -> int:
        return int(self.first[-1])

    def offset(self, index: int) -> int:
        if index == len(self):
            return int(self.before[-1])
        shard, _, offsets = self._shard(index)
        return int(self.before[shard]) + int(offsets[index - self.first[shard]])

    def tokens(self, index: int) -> np.ndarray:
        shard, ids, offsets = self._shard(index)
        at = index - self.first[shard]
        start, stop = int(offsets[at]), int(offsets[at + 1])
        if not start <= stop <= len(ids):
            raise BadData(f"{self.shards[shard][1]}: document {at} goes from {start} to {stop} of {len(ids)} tokens; "
                          "the file is damaged, tokenize again")
        return ids[start:stop]

    def check_tokenizer(self, sha: str) -> None:
        """Raise Contradiction where the run's tokenizer is another one than these files were made with."""
        if self.tokenizer["sha256"] != sha:
            raise Contradiction(f"{self.folder}: made with the tokenizer of SHA-256 {self.tokenizer['sha256'][:16]}…, "
                                f"but the run's has {sha[:16]}…; give that one with --tokenizer, or tokenize again")

    def _shard(self, index: int) -> tuple[int, np.ndarray, np.ndarray]:
        shard = int(np.searchsorted(self.first, index, "right")) - 1
        if shard not in self._mapped:
            tokens, offsets = self.shards[shard]
            ids = np.memmap(tokens, self.dtype, "r") if tokens.stat().st_size else np.zeros(0, self.dtype)
            self._mapped[shard] = ids, np.memmap(offsets, "<u8", "r")
        return shard, *self._mapped[shard]


def _check_size(path: Path, expected: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        is_there = "is missing" if found is None else f"has {found:,} bytes"
        raise BadData(f"{path}: {is_there}; tokens.json expects {expected:,} bytes. Copy it again, or tokenize again")


def _sidecar(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadData(f"{path.parent}: no token files (no {SIDECAR}); expected what `llmtool data tokenize` writes")
    try:
        told = json.loads(path.read_bytes())
        if told["schema"] != SCHEMA:
            raise BadData(f"{path}: schema {told['schema']!r}; expected {SCHEMA!r}")
        whole = [told["vocab_size"], told["documents"], told["tokens"]]
        whole += [shard[key] for shard in told["shards"] for key in ("documents", "tokens")]
        names = [shard[key] for shard in told["shards"] for key in ("tokens_file", "offsets_file")]
        tokenizer = told["tokenizer"]
        good = (all(type(n) is int and 0 <= n < 1 << 48 for n in whole)
                and all(isinstance(name, str) and Path(name).name == name for name in names)
                and told["dtype"] in ("uint16", "uint32") and isinstance(tokenizer["sha256"], str)
                and all(tokenizer[key] is None or type(tokenizer[key]) is int for key in ("bos_id", "eos_id"))
                and type(tokenizer["adds_bos"]) is bool)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadData(f"{path}: not what `llmtool data tokenize` writes ({type(error).__name__}: {error})") from error
    if not good:
        raise BadData(f"{path}: a count, a file's name, the dtype or the tokenizer is not what `llmtool data tokenize` "
                      "writes")
    return told
