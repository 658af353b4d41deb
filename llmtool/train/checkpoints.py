"""Checkpoints of a run: ``RUN/checkpoints/STEP``, complete or not there.

``model/`` is a checkpoint of the ``native`` layout by itself (weights, ``model.json``, tokenizer): every command opens
it, and ``RUN`` stands for its newest. ``trainer/`` is what going on needs besides: moments, counts and keys as arrays,
and in ``run.json`` the data position and the resolved choices. Orbax's CheckpointManager copies, writes in the
background, renames when all processes are done, and deletes what is too old.
"""

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from llmtool.convert.openers.native import ITEM, MODEL, PARAMS, STEPS, saved_steps
from llmtool.convert.sidecars.json_file import read_json
from llmtool.convert.stores.files import sync
from llmtool.errors import BadCheckpoint, LlmtoolError
from llmtool.model.processes import is_first
from llmtool.model_config import ModelConfig
from llmtool.native_tree import entries
from llmtool.train.array_folder import HostCopy, read_arrays
from llmtool.train.config import RunConfig
from llmtool.train.overrides import to_json
from llmtool.train.state import LossScale, Trainable, TrainState, abstract_state, everything, state_shardings
from llmtool.train.strategy import Placement

SCHEMA = "llmtool.run-state/1"
TRAINER, ARRAYS, RUN = "trainer", "arrays", "run.json"
TIMEOUT = 600  # seconds that a process waits for the others, before it ends with an error


class SaveFailed(LlmtoolError):
    """A checkpoint could not be written; the run stops, for it could not be continued."""


@dataclass(frozen=True)
class Saved:
    """What a step holds besides arrays: the data position and the choices of the run that saved it."""

    step: int
    data: dict[str, Any] | None
    config: dict[str, Any]


class Checkpoints:
    """Saves and restores; a context manager that waits for what is still being written.

    All processes call every method together. Folders of steps that were never finished are removed on opening.
    """

    def __init__(self, workdir: Path, keep: int):
        self.folder = (workdir / STEPS).absolute()
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={ITEM: _ArrayHandler(), TRAINER: _ArrayHandler()},
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(timeout_secs=TIMEOUT, create_directories_asynchronously=False),
            ),
        )

    def steps(self) -> list[int]:
        """Complete steps, oldest first."""
        return sorted(saved_steps(self.folder))

    def save(
        self, state: TrainState, run: RunConfig, data: dict[str, Any] | None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Copy the state to host memory and write it in the background. ``data`` is the position of the data, fit for
        JSON; ``files`` go beside the weights (the tokenizer's)."""
        step = int(state.step)
        told = {"schema": SCHEMA, "step": step, "data": data, "config": to_json(run)}
        model = {"schema": "llmtool.model/1", **run.model.to_json()}
        stacked = _stacked(run.model)
        items = {
            ITEM: _ArraySave(state.params, stacked, PARAMS, {MODEL: _json(model), **(files or {})}),
            TRAINER: _ArraySave(_trainer(state), _stacked_moments(stacked), ARRAYS, {RUN: _json(told)}),
        }
        with _stopping(f"{self.folder / str(step)}: cannot be saved"):
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def remove(self, step: int) -> None:
        """Delete a step."""
        self._manager.delete(step)

    def check(self) -> None:
        """Raise :class:`SaveFailed` if a save in the background has failed."""
        with _stopping(f"{self.folder}: a checkpoint could not be written"):
            self._manager.check_for_errors()

    def restore(
        self, run: RunConfig, placement: Placement, trainable: Trainable = everything, step: int | None = None
    ) -> tuple[TrainState, Saved]:
        """The state of ``step`` (default: the newest complete one) on this mesh, whichever it was saved on.

        Raises :class:`BadCheckpoint` where there is no such step and :class:`~llmtool.errors.BadState` where it is not
        of this model, or other leaves move.
        """
        there = saved_steps(self.folder)
        step = max(there, default=None) if step is None else step
        if step is None or step not in there:
            listed = ", ".join(map(str, sorted(there))) or "none"
            asked = "" if step is None else f" {step}"
            raise BadCheckpoint(f"{self.folder}: no complete step{asked}; there are: {listed}")
        model, trainer = there[step], there[step].parent / TRAINER
        told = read_json(trainer / RUN)
        if told.get("schema") != SCHEMA:
            raise BadCheckpoint(f"{trainer / RUN}: schema {told.get('schema')!r}; this version reads {SCHEMA}")
        abstract = abstract_state(run, trainable)
        wanted = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            abstract,
            state_shardings(abstract, placement),
        )
        stacked = _stacked(run.model)
        params = read_arrays(model / PARAMS, wanted.params, stacked, f"{model}: not weights of this run's model")
        arrays = read_arrays(
            trainer / ARRAYS, _trainer(wanted), _stacked_moments(stacked),
            f"{trainer}: not the state of this run (to start anew from its weights: --ckpt {model})")  # fmt: skip
        return _assembled(wanted, params, arrays), Saved(step, told["data"], told["config"])

    def wait(self) -> None:
        """Wait until everything is written; raise :class:`SaveFailed` if it could not be."""
        with _stopping(f"{self.folder}: a checkpoint could not be written"):
            self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._manager.close()


@dataclass(repr=False)
class _ArraySave(ocp.args.CheckpointArgs):
    arrays: Mapping[str, jax.Array]
    stacked: Mapping[str, int]
    folder: str
    files: Mapping[str, bytes] = field(default_factory=dict)


class _ArrayRestore(ocp.args.CheckpointArgs):
    """Orbax wants a pair of argument types; we read without it, so that a reader needs no Orbax."""


class _ArrayHandler(ocp.AsyncCheckpointHandler):
    """An item: a folder of arrays, and files beside it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)

    async def async_save(self, directory: Any, args: _ArraySave) -> list[Future[None]]:
        copy = HostCopy.of(args.arrays, args.stacked)
        return [self._threads.submit(_write, Path(directory), args.folder, copy, args.files, is_first())]

    def save(self, directory: Any, args: _ArraySave) -> None:
        _write(Path(directory), args.folder, HostCopy.of(args.arrays, args.stacked), args.files, is_first())

    def restore(self, directory: Any, args: Any = None) -> None:
        raise NotImplementedError("see Checkpoints.restore")

    def close(self) -> None:
        self._threads.shutdown()


ocp.args.register_with_handler(_ArrayHandler, for_save=True)(_ArraySave)
ocp.args.register_with_handler(_ArrayHandler, for_restore=True)(_ArrayRestore)


def _write(directory: Path, folder: str, copy: HostCopy, files: Mapping[str, bytes], first: bool) -> None:
    copy.write(directory / folder, headers=first)
    for name, data in files.items() if first else ():
        (directory / name).write_bytes(data)
        sync(directory / name)
    sync(directory)


def _trainer(state: TrainState) -> dict[str, Any]:
    """Everything but the weights, by flat key."""
    scale = {} if state.loss_scale is None else {"loss_scale": state.loss_scale.value,
                                                 "good_steps": state.loss_scale.good_steps}
    return {
        "step": state.step, "rng": state.rng, "count": state.opt.count, "skipped": state.opt.skipped, **scale,
        **{f"m.{key}": x for key, x in state.opt.m.items()},
        **{f"v.{key}": x for key, x in state.opt.v.items()},
        **{f"{name}:{key}": x for name, leaves in state.collections.items() for key, x in leaves.items()},
    }  # fmt: skip


def _assembled(like: TrainState, params: dict[str, jax.Array], arrays: Mapping[str, jax.Array]) -> TrainState:
    """The inverse of :func:`_trainer`."""
    opt = like.opt._replace(
        count=arrays["count"],
        skipped=arrays["skipped"],
        m={key: arrays[f"m.{key}"] for key in like.opt.m},
        v={key: arrays[f"v.{key}"] for key in like.opt.v},
    )
    scale = None if like.loss_scale is None else LossScale(arrays["loss_scale"], arrays["good_steps"])
    extra = {name: {key: arrays[f"{name}:{key}"] for key in leaves} for name, leaves in like.collections.items()}
    return TrainState(arrays["step"], params, opt, arrays["rng"], scale, extra)


def _stacked(config: ModelConfig) -> dict[str, int]:
    return {key: len([axis for axis in entry.axes[:2] if axis in ("L", "E")]) if entry.axes[0] == "L" else 0
            for key, entry in entries(config).items()}


def _stacked_moments(stacked: Mapping[str, int]) -> dict[str, int]:
    return {f"{moment}.{key}": depth for moment in "mv" for key, depth in stacked.items()}


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, default=_plain) + "\n").encode()


def _plain(x: Any) -> Any:
    if isinstance(x, np.generic | np.ndarray):
        return x.tolist()
    raise TypeError(f"{type(x).__name__} is not fit for JSON")


class _stopping:
    """Turns what goes wrong in a save into one error that says where."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError | ValueError | RuntimeError):
            raise SaveFailed(f"{self._what}: {type(error).__name__}: {error}") from error
