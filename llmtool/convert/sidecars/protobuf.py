"""The top level of a protocol buffer, enough to count what a SentencePiece model holds without its library."""

from collections.abc import Iterator


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The fields as (number, wire type, payload); a number's payload is empty. ValueError where the bytes break off.

    Source: the protocol buffer encoding; wire types 0 varint, 1 eight bytes, 2 a length and as many bytes, 5 four.
    """
    at = 0
    while at < len(data):
        tag, start = _varint(data, at)
        field, wire = divmod(tag, 8)
        match wire:
            case 0:
                end = _varint(data, start)[1]
                payload = b""
            case 1 | 5:
                end = start + (8 if wire == 1 else 4)
                payload = data[start:end]
            case 2:
                size, start = _varint(data, start)
                end = start + size
                payload = data[start:end]
            case _:
                raise ValueError(f"no protocol buffer: byte {at} starts no field")
        if not field:
            raise ValueError(f"no protocol buffer: byte {at} starts no field")
        if end > len(data):
            raise ValueError(f"cut off at byte {len(data)}: {end - len(data)} more were announced")
        yield field, wire, payload
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number, seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"cut off at byte {at}")
