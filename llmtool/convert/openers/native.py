"""Open the trainer's own layout: ``model.json`` beside a ``params`` folder of zarr arrays.

A training run keeps one such folder for every step that it saved: ``RUN/checkpoints/STEP/model``. Steps that are not
finished have another name, so that whatever is called by a number is complete.
"""

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
from llmtool.errors import BadCheckpoint

MODEL, PARAMS = "model.json", "params"
STEPS, ITEM = "checkpoints", "model"  # of a run


def recognises(path: Path) -> bool:
    """Whether a path looks like this layout: the folder itself, or one of the run's above it."""
    return _is_plain(path) or _is_plain(path / ITEM) or bool(saved_steps(path))


def saved_steps(path: Path) -> dict[int, Path]:
    """The native folder of every step of a run, or of its ``checkpoints`` folder; empty where it is neither."""
    folder = path / STEPS if (path / STEPS).is_dir() else path
    entries = folder.iterdir() if folder.is_dir() else ()
    steps = {entry.name: entry / ITEM for entry in entries if entry.name.isdecimal() and entry.name.isascii()}
    return {int(name): steps[name] for name in sorted(steps) if _is_plain(steps[name])}


def _is_plain(path: Path) -> bool:
    return (path / MODEL).is_file() and (path / PARAMS).is_dir()


def _find(path: Path, step: int | None) -> tuple[Path, int | None, list[str]]:
    """(folder, its step if it is one of a run, notes); the newest step unless one is asked for."""
    plain = next((folder for folder in (path, path / ITEM) if _is_plain(folder)), None)
    if plain is not None:
        name = plain.parent.name if plain.name == ITEM else ""
        number = int(name) if name.isdecimal() and name.isascii() else None
        if step is not None and step != number:
            raise BadCheckpoint(
                f"{path}: this is {'one checkpoint' if number is None else f'step {number}'}, not the "
                f"step {step} asked for; give the run's folder"
            )
        return plain, number, []
    steps = saved_steps(path)
    chosen = max(steps) if step is None else step
    listed = ", ".join(map(str, sorted(steps)))
    if chosen not in steps:
        raise BadCheckpoint(f"{path}: no step {step}; it holds: {listed}")
    many = step is None and len(steps) > 1
    return steps[chosen], chosen, [f"steps {listed} are there; took the newest, {chosen}"] if many else []


def open_native(
    path: Path, word: Word, told: Facts | None, expected: Mapping[str, Any], step: int | None = None
) -> Checkpoint:
    """Headers and facts of a native checkpoint, or of one ``step`` of a run (default: the newest)."""
    given = path
    path, number, notes = _find(path, step)
    found = vars(load_model_config(str(path / MODEL)))
    source = ZarrSource(path / PARAMS)
    manifest = manifest_of(path, source.tensors, notes)
    facts = resolve(str(path / MODEL), found, told=told, expected=expected)
    return Checkpoint(
        path=given,
        word=word,
        source=source,
        facts=facts.facts,
        config=facts.config,
        root=path,
        build_table=native.table,
        manifest=manifest,
        missing_facts=facts.missing,
        remarks=notes + facts.notes,
        step=manifest.step if manifest else number,
    )
