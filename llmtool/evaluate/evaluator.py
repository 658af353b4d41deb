"""LAMBADA and BoolQ on a checkpoint in any layout, and scores for any other task."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

from jax.sharding import Mesh

from llmtool.errors import Contradiction
from llmtool.evaluate import protocol_lm_eval
from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.items import Dataset, Task
from llmtool.evaluate.loading import Model, Told
from llmtool.evaluate.protocols import (
    PROTOCOLS,
    Metrics,
    Outcome,
    ProtocolName,
    adds_bos,
    build_requests,
    judge,
    summarise,
)
from llmtool.evaluate.requests import Request, Score
from llmtool.evaluate.results import Record, ResultsFile, weights_fingerprint
from llmtool.evaluate.scoring import DtypeName, score_requests
from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.model.processes import from_first, is_first
from llmtool.model_config import ModelConfig

TextOrIds = str | Sequence[int]


@dataclass(frozen=True)
class Report:
    """What a run found. ``seconds`` is the scoring, compilation included, of ``n_scored`` items: those that were not
    in the results file already."""

    task: Task
    protocol: ProtocolName
    dataset: str
    dataset_sha: str
    metrics: Metrics
    outcomes: tuple[Outcome, ...]
    seconds: float
    n_scored: int
    source: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values, schema llmtool.eval/1."""
        m = self.metrics
        return {
            "schema": "llmtool.eval/1",
            "task": self.task,
            "protocol": self.protocol,
            "dataset": self.dataset,
            "dataset_sha": self.dataset_sha,
            "n": m.n,
            "accuracy": m.accuracy,
            "accuracy_stderr": m.accuracy_stderr,
            "perplexity": m.perplexity if m.perplexity is not None and m.perplexity < float("inf") else None,
            "perplexity_stderr": m.perplexity_stderr,
            "ties": m.ties,
            "truncated": m.truncated,
            "bos": m.bos,
            "seconds": round(self.seconds, 3),
            "items_per_second": round(self.n_scored / self.seconds, 3) if self.seconds else None,
        }


class Options(TypedDict, total=False):
    """The options of :func:`evaluate`, which tells what they mean."""

    protocol: ProtocolName
    tokenizer: str | Path | None
    model_config: str | ModelConfig | None
    layout: str | None
    step: int | None
    dtype: DtypeName
    mesh: str | Mesh | None
    batch_tokens: int | None
    max_length: int | None
    add_bos: bool | None
    limit: int | None
    seed: int | None
    output: str | Path | None
    progress: Told | None


def evaluate_lambada(checkpoint: str | Path, *, data: str | Path | None = None, **options: Unpack[Options]) -> Report:
    """LAMBADA: is the last word of a passage what the model would say? Options as of :func:`evaluate`.

    ``data`` as in :func:`~llmtool.evaluate.data.load_lambada`.
    """
    return evaluate(checkpoint, load_lambada(data), **options)


def evaluate_boolq(checkpoint: str | Path, *, data: str | Path | None = None, **options: Unpack[Options]) -> Report:
    """BoolQ: is " yes" or " no" the likelier answer? Options as of :func:`evaluate`.

    ``data`` as in :func:`~llmtool.evaluate.data.load_boolq`.
    """
    return evaluate(checkpoint, load_boolq(data), **options)


def evaluate(
    checkpoint: str | Path,
    dataset: Dataset,
    *,
    protocol: ProtocolName = "lm-eval",
    tokenizer: str | Path | None = None,
    model_config: str | ModelConfig | None = None,
    layout: str | None = None,
    step: int | None = None,
    dtype: DtypeName = "float32",
    mesh: str | Mesh | None = None,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    add_bos: bool | None = None,
    limit: int | None = None,
    seed: int | None = None,
    output: str | Path | None = None,
    progress: Told | None = None,
) -> Report:
    """Evaluate a checkpoint in any layout on a data set.

    ``layout``, ``model_config`` and ``step`` as in :func:`llmtool.convert.open_checkpoint`; ``tokenizer``: a file, if
    not the one beside the checkpoint; ``mesh``: ``"data=2,tensor=4"``; ``batch_tokens`` bounds a batch over all
    devices; ``max_length``: positions read at most, if not the model's own context length; ``add_bos`` (lm-eval only)
    forces BOS on or off; ``limit``: the first so many items, or with ``seed`` as many drawn at random; ``output``: a
    file of JSON lines, one an item, from which an interrupted run goes on; ``progress(stage, done, total)`` is told
    bytes "loading" and items "scoring". Under ``jax.distributed`` all processes call this together.
    Raises an LlmtoolError for whatever the user can mend, before any weight is read where that can be known.
    """
    _check_choice("protocol", protocol, PROTOCOLS)
    _check_choice("dtype", dtype, get_args(DtypeName))
    told = progress if progress is not None and is_first() else _silent
    dataset = dataset.take(limit, seed)
    with Model.open(checkpoint, layout=layout, model_config=model_config, step=step, mesh=mesh) as model:
        words = model.tokenizer(tokenizer)
        longest = model.max_length(max_length)
        requests = build_requests(dataset, words, protocol=protocol, max_length=longest, add_bos=add_bos)
        params = model.params(dtype, told)
    rounds = protocol == "pax"
    fingerprint = {
        "task": dataset.task, "protocol": protocol, "dataset_sha": dataset.sha256, "limit": limit, "seed": seed,
        "tokenizer_sha": words.sha, "add_bos": add_bos, "max_length": longest, "dtype": dtype,
        "weights": weights_fingerprint(params) if output is not None else "",
    }  # fmt: skip
    book = _Book(dataset, requests, words, protocol, dtype, output, fingerprint)
    began, at_first = time.perf_counter(), len(book.finished)
    told("scoring", at_first, len(dataset.items))

    def on_scored(scored: Mapping[int, Score]) -> None:
        book.add({left[i]: score for i, score in scored.items()})
        told("scoring", len(book.finished), len(dataset.items))

    left = [index for index, request in enumerate(requests) if request.item not in book.finished]
    try:
        score_requests(
            params, model.config, [requests[index] for index in left], dtype=dtype, mesh=model.mesh,
            batch_tokens=batch_tokens, vocabulary=words.size, round_logits=rounds, on_scored=on_scored,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    except BaseException:
        book.close()
        raise
    book.finish()
    scores = [book.scores[index] for index in range(len(requests))]
    return Report(
        dataset.task, protocol, dataset.variant, dataset.sha256,
        summarise(dataset, requests, scores, bos=adds_bos(words, protocol, add_bos), protocol=protocol,
                  compute_dtype=dtype),
        tuple(judge(dataset, requests, scores, protocol=protocol, compute_dtype=dtype)),
        seconds, len(dataset.items) - at_first, dataset.source, tuple(dataset.notes),
    )  # fmt: skip


def score(
    checkpoint: str | Path,
    pairs: Iterable[tuple[TextOrIds, TextOrIds]],
    *,
    tokenizer: str | Path | None = None,
    model_config: str | ModelConfig | None = None,
    layout: str | None = None,
    step: int | None = None,
    dtype: DtypeName = "float32",
    mesh: str | Mesh | None = None,
    batch_tokens: int | None = None,
    max_length: int | None = None,
    add_bos: bool | None = None,
    progress: Told | None = None,
) -> list[Score]:
    """Log-likelihoods of continuations, each after its context, for tasks of your own.

    A pair is two texts, encoded as lm-eval does (together, then cut), or two lists of token ids, taken as they are.
    Pairs with the same context share its computation. Options as of :func:`evaluate`.
    """
    _check_choice("dtype", dtype, get_args(DtypeName))
    told = progress if progress is not None and is_first() else _silent
    with Model.open(checkpoint, layout=layout, model_config=model_config, step=step, mesh=mesh) as model:
        longest, words = model.max_length(max_length), None
        requests: list[Request] = []
        groups: dict[tuple[int, ...], int] = {}
        for index, (context, continuation) in enumerate(pairs):
            if isinstance(context, str) and isinstance(continuation, str):
                words = words or model.tokenizer(tokenizer)
                ids, (answer,) = protocol_lm_eval.encode(context, [continuation], words, add_bos)
            elif not isinstance(context, str) and not isinstance(continuation, str):
                ids, answer = tuple(context), tuple(continuation)
            else:
                raise Contradiction(f"pair {index}: a text and a list of token ids; give two of a kind")
            _check_ids(index, ids, answer, model.config.vocab_size)
            ids, answer, dropped = protocol_lm_eval.fit(ids, answer, longest, f"pair {index}")
            requests.append(Request(index, 0, ids, answer, groups.setdefault(ids, index), dropped))
        params = model.params(dtype, told)
    done = 0

    def on_scored(scored: Mapping[int, Score]) -> None:
        nonlocal done
        done += len(scored)
        told("scoring", done, len(requests))

    return score_requests(
        params, model.config, requests, dtype=dtype, mesh=model.mesh, batch_tokens=batch_tokens,
        vocabulary=words.size if words else None, on_scored=on_scored,
    )  # fmt: skip


class _Book:
    """Scores as they come in: an item is finished when all its requests are, and is then written down."""

    def __init__(
        self,
        dataset: Dataset,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        protocol: ProtocolName,
        dtype: DtypeName,
        output: str | Path | None,
        fingerprint: Mapping[str, Any],
    ):
        self.dataset, self.requests, self.tokenizer = dataset, requests, tokenizer
        self.protocol, self.dtype = protocol, dtype
        self.scores: dict[int, Score] = {}
        self.finished: set[int] = set()
        self.file: ResultsFile | None = None
        self.members: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            self.members.setdefault(request.item, []).append(index)
        if output is not None:
            self._go_on(from_first(lambda: self._open(output, fingerprint)))

    def _open(self, output: str | Path, fingerprint: Mapping[str, Any]) -> list[Record]:
        self.file = ResultsFile(output, fingerprint)
        return [*self.file.done.values()]

    def _go_on(self, records: list[Record]) -> None:
        for record in records:
            for index, told in zip(self.members[record["item"]], record["requests"], strict=True):
                self.scores[index] = Score(tuple(told["logprobs"]), tuple(told["logits"]), told["greedy"])
            self.finished.add(record["item"])

    def add(self, scored: Mapping[int, Score]) -> None:
        """Take in the scores of some requests, by index."""
        self.scores |= scored
        items = sorted({self.requests[index].item for index in scored})
        finished = [item for item in items if all(index in self.scores for index in self.members[item])]
        self.finished.update(finished)
        if self.file is not None:
            self.file.add(self._record(item) for item in finished)

    def _record(self, item: int) -> Record:
        """One line of the results file; the answers' token ids are ``ids``, as the tokenizer spells them ``tokens``."""
        asked = [self.requests[index] for index in self.members[item]]
        scores = [self.scores[index] for index in self.members[item]]
        alone = replace(self.dataset, items=(self.dataset.items[item],))
        (outcome,) = judge(alone, [replace(request, item=0) for request in asked], scores,
                           protocol=self.protocol, compute_dtype=self.dtype)
        return {
            "item": item,
            "correct": outcome.correct,
            "prediction": outcome.prediction,
            "tie": outcome.tie,
            "truncated": max(request.truncated for request in asked),
            "requests": [
                {
                    "choice": request.choice,
                    "context": list(request.context),
                    "ids": list(request.continuation),
                    "tokens": self.tokenizer.pieces(request.continuation),
                    "loglikelihood": score.loglikelihood,
                    "greedy": score.greedy,
                    "logprobs": list(score.logprobs),
                    "logits": list(score.logits),
                }
                for request, score in zip(asked, scores, strict=True)
            ],
        }

    def finish(self) -> None:
        """Every item is done."""
        if self.file is not None:
            self.file.finish()

    def close(self) -> None:
        """The run was broken off."""
        if self.file is not None:
            self.file.close()


def _check_ids(index: int, context: Sequence[int], continuation: Sequence[int], n_vocab: int) -> None:
    if not context:
        raise Contradiction(f"pair {index}: the context is empty; begin it with BOS")
    if unknown := [i for i in (*context, *continuation) if not 0 <= i < n_vocab]:
        raise Contradiction(f"pair {index}: the model has no id {unknown[0]}; its ids are 0 to {n_vocab - 1}")


def _check_choice(name: Literal["protocol", "dtype"], value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise Contradiction(f"{name} {value!r}: expected {' or '.join(choices)}")


def _silent(stage: str, done: int, total: int) -> None:
    """Nobody wants to know."""

