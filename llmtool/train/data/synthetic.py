"""Made-up rows for tests of speed: varied, learnable, and the same for the same seed and number."""

import numpy as np

from llmtool.train.data.order import derive
from llmtool.train.data.rows import Row

_NOISE = 0.1


class SyntheticRows:
    """Each row is one full document: a motif of 4 to 64 tokens again and again, with a tenth of the tokens replaced.

    Tokens are drawn by Zipf's law over the vocabulary, as words are, so experts are not all asked for one token. What
    repeats can be learned; the noise cannot.
    """

    def __init__(self, seq_len: int, vocab_size: int, seed: int):
        self.seq_len, self.vocab_size, self.seed = seq_len, vocab_size, seed

    def row(self, number: int) -> Row:
        """Row ``number``, of which there is no last."""
        rng = np.random.Generator(np.random.PCG64((derive(self.seed, "synthetic"), number)))
        length = self.seq_len + 1
        motif = self._draw(rng, int(rng.integers(4, 65)))
        tokens = np.where(rng.random(length) < _NOISE, self._draw(rng, length), np.resize(motif, length))
        tokens = tokens.astype(np.int32)
        ones = np.ones(self.seq_len, np.int32)
        return Row(tokens[:-1], tokens[1:], ones.astype(np.float32), ones, np.arange(self.seq_len, dtype=np.int32),
                   np.array([number], np.int64))

    def _draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Rank r comes with a frequency near 1 / r: the inverse of its cumulated share, log r / log V."""
        return np.minimum((self.vocab_size + 1.0) ** rng.random(count), self.vocab_size) - 1
