"""``llmtool-manifest.json``: what a conversion knew and the weights alone do not show, and a hash for every slot."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmtool import __version__
from llmtool.convert.sidecars.json_file import read_json
from llmtool.convert.stores.base import DTYPES, Source
from llmtool.convert.stores.files import octets
from llmtool.convert.stores.safetensors import SafetensorsSource
from llmtool.errors import BadCheckpoint
from llmtool.model_config import ModelConfig

NAME = "llmtool-manifest.json"
REMAINDERS = "llmtool-remainders.safetensors"
SCHEMA = "llmtool.manifest/1"


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
            remainders = {key: np.array(source.read(key)) for key in source.tensors}
        return Manifest(
            layout=str(data["layout"]),
            model=ModelConfig.from_json(data["model"], str(path)),
            source=str(data["source"]),
            step=data["step"],
            tensors=dict(data["tensors"]),
            restore={name: DTYPES[dtype] for name, dtype in data["restore"].items()},
            remainders=remainders,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: not a manifest of this schema: {type(error).__name__} {error}") from error


def unchanged_remainders(
    manifest: Manifest, source: Source, slots: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The remainders whose arrays are still those that the manifest hashed, and a note on those that are not."""
    kept, stale = {}, []
    for slot, rest in manifest.remainders.items():
        if slot not in slots:
            continue
        x = np.ascontiguousarray(source.read(*slots[slot]))
        entry = manifest.tensors.get(slot, {})
        if rest.shape == x.shape and entry.get("xxh3") == xxhash.xxh3_64(octets(x)).hexdigest():
            kept[slot] = rest
        else:
            stale.append(slot)
    notes = (
        [
            f"{len(stale)} arrays changed since the manifest was written (first: {stale[0]}); "
            "their recorded rounding remainders are not used"
        ]
        if stale
        else []
    )
    return kept, notes
