"""Items of the two tasks, and a data set of them."""

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Task = Literal["lambada", "boolq"]


@dataclass(frozen=True, slots=True)
class LambadaItem:
    """A passage whose last word is to be guessed. ``where`` names its file and line, for messages."""

    text: str
    where: str = field(compare=False, default="")


@dataclass(frozen=True, slots=True)
class BoolQItem:
    """A yes-or-no question about a passage; the question has no question mark. ``where`` as in LambadaItem."""

    passage: str
    question: str
    answer: bool
    where: str = field(compare=False, default="")


Item = LambadaItem | BoolQItem


@dataclass(frozen=True)
class Dataset:
    """Items of one task, at least one, all of that task's kind.

    ``variant`` tells which of the texts that share the task's name these are; ``sha256`` is of the file's bytes, or,
    where the items came in several files or from the hub, of the items (see ``items_sha256``); ``counts`` are what was
    met and mended while reading (``crlf``, ``curly_quotes``, …), only where not zero; ``notes`` say the same in words.
    """

    task: Task
    items: tuple[Item, ...]
    source: str
    variant: str
    sha256: str
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def take(self, limit: int | None, seed: int | None = None) -> "Dataset":
        """The first ``limit`` items, as lm-eval takes them; with a ``seed``, as many at random, in their order."""
        if limit is None or limit >= len(self.items):
            return self
        if seed is None:
            return replace(self, items=self.items[:limit])
        drawn = sorted(random.Random(seed).sample(range(len(self.items)), limit))
        return replace(self, items=tuple(self.items[i] for i in drawn))


def items_sha256(items: tuple[Item, ...]) -> str:
    """SHA-256 of the items as JSON lines, in their order: the same for the same items, whatever they were stored in."""
    digest = hashlib.sha256()
    for item in items:
        values = [item.text] if isinstance(item, LambadaItem) else [item.passage, item.question, item.answer]
        digest.update(json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
