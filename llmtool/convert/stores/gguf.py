"""GGUF files, read only: plain arrays as views, quantised ones unpacked to float32 as they are read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here, every count held against
the size of the file (the ``gguf`` package trusts them and takes seconds for a large vocabulary); the package knows the
quantised formats and unpacks them.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.convert.stores.base import DTYPES, Index, TensorSpec
from llmtool.convert.stores.files import MappedFile, at, frozen
from llmtool.convert.stores.sniff import refuse_odd_name
from llmtool.errors import BadCheckpoint

_PLAIN = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_RANK = 8
_UNPACKED_AT_ONCE = 1 << 20  # numbers; the package's intermediates are several times as large


@dataclass(frozen=True)
class _Tensor:
    spec: TensorSpec
    offset: int
    kind: Any  # gguf.GGMLQuantizationType
    row_bytes: int  # of the last axis, packed

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape[:-1]) * self.row_bytes


class GGUFSource:
    """The arrays of one GGUF file in row-major ``(out, in)`` shape, and its metadata as ``fields``.

    ``quantised`` counts the arrays of each packed format; those read as float32. Raises BadCheckpoint for a file that
    is damaged, split into parts, or of a format that the ``gguf`` package cannot unpack.
    """

    def __init__(self, path: Path):
        self._file = MappedFile(path)
        self.fields: dict[str, Any] = {}
        self.quantised: dict[str, int] = {}
        cursor = _Cursor(self._file)
        try:
            self._tensors = self._parse(cursor)
        except struct.error as error:
            raise BadCheckpoint(
                f"{path}: its header goes on beyond the end of the file ({self._file.size} bytes); cut short?"
            ) from error
        self.tensors = {key: tensor.spec for key, tensor in self._tensors.items()}

    def _parse(self, cursor: "_Cursor") -> dict[str, _Tensor]:
        path = self._file.path
        magic, version, tensor_count, field_count = cursor.take("4sIQQ")
        if magic != b"GGUF":
            raise BadCheckpoint(f"{path}: begins with {magic!r}; a GGUF file begins with b'GGUF'")
        if version not in (2, 3):
            raise BadCheckpoint(f"{path}: GGUF version {version} (big-endian if huge); versions 2 and 3 are read")
        cursor.expect(tensor_count, 24)
        cursor.expect(field_count, 13)
        for _ in range(field_count):
            key = cursor.text()
            self.fields[key] = cursor.value(*cursor.take("I"))
        if self.fields.get("split.count", 1) not in (0, 1):
            parts = self.fields["split.count"]
            raise BadCheckpoint(f"{path}: one of {parts!a} parts; join them first (llama-gguf-split --merge)")
        heads: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            key = cursor.text()
            refuse_odd_name(key, str(path))
            if key in heads:
                raise BadCheckpoint(f"{path}: lists {key} twice")
            (rank,) = cursor.take("I")
            if rank > _MAX_RANK:
                raise BadCheckpoint(f"{path}: {key} has {rank} dimensions")
            heads[key] = (cursor.take(f"{rank}Q")[::-1], *cursor.take("IQ"))
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise BadCheckpoint(f"{path}: general.alignment is {str(alignment)[:40]!a}, expected a small number")
        start = -(-cursor.position // alignment) * alignment
        tensors = {key: self._place(key, shape, kind, start + at) for key, (shape, kind, at) in heads.items()}
        end = start
        for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset < end:
                raise BadCheckpoint(f"{path}: {key} overlaps the array before it; the header is wrong")
            end = tensor.offset + tensor.nbytes
            if end > self._file.size:
                raise BadCheckpoint(f"{path}: {key} ends at byte {end}, the file has {self._file.size}; cut short?")
        return tensors

    def _place(self, key: str, shape: tuple[int, ...], code: int, offset: int) -> _Tensor:
        import gguf

        try:
            kind = gguf.GGMLQuantizationType(code)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise BadCheckpoint(f"{self._file.path}: {key} has array type {code}, unknown to gguf") from error
        columns = shape[-1] if shape else 1
        if columns % block:
            raise BadCheckpoint(f"{self._file.path}: {key} has rows of {columns} numbers, {kind.name} packs {block}")
        if kind.name not in _PLAIN:
            if kind.name not in self.quantised:
                self._try(key, kind, block_bytes)
            self.quantised[kind.name] = self.quantised.get(kind.name, 0) + 1
        dtype = DTYPES[_PLAIN.get(kind.name, "float32")]
        return _Tensor(TensorSpec(dtype, shape), offset, kind, columns // block * block_bytes)

    def _try(self, key: str, kind: Any, block_bytes: int) -> None:
        from gguf import quants

        try:
            quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            raise BadCheckpoint(
                f"{self._file.path}: {key} is packed as {kind.name}, which the gguf package cannot unpack. "
                "Take a file in F16, BF16 or Q8_0."
            ) from error

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        tensor = self._tensors[key]
        shape = tensor.spec.shape
        if tensor.kind.name in _PLAIN:
            return at(self._file.array(tensor.spec.dtype, shape, tensor.offset), index)
        outer = index[: len(shape) - 1]
        packed = at(self._file.array(DTYPES["uint8"], (*shape[:-1], tensor.row_bytes), tensor.offset), outer)
        rows = _unpacked(packed.reshape(-1, tensor.row_bytes), shape[-1], tensor.kind)
        return frozen(at(rows.reshape(*packed.shape[:-1], shape[-1]), index[len(outer) :]))

    def where(self, key: str) -> str:
        return str(self._file.path)

    def close(self) -> None:
        """Let go of the file; arrays already read stay valid."""
        self._tensors.clear()


def _unpacked(rows: np.ndarray, columns: int, kind: Any) -> np.ndarray:
    from gguf import quants

    out = np.empty((len(rows), columns), np.float32)
    step = max(1, _UNPACKED_AT_ONCE // max(columns, 1))
    for i in range(0, len(rows), step):
        out[i : i + step] = quants.dequantize(rows[i : i + step], kind)
    return out


class _Cursor:
    """Walks the header. Reading beyond the end is struct.error; a count that cannot fit is refused before its loop."""

    def __init__(self, file: MappedFile):
        self.position = 0
        self._file = file

    def take(self, format: str) -> tuple[Any, ...]:
        size = struct.calcsize("<" + format)
        values = struct.unpack("<" + format, self._file.bytes(self.position, size))
        self.position += size
        return values

    def expect(self, count: int, least: int) -> None:
        if count * least > self._file.size - self.position:
            raise BadCheckpoint(
                f"{self._file.path}: its header speaks of {count} items, more than its {self._file.size} bytes can hold"
            )

    def text(self) -> str:
        (length,) = self.take("Q")
        self.expect(length, 1)
        return self.take(f"{length}s")[0].decode("utf-8", "replace")

    def value(self, code: int) -> Any:
        if code in _NUMBERS:
            return self.take(_NUMBERS[code])[0]
        if code == _STRING:
            return self.text()
        if code != _ARRAY:
            raise BadCheckpoint(f"{self._file.path}: has metadata of an unknown type {code}")
        item, count = self.take("IQ")
        if item in _NUMBERS:
            self.expect(count, struct.calcsize("<" + _NUMBERS[item]))
            return list(self.take(f"{count}{_NUMBERS[item]}"))
        if item != _STRING:
            raise BadCheckpoint(f"{self._file.path}: has a metadata array of type {item}; numbers or strings are read")
        self.expect(count, 8)
        return [self.text() for _ in range(count)]
