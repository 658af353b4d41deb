"""PyTorch files read and written without PyTorch, against torch.load and torch.save; and files that attack."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool.convert.stores.base import DTYPES, TensorSpec
from llmtool.convert.stores.pickled import MetaSink, MetaSource, TorchSource
from llmtool.convert.stores.torch_zip import TorchZipWriter
from llmtool.errors import BadCheckpoint, CannotHold

torch = pytest.importorskip("torch")

LEGACY = {"_use_new_zipfile_serialization": False}


def bits(tensor: Any) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_as_torch(source: TorchSource, tensors: dict[str, Any]) -> None:
    assert set(source.tensors) == set(tensors)
    for key, tensor in tensors.items():
        x = source.read(key)
        assert x.shape == tuple(tensor.shape), key
        assert str(tensor.dtype).removeprefix("torch.") == str(x.dtype), key
        assert x.tobytes() == bits(tensor), key
        assert not x.flags.writeable


def models() -> dict[str, Any]:
    base = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    half = torch.randn(7, 4).to(torch.bfloat16)
    return {
        "plain": torch.randn(3, 5), "bf16": half, "f16": torch.randn(4).half(), "f64": torch.randn(2).double(),
        "i64": torch.arange(5), "i32": torch.arange(5).int(), "i16": torch.arange(5).short(),
        "i8": torch.arange(5).char(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3),
        "u8": torch.arange(5).byte(), "bool": torch.tensor([True, False]),
        "shared.whole": base, "shared.rows": base[1:4], "shared.columns": base[:, 3:9:2], "shared.turned": base.T,
        "turned": half.T, "turned.slice": half.T[1:3, 2:], "3d": torch.randn(2, 3, 4).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, LEGACY, {"pickle_protocol": 4}], ids=["zip", "legacy", "protocol4"])
def test_every_kind_of_tensor(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = models()
    torch.save(OrderedDict(tensors), tmp_path / "m.pth", **options)
    loaded = torch.load(tmp_path / "m.pth", weights_only="pickle_protocol" not in options)  # it knows protocol 2 alone
    same_as_torch(TorchSource([tmp_path / "m.pth"]), {key: t.detach() for key, t in loaded.items()})


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_a_module_state_and_values_that_are_no_tensors(tmp_path: Path, options: dict[str, Any]) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).state_dict()
    content = {"state_dict": state, "step": 7, "lr": [0.1, {"a": (1, 2)}], "name": "x", "device": torch.device("cpu"),
               "dtype": torch.float16, "shape": torch.Size([2, 3])}  # fmt: skip
    torch.save(content, tmp_path / "m.bin", **options)
    source = TorchSource([tmp_path / "m.bin"])
    same_as_torch(source, state)
    assert sorted(source.skipped) == ["device", "dtype", "lr", "name", "shape", "step"]
    torch.save({**state, "epoch": 3}, tmp_path / "flat.bin", **options)
    assert TorchSource([tmp_path / "flat.bin"]).skipped == ["epoch"]


def test_float8_and_unsigned_have_no_storage_class_of_their_own(tmp_path: Path) -> None:
    tensors = {"e4": torch.randn(4, 4).to(torch.float8_e4m3fn), "e5": torch.randn(3).to(torch.float8_e5m2)[1:],
               "u16": torch.arange(6).to(torch.uint16)}  # fmt: skip
    torch.save(tensors, tmp_path / "m.pth")
    source = TorchSource([tmp_path / "m.pth"])
    for key, tensor in tensors.items():
        assert source.read(key).tobytes() == bits(tensor), key


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(12.0).reshape(3, 4).T}, tmp_path / "m.pth")
    source = TorchSource([tmp_path / "m.pth"])
    x = source.read("a")
    assert x.strides == (4, 16)
    assert x.base is not None
    assert source.read("a", (1,)).tolist() == [1, 5, 9]
    source.close()
    assert x.tolist()[0] == [0, 4, 8]  # outlives the source


def test_shards_of_a_hugging_face_folder(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    text = '{"weight_map":{"a":"pytorch_model-00001-of-00002.bin","b":"pytorch_model-00002-of-00002.bin"}}'
    index.write_text(text)
    assert set(TorchSource.from_hf_folder(tmp_path).tensors) == {"a", "b"}
    index.write_text(text.replace("00002-of", "00001-of"))
    with pytest.raises(BadCheckpoint, match="does not hold it"):
        TorchSource.from_hf_folder(tmp_path)
    index.write_text(text.replace("00002-of", "00003-of"))
    with pytest.raises(BadCheckpoint, match="1 of the 2 shards"):
        TorchSource.from_hf_folder(tmp_path)
    index.write_text(text.replace("pytorch_model-00002", "../pytorch_model-00002"))
    with pytest.raises(BadCheckpoint, match="a file beside it"):
        TorchSource.from_hf_folder(tmp_path)
    index.unlink()
    torch.save({"c": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert set(TorchSource.from_hf_folder(tmp_path).tensors) == {"c"}


def test_one_name_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(BadCheckpoint, match=r"w is in two files, .*/a and .*/b"):
        TorchSource([tmp_path / "a", tmp_path / "b"])


# --- attacks ------------------------------------------------------------------------------------------------------


def zipped(
    path: Path, data_pkl: bytes, storages: dict[str, bytes] | None = None, compression: int = 0, **more: bytes
) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        for name, data in more.items():
            archive.writestr(f"archive/{name}", data)


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def tensor_pickle(
    numel: int = 4, offset: int = 0, shape: tuple[Any, ...] = (4,), stride: tuple[int, ...] = (1,),
    storage: bytes = b"ctorch\nFloatStorage\n", key: bytes = b"X\x01\0\0\x000",
) -> bytes:  # fmt: skip
    """``{"w": tensor}`` with whatever numbers one likes."""

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    pid = b"(" + text("storage") + storage + key + text("cpu") + plain(numel) + b"tQ"
    arguments = b"(" + pid + plain(offset) + plain(shape) + plain(stride) + b"\x89N" + b"t"
    return b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


class Evil:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.marker}",)


def bomb(opcodes: bytes) -> bytes:
    return b"\x80\x04" + opcodes + b"."


ATTACKS: dict[str, tuple[bytes, str]] = {
    "os.system": (b"cos\nsystem\n" + text("true") + b"\x85R.", "'os.system'"),
    "builtins.eval": (b"cbuiltins\neval\n" + text("1") + b"\x85R.", "'builtins.eval'"),
    "eval by stack": (bomb(b"\x8c\x08builtins\x8c\x04eval\x93"), "'builtins.eval'"),
    "getattr chain": (b"ctorch\nnn.Module\n.", "'torch.nn.Module'"),
    "instance": (b"(ios\nsystem\n.", "opcode"),
    "new object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode"),
    "extension": (b"\x80\x02\x82\x01.", "opcode"),
    "text persistent id": (b"P0\n.", "opcode"),
    "memo bomb": (b"\x80\x02}r\xff\xff\xff\x7f.", "no tensors"),
    "huge bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "opcode"),
    "huge bytes": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", "opcode"),
    "huge text": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", "opcode"),
    "text beyond the end": (b"\x80\x02X\xff\xff\xff\xff.", "damaged pickle"),
    "frame beyond the end": (bomb(b"\x95" + struct.pack("<Q", 1 << 60)), "damaged pickle"),
    "long bomb": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "opcode"),
    "nothing": (b"", "damaged pickle"),
    "no stop": (b"\x80\x02}", "damaged pickle"),
    "empty stack": (b"\x80\x02R.", "damaged pickle"),
    "missing memo": (b"\x80\x02h\x07.", "damaged pickle"),
    "bad number": (b"Ixyz\n.", "damaged pickle"),
    "protocol 9": (b"\x80\x09}.", "damaged pickle"),
    "calls a string": (b"\x80\x02" + text("a") + b")R.", "calls something"),
    "calls a dtype": (b"\x80\x02ctorch\nfloat32\n)R.", "calls something"),
    "many arguments": (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "damaged pickle"),
    "slow key": (b"\x80\x02})" + b"2\x86" * 60 + b"Ns.", "opcode"),
    "tuple as key": (b"\x80\x02})K\x01s.", "key of type tuple"),
    "a list": (b"\x80\x02].", "holds a list"),
    "only numbers": (b"\x80\x02}" + text("a") + b"K\x01s.", "no tensors in it; its names are a"),
    "no storage": (b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))\x89NtRs.", "no storage"),
    "offset beyond": (tensor_pickle(offset=1), "needs more than the 4"),
    "negative offset": (tensor_pickle(offset=-1), "natural number"),
    "huge offset": (tensor_pickle(offset=1 << 62), "needs more"),
    "shape beyond": (tensor_pickle(shape=(5,)), "needs more"),
    "stride beyond": (tensor_pickle(shape=(2, 2), stride=(3, 1)), "needs more"),
    "negative stride": (tensor_pickle(stride=(-1,)), "natural number"),
    "stride 0 makes much of little": (tensor_pickle(shape=(1 << 40,), stride=(0,)), "needs more"),
    "shape of floats": (tensor_pickle(shape=(4.0,)), "natural number"),
    "shape of truths": (tensor_pickle(shape=(True,)), "natural number"),
    "ranks differ": (tensor_pickle(stride=(1, 1)), "1 dimensions and 2 strides"),
    "storage larger than the member": (tensor_pickle(numel=1 << 40), "has 16 bytes, expected"),
    "storage smaller than the member": (tensor_pickle(numel=3, shape=(3,)), "has 16 bytes, expected 12"),
    "storage not there": (tensor_pickle(key=b"X\x01\0\0\x009"), "is not in the file"),
    "storage path": (tensor_pickle(key=text("../data.pkl")), "is not in the file"),
    "storage of no known type": (tensor_pickle(storage=b"ctorch\nComplexFloatStorage\n"), "ComplexFloatStorage"),
    "storage is a function": (tensor_pickle(storage=b"ccollections\nOrderedDict\n"), "no type"),
    "escapes in a name": (tensor_pickle().replace(text("w"), text("\x1b[2J")), "no name of a weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused_by_name(tmp_path: Path, name: str) -> None:
    data, message = ATTACKS[name]
    zipped(tmp_path / "m.pth", data, {"0": np.arange(4, dtype=np.float32).tobytes()})
    with pytest.raises(BadCheckpoint, match=message) as caught:
        TorchSource([tmp_path / "m.pth"])
    assert str(tmp_path / "m.pth") in str(caught.value)


def test_the_pickle_that_attacks_are_made_of_is_good(tmp_path: Path) -> None:
    zipped(tmp_path / "m.pth", tensor_pickle(), {"0": np.arange(4, dtype=np.float32).tobytes()})
    assert TorchSource([tmp_path / "m.pth"]).read("w").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_nothing_runs(tmp_path: Path, options: dict[str, Any]) -> None:
    marker = tmp_path / "marker"
    torch.save({"w": torch.ones(2), "evil": Evil(marker)}, tmp_path / "m.pth", **options)
    with pytest.raises(BadCheckpoint, match=r"'posix\.system'"):
        TorchSource([tmp_path / "m.pth"])
    assert not marker.exists()


def test_a_pickle_may_not_be_larger_than_sense(tmp_path: Path) -> None:
    zipped(tmp_path / "m.pth", b"\x80\x02" + b"]" * (17 << 20))
    with pytest.raises(BadCheckpoint, match="more than a dict of tensors needs"):
        TorchSource([tmp_path / "m.pth"])


def test_zip_files_that_torch_did_not_write(tmp_path: Path) -> None:
    path, data = tmp_path / "m.pth", {"0": bytes(16)}

    def refused(message: str) -> None:
        with pytest.raises(BadCheckpoint, match=message):
            TorchSource([path])

    zipped(path, tensor_pickle(), data, zipfile.ZIP_DEFLATED)
    refused("compressed or encrypted")
    zipped(path, tensor_pickle(), data, byteorder=b"big")
    refused("big-endian")
    zipped(path, tensor_pickle(), data, **{"../../etc/x": b""})
    refused("a name that PyTorch does not write")
    zipped(path, tensor_pickle(), data, **{"more/data.pkl": b""})
    refused("2 members data.pkl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "hello")
    refused("0 members data.pkl")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", tensor_pickle())
        archive.writestr("archive/data.pkl", tensor_pickle())
    refused("a name that PyTorch does not write")


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_cut_anywhere(tmp_path: Path, options: dict[str, Any]) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": torch.ones(3).half()}, stream, **options)
    whole = stream.getvalue()
    for length in [*range(0, len(whole) - 1, 23), len(whole) - 10, len(whole) - 1]:
        (tmp_path / "m.pth").write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint):
            TorchSource([tmp_path / "m.pth"])


@settings(max_examples=150, deadline=None)
@given(st.booleans(), st.data())
def test_changed_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, legacy: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pth")
    torch.save({"a": torch.arange(6.0).reshape(2, 3).T, "n": 3}, folder / "m.pth", **(LEGACY if legacy else {}))
    whole = bytearray((folder / "m.pth").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "m.pth").write_bytes(whole)
    try:
        source = TorchSource([folder / "m.pth"])
    except BadCheckpoint:
        return
    for key, spec in source.tensors.items():
        assert source.read(key).nbytes == spec.nbytes <= len(whole)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_pickle(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("pkl") / "m.pth"
    zipped(path, b"\x80\x02" + data + b".")
    with pytest.raises(BadCheckpoint):
        TorchSource([path])


LEGACY_LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a bare pickle": (lambda _: pickle.dumps({"a": 1}, 2), "not one that torch.save wrote"),
    "storage longer than the file": (lambda b: b[:-32] + struct.pack("<q", 1 << 60) + b[-24:], "ends at"),
    "storage of negative length": (lambda b: b[:-32] + struct.pack("<q", -1) + b[-24:], "ends at"),
    "storage shorter than said": (lambda b: b[:-32] + struct.pack("<q", 5) + b[-24:], "has 20 bytes, expected 24"),
    "text": (lambda _: b"hello, world", "neither zip nor pickle"),
    "lfs": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("name", LEGACY_LIES)
def test_legacy_files_that_lie(tmp_path: Path, name: str) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(6.0)}, stream, **LEGACY)
    change, message = LEGACY_LIES[name]
    (tmp_path / "m.pth").write_bytes(change(stream.getvalue()))
    with pytest.raises(BadCheckpoint, match=message):
        TorchSource([tmp_path / "m.pth"])


# --- Meta: reading ------------------------------------------------------------------------------------------------


def axis_of(key: str, shapes: list[tuple[int, ...]]) -> int | None:
    return None if len(shapes[0]) == 1 else 1 if key in ("wo", "embed") else 0


def meta(folder: Path, shards: int, full: dict[str, Any]) -> None:
    for rank in range(shards):
        share = {
            key: x if (axis := axis_of(key, [tuple(x.shape)])) is None else x.chunk(shards, axis)[rank].clone()
            for key, x in full.items()
        }
        torch.save(share, folder / f"consolidated.{rank:02d}.pth")


FULL = {
    "wq": torch.arange(44.0).reshape(22, 2), "wo": torch.arange(66).reshape(3, 22).bfloat16(), "norm": torch.randn(3)
}  # fmt: skip


@pytest.mark.parametrize("shards", [1, 2, 11])
def test_meta_shards_join_in_the_order_of_their_numbers(tmp_path: Path, shards: int) -> None:
    meta(tmp_path, shards, FULL)
    source = MetaSource(tmp_path, axis_of)
    assert source.n_shards == shards
    for key, x in FULL.items():
        assert source.tensors[key].shape == tuple(x.shape)
        assert source.read(key).tobytes() == bits(x), key
        assert source.read(key, (1,)).tobytes() == bits(x[1]), key
        assert source.read(key, (len(x) - 1,)).tobytes() == bits(x[-1]), key


def test_a_single_file_without_number_is_a_view(tmp_path: Path) -> None:
    torch.save(FULL, tmp_path / "consolidated.pth")
    source = MetaSource(tmp_path, axis_of)
    assert source.n_shards == 1
    assert not source.read("wq").flags.owndata


def test_meta_folders_with_gaps_and_mixtures(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(BadCheckpoint, match=message) as caught:
            MetaSource(tmp_path, axis_of)
        assert str(tmp_path) in str(caught.value)

    refused("no consolidated")
    (tmp_path / "7B").mkdir()
    meta(tmp_path / "7B", 1, FULL)
    refused("Did you mean the folder 7B")
    meta(tmp_path, 3, {"wq": torch.ones(6, 2)})
    (tmp_path / "consolidated.01.pth").unlink()
    refused("missing are 01")
    torch.save(FULL, tmp_path / "consolidated.01.pth")
    torch.save(FULL, tmp_path / "consolidated.pth")
    refused("expected only")
    (tmp_path / "consolidated.pth").unlink()
    (tmp_path / "consolidated.1.pth").write_bytes(b"x")
    refused("twice")


def test_meta_shards_that_do_not_fit(tmp_path: Path) -> None:
    def shards(*shares: dict[str, Any]) -> MetaSource:
        for rank, share in enumerate(shares):
            torch.save(share, tmp_path / f"consolidated.{rank:02d}.pth")
        return MetaSource(tmp_path, axis_of)

    with pytest.raises(BadCheckpoint, match=r"01\.pth: holds extra, .*00\.pth does not"):
        shards({"wq": torch.ones(2, 2)}, {"wq": torch.ones(2, 2), "extra": torch.ones(1)})
    with pytest.raises(BadCheckpoint, match=r"wq, joined along axis 0, is float32\[2, 2\], float32\[2, 3\]"):
        shards({"wq": torch.ones(2, 2)}, {"wq": torch.ones(2, 3)})
    with pytest.raises(BadCheckpoint, match="float16"):
        shards({"wq": torch.ones(2, 2)}, {"wq": torch.ones(2, 2).half()})
    with pytest.raises(BadCheckpoint, match="norm, copied to every shard"):
        shards({"norm": torch.ones(2)}, {"norm": torch.ones(3)})
    source = shards({"norm": torch.ones(2)}, {"norm": torch.tensor([1.0, 1.5])})
    with pytest.raises(BadCheckpoint, match=r"norm should be the same.*00\.pth and .*01\.pth differ"):
        source.read("norm")
    (tmp_path / "consolidated.01.pth").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadCheckpoint, match="git lfs pull"):
        MetaSource(tmp_path, axis_of)


def test_the_oracle_shards_equal_the_whole(oracle: Path) -> None:
    def rule(key: str, shapes: list[tuple[int, ...]]) -> int | None:
        if len(shapes[0]) == 1:
            return None
        return 1 if any(word in key for word in ("tok_embeddings", "wo.", "w2.")) else 0

    two = MetaSource(oracle / "meta_llama2_gqa_mp2", rule)
    one = MetaSource(oracle / "meta_llama2_gqa_mp1", rule)
    for key in two.tensors:
        assert two.read(key).tobytes() == one.read(key).tobytes(), key


# --- Meta: writing ------------------------------------------------------------------------------------------------


def write(folder: Path, shards: int, arrays: dict[str, np.ndarray], band: int | None = None) -> None:
    sink = MetaSink(folder, {key: TensorSpec(x.dtype, x.shape) for key, x in arrays.items()}, shards, axis_of)
    for key, x in reversed(arrays.items()):
        if band is None or x.ndim == 0:
            sink.write(key, (), x)
        else:
            for row in range(0, len(x), band):
                sink.write(key, (), np.ascontiguousarray(x[row : row + band]), row)
    sink.close()


@pytest.mark.parametrize("band", [None, 1, 5])
@pytest.mark.parametrize("shards", [1, 2])
def test_torch_loads_what_we_write(tmp_path: Path, shards: int, band: int | None) -> None:
    arrays = {key: np.asarray(x.float().numpy()) for key, x in FULL.items()}
    arrays["wo"] = arrays["wo"].astype(DTYPES["bfloat16"])
    arrays |= {"h": np.arange(8, dtype=np.float16).reshape(4, 2), "é": np.asarray([1.5], np.float32)}
    write(tmp_path, shards, arrays, band)
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}):
        parts = [torch.load(tmp_path / f"consolidated.{rank:02d}.pth", **options) for rank in range(shards)]
        for key, x in arrays.items():
            axis = axis_of(key, [x.shape])
            whole = parts[0][key] if axis is None else torch.cat([part[key] for part in parts], axis)
            assert bits(whole) == x.tobytes(), key
            assert all(part[key].data_ptr() % 64 == 0 for part in parts if options.get("mmap"))
    for rank in range(shards):
        with zipfile.ZipFile(tmp_path / f"consolidated.{rank:02d}.pth") as archive:
            assert archive.testzip() is None
    source = MetaSource(tmp_path, axis_of)
    assert all(source.read(key).tobytes() == x.tobytes() for key, x in arrays.items())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5))
def test_any_shape_goes_to_torch_and_back(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("pth")
    arrays = {f"w{i}": np.arange(np.prod(shape), dtype=np.int32).reshape(shape) for i, shape in enumerate(shapes)}
    write(folder, 1, arrays)
    loaded = torch.load(folder / "consolidated.00.pth", weights_only=True)
    assert {key: x.numpy().tolist() for key, x in loaded.items()} == {key: x.tolist() for key, x in arrays.items()}


def test_files_beyond_four_gigabytes(tmp_path: Path) -> None:
    """The large tensor is a hole in a sparse file, so this costs no disk; its checksum is not looked at."""
    x = np.arange(100, dtype=np.float32)
    big = TensorSpec(DTYPES["bfloat16"], ((1 << 31) + 8, 2))
    writer = TorchZipWriter(tmp_path / "m.pth", {"big": big, "after": TensorSpec(x.dtype, x.shape)})
    writer.write("after", x)
    writer.close()
    loaded = torch.load(tmp_path / "m.pth", weights_only=True, mmap=True)
    assert tuple(loaded["big"].shape) == big.shape
    assert bits(loaded["after"]) == x.tobytes()
    assert torch._C.PyTorchFileReader(str(tmp_path / "m.pth")).get_record("data/1") == x.tobytes()  # checks the sum
    with zipfile.ZipFile(tmp_path / "m.pth") as archive:
        assert archive.read("archive/data/1") == x.tobytes()
        assert archive.getinfo("archive/data/0").file_size == big.nbytes
    source = TorchSource([tmp_path / "m.pth"])
    assert source.tensors["big"] == big
    assert source.read("after").tobytes() == x.tobytes()


def test_more_members_than_an_old_archive_counts(tmp_path: Path) -> None:
    spec = TensorSpec(DTYPES["int8"], ())
    writer = TorchZipWriter(tmp_path / "m.pth", {str(i): spec for i in range(66_000)})
    writer.write("65999", np.asarray(7, np.int8))
    writer.close()
    assert torch._C.PyTorchFileReader(str(tmp_path / "m.pth")).get_record("data/65999") == b"\7"
    source = TorchSource([tmp_path / "m.pth"])
    assert len(source.tensors) == 66_000
    assert source.read("65999") == 7


def test_what_meta_files_cannot_hold(tmp_path: Path) -> None:
    shapes = {"wq": (6, 2), "wo": (4, 6), "ok": (8, 2)}
    with pytest.raises(CannotHold, match=r"2 tensors .* 4.*: wq \[6, 2\] along axis 0, wo \[4, 6\]"):
        MetaSink(tmp_path, {key: TensorSpec(DTYPES["float32"], shape) for key, shape in shapes.items()}, 4, axis_of)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CannotHold, match="float8_e4m3fn"):
        MetaSink(tmp_path, {"a": TensorSpec(DTYPES["float8_e4m3fn"], (2,))}, 1, axis_of)
    sink = MetaSink(tmp_path, {"a": TensorSpec(DTYPES["float32"], (2, 2))}, 1, axis_of)
    with pytest.raises(AssertionError, match="no stacked"):
        sink.write("a", (0,), np.zeros(2, np.float32))
    with pytest.raises(AssertionError, match="before all was written"):
        sink.close()
