"""From a source word to what it names."""

from llmtool.errors import BadData
from llmtool.train.data.documents import Stream, Texts
from llmtool.train.data.words import JSONL, TEXT, Word, find_files


def open_texts(word: Word, field: str) -> Texts | Stream:
    """The documents of a word that names text (not token files, not synthetic data). Raises BadData if there are none.
    """
    source: Texts | Stream
    if word.kind == "jsonl":
        from llmtool.train.data.lines import open_jsonl

        source = open_jsonl(find_files(word.path, (*JSONL, ".json", ".gz", ".zst")), field)
    elif word.kind == "text":
        from llmtool.train.data.text_files import TextFiles

        source = TextFiles(find_files(word.path, TEXT))
    elif word.kind == "tfds":
        from llmtool.train.data.tfds import open_tfds

        source = open_tfds(word.path, word.split, field)
    elif word.kind == "hf":
        from llmtool.train.data.huggingface import open_hf

        source = open_hf(word.path, word.split, field)
    else:
        raise BadData(f"{word}: no text; expected jsonl, text, tfds or hf")
    if isinstance(source, Texts) and len(source) == 0:
        raise BadData(f"{word}: empty; expected documents")
    return source
