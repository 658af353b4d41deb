"""Sources: every form gives the same documents; what is wrong is said with its place."""

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from llmtool.errors import BadData, BadTarget, LlmtoolError
from llmtool.train.data import tokenize, train_tokenizer
from llmtool.train.data.documents import Stream, Texts, encode, every_text
from llmtool.train.data.open import open_texts
from llmtool.train.data.text_files import LONGEST
from llmtool.train.data.tokens import TokenFiles
from llmtool.train.data.words import Word, find_files, parse_word
from tests.bytes_tokenizer import Bytes
from tests.small_tokenizers import WORDS, write_json_tokenizer

TEXTS = ["one\nline", "zwei — äöü", "", "four \u2028 and \x85 stay", "a" * 70_000, "six"]
LINES = "".join(json.dumps({"meta": {"set": i}, "text": text}, ensure_ascii=i % 2 == 0) + "\n"
                for i, text in enumerate(TEXTS)).encode()


def read(word: str, field: str = "text") -> list[str]:
    return [text for _, text in every_text(open_texts(parse_word(word), field))]


def where(word: str) -> list[str]:
    return [place for place, _ in every_text(open_texts(parse_word(word), "text"))]


def gz(data: bytes) -> bytes:
    """Without the time of day, which would give every process other test names."""
    return gzip.compress(data, mtime=0)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("name, write", [
    ("a.jsonl", bytes), ("a.jsonl.gz", gz), ("a.jsonl.zst", zstd),
    ("a.jsonl.zst", lambda data: zstd(data[:100]) + zstd(data[100:])),  # frames, as pzstd writes them
    ("a.jsonl.gz", lambda data: gz(data[:100]) + gz(data[100:])),
    ("a.jsonl", lambda data: b"\xef\xbb\xbf" + data),
    ("a.jsonl.gz", lambda data: gz(b"\xef\xbb\xbf" + data)),
    ("a.jsonl", lambda data: data.rstrip(b"\n")), ("a.jsonl", lambda data: data.replace(b"\n", b"\r\n")),
    ("a.jsonl", lambda data: b"\n\r\n" + data.replace(b"\n", b"\n\n")),
    ("a.jsonl.zst", lambda data: zstd(b"\n\r\n" + data.replace(b"\n", b"\n\n"))),
])
def test_json_lines_in_every_form(name: str, write: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(write(LINES))
    assert read(f"jsonl:{tmp_path / name}") == TEXTS
    assert read(str(tmp_path / name)) == TEXTS
    assert read(str(tmp_path)) == TEXTS
    source = open_texts(parse_word(str(tmp_path / name)), "text")
    assert [text for _, text in every_text(pickle.loads(pickle.dumps(source)))] == TEXTS


def test_files_are_read_in_order_and_places_are_told(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.jsonl").write_bytes(b'\n{"text": "second"}\n\n{"text": "third"}\n')
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "first"}\n')
    (tmp_path / "notes.rst").write_text("not data")
    for word in (f"jsonl:{tmp_path}", f"jsonl:{tmp_path}/**/*.jsonl"):
        assert read(word) == ["first", "second", "third"]
        assert where(word) == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/b/2.jsonl:2", f"{tmp_path}/b/2.jsonl:4"]
    (tmp_path / "z.jsonl.gz").write_bytes(gz(b'\n{"text": "fourth"}\n'))
    assert read(f"jsonl:{tmp_path}") == ["first", "second", "third", "fourth"]
    assert where(f"jsonl:{tmp_path}")[-2:] == [f"{tmp_path}/b/2.jsonl:4", f"{tmp_path}/z.jsonl.gz:2"]


@pytest.mark.parametrize("line, said", [
    (b"{bad", "not JSON"), (b'"text"', "a JSON str; expected an object"),
    (b'{"content": "x"}', "no field 'text'.*'content'"),
    (b'{"text": 3}', "text is a int; expected a string"), (b'{"text": null}', "NoneType"),
    (b'{"text": "\xff"}', "not UTF-8"), (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON"), (b"version https://git-lfs.github.com/spec/v1", "LFS"),
])
@pytest.mark.parametrize("name, write", [("a.jsonl", bytes), ("a.jsonl.gz", gz), ("a.jsonl.zst", zstd)])
def test_a_bad_line_is_named(name: str, write: Callable[[bytes], bytes], line: bytes, said: str, tmp_path: Path
                             ) -> None:
    (tmp_path / name).write_bytes(write(b'{"text": "good"}\n\n' + line + b"\n"))
    with pytest.raises(BadData, match=rf"{name}:3: .*{said}"):
        read(f"jsonl:{tmp_path / name}")


@pytest.mark.parametrize("name, data, said", [
    ("a.jsonl.gz", gz(LINES)[:-9], "cut off"), ("a.jsonl.gz", gz(LINES)[:60], "cut off"),
    ("a.jsonl.zst", zstd(LINES)[:-3], "cut off"), ("a.jsonl.zst", zstd(LINES)[:3], "cut off"),
    ("a.jsonl.gz", LINES, "not gzip"), ("a.jsonl.zst", LINES, "not Zstandard"),
    ("a.jsonl.gz", gz(LINES) + b"rest", "not gzip"),
    ("a.jsonl.gz", gz(LINES)[:40] + b"\0\0\0" + gz(LINES)[43:], "damaged"),
])
def test_damaged_compressed_files(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadData, match=said):
        read(str(tmp_path / name))


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "half \\ud83d"}\n')
    write_json_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(BadData, match=r"a\.jsonl:1: holds half a surrogate pair"):
        tokenize([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    with pytest.raises(BadData, match="surrogate"):
        encode(Bytes(), "\ud83d", "here")


def test_plain_text_is_cut_at_its_marks(tmp_path: Path) -> None:
    text = "\nfirst story\nends\n<|endoftext|>\n\nsecond ü\n<|endoftext|>\n<|endoftext|>third\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("\n\n")
    assert read(f"text:{tmp_path}") == ["first story\nends", "second ü", "third"]
    assert where(f"text:{tmp_path}")[1] == f"{tmp_path}/a.txt, bytes 33 to 42"


@pytest.mark.parametrize("break_", ["\n\n", "\n", " ", "", "<|endoftext|>"])
def test_long_text_is_cut_where_it_hurts_least(break_: str, tmp_path: Path) -> None:
    paragraph = "ü" * 5_000
    (tmp_path / "a.txt").write_text(break_.join([paragraph] * 40))
    found = read(str(tmp_path / "a.txt"))
    assert all(len(text.encode()) <= LONGEST for text in found)
    assert "".join(found).replace(break_ or "\0", "").strip() == paragraph * 40
    if break_ == "<|endoftext|>":
        assert found == [paragraph] * 40
    elif break_:
        assert len(found) == 7 and all(text.startswith(("ü", " ")) and text.endswith("ü") for text in found)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("schön".encode("latin-1"))
    with pytest.raises(BadData, match=r"a\.txt: not UTF-8 \(byte 4 is 0xf6\).*iconv"):
        read(str(tmp_path / "a.txt"))


def test_hugging_face_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train-00000.parquet", batch_size=2)
    rows.select([5]).to_parquet(tmp_path / "parquet" / "validation-00000.parquet")
    for word in ("saved", "splits", "parquet", "parquet/train-00000.parquet"):
        assert read(f"hf:{tmp_path}/{word}") == read(f"{tmp_path}/{word}") == TEXTS
        source = pickle.loads(pickle.dumps(open_texts(parse_word(f"hf:{tmp_path}/{word}"), "text")))
        assert [text for _, text in every_text(source)] == TEXTS
    assert read(f"hf:{tmp_path}/splits@test") == [TEXTS[1]]
    assert read(f"{tmp_path}/parquet@validation") == [TEXTS[5]]
    assert isinstance(open_texts(parse_word(f"{tmp_path}/saved"), "text"), Texts)
    assert isinstance(open_texts(parse_word(f"{tmp_path}/parquet"), "text"), Stream)
    for word in ("saved", "parquet"):
        with pytest.raises(BadData, match=r"no column 'body'; it has text, n\."):
            read(f"hf:{tmp_path}/{word}", "body")
        with pytest.raises(BadData, match="expected a string"):
            read(f"hf:{tmp_path}/{word}", "n")
    with pytest.raises(BadData, match="no split 'dev'"):
        read(f"hf:{tmp_path}/splits@dev")


def test_damaged_hugging_face_folders(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "b.arrow").write_bytes(b"no")
    for name in ("a.parquet", "b.arrow"):
        with pytest.raises(BadData, match=name):
            read(f"hf:{tmp_path / name}")
    for state in ("{", "[]", '{"_data_files": []}', '{"_data_files": [{"filename": "../a.parquet"}]}'):
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(BadData, match=r"state\.json"):
            read(f"hf:{tmp_path}")
    with pytest.raises(BadData, match="no such file"):
        read("hf:/nowhere/at/all")


def test_a_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route to the hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(BadData, match=r"owner/name: .*ConnectionError: no route to the hub\).*save_to_disk"):
        read("hf:owner/name")


def test_a_hub_name_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*args: Any, **options: Any) -> list[dict[str, str]]:
        asked.append((args, options))
        return [{"text": text} for text in TEXTS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("hf:owner/name:config@validation") == TEXTS
    assert asked[-1] == (("owner/name", "config"), {"split": "validation", "streaming": True})


@pytest.mark.parametrize("form", ["array_record", "tfrecord"])
def test_tfds_folders(form: str, tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION, name, code_path = tfds.core.Version("3.1.0"), "c4", None

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "url": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            rows = list(enumerate({"text": text, "url": "u"} for text in TEXTS))
            return {"train": rows, "validation": rows[1:2]}

        def _generate_examples(self) -> None: ...

    builder = Builder(data_dir=tmp_path / "data", file_format="array_record")
    builder.download_and_prepare()
    folder = Path(builder.data_dir)
    if form == "tfrecord":
        _as_tfrecord(builder, folder)
    for path in (folder, folder.parent, tmp_path / "data"):
        assert sorted(read(f"tfds:{path}")) == sorted(TEXTS)
        assert read(f"tfds:{path}@validation") == [TEXTS[1]]
    source = pickle.loads(pickle.dumps(open_texts(parse_word(f"{folder}@train"), "text")))
    assert sorted(text for _, text in every_text(source)) == sorted(TEXTS)
    with pytest.raises(BadData, match="no split 'test'; it has train, validation"):
        read(f"tfds:{folder}@test")
    with pytest.raises(BadData, match=r"train 0: no field 'body'; it has 'text', 'url'"):
        read(f"tfds:{folder}", "body")
    file, = folder.glob("*-train*")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(BadData, match=r"cut off|tfds cannot read it"):
        read(f"tfds:{folder}")


def _as_tfrecord(builder: Any, folder: Path) -> None:
    """tfds wants TensorFlow to write them."""
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    from tests.test_evaluate_tfds import change_info, record

    serializer = ExampleSerializer(builder.info.features.get_serialized_info())
    for split, texts in (("train", TEXTS), ("validation", TEXTS[1:2])):
        rows = [builder.info.features.encode_example({"text": text, "url": "u"}) for text in texts]
        file, = folder.glob(f"*-{split}.array_record-*")
        file.unlink()
        (folder / file.name.replace("array_record", "tfrecord")).write_bytes(
            b"".join(record(serializer.serialize_example(row)) for row in rows))
    change_info(folder, fileFormat="tfrecord")


@pytest.mark.parametrize("text, expected", [
    ("0.7*jsonl:a/*.jsonl", Word("jsonl", "a/*.jsonl", 0.7)), (".5 * text:a:b.txt", Word("text", "a:b.txt", 0.5)),
    ("synthetic", Word("synthetic")), ("2*synthetic", Word("synthetic", weight=2)),
    ("tfds:c4/en@validation", Word("tfds", "c4/en", None, "validation")), ("x.jsonl.zst", Word("jsonl", "x.jsonl.zst")),
    ("jsonl:a@b.jsonl", Word("jsonl", "a@b.jsonl")), ("hf:owner/name", Word("hf", "owner/name")),
])
def test_source_words(text: str, expected: Word) -> None:
    assert parse_word(text) == expected


@pytest.mark.parametrize("text, said", [
    ("0*synthetic", "more than 0"), ("jsonl:", "no path"), ("tfds:@train", "no path"), ("x.csv", "of which kind"),
    ("", "no path"), ("9" * 400 + "*synthetic", "more than 0"), ("csv:x", "of which kind"),
])
def test_bad_source_words(text: str, said: str) -> None:
    with pytest.raises(BadData, match=said):
        parse_word(text)


@pytest.mark.parametrize("word, said", [
    ("jsonl:{}/nothing.jsonl", "nothing to read"), ("jsonl:{}/*.jsonl", "nothing to read"),
    ("jsonl:{}", "nothing to read"),
    ("text:{}/empty.txt", "empty"), ("jsonl:{}/empty.txt", "empty"), ("tfds:{}", "no prepared TFDS"),
    ("tfds:{}/none", "no such folder"), ("tokens:{}", "no text"), ("synthetic", "no text"),
])
def test_sources_without_documents(word: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BadData, match=said):
        read(word.format(tmp_path))


def test_a_folder_is_read_in_one_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [file.name for file in find_files(str(tmp_path), (".txt",))] == ["a.txt", "b.txt", "c.txt"]


def test_token_files_hold_the_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.txt").write_text("plain text")
    write_json_tokenizer(tmp_path / "tokenizer", bos=True)
    seen: list[int] = []
    words = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    told = tokenize(words, tmp_path / "out", tokenizer=tmp_path / "tokenizer", shards=2, progress=seen.append)
    files = pickle.loads(pickle.dumps(TokenFiles(tmp_path / "out")))
    from llmtool.evaluate.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    whole = [*TEXTS, "plain text"]
    order = [*whole[0::2], *whole[1::2]]  # in turn to two shards
    assert [files.tokens(i).tolist() for i in range(len(files))] == [tokenizer.encode_plain(text) for text in order]
    lengths = [len(tokenizer.encode_plain(text)) for text in order]
    assert [files.offset(i) for i in range(len(files) + 1)] == [sum(lengths[:i]) for i in range(len(files) + 1)]
    assert sum(seen) == told["documents"] == 7 and told["tokens"] == sum(lengths)
    assert told["dtype"] == "uint16" and told["tokenizer"]["sha256"] == tokenizer.sha and told["tokenizer"]["adds_bos"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "shard-00000.offsets", "shard-00000.tokens", "shard-00001.offsets", "shard-00001.tokens", "tokens.json"]


@pytest.mark.slow
def test_token_files_are_the_same_with_workers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"the boat {i}"}) + "\n" for i in range(3000)))
    tokenizer = write_json_tokenizer(tmp_path / "tokenizer")
    for name, workers in (("alone", 0), ("worked", 2)):
        tokenize([str(tmp_path / "a.jsonl")], tmp_path / name, tokenizer=tokenizer, shards=3, workers=workers)
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "worked" / file.name).read_bytes()
    with (tmp_path / "a.jsonl").open("a") as opened:
        opened.write('{"text": "\\ud83d"}\n')
    with pytest.raises(BadData, match=r"a\.jsonl:3001: holds half"):
        tokenize([str(tmp_path / "a.jsonl")], tmp_path / "bad", tokenizer=tokenizer, workers=2)
    assert not (tmp_path / "bad").exists()


def test_token_files_are_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(LINES)
    (tmp_path / "bad.jsonl").write_bytes(LINES + b"{")
    (tmp_path / "none.jsonl").write_bytes(b'{"text": ""}\n')
    tokenizer, out = write_json_tokenizer(tmp_path / "tokenizer"), tmp_path / "out"
    for name, said in (("bad", "bad.jsonl:7"), ("none", "empty"), ("missing", "nothing to read")):
        with pytest.raises(BadData, match=said):
            tokenize([str(tmp_path / f"{name}.jsonl")], out, tokenizer=tokenizer)
        assert sorted(os.listdir(tmp_path)) == ["bad.jsonl", "good.jsonl", "none.jsonl", "tokenizer"]
    with pytest.raises(BadData, match="weights belong to training"):
        tokenize([f"2*{tmp_path}/good.jsonl"], out, tokenizer=tokenizer)
    tokenize([str(tmp_path / "good.jsonl")], out, tokenizer=tokenizer, shards=4)
    with pytest.raises(BadTarget, match="--overwrite"):
        tokenize([str(tmp_path / "good.jsonl")], out, tokenizer=tokenizer)
    with pytest.raises(BadData, match="bad"):
        tokenize([str(tmp_path / "bad.jsonl")], out, tokenizer=tokenizer, overwrite=True)
    assert len(TokenFiles(out)) == 6  # what was there stays
    tokenize([str(tmp_path / "good.jsonl")], out, tokenizer=tokenizer, overwrite=True)
    assert len(os.listdir(out)) == 3
    (out / "thesis.tex").touch()
    with pytest.raises(BadTarget, match=r"thesis\.tex"):
        tokenize([str(tmp_path / "good.jsonl")], out, tokenizer=tokenizer, overwrite=True)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    tokenize([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=write_json_tokenizer(tmp_path / "tokenizer"))
    return tmp_path / "out"


def change(folder: Path, **fields: Any) -> None:
    told = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(told | fields))


@pytest.mark.parametrize("fields", [
    {"schema": "llmtool.tokens/9"}, {"dtype": "float64"}, {"documents": -1}, {"documents": 5}, {"tokens": 1 << 60},
    {"tokenizer": None}, {"tokenizer": {}}, {"vocab_size": "many"}, {"shards": [{}]}, {"shards": 3},
    {"shards": [{"documents": 6, "tokens": 70_000, "tokens_file": "../x", "offsets_file": "/etc/passwd"}]},
    {"shards": []},
])
def test_a_bad_sidecar_is_refused(fields: dict[str, Any], tokens: Path) -> None:
    change(tokens, **fields)
    with pytest.raises(BadData, match=r"tokens\.json"):
        TokenFiles(tokens)


def test_damaged_token_files_are_refused(tokens: Path) -> None:
    offsets = tokens / "shard-00000.offsets"
    data = offsets.read_bytes()
    offsets.write_bytes(data[:8] + b"\xff" * 8 + data[16:])
    with pytest.raises(BadData, match="document 0"):
        TokenFiles(tokens).tokens(0)
    offsets.write_bytes(data[:-1])
    with pytest.raises(BadData, match="expects 56 bytes"):
        TokenFiles(tokens)
    offsets.unlink()
    with pytest.raises(BadData, match="is missing"):
        TokenFiles(tokens)
    (tokens / "tokens.json").write_text("{")
    with pytest.raises(BadData, match="not what"):
        TokenFiles(tokens)


@pytest.mark.parametrize("kind, special", [("llama", (0, 1, 2)), ("pax", (2, -1, 1))])
def test_a_tokenizer_of_ones_own(kind: Any, special: tuple[int, ...], tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "a.txt").write_text("\n".join([WORDS] * 20))
    size = 400 if kind == "llama" else 70
    assert train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t.model", kind=kind, vocab_size=size) == size
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t.model"))
    assert (model.unk_id(), model.bos_id(), model.eos_id()) == special
    assert model.pad_id() == (-1 if kind == "llama" else 0)
    assert model.decode(model.encode("the red boat")) == "the red boat"
    with pytest.raises(BadTarget, match="already"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t.model")
    with pytest.raises(BadTarget, match=r"ends in \.model"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t")
    train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "u.model", kind=kind, vocab_size=size)
    assert (tmp_path / "t.model").read_bytes() == (tmp_path / "u.model").read_bytes()


def test_a_corpus_that_makes_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too little")
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{')
    with pytest.raises(BadData, match="SentencePiece cannot make 50257 entries"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "t.model", kind="pax")
    with pytest.raises(LlmtoolError, match=r"a\.jsonl:2"):
        train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "t.model")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.txt"]
