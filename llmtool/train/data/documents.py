"""What a source of documents is: texts that are read by index, or a stream that is read from its beginning."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from llmtool.errors import BadData

if TYPE_CHECKING:
    from llmtool.evaluate.tokenizer import Tokenizer


class Texts(ABC):
    """Documents by index. Cheap to pickle: files are opened by the process that reads them.

    ``n_bytes``: about how much text there is, to decide whether it is small.
    """

    n_bytes: int

    @abstractmethod
    def __len__(self) -> int:
        """Number of documents."""

    @abstractmethod
    def text(self, index: int) -> str:
        """Document ``index``. Raises BadData that says where, for what is no text."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Where document ``index`` stands, for a message."""


class Stream(ABC):
    """Documents in order. A record costs little to read past; only ``text`` decodes it.

    ``n_bytes``: about how much text there is; None where nobody knows.
    """

    n_bytes: int | None

    @abstractmethod
    def records(self) -> Iterator[Any]:
        """Every record once, from the beginning, always in the same order."""

    @abstractmethod
    def text(self, record: Any) -> str:
        """The document in a record."""

    @abstractmethod
    def where(self, record: Any) -> str:
        """Where a record stands, for a message."""


def every_text(source: Texts | Stream) -> Iterator[tuple[str, str]]:
    """Every document once, in order: where it stands, and its text."""
    if isinstance(source, Texts):
        for index in range(len(source)):
            yield source.where(index), source.text(index)
    else:
        for record in source.records():
            yield source.where(record), source.text(record)


def encode(tokenizer: "Tokenizer", text: str, where: str) -> np.ndarray:
    """The ids of a document, int32, without special tokens. Raises BadData for what the tokenizer cannot take."""
    try:
        return np.asarray(tokenizer.encode_plain(text), np.int32)
    except (UnicodeEncodeError, TypeError) as error:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadData(f"{where}: holds half a surrogate pair, which is no text") from error
        raise
