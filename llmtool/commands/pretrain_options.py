"""The options of ``llmtool pretrain``, and the choices of a run that they stand for."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from llmtool.commands.migration import (
    COLOSSAL_SHORT_OPTIONS,
    CONFIG_NAMES,
    PLUGINS,
    SECTIONS,
    colossal_overrides,
    fdl_overrides,
)
from llmtool.commands.options import Decorator, json_option, quiet_option
from llmtool.commands.presets import complete_run
from llmtool.errors import BadRun
from llmtool.train.config import RunConfig

NEWEST = "newest"
_COUNT, _NUMBER = click.IntRange(min=1), click.FloatRange(min=0)
_PRECISIONS = ("bf16", "fp32", "fp16", "bfloat16", "float32", "float16")
_PATHS: Mapping[str, str] = {  # parameter -> the choice that it sets to its value
    "steps": "steps", "epochs": "data.epochs", "tokenizer": "data.tokenizer", "text_field": "data.text_field",
    "pipeline": "data.pipeline", "workers": "data.workers", "seq_len": "seq_len",
    "batch_per_device": "batch_per_device", "grad_accum": "grad_accum", "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay", "warmup_steps": "schedule.warmup_steps", "seed": "seed",
    "offload": "offload", "remat": "remat", "attention": "attention", "save_interval": "checkpoint.every_steps",
    "save_minutes": "checkpoint.every_minutes", "keep": "checkpoint.keep", "log_every": "log_every",
    "eval_every": "evaluation.every_steps", "lambada": "evaluation.lambada",
    "lambada_every": "evaluation.lambada_every_steps", "lambada_limit": "evaluation.lambada_limit",
    "lambada_protocol": "evaluation.lambada_protocol",
}  # fmt: skip


def _option(param: str, *ours: str, **settings: Any) -> Decorator:
    """An option under our names and ColossalAI's."""
    names = dict.fromkeys((*ours, *COLOSSAL_SHORT_OPTIONS.get(param, ())))
    return click.option(*names, param, **settings)


def _choice(*words: str) -> click.Choice:
    return click.Choice(words)


_DECORATORS: list[Decorator] = [
    _option("config", "--config", metavar="NAME", shell_complete=complete_run,
            help="A named run (`llmtool presets`). May be left out with --resume."),
    _option("data", "--data", multiple=True, metavar="SOURCE",
            help="What to train on, [WEIGHT*][KIND:]PATH; again for a mixture (`llmtool data --help`)."),
    _option("out", "--out", type=click.Path(file_okay=False), metavar="RUN", help="The run's folder."),
    _option("tokenizer", "--tokenizer", type=click.Path(), metavar="FILE|FOLDER",
            show_default="the one beside --ckpt", help="Of the text; it goes into the checkpoints."),
    _option("validation", "--validation", multiple=True, metavar="SOURCE", help="Text to measure the loss on."),
    _option("text_field", "--text-field", metavar="NAME", help="The field or column with the text."),
    _option("pipeline", "--pipeline", type=_choice("packed", "pax"),
            help="EOS after each document, packed, nothing attends across; or 128 documents joined, as Pax does."),
    _option("workers", "--workers", type=click.IntRange(min=0), metavar="N", help="Processes that read the data."),
    _option("steps", "--steps", type=_COUNT, metavar="N", help="How many steps."),
    _option("epochs", "--epochs", type=_NUMBER, metavar="N", help="Or how often to go through the data."),
    _option("seq_len", "--seq-len", type=_COUNT, metavar="N", help="Tokens of a row."),
    _option("batch_per_device", "--batch-per-device", type=_NUMBER, metavar="N",
            help="Rows a device and micro-batch; a fraction with tensor parallelism."),
    _option("grad_accum", "--grad-accum", type=_COUNT, metavar="N", help="Micro-batches a step."),
    _option("learning_rate", "--learning-rate", type=_NUMBER, metavar="X", help="At its peak."),
    _option("weight_decay", "--weight-decay", type=_NUMBER, metavar="X", help="Decoupled, on every weight."),
    _option("warmup_steps", "--warmup-steps", type=click.IntRange(min=0), metavar="N", help="Of the learning rate."),
    _option("clip_norm", "--clip-norm", metavar="X", help="Global gradient norm; 0: no clipping."),
    _option("seed", "--seed", type=click.IntRange(min=0), metavar="N", help="Of weights, dropout and data order."),
    _option("mesh", "--mesh", metavar="data=N,fsdp=N,tensor=N", help="How devices share the work, all in one."),
    _option("ici_mesh", "--ici-mesh", metavar="N,N,N", help="(data, fsdp, tensor) within a node, as Pax says it."),
    _option("dcn_mesh", "--dcn-mesh", metavar="N,N,N", help="And across nodes."),
    _option("strategy", "--strategy", type=click.Choice([*dict.fromkeys(
        ("ddp", "zero2", "fsdp", "tensor", "hybrid", *PLUGINS))]), metavar="ddp|zero2|fsdp|tensor|hybrid",
        help="What is split over the devices; ColossalAI's plugins by name too."),
    _option("offload", "--offload", type=_choice("none", "optimizer", "parameters"), help="To host memory."),
    _option("precision", "--precision", type=_choice(*_PRECISIONS), metavar="bf16|fp32|fp16",
            help="Of the products; weights and moments are float32."),
    _option("remat", "--remat", type=_choice("none", "full", "save_dots", "save_qkv_out"),
            help="What the backward pass computes again."),
    _option("gradient_checkpoint", is_flag=True, hidden=True, help="ColossalAI's --remat full."),
    _option("attention", "--attention", type=_choice("auto", "xla", "cudnn"),
            help="Kernel; try xla where a run diverges."),
    _option("flash_attention", is_flag=True, hidden=True, help="ColossalAI's --attention auto."),
    _option("ckpt", "--ckpt", type=click.Path(), metavar="PATH", help="Start from these weights, in any layout."),
    _option("resume", "--resume", is_flag=False, flag_value=NEWEST, metavar="[STEP|RUN]",
            help="Go on from the newest checkpoint in RUN, if there is one; from a step; or name the run's folder."),
    _option("save_interval", "--save-every", type=_COUNT, metavar="N", help="Steps from checkpoint to checkpoint."),
    _option("save_minutes", "--save-minutes", type=_NUMBER, metavar="X", help="Also after so many minutes."),
    _option("keep", "--keep", type=_COUNT, metavar="N", help="Checkpoints that stay."),
    _option("log_every", "--log-every", type=_COUNT, metavar="N", help="Steps from line to line."),
    _option("eval_every", "--eval-every", type=_COUNT, metavar="N", help="Steps from validation to validation."),
    _option("lambada", "--lambada", metavar="FILE", help="LAMBADA, to be evaluated in the loop."),
    _option("lambada_every", "--lambada-every", type=_COUNT, metavar="N", help="Steps from one time to the next."),
    _option("lambada_limit", "--lambada-limit", type=_COUNT, metavar="N", help="Its first N passages only."),
    _option("lambada_protocol", "--lambada-protocol", type=_choice("lm-eval", "pax"), help="How it is scored."),
    _option("strict_pax", "--strict-pax", is_flag=True,
            help="As Pax' code has it where NVIDIA's page says otherwise (gpt-* and glam-*)."),
    _option("config_file", "--config-file", type=click.Path(exists=True, dir_okay=False), metavar="TOML",
            help="Choices over the named run's."),
    _option("assignments", "--set", multiple=True, metavar="PATH=VALUE",
            help="One choice, over all else (`llmtool presets show NAME` lists them)."),
    _option("benchmark", "--benchmark", is_flag=True, help="Time the steps on made-up rows instead; save nothing."),
    _option("skip_steps", "--skip-steps", type=_COUNT, default=None, show_default="2", metavar="N",
            help="Of a benchmark: first steps that do not count."),
    _option("distributed", "--distributed", is_flag=True,
            help="Join the job's other processes; found out by itself under srun and mpirun."),
    _option("coordinator", "--coordinator", metavar="HOST:PORT", help="Where the first process is reached."),
    _option("num_processes", "--num-processes", type=_COUNT, metavar="N", help="How many processes there are."),
    _option("process_id", "--process-id", type=click.IntRange(min=0), metavar="I", help="Which one this is, from 0."),
    _option("peer_timeout", "--peer-timeout", type=click.IntRange(min=10), default=100, metavar="SECONDS",
            help="When a process dies, or is silent for so long, the others end with an error."),
    _option("hostfile", "--hostfile", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
            help="Print the command for each host of a list, one process a host."),
    _option("ssh", "--ssh", is_flag=True, help="With --hostfile: run them."),
    json_option,
    quiet_option,
    click.argument("pax", nargs=-1, type=click.UNPROCESSED, metavar="[--fdl.NAME=VALUE]..."),
]


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options, as a decorator."""
    for decorator in reversed(_DECORATORS):
        command = decorator(command)
    return command


def resolve(options: Mapping[str, Any], saved: RunConfig | None) -> tuple[RunConfig, bool]:
    """The run that the options describe, and whether its steps are to be those of its epochs.

    Over the named run (or ``saved``, where no name is given) go the file, Pax' spellings, single options, and --set.
    """
    from llmtool.train.overrides import override, override_from_file, with_values
    from llmtool.train.presets import run_config

    if options["config"] is not None:
        base = run_config(CONFIG_NAMES.get(options["config"], options["config"]), strict_pax=options["strict_pax"])
    elif saved is not None and not options["strict_pax"]:
        base = saved
    else:
        raise BadRun("which run? Name one with --config (llmtool presets lists them)")
    unsaid = base if base is saved else replace(base, steps=0)  # no run has none: so it shows who says how many
    run = unsaid if options["config_file"] is None else override_from_file(unsaid, options["config_file"])
    run = override(run, fdl_overrides(options["pax"]))
    run = with_values(run, {path: options[param] for param, path in _PATHS.items() if options[param] is not None})
    run = override(run, _translated(options))
    for name, path in (("data", "data.sources"), ("validation", "data.validation")):
        run = with_values(run, {path: options[name]}) if options[name] else run
    run = override(run, options["assignments"])
    epochs = options["epochs"] is not None or (base is not saved and run.data.epochs is not None)
    if options["epochs"] is not None and options["steps"] is not None:
        raise click.UsageError("--epochs and --steps both say how long the run is; give one")
    return replace(run, steps=run.steps or base.steps), epochs and options["steps"] is None and (
        run.steps == unsaid.steps)


def _translated(options: Mapping[str, Any]) -> list[str]:
    """Options whose value is not that of one choice as it stands."""
    out: list[str] = []
    for param in ("strategy", "precision", "clip_norm"):
        value = options[param]
        if value is not None:
            theirs = param != "strategy" or value in PLUGINS
            out += colossal_overrides(param, value) if theirs else [f"{param}={value}"]
    if options["gradient_checkpoint"]:
        if options["remat"] not in (None, "full"):
            raise click.UsageError(f"-g is --remat full, but --remat is {options['remat']}; give one")
        out += colossal_overrides("gradient_checkpoint")
    if options["flash_attention"]:
        if options["attention"] not in (None, "auto"):
            raise click.UsageError(f"-a is --attention auto, but --attention is {options['attention']}; give one")
        out += colossal_overrides("flash_attention")
    if options["offload"] is not None:  # over a plugin's
        out.append(f"offload={options['offload']}")
    return out + _mesh(options)


def _mesh(options: Mapping[str, Any]) -> list[str]:
    if options["mesh"] is None:
        return [f"mesh.{name}={options[f'{name}_mesh']}" for name in ("ici", "dcn") if options[f"{name}_mesh"]]
    if options["ici_mesh"] or options["dcn_mesh"]:
        raise click.UsageError("--mesh is the whole mesh; leave --ici-mesh and --dcn-mesh out, or --mesh")
    from llmtool.model.mesh import parse_mesh

    return [f"mesh.ici={','.join(map(str, parse_mesh(options['mesh']).values()))}", "mesh.dcn=1,1,1"]


def only_fdl(arguments: tuple[str, ...]) -> list[str]:
    """Arguments that are Pax' spellings; of any other, say what it is here, if it is anything."""
    for argument in arguments:
        if argument.startswith("--fdl."):
            continue
        if not argument.startswith("-"):
            raise click.UsageError(f"{argument!r} belongs to no option; a run is named with --config, data with --data")
        name = argument.partition("=")[0]
        rows = [row for rows in SECTIONS.values() for row in rows for word in row.theirs
                if name in (word, word.partition("=")[0]) and row.param is None]
        if rows:
            raise click.UsageError(f"no such option: {name}; " + (rows[0].says if rows[0].ours is None
                                                                   else f"here it is {rows[0].ours}"))
        known = [word for param in click.get_current_context().command.params for word in param.opts]
        raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known, n=3))
    return list(arguments)


def folder_and_step(options: Mapping[str, Any]) -> tuple[Path | None, bool | int]:
    """The run's folder, and ``fit``'s ``resume``."""
    out, resume = options["out"], options["resume"]
    if resume is None:
        return (None if out is None else Path(out)), False
    if resume == NEWEST or resume.isdecimal():
        if out is None:
            raise click.UsageError("--resume: of which run? Give its folder, with --out or --resume RUN")
        return Path(out), True if resume == NEWEST else int(resume)
    if not Path(resume).is_dir():
        raise BadRun(f"--resume {resume}: expected a step's number or the folder of a run; weights to start from are "
                     "given with --ckpt")
    if out is not None and Path(out).resolve() != Path(resume).resolve():
        raise BadRun(f"--resume {resume}: a run goes on in its own folder, so --out {out} cannot be; to start a new "
                     f"run from its weights: --ckpt {resume}")
    return Path(resume), True
