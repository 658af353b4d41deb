"""Plain text files, cut into documents."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.errors import BadData
from llmtool.train.data.documents import Texts

SEPARATOR = b"<|endoftext|>"
LONGEST = 64 << 10  # bytes of a document; more is cut at an empty line, else a line's end, else a space


class TextFiles(Texts):
    """A document ends at ``<|endoftext|>``, at a file's end, and after 64 KiB at the latest.

    The last rule keeps a corpus in one file from being one document, which no two rows of a batch could share out.
    Newlines around a document are left out, and so is a document of nothing else.
    """

    def __init__(self, files: list[Path]):
        self.files = files
        spans = [np.array(list(_cuts(_contents(file))), np.int64).reshape(-1, 2) for file in files]
        self.spans = np.concatenate(spans)
        self.first = np.cumsum([0, *map(len, spans)])
        self.n_bytes = sum(file.stat().st_size for file in files)
        self._open: dict[int, mmap.mmap | bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def __len__(self) -> int:
        return len(self.spans)

    def text(self, index: int) -> str:
        file = self._file(index)
        if file not in self._open:
            self._open[file] = _contents(self.files[file])
        start, end = self.spans[index]
        data = self._open[file][start:end]
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadData(f"{self.files[file]}: not UTF-8 (byte {start + error.start + 1} is "
                          f"0x{data[error.start]:02x}); convert it, for instance with `iconv -t UTF-8`") from error

    def where(self, index: int) -> str:
        return f"{self.files[self._file(index)]}, bytes {self.spans[index, 0]} to {self.spans[index, 1]}"

    def _file(self, index: int) -> int:
        return int(np.searchsorted(self.first, index, "right")) - 1


def _contents(path: Path) -> mmap.mmap | bytes:
    if path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _cuts(data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    at, size = 3 if data[:3] == b"\xef\xbb\xbf" else 0, len(data)
    while at < size:
        limit = min(at + LONGEST, size)
        end = data.find(SEPARATOR, at, limit + len(SEPARATOR))
        if end >= 0:
            after = end + len(SEPARATOR)
        else:
            end = after = limit if limit == size else _good_cut(data, at, limit)
        start = at
        while start < end and data[start:start + 1] in b"\r\n":
            start += 1
        while end > start and data[end - 1:end] in b"\r\n":
            end -= 1
        if end > start:
            yield start, end
        at = after


def _good_cut(data: mmap.mmap | bytes, start: int, limit: int) -> int:
    for mark in (b"\n\n", b"\n", b" "):
        if (found := data.rfind(mark, start + 1, limit)) > 0:
            return found
    while limit > start + 1 and data[limit] & 0xC0 == 0x80:  # not inside a character
        limit -= 1
    return limit
