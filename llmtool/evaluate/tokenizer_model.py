"""Meta's two kinds of ``tokenizer.model``: SentencePiece (LLaMA 1 and 2, Pax) and tiktoken ranks (Llama 3)."""

import base64
import binascii
from collections.abc import Sequence

from llmtool.convert.sidecars.json_file import Fields, parse_json
from llmtool.errors import BadCheckpoint
from llmtool.evaluate.tokenizer import Tokenizer, sha256

# the ids after the ranks, in order; source: Meta's llama3, llama/tokenizer.py
_RESERVED = [f"reserved_special_token_{i}" for i in range(251)]
_LLAMA3_SPECIAL = ["begin_of_text", "end_of_text", *_RESERVED[:4], "start_header_id", "end_header_id", _RESERVED[4],
                   "eot_id", *_RESERVED[5:]]
# how Llama 3 cuts text into words, same source
_LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                 r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, run by its own library, with BOS before every text where the model has one.

    These are the ids of Meta's code, of Pax (seqio) and of the tokenizer.json that Hugging Face ships for the same
    model: a space is put before every text, also before one that begins with a space. (transformers 5 that must build
    the tokenizer from the ``.model`` alone differs where two spaces meet, 537 of 5,153 LAMBADA passages, and does not
    add BOS unless the config says so; it is not followed there.) Names of special tokens inside a text are plain text.
    """

    kind = "SentencePiece"

    def __init__(self, data: bytes, where: str, config: bytes | None = None):
        from sentencepiece import SentencePieceProcessor

        self.inner = SentencePieceProcessor()
        try:
            self.inner.LoadFromSerializedProto(data)
        except (RuntimeError, OSError) as error:
            raise BadCheckpoint(f"{where}: the sentencepiece library cannot read it: {error}") from error
        told = Fields(parse_json(config, f"{where}: its tokenizer_config.json"), where) if config else None
        self.sha, self.size = sha256(data), self.inner.get_piece_size()
        self.bos_id, self.eos_id = (i if i >= 0 else None for i in (self.inner.bos_id(), self.inner.eos_id()))
        self.adds_bos = self.bos_id is not None and not (told and told.flag("add_bos_token") is False)

    def encode_plain(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.inner.id_to_piece(i) for i in ids]


class Llama3Tokenizer(Tokenizer):
    """Llama 3's ranks, 256 special tokens after them. Adds ``<|begin_of_text|>``; reads special tokens in a text."""

    kind = "tiktoken"

    def __init__(self, data: bytes, where: str):
        import tiktoken

        ranks = _ranks(data, where)
        special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(_LLAMA3_SPECIAL)}
        self.inner = tiktoken.Encoding("llama3", pat_str=_LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)
        self.sha, self.size = sha256(data), len(ranks) + len(special)
        self.bos_id, self.eos_id, self.adds_bos = len(ranks), len(ranks) + 1, True

    def encode_plain(self, text: str) -> list[int]:
        return self.inner.encode(text, allowed_special="all")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.inner.decode_single_token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Token: rank. The ranks must be 0, 1, 2, … and every single byte must have one."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError) as error:
            raise BadCheckpoint(f"{where}: line {number} is not a token and its rank; fetch the file again") from error
    if sorted(ranks.values()) != list(range(len(data.splitlines()))):
        raise BadCheckpoint(f"{where}: the ranks are not 0 to {len(data.splitlines()) - 1}, each once; "
                            "fetch the file again")
    if missing := sum(bytes([i]) not in ranks for i in range(256)):
        raise BadCheckpoint(f"{where}: {missing} of the 256 single bytes have no rank; fetch the file again")
    return ranks
