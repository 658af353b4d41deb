"""Options and parameter types that several commands share."""

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from llmtool.convert.layout_word import LAYOUTS

KINDS = ("number", "size")  # a Key's values that stand for a kind, not for themselves
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _presets_or_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from llmtool.presets import MODELS

    named = [CompletionItem(name) for name in MODELS if name.startswith(incomplete)]
    return named if incomplete and named else [*named, CompletionItem(incomplete, type="file")]


json_option: Decorator = click.option("--json", "as_json", is_flag=True,
                                      help="Print one JSON object on stdout instead of a table (docs/json.md).")
quiet_option: Decorator = click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
step_option: Decorator = click.option("--step", type=click.IntRange(min=0), metavar="N",
                                      help="Which step of a training run's folder; the newest when left out.")
model_config_option: Decorator = click.option(
    "--model-config", metavar="FILE|PRESET", shell_complete=_presets_or_files,
    help="Facts that the checkpoint does not tell: a config.json, a params.json, a ModelConfig as JSON, or a preset's "
         "name.",
)


class LayoutWord(click.ParamType):
    """``NAME[:key=value,…]``; checked by the library, completed here."""

    name = "layout"

    def __init__(self, *, target: bool = False):
        self.target = target

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "LAYOUT"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word, help=text) for word, text in complete_word(incomplete, target=self.target)]


def complete_word(incomplete: str, *, target: bool) -> list[tuple[str, str]]:
    """The next piece of a layout word, each with its meaning: a name, then a key, then a value, then the next key."""
    name, colon, rest = incomplete.partition(":")
    if not colon:
        return [(info.name, info.help) for info in LAYOUTS.values()
                if info.name.startswith(name) and (info.writable or not target)]
    keys = LAYOUTS[name].keys if name in LAYOUTS else {}
    *before, last = rest.split(",")
    head = f"{name}:" + "".join(f"{pair}," for pair in before)
    key, equals, value = last.partition("=")
    if equals:
        choices = keys[key].values if key in keys else ()
        return [(f"{head}{key}={choice}", "") for choice in choices
                if choice.startswith(value) and choice not in KINDS]
    used = {pair.partition("=")[0] for pair in before}
    return [(f"{head}{word}=", spec.help) for word, spec in keys.items() if word.startswith(key) and word not in used]
