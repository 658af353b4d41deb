"""Evaluation of a model in training: weights that are on their devices already, the same items again and again."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from llmtool.evaluate.items import Dataset
from llmtool.evaluate.protocols import ProtocolName, build_requests, judge
from llmtool.evaluate.scoring import DtypeName, score_requests
from llmtool.evaluate.statistics import mean_stderr, perplexity
from llmtool.evaluate.tokenizer import Tokenizer
from llmtool.model_config import ModelConfig

Evaluation = Callable[[Mapping[str, Any]], dict[str, float]]


def running_evaluation(
    dataset: Dataset,
    tokenizer: Tokenizer,
    config: ModelConfig,
    *,
    mesh: Mesh,
    protocol: ProtocolName = "lm-eval",
    dtype: DtypeName = "float32",
    max_length: int | None = None,
) -> Evaluation:
    """A function from the native tree on ``mesh`` to figures: accuracy, its standard error, LAMBADA's perplexity.

    ``max_length``: positions read at most. All processes of the mesh call the function together. Raises BadData for an
    item that cannot be asked, before the first step of a run rather than after its last.
    """
    requests = build_requests(dataset, tokenizer, protocol=protocol, max_length=max_length)

    def evaluate(params: Mapping[str, Any]) -> dict[str, float]:
        scores = score_requests(params, config, requests, dtype=dtype, mesh=mesh, vocabulary=tokenizer.size,
                                round_logits=protocol == "pax")
        outcomes = judge(dataset, requests, scores, protocol=protocol, compute_dtype=dtype)
        right = [float(outcome.correct) for outcome in outcomes]
        figures = {"accuracy": math.fsum(right) / len(right), "accuracy_stderr": mean_stderr(right)}
        if dataset.task == "lambada":  # per token or per word, as summarise has it; its bootstrap takes too long here
            told = [[*score.logprobs] if protocol == "pax" else [score.loglikelihood] for score in scores]
            figures["perplexity"] = perplexity([x for logprobs in told for x in logprobs])
        return {f"{dataset.task}_{name}": value for name, value in figures.items() if value is not None}

    return evaluate
