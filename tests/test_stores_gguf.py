"""GGUF: ours against the gguf package's reader and writer, and files that lie."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool.convert.stores import gguf as store
from llmtool.convert.stores.base import DTYPES
from llmtool.convert.stores.gguf import GGUFSource
from llmtool.errors import BadCheckpoint

gguf = pytest.importorskip("gguf")
K = gguf.GGMLQuantizationType
SIMPLE = [K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.Q8_0]
KINDS = [*SIMPLE, K.Q2_K, K.Q3_K, K.Q4_K, K.Q5_K, K.Q6_K]


def packed(kind: K, rows: int, columns: int) -> np.ndarray:
    """Blocks of random bits with sane scales (random ones would be NaN)."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    if kind in SIMPLE:
        return gguf.quants.quantize(x, kind)
    blocks = np.random.default_rng(1).integers(0, 256, (rows * columns // block, size)).astype(np.uint8)
    halves = {K.Q2_K: (-4, -2), K.Q3_K: (-2,), K.Q4_K: (0, 2), K.Q5_K: (0, 2), K.Q6_K: (-2,)}[kind]
    for at in halves:
        blocks[:, size + at if at < 0 else at :][:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("some.float", 0.5)
    writer.add_bool("some.bool", True)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_token_list(["<s>", "é", "", "▁the"])
    arrays = {"f32": np.arange(6, dtype=np.float32).reshape(2, 3), "f16": np.arange(4, dtype=np.float16)}
    arrays["i32"] = np.arange(3, dtype=np.int32)
    for key, x in arrays.items():
        writer.add_tensor(key, x)
    bf16 = np.arange(64).reshape(2, 32).astype(DTYPES["bfloat16"])
    writer.add_tensor("bf16", bf16.view(np.uint8), raw_dtype=K.BF16)
    for kind in KINDS:
        blocks = packed(kind, 3, 512)
        writer.add_tensor(kind.name, blocks, raw_dtype=kind)
        arrays[kind.name] = gguf.quants.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays | {"bf16": bf16}


@pytest.mark.parametrize("at_once", [1, 600, 1 << 20])
def test_every_kind_of_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(store, "_UNPACKED_AT_ONCE", at_once)
    arrays = write(tmp_path / "m.gguf")
    source = GGUFSource(tmp_path / "m.gguf")
    assert set(source.tensors) == set(arrays)
    for key, x in arrays.items():
        found = source.read(key)
        spec = source.tensors[key]
        assert (spec.dtype, spec.shape) == (x.dtype, x.shape) == (found.dtype, found.shape), key
        assert found.tobytes() == x.tobytes(), key
        assert np.isfinite(x.astype(np.float32)).all(), key
        assert not found.flags.writeable
        assert source.read(key, (1,)).tobytes() == x[1].tobytes(), key
        if x.ndim == 2:
            assert source.read(key, (1, 2)).tobytes() == x[1, 2].tobytes(), key
    assert not source.read("bf16").flags.owndata
    assert source.quantised == dict.fromkeys((kind.name for kind in KINDS), 1)
    assert source.fields["general.architecture"] == "llama"
    assert source.fields["llama.block_count"] == 2
    assert source.fields["some.float"] == 0.5
    assert source.fields["some.bool"] is True
    assert source.fields["some.numbers"] == [1, 2, 3]
    assert source.fields["tokenizer.ggml.tokens"] == ["<s>", "é", "", "▁the"]


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word.encode())) + word.encode()


def raw(
    fields: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", magic: bytes = b"GGUF",
    version: int = 3, tensor_count: int | None = None, field_count: int | None = None,
) -> bytes:  # fmt: skip
    counts = tensor_count or len(tensors), field_count or len(fields)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "not gguf": (lambda: raw(magic=b"GGML"), "begins with b'GGML'"),
    "version 1": (lambda: raw(version=1), "version 1"),
    "big-endian": (lambda: raw(version=3 << 24), "version 50331648"),
    "short head": (lambda: b"GGUF\3\0\0\0", "cut short"),
    "many tensors": (lambda: raw(tensor_count=1 << 62), "speaks of"),
    "many fields": (lambda: raw(field_count=1 << 62), "speaks of"),
    "long key": (lambda: raw([struct.pack("<Q", 1 << 60), bytes(20)]), "speaks of"),
    "unknown field": (lambda: raw([text("k") + struct.pack("<I", 99)]), "unknown type 99"),
    "long array": (lambda: raw([text("k") + struct.pack("<IIQ", 9, 4, 1 << 60)]), "speaks of"),
    "long list of texts": (lambda: raw([text("k") + struct.pack("<IIQ", 9, 8, 1 << 60)]), "speaks of"),
    "array of arrays": (lambda: raw([text("k") + struct.pack("<IIQ", 9, 9, 1)]), "metadata array of type 9"),
    "field beyond the end": (lambda: raw([text("k") + struct.pack("<I", 10)])[:40], "cut short"),
    "alignment 0": (lambda: raw([text("general.alignment") + struct.pack("<II", 4, 0)]), "alignment"),
    "alignment text": (lambda: raw([text("general.alignment") + struct.pack("<I", 8) + text("x")]), "alignment"),
    "one of three parts": (lambda: raw([text("split.count") + struct.pack("<IH", 2, 3)]), "one of 3 parts"),
    "rank": (lambda: raw([], [tensor(shape=(1,) * 9)], bytes(64)), "9 dimensions"),
    "rank without end": (lambda: raw([], [text("a") + struct.pack("<I", 1 << 31)], bytes(64)), "dimensions"),
    "cut data": (lambda: raw([], [tensor()], bytes(15)), "ends at byte"),
    "huge shape": (lambda: raw([], [tensor(shape=(1 << 62, 1 << 62))], bytes(16)), "ends at byte"),
    "offset": (lambda: raw([], [tensor(offset=1 << 63)], bytes(16)), "ends at byte"),
    "overlap": (lambda: raw([], [tensor("a"), tensor("b", offset=8)], bytes(64)), "b overlaps"),
    "twice": (lambda: raw([], [tensor("a"), tensor("a", offset=32)], bytes(64)), "lists a twice"),
    "escapes": (lambda: raw([], [tensor("\x1b[2J")], bytes(64)), "no name"),
    "unknown kind": (lambda: raw([], [tensor(kind=9999)], bytes(64)), "array type 9999"),
    "half a block": (lambda: raw([], [tensor(shape=(33,), kind=int(K.Q8_0))], bytes(64)), "packs 32"),
    "cannot unpack": (lambda: raw([], [tensor(shape=(256,), kind=int(K.Q8_K))], bytes(512)), "packed as Q8_K"),
}


@pytest.mark.parametrize("name", LIES)
def test_files_that_lie(tmp_path: Path, name: str) -> None:
    make, message = LIES[name]
    (tmp_path / "m.gguf").write_bytes(make())
    with pytest.raises(BadCheckpoint, match=message) as caught:
        GGUFSource(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cut_or_changed_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path)
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2000))])
        with pytest.raises(BadCheckpoint):
            GGUFSource(path)
        return
    whole[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        source = GGUFSource(path)
    except BadCheckpoint:
        return
    with np.errstate(all="ignore"):
        assert all(source.read(key).nbytes == spec.nbytes for key, spec in source.tensors.items())
