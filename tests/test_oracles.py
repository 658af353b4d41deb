"""Golden conversions: foreign samples there and back, and into their siblings as foreign code wrote them."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from llmtool.convert import convert_checkpoint, diff_checkpoints, open_checkpoint
from llmtool.convert.pax_folder import find_step
from llmtool.convert.stores.zarr import ZarrSource
from llmtool.errors import Contradiction, MissingFact, PlanError
from tests.oracles import HEADS, LLAMA, ORACLE, SAMPLES, TARGETS, sample_config, there_and_back


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """A thousand small conversions need not reach the disk; the tests of durability keep the real call."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("name", SAMPLES)
def test_there_and_back(name, tmp_path):
    outcomes = {}
    for number, to in enumerate(TARGETS):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes[to] = there_and_back(name, to, folder)
    refused = {to for to, outcome in outcomes.items() if outcome != "equal"}
    assert refused == {to for to in TARGETS if to.split(":")[0] in cannot_hold(name)}, outcomes
    if "sinusoid" in name:
        assert "sinusoidal positions" in outcomes["hf"]
    elif "gpt" in name:
        assert "the gpt" in outcomes["meta"] and "family" in outcomes["meta"]


def cannot_hold(name: str) -> set[str]:
    """The layouts that have no place for a sample's model."""
    if "glam" in name:
        return {"hf", "meta", "te"}
    if "mixtral" in name:
        return {"meta", "pax", "te"}
    if "neox" in name:
        return {"meta", "te"}
    return ({"meta"} if "gpt" in name else set()) | ({"hf"} if "sinusoid" in name else set())


def arrays(folder: Path) -> ZarrSource:
    """The weights of a Pax or TE folder as raw arrays."""
    found = find_step(folder, None)
    assert found is not None
    return ZarrSource(found.state)


def assert_same_arrays(ours: Path, theirs: Path):
    """Every weight array of both folders: the same names, shapes, dtypes and bytes."""
    a, b = arrays(ours), arrays(theirs)
    keys = {key for key in b.tensors if key.startswith("mdl_vars")}
    assert {key for key in a.tensors if key.startswith("mdl_vars")} == keys
    for key in keys:
        assert a.tensors[key] == b.tensors[key], key
        assert a.read(key).tobytes() == b.read(key).tobytes(), key
    assert int(a.read("step")) == int(b.read("step"))


@pytest.mark.parametrize("name", ["meta_llama2_gqa_mp1", "meta_llama2_gqa_mp2", "meta_llama3_gqa_mp2"])
def test_meta_to_hf_is_what_transformers_wrote(name, tmp_path):
    convert_checkpoint(ORACLE / name, tmp_path / "hf", to="hf", dtype="bfloat16")
    diff = diff_checkpoints(tmp_path / "hf", ORACLE / f"{name}_hf")
    assert diff.equal and not diff.dtypes and diff.weights == 21


@pytest.mark.parametrize("name", ["meta_llama2_gqa_mp2", "meta_llama3_gqa_mp2"])
def test_meta_to_pax_is_what_saxml_wrote(name, tmp_path):
    convert_checkpoint(ORACLE / name, tmp_path / "pax", to="pax", dtype="float16")
    assert_same_arrays(tmp_path / "pax", ORACLE / f"{name}_saxml")


NVIDIA = [
    ("pax_gpt", "nv_gpt_te", "te:format=bare"),
    ("pax_gpt_repeat", "nv_gpt_repeat_te", "te:format=bare"),
    ("pax_llama_gqa", "nv_llama_gqa_te", "te:format=bare,gate=linear_first"),
    ("pax_llama_mha", "nv_llama_mha_te", "te:format=bare,gate=linear_first"),
    ("pax_llama_mha", "nv_llama_mha_te_chunk", "te:format=bare,gate=linear_first,chunk=8"),
]


@pytest.mark.parametrize(("pax", "te", "to"), NVIDIA)
def test_pax_to_te_is_what_nvidia_wrote(pax, te, to, tmp_path):
    convert_checkpoint(ORACLE / pax, tmp_path / "te", to=to)
    assert_same_arrays(tmp_path / "te", ORACLE / te)
    if "chunk" in to:
        for zarray in (ORACLE / te).glob("mdl_vars*/.zarray"):
            ours = ZarrSource(tmp_path / "te")._arrays[zarray.parent.name].meta
            theirs = arrays(ORACLE / te)._arrays[zarray.parent.name].meta
            assert ours.chunks == theirs.chunks, zarray.parent.name


@pytest.mark.parametrize(("pax", "te", "to"), NVIDIA[:4])
def test_te_to_pax_gives_the_source_of_nvidias_conversion(pax, te, to, tmp_path):
    word = "te:gate=linear_first" if "llama" in te else None
    convert_checkpoint(ORACLE / te, tmp_path / "pax", to="pax:format=zarr", from_=word, expected=HEADS)
    assert_same_arrays(tmp_path / "pax", ORACLE / pax)


def test_a_gated_te_folder_without_a_manifest_must_be_told_its_gate_order(tmp_path):
    with pytest.raises(PlanError, match=r"te:gate=linear_first.*te:gate=act_first"):
        convert_checkpoint(ORACLE / "nv_llama_gqa_te", tmp_path / "pax", to="pax", expected=HEADS)
    with open_checkpoint(ORACLE / "nv_llama_gqa_te", expected=HEADS) as checkpoint:
        assert any("gate" in fact for fact in checkpoint.missing_facts)


def test_gate_orders_differ_and_convert_into_one_another(tmp_path):
    convert_checkpoint(
        ORACLE / "nv_llama_gqa_te",
        tmp_path / "act",
        to="te:gate=act_first",
        from_="te:gate=linear_first",
        expected=HEADS,
    )
    key = "mdl_vars.params.lm.transformer.x_layers_1.transformerlayer.cld.mlp.wi_kernel"
    ours, theirs = arrays(tmp_path / "act").read(key), arrays(ORACLE / "nv_llama_gqa_te").read(key)
    assert np.array_equal(ours[:, 0], theirs[:, 1]) and np.array_equal(ours[:, 1], theirs[:, 0])


@pytest.mark.parametrize(("fact", "value"), [
    ("d_ff", 20), ("head_dim", 8), ("n_heads", 2), ("n_layers", 3), ("n_kv_heads", 2), ("d_model", 32), ("gated", True),
])  # fmt: skip
def test_a_wrong_flag_is_an_error_that_names_both_values(fact, value, tmp_path):
    with pytest.raises(Contradiction, match=rf"{fact} is .* but {value} in the flags"):
        convert_checkpoint(ORACLE / "pax_gpt", tmp_path / "te", to="te", expected={fact: value})
    assert not (tmp_path / "te").exists()


def test_what_wrong_flags_made_of_a_checkpoint_is_not_taken_for_the_model(tmp_path):
    config = sample_config("pax_gpt")
    with pytest.raises(Contradiction, match="d_ff is 20"):
        open_checkpoint(ORACLE / "nv_wrong_ffn", model_config=config)
    # a wrong head dimension left the shapes right and half of the values zero: only a comparison of values shows it
    diff = diff_checkpoints(ORACLE / "pax_gpt", ORACLE / "nv_wrong_headdim")
    assert not diff.equal and {row["weight"] for row in diff.mismatched} >= {"layers.0.attn.q.w", "layers.1.attn.out.w"}


@pytest.mark.parametrize(("name", "what"), [("pax_llama_gqa_ocdbt", "OCDBT"), ("pax_llama_gqa_flax", "FLAX")])
def test_stores_that_this_version_does_not_read_are_named(name, what):
    from llmtool.errors import UnknownLayout

    with pytest.raises(UnknownLayout, match=what):
        open_checkpoint(ORACLE / name)


def test_facts_that_pax_lacks_are_named_when_a_target_needs_them(tmp_path):
    with pytest.raises(PlanError, match="norm_eps, rope_theta"):
        convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "hf", to="hf")
    report = convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "te", to="te")  # TE does not need them
    assert any("rope=interleaved" in note for note in report.notes)


def test_moments_are_left_out_with_a_count_and_without_a_word_when_asked(tmp_path):
    report = convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "a", to="te")
    assert report.left_out["optimizer moments"] == 2 * 21
    assert any("42 arrays of optimizer moments" in note for note in report.notes)
    report = convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "b", to="te", weight_only=True)
    assert not any("moments" in note for note in report.notes)


def test_the_three_levels_of_a_pax_folder_are_one_checkpoint(tmp_path):
    top = ORACLE / "pax_llama_gqa"
    for path in (top, top / "checkpoints", top / "checkpoints" / "checkpoint_00000000"):
        assert diff_checkpoints(top, path).equal
    assert diff_checkpoints(top, top / "checkpoints" / "checkpoint_00000000" / "state").equal


def test_equality_sees_a_single_bit(tmp_path):
    source = dataclasses.replace(sample_config("pax_llama_gqa"), **LLAMA)
    convert_checkpoint(ORACLE / "pax_llama_gqa", tmp_path / "hf", to="hf", model_config=source)
    file = tmp_path / "hf" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    diff = diff_checkpoints(ORACLE / "pax_llama_gqa", tmp_path / "hf")
    assert not diff.equal and len(diff.mismatched) == 1 and diff.mismatched[0]["values_differing"] == 1


def test_a_missing_fact_names_the_heads_of_a_te_folder(tmp_path):
    with pytest.raises(MissingFact, match="n_heads"):
        convert_checkpoint(ORACLE / "nv_gpt_te", tmp_path / "pax", to="pax")
