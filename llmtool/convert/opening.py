"""Find out which layout a path holds, and open it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.facts import Facts, known_facts
from llmtool.convert.layout_word import Word, parse_word
from llmtool.errors import BadCheckpoint, UnknownLayout
from llmtool.model_config import ModelConfig


def open_checkpoint(
    path: str | Path,
    *,
    layout: str | None = None,
    model_config: str | ModelConfig | None = None,
    step: int | None = None,
    expected: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint in any layout, from its headers alone.

    ``layout``: a layout word where the files do not say enough, or to insist; ``model_config``: facts that the files
    lack (a file, a preset's name or a ModelConfig); ``step``: of a Pax job, or of a run of ours, with several;
    ``expected``: facts that must hold (fields of ModelConfig). Raises an LlmtoolError that says what was found and
    what to do.
    """
    path = Path(path)
    if not path.exists():
        raise BadCheckpoint(f"{path}: no such file or folder")
    told = _told(model_config)
    word = parse_word(layout) if layout else None
    return _open(path, word, told, dict(expected or {}), step)


def _told(model_config: str | ModelConfig | None) -> Facts | None:
    if model_config is None:
        return None
    if isinstance(model_config, ModelConfig):
        return known_facts(model_config)
    from llmtool.convert.model_config_file import load_facts

    return load_facts(model_config)


def _open(
    path: Path, word: Word | None, told: Facts | None, expected: Mapping[str, Any], step: int | None
) -> Checkpoint:
    from llmtool.convert.openers import gguf, hf, meta, native, pax

    openers = {
        "native": (native.recognises, native.open_native),
        "meta": (meta.recognises, meta.open_meta),
        "gguf": (gguf.recognises, gguf.open_gguf),
        "hf": (hf.recognises, hf.open_hf),
    }
    if word is None or word.name in ("pax", "te"):
        opened = pax.open_pax_path(path, word, told, expected, step)
        if opened is not None:
            return opened
    found = [name for name, (recognises, _) in openers.items() if recognises(path)]
    if word is not None:
        if word.name not in found:
            raise UnknownLayout(
                f"{path}: does not look like a {word.name} checkpoint"
                + (f"; it looks like {found[0]}" if found else f"; {_listing(path)}")
            )
        found = [word.name]
    if not found:
        raise UnknownLayout(
            f"{path}: no checkpoint layout found; {_listing(path)}. Expected config.json with safetensors or .bin "
            "(hf), consolidated.NN.pth (meta), checkpoints/checkpoint_NNNNNNNN (pax, te), model.json with params/ "
            "(native) or a .gguf file"
        )
    if found[0] == "native":
        return native.open_native(path, word or Word("native"), told, expected, step)
    if step is not None:
        raise UnknownLayout(f"{path}: --step is for Pax checkpoints and for runs of ours; this is {found[0]}")
    return openers[found[0]][1](path, word or Word(found[0]), told, expected)


def _listing(path: Path) -> str:
    if not path.is_dir():
        return "it is a file; give the folder that it lies in, unless it is a .safetensors or .gguf file"
    names = sorted(entry.name for entry in path.iterdir())[:8]
    return "it holds: " + (", ".join(names) if names else "nothing")
