"""``llmtool eval``: zero-shot evaluation of a checkpoint in any layout."""

from collections.abc import Callable
from typing import Any

import click

from llmtool.commands.options import Decorator, LayoutWord, json_option, model_config_option, quiet_option, step_option


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    decorators: list[Decorator] = [
        click.option("--ckpt", "checkpoint", type=click.Path(), required=True, help="The checkpoint, in any layout."),
        click.option("--data", metavar="FILE|FOLDER|NAME", show_default="what `llmtool data get` fetched",
                     help="JSON lines or LAMBADA's plain text, a prepared TFDS folder, or a name on the Hugging Face "
                          "hub."),
        click.option("--protocol", type=click.Choice(["lm-eval", "pax"]), default="lm-eval",
                     help="What EleutherAI's harness computes, or what Pax reports."),
        click.option("--tokenizer", type=click.Path(), show_default="beside the checkpoint",
                     help="tokenizer.json, a SentencePiece or tiktoken .model, or a folder with one."),
        click.option("--layout", type=LayoutWord(), help="Layout of the checkpoint; found out when left out."),
        model_config_option,
        step_option,
        click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32",
                     help="Of the weights on the devices and of the products; logits are float32."),
        click.option("--mesh", metavar="data=N,fsdp=N,tensor=N", show_default="all devices as fsdp",
                     help="How devices share the batch and the weights."),
        click.option("--batch-tokens", type=click.IntRange(min=1), metavar="N", show_default="by device",
                     help="Tokens of a batch, padding included, over all devices."),
        click.option("--max-length", type=click.IntRange(min=1), metavar="N", show_default="the model's",
                     help="Positions that are read at most; what is longer is cut as the protocol says, and counted."),
        click.option("--bos/--no-bos", "add_bos", default=None, show_default="the tokenizer's own way",
                     help="Begin every context with BOS, or not (lm-eval only)."),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N items only."),
        click.option("--seed", type=int, metavar="N", help="With --limit: as many items, drawn at random."),
        click.option("--output", type=click.Path(dir_okay=False), metavar="FILE",
                     help="Results of every item as JSON lines; a run that was broken off goes on from there."),
        click.option("--distributed", is_flag=True,
                     help="Join the job's other processes; found out by itself under srun and mpirun."),
        json_option,
        quiet_option,
    ]  # fmt: skip
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.group("eval", short_help="Evaluate a checkpoint zero-shot: LAMBADA, BoolQ.")
def evaluate() -> None:
    """Zero-shot evaluation of a checkpoint in any layout."""


@evaluate.command(short_help="Guess the last word of a passage.")
@_options
def lambada(**options: Any) -> None:
    """LAMBADA: how often is the last word of a passage what the model would say, and how surprised is it?

    \b
    llmtool eval lambada --ckpt Llama-2-7b/ --data lambada_test.jsonl
    llmtool eval lambada --ckpt job/checkpoints --model-config gpt-126m --tokenizer c4.model --protocol pax
    """
    _run("lambada", options)


@evaluate.command(short_help="Answer yes-or-no questions about a passage.")
@_options
def boolq(**options: Any) -> None:
    """BoolQ: is yes or no the likelier answer to a question about a passage?

    \b
    llmtool eval boolq --ckpt Llama-2-7b/ --output results.jsonl
    srun llmtool eval boolq --ckpt Llama-2-70b/ --dtype bfloat16 --mesh fsdp=2,tensor=8
    """
    _run("boolq", options)


def _run(task: str, options: dict[str, Any]) -> None:
    from llmtool.model.processes import is_first, join_processes

    join_processes(options.pop("distributed"))
    from llmtool.commands.show import print_evaluation, print_json
    from llmtool.commands.stages import Stages
    from llmtool.evaluate import evaluate_boolq, evaluate_lambada

    as_json, quiet = options.pop("as_json"), options.pop("quiet")
    run = evaluate_lambada if task == "lambada" else evaluate_boolq
    with Stages(quiet or not is_first()) as told:
        report = run(options.pop("checkpoint"), data=options.pop("data"), progress=told, **options)
    if not is_first():
        return
    if as_json:
        print_json(report.to_json())
    else:
        print_evaluation(report)
