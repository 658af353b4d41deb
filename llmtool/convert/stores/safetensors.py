"""Safetensors: an eight-byte length, a JSON header, then raw arrays; many files share an index.

Format: https://github.com/huggingface/safetensors (README, "Format"). Our own parser, because the reference one
copies every tensor and knows no float8; our own writer, because the reference one wants the whole file in memory.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmtool.convert.stores.base import DTYPES, Index, TensorSpec
from llmtool.convert.stores.files import MappedFile, OutputFile, at, octets, sync
from llmtool.convert.stores.ledger import Ledger
from llmtool.convert.stores.sniff import is_plain_name, refuse_impostors, refuse_odd_name
from llmtool.errors import BadCheckpoint, CannotHold

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_INDEX = 256 << 20
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_DTYPES = {name: DTYPES[ours] for name, ours in _NAMES.items()}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Place(NamedTuple):
    file: MappedFile
    offset: int


class SafetensorsSource:
    """Every array of a file or a folder, as read-only views.

    A folder holds ``model.safetensors``, or an index and its shards, or, with neither, any ``*.safetensors``.
    ``ignored_files`` names the safetensors files of the folder that were not read; ``metadata`` is the union of the
    files' ``__metadata__``. Links are followed, since the Hugging Face cache is made of them: a file elsewhere must
    still be safetensors to be read. Raises BadCheckpoint for anything damaged.
    """

    def __init__(self, path: Path):
        self.tensors: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self.ignored_files: list[str] = []
        self._places: dict[str, _Place] = {}
        weight_map = None
        if path.is_dir():
            names, weight_map = _files_of(path)
            self.ignored_files = sorted({file.name for file in path.glob("*.safetensors")} - set(names))
            files = [path / name for name in names]
        else:
            files = [path]
        for file in files:
            self._add(MappedFile(file))
        if weight_map is not None:
            self._check_index(path / INDEX, weight_map)

    def _add(self, file: MappedFile) -> None:
        tensors, metadata = read_header(file)
        for key, (spec, offset) in tensors.items():
            if key in self._places:
                raise BadCheckpoint(f"{key} is in two files, {self.where(key)} and {file.path}; expected in one")
            self.tensors[key] = spec
            self._places[key] = _Place(file, offset)
        self.metadata |= metadata

    def _check_index(self, index: Path, weight_map: Mapping[str, str]) -> None:
        absent = [key for key, name in weight_map.items() if key not in self._places or self._file(key) != name]
        if absent:
            raise BadCheckpoint(
                f"{index}: says that {absent[0]} is in {weight_map[absent[0]]}, whose header does not list it "
                f"({len(absent)} such names). The index and the shards are not of one checkpoint."
            )
        if unlisted := [key for key in self._places if key not in weight_map]:
            raise BadCheckpoint(
                f"{self.where(unlisted[0])}: holds {unlisted[0]}, which {index.name} does not list "
                f"({len(unlisted)} such names). Mend the index, or remove it to have every shard read as it is."
            )

    def _file(self, key: str) -> str:
        return self._places[key].file.path.name

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        spec, place = self.tensors[key], self._places[key]
        return at(place.file.array(spec.dtype, spec.shape, place.offset), index)

    def where(self, key: str) -> str:
        return str(self._places[key].file.path)

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        self._places.clear()


def _files_of(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files of a folder that are to be read, and the index's map if it has one."""
    index = folder / INDEX
    if index.exists():
        weight_map = read_index(index)
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            raise BadCheckpoint(
                f"{folder}: {len(missing)} of the {len(names)} shards that {INDEX} names are missing: "
                f"{', '.join(missing[:5])}. Download or copy them."
            )
        if SINGLE not in names and (folder / SINGLE).exists():
            raise BadCheckpoint(
                f"{folder}: holds both {SINGLE} and {INDEX}, two sets of weights; expected one. "
                f"Remove one, or give the path of {SINGLE} itself."
            )
        return names, weight_map
    if (folder / SINGLE).exists():
        return [SINGLE], None
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise BadCheckpoint(f"{folder}: no safetensors file here (found {found}). Give the folder with the weights.")
    return names, None


def read_index(path: Path) -> dict[str, str]:
    """The ``weight_map`` of a Hugging Face index: key to file name, each a plain name in the index's own folder."""
    refuse_impostors(path)
    if path.stat().st_size > _MAX_INDEX:
        raise BadCheckpoint(f"{path}: {path.stat().st_size} bytes, too large for an index")
    content = _json(path.read_bytes(), str(path))
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{path}: has no weight_map that says which shard holds which name")
    for key, name in weight_map.items():
        refuse_odd_name(key, str(path))
        if not isinstance(name, str) or not name.isprintable() or not is_plain_name(name):
            raise BadCheckpoint(f"{path}: puts {key} in {str(name)[:100]!a}; expected the name of a file beside it")
    return weight_map


def read_header(file: MappedFile) -> tuple[dict[str, tuple[TensorSpec, int]], dict[str, str]]:
    """Spec and byte offset of every array in a file, and its metadata. The arrays must tile the rest of the file."""
    length = int.from_bytes(file.bytes(0, 8), "little")
    start = 8 + length
    if file.size < 8 or length > _MAX_HEADER or start > file.size:
        raise BadCheckpoint(
            f"{file.path}: says that its header has {length} bytes, but the file has {file.size}. "
            "It is cut short, or not safetensors."
        )
    header = _json(file.bytes(8, length), f"{file.path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadCheckpoint(f"{file.path}: __metadata__ is not a map of strings")
    parsed = sorted(((*_entry(file, key, entry), key) for key, entry in header.items()), key=lambda item: item[1:])
    position = 0
    for spec, begin, end, key in parsed:
        if begin != position:
            kind = "overlaps the array before it" if begin < position else "leaves unused bytes before it"
            raise BadCheckpoint(f"{file.path}: {key} {kind} (begins at {begin}, expected {position}); header damaged")
        if end - begin != spec.nbytes:
            raise BadCheckpoint(
                f"{file.path}: {key} {spec.dtype}{list(spec.shape)} needs {spec.nbytes} bytes, but has {end - begin}"
            )
        position = end
    if start + position != file.size:
        raise BadCheckpoint(
            f"{file.path}: has {file.size} bytes, its header speaks of {start + position}. Download or copy it again."
        )
    return {key: (spec, start + begin) for spec, begin, _, key in parsed}, metadata


def _entry(file: MappedFile, key: str, entry: Any) -> tuple[TensorSpec, int, int]:
    refuse_odd_name(key, str(file.path))
    try:
        name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise BadCheckpoint(f"{file.path}: the entry of {key} lacks dtype, shape or data_offsets") from error
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in [*shape, begin, end]):
        raise BadCheckpoint(f"{file.path}: shape or offsets of {key} are not numbers that a file can have")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise BadCheckpoint(f"{file.path}: {key} has dtype {str(name)[:40]!a}; known are {', '.join(_DTYPES)}")
    return TensorSpec(dtype, tuple(shape)), begin, end


def _json(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise BadCheckpoint(f"{what}: lists {name[:200]!a} twice")
            found[name] = value
        return found

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{what}: not valid JSON ({str(error)[:100]})") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{what}: expected a JSON object")
    return content


class SafetensorsSink:
    """Writes ``model.safetensors``, or shards of at most ``shard_size`` bytes of arrays and their index.

    Arrays go to shards in the given order; an array larger than a shard has one of its own. All headers are written
    by the constructor, so slots may come in any order and from any thread. Raises CannotHold for an unknown dtype.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorSpec], shard_size: int):
        if unknown := [key for key, spec in tensors.items() if spec.dtype not in _DTYPE_NAMES]:
            raise CannotHold(f"{unknown[0]}: safetensors has no dtype {tensors[unknown[0]].dtype}")
        self._tensors = dict(tensors)
        self._ledger = Ledger(self._tensors)
        self._folder = folder
        self._places: dict[str, tuple[OutputFile, int]] = {}
        self._files: list[OutputFile] = []
        shards = list(_shards(self._tensors, shard_size))
        count = len(shards)
        names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for name, keys in zip(names, shards, strict=True):
            self._begin(folder / name, keys)
        if count > 1:
            weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
            total = sum(spec.nbytes for spec in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _begin(self, path: Path, keys: list[str]) -> None:
        # Widest items first: each array then begins at a multiple of its item, which PyTorch's loader relies on.
        keys = sorted(keys, key=lambda key: -self._tensors[key].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for key in keys:
            spec = self._tensors[key]
            begins[key], end = end, end + spec.nbytes
            header[key] = {
                "dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begins[key], end]
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER:
            raise CannotHold(f"{path.name}: its header would have {len(text)} bytes, the format allows {_MAX_HEADER}")
        file = OutputFile(path)
        self._files.append(file)
        file.write(len(text).to_bytes(8, "little") + text, 0)
        file.resize(8 + len(text) + end)
        self._places |= {key: (file, 8 + len(text) + begin) for key, begin in begins.items()}

    def write(self, key: str, index: Index, x: np.ndarray, first_row: int = 0) -> None:
        self._ledger.enter(key, index, x, first_row)
        file, offset = self._places[key]
        skipped = first_row * x[:1].nbytes if first_row else 0
        file.write(octets(x), offset + slot_offset(self._tensors[key], index) + skipped)

    def close(self) -> None:
        self._ledger.close()
        for file in self._files:
            file.close()
        if len(self._files) > 1:
            sync(self._folder / INDEX)
        sync(self._folder)


def slot_offset(spec: TensorSpec, index: Index) -> int:
    """Bytes before ``array[index]`` in C order."""
    offset, left = 0, spec.nbytes
    for i, n in zip(index, spec.shape, strict=False):
        left //= n
        offset += i * left
    return offset


def _shards(tensors: Mapping[str, TensorSpec], shard_size: int) -> Iterable[list[str]]:
    keys: list[str] = []
    used = 0
    for key, spec in tensors.items():
        if keys and used + spec.nbytes > shard_size:
            yield keys
            keys, used = [], 0
        keys.append(key)
        used += spec.nbytes
    yield keys
