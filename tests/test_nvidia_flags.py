"""NVIDIA's spelling builds the words that anyone may write; what disagrees is refused with both values."""

import click
import pytest

from llmtool.commands.nvidia_flags import NAMES, SIZES, translate
from llmtool.convert.layout_word import parse_word
from llmtool.errors import CannotHold, Contradiction, UnknownLayout
from llmtool.model_config import ModelConfig


def flags(direction: str | None = "fw2te", **given: object) -> dict[str, object]:
    base: dict[str, object] = dict.fromkeys(NAMES)
    return base | {"direction": direction, "fw": "pax", "input_path": "in", "output_path": "out"} | given


@pytest.mark.parametrize("given, source, target", [
    ({}, "pax", "te"),
    ({"te_qkv_layout": "kv_packed", "pax_split_qkv": True}, "pax:qkv=split", "te:qkv=kv_packed"),
    ({"pax_repeat": True}, "pax:repeat=yes", "te:repeat=yes"),
    ({"skip_bias": True, "skip_ln": True}, "pax", "te:bias=pax,ln=pax"),
    ({"kernel_chunk_size": 8}, "pax", "te:chunk=8"),
])
def test_there_and_mirrored_back(given, source, target) -> None:
    there = translate(flags(**given), None, None)
    assert (there.from_word, there.to_word) == (source, target)
    assert (there.source, there.target) == ("in", "out")
    back = translate(flags("te2fw", **given), None, None)
    chunk = given.get("kernel_chunk_size")
    assert back.from_word == ("te" if chunk else target)
    assert back.to_word == ("pax:chunk=8" if chunk else source)


def test_sizes_are_assertions_about_the_model() -> None:
    job = translate(flags(num_of_layer=2, num_of_head=4, num_gqa_groups=2, head_dim=4, mlp_intermediate_dim=24,
                          embed_dim=16, use_gated_activations=True), None, None)
    assert job.expected == {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "d_ff": 24, "d_model": 16,
                            "gated": True}
    assert set(SIZES.values()) | {"gated"} <= set(ModelConfig.__dataclass_fields__)


def test_the_users_own_words_say_more() -> None:
    job = translate(flags(te_qkv_layout="kv_packed"), "pax:rope=half", "te:gate=linear_first,qkv=kv_packed")
    assert parse_word(job.from_word).options == {"rope": "half"}
    assert parse_word(job.to_word).options == {"gate": "linear_first", "qkv": "kv_packed"}
    assert parse_word(translate(flags("te2fw"), "te:gate=act_first", None).from_word).options == {"gate": "act_first"}


@pytest.mark.parametrize("from_word, to_word, said", [
    (None, "te:qkv=qkv_packed", ["qkv=qkv_packed", "qkv=kv_packed"]),
    (None, "hf", ["hf", "te"]),
    ("te", None, ["te", "pax"]),
])
def test_a_word_that_disagrees_with_a_flag_is_refused(from_word, to_word, said) -> None:
    with pytest.raises(Contradiction) as caught:
        translate(flags(te_qkv_layout="kv_packed"), from_word, to_word)
    assert all(piece in str(caught.value) for piece in said)


def test_words_are_checked() -> None:
    with pytest.raises(UnknownLayout, match="gait"):
        translate(flags(), None, "te:gait=act_first")


@pytest.mark.parametrize("given", [{"fw": "t5x"}, {"t5x_fuse_qkv": True}])
def test_t5x_is_refused_with_the_reason(given) -> None:
    with pytest.raises(CannotHold, match="encoder-decoder"):
        translate(flags(**given), None, None)


@pytest.mark.parametrize("name", ["direction", "fw", "input_path", "output_path"])
def test_the_flags_that_name_the_job_are_needed(name) -> None:
    with pytest.raises(click.UsageError, match="--" + name.replace("_", "-")):
        translate(flags(**{name: None}), None, None)
