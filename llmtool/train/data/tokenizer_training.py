"""A SentencePiece model of one's own corpus."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from llmtool.convert.atomic import write_file
from llmtool.errors import BadData, BadTarget
from llmtool.train.data.documents import every_text
from llmtool.train.data.open import open_texts
from llmtool.train.data.words import parse_word

Kind = Literal["llama", "pax"]

# llama: what the trainer_spec inside Meta's LLaMA 1 and 2 tokenizer.model says. pax: the ids of the C4 vocabulary that
# the Pax GPT recipes use (padding and BOS 0, EOS 1), with T5's model type and normalization.
OPTIONS: dict[Kind, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "character_coverage": 0.99995, "split_digits": True, "byte_fallback": True,
              "allow_whitespace_only_pieces": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
    "pax": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "pad_id": 0, "eos_id": 1, "unk_id": 2,
            "bos_id": -1},
}
VOCABULARY: dict[Kind, int] = {"llama": 32_000, "pax": 50_257}


def train_tokenizer(sources: Sequence[str], target: str | Path, *, kind: Kind = "llama", vocab_size: int | None = None,
                    text_field: str = "text", max_lines: int = 5_000_000, seed: int = 0, workers: int = 1) -> int:
    """Train a ``.model`` on the lines of ``sources`` and write it to ``target``; the number of its entries.

    ``max_lines``: how many lines are drawn, at random, from all of them. Raises BadData where the corpus is too small
    for the vocabulary, and BadTarget where ``target`` is there already.
    """
    import sentencepiece

    target, size = Path(target), vocab_size or VOCABULARY[kind]
    if target.exists() or target.suffix != ".model":
        raise BadTarget(f"{target}: " + ("is there already; remove it, or choose another name" if target.exists()
                                         else "expected a name that ends in .model"))
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed)
    lines = _Lines(sources, text_field)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model,
            vocab_size=size, input_sentence_size=max_lines, shuffle_input_sentence=True,
            num_threads=workers, minloglevel=2, **OPTIONS[kind])
    except RuntimeError as error:
        lines.check()
        told = str(error).splitlines()[-1] if str(error) else "no reason given"
        raise BadData(f"{', '.join(sources)}: SentencePiece cannot make {size} entries of it: {told}. "
                      "Give more text, or a smaller --vocab-size") from error
    lines.check()
    write_file(target, model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


class _Lines:
    """Lines of the documents. SentencePiece takes an error for the end of the text, so it is kept and raised later."""

    def __init__(self, sources: Sequence[str], text_field: str):
        self.sources, self.text_field = sources, text_field
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for source in self.sources:
                for _, text in every_text(open_texts(parse_word(source), self.text_field)):
                    yield from (line for line in text.split("\n") if line.strip())
        except Exception as error:
            self.error = error
            raise

    def check(self) -> None:
        if self.error is not None:
            raise self.error
