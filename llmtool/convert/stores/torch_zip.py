"""Writing files that ``torch.load`` reads (mapped or not, ``weights_only``), without PyTorch and in one pass.

Such a file is a zip archive of uncompressed members: a pickle that describes the tensors and one member of raw numbers
for each. All sizes are known beforehand, so the archive is laid out at once and numbers go straight to their place;
only their checksums are filled in at the end. (Facts: torch/serialization.py; PKWARE APPNOTE 4.3 to 4.5 for zip.)
"""

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtool.convert.stores.base import DTYPES, Index, TensorSpec
from llmtool.convert.stores.files import OutputFile, octets, sync
from llmtool.convert.stores.ledger import Ledger
from llmtool.errors import CannotHold

_ALIGNMENT = 64  # of every member's data, as PyTorch does, so that mapped tensors are aligned
_ROOT = "archive"
_LIMIT = 0xFFFFFFFF  # a size or offset of this much or more goes into a zip64 field
_STORAGES = {
    DTYPES[ours]: name
    for name, ours in {
        "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
        "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
        "ByteStorage": "uint8", "BoolStorage": "bool",
    }.items()
}  # fmt: skip


@dataclass
class _Member:
    name: str
    size: int
    header: int  # where its local header begins
    data: int  # where its bytes begin
    crc: int = 0
    done: int = 0  # bytes written

    def local(self) -> bytes:
        """Local header, with an extra field that pads the data to the alignment."""
        name, sizes, extra = self.name.encode(), self.size, b""
        if self.size >= _LIMIT:
            sizes, extra = _LIMIT, struct.pack("<HHQQ", 1, 16, self.size, self.size)
        padding = self.data - self.header - 30 - len(name) - len(extra) - 4
        extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding  # "FB", the tag that PyTorch uses
        lengths = (sizes, sizes, len(name), len(extra))
        fixed = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45, 0x800, 0, 0, 0x21, self.crc, *lengths)
        return fixed + name + extra

    def central(self) -> bytes:
        """Entry of the central directory."""
        large = self.size >= _LIMIT
        far = self.header >= _LIMIT
        size, header = (_LIMIT if large else self.size), (_LIMIT if far else self.header)
        wide = ([self.size, self.size] if large else []) + ([self.header] if far else [])
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        name = self.name.encode()
        return (
            struct.pack("<IHHHHHHIII", 0x02014B50, 45, 45, 0x800, 0, 0, 0x21, self.crc, size, size)
            + struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, header)
            + name
            + extra
        )


class TorchZipWriter:
    """One file of tensors, each written front to back by one thread, different ones by any.

    Raises CannotHold for a dtype that PyTorch cannot name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorSpec]):
        if unknown := [key for key, spec in tensors.items() if spec.dtype not in _STORAGES]:
            raise CannotHold(f"{unknown[0]}: a PyTorch file cannot hold dtype {tensors[unknown[0]].dtype}")
        self._path = path
        self._file = OutputFile(path)
        self._end = 0
        self._members: list[_Member] = []
        for name, content in (("data.pkl", _pickle(tensors)), ("byteorder", b"little"), ("version", b"3\n")):
            member = self._place(name, len(content))
            member.crc = zlib.crc32(content)
            self._file.write(content, member.data)
        self._places = {key: self._place(f"data/{i}", spec.nbytes) for i, (key, spec) in enumerate(tensors.items())}
        self._file.resize(self._end)

    def _place(self, name: str, size: int) -> _Member:
        name = f"{_ROOT}/{name}"
        least = self._end + 30 + len(name.encode()) + 4 + (20 if size >= _LIMIT else 0)
        member = _Member(name, size, self._end, -(-least // _ALIGNMENT) * _ALIGNMENT)
        self._end = member.data + size
        self._members.append(member)
        return member

    def write(self, key: str, x: np.ndarray) -> None:
        """Store the C-contiguous ``x`` behind what was written of this tensor before."""
        member, data = self._places[key], octets(x)
        member.crc = zlib.crc32(data, member.crc)
        self._file.write(data, member.data + member.done)
        member.done += len(data)

    def close(self) -> None:
        """Write local headers and the directory, and fsync."""
        for member in self._members:
            self._file.write(member.local(), member.header)
        directory = b"".join(member.central() for member in self._members)
        self._file.write(directory + self._tail(len(directory)), self._end)
        self._file.close()

    def _tail(self, length: int) -> bytes:
        """The end of the archive: a zip64 record and its locator where the old one is too narrow, then the old one."""
        count, offset = len(self._members), self._end
        tail = b""
        if count >= 0xFFFF or offset >= _LIMIT or length >= _LIMIT:
            tail = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, offset)
            tail += struct.pack("<IIQI", 0x07064B50, 0, offset + length, 1)
        few = min(count, 0xFFFF)
        return tail + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(length, _LIMIT), min(offset, _LIMIT), 0)


def _pickle(tensors: Mapping[str, TensorSpec]) -> bytes:
    """Protocol 2: a dict of ``torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())``."""
    parts = [b"\x80\x02}("]
    for i, (key, spec) in enumerate(tensors.items()):
        strides: list[int] = []
        step = 1
        for n in reversed(spec.shape):
            strides.insert(0, step)
            step *= max(n, 1)
        storage = _text("storage") + f"ctorch\n{_STORAGES[spec.dtype]}\n".encode() + _text(str(i)) + _text("cpu")
        parts += [
            _text(key), b"ctorch._utils\n_rebuild_tensor_v2\n((", storage, _integer(spec.size), b"tQ", _integer(0),
            _tuple(spec.shape), _tuple(strides), b"\x89ccollections\nOrderedDict\n)RtR",
        ]  # fmt: skip
    return b"".join([*parts, b"u."])


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(n: int) -> bytes:
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    return b"\x8a\x08" + struct.pack("<q", n)


def _tuple(numbers: tuple[int, ...] | list[int]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t"


class MetaSink:
    """Writes ``consolidated.00.pth`` and so on, each with its share of every tensor.

    ``axis_of(key, [shape])`` names the axis to cut, None to give every shard a copy. Tensors (index ``()``) may come in
    any order and from any thread; a cut along a later axis copies one share at a time. Raises CannotHold
    where a dimension does not divide by the number of shards, or for a dtype that PyTorch cannot name.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, TensorSpec],
        shards: int,
        axis_of: Callable[[str, list[tuple[int, ...]]], int | None],
    ):
        self._folder = folder
        self._tensors = dict(tensors)
        self._ledger = Ledger(tensors)
        self._axes = {key: axis_of(key, [spec.shape]) if shards > 1 else None for key, spec in tensors.items()}
        uneven = [key for key, axis in self._axes.items() if axis is not None and tensors[key].shape[axis] % shards]
        if uneven:
            sizes = ", ".join(f"{key} {list(tensors[key].shape)} along axis {self._axes[key]}" for key in uneven[:3])
            raise CannotHold(
                f"{len(uneven)} tensors cannot be cut into {shards} equal shards: {sizes}. Choose another number."
            )
        shares = {key: _share(spec, self._axes[key], shards) for key, spec in tensors.items()}
        self._writers = [TorchZipWriter(folder / f"consolidated.{rank:02d}.pth", shares) for rank in range(shards)]

    def write(self, key: str, index: Index, x: np.ndarray, first_row: int = 0) -> None:
        if index:
            raise AssertionError(f"{key}{list(index)}: a Meta checkpoint has no stacked tensors")
        self._ledger.enter(key, index, x, first_row)
        axis = self._axes[key]
        for rank, writer in enumerate(self._writers):
            if axis is None:
                share = x
            else:
                length = self._tensors[key].shape[axis] // len(self._writers)
                begin = rank * length - (first_row if axis == 0 else 0)
                share = x[(slice(None),) * axis + (slice(max(begin, 0), max(begin + length, 0)),)]
            if share.size:
                writer.write(key, np.ascontiguousarray(share))

    def close(self) -> None:
        self._ledger.close()
        for writer in self._writers:
            writer.close()
        sync(self._folder)


def _share(spec: TensorSpec, axis: int | None, shards: int) -> TensorSpec:
    if axis is None:
        return spec
    return TensorSpec(spec.dtype, (*spec.shape[:axis], spec.shape[axis] // shards, *spec.shape[axis + 1 :]))
