"""``llmtool plan``: what a run needs on devices that are not there."""

from typing import TYPE_CHECKING, Any

import click

from llmtool.commands.pretrain_options import folder_and_step, only_fdl, resolve, run_options

if TYPE_CHECKING:
    from llmtool.train.config import RunConfig


@click.command(context_settings={"ignore_unknown_options": True},
               short_help="What a run needs on devices that are not there: bytes, FLOPs, traffic.")
@click.option("--devices", type=click.IntRange(1, 65536), metavar="N", show_default="those of the run's mesh",
              help="How many devices to compile for.")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), default=80.0, metavar="GB",
              help="Of a device, in units of 10^9 bytes.")
@click.option("--compile/--no-compile", "compiled", default=True,
              help="Compile the step, which proves that it can be; or only count (a second).")
@run_options
def plan(devices: int | None, memory: float, compiled: bool, **options: Any) -> None:
    """Say what a device of a run holds, computes and sends, before there are any devices.

    The run's own step is compiled for N devices that are not there; no weight is allocated. Bytes of parameters,
    gradients and moments are exact; activations and traffic are estimates (docs/plan.md has the formulas).

    All options of `llmtool pretrain` are taken, so that its command line becomes a plan by changing one word; those
    that name data, folders and hosts change nothing here.

    \b
    llmtool plan --config gpt-175b
    llmtool plan --config llama2-70b --devices 16 --remat full
    llmtool plan --config llama2-13b --ici-mesh 1,4,2 --dcn-mesh 1,4,1 --json
    """
    from llmtool.commands.show import print_json
    from llmtool.train.plan import absent_devices
    from llmtool.train.plan import plan as planned
    from llmtool.train.saved_run import saved_run

    options["pax"] = only_fdl(options["pax"])
    out, resume = folder_and_step(options)
    run, _ = resolve(options, None if out is None or resume is False else saved_run(out))
    found = planned(run, absent_devices(_count(run, devices)), memory=round(memory * 1e9), compiled=compiled)
    if options["as_json"]:
        print_json(found)
    else:
        print_plan(found)


def _count(run: "RunConfig", devices: int | None) -> int:
    if devices is not None:
        return devices
    if run.mesh.ici is None:
        raise click.UsageError(f"{run.name} has no mesh of its own: say how many --devices, or give --mesh.")
    from llmtool.train.flops import mesh_devices

    return mesh_devices(run)


def print_plan(found: dict[str, Any]) -> None:
    """The plan as tables: what is exact, then what is estimated."""
    from llmtool.commands.show import _console, _print_table, _table
    from llmtool.progress import human_bytes, human_count

    console, table = _console(), _table(show_header=False)
    state, flops, told, compiled = found["state"], found["flops"], found["estimates"], found["compiled"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    console.print(f"{found['name']}, {human_count(found['parameters'])} parameters, on {found['devices']} devices",
                  style="bold")
    away = "" if not state["host"] else f"; {human_bytes(state['host'])} of it in host memory"
    rows = [
        ("mesh", f"{mesh}; {found['strategy']}, {found['precision']}, remat {found['remat']}"),
        ("a step", f"{found['rows_per_step']:,} rows, {found['tokens_per_step']:,} tokens"),
        ("compiled", "not asked for" if compiled is None else
         f"in {compiled['seconds']:.0f} s; {human_bytes(compiled['reused_bytes'])} of state stay in place"),
        ("exact, a device", ""),
        ("  parameters", human_bytes(state["parameters"])),
        ("  gradients", human_bytes(state["gradients"])),
        ("  moments", human_bytes(state["moments"]) + away),
        ("FLOPs a token", ""),
        ("  model", f"{flops['model_per_token']:.4g} ({flops['model_per_step_and_device']:.4g} a step and device)"),
        ("  with recomputation", f"{flops['hardware_per_token']:.4g}"),
        ("  ColossalAI's formula", f"{flops['colossalai_per_token']:.4g}"),
        ("  Megatron's formula", f"{flops['megatron_per_token']:.4g}"),
        ("estimated, a device", "fused attention" if told["fused_attention"] else "attention scores are held"),
    ]
    for policy, each in told["activations"].items():
        chosen = "  (this run)" if policy == found["remat"] else ""
        rows.append((f"  activations, {policy}",
                     f"{human_bytes(each['kept'])} kept, {human_bytes(each['working'])} at work{chosen}"))
    rows += [(f"  sent over {axis}", f"{human_bytes(size)} a step") for axis, size in told["sent_per_step"].items()
             if found["mesh"][axis] > 1]
    verdict = (f"fits {human_bytes(told['memory'])}, {human_bytes(told['spare'])} to spare" if told["fits"] else
               f"does not fit {human_bytes(told['memory'])}: {human_bytes(-told['spare'])} too much")
    for row in [*rows, ("  in all", f"{human_bytes(told['total'])}: {verdict}")]:
        table.add_row(*row)
    _print_table(console, table)
