"""``llmtool data``: the data sets that evaluation needs."""

import click

from llmtool.commands.options import quiet_option


@click.group(short_help="Fetch the data sets of the evaluations.")
def data() -> None:
    """Data sets of the evaluations."""


@data.command(short_help="Fetch LAMBADA or BoolQ and print where it lies.")
@click.argument("task", type=click.Choice(["lambada", "boolq"]))
@click.option("--to", "folder", type=click.Path(file_okay=False), metavar="FOLDER",
              show_default="$LLMTOOL_DATA or the user's cache", help="Where to put the file.")
@quiet_option
def get(task: str, folder: str | None, quiet: bool) -> None:
    """Fetch the published file of TASK, check its hash, and print its path.

    \b
    lambada   OpenAI's raw-text test set, 5153 passages (CC BY 4.0)
    boolq     SuperGLUE's validation split, 3270 questions (CC BY-SA 3.0)

    `llmtool eval` finds it where this puts it when --to is left out.
    """
    from llmtool.evaluate.fetch import fetch

    click.echo(fetch(task, folder, quiet=quiet))  # type: ignore[arg-type]
