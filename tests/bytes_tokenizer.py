"""The plainest tokenizer: a byte is a token. Small enough to work rows out by hand."""

from collections.abc import Sequence

from llmtool.evaluate.tokenizer import Tokenizer

BOS, EOS, FIRST = 1, 2, 3


class Bytes(Tokenizer):
    """Ids of bytes begin at 3; 1 is BOS, 2 is EOS, 0 is nothing's."""

    kind, bos_id, eos_id, size = "bytes", BOS, EOS, FIRST + 256

    def __init__(self, *, adds_bos: bool = True, sha: str = "ab" * 32):
        self.adds_bos, self.sha = adds_bos, sha
        self.encoded: list[str] = []  # every text it was given

    def encode_plain(self, text: str) -> list[int]:
        self.encoded.append(text)
        return [FIRST + byte for byte in text.encode()]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [{BOS: "<s>", EOS: "</s>"}.get(i) or chr(i - FIRST) for i in ids]
