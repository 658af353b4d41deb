"""A tokenizer of 32 words and a few items in them, for the oracles' models of 32 ids."""

import json
import random
from pathlib import Path

_TEXT = """the red boat sank near old harbor and a man told them of it while rain fell on town yes no Question Answer
is : ?"""
WORDS = _TEXT.split()


def write_tokenizer(folder: Path) -> Path:
    """A word-level tokenizer.json; id 0 is <unk>, 1 <s>, 2 </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    inner.save(str(path))
    return path


def write_lambada(path: Path, n: int = 12, seed: int = 0) -> Path:
    """``n`` passages of 3 to 20 words."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS[:20], k=draw.randint(3, 20))) for _ in range(n)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_boolq(path: Path, n: int = 12, seed: int = 0) -> Path:
    """``n`` questions with SuperGLUE's field names."""
    draw = random.Random(seed)
    items = [{"passage": " ".join(draw.choices(WORDS[:20], k=draw.randint(3, 30))),
              "question": " ".join(draw.choices(WORDS[:20], k=4)), "label": draw.randint(0, 1)} for _ in range(n)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path
