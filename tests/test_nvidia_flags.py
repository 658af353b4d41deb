"""NVIDIA's spelling builds the words that anyone may write; what disagrees is refused with both values."""

import json
from pathlib import Path

import click
import pytest

from llmtool import cli
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


SIZED = ("--num-of-layer", "2", "--num-of-head", "4", "--num-gqa-groups", "2", "--head-dim", "4",
         "--mlp-intermediate-dim", "24", "--embed-dim", "16", "--use-gated-activations", "--pax-split-qkv",
         "--te-qkv-layout", "kv_packed")


def run(direction: str, source: Path, target: Path, *more: str) -> int:
    return cli.main(["convert", "--quiet", "--direction", direction, "--fw", "pax", "--input-path", str(source),
                     "--output-path", str(target), *more])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_flags_that_the_checkpoint_tells_change_no_byte(oracle: Path, tmp_path: Path) -> None:
    source = oracle / "pax_llama_gqa"
    assert run("fw2te", source, tmp_path / "bare-minimum") == 0
    assert run("fw2te", source, tmp_path / "every-flag", *SIZED) == 0
    assert contents(tmp_path / "bare-minimum") == contents(tmp_path / "every-flag")
    assert run("te2fw", tmp_path / "every-flag", tmp_path / "back", *SIZED) == 0
    assert cli.main(["diff", str(source), str(tmp_path / "back")]) == 0


@pytest.mark.parametrize("flag, wrong, right", [
    ("--num-of-layer", 3, 2), ("--num-of-head", 8, 4), ("--num-gqa-groups", 4, 2), ("--head-dim", 8, 4),
    ("--mlp-intermediate-dim", 20, 24), ("--embed-dim", 32, 16)])
def test_a_wrong_size_is_an_error_with_both_values(flag, wrong, right, oracle, tmp_path, capsys) -> None:
    assert run("fw2te", oracle / "pax_llama_gqa", tmp_path / "out", flag, str(wrong)) == 2
    said = capsys.readouterr().err
    assert f" {right} " in said
    assert str(wrong) in said
    assert not (tmp_path / "out").exists()


def test_a_bare_folder_gives_a_bare_folder_and_says_what_it_lacks(oracle, tmp_path, capsys) -> None:
    state = next(path for path in (oracle / "pax_llama_gqa").rglob("state"))
    te, back = tmp_path / "te", tmp_path / "back"
    assert run("fw2te", state, te, "--to", "te:gate=linear_first") == 0
    assert cli.main(["diff", str(te), str(oracle / "nv_llama_gqa_te"), "--layout-b", "te:gate=linear_first"]) == 0
    (te / "llmtool-manifest.json").unlink()
    heads = ("--num-of-head", "4", "--head-dim", "4")
    assert run("te2fw", te, back, *heads) == 2
    assert "te:gate=" in capsys.readouterr().err
    assert run("te2fw", te, back, *heads, "--from", "te:gate=linear_first") == 0
    assert (back / "mdl_vars.params.lm.final_ln.scale" / ".zarray").is_file()
    assert cli.main(["diff", str(state), str(back)]) == 0


def test_the_chunk_size_is_nvidias(oracle, tmp_path) -> None:
    nvidias = oracle / "nv_llama_mha_te_chunk"
    state = next(path for path in (oracle / "pax_llama_mha").rglob("state"))
    assert run("fw2te", state, tmp_path / "te", "--kernel-chunk-size", "8", "--to", "te:gate=linear_first") == 0
    for array in (path for path in nvidias.iterdir() if path.name.startswith("mdl_vars")):
        ours = json.loads((tmp_path / "te" / array.name / ".zarray").read_text())
        assert ours["chunks"] == json.loads((array / ".zarray").read_text())["chunks"], array.name


@pytest.mark.parametrize("flag, kept", [("--skip-bias", "ff_layer.ffn_layer1.bias.b"),
                                        ("--skip-ln", "ff_layer.layer_norm.scale")])
def test_skipped_arrays_keep_their_pax_names(flag, kept, oracle, tmp_path) -> None:
    source, te = oracle / "pax_gpt", tmp_path / "te"
    assert run("fw2te", source, te, flag) == 0
    assert list(te.rglob(f"*x_layers_0.{kept}"))
    assert run("te2fw", te, tmp_path / "back", flag) == 0
    assert cli.main(["diff", str(source), str(tmp_path / "back")]) == 0
