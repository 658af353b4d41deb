"""Pretraining as one call: the words of a run (sources, tokenizer, evaluation sets) become what ``fit`` takes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from llmtool.convert.openers.native import saved_steps
from llmtool.convert.sidecars.json_file import TOKENIZER_LIMIT, read_bytes
from llmtool.convert.sidecars.tokenizer_files import sidecar_files
from llmtool.errors import BadRun, LlmtoolError, MissingFact, OutOfMemory
from llmtool.evaluate.data import load_lambada
from llmtool.evaluate.running import running_evaluation
from llmtool.evaluate.tokenizer import Tokenizer, load_tokenizer
from llmtool.model.processes import is_first
from llmtool.train.batch import Batch
from llmtool.train.checking import check_run
from llmtool.train.config import RunConfig
from llmtool.train.data import make_loader
from llmtool.train.data.loader import Loader
from llmtool.train.data.words import parse_word
from llmtool.train.loop import FitResult, fit, share
from llmtool.train.saved_run import save_run
from llmtool.train.strategy import Placement, place


@dataclass(frozen=True)
class Prepared:
    """A run that can start: everything that can be wrong with its choices and data has been looked at."""

    run: RunConfig
    placement: Placement
    loader: Loader
    validation: Callable[[], Iterable[Batch]] | None
    evaluate: Callable[[Mapping[str, Any], int], Mapping[str, float]] | None
    files: Mapping[str, bytes]
    notes: tuple[str, ...]


def prepare(run: RunConfig, *, ckpt: str | Path | None = None, whole_epochs: bool = False) -> Prepared:
    """Open the data, tokenizer and evaluation sets of ``run``.

    The tokenizer is ``run.data.tokenizer``, else the one beside ``ckpt``. ``whole_epochs``: the run has as many steps
    as ``run.data.epochs`` take. Raises LlmtoolError for whatever the user can mend.
    """
    check_run(run)
    if not run.data.sources:
        raise BadRun(f"{run.name}: no data comes with it; say what to train on with --data, such as --data jsonl:FILE "
                     "(llmtool data --help)")
    notes: list[str] = []
    tokenizer, files = _tokenizer(run, ckpt)
    placement = place(run)
    rows, index, count = share(run, placement)
    shared: dict[str, Any] = {"tokenizer": tokenizer, "seq_len": run.seq_len, "rows_per_process": rows,
                              "process_index": index, "process_count": count, "seed": run.seed,
                              "vocab_size": run.model.vocab_size}
    loader = make_loader(run.data, **shared)
    if whole_epochs:
        if loader.batches is None:
            raise BadRun("--epochs: nobody knows how many rows the data have; tokenize them once (llmtool data "
                         "tokenize), or say --steps")
        run = check_run(dataclasses.replace(run, steps=loader.batches))
    validation = None
    if run.evaluation.every_steps is not None and run.data.validation:
        validation = _again(make_loader(run.data, **shared, validation=True,
                                        max_batches=run.evaluation.validation_batches))
    elif run.evaluation.every_steps is not None:
        notes.append("no validation data (--validation): the loss is measured on training batches alone")
    elif run.data.validation:
        raise BadRun("there are validation data, but evaluation.every_steps is none; say --eval-every N")
    if not files:
        notes.append("no tokenizer is known, so none goes into the checkpoints; give the data's with --tokenizer")
    evaluate = _lambada(run, placement, tokenizer)
    return Prepared(run, placement, loader, validation, evaluate, files, tuple(notes))


def train(
    prepared: Prepared,
    *,
    workdir: str | Path,
    ckpt: str | Path | None = None,
    resume: bool | int = False,
    on_log: Callable[[Mapping[str, Any]], None] | None = None,
) -> FitResult:
    """Run it: ``workdir`` gets checkpoints, ``metrics.jsonl`` and ``run.json``. Options as of ``fit``."""
    workdir, run = Path(workdir), prepared.run
    if is_first() and (resume is not False or not saved_steps(workdir)):
        workdir.mkdir(parents=True, exist_ok=True)
        save_run(run, workdir)
    try:
        return fit(run, workdir=workdir, loader=prepared.loader, init_from=ckpt, resume=resume,
                   validation=prepared.validation, evaluate=prepared.evaluate, on_log=on_log, files=prepared.files)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
            raise _out_of_memory(run) from error
        if jax.process_count() > 1:
            raise LlmtoolError("another process of this run has ended, or cannot be reached; its own output tells "
                               f"why ({str(error).strip().splitlines()[-1][-200:]})") from error
        raise
    finally:
        prepared.loader.close()


def _tokenizer(run: RunConfig, ckpt: str | Path | None) -> tuple[Tokenizer | None, dict[str, bytes]]:
    """The tokenizer of a run, and its files under the names that a checkpoint has them under."""
    needed = any(parse_word(text).kind not in ("tokens", "synthetic")
                 for text in (*run.data.sources, *run.data.validation)) or run.evaluation.lambada is not None
    where = run.data.tokenizer or ckpt
    if where is None:
        if needed:
            raise MissingFact(f"{run.name}: text needs a tokenizer; name one with --tokenizer FILE, or make one: "
                              "llmtool data train-tokenizer")
        return None, {}
    path = Path(where)
    if run.data.tokenizer is None:
        steps = saved_steps(path)
        path = steps[max(steps)] if steps else path
        if not needed and not (path.is_dir() and sidecar_files(path)):
            return None, {}
    tokenizer = load_tokenizer(path)
    if path.is_dir():
        files = {file.name: file for file in sidecar_files(path)}
    else:
        suffix = ".json" if path.suffix == ".json" else ".model"
        own = path.name if path.name == "vocab.json" else f"tokenizer{suffix}"
        beside = (path.parent / name for name in ("tokenizer_config.json", "merges.txt"))
        files = {own: path} | {file.name: file for file in beside if file.is_file()}
    return tokenizer, {name: read_bytes(file, TOKENIZER_LIMIT) for name, file in files.items()}


def _again(loader: Loader) -> Callable[[], Iterable[Batch]]:
    """The same batches from the beginning, each time it is called."""
    beginning = loader.state()

    def batches() -> Iterable[Batch]:
        loader.restore(beginning)
        return loader

    return batches


def _lambada(
    run: RunConfig, placement: Placement, tokenizer: Tokenizer | None
) -> Callable[[Mapping[str, Any], int], Mapping[str, float]] | None:
    choices = run.evaluation
    if choices.lambada is None:
        if choices.lambada_every_steps is not None:
            raise BadRun("evaluation.lambada_every_steps is set, but no LAMBADA data are; say --lambada FILE")
        return None
    if choices.lambada_every_steps is None:
        raise BadRun(f"LAMBADA is to be evaluated on {choices.lambada}, but never; say --lambada-every N")
    assert tokenizer is not None
    scored = running_evaluation(
        load_lambada(choices.lambada).take(choices.lambada_limit), tokenizer, run.model, mesh=placement.mesh,
        protocol=choices.lambada_protocol, dtype="float32" if run.precision == "fp32" else "bfloat16",
        max_length=run.model.max_positions or run.seq_len)

    def evaluate(params: Mapping[str, Any], step: int) -> Mapping[str, float]:
        there = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), params)
        return scored(there)

    return evaluate


def _out_of_memory(run: RunConfig) -> OutOfMemory:
    return OutOfMemory(
        f"{run.batch_per_device:g} rows of {run.seq_len} tokens a device do not fit into its memory; try "
        f"--batch-per-device {run.batch_per_device / 2:g} --grad-accum {run.grad_accum * 2}"
        + ("" if run.remat == "full" else ", --remat full") + ", or more devices with --strategy fsdp")
