"""Where the tensors of a PyTorch file lie: the zip format (since PyTorch 1.6) and the legacy one before it.

Nothing is decompressed, copied or run: both formats keep raw numbers, so a tensor is a strided view of the mapped
file. (Facts: torch/serialization.py, ``_save`` and ``_legacy_save``.)
"""

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.convert.stores.base import TensorSpec
from llmtool.convert.stores.files import MappedFile
from llmtool.convert.stores.sniff import refuse_odd_name
from llmtool.convert.stores.unpickle import MAX_PICKLE, TensorRecord, load_plain
from llmtool.errors import BadCheckpoint

WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


@dataclass(frozen=True)
class TorchTensor:
    """One tensor of a mapped file; offset and strides in bytes."""

    file: MappedFile
    offset: int
    spec: TensorSpec
    strides: tuple[int, ...]

    def view(self) -> np.ndarray:
        """The read-only array."""
        return self.file.array(self.spec.dtype, self.spec.shape, self.offset, self.strides)


def read_torch(path: Path) -> tuple[dict[str, TorchTensor], list[str]]:
    """The tensors of one file by name, and the names of plain values that were passed over.

    One wrapping dict (``{"model": {...}}``) is looked through. Raises BadCheckpoint for a damaged or hostile file.
    """
    file = MappedFile(path)
    content, begins = _read_zip(file) if file.bytes(0, 4) == b"PK\3\4" else _read_legacy(file)
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path}: holds a {type(content).__name__}; expected a dict of names and tensors")
    content, skipped = _unwrapped(content)
    tensors = {}
    for key, value in content.items():
        refuse_odd_name(str(key), str(path))
        if isinstance(key, str) and isinstance(value, TensorRecord):
            tensors[key] = _locate(file, key, value, begins)
        else:
            skipped.append(str(key))
    if not tensors:
        raise BadCheckpoint(f"{path}: no tensors in it; its names are {', '.join(skipped[:8]) or 'none'}")
    return tensors, skipped


def _unwrapped(content: dict[Any, Any]) -> tuple[dict[Any, Any], list[str]]:
    if any(isinstance(value, TensorRecord) for value in content.values()):
        return content, []
    for name in WRAPPERS:
        inner = content.get(name)
        if isinstance(inner, dict) and any(isinstance(value, TensorRecord) for value in inner.values()):
            return inner, [str(other) for other in content if other != name]
    return content, []


def _locate(file: MappedFile, key: str, record: TensorRecord, begins: dict[str, tuple[int, int]]) -> TorchTensor:
    storage = record.storage
    begin, nbytes = begins.get(storage.key, (0, -1))
    if not 0 <= nbytes - storage.root_nbytes < storage.dtype.itemsize:  # bytes may share a storage with wider numbers
        found = "is not in the file" if nbytes < 0 else f"has {nbytes} bytes"
        raise BadCheckpoint(f"{file.path}: the storage of {key} {found}, expected {storage.root_nbytes} bytes")
    return TorchTensor(file, begin + record.offset, TensorSpec(record.dtype, record.shape), record.strides)


def _read_zip(file: MappedFile) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The unpickled content, and begin and size in bytes of each storage."""
    try:
        with file.path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OverflowError, OSError) as error:
        raise BadCheckpoint(f"{file.path}: damaged or cut short ({error}). Download or copy it again.") from error
    places: dict[str, tuple[int, int]] = {}
    for member in members:
        name = member.filename
        if name in places or name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
            raise BadCheckpoint(f"{file.path}: has a member {name[:100]!a}, a name that PyTorch does not write")
        places[name] = _member(file, member)
    roots = [name.removesuffix("data.pkl") for name in places if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise BadCheckpoint(f"{file.path}: a zip file with {len(roots)} members data.pkl; torch.save writes one")
    root = roots[0]
    begin, nbytes = places[root + "data.pkl"]
    if nbytes > MAX_PICKLE:
        raise BadCheckpoint(f"{file.path}: its data.pkl has {nbytes} bytes, more than a dict of tensors needs")
    order = places.get(root + "byteorder")
    if order and file.bytes(*order).strip() != b"little":
        raise BadCheckpoint(f"{file.path}: was written on a big-endian machine; only little-endian files are read")
    content, _ = load_plain(io.BytesIO(file.bytes(begin, nbytes)), str(file.path))
    prefix = root + "data/"
    return content, {name.removeprefix(prefix): place for name, place in places.items() if name.startswith(prefix)}


def _member(file: MappedFile, member: zipfile.ZipInfo) -> tuple[int, int]:
    """Begin and size of a stored member, by the length fields of its own header."""
    name = f"{file.path}: member {member.filename[:100]!a}"
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size or member.flag_bits & 1:
        raise BadCheckpoint(
            f"{name} is compressed or encrypted; torch.save stores members as they are. Was the file zipped again?"
        )
    local = file.bytes(member.header_offset, 30) if member.header_offset >= 0 else b""
    if len(local) < 30 or local[:4] != b"PK\3\4":
        raise BadCheckpoint(f"{name} is not where the directory of the archive says; the file is damaged")
    begin = member.header_offset + 30 + sum(struct.unpack("<HH", local[26:30]))
    if begin + member.file_size > file.size:
        raise BadCheckpoint(f"{name} ends at byte {begin + member.file_size}, the file has {file.size}; cut short?")
    return begin, member.file_size


def _read_legacy(file: MappedFile) -> tuple[Any, dict[str, tuple[int, int]]]:
    """As ``_read_zip``: magic, version, system facts, content, storage keys; then count and numbers of each storage."""
    where = str(file.path)
    if file.bytes(0, 1) != b"\x80":
        raise BadCheckpoint(f"{where}: not a PyTorch file (neither zip nor pickle), or one from before PyTorch 0.1.10")
    stream = io.BytesIO(file.bytes(0, MAX_PICKLE))
    for expected in (_LEGACY_MAGIC, _LEGACY_PROTOCOL):
        if load_plain(stream, where)[0] != expected:
            raise BadCheckpoint(f"{where}: a pickle, but not one that torch.save wrote")
    system, _ = load_plain(stream, where)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise BadCheckpoint(f"{where}: was not written on a little-endian machine")
    content, sizes = load_plain(stream, where)
    keys, _ = load_plain(stream, where)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
        raise BadCheckpoint(f"{where}: its list of storages is damaged")
    position, begins = stream.tell(), {}
    for key in keys:
        if key not in sizes:
            raise BadCheckpoint(f"{where}: storage {key[:40]!a} belongs to no tensor; its list of storages is damaged")
        count = int.from_bytes(file.bytes(position, 8), "little")
        begin = position + 8
        position = begin + count * sizes[key]
        if position > file.size:
            raise BadCheckpoint(f"{where}: has {file.size} bytes, storage {key[:40]!a} ends at {position}. Cut short?")
        begins[key] = begin, count * sizes[key]
    return content, begins
