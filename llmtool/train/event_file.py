"""TensorBoard event files of scalars, written without TensorBoard.

A file is a series of records: length (uint64), masked CRC-32C of it, the bytes of a protocol buffer, masked CRC-32C of
them; all little-endian. Source: TensorFlow ``record_writer.cc`` and ``event.proto``.
"""

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, reversed
_START = 1  # SessionLog.START: events of this step and later ones, in older files, no longer count


class EventFile:
    """A new event file in ``folder``. ``step`` is the first of this life of the run: what an earlier life wrote from
    there on is not shown any more."""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{time.time_ns() // 1000}.{os.getpid()}.llmtool"
        self._file = self.path.open("wb")
        self._write(0, _text(3, b"brain.Event:2"))
        self._write(step, _text(7, _number(1, _START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append one value a tag."""
        parts = [_text(1, _text(1, tag.encode()) + _tag(2, 5) + struct.pack("<f", value))
                 for tag, value in values.items()]
        self._write(step, _text(5, b"".join(parts)))

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        event = _tag(1, 1) + struct.pack("<d", time.time()) + _number(2, step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))
        self._file.flush()


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value)


def _text(field: int, data: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _table() -> list[int]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        rows.append(byte)
    return rows


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum; of ``b"123456789"`` it is 0xE3069283."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
