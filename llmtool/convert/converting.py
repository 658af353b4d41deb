"""Convert a checkpoint: open, plan, carry, and put the whole in place."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmtool import params
from llmtool.convert import target as targets
from llmtool.convert.atomic import check_target, new_folder
from llmtool.convert.carry import Carried, carry
from llmtool.convert.casting import CastCount
from llmtool.convert.checkpoint import Checkpoint
from llmtool.convert.layout_word import Word, parse_word
from llmtool.convert.manifest import Manifest
from llmtool.convert.opening import open_checkpoint
from llmtool.convert.plan import Plan, make_plan
from llmtool.convert.sidecars.tokenizer_files import copy_sidecars, sidecar_files
from llmtool.convert.stores.base import DTYPES
from llmtool.convert.stores.zarr import ZarrSource
from llmtool.errors import BadCheckpoint, BadTarget, LlmtoolError, PlanError, UnknownLayout
from llmtool.model_config import ModelConfig

SHORT_DTYPES = {
    "f32": "float32",
    "fp32": "float32",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "fp64": "float64",
}


@dataclass
class Report:
    """What a conversion did, or would do. ``casts``: one entry for every array that a change of dtype touched."""

    source: str
    target: str
    from_word: str
    to_word: str
    model: ModelConfig
    tensors: int
    parameters: int
    bytes_read: int
    bytes_written: int
    dtypes: dict[str, int]
    notes: list[str]
    dry_run: bool
    casts: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON values, schema llmtool.convert/1."""
        return {"schema": "llmtool.convert/1", **vars(self), "model": self.model.to_json()}


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    from_: str | None = None,
    model_config: str | ModelConfig | None = None,
    dtype: str | None = None,
    step: int | None = None,
    weight_only: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    expected: Mapping[str, Any] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Report:
    """Rewrite the checkpoint ``source`` in the layout ``to`` (a layout word) as the folder ``target``.

    ``from_``, ``model_config``, ``step`` and ``expected`` are as in :func:`open_checkpoint`. ``dtype`` casts every
    weight; without it each keeps its dtype bit for bit (GGUF becomes float32). ``weight_only`` leaves optimizer state
    out without a note. ``progress(slot, nbytes)`` is called after every step. Memory is a few slices of one layer,
    whatever the model's size. Raises an LlmtoolError before anything is written where the plan does not hold; a run
    that fails later leaves the target as it was.
    """
    began = time.perf_counter()
    source, target = Path(source), Path(target)
    wanted = _dtype(dtype)
    with open_checkpoint(source, layout=from_, model_config=model_config, step=step, expected=expected) as checkpoint:
        word = parse_word(to)
        job = _prepare(checkpoint, word, wanted, target, overwrite)
        report = _report(job, checkpoint, source, target, weight_only)
        if not dry_run:
            with new_folder(target, overwrite=overwrite) as folder:
                _run(job, checkpoint, folder, report, progress)
    report.dry_run = dry_run
    report.seconds = round(time.perf_counter() - began, 3)
    return report


def _dtype(name: str | None) -> np.dtype | None:
    if name is None:
        return None
    full = SHORT_DTYPES.get(name, name)
    if full not in ("float64", "float32", "float16", "bfloat16"):
        raise UnknownLayout(f"unknown dtype {name!r}; expected float32, bfloat16, float16 or float64")
    return DTYPES[full]


@dataclass
class _Job:
    plan: Plan
    word: Word
    texts: Mapping[str, str]  # config.json and the like
    sidecars: list[Path]
    notes: list[str]


def _prepare(checkpoint: Checkpoint, word: Word, dtype: np.dtype | None, target: Path, overwrite: bool) -> _Job:
    """Decide everything; raise all problems at once."""
    config = checkpoint.known_config()
    said, word = word, targets.full_word(word, config, checkpoint)
    notes = [
        f"{key}={said.options[key]} makes no difference to this model"
        for key in said.options.keys() - word.options.keys()
    ]
    if dtype is None and checkpoint.layout == "gguf":
        dtype = DTYPES["float32"]
    problems: list[str] = []

    def attempt(what: Callable[[], Any]) -> Any:
        try:
            return what()
        except PlanError as error:
            problems.extend(error.problems)
        except LlmtoolError as error:
            problems.append(str(error))

    title = f"cannot convert {checkpoint.path} to {word.name}"
    table = attempt(lambda: targets.table_of(word, config))
    source_table = attempt(lambda: checkpoint.table)
    plan: Plan | None = None
    if table is not None and source_table is not None:
        plan = attempt(
            lambda: make_plan(
                source_table, table, config, checkpoint.tensors, dtype=dtype, restore=checkpoint.restore, title=title
            )
        )
    main = Counter(spec.dtype for spec in (plan.targets if plan else checkpoint.tensors).values()).most_common(1)[0][0]
    texts: Mapping[str, str] = {}
    if table is not None:  # else the sidecar would only say again that this model has no place there
        texts = attempt(lambda: targets.check_sidecars(word, config, str(main), checkpoint)) or {}
    sidecars = attempt(lambda: sidecar_files(checkpoint.root)) or []
    needed = sum(spec.nbytes for spec in plan.targets.values()) if plan else 0
    if plan is not None and word.name == "meta":
        attempt(lambda: _check_shards(word, plan))
    place = check_target(target, _places(checkpoint), overwrite=overwrite, needed=needed)
    if len(place) == 1 and not problems:
        raise BadTarget(place[0])
    if problems := problems + place:
        raise PlanError(title + (f": {len(problems)} problems" if len(problems) > 1 else ""), problems)
    assert plan is not None
    return _Job(plan, word, texts, sidecars, notes)


def _places(checkpoint: Checkpoint) -> list[Path]:
    """What the output must not touch: the file, or the folders of the weights and of their sidecars."""
    return [checkpoint.path] if checkpoint.path.is_file() else [checkpoint.root, checkpoint.path]


def _check_shards(word: Word, plan: Plan) -> None:
    shards = int(word.options["shards"])
    bad = []
    for bound in plan.target.bind(plan.config):
        axis = bound.row.shard_axis
        if axis is not None and (length := plan.targets[bound.key].shape[axis]) % shards:
            bad.append(f"{bound.key}: {length} does not divide into {shards} shards")
    if bad:
        raise PlanError(f"meta:shards={shards} does not fit", bad)


def _report(job: _Job, checkpoint: Checkpoint, source: Path, target: Path, weight_only: bool) -> Report:
    specs = job.plan.targets
    notes = checkpoint.notes + checkpoint.remarks + job.notes
    for what, count in () if weight_only else checkpoint.left_out.items():
        notes.append(f"{count} arrays of {what} are left out: this version converts weights")
    if job.plan.widened:
        notes.append(f"{len(job.plan.widened)} norm scales become float32: the layouts store them shifted by one")
    return Report(
        source=str(source),
        target=str(target),
        from_word=str(checkpoint.word),
        to_word=str(job.word),
        model=job.plan.config,
        tensors=len(specs),
        parameters=sum(spec.size for spec in specs.values()),
        bytes_read=job.plan.bytes_read,
        bytes_written=sum(spec.nbytes for spec in specs.values()),
        dtypes=dict(Counter(str(spec.dtype) for spec in specs.values()).most_common()),
        notes=notes,
        dry_run=True,
        left_out=dict(checkpoint.left_out),
        files=[*job.texts, *(path.name for path in job.sidecars), *checkpoint.files],
        plan=[
            " + ".join(read.slot for read in step.reads) + " -> " + " + ".join(write.slot for write in step.writes)
            for step in job.plan.steps
        ],
    )


def _run(
    job: _Job, checkpoint: Checkpoint, folder: Path, report: Report, progress: Callable[[str, int], None] | None
) -> None:
    step, step_dtype = _step(checkpoint)
    sink = targets.open_sink(job.word, folder, job.plan, step)
    if isinstance(checkpoint.source, ZarrSource):
        checkpoint.source.scratch = folder  # unpacked chunks go where there is room for the output, not to memory
    told = len(checkpoint.notes)
    remainders = checkpoint.remainders  # read now, not in the plan: it compares small arrays with their hashes
    report.notes += checkpoint.notes[told:]
    done = carry(job.plan, checkpoint.source, sink, remainders=remainders, progress=progress)
    sink.close()
    if job.word.name in ("pax", "te"):
        targets.finish_pax(job.word, folder, job.plan, step, step_dtype)
    for name, text in job.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    copy_sidecars(job.sidecars, folder)
    for name, data in checkpoint.files.items():
        (folder / name).write_bytes(data)
    report.bytes_written = done.bytes_written
    report.casts = [
        {"array": slot, **vars(count)} for slot, count in done.casts.items() if count.changed or count.overflow
    ]
    report.notes += _cast_notes(done)
    _manifest(job, checkpoint, done, step).write(folder)


def _cast_notes(done: Carried) -> list[str]:
    total = CastCount()
    for slot, count in done.casts.items():
        if slot not in done.remainders:
            total.add(count)
    notes = []
    if total.changed or total.overflow:
        notes.append(
            f"the cast changed {total.changed:,} of {total.values:,} values: {total.overflow:,} overflowed to "
            f"infinity, {total.underflow:,} underflowed to zero"
        )
    if done.remainders:
        lost = sum(int(np.count_nonzero(rest)) for rest in done.remainders.values())
        notes.append(
            f"{lost} norm scale values were rounded when one was added or taken away; what rounding took is in "
            "llmtool-remainders.bits, and a conversion back restores them"
        )
    return notes


def _step(checkpoint: Checkpoint) -> tuple[int, np.dtype]:
    """The training step and its dtype: of a Pax source, recorded in a manifest, or 0 (uint32, as paxml's trainer)."""
    if "step" in checkpoint.tensors and checkpoint.layout in ("pax", "te"):
        value = checkpoint.source.read("step")
        if value.dtype.kind not in "iu" or value.size != 1 or not 0 <= (step := int(value.reshape(())[()])) < 1 << 63:
            raise BadCheckpoint(
                f"{checkpoint.source.where('step')}: holds {value.reshape(-1)[:3]!s} as {value.dtype}; expected one "
                "whole number from 0 up, the training step"
            )
        return step, value.dtype
    recorded = checkpoint.manifest.step if checkpoint.manifest else None
    return recorded if isinstance(recorded, int) and 0 <= recorded < 1 << 32 else 0, np.dtype(np.uint32)


def _manifest(job: _Job, checkpoint: Checkpoint, done: Carried, step: int) -> Manifest:
    tensors = {}
    shapes = {
        bound.slot: (bound.key, bound.row.shape(params.sizes(job.plan.config)))
        for bound in job.plan.target.bind(job.plan.config)
    }
    for slot, digest in done.hashes.items():
        key, shape = shapes[slot]
        tensors[slot] = {"dtype": str(job.plan.targets[key].dtype), "shape": list(shape), "xxh3": digest}
    return Manifest(
        layout=str(job.word),
        model=job.plan.config,
        source=f"{checkpoint.root.name} ({checkpoint.word})",
        step=step,
        tensors=tensors,
        restore=job.plan.widened,
        remainders=done.remainders,
    )
