"""Hugging Face data sets: what ``save_to_disk`` wrote, parquet files, and names on the hub, streamed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmtool.errors import BadData, MissingExtra
from llmtool.train.data.documents import Stream, Texts
from llmtool.train.data.lines import field_text
from llmtool.train.data.words import find_files

_ROWS = 1000  # of parquet, decoded at once


def open_hf(path: str, split: str, field: str) -> Texts | Stream:
    """``path``: a folder of ``save_to_disk`` (with splits or without), parquet files (where ``split`` takes those with
    its name in theirs, if there are such), or OWNER/NAME[:CONFIG] on the hub."""
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or split not in splits:
            raise BadData(f"{folder}: no split {split!r}; it has {splits}. Write hf:PATH@SPLIT")
        folder = folder / split
    if (folder / "state.json").is_file():
        return ArrowTexts(_saved(folder), field)
    if folder.exists() or any(mark in path for mark in "*?["):
        files = find_files(path, (".parquet", ".arrow"))
        files = [file for file in files if split in file.name] or files
        if all(file.suffix == ".arrow" for file in files):
            return ArrowTexts(files, field)
        return ParquetStream(files, field)
    if path.startswith(("/", ".", "~")):
        raise BadData(f"{path}: no such file or folder")
    return HubStream(path, split, field)


def _saved(folder: Path) -> list[Path]:
    names = [entry.get("filename") for entry in _json(folder / "state.json").get("_data_files", [])]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise BadData(f"{folder}/state.json: names the data file {name!r}, which is not in this folder")
    if not names:
        raise BadData(f"{folder}/state.json: names no data files")
    return [folder / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadData(f"{path}: a JSON {type(found).__name__}; expected an object")
    return found


class ArrowTexts(Texts):
    """Rows of Arrow stream files, mapped into memory: nothing is read before it is asked for."""

    def __init__(self, files: list[Path], field: str):
        self.files, self.field = files, field
        self.n_bytes = sum(file.stat().st_size for file in files)
        self._column: Any = None
        self.count = len(self._texts())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_column": None}

    def __len__(self) -> int:
        return self.count

    def text(self, index: int) -> str:
        return _string(self._texts()[index], self.field, lambda: self.where(index))

    def where(self, index: int) -> str:
        return f"{self.files[0].parent}, row {index}"

    def _texts(self) -> Any:
        import pyarrow as pa

        if self._column is None:
            tables = []
            for file in self.files:
                try:
                    tables.append(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())
                except (pa.ArrowInvalid, OSError) as error:
                    raise BadData(f"{file}: not an Arrow stream, or cut off: {error}") from error
                _check_columns(file, tables[-1].column_names, self.field)
            self._column = pa.chunked_array([chunk for table in tables for chunk in table[self.field].chunks],
                                            type=tables[0][self.field].type)
        return self._column


class ParquetStream(Stream):
    """Rows of parquet files in order: a single row of one cannot be had without its whole group."""

    def __init__(self, files: list[Path], field: str):
        self.files, self.field = files, field
        self.n_bytes = sum(file.stat().st_size for file in files) * 2

    def records(self) -> Iterator[tuple[Path, int, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for file in self.files:
            try:
                with pq.ParquetFile(file) as opened:
                    _check_columns(file, opened.schema_arrow.names, self.field)
                    row = 0
                    for batch in opened.iter_batches(_ROWS, columns=[self.field]):
                        for value in batch.column(0):
                            yield file, row, value
                            row += 1
            except (pa.ArrowException, OSError) as error:
                raise BadData(f"{file}: not a parquet file, or cut off: {error}") from error

    def text(self, record: tuple[Path, int, Any]) -> str:
        return _string(record[2], self.field, lambda: self.where(record))

    def where(self, record: tuple[Path, int, Any]) -> str:
        return f"{record[0]}, row {record[1]}"


class HubStream(Stream):
    """Rows of a data set on the hub, as they come."""

    n_bytes = None

    def __init__(self, name: str, split: str, field: str):
        self.name, self.split, self.field = name, split, field
        self._load()

    def records(self) -> Iterator[tuple[int, Any]]:
        rows = iter(self._load())
        for number in range(1 << 62):
            try:
                yield number, next(rows)
            except StopIteration:
                return
            except Exception as error:  # of the library and its transport
                raise self._cannot(error) from error

    def text(self, record: tuple[int, Any]) -> str:
        return field_text(dict(record[1]), self.field, lambda: self.where(record))

    def where(self, record: tuple[int, Any]) -> str:
        return f"{self.name}@{self.split}, row {record[0]}"

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtra(f"{self.name}: no such file or folder; to read a data set of the hub, "
                               "`pip install 'llmtool[hub]'`") from error
        path, _, config = self.name.partition(":")
        try:
            return datasets.load_dataset(path, config or None, split=self.split, streaming=True)
        except Exception as error:  # of the library, of its transport, of the builder: they share no base
            raise self._cannot(error) from error

    def _cannot(self, error: Exception) -> BadData:
        told = (str(error).splitlines() or [""])[0][:200]
        return BadData(f"{self.name}: neither a file or folder nor a data set of the hub that can be had from here "
                       f"({type(error).__name__}: {told}). Without a network, fetch it elsewhere, `save_to_disk` it, "
                       "and name the folder: hf:FOLDER")


def _check_columns(file: Path, names: list[str], field: str) -> None:
    if field not in names:
        raise BadData(f"{file}: no column {field!r}; it has {', '.join(names[:6])}. Name the column of the text with "
                      "--text-field (data.text_field)")


def _string(value: Any, field: str, where: Callable[[], str]) -> str:
    try:
        return field_text({field: value.as_py()}, field, where)
    except UnicodeDecodeError as error:
        raise BadData(f"{where()}: {field} is not UTF-8") from error
