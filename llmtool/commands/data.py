"""``llmtool data``: the data sets that evaluation needs, and text made ready for training."""

from typing import Any

import click

from llmtool.commands.options import json_option, quiet_option

_field_option = click.option("--text-field", default="text", metavar="NAME", help="The field or column with the text.")


@click.group(short_help="Fetch evaluation sets; tokenize text, train a tokenizer, look at training rows.")
def data() -> None:
    """Data sets of the evaluations, and text for training.

    \b
    A source of text is written [WEIGHT*][KIND:]PATH[@SPLIT]; without a kind, the path tells it:
    jsonl:PATH    JSON lines, also .gz and .zst (RedPajama, The Pile); a file, a folder or a glob
    text:PATH     plain text, cut at <|endoftext|>
    tfds:FOLDER   a prepared TensorFlow Datasets folder (c4)
    hf:PATH|NAME  parquet, a save_to_disk folder, or a name on the Hugging Face hub, streamed
    tokens:FOLDER what `llmtool data tokenize` wrote
    synthetic     made-up rows
    """


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


@data.command(short_help="Tokenize text once, into files that training maps into memory.")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.argument("target", metavar="OUT", type=click.Path())
@click.option("--tokenizer", required=True, type=click.Path(), metavar="FILE|FOLDER",
              help="tokenizer.json, a SentencePiece or tiktoken .model, or a folder with one.")
@_field_option
@click.option("--shards", type=click.IntRange(1, 99_999), default=1, metavar="N", help="Documents go to them in turn.")
@click.option("--workers", type=click.IntRange(min=0), default=0, metavar="N",
              help="Processes that tokenize; the files are the same with any number.")
@click.option("--overwrite", is_flag=True, help="Replace token files that are there.")
@json_option
@quiet_option
def tokenize(sources: tuple[str, ...], target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write the documents of SRC to the folder OUT, which `llmtool pretrain --data OUT` reads at once.

    \b
    llmtool data tokenize corpus/*.jsonl.zst tokens/ --tokenizer tokenizer.model --shards 16 --workers 8
    """
    from llmtool.commands.show import print_json
    from llmtool.progress import human_count, progress
    from llmtool.train.data.tokenizing import tokenize as run

    with progress("tokenizing", quiet=quiet, unit="items") as bar:
        told = run(sources, target, progress=bar.advance, **options)
    if as_json:
        print_json(told)
    else:
        click.echo(f"{target}: {told['documents']:,} documents, {human_count(told['tokens'])} tokens "
                   f"({told['tokens']:,}) as {told['dtype']}, {len(told['shards'])} shards")


@data.command("train-tokenizer", short_help="Train a SentencePiece tokenizer on text.")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.argument("target", metavar="OUT.model", type=click.Path())
@click.option("--kind", type=click.Choice(["llama", "pax"]), default="llama",
              help="BPE with LLaMA's options and ids; or a unigram model with the ids that the Pax GPT recipes expect.")
@click.option("--vocab-size", type=click.IntRange(min=8), metavar="N", show_default="32000 (llama), 50257 (pax)",
              help="Entries.")
@_field_option
@click.option("--max-lines", type=click.IntRange(min=1), default=5_000_000, metavar="N",
              help="Lines to learn from, drawn at random where there are more.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, metavar="N", help="Of that draw.")
@click.option("--workers", type=click.IntRange(min=1), default=1, metavar="N", help="Threads.")
def train_tokenizer(sources: tuple[str, ...], target: str, **options: Any) -> None:
    """Train a SentencePiece model on the lines of SRC and write it to OUT.model.

    \b
    llmtool data train-tokenizer corpus/*.jsonl.gz my.model --vocab-size 8000
    """
    from llmtool.train.data.tokenizer_training import train_tokenizer as run

    click.echo(f"{target}: {run(sources, target, **options):,} entries")


@data.command(short_help="Show the rows that training would read, and which of their tokens count.")
@click.argument("sources", nargs=-1, required=True, metavar="SRC...")
@click.option("--tokenizer", type=click.Path(), metavar="FILE|FOLDER", help="Needed for text; else ids are shown.")
@click.option("--pipeline", type=click.Choice(["packed", "pax"]), default="packed",
              help="EOS after each document, packed, nothing attends across; or 128 documents joined, as Pax does.")
@click.option("--seq-len", type=click.IntRange(min=2), default=256, metavar="N", help="Tokens of a row.")
@click.option("--rows", type=click.IntRange(min=1), default=4, metavar="N", help="Rows to show.")
@click.option("--vocab-size", type=click.IntRange(min=2), default=None, metavar="N",
              help="The model's; for synthetic rows without a tokenizer.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of the order.")
@_field_option
def preview(sources: tuple[str, ...], tokenizer: str | None, rows: int, **options: Any) -> None:
    """Show the first rows of a run on SRC. Tokens that the loss counts stand between « and »; in colour on a terminal.

    \b
    llmtool data preview corpus.jsonl --tokenizer tokenizer.model --seq-len 64
    """
    from llmtool.commands.show import print_rows
    from llmtool.evaluate.tokenizer import load_tokenizer
    from llmtool.train.config import DataConfig
    from llmtool.train.data import make_loader
    from llmtool.train.data.preview import preview as run

    told = load_tokenizer(tokenizer) if tokenizer else None
    config = DataConfig(sources, pipeline=options.pop("pipeline"), text_field=options.pop("text_field"))
    loader = make_loader(config, tokenizer=told, rows_per_process=rows, **options)
    print_rows(run(next(loader), told))
    loader.close()
