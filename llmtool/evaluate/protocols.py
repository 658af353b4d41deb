"""The two named protocols: items to requests, scores to metrics. They are never mixed; a report names its own.

``lm-eval`` is what EleutherAI's harness computes, ``pax`` what Pax's own evaluation reports. In the harness the two
answers' log-likelihoods are compared and a tie says no; in Pax two raw logits, in the dtype of the computation, and a
tie is wrong. LAMBADA's perplexity is per word in the former, per token in the latter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from llmtool.errors import BadData
from llmtool.evaluate import protocol_lm_eval, protocol_pax
from llmtool.evaluate.items import BoolQItem, Dataset, LambadaItem
from llmtool.evaluate.requests import Request, Score
from llmtool.evaluate.statistics import mean_stderr, perplexity, perplexity_stderr
from llmtool.evaluate.tokenizer import Tokenizer

ProtocolName = Literal["lm-eval", "pax"]
PROTOCOLS: tuple[str, ...] = get_args(ProtocolName)
NO, YES = 0, 1  # Request.choice of BoolQ


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item. ``prediction``: BoolQ's NO or YES; LAMBADA has none, as only the right word is scored.

    A tie is BoolQ's two answers scoring exactly the same.
    """

    item: int
    correct: bool
    prediction: int | None
    tie: bool


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of a whole run; perplexities are LAMBADA's. ``truncated`` counts items, not requests.

    ``accuracy_stderr`` is that of the sample (n − 1), under either protocol; None for one item. ``perplexity_stderr``
    is the harness's bootstrap, which Pax does not have.
    """

    n: int
    accuracy: float
    accuracy_stderr: float | None
    perplexity: float | None
    perplexity_stderr: float | None
    ties: int
    truncated: int
    bos: bool


def build_requests(dataset: Dataset, tokenizer: Tokenizer, *, protocol: ProtocolName = "lm-eval",
                   max_length: int | None = None, add_bos: bool | None = None) -> list[Request]:
    """One request an item for LAMBADA; for BoolQ two: no, then yes.

    ``max_length``: positions that the model reads; None for no bound. ``add_bos`` (lm-eval only): None leaves BOS to
    the tokenizer, True and False force it. Raises BadData, with file and line, for an item that cannot be asked.
    """
    if protocol == "pax" and add_bos is False:
        raise BadData("the pax protocol always begins with BOS; leave that to it, or use --protocol lm-eval")
    requests: list[Request] = []
    for number, item in enumerate(dataset.items):
        groups: dict[tuple[int, ...], int] = {}  # answers of unequal length may leave room for unequal contexts
        for choice, (context, answer, dropped) in enumerate(_ask(item, tokenizer, protocol, max_length, add_bos)):
            group = groups.setdefault(context, len(requests))
            requests.append(Request(number, choice, context, answer, group, dropped))
    return requests


def adds_bos(tokenizer: Tokenizer, protocol: ProtocolName, add_bos: bool | None = None) -> bool:
    """Whether contexts begin with BOS (before anything is cut off) under a protocol: ``Metrics.bos``."""
    return protocol == "pax" or (tokenizer.adds_bos if add_bos is None else add_bos)


def judge(dataset: Dataset, requests: Sequence[Request], scores: Sequence[Score], *,
          protocol: ProtocolName = "lm-eval", compute_dtype: str = "float32") -> list[Outcome]:
    """The outcome of each item, in the order of the items; ``scores`` are parallel to ``requests``.

    ``compute_dtype`` is that of the forward pass: pax compares logits as that dtype holds them, so ties are real there.
    """
    if dataset.task == "lambada":
        return [Outcome(request.item, score.greedy, None, False)
                for request, score in zip(requests, scores, strict=True)]
    answers: list[list[Score]] = [[] for _ in dataset.items]
    for request, score in zip(requests, scores, strict=True):
        answers[request.item].append(score)
    outcomes = []
    for number, (item, (no, yes)) in enumerate(zip(dataset.items, answers, strict=True)):
        assert isinstance(item, BoolQItem)
        if protocol == "pax":
            margin = _rounded(yes.logits[0], compute_dtype) - _rounded(no.logits[0], compute_dtype)
        else:
            margin = yes.loglikelihood - no.loglikelihood
        prediction = YES if margin > 0 else NO
        correct = prediction == item.answer and not (protocol == "pax" and margin == 0)
        outcomes.append(Outcome(number, correct, prediction, margin == 0))
    return outcomes


def summarise(dataset: Dataset, requests: Sequence[Request], scores: Sequence[Score], *, bos: bool,
              protocol: ProtocolName = "lm-eval", compute_dtype: str = "float32") -> Metrics:
    """The metrics of a run; ``bos`` from ``adds_bos``."""
    outcomes = judge(dataset, requests, scores, protocol=protocol, compute_dtype=compute_dtype)
    right = [float(outcome.correct) for outcome in outcomes]
    ppl = ppl_stderr = None
    if dataset.task == "lambada":
        if protocol == "pax":
            tokens = [logprob for score in scores for logprob in score.logprobs]
            ppl = perplexity(tokens)
        else:
            words = [score.loglikelihood for score in scores]
            ppl, ppl_stderr = perplexity(words), perplexity_stderr(words)
    return Metrics(
        n=len(outcomes), accuracy=math.fsum(right) / len(right), accuracy_stderr=mean_stderr(right),
        perplexity=ppl, perplexity_stderr=ppl_stderr, ties=sum(outcome.tie for outcome in outcomes),
        truncated=len({request.item for request in requests if request.truncated}), bos=bos)


Fitted = tuple[tuple[int, ...], tuple[int, ...], int]


def _ask(item: LambadaItem | BoolQItem, tokenizer: Tokenizer, protocol: str, max_length: int | None,
         add_bos: bool | None) -> list[Fitted]:
    """Context, answer and dropped ids, for each answer of one item."""
    if protocol == "pax":
        texts = protocol_pax.lambada_texts(item) if isinstance(item, LambadaItem) else protocol_pax.boolq_texts(item)
        context, answers = protocol_pax.encode(*texts, tokenizer)
        if isinstance(item, BoolQItem):
            protocol_pax.check_answers(*answers)
        limit = protocol_pax.CONTEXT_LIMIT["lambada" if isinstance(item, LambadaItem) else "boolq"]
        return [protocol_pax.fit(context, answer, limit, max_length, item.where) for answer in answers]
    texts = (protocol_lm_eval.lambada_texts(item) if isinstance(item, LambadaItem)
             else protocol_lm_eval.boolq_texts(item))
    context, answers = protocol_lm_eval.encode(*texts, tokenizer, add_bos)
    return [protocol_lm_eval.fit(context, answer, max_length, item.where) for answer in answers]


def _rounded(logit: float, dtype: str) -> float:
    if dtype == "bfloat16":
        import ml_dtypes

        return float(ml_dtypes.bfloat16(logit))
    return float(np.float32(logit))
