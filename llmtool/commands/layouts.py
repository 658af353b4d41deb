"""``llmtool layouts``: the words in which a layout is said."""

import click

from llmtool.commands.options import json_option


@click.command(short_help="List the layouts, their keys and defaults.")
@json_option
def layouts(as_json: bool) -> None:
    """List the layouts that can be read and written.

    A layout is written NAME[:key=value,…], a bare key being a yes: te:qkv=kv_packed,gate=act_first
    """
    from llmtool.commands.show import print_json, print_layouts
    from llmtool.convert.layout_word import describe_layouts

    described = describe_layouts()
    if as_json:
        print_json({"schema": "llmtool.layouts/1", "layouts": described})
    else:
        print_layouts(described)
