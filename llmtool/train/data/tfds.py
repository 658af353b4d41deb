"""Documents of a prepared TensorFlow Datasets folder (c4, a Pile that was prepared), by index, without TensorFlow."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.errors import BadData
from llmtool.evaluate.tfds_folder import crc32c, find_version, inside, read_info
from llmtool.train.data.documents import Texts
from llmtool.train.data.lines import field_text

_BELOW = ("", "*/", "*/*/")  # the version's own folder, the data set's or config's, the data_dir


def open_tfds(path: str, split: str, field: str) -> Texts:
    """``path``: a version's folder, or one above it that holds one data set; the newest version is read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise BadData(f"{folder}: no such folder; expected a prepared TFDS data set")
    root = find_version(folder, _BELOW, "training")
    info = read_info(root)
    splits = [entry.get("name") for entry in info["splits"] if isinstance(entry, dict)]
    if split not in splits:
        raise BadData(f"{root}: no split {split!r}; it has {', '.join(map(str, splits))}. Write tfds:PATH@SPLIT")
    return TfdsTexts(root, split, info.get("fileFormat") or "tfrecord", field)


class TfdsTexts(Texts):
    """``form``: array_record and parquet go through tfds; of tfrecord files an index is made first (8 bytes a record).

    A record's checksum in a tfrecord file is left alone, its length's is checked.
    """

    def __init__(self, root: Path, split: str, form: str, field: str):
        self.root, self.split, self.form, self.field = root, split, form, field
        self._builder: Any = None
        self._rows: Any = None
        try:
            self.shards = [inside(Path(file), root) for file in self._open().info.splits[split].filepaths]
            self.n_bytes = sum(shard.stat().st_size for shard in self.shards)
            self.starts = [_starts(shard) for shard in self.shards] if form == "tfrecord" else []
            self.first = np.cumsum([0, *map(len, self.starts)])
            self.count = int(self.first[-1]) if form == "tfrecord" else len(self._source())
        except BadData:
            raise
        except Exception as error:  # tfds and the record readers raise what they like
            raise BadData(f"{root}, {split}: tfds cannot read it as {form}: {type(error).__name__}: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_builder": None, "_rows": None}

    def __len__(self) -> int:
        return self.count

    def text(self, index: int) -> str:
        try:
            row = self._record(index) if self.form == "tfrecord" else self._source()[index]
        except Exception as error:  # as above
            raise BadData(f"{self.where(index)}: tfds cannot read it as {self.form}: {type(error).__name__}: {error}"
                          ) from error
        return field_text(row, self.field, lambda: self.where(index))

    def where(self, index: int) -> str:
        return f"{self.root}, {self.split} {index}"

    def _open(self) -> Any:
        import tensorflow_datasets as tfds

        if self._builder is None:
            self._builder = tfds.builder_from_directory(self.root)
        return self._builder

    def _source(self) -> Any:
        if self._rows is None:
            self._rows = self._open().as_data_source(self.split)
        return self._rows

    def _record(self, index: int) -> Any:
        shard = int(np.searchsorted(self.first, index, "right")) - 1
        with self.shards[shard].open("rb") as file:
            file.seek(int(self.starts[shard][index - self.first[shard]]))
            length, _ = struct.unpack("<QI", file.read(12))
            return self._open().info.features.deserialize_example_np(file.read(length))


def _starts(path: Path) -> np.ndarray:
    """Byte of each record of a TFRecord file: length (8 bytes), its CRC (4), data, its CRC (4)."""
    size, at, starts = path.stat().st_size, 0, []
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(12)
            length, masked = struct.unpack("<QI", head) if len(head) == 12 else (size, 0)
            if length > size - at - 16:
                raise BadData(f"{path}: cut off in the record at byte {at}; prepare the data set again")
            crc = crc32c(head[:8])
            if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF != masked:
                raise BadData(f"{path}: the record at byte {at} does not match its checksum; prepare it again")
            starts.append(at)
            at += 16 + length
    return np.array(starts, np.int64)
