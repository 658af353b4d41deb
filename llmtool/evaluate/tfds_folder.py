"""Prepared TensorFlow Datasets folders, read without TensorFlow.

array_record and parquet go through tfds itself; tfrecord, for which tfds wants TensorFlow, through the reader here.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llmtool.errors import BadData
from llmtool.evaluate.items import Task

_SPLIT = {"lambada": "test", "boolq": "validation"}
_BELOW = {"lambada": ("", "*/", "lambada/*/"),
          "boolq": ("", "*/", "boolq/*/", "super_glue/boolq/*/", "bool_q/*/")}
_TEXT = ("passage", "question", "title")
_KEPT = frozenset((*_TEXT, "answer", "label"))


def read_tfds(folder: Path, task: Task) -> tuple[Iterator[tuple[str, dict[str, Any]]], str]:
    """Rows of the split that the task is measured on, with where each stands; and what the data set calls itself.

    ``folder``: the version's own (with dataset_info.json), the data set's above it, or the data_dir above that; the
    newest version is read. Raises BadData for anything else and for a damaged file.
    """
    root = find_version(folder, _BELOW[task], task)
    info = read_info(root)
    name, form, split = str(info.get("name")), info.get("fileFormat") or "tfrecord", _SPLIT[task]
    splits = [entry.get("name") for entry in info.get("splits", []) if isinstance(entry, dict)]
    if split not in splits:
        raise BadData(f"{root}: {name} has no split {split!r}, which {task} is measured on; it has {splits}")
    source = f"{root} (tfds {name} {info.get('version')}, {split})"
    return _rows(root, form, split), source


def _rows(root: Path, form: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import tensorflow_datasets as tfds

    where = f"{root}, {split}"
    try:
        builder = tfds.builder_from_directory(root)
        shards = [inside(Path(file), root) for file in builder.info.splits[split].filepaths]
        if form == "tfrecord":
            decode = builder.info.features.deserialize_example_np
            rows = (decode(record) for shard in shards for record in _records(shard))
        else:
            rows = builder.as_data_source(split)
        for number, row in enumerate(rows):
            yield f"{where} {number}", {key: _plain(key, row[key]) for key in row if key in _KEPT}
    except BadData:
        raise
    except UnicodeDecodeError as error:
        raise BadData(f"{where}: not UTF-8: {error.object[:60]!r}") from error
    except Exception as error:  # tfds and the record readers raise what they like
        raise BadData(f"{where}: tfds cannot read it as {form}: {type(error).__name__}: {error}") from error


def _plain(key: str, value: Any) -> Any:
    if key in _TEXT:
        return value.decode() if isinstance(value, bytes) else value
    return value.item() if hasattr(value, "item") else value


def find_version(folder: Path, below: Sequence[str], what: str) -> Path:
    """The newest version of a prepared data set: the folder with dataset_info.json at ``folder``, or where the globs of
    ``below`` lead from it (tried in order). Raises BadData where there is none of ``what``."""
    for glob in below:
        found = sorted(folder.glob(f"{glob}dataset_info.json"), key=lambda path: _version(path.parent.name))
        if found:
            return found[-1].parent
    names = sorted(path.name for path in folder.iterdir())[:8]
    raise BadData(f"{folder}: no prepared TFDS data set for {what} (no dataset_info.json there or below); it holds "
                  f"{', '.join(names) or 'nothing'}")


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def read_info(root: Path) -> dict[str, Any]:
    """dataset_info.json of a version's folder; it lists splits. Raises BadData for anything else."""
    path = root / "dataset_info.json"
    try:
        info = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}: not JSON: {error}") from error
    if not isinstance(info, dict) or not isinstance(info.get("splits"), list):
        raise BadData(f"{path}: no TFDS dataset_info.json: it lists no splits")
    return info


def inside(shard: Path, root: Path) -> Path:
    """``shard`` itself, if it is a file in the data set's folder."""
    if not shard.resolve().is_relative_to(root.resolve()):
        raise BadData(f"{shard}: outside the data set's folder {root}")
    if not shard.is_file():
        raise BadData(f"{shard}: this file of the data set is missing")
    return shard


def _records(path: Path) -> Iterator[bytes]:
    """Records of a TFRecord file: length (8 bytes), its CRC (4), data, its CRC (4). Source: TensorFlow, tfrecord."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            at = file.tell()
            length_bytes = _read(file, 8, size, path, at)
            _check(length_bytes, _read(file, 4, size, path, at), path, at)
            data = _read(file, struct.unpack("<Q", length_bytes)[0], size, path, at)
            _check(data, _read(file, 4, size, path, at), path, at)
            yield data


def _read(file: BinaryIO, wanted: int, size: int, path: Path, at: int) -> bytes:
    if wanted > size - file.tell():
        raise BadData(f"{path}: cut off: the record at byte {at} needs {wanted} more bytes, the file has "
                      f"{size - file.tell()}")
    return file.read(wanted)


def _check(data: bytes, masked: bytes, path: Path, at: int) -> None:
    crc = crc32c(data)
    if struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) != masked:
        raise BadData(f"{path}: the record at byte {at} does not match its checksum; prepare the data set again")


def crc32c(data: bytes) -> int:
    """Castagnoli's CRC (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_table_entry(byte) for byte in range(256)]
