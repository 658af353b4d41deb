"""PyTorch files as stores: any list of them, and Meta's ``consolidated.NN.pth``, which are slices of one model."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmtool.convert.stores.base import Index, TensorSpec
from llmtool.convert.stores.files import at, frozen
from llmtool.convert.stores.safetensors import read_index
from llmtool.convert.stores.torch_file import TorchTensor, read_torch
from llmtool.convert.stores.torch_zip import MetaSink
from llmtool.errors import BadCheckpoint

__all__ = ["AxisOf", "MetaSink", "MetaSource", "TorchSource", "meta_files"]

AxisOf = Callable[[str, list[tuple[int, ...]]], int | None]


class TorchSource:
    """The union of the tensors of several PyTorch files, as read-only, possibly strided views.

    ``skipped`` names the entries that were no tensors. Raises BadCheckpoint for a damaged or hostile file, and for a
    name that two files hold.
    """

    def __init__(self, files: Sequence[Path]):
        self._tensors: dict[str, TorchTensor] = {}
        self.skipped: list[str] = []
        for path in files:
            tensors, skipped = read_torch(path)
            self.skipped += skipped
            if twice := self._tensors.keys() & tensors.keys():
                key = min(twice)
                raise BadCheckpoint(f"{key} is in two files, {self.where(key)} and {path}; expected in one")
            self._tensors |= tensors
        self.tensors: Mapping[str, TensorSpec] = {key: tensor.spec for key, tensor in self._tensors.items()}

    @classmethod
    def from_hf_folder(cls, folder: Path) -> "TorchSource":
        """``pytorch_model.bin``, or the shards that ``pytorch_model.bin.index.json`` names."""
        index = folder / "pytorch_model.bin.index.json"
        if not index.exists():
            return cls([folder / "pytorch_model.bin"])
        weight_map = read_index(index)
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            raise BadCheckpoint(
                f"{folder}: {len(missing)} of the {len(names)} shards that {index.name} names are missing: "
                f"{', '.join(missing[:5])}. Download or copy them."
            )
        source = cls([folder / name for name in names])
        for key, name in weight_map.items():
            if key not in source.tensors or Path(source.where(key)).name != name:
                raise BadCheckpoint(f"{index}: says that {key} is in {name}, which does not hold it")
        return source

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        return at(self._tensors[key].view(), index)

    def where(self, key: str) -> str:
        return str(self._tensors[key].file.path)

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        self._tensors.clear()


def meta_files(folder: Path) -> list[Path]:
    """``consolidated.pth``, or ``consolidated.NN.pth`` in the order of their numbers. Raises BadCheckpoint for gaps."""
    names = sorted(path.name for path in folder.glob("consolidated*.pth"))
    found = f"found {', '.join(names) or 'none'}"
    numbered = {name: int(match[1]) for name in names if (match := re.fullmatch(r"consolidated\.(\d{1,6})\.pth", name))}
    if names == ["consolidated.pth"]:
        return [folder / names[0]]
    if not names:
        below = sorted(path.parent.name for path in folder.glob("*/consolidated*.pth"))
        hint = f" Did you mean the folder {below[0]} in it?" if below else ""
        raise BadCheckpoint(f"{folder}: no consolidated.pth or consolidated.NN.pth here.{hint}")
    if len(numbered) != len(names):
        raise BadCheckpoint(f"{folder}: {found}; expected only consolidated.pth, or only consolidated.00.pth and so on")
    if sorted(numbered.values()) != list(range(len(names))):
        lacking = sorted(set(range(max(numbered.values()) + 1)) - set(numbered.values()))[:5]
        what = f"missing are {', '.join(f'{n:02d}' for n in lacking)}" if lacking else "a number is there twice"
        raise BadCheckpoint(f"{folder}: {found}; expected every number from 00 on once, {what}")
    return [folder / name for name in sorted(names, key=numbered.__getitem__)]


class MetaSource:
    """The shards of a Meta checkpoint as whole tensors, joined on reading in the order of the shards' numbers.

    ``axis_of(key, shard_shapes)`` names the axis along which shards are joined, None if each shard has a copy. With one
    shard it is not asked and every read is a view; a copy held by all shards is compared byte for byte when read.
    Raises BadCheckpoint where shards have different names, dtypes or other dimensions.
    """

    def __init__(self, folder: Path, axis_of: AxisOf):
        self._shards = [TorchSource([path]) for path in meta_files(folder)]
        self.n_shards = len(self._shards)
        self.skipped = sorted({name for shard in self._shards for name in shard.skipped})
        self._axes: dict[str, int | None] = {}
        first = self._shards[0].tensors
        for shard in self._shards[1:]:
            if odd := sorted(first.keys() ^ shard.tensors.keys()):
                holder, other = (self._shards[0], shard) if odd[0] in first else (shard, self._shards[0])
                raise BadCheckpoint(
                    f"{holder.where(odd[0])}: holds {odd[0]}, {other.where(next(iter(other.tensors)))} does not "
                    f"({len(odd)} such names); expected the same names in all {self.n_shards} shards"
                )
        self.tensors: Mapping[str, TensorSpec] = {key: self._joined(key, axis_of) for key in first}

    def _joined(self, key: str, axis_of: AxisOf) -> TensorSpec:
        specs = [shard.tensors[key] for shard in self._shards]
        if len(specs) == 1:
            self._axes[key] = None
            return specs[0]
        shapes = [spec.shape for spec in specs]
        axis = self._axes[key] = axis_of(key, shapes)
        rest = {shape if axis is None else (*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        if len(rest) > 1 or len({spec.dtype for spec in specs}) > 1 or (axis is not None and axis >= len(shapes[0])):
            along = "copied to every shard" if axis is None else f"joined along axis {axis}"
            found = ", ".join(sorted({f"{spec.dtype}{list(spec.shape)}" for spec in specs}))
            raise BadCheckpoint(f"{self.where(key)} and the other shards: {key}, {along}, is {found}; these do not fit")
        if axis is None:
            return specs[0]
        length = sum(shape[axis] for shape in shapes)
        return TensorSpec(specs[0].dtype, (*shapes[0][:axis], length, *shapes[0][axis + 1 :]))

    def read(self, key: str, index: Index = ()) -> np.ndarray:
        axis = self._axes[key]
        if self.n_shards == 1:
            return self._shards[0].read(key, index)
        if axis is None:
            return self._agreed(key, index)
        if axis >= len(index):
            return frozen(np.concatenate([shard.read(key, index) for shard in self._shards], axis - len(index)))
        position = index[axis]
        for shard in self._shards:
            length = shard.tensors[key].shape[axis]
            if position < length:
                return shard.read(key, (*index[:axis], position, *index[axis + 1 :]))
            position -= length
        raise IndexError(f"{key}{list(index)}: outside of {self.tensors[key].shape}")

    def _agreed(self, key: str, index: Index) -> np.ndarray:
        first = self._shards[0].read(key, index)
        for shard in self._shards[1:]:
            if shard.read(key, index).tobytes() != first.tobytes():
                raise BadCheckpoint(
                    f"{key} should be the same in all shards, but {self.where(key)} and {shard.where(key)} differ"
                )
        return first

    def where(self, key: str) -> str:
        return self._shards[0].where(key)

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        for shard in self._shards:
            shard.close()
