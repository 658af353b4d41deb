"""Safetensors: ours against the reference reader and writer, and files that lie."""

import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool.convert.stores.base import DTYPES, TensorSpec
from llmtool.convert.stores.safetensors import SafetensorsSink, SafetensorsSource
from llmtool.errors import BadCheckpoint, CannotHold

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4938985352\n"


def numbers(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits: every value of every dtype, NaNs too."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def specs(arrays: Mapping[str, np.ndarray]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(x.dtype, x.shape) for key, x in arrays.items()}


def save(folder: Path, arrays: Mapping[str, np.ndarray], shard_size: int = 1 << 40) -> None:
    sink = SafetensorsSink(folder, specs(arrays), shard_size)
    for key, x in arrays.items():
        sink.write(key, (), x)
    sink.close()


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_goes_there_and_back(tmp_path: Path) -> None:
    arrays = {name: numbers(dtype, (3, 5), seed) for seed, (name, dtype) in enumerate(DTYPES.items())}
    arrays |= {"scalar": numbers(DTYPES["bfloat16"], ()), "empty": numbers(DTYPES["float32"], (0, 4))}
    save(tmp_path, arrays)
    source = SafetensorsSource(tmp_path)
    assert source.tensors == specs(arrays)
    for key, x in arrays.items():
        found = source.read(key)
        assert same(found, x), key
        assert not found.flags.writeable
    assert same(source.read("int16", (2,)), arrays["int16"][2])
    assert same(source.read("int16", (2, 4)), np.asarray(arrays["int16"][2, 4]))
    assert source.metadata == {"format": "pt"}
    assert source.where("int8") == str(tmp_path / "model.safetensors")


def test_the_reference_reads_what_we_write(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    arrays = {
        "odd": numbers(DTYPES["bfloat16"], (3, 7)), "wide": numbers(DTYPES["float32"], (5,)),
        "é.weight": numbers(DTYPES["float16"], (2, 3, 4)), "flag": numbers(DTYPES["bool"], (3,)),
        "long": numbers(DTYPES["int64"], (1,)),
    }  # fmt: skip
    save(tmp_path, arrays)
    path = tmp_path / "model.safetensors"
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    for key, tensor in load_file(path).items():
        assert tensor.view(torch.uint8).numpy().tobytes() == arrays[key].tobytes(), key


def test_we_read_what_the_reference_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {"a": numbers(DTYPES["bfloat16"], (4, 3)), "b": numbers(DTYPES["float8_e5m2"], (7,))}
    save_file(arrays, tmp_path / "any_name.safetensors")
    for source in (SafetensorsSource(tmp_path), SafetensorsSource(tmp_path / "any_name.safetensors")):
        assert all(same(source.read(key), x) for key, x in arrays.items())


def test_shards_follow_the_given_order_and_size(tmp_path: Path) -> None:
    arrays = {f"w{i}": numbers(DTYPES["bfloat16"], (10,), i) for i in (3, 1, 2)}
    arrays |= {"big": numbers(DTYPES["float32"], (50,))}
    save(tmp_path, arrays, shard_size=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "w3": "model-00001-of-00003.safetensors", "w1": "model-00001-of-00003.safetensors",
        "w2": "model-00002-of-00003.safetensors", "big": "model-00003-of-00003.safetensors",
    }  # fmt: skip
    assert index["metadata"]["total_size"] == 260
    source = SafetensorsSource(tmp_path)
    assert all(same(source.read(key), x) for key, x in arrays.items())
    assert source.where("w2").endswith("model-00002-of-00003.safetensors")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=6), st.integers(1, 200))
def test_arrays_begin_at_multiples_of_their_items(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("st")
    arrays = {f"{i}.{name}": numbers(DTYPES[name], (2 * i + 1,), i) for i, name in enumerate(names)}
    save(folder, arrays, size)
    source = SafetensorsSource(folder)
    for key, x in arrays.items():
        assert source.read(key).flags.aligned
        assert same(source.read(key), x)


def test_slots_and_bands_in_any_order_from_many_threads(tmp_path: Path) -> None:
    x = numbers(DTYPES["bfloat16"], (8, 6, 5))
    sink = SafetensorsSink(tmp_path, {"a": TensorSpec(x.dtype, x.shape), "b": TensorSpec(x.dtype, x.shape)}, 1 << 30)

    def put(job: tuple[str, int]) -> None:
        key, layer = job
        sink.write(key, (layer,), x[layer, :4].copy(), 0)
        sink.write(key, (layer,), x[layer, 4:].copy(), 4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, [(key, layer) for layer in reversed(range(8)) for key in "ab"]))
    sink.close()
    source = SafetensorsSource(tmp_path)
    assert same(source.read("a"), x)
    assert same(source.read("b"), x)


def test_programmer_errors_of_a_sink(tmp_path: Path) -> None:
    sink = SafetensorsSink(tmp_path, {"a": TensorSpec(DTYPES["int8"], (2, 3))}, 100)
    x = np.zeros((3,), np.int8)
    sink.write("a", (0,), x)
    wrong = [x.astype(np.int16), np.zeros(4, np.int8), np.zeros((1, 3), np.int8)]
    for index, bad in [((0,), x), ((2,), x), *(((1,), w) for w in wrong), ((), np.zeros((3, 2), np.int8).T)]:
        with pytest.raises(AssertionError):
            sink.write("a", index, bad)
    with pytest.raises(AssertionError, match="before all was written"):
        sink.close()
    with pytest.raises(CannotHold, match="complex64"):
        SafetensorsSink(tmp_path / "no", {"a": TensorSpec(np.dtype("complex64"), (1,))}, 100)


LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (lambda p: p.write_bytes(b""), "empty"),
    "seven bytes": (lambda p: p.write_bytes(b"1234567"), "cut short"),
    "lfs pointer": (lambda p: p.write_bytes(LFS), "git lfs pull"),
    "web page": (lambda p: p.write_bytes(b"\n<!DOCTYPE html><html>Sign in</html>"), "web page"),
    "length 2**63": (lambda p: raw(p, {}, length=1 << 63), "header"),
    "length beyond the file": (lambda p: raw(p, {}, length=100), "header"),
    "header is a list": (lambda p: raw(p, b"[]"), "JSON object"),
    "header is not JSON": (lambda p: raw(p, b"{]"), "JSON"),
    "header nests for ever": (lambda p: raw(p, b'{"a":' * 100_000), "JSON"),
    "huge number": (lambda p: raw(p, b'{"a":' + b"9" * 5000 + b"}"), "JSON"),
    "key twice": (lambda p: raw(p, b'{"a":1,"a":2}'), "twice"),
    "no offsets": (lambda p: raw(p, {"a": {"dtype": "U8", "shape": [1]}}), "lacks"),
    "unknown dtype": (lambda p: raw(p, {"a": entry(0, 4, [4], "F4")}, b"1234"), "dtype 'F4'"),
    "dtype is a list": (lambda p: raw(p, {"a": {**entry(0, 4, [4]), "dtype": []}}, b"1234"), "dtype"),
    "negative dimension": (lambda p: raw(p, {"a": entry(0, 4, [-4])}, b"1234"), "shape"),
    "huge dimension": (lambda p: raw(p, {"a": entry(0, 4, [1 << 62, 1 << 62])}, b"1234"), "needs"),
    "shape too large": (lambda p: raw(p, {"a": entry(0, 4, [5])}, b"1234"), "needs 5 bytes"),
    "offsets swapped": (lambda p: raw(p, {"a": entry(4, 0, [4])}, b"1234"), "unused|begins"),
    "beyond the end": (lambda p: raw(p, {"a": entry(0, 8, [8])}, b"1234"), "Download or copy"),
    "hole": (lambda p: raw(p, {"a": entry(2, 4, [2])}, b"1234"), "unused"),
    "overlap": (lambda p: raw(p, {"a": entry(0, 4, [4]), "b": entry(2, 4, [2])}, b"1234"), "overlap"),
    "trailing bytes": (lambda p: raw(p, {"a": entry(0, 2, [2])}, b"1234"), "Download or copy"),
    "metadata of numbers": (lambda p: raw(p, {"__metadata__": {"a": 1}}), "__metadata__"),
    "terminal escapes in a name": (lambda p: raw(p, {"\x1b[2J": entry(0, 1, [1])}, b"1"), "no name"),
    "lone surrogate in a name": (lambda p: raw(p, {"\ud800": entry(0, 1, [1])}, b"1"), "no name"),
}


@pytest.mark.parametrize("name", LIES)
def test_files_that_lie(tmp_path: Path, name: str) -> None:
    make, message = LIES[name]
    make(tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message) as caught:
        SafetensorsSource(tmp_path)
    assert str(tmp_path) in str(caught.value)
    str(caught.value).encode()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cut_or_changed_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("st")
    save(folder, {"a": numbers(DTYPES["bfloat16"], (4, 3)), "b": numbers(DTYPES["int8"], (5,))})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(BadCheckpoint):
            SafetensorsSource(folder)
        return
    place, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        source = SafetensorsSource(folder)
    except BadCheckpoint:
        return
    for key, spec in source.tensors.items():
        assert source.read(key).nbytes == spec.nbytes


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save(tmp_path, {f"w{i}": numbers(DTYPES["int8"], (4,), i) for i in range(3)}, shard_size=4)
    return tmp_path


def edit_index(folder: Path, **changes: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_a_shard_that_the_index_names_is_missing(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"1 of the 3 shards .* model-00002-of-00003"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "x\0"])
def test_the_index_cannot_point_elsewhere(sharded: Path, name: str) -> None:
    edit_index(sharded, w1=name)
    with pytest.raises(BadCheckpoint, match="a file beside it"):
        SafetensorsSource(sharded)


def test_index_and_shards_disagree(sharded: Path) -> None:
    edit_index(sharded, w1="model-00001-of-00003.safetensors")
    with pytest.raises(BadCheckpoint, match="w1 is in model-00001-of-00003"):
        SafetensorsSource(sharded)


def test_a_shard_holds_a_name_that_the_index_does_not_list(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    extra = sharded / index["weight_map"]["w2"]
    raw(extra, {"w2": entry(0, 4, [4]), "more": entry(4, 5, [1])}, b"12345")
    with pytest.raises(BadCheckpoint, match="holds more, which"):
        SafetensorsSource(sharded)


def test_one_name_in_two_shards(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    raw(sharded / "model-00003-of-00003.safetensors", {"w0": entry(0, 4, [4])}, b"1234")
    with pytest.raises(BadCheckpoint, match=r"w0 is in two files, .*00001.* and .*00003"):
        SafetensorsSource(sharded)


def test_stale_shards_are_named_and_not_read(sharded: Path) -> None:
    raw(sharded / "model-00004-of-00004.safetensors", {"old": entry(0, 1, [1])}, b"1")
    source = SafetensorsSource(sharded)
    assert source.ignored_files == ["model-00004-of-00004.safetensors"]
    assert "old" not in source.tensors


def test_two_sets_of_weights_in_one_folder(sharded: Path) -> None:
    raw(sharded / "model.safetensors", {"w0": entry(0, 4, [4])}, b"1234")
    with pytest.raises(BadCheckpoint, match="two sets of weights"):
        SafetensorsSource(sharded)
    assert list(SafetensorsSource(sharded / "model.safetensors").tensors) == ["w0"]


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"found config\.json"):
        SafetensorsSource(tmp_path)


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    raw(blobs / "0123", {"a": entry(0, 2, [2])}, b"12")
    (snapshot / "model.safetensors").symlink_to("../blobs/0123")
    assert SafetensorsSource(snapshot).read("a").tobytes() == b"12"


def test_unaligned_arrays_cast_and_copy(tmp_path: Path) -> None:
    x = numbers(DTYPES["float16"], (33,)).astype(DTYPES["bfloat16"])
    header = {"a": entry(0, 1, [1]), "x": entry(1, 67, [33], "BF16"), "__metadata__": {"pad": "." * 3}}
    path = raw(tmp_path / "odd.safetensors", header, b"1" + x.tobytes())
    found = SafetensorsSource(path).read("x")
    assert not found.flags.aligned
    assert found.astype(np.float32).tobytes() == x.astype(np.float32).tobytes()
    assert np.ascontiguousarray(found[::-1]).tobytes() == x[::-1].tobytes()


def test_real_files(shared: Path) -> None:
    folder = shared / "data" / "safetensors_real"
    for path in folder.glob("*.safetensors"):
        source = SafetensorsSource(path)
        assert all(source.read(key).nbytes == spec.nbytes for key, spec in source.tensors.items())
    with pytest.raises(BadCheckpoint, match="git lfs pull"):
        SafetensorsSource(shared / "data" / "lfs_pointers" / "mistral-7b-v0.3")
