"""What a protocol asks of the scorer, and what the scorer answers. Nothing here knows of text or of devices."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """Score ``continuation`` after ``context``: token ids as the model is fed them, BOS and truncation already done.

    Neither is empty. The model reads ``context + continuation[:-1]``; its last ``len(continuation)`` positions predict
    the continuation. Requests of one ``group`` have the same context, which then needs to be computed only once.
    """

    item: int
    """Index of the item in its dataset."""
    choice: int
    """Which of the item's answers this is: LAMBADA 0; BoolQ 0 for no, 1 for yes."""
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    group: int
    """Equal for requests that share their context: the index of the first of them among all requests."""
    truncated: int = 0
    """Ids that were cut off because the request was longer than the model or the protocol allows."""

    @property
    def length(self) -> int:
        """Positions that the model computes."""
        return len(self.context) + len(self.continuation) - 1

    @property
    def inputs(self) -> tuple[int, ...]:
        """The ids that the model reads, ``[length]``."""
        return self.context + self.continuation[:-1]


@dataclass(frozen=True, slots=True)
class Score:
    """The scorer's answer to one Request; all tuples are as long as the continuation.

    ``logits`` are those of the continuation's own ids before the softmax (the pax protocol compares two of them in the
    dtype they were computed in), ``greedy`` is true if each id has the largest logit of its position (of equal ones the
    lowest id counts as the largest).
    """

    logprobs: tuple[float, ...]
    logits: tuple[float, ...]
    greedy: bool

    @property
    def loglikelihood(self) -> float:
        """Natural logarithm of the continuation's probability."""
        return math.fsum(self.logprobs)
