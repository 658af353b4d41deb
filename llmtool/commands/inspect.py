"""``llmtool inspect``: what a checkpoint is, from its headers alone."""

import click

from llmtool.commands.options import LayoutWord, json_option, model_config_option, step_option


@click.command(short_help="Tell what a checkpoint is, without reading its weights.")
@click.argument("checkpoint", type=click.Path())
@click.option("--layout", type=LayoutWord(), help="Its layout; found out when left out.")
@model_config_option
@step_option
@click.option("--all", "every", is_flag=True, help="List every tensor, rather than layers of the same shape together.")
@json_option
def inspect(checkpoint: str, layout: str | None, model_config: str | None, step: int | None, every: bool,
            as_json: bool) -> None:
    """Layout, version, family, sizes, dtypes, tensors of CHECKPOINT; what is odd about it and what it does not tell."""
    from llmtool.commands.show import print_description, print_json
    from llmtool.convert import open_checkpoint

    with open_checkpoint(checkpoint, layout=layout, model_config=model_config, step=step) as opened:
        description = opened.describe()
    if as_json:
        print_json(description)
    else:
        print_description(description, every=every)
