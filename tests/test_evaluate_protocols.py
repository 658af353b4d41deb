"""The two protocols on items worked out by hand."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtool.errors import BadData, Contradiction, MissingFact
from llmtool.evaluate import protocol_lm_eval, protocol_pax
from llmtool.evaluate.items import BoolQItem, Dataset, LambadaItem
from llmtool.evaluate.protocols import NO, YES, adds_bos, build_requests, judge, summarise
from llmtool.evaluate.requests import Request, Score
from llmtool.evaluate.statistics import mean_stderr, perplexity, perplexity_stderr
from llmtool.evaluate.tokenizer import Tokenizer


class Words(Tokenizer):
    """A token for each run of letters with the one space before it, and for any other character: cut as GPT-2 cuts."""

    kind, size, sha = "words", 10_000, ""

    def __init__(self, bos_id: int | None = 1, adds_bos: bool = False, eos_id: int | None = 2, known: str = ""):
        self.bos_id, self.eos_id, self.adds_bos = bos_id, eos_id, adds_bos
        self.ids: dict[str, int] = {}
        self.encode_plain(known)

    def encode_plain(self, text: str) -> list[int]:
        import re

        pieces = re.findall(r" ?\w+|\s|[^\w\s]", text)
        return [self.ids.setdefault(piece, 100 + len(self.ids)) for piece in pieces]

    def text(self, ids: tuple[int, ...]) -> list[str]:
        """The pieces again; special ids as <n>."""
        names = {i: piece for piece, i in self.ids.items()}
        return [names.get(i, f"<{i}>") for i in ids]


def lambada(*texts: str) -> Dataset:
    items = tuple(LambadaItem(text, f"file, line {i}") for i, text in enumerate(texts, 1))
    return Dataset("lambada", items, "", "", "")


def boolq(*answers: bool, passage: str = "A passage.", question: str = "is it") -> Dataset:
    items = tuple(BoolQItem(passage, question, answer, f"file, line {i}") for i, answer in enumerate(answers, 1))
    return Dataset("boolq", items, "", "", "")


def asked(text: str, protocol: str, **how: object) -> tuple[list[str], list[str]]:
    """The pieces of context and continuation of one LAMBADA passage."""
    words = Words()
    request, = build_requests(lambada(text), words, protocol=protocol, **how)  # type: ignore[arg-type]
    return words.text(request.context), words.text(request.continuation)


# ── what is the last word (bugs.md B51) ──────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize(("text", "lm_eval", "pax"), [
    ("she closed the drapes", ("she closed the", " drapes"), ("she closed the", " drapes")),
    ("he gave his word.", ("he gave his", " word."), ("he gave his", " word.")),
    ("the end\n", ("the", " end\n"), ("the", " end")),
    ("two  spaces", ("two ", " spaces"), ("two", " spaces")),
    ("a\nnew\nline here", ("a\nnew\nline", " here"), ("a\nnew\nline", " here")),
    ("the last\nword", ("the", " last\nword"), ("the last", " word")),
    ("no\u00a0break space", ("no\u00a0break", " space"), ("no\u00a0break", " space")),
    ("so\u00a0hard", ("", " so\u00a0hard"), ("so", " hard")),
    ("  lead and  follow", ("  lead and ", " follow"), ("lead and", " follow")),
    ("row row row row", ("row row row", " row"), ("row row row", " row")),
    ("can't won't", ("can't", " won't"), ("can't", " won't")),
    ("“so” she said ‘no’", ("“so” she said", " ‘no’"), ('"so" she said', " 'no'")),
])
def test_last_word(text: str, lm_eval: tuple[str, str], pax: tuple[str, str]) -> None:
    item = LambadaItem(text)
    context, (answer,) = protocol_lm_eval.lambada_texts(item)
    assert (context, answer) == lm_eval
    context, (answer,) = protocol_pax.lambada_texts(item)
    assert (context, answer) == pax


@given(st.text(st.sampled_from("ab. \n\t“’"), min_size=3).filter(lambda text: len(text.split()) > 1))
def test_no_word_is_lost(text: str) -> None:
    context, (answer,) = protocol_pax.lambada_texts(LambadaItem(text))
    straight = text.translate(protocol_pax._STRAIGHT)
    assert (context + answer).split() == straight.split()
    assert answer[0] == " " and len(answer.split()) == 1
    if text.rpartition(" ")[2].strip():
        context, (answer,) = protocol_lm_eval.lambada_texts(LambadaItem(text))
        assert context + answer == (text if " " in text else " " + text)


def test_a_passage_that_ends_in_a_space_has_no_last_word() -> None:
    with pytest.raises(BadData, match="file, line 2: ends in a space"):
        build_requests(lambada("fine here", "not here "), Words())


# ── joint and separate encoding ──────────────────────────────────────────────────────────────────────────────────────

def test_lm_eval_moves_spaces_of_the_context_to_the_target() -> None:
    """bugs.md B38: the target's ids are those of the joined text, and no space ends the context."""
    assert asked("near the  harbor", "lm-eval") == (["near", " the"], [" ", " harbor"])
    assert asked("near the harbor", "lm-eval") == (["near", " the"], [" harbor"])
    assert asked("near the\n harbor", "lm-eval") == (["near", " the"], ["\n", " harbor"])


def test_pax_encodes_apart_and_begins_with_bos() -> None:
    assert asked("near  the  harbor", "pax") == (["<1>", "near", " ", " the"], [" harbor"])
    words = Words(bos_id=None)
    request, = build_requests(lambada("a b"), words, protocol="pax")
    assert request.context[0] == 0  # the GPT presets: BOS is id 0 where the vocabulary has none


class Joining(Words):
    """Writes a colon and the space after it as one token, 99, so that a joint encoding differs from a separate one."""

    def encode_plain(self, text: str) -> list[int]:
        ids = [ord(c) for c in text]
        out: list[int] = []
        for i in ids:
            if out and (out[-1], i) == (ord(":"), ord(" ")):
                out[-1] = 99
            else:
                out.append(i)
        return out


def test_the_joint_encoding_is_sliced_at_the_length_of_the_context_alone() -> None:
    """The harness does not check that the context's ids begin the joint ones; neither do we: same ids, same score."""
    no, yes = build_requests(boolq(True, passage="p", question="q"), Joining())
    prompt = "p\nQuestion: q?\nAnswer:"
    alone = Joining().encode_plain(prompt)
    assert list(no.context) == list(yes.context) == alone
    assert no.continuation == tuple(map(ord, "no"))  # the space went into 99, which the context alone does not have
    assert alone[-1] == ord(":")


def test_an_answer_that_melts_into_its_context_is_an_error() -> None:
    class Melting(Words):
        def encode_plain(self, text: str) -> list[int]:
            return [7]

    with pytest.raises(BadData, match=r"file, line 1: .*no token of its own"):
        build_requests(lambada("a b"), Melting())


@pytest.mark.parametrize(("tokenizer", "add_bos", "first"), [
    (Words(adds_bos=True), None, 1), (Words(adds_bos=False), None, 100), (Words(adds_bos=True), False, 100),
    (Words(adds_bos=False), True, 1), (Words(adds_bos=True), True, 1),
])
def test_bos_in_lm_eval(tokenizer: Words, add_bos: bool | None, first: int) -> None:
    request, = build_requests(lambada("a b"), tokenizer, add_bos=add_bos)
    assert request.context[0] == first
    assert request.context.count(1) == (first == 1)
    assert tokenizer.text(request.continuation) == [" b"]
    assert adds_bos(tokenizer, "lm-eval", add_bos) == (first == 1)
    assert adds_bos(tokenizer, "pax")


def test_bos_that_cannot_be_had_or_refused() -> None:
    with pytest.raises(MissingFact, match="BOS is asked for"):
        build_requests(lambada("a b"), Words(bos_id=None), add_bos=True)
    with pytest.raises(BadData, match="pax protocol always begins with BOS"):
        build_requests(lambada("a b"), Words(), protocol="pax", add_bos=False)


def test_an_empty_context_is_bos_else_eos() -> None:
    for tokenizer, first in ((Words(), 1), (Words(bos_id=None), 2), (Words(adds_bos=True), 1)):
        request, = build_requests(lambada("so\u00a0hard"), tokenizer)
        assert request.context == (first,)
        assert tokenizer.text(request.continuation) == [" so", "\u00a0", "hard"]
    with pytest.raises(MissingFact, match="neither BOS nor EOS"):
        build_requests(lambada("so\u00a0hard"), Words(bos_id=None, eos_id=None))


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def test_boolq_prompts() -> None:
    item = BoolQItem("Cats -- “Big” ones.", "do cats “purr”", True)
    assert protocol_lm_eval.boolq_texts(item) == ("Cats -- “Big” ones.\nQuestion: do cats “purr”?\nAnswer:",
                                                  [" no", " yes"])
    assert protocol_pax.boolq_texts(item) == ("Cats -- “Big” ones.\nquestion: do cats “purr”?\nanswer:", ["no", "yes"])


def test_boolq_asks_no_then_yes_after_one_context() -> None:
    words = Words(known="no yes")
    for protocol, answers in (("lm-eval", (" no", " yes")), ("pax", ("no", "yes"))):
        requests = build_requests(boolq(True, False), words, protocol=protocol)  # type: ignore[arg-type]
        assert [(request.item, request.choice) for request in requests] == [(0, NO), (0, YES), (1, NO), (1, YES)]
        assert [request.group for request in requests] == [0, 0, 2, 2]
        assert requests[0].context == requests[1].context
        assert tuple(words.text(request.continuation)[0] for request in requests[:2]) == answers


def test_pax_needs_answers_of_one_token() -> None:
    class Letters(Words):
        def encode_plain(self, text: str) -> list[int]:
            return [ord(c) for c in text]

    with pytest.raises(Contradiction, match=r'"no".*\[110, 111\].*\[121, 101, 115\].*lm-eval'):
        build_requests(boolq(True), Letters(), protocol="pax")
    assert len(build_requests(boolq(True), Letters())[1].continuation) == 4  # " yes"


# ── too long ─────────────────────────────────────────────────────────────────────────────────────────────────────────

def test_lm_eval_keeps_the_end() -> None:
    words = Words(adds_bos=True)
    text = "a b c d e"
    for max_length, context, dropped in ((None, "<1> a b c d", 0), (5, "<1> a b c d", 0), (4, "a b c d", 1),
                                         (2, "c d", 3), (1, "d", 4)):
        request, = build_requests(lambada(text), words, max_length=max_length)
        assert [piece.strip() for piece in words.text(request.context)] == context.split()
        assert words.text(request.continuation) == [" e"]
        assert (request.truncated, request.length) == (dropped, 5 - dropped)


def test_answers_of_unequal_length_may_see_unequal_contexts() -> None:
    class Long(Words):
        def encode_plain(self, text: str) -> list[int]:
            return [piece for i in super().encode_plain(text)
                    for piece in ([i, 3] if i == self.ids.get(" yes") else [i])]

    no, yes = build_requests(boolq(True), Long(), max_length=8)
    assert (len(no.context), len(yes.context)) == (8, 7)
    assert no.context[1:] == yes.context
    assert no.group != yes.group
    no, yes = build_requests(boolq(True), Long())
    assert no.group == yes.group


def test_an_answer_longer_than_the_model() -> None:
    with pytest.raises(BadData, match=r"file, line 1: the answer alone has 3 tokens; the model reads 2"):
        build_requests(lambada("before a.b"), Words(), max_length=2)
    with pytest.raises(BadData, match=r"file, line 1: the answer alone has 3 tokens; the model reads 2"):
        build_requests(lambada("before a.b"), Words(), protocol="pax", max_length=2)
    request, = build_requests(lambada("before a.b"), Words(), protocol="pax", max_length=3)
    assert request.context == (1,)


def test_pax_cuts_on_the_right() -> None:
    words = Words()
    text = " ".join(f"w{i}" for i in range(1990)) + " " + ".".join("abcdefgh" * 5)  # the target: 79 tokens
    request, = build_requests(lambada(text), words, protocol="pax")
    assert words.text(request.context)[:3] == ["<1>", "w0", " w1"]
    assert words.text(request.context)[-1] == " w1983"
    assert (len(request.context), len(request.continuation)) == (1985, 64)
    assert request.truncated == 6 + 79 - 64
    assert request.length == 2048

    dataset = boolq(True, passage=" ".join(f"w{i}" for i in range(5000)))
    no, yes = build_requests(dataset, words, protocol="pax")
    assert len(no.context) == 4033
    assert words.text(no.context)[-1] == " w4031"  # the question is cut off: so it is in Pax
    assert no.context == yes.context
    assert summarise(dataset, [no, yes], [score(0, 0), score(1, 1)], bos=True, protocol="pax").truncated == 1


def test_pax_on_a_model_that_reads_less() -> None:
    request, = build_requests(lambada("a b c d e"), Words(), protocol="pax", max_length=3)
    assert request.length == 3
    assert (len(request.context), request.truncated) == (3, 2)


# ── scores to metrics ────────────────────────────────────────────────────────────────────────────────────────────────

def score(logprob: float, logit: float = 0.0, *, greedy: bool = False) -> Score:
    return Score((logprob,), (logit,), greedy)


def test_every_token_of_the_last_word_must_be_right() -> None:
    """bugs.md B49: greedy is a property of the whole continuation; a word of 3 tokens with one right is wrong."""
    dataset = lambada("it was a drap.es")
    request, = build_requests(dataset, Words())
    assert len(request.continuation) == 3
    scores = [Score((-2.0, -3.0, -0.1), (1.0, 2.0, 9.0), greedy=False)]
    for protocol in ("lm-eval", "pax"):
        assert summarise(dataset, [request], scores, bos=False, protocol=protocol).accuracy == 0  # type: ignore[arg-type]


def test_yes_and_no_are_compared_not_the_most_likely_word() -> None:
    """bugs.md B50: whatever else is likelier ("Well", say), the larger of yes and no decides."""
    dataset = boolq(True, True, False, False)
    requests = build_requests(dataset, Words(known="no yes"), protocol="pax")
    #        yes wins, no wins, a tie, a tie; "Well" would have −0.1 and a logit of 30
    scores = [score(-9, 1.0), score(-5, 5.0), score(-5, 5.0), score(-9, 1.0), *[score(-5, 2.0)] * 4]
    lm_eval = judge(dataset, requests, scores)
    assert [(outcome.prediction, outcome.correct, outcome.tie) for outcome in lm_eval] == [
        (YES, True, False), (NO, False, False), (NO, True, True), (NO, True, True)]
    pax = judge(dataset, requests, scores, protocol="pax")
    assert [(outcome.correct, outcome.tie) for outcome in pax] == [
        (True, False), (False, False), (False, True), (False, True)]
    assert summarise(dataset, requests, scores, bos=True).ties == 2
    assert summarise(dataset, requests, scores, bos=True).accuracy == 0.75
    assert summarise(dataset, requests, scores, bos=True, protocol="pax").accuracy == 0.25


def test_pax_ties_are_those_of_the_dtype_computed_in() -> None:
    dataset = boolq(True)
    requests = build_requests(dataset, Words(known="no yes"), protocol="pax")
    scores = [score(-5, 12.01), score(-5, 12.02)]  # bfloat16 has 12.0 and 12.0625 there
    for dtype, accuracy, ties in (("float32", 1, 0), ("bfloat16", 0, 1)):
        metrics = summarise(dataset, requests, scores, bos=True, protocol="pax", compute_dtype=dtype)
        assert (metrics.accuracy, metrics.ties) == (accuracy, ties)


def test_perplexity_is_per_word_or_per_token() -> None:
    dataset = lambada("one a.b", "two c")
    requests = build_requests(dataset, Words())
    scores = [Score((-1.0, -2.0, -3.0), (0.0,) * 3, True), Score((-2.0,), (0.0,), False)]
    per_word = summarise(dataset, requests, scores, bos=False)
    assert per_word.perplexity == pytest.approx(math.exp((6 + 2) / 2))
    assert per_word.accuracy == 0.5
    assert per_word.accuracy_stderr == pytest.approx(0.5)  # √(½ · ½ · 2 / (2 − 1)) / √2
    per_token = summarise(dataset, requests, scores, bos=True, protocol="pax")
    assert per_token.perplexity == pytest.approx(math.exp((6 + 2) / 4))
    assert per_token.perplexity_stderr is None


def test_one_item_has_no_stderr() -> None:
    dataset = lambada("a b")
    metrics = summarise(dataset, build_requests(dataset, Words()), [score(-1.0, greedy=True)], bos=False)
    assert (metrics.accuracy, metrics.accuracy_stderr, metrics.perplexity_stderr) == (1.0, None, 0.0)


def test_the_bootstrap_draws_as_pythons_random() -> None:
    values = np.log(np.linspace(0.01, 0.9, 7)).tolist()
    drawn = []
    for seed in range(100):
        generator = random.Random(seed)
        drawn += [perplexity(generator.choices(values, k=len(values))) for _ in range(1000)]
    assert perplexity_stderr(values) == pytest.approx(np.std(drawn, ddof=1), rel=1e-12)


def test_statistics_at_the_edges() -> None:
    assert mean_stderr([1.0]) is None
    assert mean_stderr([0.0, 1.0, 1.0, 0.0]) == pytest.approx(math.sqrt(1 / 3) / 2)
    assert perplexity([-1000.0]) == math.inf
    assert perplexity_stderr([-1000.0, -2000.0]) is None
    assert perplexity_stderr([0.0] * 3) == 0


def test_request_lengths() -> None:
    request = Request(0, 0, (1, 2, 3), (4, 5), 0)
    assert request.inputs == (1, 2, 3, 4)
    assert request.length == 4
    assert Score((-0.5, -0.25), (0.0, 0.0), True).loglikelihood == -0.75


def test_take() -> None:
    dataset = lambada(*(f"item {i}" for i in range(10)))
    assert dataset.take(None) is dataset is dataset.take(10) is dataset.take(99)
    assert [item.text for item in dataset.take(2).items] == ["item 0", "item 1"]
    drawn = [item.text for item in dataset.take(4, seed=3).items]
    assert drawn == sorted(drawn) != [item.text for item in dataset.take(4).items]
    assert drawn == [item.text for item in dataset.take(4, seed=3).items]
