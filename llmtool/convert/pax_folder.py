"""The folders of a Pax checkpoint: job, ``checkpoints/``, ``checkpoint_%08d``, ``state/`` and ``metadata/``."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtool.convert.sidecars.json_file import read_json
from llmtool.convert.stores.base import TensorSpec
from llmtool.errors import BadCheckpoint, UnknownLayout

_STEP = re.compile(r"(?:checkpoint_)?(\d{1,19})")
VERSION = 1.1


@dataclass(frozen=True)
class PaxFolder:
    """Where one step's arrays lie. ``version``: 0.0 (flat), 1.0, 1.1 (zarr), 1.2 (OCDBT); None for a bare folder."""

    root: Path  # what a user calls the checkpoint; sidecars and manifest lie here
    state: Path  # the folder of the arrays
    version: float | None
    step: int | None
    unpadded: Mapping[str, tuple[int, ...]]  # true shapes of arrays that are padded to a mesh
    notes: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """The layout key's value."""
        return "bare" if self.version is None else "flat" if self.version == 0 else "zarr"


def holds_arrays(folder: Path) -> bool:
    """Whether a folder directly holds zarr arrays of a Pax train state."""
    return any(entry.is_dir() and (entry / ".zarray").is_file() for entry in folder.glob("mdl_vars.*"))


def _steps(folder: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for entry in sorted(folder.iterdir()):
        if not _is_step(entry) or (match := _STEP.fullmatch(entry.name)) is None:
            continue
        if (other := found.setdefault(int(match[1]), entry)) != entry:
            raise BadCheckpoint(f"{folder}: {other.name} and {entry.name} are the same step; remove one of them")
    return found


def find_step(path: Path, step: int | None) -> PaxFolder | None:
    """Find one step in a job folder, a ``checkpoints/`` folder, a step folder or a bare folder of arrays; None if the
    path is none of these. Without ``step`` the newest is taken, with a note where there are several."""
    if not path.is_dir():
        return None
    if _is_step(path):
        return _open_step(path, _root(path, path), step)
    if holds_arrays(path):
        if path.name == "state" and _is_step(path.parent):
            return PaxFolder(_root(path.parent, path), path, None, None, _metadata(path.parent)[1])
        return PaxFolder(path, path, None, None, {})
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = _steps(folder)
    if not steps:
        return None
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        raise BadCheckpoint(f"{folder}: no step {step}; it holds: {', '.join(map(str, sorted(steps)))}")
    notes = (
        (f"steps {', '.join(map(str, sorted(steps)))} are there; took the newest, {chosen}",)
        if (step is None and len(steps) > 1)
        else ()
    )
    return _open_step(steps[chosen], _root(steps[chosen], path), step, notes)


def _root(step: Path, path: Path) -> Path:
    """Where the sidecars of a step lie: in its job's folder if there are any, else in the ``path`` that was given."""
    job = step.parent.parent if step.parent.name == "checkpoints" else step
    names = ("llmtool-manifest.json", "tokenizer.model", "tokenizer.json")
    return job if any((job / name).is_file() for name in names) else path


def _is_step(path: Path) -> bool:
    return bool(_STEP.fullmatch(path.name)) and ((path / "state").is_dir() or holds_arrays(path))


def _open_step(path: Path, root: Path, step: int | None, notes: tuple[str, ...] = ()) -> PaxFolder:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    number = int(match[1])
    if step is not None and step != number:
        raise BadCheckpoint(f"{path}: this is step {number}, not the step {step} asked for")
    version, unpadded = _metadata(path)
    state = path / "state" if (path / "state").is_dir() else path
    if version == 0 and state != path:
        notes += ("state/ without metadata/: paxml would not restore this folder",)
    if (state / "manifest.ocdbt").is_file():
        raise UnknownLayout(f"{state}: an OCDBT store (Pax version 1.2); this version reads 0.0 and 1.1 (zarr folders)")
    if (state / "checkpoint").is_file() and not holds_arrays(state):
        raise UnknownLayout(f"{state}: a FLAX msgpack checkpoint; this version reads Pax 0.0 and 1.1 (zarr folders)")
    return PaxFolder(root, state, version, number, unpadded, notes)


def _metadata(step_folder: Path) -> tuple[float, dict[str, tuple[int, ...]]]:
    """(version, true shapes by flat key) from ``metadata/metadata``; 0.0 where there is none."""
    path = step_folder / "metadata" / "metadata"
    if not path.is_file():
        return 0.0, {}
    data = read_json(path)
    version = data.get("version")
    if version not in (1.0, 1.1, 1.2):
        raise BadCheckpoint(f"{path}: version {version!r}; known are 1.0, 1.1 and 1.2")
    shapes: dict[str, tuple[int, ...]] = {}
    train_state = data.get("train_state_metadata") or {}
    try:
        _collect(train_state, "", shapes)
    except (TypeError, AttributeError, KeyError) as error:
        raise BadCheckpoint(f"{path}: train_state_metadata is not a tree of array metadata: {error}") from error
    return float(version), shapes


def _collect(node: Mapping[str, Any], prefix: str, out: dict[str, tuple[int, ...]]) -> None:
    for name, child in node.items():
        key = f"{prefix}.{name}" if prefix else name
        if child.get("_array_metadata_tag"):
            shape = child["unpadded_shape"]
            if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48 for n in shape):
                raise TypeError(f"unpadded_shape of {key} is {shape!r}")
            out[key] = tuple(shape)
        else:
            _collect(child, key, out)


def metadata_json(tensors: Mapping[str, TensorSpec]) -> str:
    """The text of ``metadata/metadata`` for a version 1.1 checkpoint of these arrays (``mdl_vars`` alone are listed,
    as paxml does; it compares names, shapes and dtypes with the model when it restores)."""
    tree: dict[str, Any] = {}
    for key, spec in sorted(tensors.items()):
        if not key.startswith("mdl_vars."):
            continue
        *path, leaf = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = {
            "_array_metadata_tag": True,
            "dtype": str(spec.dtype),
            "is_optax_masked_node": False,
            "unpadded_shape": list(spec.shape),
        }
    return json.dumps({"version": VERSION, "train_state_metadata": tree})
