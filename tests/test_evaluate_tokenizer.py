"""Tokenizers by their content: what they add, what they count, and what they refuse."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtool.errors import BadCheckpoint, Contradiction, LlmtoolError, MissingFact
from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.protocol_lm_eval import boolq_texts
from llmtool.evaluate.tokenizer import check_vocabulary, load_tokenizer, sha256
from llmtool.evaluate.tokenizer_model import Llama3Tokenizer
from llmtool.presets import MODELS
from tests.small_tokenizers import byte_level, sentencepiece_model, tiktoken_ranks, write_json_tokenizer

TEXTS = ["the red boat", " leading", "two  spaces", "a\nline", "naïve café 😀", "yes", " no", "12345 don't", "\u00a0",
         "x</s>y"]


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(sentencepiece_model())
    return path


# ── tokenizer.json ───────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("told", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bos_as_transformers_adds_it(bos: bool, told: dict, tmp_path: Path) -> None:
    """The post-processor of tokenizer.json decides, whatever tokenizer_config.json says beside it."""
    from transformers import PreTrainedTokenizerFast

    folder = write_json_tokenizer(tmp_path / "model", bos=bos, **told)
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ["", *TEXTS]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode_plain(text) == theirs.encode(text, add_special_tokens=False)
    assert (ours.adds_bos, ours.bos_id, ours.eos_id) == (bos, 0, 1)
    assert ours.size == len(theirs)
    assert ours.sha == sha256((folder / "tokenizer.json").read_bytes())


def test_a_text_that_has_its_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_json_tokenizer(tmp_path, bos=True))
    assert tokenizer.encode("<s>the boat") == tokenizer.encode_plain("<s>the boat") == tokenizer.encode("the boat")


def test_a_lone_tokenizer_json_tells_its_bos_by_what_it_puts_first(tmp_path: Path) -> None:
    for bos in (True, False):
        path = tmp_path / f"some_{bos}.json"
        path.write_text(json.dumps(byte_level(bos=bos)))
        tokenizer = load_tokenizer(path)
        assert (tokenizer.adds_bos, tokenizer.bos_id) == (bos, 0 if bos else None)


def test_eos_that_is_put_last_is_no_bos(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_str(json.dumps(byte_level()))
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", pair=None, special_tokens=[("</s>", 1)])
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.adds_bos, tokenizer.bos_id) == (False, None)
    assert tokenizer.encode("yes")[-1] == 1


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(json.dumps(byte_level()))
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcdefgh")) == 8
    assert len(load_tokenizer(tmp_path).encode("ab")) == 2


def test_vocab_and_merges(tmp_path: Path) -> None:
    model = byte_level()["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    pair, whole = load_tokenizer(tmp_path), load_tokenizer(write_json_tokenizer(tmp_path / "whole"))
    assert [pair.encode(text) for text in TEXTS[:-1]] == [whole.encode(text) for text in TEXTS[:-1]]
    assert not pair.adds_bos
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(BadCheckpoint, match=r"merges\.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("content", "says"), [
    (b"", "not JSON"), (b"{}", "not a tokenizer.json"), (b'{"model": {"type": "BPE"', "not JSON"),
    (b"<html></html>", "a web page"), (b"\xff\xfe", "not UTF-8"), (b"[]", "expected an object"),
    (b'{"version": "1.0", "model": {"type": "Nonsense"}}', "not a tokenizer.json"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
])
def test_a_damaged_tokenizer_json(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=says):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(BadCheckpoint, match=says):
        load_tokenizer(tmp_path)


# ── tokenizer.model, sniffed by content (bugs.md B37) ────────────────────────────────────────────────────────────────

def test_sentencepiece(sentencepiece_file: Path) -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    ours = load_tokenizer(sentencepiece_file)
    assert (ours.kind, ours.size, ours.bos_id, ours.eos_id, ours.adds_bos) == ("SentencePiece", len(theirs), 1, 2, True)
    for text in TEXTS:
        assert ours.encode_plain(text) == theirs.encode(text)
        assert ours.encode(text) == [1, *theirs.encode(text)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentencepiece_is_transformers_llama_tokenizer(sentencepiece_file: Path) -> None:
    """On texts where no two spaces meet; there transformers 5, given only the .model, makes other merges."""
    from transformers import LlamaTokenizer

    theirs = LlamaTokenizer.from_pretrained(sentencepiece_file.parent, add_bos_token=True)
    ours = load_tokenizer(sentencepiece_file.parent)
    for text in ("the red boat sank near the harbor", "a\nline", "naïve café 😀", "yes", "", "12345 don't", "a\u00a0b"):
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize(("told", "adds"), [
    ({}, True), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True)])
def test_sentencepiece_follows_its_config(told: dict, adds: bool, sentencepiece_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    assert load_tokenizer(tmp_path).adds_bos is adds
    assert load_tokenizer(tmp_path / "tokenizer.model").adds_bos is adds


def test_sentencepiece_without_bos(tmp_path: Path) -> None:
    """T5's and the GPT presets' kind: padding 0, EOS 1, no BOS."""
    path = tmp_path / "spiece.model"
    path.write_bytes(sentencepiece_model(bos_id=-1, pad_id=0, eos_id=1, unk_id=2))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (None, 1, False)
    assert tokenizer.encode("the boat") == tokenizer.encode_plain("the boat")


@given(st.text(max_size=30))
def test_every_text_comes_back_from_ranks(text: str) -> None:
    tokenizer = _ranks()
    assert b"".join(tokenizer.inner.decode_single_token_bytes(i) for i in tokenizer.encode_plain(text)) == text.encode()


@functools.cache
def _ranks() -> Llama3Tokenizer:
    return Llama3Tokenizer(tiktoken_ranks(" the", " yes", " harbor"), "made up")


def test_tiktoken(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tiktoken_ranks(" the", " yes", " harbor"))
    tokenizer = load_tokenizer(path)
    count = len(path.read_bytes().splitlines())
    assert (tokenizer.kind, tokenizer.size) == ("tiktoken", count + 256)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (count, count + 1, True)
    assert tokenizer.encode(" yes") == [count, tokenizer.encode_plain(" yes")[0]]
    assert tokenizer.encode_plain("<|eot_id|><|start_header_id|>") == [count + 9, count + 6]
    assert tokenizer.encode_plain("<|reserved_special_token_250|>") == [count + 255]


@pytest.mark.parametrize(("change", "says"), [
    (lambda lines: lines[:100] + lines[101:], "ranks are not 0 to"),
    (lambda lines: lines[1:], "ranks are not 0 to"),
    (lambda lines: [*lines, b"YWI= x"], "line 263 is not a token"),
    (lambda lines: [*lines[:5], b"!!!! 5", *lines[6:]], "line 6 is not a token"),
    (lambda lines: [*lines[:255], b"YWI= 255"], "1 of the 256 single bytes"),
])
def test_damaged_ranks(change, says: str, tmp_path: Path) -> None:
    lines = tiktoken_ranks(" the", " yes").splitlines()
    assert len(lines) == 262
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(change(lines)))
    with pytest.raises(BadCheckpoint, match=says):
        load_tokenizer(path)


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_cut_off_model(cut: int, sentencepiece_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_file.read_bytes()[:cut])
    with pytest.raises(BadCheckpoint):
        load_tokenizer(path)


def test_an_empty_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match="empty"):
        load_tokenizer(tmp_path)


# ── where it lies, whether it fits ───────────────────────────────────────────────────────────────────────────────────

def test_tokenizer_json_comes_first(sentencepiece_file: Path, tmp_path: Path) -> None:
    write_json_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    assert load_tokenizer(tmp_path).kind == "tokenizer.json"


def test_found_above_a_pax_step(sentencepiece_file: Path, tmp_path: Path) -> None:
    step = tmp_path / "job" / "checkpoints" / "checkpoint_00000000"
    step.mkdir(parents=True)
    (tmp_path / "job" / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    assert load_tokenizer(step).kind == "SentencePiece"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFact, match=r"no tokenizer beside the checkpoint.*--tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(BadCheckpoint, match="no such tokenizer"):
        load_tokenizer(tmp_path / "nothing")


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    """bugs.md B26: both numbers are told; added_tokens.json counts; spare rows are fine."""
    write_json_tokenizer(tmp_path)
    size = load_tokenizer(tmp_path).size
    config = replace(next(iter(MODELS.values())).config, vocab_size=size)
    check_vocabulary(load_tokenizer(tmp_path), config)
    check_vocabulary(load_tokenizer(tmp_path), replace(config, vocab_size=size + 5))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[PAD]": size}))
    with pytest.raises(Contradiction, match=rf"{size + 1} entries, but the embedding {size} rows"):
        check_vocabulary(load_tokenizer(tmp_path), config)


# ── real files ───────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.shared
def test_real_models_of_the_same_name(shared: Path) -> None:
    """bugs.md B37, B38."""
    llama, llama3 = (load_tokenizer(shared / "data" / name / "tokenizer.model")
                     for name in ("llama_tokenizer", "llama3_tokenizer"))
    assert (llama.kind, llama.size, llama.bos_id, llama.eos_id) == ("SentencePiece", 32000, 1, 2)
    assert (llama3.kind, llama3.size, llama3.bos_id, llama3.eos_id) == ("tiktoken", 128256, 128000, 128001)
    assert llama3.encode("Hello world") == [128000, 9906, 1917]
    assert llama3.encode_plain("<|eot_id|>") == [128009]

    from llmtool.evaluate.protocol_lm_eval import encode

    context, (target,) = encode("the red boat sank near the", [" harbor"], llama, None)
    assert [*context, *target] == llama.encode("the red boat sank near the harbor")
    assert encode("the red boat sank near the  ", ["harbor"], llama, None)[1] == [
        tuple(llama.encode("the red boat sank near the  harbor")[len(context):])]


@pytest.mark.shared
def test_sentencepiece_is_the_shipped_tokenizer_json(shared: Path) -> None:
    """LLaMA 2's .model by itself gives the ids of Hugging Face's tokenizer.json, on every text of both data sets."""
    model = load_tokenizer(shared / "data/llama_tokenizer/tokenizer.model")
    shipped = load_tokenizer(shared / "data/tokenizer_json/llama2-13b.tokenizer.json")
    texts = [item.text for item in load_lambada(shared / "data/lambada/lambada_test.jsonl").items]
    texts += [boolq_texts(item)[0] for item in load_boolq(shared / "data/boolq/superglue_val.jsonl").items]
    assert [model.encode(text) for text in texts] == [shipped.encode(text) for text in texts]
    assert shipped.adds_bos and shipped.bos_id == model.bos_id == 1


@pytest.mark.shared
def test_gpt2(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "data/gpt2_bpe")
    assert (tokenizer.size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (50257, 50256, 50256, False)
    assert tokenizer.encode("Hello world") == [15496, 995]


@pytest.mark.shared
@pytest.mark.parametrize("name", ["llama-2-13b/tokenizer.model", "mistral-7b-v0.3/tokenizer.model"])
def test_lfs_pointers(name: str, shared: Path) -> None:
    with pytest.raises(LlmtoolError, match="Git LFS pointer"):
        load_tokenizer(shared / "data/lfs_pointers" / name)
