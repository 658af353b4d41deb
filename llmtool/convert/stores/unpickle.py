"""Reading the pickles inside PyTorch files without running them.

A pickle is a program. Ours may only build plain values (numbers, strings, lists, tuples, dicts) and descriptions of
tensors: the opcodes are a short list, every global is one of our own stubs or refused by name, nothing is imported.
The interpreter is the standard library's pure-Python one, whose memo is a dict: the C one lets a pickle of ten bytes
allocate gigabytes for memo slots that it never fills.
"""

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, ClassVar

import numpy as np

from llmtool.convert.stores.base import DTYPES
from llmtool.errors import BadCheckpoint

MAX_PICKLE = 16 << 20  # bytes: 100 000 tensors fit, and 16 MB of empty lists unpickle to no more than 1.2 GB
_MAX_CALLS = 1 << 20  # tensors and storages, each of which costs the pickle only some five bytes
_MAX_RANK = 8

_OPCODES = """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 BINFLOAT
    BINUNICODE SHORT_BINUNICODE BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD BINPERSID
""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of ``count`` numbers in the file, found under ``key``; ``skip`` numbers of the stored run precede it."""

    key: str
    dtype: np.dtype
    count: int
    skip: int = 0
    root_count: int = 0

    @property
    def root_nbytes(self) -> int:
        """Bytes that the whole stored run should have."""
        return self.root_count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A strided window on a storage; offset and strides count bytes from the beginning of the stored run."""

    storage: Storage
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    """Stands for a class or function that the pickle names; ``call`` is what calling it does here."""

    name: str
    call: Callable[..., Any] | None = None
    dtype: np.dtype | None = None


def _naturals(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(n) is int and 0 <= n < 1 << 63 for n in values):
        raise pickle.UnpicklingError("a tensor has a shape, stride or offset that is not a natural number")
    return values


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, dtype: np.dtype | None = None) -> TensorRecord:
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor has no storage")
    dtype = dtype or storage.dtype
    (offset,), shape, strides = _naturals((offset,)), _naturals(shape), _naturals(strides)
    if len(shape) != len(strides) or len(shape) > _MAX_RANK:
        raise pickle.UnpicklingError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    size, reach, room = 1, offset + 1, storage.count * storage.dtype.itemsize // dtype.itemsize
    for n, stride in zip(shape, strides, strict=True):
        size *= n
        reach += (n - 1) * stride
    # A window larger than its storage would repeat numbers (stride 0): a few bytes could then claim any size.
    if size and (reach > room or size > room):
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} needs more than the {room} numbers stored")
    first = storage.skip * storage.dtype.itemsize + offset * dtype.itemsize
    return TensorRecord(storage, dtype, shape, first, tuple(stride * dtype.itemsize for stride in strides))


def _plain(metadata: Any) -> None:
    """Refuse what PyTorch calls math bits: the numbers in the file are then not those of the tensor."""
    if metadata and (bits := [str(bit)[:20] for bit, is_set in metadata.items() if is_set]):
        raise pickle.UnpicklingError(
            f"a tensor is stored as a view that is not its own numbers ({', '.join(bits)}); save it after "
            ".resolve_neg().resolve_conj()"
        )


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> TensorRecord:
    _plain(metadata)
    return _tensor(storage, offset, shape, strides)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRecord:
    _plain(metadata)
    if not isinstance(dtype, _Global) or dtype.dtype is None:
        raise pickle.UnpicklingError("a tensor has no dtype that we know")
    return _tensor(storage, offset, shape, strides, dtype.dtype)


def _parameter(data: Any, *_flags_hooks: Any) -> TensorRecord:
    if not isinstance(data, TensorRecord):
        raise pickle.UnpicklingError("a parameter holds no tensor")
    return data


def _ordered_dict() -> dict[Any, Any]:
    return {}  # filled by SETITEMS; Python 2 passed the pairs here, to be copied at each call


def _size(sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes[:_MAX_RANK])


def _key(key: Any) -> Any:
    """Only plain keys: hashing a tuple of tuples of tuples can take for ever."""
    if type(key) not in (str, int):
        raise pickle.UnpicklingError(f"a dict has a key of type {type(key).__name__}; expected names")
    return key


_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "Float8_e4m3fnStorage": "float8_e4m3fn", "Float8_e5m2Storage": "float8_e5m2", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
_GLOBALS = {
    item.name: item
    for item in (
        _Global("collections.OrderedDict", _ordered_dict),
        _Global("torch._utils._rebuild_tensor", _tensor),
        _Global("torch._utils._rebuild_tensor_v2", _tensor_v2),
        _Global("torch._utils._rebuild_tensor_v3", _tensor_v3),
        _Global("torch._utils._rebuild_parameter", _parameter),
        _Global("torch.Size", _size),
        _Global("torch.device", lambda *_words: None),
        *(_Global(f"torch.{name}", dtype=DTYPES[ours]) for name, ours in _STORAGES.items()),
        _Global("torch.storage.UntypedStorage", dtype=DTYPES["uint8"]),
        *(_Global(f"torch.{name}", dtype=dtype) for name, dtype in DTYPES.items()),
    )
}


class _Reader(pickle._Unpickler):  # private, but the same in every CPython 3
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def __init__(self, file: BinaryIO):
        super().__init__(file, encoding="utf-8")
        self.item_sizes: dict[str, int] = {}
        self._calls = 0

    def _count(self) -> None:
        self._calls += 1
        if self._calls > _MAX_CALLS:
            raise pickle.UnpicklingError(f"more than {_MAX_CALLS} tensors")

    def find_class(self, module: str, name: str) -> _Global:
        found = _GLOBALS.get(f"{module}.{name}")
        if found is None:
            raise BadCheckpoint(
                f"it wants to run {f'{module[:60]}.{name[:60]}'!a}. Only tensors and plain values are read, since "
                "anything else could run code. Save the weights alone (a state_dict), best as safetensors."
            )
        return found

    def persistent_load(self, pid: Any) -> Storage:
        """``("storage", type, key, device, count)`` and, in the legacy format, a view ``(key, offset, count)``."""
        self._count()
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise pickle.UnpicklingError("it refers to something that is no storage")
        kind, key, _device, count = pid[1:5]
        if not isinstance(kind, _Global) or kind.dtype is None or type(key) is not str:
            raise pickle.UnpicklingError("a storage has no type or no key")
        (count,) = _naturals((count,))
        self.item_sizes[key] = kind.dtype.itemsize
        whole = Storage(key, kind.dtype, count, 0, count)
        if len(pid) == 5 or pid[5] is None:
            return whole
        _view_key, skip, part = pid[5]
        skip, part = _naturals((skip, part))
        if skip + part > count:
            raise pickle.UnpicklingError("a storage is a view beyond another")
        return replace(whole, count=part, skip=skip)

    def load_reduce(self) -> None:
        self._count()
        arguments, function = self.stack.pop(), self.stack[-1]
        if not isinstance(function, _Global) or function.call is None or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls something that is no function of ours")
        self.stack[-1] = function.call(*arguments)

    def load_build(self) -> None:
        self.stack.pop()  # attributes of an object (a state_dict's _metadata): nothing that we need

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_key(key)] = value

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def load_plain(file: BinaryIO, where: str) -> tuple[Any, dict[str, int]]:
    """One pickle from ``file``: its plain values and TensorRecords, and the item size of each storage it named.

    ``file`` must bound what a read can return (a BytesIO does). Raises BadCheckpoint, beginning with ``where``, for a
    damaged pickle and for one that asks for anything else.
    """
    reader = _Reader(file)
    try:
        return reader.load(), reader.item_sizes
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{where}: {error}") from None
    except KeyError as error:
        what = "an opcode" if error.args and type(error.args[0]) is int else "a value"
        raise BadCheckpoint(f"{where}: the pickle uses {what} that no file of tensors needs; refused") from error
    except (pickle.UnpicklingError, EOFError, struct.error, UnicodeError, ValueError, TypeError) as error:
        raise BadCheckpoint(f"{where}: damaged pickle ({str(error)[:200]})") from error
    except (IndexError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise BadCheckpoint(f"{where}: damaged pickle ({type(error).__name__})") from error
