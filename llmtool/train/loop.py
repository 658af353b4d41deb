"""``fit``: the one loop of pretraining, full fine-tuning and adapters.

They differ in three values: where weights come from (``init_from``), which tokens count (the weights in the loader's
batches), and which leaves move (``trainable``).
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from llmtool.convert import open_checkpoint
from llmtool.errors import BadTarget
from llmtool.model.load import load_params
from llmtool.model.processes import is_first
from llmtool.model.tree import flatten, nest
from llmtool.model_config import ModelConfig
from llmtool.train.batch import Batch
from llmtool.train.checkpoints import Checkpoints
from llmtool.train.config import RunConfig
from llmtool.train.metrics_log import MetricsLog, read_metrics
from llmtool.train.state import Trainable, TrainState, abstract_state, everything, init_state
from llmtool.train.step import make_evaluation, make_step, to_devices
from llmtool.train.stopping import Stopping
from llmtool.train.strategy import Placement, place, reader, rows_per_step

log = logging.getLogger("llmtool.train")


class Loader(Protocol):
    """Batches of this process's rows, with a position that can be saved, and joined over processes by ``merge_states``
    (:mod:`llmtool.train.data`)."""

    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class FitResult:
    """``ended``: "steps" (all done), "data" (no more batches) or "sigterm". ``best_step`` had the lowest validation
    loss so far (nats a counted target), and None where there was no validation."""

    state: TrainState
    step: int
    ended: str
    loss: float | None
    best_step: int | None
    best_validation_loss: float | None


def fit(
    run: RunConfig,
    *,
    workdir: str | Path,
    loader: Loader,
    init_from: str | Path | None = None,
    resume: bool | int = True,
    trainable: Trainable = everything,
    validation: Callable[[], Iterable[Batch]] | None = None,
    evaluate: Callable[[Mapping[str, Any], int], Mapping[str, float]] | None = None,
    on_log: Callable[[Mapping[str, Any]], None] | None = None,
    files: Mapping[str, bytes] | None = None,
    devices: list[jax.Device] | None = None,
) -> FitResult:
    """Train until ``run.steps`` steps are done, the data end, or SIGTERM; save as ``run.checkpoint`` says.

    ``loader`` gives this process its share of every batch (:func:`share`). ``init_from``: a checkpoint in any layout to
    start from; else weights are drawn. ``resume``: go on from the newest complete step in ``workdir`` if there is one
    (True) or from that step (a number; later ones are removed); False insists that there be none. ``validation`` gives
    the batches of one validation, ``evaluate(params, step)`` any scores (LAMBADA), both as often as ``run.evaluation``
    says. ``on_log`` is shown every line of ``metrics.jsonl``, in the first process. ``files`` go beside the weights
    (the tokenizer's).

    Raises LlmtoolError for a run that cannot start, and SaveFailed as soon as a checkpoint cannot be written.
    """
    workdir, placement = Path(workdir), place(run, devices)
    share(run, placement)
    workdir.mkdir(parents=True, exist_ok=True)
    with Checkpoints(workdir, run.checkpoint.keep) as checkpoints, Stopping() as stopping:
        state, start = _begin(run, placement, checkpoints, loader, init_from, resume, trainable)
        with MetricsLog(workdir, after=start) as metrics:
            loop = _Loop(run, placement, checkpoints, metrics, loader, trainable, files or {}, on_log)
            loop.validation, loop.evaluate = validation, evaluate
            state, step, ended = loop.go(state, start, stopping)
        checkpoints.wait()
    lines = list(read_metrics(workdir)) if is_first() else []
    scored = [(line["loss"], line["step"]) for line in lines if line["kind"] == "validation"]
    best = min((pair for pair in scored if isinstance(pair[0], float)), default=(None, None))
    return FitResult(state, step, ended, loop.loss, best[1], best[0])


def share(run: RunConfig, placement: Placement) -> tuple[int, int, int]:
    """(rows, index, count) of this process: its loader's ``rows_per_process``, ``process_index``, ``process_count``."""
    rows = rows_per_step(run, placement.mesh)
    index, count = reader(placement.mesh, rows // run.grad_accum)
    return rows // count, index, count


def _begin(
    run: RunConfig,
    placement: Placement,
    checkpoints: Checkpoints,
    loader: Loader,
    init_from: str | Path | None,
    resume: bool | int,
    trainable: Trainable,
) -> tuple[TrainState, int]:
    there = checkpoints.steps()
    if there and resume is False:
        raise BadTarget(f"{checkpoints.folder}: holds steps {', '.join(map(str, there))} of a run; resume it, or give "
                        "another folder")
    if resume is not False and (there or resume is not True):
        state, saved = checkpoints.restore(run, placement, trainable, None if resume is True else resume)
        for step in [step for step in there if step > saved.step]:
            log.warning("step %d is removed: the run goes on from step %d", step, saved.step)
            checkpoints.remove(step)
        if saved.data is not None:
            loader.restore(saved.data)
        return state, saved.step
    if init_from is None:
        return init_state(run, placement, trainable), 0
    with open_checkpoint(init_from, model_config=_facts(run.model)) as checkpoint:
        checkpoint.bounds  # noqa: B018  every problem of the files at once, before any value is read
        params = flatten(load_params(checkpoint, run.model, placement.mesh, np.float32, rules=placement.rules))
    return init_state(run, placement, trainable, params), 0


def _facts(model: ModelConfig) -> ModelConfig:
    """What a checkpoint must not contradict: not the context length, unless it is a table's, and not the tokens."""
    context = model.max_positions if model.position == "learned" else None
    return replace(model, max_positions=context, bos_id=None, eos_id=None, pad_id=None)


class _Loop:
    """One run of the loop: what it needs at every step, and what it measures."""

    validation: Callable[[], Iterable[Batch]] | None = None
    evaluate: Callable[[Mapping[str, Any], int], Mapping[str, float]] | None = None

    def __init__(
        self, run: RunConfig, placement: Placement, checkpoints: Checkpoints, metrics: MetricsLog, loader: Loader,
        trainable: Trainable, files: Mapping[str, bytes], on_log: Callable[[Mapping[str, Any]], None] | None,
    ):  # fmt: skip
        self.run, self.placement, self.checkpoints, self.metrics = run, placement, checkpoints, metrics
        self.loader, self.files, self.on_log = loader, files, on_log
        self.step_function = make_step(run, placement, abstract_state(run, trainable), trainable)
        self.positions = rows_per_step(run, placement.mesh) * run.seq_len
        self.loss: float | None = None
        self._skipped = 0.0
        self._saved_at = self._logged_at = time.perf_counter()
        self._logged_step = self._waited = 0.0
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def go(self, state: TrainState, start: int, stopping: Stopping) -> tuple[TrainState, int, str]:
        """Steps ``start`` + 1 to the last; (state, last step, why it ended)."""
        self._logged_step, step, saved, ended = start, start, start, "steps"
        while step < self.run.steps:
            began = time.perf_counter()
            batch = next(self.loader, None)
            if batch is None:
                ended = "data"
                break
            batch = to_devices(batch, self.placement, self.run.grad_accum)
            self._waited += time.perf_counter() - began
            state, metrics = self.step_function(state, batch)
            step += 1
            self._flush()  # the step before last: reading it now does not make the devices wait
            if step % self.run.log_every == 0 or step in (start + 1, self.run.steps):
                self._pending = (step, metrics)
            self.checkpoints.check()
            self._evaluate(state, step)
            stop = stopping.after(step)
            if stop or self._due(step):
                self._save(state, step)
                saved = step
            if stop:
                ended = "sigterm"
                break
        self._flush()
        if saved != step:
            self._save(state, step)
        return state, step, ended

    def _flush(self) -> None:
        """Write the pending line, once its step is done."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {key: float(x) for key, x in metrics.items()}
        now = time.perf_counter()
        seconds = (now - self._logged_at) / max(step - self._logged_step, 1)
        values |= {
            "seconds": seconds,
            "tokens_per_second": self.positions / seconds,
            "data_wait": self._waited / max(now - self._logged_at, 1e-9),
        }
        self._logged_at, self._logged_step, self._waited, self.loss = now, step, 0.0, values["loss"]
        if values["skipped"] > self._skipped and is_first():
            log.warning(
                "step %d: %d steps so far changed nothing: their gradients were not finite, or no target counted",
                step, values["skipped"],
            )  # fmt: skip
        self._skipped = values["skipped"]
        self._tell("train", step, values)

    def _tell(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        line = self.metrics.write(kind, step, values)
        if self.on_log is not None and is_first():
            self.on_log(line)

    def _due(self, step: int) -> bool:
        choices = self.run.checkpoint
        if choices.every_steps is not None and step % choices.every_steps == 0:
            return True
        if choices.every_minutes is None or step % self.run.log_every:
            return False
        return _agreed(time.perf_counter() - self._saved_at >= 60 * choices.every_minutes)

    def _save(self, state: TrainState, step: int) -> None:
        self._flush()
        self.checkpoints.save(state, self.run, gather_position(self.loader), self.files)
        self._saved_at = time.perf_counter()

    def _evaluate(self, state: TrainState, step: int) -> None:
        choices, last = self.run.evaluation, step == self.run.steps
        if self.validation and choices.every_steps and (last or step % choices.every_steps == 0):
            self._flush()
            self._tell("validation", step, {"loss": self._validation_loss(state)})
        every = choices.lambada_every_steps
        if self.evaluate and every and (last or step % every == 0):
            self._flush()
            self._tell("evaluation", step, self.evaluate(nest(state.params), step))

    def _validation_loss(self, state: TrainState) -> float:
        """Nats a counted target, over the first batches of the validation data: always the same ones."""
        if not hasattr(self, "_evaluation"):
            self._evaluation = make_evaluation(self.run, self.placement)
        assert self.validation is not None
        xent = tokens = 0.0
        for batch, _ in zip(self.validation(), range(self.run.evaluation.validation_batches), strict=False):
            sums = self._evaluation(state.params, to_devices(batch, self.placement, self.run.grad_accum))
            xent, tokens = xent + float(sums[0]), tokens + float(sums[1])
        return xent / max(tokens, 1.0)


def gather_position(loader: Loader) -> dict[str, Any]:
    """The data position of all processes as one; all call it together."""
    if jax.process_count() == 1:
        return loader.state()
    from jax.experimental import multihost_utils

    from llmtool.train.data import merge_states

    text = np.frombuffer(json.dumps(loader.state()).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(text), np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    every = np.asarray(multihost_utils.process_allgather(padded))
    return merge_states(json.loads(bytes(row[:size])) for row, size in zip(every, sizes.reshape(-1), strict=True))


def _agreed(mine: bool) -> bool:
    """The first process's answer, in all."""
    if jax.process_count() == 1:
        return mine
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(np.array(mine)))
