"""``llmtool presets``: training runs by name, and where each of their numbers comes from."""

import math
from typing import Any

import click
from click.shell_completion import CompletionItem

from llmtool.commands.options import json_option


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runs, each with what it is."""
    from llmtool.train.presets import RUNS

    return [CompletionItem(name, help=run.summary) for name, run in RUNS.items() if name.startswith(incomplete)]


@click.group(invoke_without_command=True, short_help="List named training runs, or show one with its sources.")
@json_option
@click.pass_context
def presets(ctx: click.Context, as_json: bool) -> None:
    """List the runs that `llmtool pretrain --config` knows, and the models that --model-config knows.

    \b
    llmtool presets
    llmtool presets show gpt-5b
    llmtool presets show gpt-5b --strict-pax --json
    """
    if ctx.invoked_subcommand is not None:
        return
    from llmtool.commands.show import print_json, print_presets

    listed = _listed()
    if as_json:
        print_json(listed)
    else:
        print_presets(listed)


@presets.command(short_help="Show every choice of one run, and its source.")
@click.argument("name", shell_complete=complete_run)
@click.option("--strict-pax", is_flag=True,
              help="As Pax' code has it where NVIDIA's page of the preset says otherwise (gpt-* and glam-* only).")
@json_option
def show(name: str, strict_pax: bool, as_json: bool) -> None:
    """Show the model and every choice of the run NAME, each with the source of its number."""
    from llmtool.commands.show import print_json, print_preset

    told = _told(name, strict_pax)
    if as_json:
        print_json(told)
    else:
        print_preset(told)


def _listed() -> dict[str, Any]:
    from llmtool.presets import MODELS, parameter_count
    from llmtool.train.presets import RUNS

    runs = []
    for name, recipe in RUNS.items():
        run = recipe()
        devices = None if run.mesh.ici is None else math.prod(run.mesh.ici) * math.prod(run.mesh.dcn)
        runs.append({"name": name, "summary": recipe.summary, "parameters": parameter_count(run.model),
                     "devices": devices, "batch_per_device": run.batch_per_device, "seq_len": run.seq_len,
                     "steps": run.steps, "strict_pax": recipe.strict is not None})
    models = [{"name": name, "parameters": parameter_count(facts.config), "provenance": facts.provenance}
              for name, facts in MODELS.items()]
    return {"schema": "llmtool.presets/1", "runs": runs, "models": models}


def _told(name: str, strict_pax: bool) -> dict[str, Any]:
    from llmtool.presets import parameter_count
    from llmtool.train.overrides import to_json
    from llmtool.train.presets import recipe

    found = recipe(name)
    run = found(strict_pax)
    return {"schema": "llmtool.preset/1", "name": name, "summary": found.summary, "strict_pax": strict_pax,
            "parameters": parameter_count(run.model), "run": to_json(run), "provenance": found.provenance(strict_pax),
            "notes": list(run.notes)}
