"""config.json of Hugging Face: real ones, both spellings, there and back, and what is refused by name."""

import dataclasses
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtool.convert.sidecars.hf_config import config_from_hf, config_to_hf, unknown_fields
from llmtool.convert.sidecars.json_file import read_json
from llmtool.errors import BadCheckpoint, CannotHold, Contradiction, LlmtoolError, MissingFact
from llmtool.model_config import ModelConfig, RopeScaling
from llmtool.presets import MODELS, preset

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 37, "hidden_size": 24,
         "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 250000.0, "tie_word_embeddings": False,
         "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 37, "n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 9}
NEOX = {"model_type": "gpt_neox", "vocab_size": 37, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 2}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}

positive = st.integers(1, 10)
number = st.floats(1e-8, 1e8)
ids = st.one_of(st.none(), st.integers(0, 9))


@st.composite
def configs(draw) -> ModelConfig:
    """Every config that a config.json can say, of the four types that are written."""
    family = draw(st.sampled_from(["llama", "gpt", "gpt_neox", "mixtral"]))
    kv, groups, width = draw(positive), draw(positive), 2 * draw(positive)
    facts = {
        "family": family, "vocab_size": draw(positive), "n_layers": draw(positive), "d_ff": draw(positive),
        "norm_eps": draw(number), "activation": draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"])),
        "tied": draw(st.booleans()), "bos_id": draw(ids), "pad_id": draw(ids),
        "eos_id": draw(st.one_of(ids, st.tuples(st.integers(0, 9), st.integers(0, 9)))),
    }
    if family in ("llama", "mixtral"):
        scaling = RopeScaling(draw(number), 1.0, draw(st.floats(1.5, 9)), draw(positive))
        facts |= {"norm": "rmsnorm", "gated": True, "position": "rope", "d_model": draw(positive), "head_dim": width,
                  "n_kv_heads": kv, "n_heads": kv * groups, "rope_theta": draw(number),
                  "rope_scaling": draw(st.sampled_from([None, scaling])),
                  "max_positions": draw(st.one_of(st.none(), positive))}
    else:
        facts |= {"norm": "layernorm", "gated": False, "d_model": kv * width, "n_heads": kv, "n_kv_heads": kv,
                  "head_dim": width, "max_positions": draw(positive), "mlp_bias": True}
    if family == "llama":
        bias = draw(st.booleans())
        facts |= {"qkv_bias": bias, "attn_out_bias": bias, "mlp_bias": draw(st.booleans())}
    elif family == "mixtral":
        facts |= {"n_experts": draw(positive), "experts_per_token": draw(positive), "experts_gated": True,
                  "expert_d_ff": facts["d_ff"], "expert_activation": facts["activation"], "moe_layers_in_block": (0,)}
    elif family == "gpt":
        facts |= {"position": "learned", "qkv_bias": True, "attn_out_bias": True, "scale_query": draw(st.booleans())}
    else:
        bias = draw(st.booleans())
        facts |= {"position": "rope", "rope_theta": draw(number), "qkv_bias": bias, "attn_out_bias": bias,
                  "rotary_fraction": 2 * draw(st.integers(1, width // 2)) / width,
                  "parallel_residual": draw(st.booleans())}
    return ModelConfig(**facts)


@given(configs())
def test_there_and_back(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config, "float32"))), "x") == config


@given(configs(), configs())
@settings(max_examples=50)
def test_the_source_of_another_model_changes_no_fact(config, other):
    """A base keeps what we do not model and can never leak a fact of its own."""
    base = config_to_hf(other, "float16") | {"initializer_range": 0.5, "made_up": [1]}
    out = config_to_hf(config, "float32", base)
    assert config_from_hf(out, "x") == config and out["torch_dtype"] == "float32"
    assert ("made_up" in out) == (config.family == other.family)


def test_the_new_spelling_says_the_same():
    old = LLAMA | {"rope_scaling": SCALED, "torch_dtype": "bfloat16"}
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new |= {"rope_parameters": SCALED | {"rope_theta": 250000.0}, "dtype": "bfloat16"}
    assert config_from_hf(old, "x") == config_from_hf(new, "x")
    assert config_from_hf(new, "x").rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert unknown_fields(new) == []
    out = config_to_hf(config_from_hf(new, "x"), "float32", new)
    assert "rope_parameters" not in out and "dtype" not in out and out["rope_theta"] == 250000.0


def test_what_is_absent_has_transformers_defaults_and_says_so():
    bare = {key: LLAMA[key] for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size",
                                        "num_hidden_layers", "num_attention_heads")}
    notes: list[str] = []
    config = config_from_hf(bare | {"made_up": 1, "rope_scaling": {"rope_type": "default", "odd": 2}}, "c.json", notes)
    assert (config.n_kv_heads, config.head_dim, config.tied, config.norm_eps) == (4, 6, False, 1e-6)
    assert notes[0].startswith("c.json: does not say hidden_act (silu), rms_norm_eps (1e-06), bos_token_id (1)")
    assert "rope_theta (10000)" in notes[0] and "made_up, rope_scaling.odd" in notes[1]


def test_heads_of_their_own_width_and_an_odd_one_out():
    config = config_from_hf(LLAMA | {"hidden_size": 20, "head_dim": 8}, "x")
    assert (config.d_model, config.head_dim) == (20, 8)
    with pytest.raises(BadCheckpoint, match=r"c\.json: rope would turn 3 of the 3 features of a head"):
        config_from_hf(LLAMA | {"hidden_size": 12}, "c.json")
    with pytest.raises(Contradiction, match=r"c\.json: a width of 13 does not divide into 4 heads"):
        config_from_hf(LLAMA | {"hidden_size": 13}, "c.json")
    with pytest.raises(Contradiction, match=r"c\.json: .*n_heads 4 is not a multiple of n_kv_heads 3"):
        config_from_hf(LLAMA | {"head_dim": 2, "num_key_value_heads": 3}, "c.json")


def test_gpt2():
    config = config_from_hf(GPT2, "x")
    assert config.tied and config.d_ff == 48 and config.activation == "gelu_tanh" and config.position == "learned"
    assert config.qkv_bias and config.attn_out_bias and config.mlp_bias and not config.gated and config.eos_id == 50256
    assert not config_from_hf(GPT2 | {"tie_word_embeddings": False}, "x").tied
    assert config_from_hf(GPT2 | {"n_inner": 20, "activation_function": "relu"}, "x").d_ff == 20
    with pytest.raises(Contradiction, match="n_positions is 9 but n_ctx is 8"):
        config_from_hf(GPT2 | {"n_ctx": 8}, "x")
    assert config_to_hf(config, "float32", GPT2 | {"n_ctx": 9})["n_ctx"] == 9


def test_gpt_neox_turns_a_quarter_of_a_head_unless_told():
    assert config_from_hf(NEOX, "x").rotary_fraction == 0.25
    old, new = NEOX | {"rotary_pct": 0.5}, NEOX | {"rope_parameters": {"partial_rotary_factor": 0.5}}
    assert config_from_hf(old, "x") == config_from_hf(new, "x")


REFUSED = {
    "falcon": ({"model_type": "falcon"}, CannotHold, "'falcon'"),
    "reward model": ({"architectures": ["GPTNeoXRewardModel"], "model_type": "gpt_neox_reward_model"}, CannotHold,
                     "reward model: it has no language-model head"),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, CannotHold, "no language-model head"),
    "other head": ({"architectures": ["LlamaForDecisions"]}, CannotHold, "LlamaForDecisions"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, CannotHold, r"quantised \(gptq\)"),
    "bits": ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, CannotHold,
             "bitsandbytes, 4 bits"),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, CannotHold, "'linear'"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, CannotHold, "'yarn'"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, CannotHold, "'dynamic'"),
    "rope by layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, CannotHold, "types of layers"),
    "half told scaling": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, MissingFact, "low_freq_factor"),
    "two thetas": ({"rope_parameters": {"rope_theta": 1e4}}, Contradiction, "250000"),
    "two scalings": ({"rope_parameters": SCALED, "rope_scaling": SCALED | {"factor": 2.0}}, Contradiction, "disagree"),
    "window": ({"sliding_window": 4096}, CannotHold, "sliding window of 4096"),
    "layer types": ({"layer_types": ["sliding_attention"]}, CannotHold, "layer_types"),
    "part of a head": ({"partial_rotary_factor": 0.5}, CannotHold, "only 0.5 of each head"),
    "activation": ({"hidden_act": "xielu"}, CannotHold, "'xielu'"),
    "text": ({"hidden_size": "4096"}, BadCheckpoint, "hidden_size is '4096'"),
    "negative": ({"num_hidden_layers": -1}, BadCheckpoint, "num_hidden_layers is -1"),
    "many layers": ({"num_hidden_layers": 10**9}, BadCheckpoint, "num_hidden_layers is 1000000000"),
    "boolean": ({"vocab_size": True}, BadCheckpoint, "vocab_size is True"),
    "flag": ({"attention_bias": "no"}, BadCheckpoint, "attention_bias"),
    "odd type": ({"model_type": ["llama"]}, BadCheckpoint, "model_type"),
    "odd names": ({"architectures": "LlamaForCausalLM"}, BadCheckpoint, "architectures"),
    "no width": ({"hidden_size": None}, MissingFact, "has no hidden_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    change, error, words = REFUSED[name]
    with pytest.raises(error, match=words) as caught:
        config_from_hf(LLAMA | {"head_dim": 8} | change, "c.json")
    assert str(caught.value).startswith("c.json")


def test_cross_attention_and_scaling_by_layer_are_refused():
    for key in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        with pytest.raises(CannotHold, match=key):
            config_from_hf(GPT2 | {key: True}, "x")
        config_from_hf(GPT2 | {key: False}, "x")


LOST = {
    "norm": ("llama2-7b", {"norm": "layernorm"}), "position": ("llama2-7b", {"position": "learned"}),
    "gated": ("llama2-7b", {"gated": False}), "attn_out_bias": ("llama2-7b", {"qkv_bias": True}),
    "unembed_bias": ("llama2-7b", {"unembed_bias": True}), "rotary_fraction": ("llama2-7b", {"rotary_fraction": 0.5}),
    "scale_query": ("llama2-7b", {"scale_query": False}), "qkv_bias": ("gpt-126m", {"qkv_bias": False}),
    "head_dim": ("gpt-126m", {"head_dim": 32}), "n_kv_heads": ("gpt-126m", {"n_kv_heads": 4}),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_config_json_cannot_say_is_refused_by_name(name):
    of, change = LOST[name]
    with pytest.raises(CannotHold, match=f"cannot say .*{name}"):
        config_to_hf(dataclasses.replace(preset(of), **change), "float32")


def test_sinusoidal_gpt_and_glam_have_no_config_json():
    with pytest.raises(CannotHold, match="position 'sinusoidal'"):
        config_to_hf(dataclasses.replace(preset("gpt-126m"), position="sinusoidal"), "float32")
    with pytest.raises(CannotHold, match="glam"):
        config_to_hf(dataclasses.replace(preset("gpt-126m"), family="glam"), "float32")


def test_unknown_facts_are_asked_for():
    with pytest.raises(MissingFact, match="norm_eps, activation, rope_theta"):
        config_to_hf(
            dataclasses.replace(preset("llama2-7b"), norm_eps=None, activation=None, rope_theta=None), "float32")


@pytest.mark.parametrize("name", [name for name, facts in MODELS.items() if facts.config.family != "glam"])
def test_transformers_reads_every_fact(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    config = preset(name)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, "bfloat16")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    data = json.loads(theirs.to_json_string(use_diff=False))
    assert config_from_hf(data, "x") == config and unknown_fields(data) == []
    assert data.get("dtype", data.get("torch_dtype")) == "bfloat16"


REAL = {
    "falcon-180b": "'falcon'", "gpt2-large": "gpt2-large", "llama2-13b-4bit": "bitsandbytes, 4 bits",
    "llama2-7b-chat": None, "llama3.1-8b-bnb": "bitsandbytes, 8 bits", "llama3.2-1b": "llama3.2-1b",
    "llama3.2-3b-per-tensor-shards": "llama3.2-3b", "mistral-7b-v0.3": "mistral-7b-v0.3",
    "pythia-1.4b-rm": "reward model", "qwen-72b": "'qwen'", "tinyllama-1.1b-chat": "tinyllama-1.1b",
    "wizardlm2-8x22b-mixtral": None,
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs(shared, name):
    """Read without a field left over, equal to the preset of the name; or refused with the reason."""
    data, expected = read_json(shared / "data/configs" / name / "config.json"), REAL[name]
    if expected is not None and expected not in MODELS:
        with pytest.raises(CannotHold, match=expected):
            config_from_hf(data, "x")
        return
    config = config_from_hf(data, "x")
    assert unknown_fields(data) == []
    assert expected is None or config == preset(expected)
    assert config_from_hf(config_to_hf(config, "float32"), "x") == config
    kept = config_to_hf(config, "float32", data)
    assert {key: kept[key] for key in data if key in ("initializer_range", "_name_or_path", "architectures",
                                                      "transformers_version", "model_type", "sliding_window")} \
        == {key: data[key] for key in data if key in ("initializer_range", "_name_or_path", "architectures",
                                                      "transformers_version", "model_type", "sliding_window")}


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_gptneox", "hf_llama_gqa", "hf_llama_mha_tied", "hf_mixtral",
                                  "meta_llama2_gqa_mp1_hf", "meta_llama3_gqa_mp2_hf"])
def test_oracles(oracle, name):
    data = read_json(oracle / name / "config.json")
    config = config_from_hf(data, "x")
    assert unknown_fields(data) == [] and config.n_layers == 2 and config.vocab_size == 32
    assert config_from_hf(config_to_hf(config, "float32", data), "x") == config


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
                           lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner,
                                                                                       max_size=2), max_leaves=4)


@given(st.sampled_from([LLAMA | {"head_dim": 8}, GPT2, NEOX]), st.data())
@settings(max_examples=300)
def test_nothing_but_our_errors(base, data):
    key = data.draw(st.sampled_from([*base, "rope_scaling", "rope_parameters", "rotary_pct", "head_dim", "layer_types",
                                     "quantization_config", "sliding_window", "pad_token_id", "n_inner"]))
    value = data.draw(json_values | st.fixed_dictionaries({}, optional={k: json_values for k in SCALED}))
    try:
        config_from_hf(base | {key: value}, "x")
        unknown_fields(base | {key: value})
    except LlmtoolError:
        pass
