"""Open a GGUF file, or a folder that holds one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.facts import Facts, resolve
from llmtool.convert.layout_word import Word
from llmtool.convert.layouts import gguf
from llmtool.convert.sidecars.gguf_facts import config_from_gguf, tokenizer_from_gguf
from llmtool.convert.stores.gguf import GGUFSource

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's stretching of each frequency, as numbers


def recognises(path: Path) -> bool:
    """Whether a path looks like this layout."""
    return find(path) is not None


def find(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if len(files) == 1 else None


def open_gguf(path: Path, word: Word, told: Facts | None, expected: Mapping[str, Any]) -> Checkpoint:
    """Headers and facts of a GGUF file; its tokenizer becomes tokenizer.json in a conversion."""
    file = find(path)
    assert file is not None
    source = GGUFSource(file)
    embedding = source.tensors.get("token_embd.weight")
    factors = source.read(ROPE_FACTORS).tolist() if ROPE_FACTORS in source.tensors else None
    notes: list[str] = []
    config = config_from_gguf(
        source.fields,
        source.tensors,
        str(file),
        vocab_size=embedding.shape[0] if embedding else None,
        rope_factors=factors,
        notes=notes,
    )
    files = tokenizer_from_gguf(source.fields, notes)
    facts = resolve(str(file), vars(config), told=told, expected=expected)
    return Checkpoint(
        path=path,
        word=word,
        source=source,
        facts=facts.facts,
        config=facts.config,
        root=file.parent,
        build_table=gguf.table,
        missing_facts=facts.missing,
        remarks=notes + facts.notes,
        notes=[f"packed as {kind}: {n} arrays, which become float32" for kind, n in source.quantised.items()],
        files=files,
    )
