"""How Pax asks and counts: the seed's Lambada (``acc_strict``) and BoolQ (``boolq_acc``) tasks.

Source: paxml ``contrib/gpu/scripts_gpu`` (tfds_lambada.py, tasks.py), praxis ``contrib/gpu/scripts_gpu/models.py``,
seqio's preprocessors. Context and target are encoded apart, each cut on its right; BOS always comes first.
"""

from llmtool.errors import BadData, Contradiction
from llmtool.evaluate.items import BoolQItem, LambadaItem
from llmtool.evaluate.tokenizer import Tokenizer

Ids = tuple[int, ...]

TARGET_LIMIT = 64                               # tokens
CONTEXT_LIMIT = {"lambada": 1984, "boolq": 4032}  # tokens, BOS not counted: 2048 and 4096 together with the target
_STRAIGHT = str.maketrans("“”‘’", "\"\"''")


def lambada_texts(item: LambadaItem) -> tuple[str, list[str]]:
    """Straight quotes; the last word by any white space, one space before it, and what stands before, stripped."""
    text = item.text.translate(_STRAIGHT)
    word = text.split()[-1]
    return text[:text.rindex(word)].strip(), [" " + word]


def boolq_texts(item: BoolQItem) -> tuple[str, list[str]]:
    """The prompt, and the answers in the order of their indices: no, yes."""
    return f"{item.passage}\nquestion: {item.question}?\nanswer:", ["no", "yes"]


def encode(context: str, answers: list[str], tokenizer: Tokenizer) -> tuple[Ids, list[Ids]]:
    """BOS (id 0 where the tokenizer has none, as in the GPT presets) and the context; each answer by itself."""
    bos = tokenizer.bos_id if tokenizer.bos_id is not None else 0
    return (bos, *tokenizer.encode_plain(context)), [tuple(tokenizer.encode_plain(answer)) for answer in answers]


def check_answers(no: Ids, yes: Ids) -> None:
    """``boolq_acc`` compares the logits of two tokens, so each answer must be one."""
    if len(no) != 1 or len(yes) != 1 or no == yes:
        raise Contradiction(
            f'the pax protocol compares one token of "no" with one of "yes", but this tokenizer writes them as '
            f"{list(no)} and {list(yes)}; use --protocol lm-eval, which sums over tokens")


def fit(context: Ids, answer: Ids, limit: int, max_length: int | None, where: str) -> tuple[Ids, Ids, int]:
    """Cut context (after BOS) to ``limit`` and target to 64 ids on the right, and further where the model reads less.

    Returns context, answer, and how many ids were dropped.
    """
    kept_answer = answer[:TARGET_LIMIT]
    if not kept_answer:
        raise BadData(f"{where}: the tokenizer gives no token for the answer")
    room = limit + 1 if max_length is None else min(limit + 1, max_length + 1 - len(kept_answer))
    if room < 1:
        raise BadData(f"{where}: the answer alone has {len(kept_answer)} tokens; the model reads {max_length}")
    kept = context[:room]
    return kept, kept_answer, len(context) - len(kept) + len(answer) - len(kept_answer)
