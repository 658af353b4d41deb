"""``llmtool report``: a run's folder as one page."""

import click

from llmtool.commands.options import json_option


@click.command(short_help="Write one HTML page with a run's curves, scores and choices.")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False))
@click.option("--output", "-o", type=click.Path(dir_okay=False), metavar="FILE", show_default="RUN/report.html",
              help="Where the page goes.")
@json_option
def report(run: str, output: str | None, as_json: bool) -> None:
    """Write one HTML page about the run in the folder RUN, finished or not.

    Loss, learning rate, gradient norm, throughput and evaluations as plots, and every choice of the run. The page needs
    no network and no other file: mail it, or keep it beside the weights.

    \b
    llmtool report runs/126m
    llmtool report runs/126m -o 126m.html
    """
    from llmtool.commands.show import print_json
    from llmtool.train.report import write_report

    told = write_report(run, output)
    if as_json:
        print_json(told)
        return
    loss = "not finite" if told["loss"] is None else f"{told['loss']:.4f}"
    click.echo(f"{told['page']}: {told['name']}, step {told['step']:,} of {told['steps']:,}, loss {loss}")
