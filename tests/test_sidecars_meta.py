"""params.json of Meta: real ones, the width rule both ways, and what is refused by name."""

import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool.convert.sidecars.json_file import read_json
from llmtool.convert.sidecars.meta_params import config_from_params, ffn_width, params_from_config, unknown_fields
from llmtool.errors import BadCheckpoint, CannotHold, Contradiction, LlmtoolError, MissingFact
from llmtool.model_config import ModelConfig, RopeScaling
from llmtool.presets import preset

TOY = {"dim": 12, "n_layers": 2, "n_heads": 2, "multiple_of": 4, "norm_eps": 1e-5, "vocab_size": -1}


def read(data, d_ff=None, vocab_size=37, notes=None):
    return config_from_params(data, "p.json", d_ff=d_ff, vocab_size=vocab_size, notes=notes)


def base(d_model: int, d_ff: int) -> ModelConfig:
    return dataclasses.replace(preset("llama2-7b"), d_model=d_model, d_ff=d_ff, n_heads=1, n_kv_heads=1,
                               head_dim=d_model, n_layers=2)


@pytest.mark.parametrize(("d_model", "multiple", "multiplier", "width"), [
    (8192, 4096, 1.3, 28672), (4096, 1024, 1.3, 14336), (2048, 256, None, 5632), (3200, 216, None, 8640),
    (4096, 256, None, 11008), (5120, 256, None, 13824), (6656, 256, None, 17920), (8192, 256, None, 22016),
    (16384, 4096, 1.2, 53248), (2048, 256, 1.5, 8192), (3072, 256, 1.0, 8192), (64, 4, None, 172)])
def test_the_rule(d_model, multiple, multiplier, width):
    assert ffn_width(d_model, multiple, multiplier) == width
    written = params_from_config(base(d_model, width))
    assert ffn_width(d_model, written["multiple_of"], written.get("ffn_dim_multiplier")) == width


@pytest.mark.parametrize(("name", "pair"), [("llama2-7b", (256, None)), ("llama2-70b", (4096, 1.3)),
                                            ("llama3-8b", (1024, 1.3)), ("llama3.1-405b", (4096, 1.2)),
                                            ("llama3.2-1b", (256, 1.5))])
def test_the_releases_own_rule_is_found_again(name, pair):
    written = params_from_config(preset(name))
    assert (written["multiple_of"], written.get("ffn_dim_multiplier")) == pair


@given(st.integers(1, 20000).map(lambda n: 2 * n), st.integers(1, 100000))
def test_any_width_can_be_said(d_model, d_ff):
    config = base(d_model, d_ff)
    written = params_from_config(config)
    again = read(written, vocab_size=None)
    assert again.d_ff == d_ff and params_from_config(again) == written


REAL = {
    "llama-1-7B": "llama1-7b", "llama-1-13B": "llama1-13b", "llama-1-65B": "llama1-65b", "llama-2-7b": "llama2-7b",
    "llama-2-13b": "llama2-13b", "llama-2-70b": "llama2-70b", "Meta-Llama-3-8B": "llama3-8b",
    "Meta-Llama-3-70B": "llama3-70b", "llama31_8b": "llama3.1-8b",
}


@pytest.mark.parametrize("name", REAL)
def test_real_params(shared, name):
    data, expected = read_json(shared / "data/meta_params" / name / "params.json"), preset(REAL[name])
    notes: list[str] = []
    found = read(data, expected.d_ff, expected.vocab_size, notes)
    assert found == expected and unknown_fields(data) == []
    assert any(REAL[name] in note for note in notes)  # where context and token ids come from is said
    written = params_from_config(found, data)
    assert read(written, vocab_size=None) == expected and params_from_config(found, written) == written
    assert written | {"vocab_size": data["vocab_size"]} == data  # nothing but the -1 has changed
    assert read(params_from_config(found), vocab_size=None) == expected


def test_stories(shared):
    data = read_json(shared / "data/stories260K/hf_meta/params.json")
    config = read(data, 172, 512)
    assert (config.d_ff, config.n_kv_heads, config.max_positions) == (172, 4, None)
    assert params_from_config(config, data) == data | {"vocab_size": 512}


@pytest.mark.parametrize("name", ["meta_llama2_gqa_mp1", "meta_llama2_gqa_mp2", "meta_llama3_gqa_mp2"])
def test_oracles(oracle, name):
    assert read(read_json(oracle / name / "params.json"), 64, 32).n_kv_heads == 2


def test_kv_heads_are_as_many_as_heads_where_nothing_is_said():
    assert read(TOY).n_kv_heads == 2 and read(TOY | {"n_kv_heads": 1}).n_kv_heads == 1
    assert "n_kv_heads" not in params_from_config(read(TOY))
    assert params_from_config(read(TOY), TOY | {"n_kv_heads": 2})["n_kv_heads"] == 2


def test_nested_under_model():
    assert read({"model": TOY, "tokenizer": "x"}) == read(TOY)
    assert unknown_fields({"model": TOY | {"odd": 1}, "tokenizer": "x"}) == ["tokenizer", "odd"]


def test_what_was_assumed_is_said():
    notes: list[str] = []
    config = read({"dim": 12, "n_layers": 2, "n_heads": 2, "use_scaled_rope": True, "odd": 1}, 20, notes=notes)
    assert config.norm_eps == 1e-5 and config.rope_theta == 1e4 and config.d_ff == 20
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert "norm_eps (1e-05" in notes[0] and "rope_theta (10000" in notes[0] and "factor" in notes[0]
    assert "odd" in notes[1]


def test_scaled_rope_there_and_back():
    for factor in (8.0, 32.0):
        config = dataclasses.replace(preset("llama3.2-1b"), rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192))
        written = params_from_config(config)
        assert written["use_scaled_rope"] is True and written.get("rope_scaling_factor", 8.0) == factor
        assert ("rope_scaling_factor" in written) == (factor != 8.0)
        assert read(written, vocab_size=None).rope_scaling == config.rope_scaling


def test_keys_that_the_first_llamas_refuse_are_not_written():
    assert set(params_from_config(preset("llama1-7b"))) == {"dim", "n_layers", "n_heads", "vocab_size", "multiple_of",
                                                            "norm_eps"}


def test_facts_without_a_place_are_named():
    notes: list[str] = []
    params_from_config(dataclasses.replace(preset("llama2-7b"), eos_id=(2, 7)), notes=notes)
    assert notes == ["params.json has no place for eos_id (2, 7)"]


@pytest.mark.parametrize(("change", "words"), [
    ({"head_dim": 96}, "head_dim 96"), ({"qkv_bias": True}, "qkv_bias True"), ({"mlp_bias": True}, "mlp_bias"),
    ({"norm": "layernorm"}, "norm 'layernorm'"), ({"gated": False}, "gated False"),
    ({"activation": "gelu"}, "activation"),
    ({"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 4096)}, "rope_scaling"), ({"family": "gpt"}, "not gpt"),
    ({"rope_scaling": RopeScaling(8.0, 2.0, 4.0, 8192)}, "rope_scaling")])
def test_what_params_json_cannot_say_is_refused_by_name(change, words):
    with pytest.raises(CannotHold, match=words):
        params_from_config(dataclasses.replace(preset("llama2-7b"), **change))


def test_a_tied_model_can_be_written():
    assert params_from_config(preset("smollm2-135m"))["dim"] == 576


@pytest.mark.parametrize(("change", "d_ff", "error", "words"), [
    ({}, 24, Contradiction, "give 32, but w1 has 24 rows"), ({"hidden_dim": 20}, 24, Contradiction, "hidden_dim is 20"),
    ({"vocab_size": 99}, None, Contradiction, "vocab_size is 99, but the embedding has 37 rows"),
    ({"dim": 13}, None, Contradiction, "13 does not divide into 2"),
    ({"dim": "12"}, None, BadCheckpoint, "dim is '12'"),
    ({"vocab_size": -2}, None, BadCheckpoint, "vocab_size"), ({"dim": None}, None, MissingFact, "has no dim"),
    ({"n_layers": 10**7}, None, BadCheckpoint, "n_layers"), ({"moe": {"num_experts": 8}}, None, CannotHold, "experts"),
    ({"sliding_window": 4096}, None, CannotHold, "window"), ({"vision_chunk_size": 448}, None, CannotHold, "vision"),
    ({"quantization_args": {}}, None, CannotHold, "quantised"),
    ({"use_scaled_rope": 1}, None, BadCheckpoint, "use_scaled")])
def test_refused_with_the_reason(change, d_ff, error, words):
    with pytest.raises(error, match=words) as caught:
        read(TOY | change, d_ff)
    assert str(caught.value).startswith("p.json")


def test_a_vocabulary_that_nobody_tells_is_asked_for():
    with pytest.raises(MissingFact, match="vocab_size"):
        read(TOY, vocab_size=None)


def test_mistrals_own_spelling():
    config = read({"dim": 12, "n_layers": 2, "n_heads": 2, "head_dim": 8, "hidden_dim": 20, "n_kv_heads": 1,
                   "norm_eps": 1e-5, "vocab_size": 37, "rope_theta": 1e6}, 20)
    assert (config.head_dim, config.d_ff) == (8, 20)


@given(st.sampled_from([*TOY, "n_kv_heads", "hidden_dim", "rope_theta", "ffn_dim_multiplier", "use_scaled_rope",
                        "model"]),
       st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) |
       st.lists(st.integers(), max_size=2))
@settings(max_examples=300)
def test_nothing_but_our_errors(key, value):
    with contextlib.suppress(LlmtoolError):
        read(TOY | {key: value})
