"""Presets: the published counts; and the five things that --model-config may name."""

import json
import time

import pytest

from llmtool import presets
from llmtool.convert.model_config_file import load_model_config
from llmtool.convert.sidecars.hf_config import config_to_hf
from llmtool.convert.sidecars.meta_params import params_from_config
from llmtool.errors import BadCheckpoint, LlmtoolError, MissingFact, UnknownPreset

COUNTS = {
    "llama1-7b": 6738415616, "llama1-13b": 13015864320, "llama1-30b": 32528943616, "llama1-65b": 65285660672,
    "llama2-7b": 6738415616, "llama2-13b": 13015864320, "llama2-70b": 68976648192, "llama3-8b": 8030261248,
    "llama3-70b": 70553706496, "llama3.1-405b": 405853388800, "llama3.2-1b": 1235814400, "llama3.2-3b": 3212749824,
    "mistral-7b-v0.3": 7248023552, "tinyllama-1.1b": 1100048384, "smollm2-135m": 134515008,
    "gpt2": 124439808, "gpt2-xl": 1557611200, "gpt-126m": 125262336, "gpt-5b": 5047558144, "gpt-175b": 174604259328,
    "glam-126m-64e": 1921670400, "glam-64b-64e": 1142891356160,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    begin = time.perf_counter()
    assert presets.parameter_count(presets.preset(name)) == COUNTS[name]
    assert time.perf_counter() - begin < 1  # about a millisecond


def test_every_preset_has_its_provenance_and_is_found_by_its_sizes():
    for name, facts in presets.MODELS.items():
        assert len(facts.provenance) > 20
        found = presets.of_the_sizes_of(facts.config)
        assert found is not None and presets.preset(found) == facts.config, name


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(UnknownPreset, match=r"did you mean llama2-7b"):
        presets.preset("llama2_7b")
    with pytest.raises(UnknownPreset, match="there are llama1-7b, "):
        presets.preset("zzzz")


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_every_kind_of_file_gives_the_same_model(tmp_path):
    config = presets.preset("llama2-7b")
    ours = {"schema": "llmtool.model/1", **config.to_json()}
    manifest = {"schema": "llmtool.manifest/1", "layout": "pax", "model": config.to_json(), "tensors": {}}
    for name, data in {"config.json": config_to_hf(config, "float32"), "params.json": params_from_config(config),
                       "mine.json": ours, "llmtool-manifest.json": manifest}.items():
        assert load_model_config(write(tmp_path / name, data)) == config, name
    assert load_model_config("llama2-7b") == config
    assert load_model_config(str(tmp_path)) == config


def test_a_path_wins_over_a_preset_and_every_preset_survives_our_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gpt2", {"schema": "llmtool.model/1", **presets.preset("gpt-126m").to_json()})
    assert load_model_config("gpt2") == presets.preset("gpt-126m")
    for name, facts in presets.MODELS.items():
        file = write(tmp_path / "x.json", {"schema": "llmtool.model/1", **facts.config.to_json()})
        assert load_model_config(file) == facts.config, name


def test_a_params_json_is_completed_by_the_weights(tmp_path):
    file = write(tmp_path / "p.json", {"dim": 12, "n_layers": 1, "n_heads": 2, "vocab_size": -1})
    with pytest.raises(MissingFact):
        load_model_config(file)
    notes: list[str] = []
    config = load_model_config(file, d_ff=20, vocab_size=37, notes=notes)
    assert (config.d_ff, config.vocab_size) == (20, 37) and notes


@pytest.mark.parametrize(("change", "words"), [
    ({"d_model": "64"}, "d_model is '64'"), ({"norm": "batchnorm"}, "norm is 'batchnorm'"), ({"tied": 1}, "tied is"),
    ({"norm_eps": "small"}, "norm_eps"), ({"eos_id": [1.5]}, "eos_id"), ({"rope_scaling": 3}, "rope_scaling"),
    ({"rope_scaling": {"factor": "8"}}, "rope_scaling.factor is '8'"), ({"colour": 1}, "colour"),
    ({"n_layers": 10**9}, "n_layers"), ({"n_heads": -1}, "n_heads"), ({"n_experts": "8"}, "n_experts"),
    ({"rope_scaling": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 8, "x": 1}}, "x")])
def test_our_own_file_is_checked(tmp_path, change, words):
    data = {"schema": "llmtool.model/1", **presets.preset("llama2-7b").to_json(), **change}
    with pytest.raises(LlmtoolError, match=words):
        load_model_config(write(tmp_path / "x.json", data))


def test_what_is_no_model_config(tmp_path):
    with pytest.raises(BadCheckpoint, match="expected model_type"):
        load_model_config(write(tmp_path / "x.json", {"hello": 1}))
    with pytest.raises(BadCheckpoint, match="not JSON"):
        load_model_config(write(tmp_path / "x.json", "{"))
    with pytest.raises(UnknownPreset, match=r"neither a file nor a preset; did you mean"):
        load_model_config("llama2-7bb")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownPreset, match="a folder without any of"):
        load_model_config(str(tmp_path / "empty"))
    with pytest.raises(UnknownPreset):
        load_model_config("")
