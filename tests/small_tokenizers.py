"""Small tokenizers of each kind, made on the spot: a few hundred entries, enough English for the tests' texts."""

import base64
import io
import json
from pathlib import Path
from typing import Any

WORDS = """the red boat sank near the harbor and the old sailor told them about it while the rain fell on the quiet town
a small yellow house stood by the river where two children played every morning before the school bell rang yes no
question answer is it true that water can be found on the moon people do not know what the stars will say tonight"""


def sentencepiece_model(size: int = 400, **options: Any) -> bytes:
    """A SentencePiece BPE model with LLaMA's options: identity, byte fallback, a space before every text."""
    import sentencepiece

    out = io.BytesIO()
    like_llama = {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True,
                  "remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(WORDS.split("\n") * 20), model_writer=out,
                                             vocab_size=size, **like_llama | options)
    return out.getvalue()


def tiktoken_ranks(*words: str) -> bytes:
    """Ranks in Llama 3's form: the 256 bytes, then every prefix of the words from two bytes on."""
    tokens = [bytes([i]) for i in range(256)]
    for word in words:
        tokens += [token for end in range(2, len(word) + 1) if (token := word[:end].encode()) not in tokens]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def byte_level(*, bos: bool = False) -> dict[str, Any]:
    """A tokenizer.json in GPT-2's way with a few words; with ``bos``, its post-processor puts <s> first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in ("Ġthe", "Ġyes", "Ġno", "Ġharbor", "yes", "no", "boat", "Ġboat"):
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[:end - 1], word[end - 1]))
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                             special_tokens=[("<s>", 0)])
    return json.loads(inner.to_str())


def write_json_tokenizer(folder: Path, *, bos: bool = False, **config: Any) -> Path:
    """A folder with tokenizer.json and a tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level(bos=bos)))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder
