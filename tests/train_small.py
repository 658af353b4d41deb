"""A run that takes a second a piece: its rows by number, and ``fit`` on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from llmtool.train.batch import Batch
from llmtool.train.config import RunConfig
from llmtool.train.loop import FitResult, fit, share
from llmtool.train.metrics_log import read_metrics
from llmtool.train.strategy import place
from tests.test_train_step import rows, tiny


class Numbered(Iterator[Batch]):
    """Batch i has the rows that seed i makes, whoever reads it; this reader's part of them, in each micro-batch."""

    def __init__(self, run: RunConfig, devices: list[jax.Device] | None = None, end: int | None = None):
        self.per, self.index, self.count = share(run, place(run, devices))
        self.end, self.at, self.given = end, 0, list[int]()

    def __next__(self) -> Batch:
        if self.at == self.end:
            raise StopIteration
        whole = rows(self.per * self.count, seed=self.at)
        self.given.append(self.at)
        self.at += 1
        return Batch(*(x[self.index * self.per : (self.index + 1) * self.per] for x in whole))

    def state(self) -> dict[str, Any]:
        return {"at": self.at, "batches": self.at, "run": {}, "lanes": {}}  # as the real one's, which processes join

    def restore(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def train(workdir: Path, n_devices: int = 1, loader: Any = None, run: RunConfig | None = None, **options: Any
          ) -> FitResult:
    run = run or tiny(log_every=1)
    devices = jax.devices()[:n_devices]
    return fit(run, workdir=workdir, loader=loader or Numbered(run, devices), devices=devices, **options)


def losses(workdir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(workdir) if line["kind"] == "train"}
