"""Open the trainer's own layout: ``model.json`` beside a ``params`` folder of zarr arrays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.facts import Facts, resolve
from llmtool.convert.layout_word import Word
from llmtool.convert.layouts import native
from llmtool.convert.manifest import manifest_of
from llmtool.convert.model_config_file import load_model_config
from llmtool.convert.stores.zarr import ZarrSource

MODEL, PARAMS = "model.json", "params"


def recognises(path: Path) -> bool:
    """Whether a path looks like this layout."""
    return (path / MODEL).is_file() and (path / PARAMS).is_dir()


def open_native(path: Path, word: Word, told: Facts | None, expected: Mapping[str, Any]) -> Checkpoint:
    """Headers and facts of a native checkpoint."""
    found = vars(load_model_config(str(path / MODEL)))
    source, notes = ZarrSource(path / PARAMS), list[str]()
    manifest = manifest_of(path, source.tensors, notes)
    facts = resolve(str(path / MODEL), found, told=told, expected=expected)
    return Checkpoint(
        path=path,
        word=word,
        source=source,
        facts=facts.facts,
        config=facts.config,
        root=path,
        build_table=native.table,
        manifest=manifest,
        missing_facts=facts.missing,
        remarks=notes + facts.notes,
        step=manifest.step if manifest else None,
    )
