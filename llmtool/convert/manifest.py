"""``llmtool-manifest.json``: what a conversion knew and the weights alone do not show, and a hash for every slot."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtool import __version__
from llmtool.convert.layout_word import parse_word
from llmtool.convert.model_config_file import config_from_ours
from llmtool.convert.row import slot_key
from llmtool.convert.sidecars.json_file import read_json
from llmtool.convert.stores.base import DTYPES, Source, TensorSpec
from llmtool.convert.stores.files import octets
from llmtool.convert.stores.safetensors import SafetensorsSource
from llmtool.errors import BadCheckpoint, Contradiction, UnknownLayout
from llmtool.model_config import ModelConfig

NAME = "llmtool-manifest.json"
REMAINDERS = "llmtool-remainders.bits"  # safetensors; loaders that take every *.safetensors must not see it
SCHEMA = "llmtool.manifest/1"
_RESTORED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")  # what a shifted scale is widened from


@dataclass(frozen=True)
class Manifest:
    """``layout`` is the full layout word; ``tensors`` maps a slot to its dtype, shape and xxh3-64; ``restore`` maps a
    weight that a layout had to widen to the dtype it had; ``remainders`` maps a slot to what rounding took from it."""

    layout: str
    model: ModelConfig
    source: str
    step: int | None = None
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    restore: Mapping[str, np.dtype] = field(default_factory=dict)
    remainders: Mapping[str, np.ndarray] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest, and the remainders beside it where there are any."""
        data = {
            "schema": SCHEMA,
            "llmtool": __version__,
            "layout": self.layout,
            "source": self.source,
            "step": self.step,
            "model": self.model.to_json(),
            "restore": {name: str(dtype) for name, dtype in sorted(self.restore.items())},
            "remainders": REMAINDERS if self.remainders else None,
            "tensors": self.tensors,
        }
        (folder / NAME).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if self.remainders:
            from safetensors.numpy import save_file

            save_file({key: np.ascontiguousarray(x) for key, x in self.remainders.items()}, folder / REMAINDERS)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a folder, or None. A damaged one is an error: its facts would be missing without a word."""
    path = folder / NAME
    if not path.is_file():
        return None
    data = read_json(path)
    if data.get("schema") != SCHEMA:
        raise BadCheckpoint(f"{path}: schema {data.get('schema')!r}; this version reads {SCHEMA}")
    try:
        remainders: dict[str, np.ndarray] = {}
        if data.get("remainders"):
            if data["remainders"] != REMAINDERS:
                raise BadCheckpoint(f"{path}: remainders {data['remainders']!r}; expected {REMAINDERS}")
            source = SafetensorsSource(folder / REMAINDERS)
            remainders = {key: source.read(key) for key in source.tensors}
        if (step := data["step"]) is not None and not (type(step) is int and 0 <= step < 1 << 63):
            raise BadCheckpoint(f"{path}: step is {str(step)[:40]!r}; expected a whole number from 0 up")
        for slot in data["tensors"]:
            slot_key(slot)  # ValueError where it is none
        if lossy := [dtype for dtype in data["restore"].values() if dtype not in _RESTORED]:
            raise BadCheckpoint(f"{path}: restore names {str(lossy[0])[:40]!r}; expected {' or '.join(_RESTORED)}")
        return Manifest(
            layout=str(parse_word(data["layout"])),
            model=config_from_ours(data["model"], f"{path}: model"),
            source=str(data["source"]),
            step=step,
            tensors={slot: {**entry, "shape": list(entry["shape"])} for slot, entry in data["tensors"].items()},
            restore={name: DTYPES[dtype] for name, dtype in data["restore"].items()},
            remainders=remainders,
        )
    except UnknownLayout as error:
        raise BadCheckpoint(f"{path}: layout: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not a manifest of this schema: {type(error).__name__} {error}") from error


def manifest_of(folder: Path, tensors: Mapping[str, TensorSpec], notes: list[str] | None = None) -> Manifest | None:
    """The manifest in a folder, if it tells of these arrays. One of others (of another checkpoint, or of what was here
    before) is left out with a note; without ``notes``, where facts may hang on it, it is a Contradiction."""
    manifest = read_manifest(folder)
    for slot, entry in manifest.tensors.items() if manifest else ():
        key, index = slot_key(slot)
        found = list(tensors[key].shape[len(index) :]) if key in tensors else None
        if found != entry["shape"]:
            what = f"{found} here" if found is not None else "not here"
            told = f"{folder / NAME}: tells of another checkpoint: {slot} is {entry['shape']} there and {what}"
            if notes is None:
                raise Contradiction(
                    f"{told}; put the right one there, or remove it and say what it should have told (--from, "
                    "--model-config)"
                )
            notes.append(f"{told}; it is not used")
            return None
    return manifest


def unchanged(manifest: Manifest, source: Source, slots: Mapping[str, tuple[str, tuple[int, ...]]]) -> set[str]:
    """Those of ``slots`` (slot: key and index) whose arrays are still the ones that the manifest hashed."""
    kept = set()
    for slot, (key, index) in slots.items():
        entry = manifest.tensors.get(slot)
        if entry is not None and key in source.tensors:
            x = np.ascontiguousarray(source.read(key, index))
            if entry.get("xxh3") == xxhash.xxh3_64(octets(x)).hexdigest():
                kept.add(slot)
    return kept
