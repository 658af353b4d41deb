"""JSON lines, plain (by index) and compressed with gzip or Zstandard (a stream)."""

import gzip
import json
import mmap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmtool.errors import BadData
from llmtool.train.data.documents import Stream, Texts

_CHUNK = 4 << 20            # bytes read at once
_LONGEST_LINE = 1 << 30     # bytes; a line without end is no document
_INFLATES = 4               # times that text is larger than its compressed file, about
_PACKED = (".gz", ".zst")
_BOM = b"\xef\xbb\xbf"


def open_jsonl(files: list[Path], field: str) -> Texts | Stream:
    """By index if every file is plain, else as a stream."""
    if any(file.name.endswith(_PACKED) for file in files):
        return JsonStream(files, field)
    return JsonTexts(files, field)


class JsonTexts(Texts):
    """Lines of plain files; where each begins and ends is found once and kept in memory, 16 bytes a line."""

    def __init__(self, files: list[Path], field: str):
        self.files, self.field = files, field
        spans = [_line_spans(file) for file in files]
        self.spans = np.concatenate(spans)  # [documents, 2]
        self.first = np.cumsum([0, *map(len, spans)])  # document of each file
        self.n_bytes = int(sum(file.stat().st_size for file in files))
        self._open: dict[int, mmap.mmap] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def __len__(self) -> int:
        return len(self.spans)

    def text(self, index: int) -> str:
        file = int(np.searchsorted(self.first, index, "right")) - 1
        if file not in self._open:
            with self.files[file].open("rb") as opened:
                self._open[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        start, end = self.spans[index]
        return json_text(self._open[file][start:end], self.field, lambda: self.where(index))

    def where(self, index: int) -> str:
        file = int(np.searchsorted(self.first, index, "right")) - 1
        with self.files[file].open("rb") as opened:
            before, lines = int(self.spans[index, 0]), 1
            while before and (chunk := opened.read(min(_CHUNK, before))):
                lines, before = lines + chunk.count(b"\n"), before - len(chunk)
        return f"{self.files[file]}:{lines}"


def _line_spans(path: Path) -> np.ndarray:
    """Start and end of each line that is not blank, int64 [lines, 2]."""
    ends: list[np.ndarray] = []
    with path.open("rb") as file:
        head = file.read(len(_BOM))
        file.seek(0)
        at = 0
        while chunk := file.read(_CHUNK):
            ends.append(at + np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A))
            at += len(chunk)
    end = np.concatenate([*ends, [at]]).astype(np.int64)
    start = np.concatenate([[len(_BOM) if head == _BOM else 0], end[:-1] + 1])
    spans = np.stack([start, end], axis=1)
    length, alone = end - start, end - start == 1
    blank = length <= 0
    if alone.any():  # a carriage return is nothing either
        blank[alone] = np.memmap(path, np.uint8, "r")[start[alone]] == 0x0D
    return spans[~blank]


class Line(NamedTuple):
    """One line of a stream."""

    file: int
    number: int
    data: bytes


class JsonStream(Stream):
    """Lines of files, some of them compressed, one after the other."""

    def __init__(self, files: list[Path], field: str):
        self.files, self.field = files, field
        self.n_bytes = sum(file.stat().st_size * (_INFLATES if file.name.endswith(_PACKED) else 1) for file in files)

    def records(self) -> Iterator[Line]:
        for index, file in enumerate(self.files):
            for number, line in enumerate(_lines(file), 1):
                line = line.removeprefix(_BOM) if number == 1 else line
                if line not in (b"", b"\r"):
                    yield Line(index, number, line)

    def text(self, record: Line) -> str:
        return json_text(record.data, self.field, lambda: self.where(record))

    def where(self, record: Line) -> str:
        return f"{self.files[record.file]}:{record.number}"


def _lines(path: Path) -> Iterator[bytes]:
    rest = b""
    for chunk in _chunks(path):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if len(rest) > _LONGEST_LINE:
            raise BadData(f"{path}: a line of more than {_LONGEST_LINE:,} bytes; expected one JSON object a line")
    yield rest


def _chunks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes. Raises BadData for a damaged or cut-off file."""
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        elif path.name.endswith(".zst"):
            yield from _unzstd(path)
        else:
            with path.open("rb") as plain:
                while chunk := plain.read(_CHUNK):
                    yield chunk
    except EOFError as error:
        raise BadData(f"{path}: cut off: the compressed data have no end mark; fetch the file again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadData(f"{path}: not gzip, or damaged: {error}; fetch the file again") from error


def _unzstd(path: Path) -> Iterator[bytes]:
    """Frame by frame: the library's own reader takes a cut-off file for a whole one."""
    import zstandard

    def fresh() -> Any:
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    frame, begun = fresh(), False
    try:
        with path.open("rb") as file:
            while data := file.read(1 << 18):
                while data:
                    out, begun = frame.decompress(data), True
                    if out:
                        yield out
                    data = b""
                    if frame.eof:
                        data, frame, begun = frame.unused_data, fresh(), False
    except zstandard.ZstdError as error:
        raise BadData(f"{path}: not Zstandard, or damaged: {error}; fetch the file again") from error
    if begun:
        raise EOFError


def json_text(data: bytes, field: str, where: Callable[[], str]) -> str:
    """The text in one line. Raises BadData that names the line for anything else."""
    try:
        row = json.loads(data)
    except UnicodeDecodeError as error:
        raise BadData(f"{where()}: not UTF-8 (byte {error.start + 1} of the line is 0x{data[error.start]:02x}); "
                      "convert the file, for instance with `iconv -t UTF-8`") from error
    except (ValueError, RecursionError) as error:
        if data.startswith(b"version https://git-lfs"):
            raise BadData(f"{where()}: a Git LFS pointer; fetch the file itself with `git lfs pull`") from error
        raise BadData(f"{where()}: not JSON ({error}); expected one object a line") from error
    return field_text(row, field, where)


def field_text(row: Any, field: str, where: Callable[[], str]) -> str:
    """The string under ``field`` of a row. Raises BadData that says what is there instead."""
    if not isinstance(row, dict):
        raise BadData(f"{where()}: a JSON {type(row).__name__}; expected an object with {field!r}")
    if field not in row:
        raise BadData(f"{where()}: no field {field!r}; it has {', '.join(map(repr, sorted(row)[:6])) or 'none'}. Name "
                      "the field of the text with --text-field (data.text_field)")
    text = row[field]
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise BadData(f"{where()}: {field} is not UTF-8 (byte {error.start + 1} is 0x{text[error.start]:02x})"
                          ) from error
    if not isinstance(text, str):
        raise BadData(f"{where()}: {field} is a {type(text).__name__}; expected a string")
    return text
