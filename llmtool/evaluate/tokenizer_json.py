"""Tokenizers of the ``tokenizers`` library: ``tokenizer.json``, and GPT-2's older pair of vocabulary and merges."""

from collections.abc import Sequence
from typing import Any

from llmtool.convert.sidecars.json_file import parse_json
from llmtool.errors import BadCheckpoint
from llmtool.evaluate.tokenizer import Tokenizer, sha256


class JsonTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer``.

    Its post-processor alone decides what is added to a text: transformers 5 sets ``add_bos_token`` of
    tokenizer_config.json aside where there is a tokenizer.json.
    """

    kind = "tokenizer.json"

    def __init__(self, inner: Any, sha: str, bos: str | None, eos: str | None):
        inner.no_truncation()
        inner.no_padding()
        self.inner, self.sha = inner, sha
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        first, plain = (inner.encode("a", add_special_tokens=add).ids[:1] for add in (True, False))
        put_first = first[0] if first != plain else None
        if bos is None:  # no config beside it: what comes before a text is the BOS
            bos = next((token for token, i in vocabulary.items() if i == put_first), None)
        self.bos, self.bos_id = bos, vocabulary.get(bos) if bos else None
        self.eos_id = vocabulary.get(eos) if eos else None
        self.adds_bos = self.bos_id is not None and put_first == self.bos_id

    @classmethod
    def parse(cls, data: bytes, where: str, config: bytes | None) -> "JsonTokenizer":
        """From the bytes of tokenizer.json and, where there is one, of tokenizer_config.json."""
        import tokenizers

        parse_json(data, where)  # says better than the library what a file is that is not JSON
        try:
            inner = tokenizers.Tokenizer.from_str(data.decode("utf-8-sig"))
        except Exception as error:  # the library raises nothing narrower
            raise BadCheckpoint(f"{where}: not a tokenizer.json that the tokenizers library "
                                f"{tokenizers.__version__} reads: {error}") from error
        told = parse_json(config, f"{where}: its tokenizer_config.json") if config else {}
        return cls(inner, sha256(data), _content(told.get("bos_token")), _content(told.get("eos_token")))

    def encode_plain(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self.inner.id_to_token(i) or "" for i in ids]

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=self._frames(text)).ids

    def _frames(self, text: str) -> bool:
        return not (self.bos and text.startswith(self.bos))  # lm-eval: a text that has its BOS gets no second one


def from_vocab_and_merges(vocab: bytes, merges: bytes, where: str) -> JsonTokenizer:
    """GPT-2's byte-level BPE, which adds nothing; <|endoftext|> is both BOS and EOS."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    table = parse_json(vocab, where)
    try:
        lines = merges.decode("utf-8").split("\n")
        pairs = [(left, right) for left, right in
                 (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        inner = Inner(models.BPE(vocab=table, merges=pairs))
    except Exception as error:  # the library raises nothing narrower
        raise BadCheckpoint(f"{where}: it and merges.txt are no byte-level BPE: {error}") from error
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    if end in table:
        inner.add_special_tokens([end])
    return JsonTokenizer(inner, sha256(vocab + merges), end, end)


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json is a string, or an object that holds it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
