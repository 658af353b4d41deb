"""The trainer's own tree: every canonical weight under its own name, stacked over the repeats of its block."""

from llmtool import params
from llmtool.convert.row import Table, keep
from llmtool.model_config import ModelConfig


def table(config: ModelConfig) -> Table:
    """The rows of one model; the keys are those of :mod:`llmtool.native_tree`."""
    return Table("native", tuple(keep(_slot(template), axes, template) for template, axes in params.TABLE.items()))


def _slot(template: str) -> str:
    if "{l}" not in template:
        return template
    key = template.replace("layers.{l}", "layers.block_{j}").replace(".{e}", "")
    return key + ("[{i},{e}]" if "{e}" in template else "[{i}]")
