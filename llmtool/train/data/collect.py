"""A small source, tokenized whole at the start: rows by index then, passes of known length, a true shuffle."""

from array import array

import numpy as np

from llmtool.errors import BadData
from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.train.data.documents import Stream, Texts, encode, every_text
from llmtool.train.data.tokens import MemoryTokens, token_dtype

MOST_TOKENS = 1 << 28  # held in memory, 1 GiB at most


def collect(source: Texts | Stream, tokenizer: Tokenizer, name: str, enough: int | None = None) -> MemoryTokens:
    """The documents' tokens; with ``enough``, only as many documents as have that many tokens.

    Raises BadData for a source that is empty, or too large to be held.
    """
    ids = array("H" if token_dtype(tokenizer.size) == "uint16" else "I")
    offsets = array("Q", [0])
    for where, text in every_text(source):
        found = encode(tokenizer, text, where)
        ids.frombytes(found.astype(ids.typecode).tobytes())
        offsets.append(len(ids))
        if len(ids) > MOST_TOKENS:
            raise BadData(f"{name}: more than {MOST_TOKENS:,} tokens, which is too much to count at the start of each "
                          "run, as epochs and validation need; make token files once with `llmtool data tokenize`")
        if enough is not None and len(ids) >= enough:
            break
    if not ids:
        raise BadData(f"{name}: empty; expected documents with text")
    return MemoryTokens(np.frombuffer(ids, ids.typecode), np.frombuffer(offsets, np.uint64).astype(np.int64))
