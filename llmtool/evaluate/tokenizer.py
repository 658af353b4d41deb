"""The tokenizer of a checkpoint behind one small interface, whatever file it comes in."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from llmtool.convert.sidecars.json_file import TOKENIZER_LIMIT, read_bytes
from llmtool.convert.sidecars.tokenizer_files import sidecar_files, sniff_tokenizer_model, vocabulary_size
from llmtool.errors import BadCheckpoint, Contradiction, MissingFact

if TYPE_CHECKING:
    from llmtool.model_config import ModelConfig


class Tokenizer(ABC):
    """Text to token ids.

    ``encode`` does what ``tokenizer.encode(text)`` of transformers does with the checkpoint's files, special tokens
    included; ``encode_plain`` adds none. ``size`` is one more than the largest id, added tokens included; ``sha`` is
    the SHA-256 of the tokenizer's own file, in hex.
    """

    kind: str
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    size: int
    sha: str

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """The ids of ``text`` with no special token added."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """How the tokenizer itself spells each id, spaces marked its own way; for people to read."""
        return [str(i) for i in ids]

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` with the special tokens that this tokenizer adds of itself."""
        ids = self.encode_plain(text)
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file, or beside the checkpoint at ``path`` (a folder or a GGUF file).

    Where a folder has several, ``tokenizer.json`` comes first, as for transformers. Raises BadCheckpoint for a damaged
    file and MissingFact where there is none.
    """
    path = Path(path)
    if path.is_dir():
        files = {file.name: file for file in sidecar_files(path)}
        for name, load in _LOADERS.items():
            if name in files:
                tokenizer = load(files[name], files)
                tokenizer.size = max(tokenizer.size, vocabulary_size(path) or 0)
                return tokenizer
        gguf = sorted(path.glob("*.gguf"))
        if len(gguf) == 1:
            return _from_gguf(gguf[0])
        raise MissingFact(f"{path}: no tokenizer beside the checkpoint (looked for {', '.join(_LOADERS)}); "
                          "give one with --tokenizer FILE")
    if not path.exists():
        raise BadCheckpoint(f"{path}: no such tokenizer or checkpoint")
    if path.suffix == ".gguf":
        return _from_gguf(path)
    # a lone file: only what lies right beside it and belongs to its kind may speak for it
    beside = {name: path.parent / name for name in ("tokenizer_config.json", "merges.txt")
              if (path.parent / name).is_file()}
    if path.suffix != ".json":
        return _from_tokenizer_model(path, beside)
    return _LOADERS["vocab.json" if path.name == "vocab.json" else "tokenizer.json"](path, beside)


def check_vocabulary(tokenizer: Tokenizer, config: "ModelConfig") -> None:
    """Raise Contradiction where the tokenizer has ids for which the embedding has no row. Spare rows are fine."""
    if tokenizer.size > config.vocab_size:
        raise Contradiction(
            f"the tokenizer has {tokenizer.size} entries, but the embedding {config.vocab_size} rows: they do not "
            "belong together; give the model's own with --tokenizer")


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def _from_tokenizer_json(path: Path, files: dict[str, Path]) -> Tokenizer:
    from llmtool.evaluate.tokenizer_json import JsonTokenizer

    config = files.get("tokenizer_config.json")
    return JsonTokenizer.parse(read_bytes(path, TOKENIZER_LIMIT), str(path),
                               read_bytes(config) if config else None)


def _from_vocab_and_merges(path: Path, files: dict[str, Path]) -> Tokenizer:
    from llmtool.evaluate.tokenizer_json import from_vocab_and_merges

    if "merges.txt" not in files:
        raise BadCheckpoint(f"{path}: merges.txt, the other half of this tokenizer, is not beside it")
    return from_vocab_and_merges(read_bytes(path, TOKENIZER_LIMIT), read_bytes(files["merges.txt"], TOKENIZER_LIMIT),
                                 str(path))


def _from_tokenizer_model(path: Path, files: dict[str, Path]) -> Tokenizer:
    from llmtool.evaluate.tokenizer_model import Llama3Tokenizer, SentencePieceTokenizer

    if sniff_tokenizer_model(path) == "tiktoken":
        return Llama3Tokenizer(read_bytes(path, TOKENIZER_LIMIT), str(path))
    config = files.get("tokenizer_config.json")
    return SentencePieceTokenizer(read_bytes(path, TOKENIZER_LIMIT), str(path), read_bytes(config) if config else None)


def _from_gguf(path: Path) -> Tokenizer:
    from llmtool.convert.sidecars.gguf_facts import tokenizer_from_gguf
    from llmtool.convert.stores.gguf import GGUFSource
    from llmtool.evaluate.tokenizer_json import JsonTokenizer

    notes: list[str] = []
    with closing(GGUFSource(path)) as source:
        files = tokenizer_from_gguf(source.fields, notes)
    if "tokenizer.json" not in files:
        raise MissingFact(f"{path}: {'; '.join(notes)}; give a tokenizer with --tokenizer FILE")
    return JsonTokenizer.parse(files["tokenizer.json"], str(path), files["tokenizer_config.json"])


_LOADERS: dict[str, Callable[[Path, dict[str, Path]], Tokenizer]] = {
    "tokenizer.json": _from_tokenizer_json,
    "tokenizer.model": _from_tokenizer_model,
    "vocab.json": _from_vocab_and_merges,
}
