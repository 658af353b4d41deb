"""What the data pipelines give and the step takes: one batch of token rows."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Rows of tokens, all of one shape [B, T]; a process holds its share of the rows.

    The model reads ``ids`` and is asked for ``targets`` (already shifted: ``targets[t]`` follows ``ids[t]``).
    ``weights`` says how much each target counts (0: not at all). ``segments`` keeps packed documents apart (1, 2, …;
    0 is padding), ``positions`` start anew in each.
    """

    ids: np.ndarray        # int32
    targets: np.ndarray    # int32
    weights: np.ndarray    # float32
    segments: np.ndarray   # int32
    positions: np.ndarray  # int32
