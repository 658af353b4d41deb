"""Results of single items as JSON lines, written as they come, so that an interrupted run goes on from them.

The first line tells what was run (``fingerprint``); then one line an item, in the order in which they were finished
while the run lasts, in the order of the items when it is done.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from llmtool.errors import BadTarget, Contradiction

SCHEMA = "llmtool.results/1"
Record = dict[str, Any]


class ResultsFile:
    """The file at ``path``; ``done`` are the items that an earlier run of the same fingerprint has finished."""

    def __init__(self, path: str | Path, fingerprint: Mapping[str, Any]):
        self.path = Path(path)
        self.header = json.dumps({"schema": SCHEMA, **fingerprint}, ensure_ascii=False)
        self.done: dict[int, Record] = {}
        if not self.path.parent.is_dir():
            raise BadTarget(f"{self.path}: its folder does not exist; make it, or name another file")
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # what is behind the last newline was torn off in the middle
        if whole:
            first, *lines = whole.splitlines()
            self._check(first, fingerprint)
            for number, line in enumerate(lines, 2):
                record = _parse(line)
                if record is None or not isinstance(record.get("item"), int):
                    raise BadTarget(f"{self.path}: line {number} is not an item; name another file with --output")
                self.done[record["item"]] = record
            self._file = self.path.open("r+b")
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        elif data and _parse(data) is None and not data.startswith(b'{"schema"'):
            raise BadTarget(f"{self.path}: there is a file that is none of ours; name another one with --output")
        else:
            self._file = self.path.open("w+b")
            self._write([self.header])

    def add(self, records: Iterable[Record]) -> None:
        """Items that are finished; on disk when this returns."""
        records = list(records)
        self.done |= {record["item"]: record for record in records}
        self._write(json.dumps(record, ensure_ascii=False) for record in records)

    def finish(self) -> None:
        """All items are done: put them in order, and close."""
        self._file.close()
        ordered = [self.header, *(json.dumps(self.done[item], ensure_ascii=False) for item in sorted(self.done))]
        temporary = self.path.with_name(self.path.name + ".part")
        temporary.write_text("\n".join(ordered) + "\n", encoding="utf-8")
        temporary.replace(self.path)

    def close(self) -> None:
        """Leave what there is for a later run."""
        self._file.close()

    def _write(self, lines: Iterable[str]) -> None:
        self._file.write("".join(line + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, first: bytes, fingerprint: Mapping[str, Any]) -> None:
        found = _parse(first)
        if found is None or found.get("schema") != SCHEMA:
            raise BadTarget(f"{self.path}: there is a file that is none of ours; name another one with --output")
        if differing := [key for key, value in fingerprint.items() if found.get(key) != value]:
            values = "; ".join(f"{key} is {fingerprint[key]}, there {found.get(key)}" for key in differing)
            raise Contradiction(f"{self.path}: holds the results of another run: {values}. Name another file with "
                                "--output, or remove this one")


def weights_fingerprint(params: Mapping[str, Any]) -> str:
    """A checksum of the weights' bits as loaded: the same in any layout and on any mesh."""
    sums = jax.device_get(_sums(params))
    digest = hashlib.sha256()
    for path, value in jax.tree_util.tree_leaves_with_path(sums):
        digest.update(f"{jax.tree_util.keystr(path)} {int(value)}\n".encode())
    return digest.hexdigest()[:16]


@jax.jit
def _sums(params: Mapping[str, Any]) -> Any:
    """Of every array the sum, modulo 2³², of each number's bits times its place: whole numbers add up in any order."""

    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16).astype(jnp.uint32)
        place = jnp.zeros((1,) * x.ndim, jnp.uint32)
        for axis in range(x.ndim):
            place = place * jnp.uint32(x.shape[axis] % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(one, params)


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
