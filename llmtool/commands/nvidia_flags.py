"""NVIDIA's spelling of a conversion (``--direction fw2te --fw pax --input-path …``) as layout words.

The flags are those of the converter in NVIDIA's JAX-Toolbox. There they steer the arithmetic, and a wrong one gives
garbage; here they build the same layout words that anyone may write, and sizes are assertions that the checkpoint
must meet. So all but the four that name the job are optional.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from llmtool.commands.options import Decorator
from llmtool.convert.layout_word import Word, parse_word
from llmtool.errors import CannotHold, Contradiction

# flag -> the fact of ModelConfig that it asserts
SIZES = {
    "num_of_layer": "n_layers",
    "num_of_head": "n_heads",
    "num_gqa_groups": "n_kv_heads",
    "head_dim": "head_dim",
    "mlp_intermediate_dim": "d_ff",
    "embed_dim": "d_model",
}
NAMES = frozenset({"direction", "fw", "input_path", "output_path", *SIZES, "kernel_chunk_size", "skip_ln", "skip_bias",
                   "use_gated_activations", "pax_repeat", "pax_split_qkv", "te_qkv_layout", "t5x_fuse_qkv"})


def _flag(name: str, text: str, kind: click.ParamType | None = None) -> Decorator:
    return click.option(name, help=text, is_flag=True) if kind is None else click.option(
        name, help=text, type=kind, metavar="N" if isinstance(kind, click.IntRange) else None)


_COUNT = click.IntRange(min=1)
_FLAGS: tuple[Decorator, ...] = (
    _flag("--direction", "From the framework to TE, or back.", click.Choice(["fw2te", "te2fw"])),
    _flag("--fw", "The framework.", click.Choice(["pax", "t5x"])),
    _flag("--input-path", "SRC.", click.Path()),
    _flag("--output-path", "DST.", click.Path()),
    _flag("--num-of-layer", "Asserts the number of layers.", _COUNT),
    _flag("--num-of-head", "Asserts the number of query heads; says it where the files do not.", _COUNT),
    _flag("--num-gqa-groups", "Asserts the number of key/value heads; says it where the files do not.", _COUNT),
    _flag("--head-dim", "Asserts features per head; says it where the files do not.", _COUNT),
    _flag("--mlp-intermediate-dim", "Asserts the feed-forward width.", _COUNT),
    _flag("--embed-dim", "Asserts the model width.", _COUNT),
    _flag("--kernel-chunk-size", "Chunk length of rewritten kernels: the target's key chunk=.", _COUNT),
    _flag("--skip-ln", "Norms in layers keep their Pax names: the TE side's key ln=pax."),
    _flag("--skip-bias", "Biases keep their Pax names: the TE side's key bias=pax."),
    _flag("--use-gated-activations", "Asserts a gated feed-forward block."),
    _flag("--pax-repeat", "Layers are stacked: the key repeat, on both sides."),
    _flag("--pax-split-qkv", "Pax keeps q, k, v apart: the Pax side's key qkv=split."),
    _flag("--te-qkv-layout", "How TE packs q, k, v: the TE side's key qkv=.",
          click.Choice(["qkv_packed", "kv_packed"])),
    click.option("--t5x-fuse-qkv", is_flag=True, hidden=True),
)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command NVIDIA's flags, in the order above."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


@dataclass(frozen=True)
class Job:
    """One conversion, in the library's words."""

    source: str
    target: str
    from_word: str | None
    to_word: str
    expected: dict[str, int | bool] = field(default_factory=dict)


def translate(flags: dict[str, Any], from_word: str | None, to_word: str | None) -> Job:
    """The job that NVIDIA's flags describe. ``from_word`` and ``to_word`` (``--from``, ``--to``) may say more.

    Raises :class:`click.UsageError` where a needed flag is missing, :class:`CannotHold` for T5X and
    :class:`Contradiction` where a flag and a word disagree.
    """
    if flags["fw"] == "t5x" or flags["t5x_fuse_qkv"]:
        raise CannotHold(
            "--fw t5x: T5X checkpoints hold encoder-decoder models, and llmtool converts decoder-only ones; "
            "the only framework of --fw is pax"
        )
    needed = ("direction", "fw", "input_path", "output_path")
    if missing := [f"--{name.replace('_', '-')}" for name in needed if not flags[name]]:
        raise click.UsageError(f"NVIDIA's spelling also needs {', '.join(missing)}")

    repeat = _said(repeat=flags["pax_repeat"] and "yes")
    pax = Word("pax", repeat | _said(qkv=flags["pax_split_qkv"] and "split"))
    te = Word("te", repeat | _said(
        qkv=flags["te_qkv_layout"], bias=flags["skip_bias"] and "pax", ln=flags["skip_ln"] and "pax"))
    source, target = (pax, te) if flags["direction"] == "fw2te" else (te, pax)
    if chunk := flags["kernel_chunk_size"]:
        target = target.with_(chunk=str(chunk))
    expected: dict[str, int | bool] = {fact: flags[flag] for flag, fact in SIZES.items() if flags[flag]}
    if flags["use_gated_activations"]:
        expected["gated"] = True
    return Job(
        source=flags["input_path"],
        target=flags["output_path"],
        from_word=str(_join(source, from_word, "--from")),
        to_word=str(_join(target, to_word, "--to")),
        expected=expected,
    )


def _said(**keys: str | None) -> dict[str, str]:
    return {key: value for key, value in keys.items() if value}


def _join(flags: Word, text: str | None, option: str) -> Word:
    """The word that the flags build, with what the user's own word adds."""
    if text is None:
        return flags
    word = parse_word(text)
    if word.name != flags.name:
        raise Contradiction(f"{option} {text} names the layout {word.name}; by --direction and --fw it is {flags.name}")
    for key, value in word.options.items():
        if flags.options.get(key, value) != value:
            raise Contradiction(f"{option} {text} says {key}={value}; NVIDIA's flags say {key}={flags.options[key]}")
    return flags.with_(**word.options)
