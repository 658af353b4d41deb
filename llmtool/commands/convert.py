"""``llmtool convert``: from any layout into any other."""

from typing import Any

import click

from llmtool.commands import nvidia_flags
from llmtool.commands.nvidia_flags import Job
from llmtool.commands.options import LayoutWord, json_option, model_config_option, quiet_option, step_option

DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT_DTYPES = ("fp32", "bf16", "fp16", "fp64", "f32", "f16", "f64")


class _Command(click.Command):
    """Help that keeps NVIDIA's flags in a section of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections[param.name in nvidia_flags.NAMES].append(record)
        with formatter.section("Options"):
            formatter.write_dl(sections[False])
        with formatter.section("The same in NVIDIA's spelling (all but the first four are optional)"):
            formatter.write_dl(sections[True])


@click.command(cls=_Command, short_help="Convert a checkpoint into another layout.")
@click.argument("src", required=False, type=click.Path())
@click.argument("dst", required=False, type=click.Path())
@click.option("--to", "to_word", type=LayoutWord(target=True), help="Layout to write.")
@click.option("--from", "from_word", type=LayoutWord(), help="Layout of SRC; found out when left out.")
@model_config_option
@click.option("--dtype", type=click.Choice([*DTYPES, *SHORT_DTYPES]), metavar="|".join(DTYPES),
              help="Cast every weight, and count what overflows, underflows or changes. Left out: unchanged.")
@step_option
@click.option("--weight-only", is_flag=True, help="Say nothing of optimizer state, which is left behind so far.")
@click.option("--overwrite", is_flag=True, help="Replace a target that is there; only once the new one is complete.")
@click.option("--verify", is_flag=True,
              help="At the end run both in float32 and compare their logits, as `llmtool verify` does; exit status 1 "
                   "where they differ.")
@click.option("--dry-run", is_flag=True, help="Print the plan and every problem; read no weight, write nothing.")
@json_option
@quiet_option
@nvidia_flags.options
@click.pass_context
def convert(ctx: click.Context, **options: Any) -> None:
    """Convert the checkpoint SRC into the folder DST.

    \b
    llmtool convert Llama-2-70b/ out/ --to pax
    llmtool convert llama-hf/ out/ --to te:qkv=kv_packed,gate=act_first
    llmtool convert model.gguf out/ --to hf --dtype bfloat16

    Nothing is guessed in silence: a needed fact that neither the files nor you state is an error that names it.
    """
    ctx.exit(0 if _convert(job_of(options), options) else 1)


def job_of(options: dict[str, Any]) -> Job:
    """The conversion that a command line asks for, in either spelling."""
    flags = {name: options[name] for name in nvidia_flags.NAMES}
    source, target, to_word = options["src"], options["dst"], options["to_word"]
    if any(flags.values()):
        if source or target:
            raise click.UsageError("give SRC and DST, or NVIDIA's flags with --input-path and --output-path; not both")
        return nvidia_flags.translate(flags, options["from_word"], to_word)
    if not (source and target and to_word):
        missing = [name for name, value in (("SRC", source), ("DST", target), ("--to LAYOUT", to_word)) if not value]
        raise click.UsageError(f"missing {', '.join(missing)}")
    return Job(source, target, options["from_word"], to_word)


def _convert(job: Job, options: dict[str, Any]) -> bool:
    """Do it; whether what was written computes the same, as far as anyone asked."""
    from llmtool.commands.show import print_json, print_report, print_verification
    from llmtool.convert import convert_checkpoint, open_checkpoint
    from llmtool.progress import progress

    facts: dict[str, Any] = {name: options[name] for name in ("model_config", "step")} | {"expected": job.expected}
    choices = {name: options[name] for name in ("dtype", "weight_only", "overwrite", "dry_run")}
    quiet, total = options["quiet"] or options["dry_run"], None
    verify = options["verify"] and not options["dry_run"]
    if verify:
        _check_can_run(job, facts)
    if not quiet:
        with open_checkpoint(job.source, layout=job.from_word, **facts) as source:
            total = source.describe()["bytes"]
    with progress("converting", total, quiet=quiet) as shown:
        report = convert_checkpoint(
            job.source, job.target, to=job.to_word, from_=job.from_word, **facts, **choices,
            progress=lambda what, nbytes: shown.advance(nbytes, what),
        )
    found = _verify(job, report.to_word, facts, options) if verify else None
    if options["as_json"]:
        print_json({**report.to_json(), "verified": found})
    else:
        print_report(report)
        if found is not None:
            print_verification(found)
    return found is None or found["equal"]


def _check_can_run(job: Job, facts: dict[str, Any]) -> None:
    """Ask before hours of conversion for the facts that the comparison at its end will need."""
    from llmtool.evaluate.loading import Model

    with Model.open(job.source, layout=job.from_word, **facts):
        pass


def _verify(job: Job, to_word: str, facts: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    from llmtool.commands.stages import Stages
    from llmtool.convert.converting import SHORT_DTYPES
    from llmtool.evaluate import verify_checkpoints

    dtype = options["dtype"]
    with Stages(options["quiet"]) as told:
        found = verify_checkpoints(
            job.source, job.target, layout_a=job.from_word, layout_b=to_word, **facts,
            cast=SHORT_DTYPES.get(dtype, dtype), progress=told,
        )
    return found.to_json()
