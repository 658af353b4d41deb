"""``llmtool verify``: do two checkpoints compute the same logits?"""

from typing import Any

import click

from llmtool.commands.options import LayoutWord, json_option, model_config_option, quiet_option


@click.command(short_help="Compare what two checkpoints compute, across layouts.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--layout-a", type=LayoutWord(), help="Layout of A; found out when left out.")
@click.option("--layout-b", type=LayoutWord(), help="Layout of B; found out when left out.")
@model_config_option
@click.option("--tokenizer", type=click.Path(), show_default="beside A or B", help="For the text among the ids.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=1e-3, help="Largest difference of two logits.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of the random ids.")
@json_option
@quiet_option
@click.pass_context
def verify(ctx: click.Context, as_json: bool, quiet: bool, **options: Any) -> None:
    """Run the checkpoints A and B in float32 on the same token ids and compare their logits.

    A Hugging Face folder is run by transformers too, which has to agree with our own run of it. Facts that one side
    does not tell are taken from the other.

    Exit status: 0 the same within the tolerance, 1 not the same, 2 they could not be compared.
    """
    from llmtool.commands.show import print_json, print_verification
    from llmtool.commands.stages import Stages
    from llmtool.evaluate import verify_checkpoints

    with Stages(quiet) as told:
        found = verify_checkpoints(progress=told, **options)
    if as_json:
        print_json(found.to_json())
    else:
        print_verification(found.to_json())
    ctx.exit(0 if found.equal else 1)
