"""``llmtool pretrain``: train a model from scratch, or from weights in any layout."""

import atexit
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from llmtool.commands.migration import environment_hints
from llmtool.commands.pretrain_options import folder_and_step, only_fdl, resolve, run_options

if TYPE_CHECKING:
    from llmtool.train.config import RunConfig

_NOT_TIMED = ("data", "out", "tokenizer", "validation", "epochs", "ckpt", "resume", "save_interval", "save_minutes",
              "keep", "log_every", "eval_every", "lambada", "lambada_every", "lambada_limit", "lambada_protocol")
_STOPPED = 143  # exit status of what SIGTERM ends


class _Remembering(click.Command):
    """A command that knows the words it was called with, to give them to other hosts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["llmtool.arguments"] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Remembering, context_settings={"ignore_unknown_options": True},
               short_help="Train a model from scratch, or go on from weights in any layout.")
@run_options
@click.pass_context
def pretrain(ctx: click.Context, **options: Any) -> None:
    """Train a model: one process or many, on CPU or GPU.

    \b
    llmtool pretrain --config llama-tiny --data corpus.txt --tokenizer my.model --out runs/tiny
    llmtool pretrain --config gpt-126m --data tokens/ --out runs/126m --mesh data=8 --grad-accum 8
    llmtool pretrain --config llama2-7b --ckpt Llama-2-7b/ --data 0.7*jsonl:web/ --data 0.3*jsonl:code/ --out runs/7b
    llmtool pretrain --resume --out runs/7b
    llmtool pretrain --config synthetic-llama2-7b --benchmark
    srun llmtool pretrain --config gpt-175b --data tokens/ --out runs/175b --resume

    RUN gets checkpoints/, which every command opens as RUN, metrics.jsonl, run.json, and TensorBoard events. What one
    types for ColossalAI's script or for Pax is understood too: train/MIGRATION.md.
    """
    options["pax"] = only_fdl(options["pax"])
    if options["hostfile"] is not None:
        _on_hosts(ctx.meta["llmtool.arguments"], options)
        return
    if options["ssh"]:
        raise click.UsageError("--ssh runs the commands of a --hostfile; give one")
    if (options["num_processes"] is None) != (options["process_id"] is None):
        raise click.UsageError("--num-processes and --process-id go together")
    if options["num_processes"] is not None and options["coordinator"] is None:
        raise click.UsageError("--num-processes and --process-id need --coordinator HOST:PORT")
    run, whole_epochs, notes = _run_of(options)
    _prepare_jax(options)
    try:
        if options["benchmark"]:
            _benchmark(run, options)
        else:
            _train(ctx, run, whole_epochs, notes, options)
    except Exception:
        _leave_the_others()
        raise


def _run_of(options: Mapping[str, Any]) -> tuple["RunConfig", bool, list[str]]:
    from llmtool.train.checking import check_run
    from llmtool.train.saved_run import differences, saved_run

    if options["benchmark"]:
        if given := [name for name in _NOT_TIMED if options[name] not in (None, ())]:
            words = ", ".join("--" + name.replace("_", "-") for name in given)
            raise click.UsageError(f"--benchmark times made-up rows and saves nothing; it has no use for {words}")
        return check_run(resolve(options, None)[0]), False, []
    if options["skip_steps"] is not None:
        raise click.UsageError("--skip-steps is for --benchmark")
    out, resume = folder_and_step(options)
    if out is None:
        raise click.UsageError("where shall the run go? Give its folder with --out")
    saved = saved_run(out) if resume is not False else None
    run, whole_epochs = resolve(options, saved)
    notes = environment_hints(os.environ)
    if saved is not None:
        notes += [f"other than before: {line}" for line in differences(saved, run, ignored=("steps",) * whole_epochs)]
    return run, whole_epochs, notes


def _prepare_jax(options: Mapping[str, Any]) -> None:
    """Join the other processes, before anything touches a device."""
    import logging

    from llmtool.model.processes import join_processes

    join_processes(options["distributed"], options["coordinator"], options["num_processes"], options["process_id"],
                   options["peer_timeout"])
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file


def _leave_the_others() -> None:
    """End without JAX's farewell, for which it would wait for the other processes, one of which may be no more."""
    import jax

    if jax.process_count() > 1:
        atexit.register(os._exit, 2)  # what is registered last runs first


def _train(
    ctx: click.Context, run: "RunConfig", whole_epochs: bool, notes: list[str], options: Mapping[str, Any]
) -> None:
    from llmtool.commands.show import print_json, print_training
    from llmtool.commands.training_progress import TrainingProgress
    from llmtool.model.processes import is_first
    from llmtool.presets import parameter_count
    from llmtool.train.pretraining import prepare, train
    from llmtool.train.tensorboard import TensorBoard
    from llmtool.train.throughput import Speedometer

    out, resume = folder_and_step(options)
    assert out is not None
    began = time.perf_counter()
    prepared = prepare(run, ckpt=options["ckpt"], whole_epochs=whole_epochs)
    run, speedometer, rates = prepared.run, Speedometer.of(prepared.run), []
    with (TrainingProgress(run.name, run.steps, options["quiet"] or not is_first()) as shown,
          TensorBoard(out) as events):
        for note in (*notes, *prepared.notes):
            shown.note(f"note: {note}")

        def on_log(line: Mapping[str, Any]) -> None:
            speed: Mapping[str, Any] = {}
            if line["kind"] == "train":
                rates.append(line["tokens_per_second"])
                speed = speedometer.read(line["step"], line["seconds"], line["tokens_per_second"])
            events.add(line, speed)
            shown.show(line, speed)

        result = train(prepared, workdir=out, ckpt=options["ckpt"], resume=resume, on_log=on_log)
    if is_first():
        loss = result.loss
        told = {
            "schema": "llmtool.pretrain/1",
            "name": run.name,
            "out": str(out),
            "parameters": parameter_count(run.model),
            "devices": speedometer.devices,
            "step": result.step,
            "steps": run.steps,
            "ended": result.ended,
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            "best_step": result.best_step,
            "best_validation_loss": result.best_validation_loss,
            "tokens_per_second": sum(rates[1:]) / len(rates[1:]) if rates[1:] else None,  # the first one compiles
            "max_memory_bytes": speedometer.read(0, 0, 0)["memory_bytes"],
            "seconds": round(time.perf_counter() - began, 3),
            "notes": [*notes, *prepared.notes],
        }
        if options["as_json"]:
            print_json(told)
        else:
            print_training(told)
    if result.ended == "sigterm":
        ctx.exit(_STOPPED)


def _benchmark(run: "RunConfig", options: Mapping[str, Any]) -> None:
    from llmtool.commands.show import print_benchmark, print_json
    from llmtool.model.processes import is_first
    from llmtool.progress import progress
    from llmtool.train.benchmark import benchmark

    skip = options["skip_steps"] or 2
    with progress("timing", skip + run.steps, quiet=options["quiet"] or not is_first(), unit="items") as bar:
        told = benchmark(run, skip=skip, on_step=lambda step: bar.advance(1, "compiling" if step == 1 else ""))
    if is_first():
        if options["as_json"]:
            print_json(told)
        else:
            print_benchmark(told)


def _on_hosts(arguments: list[str], options: Mapping[str, Any]) -> None:
    from llmtool.commands.hosts import host_commands, read_hosts, run_over_ssh

    if options["num_processes"] is not None or options["process_id"] is not None:
        raise click.UsageError("--hostfile counts the processes itself; leave --num-processes and --process-id out")
    _run_of(options)  # what is wrong with the run itself is said here, not on every host
    commands = host_commands(read_hosts(options["hostfile"]), ["pretrain", *_without_hosts(arguments)],
                             os.environ, options["coordinator"])
    if options["ssh"]:
        run_over_ssh(commands)
        return
    for command in commands:
        click.echo(f"# {command.host}\n{command.line}")


def _without_hosts(arguments: list[str]) -> list[str]:
    """The words of a command line but those that each host gets its own of."""
    out, words = [], iter(arguments)
    for word in words:
        name = word.partition("=")[0]
        if name in ("--hostfile", "--coordinator"):
            if "=" not in word:
                next(words)
        elif name != "--ssh":
            out.append(word)
    return out
