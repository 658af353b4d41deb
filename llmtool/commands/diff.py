"""``llmtool diff``: are two checkpoints the same model, weight by weight."""

import click

from llmtool.commands.options import LayoutWord, json_option, model_config_option


@click.command(short_help="Compare two checkpoints, weight by weight, across layouts.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--layout-a", type=LayoutWord(), help="Layout of A; found out when left out.")
@click.option("--layout-b", type=LayoutWord(), help="Layout of B; found out when left out.")
@click.option("--step-a", type=click.IntRange(min=0), help="Which step of A, a Pax job or a run; left out: the newest.")
@click.option("--step-b", type=click.IntRange(min=0), help="Which step of B.")
@model_config_option
@click.option("--tolerance", type=click.FloatRange(min=0), default=0.0,
              help="Largest absolute difference that still counts as equal.")
@json_option
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, layout_a: str | None, layout_b: str | None, model_config: str | None,
         tolerance: float, as_json: bool, step_a: int | None, step_b: int | None) -> None:
    """Compare the checkpoints A and B, in whatever layouts they are.

    Exit status: 0 equal, 1 different, 2 they could not be compared.
    """
    from llmtool.commands.show import print_diff, print_json
    from llmtool.convert import diff_checkpoints

    found = diff_checkpoints(a, b, layout_a=layout_a, layout_b=layout_b, model_config=model_config, tolerance=tolerance,
                             step_a=step_a, step_b=step_b)
    if as_json:
        print_json(found.to_json())
    else:
        print_diff(found.to_json())
    ctx.exit(0 if found.equal else 1)
