"""How EleutherAI's lm-evaluation-harness asks and counts: tasks lambada_openai (or _standard) and boolq.

Source: lm-evaluation-harness 0.4.13, the YAML of the two tasks, ``api/model.py`` (encoding) and
``models/huggingface.py`` (special tokens, truncation). Nothing is changed in a text: what stands after the last space
is the last word.
"""

from llmtool.errors import BadData, MissingFact
from llmtool.evaluate.items import BoolQItem, LambadaItem
from llmtool.evaluate.tokenizer import Tokenizer

Ids = tuple[int, ...]


def lambada_texts(item: LambadaItem) -> tuple[str, list[str]]:
    """The passage up to its last space, and the rest with that space in front."""
    context, _, word = item.text.rpartition(" ")
    if not word.strip():
        raise BadData(f"{item.where}: ends in a space, so that no last word is left to guess; remove it")
    return context, [" " + word]


def boolq_texts(item: BoolQItem) -> tuple[str, list[str]]:
    """The prompt, and the answers in the order of their indices: no, yes."""
    return f"{item.passage}\nQuestion: {item.question}?\nAnswer:", [" no", " yes"]


def encode(context: str, answers: list[str], tokenizer: Tokenizer, add_bos: bool | None) -> tuple[Ids, list[Ids]]:
    """Context and answer are encoded as one text, the context also alone; an answer is what the joint ids have more.

    White space that ends the context goes to the answers. An empty context is BOS, else EOS. ``add_bos``: None leaves
    the special tokens to the tokenizer, True and False force BOS.
    """
    stem = context.rstrip()
    answers = [context[len(stem):] + answer for answer in answers]
    if not stem:
        prefix = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if prefix is None:
            raise MissingFact("a passage has no context, and the tokenizer has neither BOS nor EOS to stand for it")
        return (prefix,), [tuple(tokenizer.encode_plain(answer)) for answer in answers]
    alone = _encode(stem, tokenizer, add_bos)
    return alone, [_encode(stem + answer, tokenizer, add_bos)[len(alone):] for answer in answers]


def _encode(text: str, tokenizer: Tokenizer, add_bos: bool | None) -> Ids:
    if add_bos is None:
        return tuple(tokenizer.encode(text))
    plain = tuple(tokenizer.encode_plain(text))
    if not add_bos:
        return plain
    if tokenizer.bos_id is None:
        raise MissingFact("BOS is asked for, but the tokenizer has no such token")
    return (tokenizer.bos_id, *plain)


def fit(context: Ids, answer: Ids, max_length: int | None, where: str) -> tuple[Ids, Ids, int]:
    """Keep the last ``max_length + 1`` ids (the last one is predicted, not read); the answer is never cut.

    Returns context, answer, and how many ids were dropped on the left.
    """
    if not answer:
        raise BadData(f"{where}: with its context in front the answer has no token of its own; this tokenizer joins "
                      "them, and the lm-eval protocol cannot score that")
    dropped = 0 if max_length is None else max(0, len(context) + len(answer) - (max_length + 1))
    if dropped >= len(context):
        raise BadData(f"{where}: the answer alone has {len(answer)} tokens; the model reads {max_length}")
    return context[dropped:], answer, dropped
