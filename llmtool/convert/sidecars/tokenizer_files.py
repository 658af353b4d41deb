"""The files beside a checkpoint that travel with it: tokenizers, chat template, generation config.

They are copied byte for byte and never interpreted, but for two questions: of which kind is a ``tokenizer.model`` (its
name does not tell), and how many ids can the tokenizer give (the embedding must have a row for each).
"""

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from llmtool.convert.sidecars import protobuf
from llmtool.convert.sidecars.json_file import TOKENIZER_LIMIT, read_bytes, read_json
from llmtool.errors import BadCheckpoint, BadTarget

PATTERNS = ("tokenizer.model", "tokenizer.model.v*", "tokenizer.json", "tokenizer_config.json", "tekken.json",
            "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "*.tiktoken",
            "generation_config.json", "chat_template.jinja", "chat_template.json")
_TOKENIZERS = frozenset(("tokenizer.model", "tokenizer.json", "tekken.json", "vocab.json", "vocab.txt"))
_STEP = re.compile(r"checkpoint_\d+|\d+|checkpoints|state")  # folders of one training job, below the job's own
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s*")
_LLAMA3_SPECIAL = 256  # ids after the ranks of Llama 3's file; no other release ships its ranks as tokenizer.model


def sidecar_files(folder: Path) -> list[Path]:
    """The files that travel with the checkpoint in ``folder``, one of each name, sorted by name.

    A tokenizer may also lie one folder up: beside the sizes of a Meta download, or in the folder of the training job
    above a Pax step; and Hugging Face's Llama 3 keeps Meta's own under ``original/``. Raises BadCheckpoint for a link
    that leaves the checkpoint and for what is not a regular file.
    """
    found = {path.name: path for path in _matching(folder)}
    if not _TOKENIZERS & found.keys():
        for above in _places_above(folder):
            found = {path.name: path for path in _matching(above)} | found
    original = folder / "original" / "tokenizer.model"
    if "tokenizer.model" not in found and original.is_file():
        found["tokenizer.model"] = _inside(original, folder)
    return [found[name] for name in sorted(found)]


def _places_above(folder: Path) -> Iterator[Path]:
    folder = Path(os.path.abspath(folder))
    if next(folder.glob("consolidated*.pth"), None):
        yield folder.parent
    while _STEP.fullmatch(folder.name):
        folder = folder.parent
        yield folder


def _matching(folder: Path) -> Iterator[Path]:
    if folder.is_dir():  # listed, not globbed: glob passes over a link whose end is missing, without a word
        yield from (_inside(path, folder) for path in folder.iterdir()
                    if any(fnmatchcase(path.name, pattern) for pattern in PATTERNS))


def _inside(path: Path, folder: Path) -> Path:
    """``path``, if it is a regular file of the checkpoint. The hub's cache keeps the bytes in ``../../blobs``."""
    root = folder.resolve()
    real = path.resolve()
    allowed = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    if not any(real.is_relative_to(place) for place in allowed):
        raise BadCheckpoint(f"{path}: a link that leaves the checkpoint, to {real}; put the file itself there")
    if not real.is_file():
        raise BadCheckpoint(f"{path}: not a regular file; expected one")
    return path


def copy_sidecars(files: Iterable[Path], target: Path) -> list[str]:
    """Copy files into ``target`` byte for byte, synced to disk, and return their names."""
    names = []
    for path in files:
        try:
            with path.open("rb") as source, (target / path.name).open("wb") as copy:
                while block := source.read(1 << 22):
                    copy.write(block)
                copy.flush()
                os.fsync(copy.fileno())
        except OSError as error:
            raise BadTarget(f"{path}: cannot be copied to {target}: {error.strerror or error}") from error
        names.append(path.name)
    return names


def sniff_tokenizer_model(path: Path) -> Literal["sentencepiece", "tiktoken"]:
    """Of which kind a ``tokenizer.model`` is, by its content; anything else is a BadCheckpoint that says what it is."""
    return _kind(read_bytes(Path(path), TOKENIZER_LIMIT), path)


def _kind(data: bytes, path: Path) -> Literal["sentencepiece", "tiktoken"]:
    if not data.strip():
        raise BadCheckpoint(f"{path}: empty; fetch the tokenizer again")
    if _RANK.fullmatch(data[:4096].split(b"\n", 1)[0]):
        return "tiktoken"
    if data.lstrip()[:1] in (b"<", b"{"):
        what = "a web page" if data.lstrip()[:1] == b"<" else "JSON"
        raise BadCheckpoint(f"{path}: {what}; expected a SentencePiece model or tiktoken ranks")
    try:
        pieces = _pieces(data)
    except ValueError as error:
        raise BadCheckpoint(f"{path}: neither a whole SentencePiece model nor tiktoken ranks ({error}); "
                            "fetch it again") from error
    if not pieces:
        raise BadCheckpoint(f"{path}: no SentencePiece model: it has no pieces; fetch it again")
    return "sentencepiece"


def _pieces(data: bytes) -> int:
    """Pieces of a SentencePiece ModelProto, its field 1; ValueError where the bytes are no protocol buffer."""
    return sum(1 for field, wire, _ in protobuf.fields(data) if (field, wire) == (1, 2))


def vocabulary_size(folder: Path) -> int | None:
    """One more than the largest id that the tokenizer in ``folder`` can give, added tokens included; None without one.

    This is the number of rows that the embedding needs. Raises BadCheckpoint for a tokenizer file that is damaged.
    """
    files = {path.name: path for path in sidecar_files(folder)}
    if not _COUNT_WHOLE.keys() & files.keys():
        return None  # added tokens alone do not tell how many there are below them
    return max(count(files[name]) for name, count in (_COUNT_WHOLE | _COUNT_ADDED).items() if name in files)


def _of_tokenizer_json(path: Path) -> int:
    data = read_json(path, TOKENIZER_LIMIT)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = data.get("added_tokens") or []
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise BadCheckpoint(f"{path}: no tokenizer.json: model.vocab or added_tokens is missing or of a wrong type")
    ids = [token.get("id") if isinstance(token, dict) else None for token in added]
    base = len(vocabulary) if isinstance(vocabulary, list) else _largest(vocabulary.values(), path)
    return max(base, _largest(ids, path))


def _of_vocab_json(path: Path) -> int:
    return _largest(read_json(path, TOKENIZER_LIMIT).values(), path)


def _of_tokenizer_config(path: Path) -> int:
    tokens = read_json(path, TOKENIZER_LIMIT).get("added_tokens_decoder") or {}
    if not isinstance(tokens, dict):
        raise BadCheckpoint(f"{path}: added_tokens_decoder is not an object")
    return _largest((int(key) if re.fullmatch("[0-9]{1,15}", key) else None for key in tokens), path)


def _of_tokenizer_model(path: Path) -> int:
    data = read_bytes(path, TOKENIZER_LIMIT)
    if _kind(data, path) == "sentencepiece":
        return _pieces(data)
    ranks = []
    for number, line in enumerate(data.splitlines(), 1):
        if not _RANK.fullmatch(line):
            raise BadCheckpoint(f"{path}: line {number} is not a token and its rank; fetch the file again")
        ranks.append(int(line.split()[1]))
    return max(ranks) + 1 + _LLAMA3_SPECIAL


def _of_vocab_txt(path: Path) -> int:
    return len(read_bytes(path, TOKENIZER_LIMIT).splitlines())


_COUNT_WHOLE = {"tokenizer.json": _of_tokenizer_json, "tokenizer.model": _of_tokenizer_model,
                "vocab.json": _of_vocab_json, "vocab.txt": _of_vocab_txt}
_COUNT_ADDED = {"added_tokens.json": _of_vocab_json, "tokenizer_config.json": _of_tokenizer_config}


def _largest(ids: Iterable[Any], path: Path) -> int:
    """One more than the largest of some token ids; 0 without any."""
    ids = list(ids)
    if not all(type(i) is int and 0 <= i < 1 << 48 for i in ids):
        raise BadCheckpoint(f"{path}: token ids must be whole numbers from 0")
    return max(ids, default=-1) + 1
