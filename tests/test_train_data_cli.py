"""``llmtool data tokenize``, ``train-tokenizer``, ``preview``; real text through the whole pipeline."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmtool import cli
from llmtool.evaluate.tokenizer import load_tokenizer
from llmtool.train.batch import Batch
from llmtool.train.config import DataConfig
from llmtool.train.data import make_loader, record_ids
from llmtool.train.data.preview import preview
from tests.bytes_tokenizer import BOS, EOS, FIRST, Bytes
from tests.small_tokenizers import WORDS, write_json_tokenizer


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run ``llmtool data …``: stdout and stderr."""
    def call(*args: object, status: int = 0) -> tuple[str, str]:
        assert cli.main(["data", *map(str, args)]) == status
        return capsys.readouterr()
    return call


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": line}) for line in WORDS.split("\n")] * 30
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "corpus.jsonl"


def test_from_text_to_rows(run: Callable[..., tuple[str, str]], corpus: Path, tmp_path: Path) -> None:
    model, tokens = tmp_path / "my.model", tmp_path / "tokens"
    assert run("train-tokenizer", corpus, model, "--vocab-size", 400)[0] == f"{model}: 400 entries\n"
    out, _ = run("tokenize", corpus, tokens, "--tokenizer", model, "--shards", 2)
    assert out.startswith(f"{tokens}: 90 documents, ") and "uint16, 2 shards" in out
    out, _ = run("preview", tokens, "--tokenizer", model, "--seq-len", 32, "--rows", 2)
    assert "row 2, segment 1: " in out and "<s>«▁" in out and "</s>»" in out
    assert run("preview", tokens, "--seq-len", 32, "--rows", 1)[0].count("«") >= 1
    out, _ = run("preview", corpus, "--tokenizer", model, "--seq-len", 16, "--rows", 1, "--pipeline", "pax")
    assert "row 1, segment 1: 16 tokens, 16 counted" in out and out.rstrip().endswith("</s>»")
    assert "«" in run("preview", "synthetic", "--vocab-size", 100, "--rows", 1)[0]


def test_token_files_as_json(run: Callable[..., tuple[str, str]], corpus: Path, tmp_path: Path) -> None:
    tokenizer = write_json_tokenizer(tmp_path / "tokenizer")
    out, err = run("tokenize", corpus, tmp_path / "tokens", "--tokenizer", tokenizer, "--json", "--quiet")
    assert json.loads(out) == json.loads((tmp_path / "tokens" / "tokens.json").read_text()) and not err


@pytest.mark.parametrize("args, said", [
    (("tokenize", "{}/none.jsonl", "{}/out", "--tokenizer", "{}/tokenizer"), "none.jsonl: nothing to read"),
    (("tokenize", "{}/corpus.jsonl", "{}/corpus.jsonl", "--tokenizer", "{}/tokenizer"), "a file or a link"),
    (("tokenize", "{}/corpus.jsonl", "{}/out", "--tokenizer", "{}/corpus.jsonl"), "corpus.jsonl"),
    (("tokenize", "{}/corpus.jsonl", "{}/out", "--tokenizer", "{}/tokenizer", "--text-field", "body"),
     "corpus.jsonl:1: no field 'body'"),
    (("preview", "{}/corpus.jsonl"), "--tokenizer"), (("preview", "synthetic"), "vocab"),
    (("train-tokenizer", "{}/corpus.jsonl", "{}/t.model"), "SentencePiece cannot make 32000"),
])
def test_mistakes_are_one_message(args: tuple[str, ...], said: str, run: Callable[..., tuple[str, str]], corpus: Path,
                                  tmp_path: Path) -> None:
    write_json_tokenizer(tmp_path / "tokenizer")
    before = sorted(tmp_path.iterdir())
    out, err = run(*(arg.format(tmp_path) for arg in args), status=2)
    assert not out and said in err and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_preview_tells_what_counts() -> None:
    """A row as fine-tuning makes it: the question is read, the answer counts."""
    question, answer = [FIRST + byte for byte in b"1+1="], [FIRST + ord("2"), EOS]
    tokens = np.array([BOS, *question, *answer])
    n = len(tokens) - 1
    weights = np.array([0] * len(question) + [1] * len(answer))
    padded = [np.pad(each, (0, 3))[None] for each in (tokens[:-1], tokens[1:], weights, np.ones(n, int), np.arange(n))]
    segment, = preview(Batch(*padded), Bytes())
    assert segment.runs == ((False, "<s>1+1="), (True, "2</s>")) and (segment.tokens, segment.counted) == (n, 2)
    assert next(preview(Batch(*padded), None)).runs[1] == (True, f"{answer[0]} 2 ")


@pytest.mark.shared
@pytest.mark.parametrize("name, tokenizer", [
    ("redpajama_like.jsonl", "llama_tokenizer/tokenizer.model"), ("tinyshakespeare.txt", "gpt2_bpe/vocab.json"),
    ("tinystories_sample.txt", "llama3_tokenizer/tokenizer.model")])
def test_real_text_comes_back_from_its_rows(name: str, tokenizer: str, shared: Path) -> None:
    told = load_tokenizer(shared / "data" / tokenizer)
    if told.eos_id is None:  # GPT-2's two bare files do not say it
        told.eos_id = 50256
    loader = make_loader(DataConfig(validation=(str(shared / "data" / "text" / name),)), tokenizer=told, seq_len=128,
                         rows_per_process=1, validation=True, vocab_size=told.size)
    found: dict[int, list[int]] = {}
    for batch in loader:
        for number, (_, document) in enumerate(record_ids(batch)[0], 1):
            found.setdefault(document, []).extend(batch.targets[0][batch.segments[0] == number].tolist())
    from llmtool.train.data.documents import every_text
    from llmtool.train.data.open import open_texts
    from llmtool.train.data.words import parse_word
    texts = [text for _, text in every_text(open_texts(parse_word(str(shared / "data" / "text" / name)), "text"))]
    read_only = 0 if told.adds_bos else 1  # tokens at the beginning that nothing asks for
    expected = [[*told.encode_plain(text)[read_only:], told.eos_id] for text in texts]
    assert [found[i] for i in range(len(texts))] == expected
