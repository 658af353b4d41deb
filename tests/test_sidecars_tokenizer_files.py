"""Files that travel: which, how large a vocabulary they mean, of which kind a tokenizer.model is."""

import base64
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtool.convert.sidecars import protobuf
from llmtool.convert.sidecars.tokenizer_files import (
    copy_sidecars,
    sidecar_files,
    sniff_tokenizer_model,
    vocabulary_size,
)
from llmtool.errors import BadCheckpoint, BadTarget

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:9e55\nsize 499723\n"


def sentencepiece(pieces: int) -> bytes:
    """A ModelProto: so many pieces (field 1: text, score), then a trainer spec (field 2)."""
    def piece(text: bytes) -> bytes:
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15\x00\x00\x80\xbf"
        return b"\x0a" + bytes([len(body)]) + body
    return b"".join(piece(b"p%d" % i) for i in range(pieces)) + b"\x12\x02\x18\x07"


def tiktoken(ranks: int) -> bytes:
    return b"".join(base64.b64encode(b"t%d" % i) + b" %d\n" % i for i in range(ranks))


def tokenizer_json(size: int, *added: int) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(size)}, "merges": []},
                       "added_tokens": [{"id": i, "content": f"<{i}>"} for i in added]})


def fill(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def names(folder):
    return [path.name for path in sidecar_files(folder)]


def test_what_travels_and_what_does_not(tmp_path):
    travels = ["added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "qwen.tiktoken",
               "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer.model.v3",
               "tokenizer_config.json", "vocab.json", "vocab.txt"]
    fill(tmp_path, **dict.fromkeys([*travels, "config.json", "model.safetensors", "README.md", "run.py"], b"x"))
    assert names(tmp_path) == travels


def test_content_is_copied_byte_for_byte(tmp_path):
    source = fill(tmp_path / "a", **{"tokenizer.model": b"\x00\r\n\xff" * 3000000, "vocab.txt": b""})
    target = fill(tmp_path / "b", **{"vocab.txt": b"from a run that was broken off"})
    assert copy_sidecars(sidecar_files(source), target) == ["tokenizer.model", "vocab.txt"]
    assert all((target / path.name).read_bytes() == path.read_bytes() for path in source.iterdir())
    with pytest.raises(BadTarget, match="cannot be copied"):
        copy_sidecars(sidecar_files(source), tmp_path / "absent")


def test_links_may_not_leave_the_checkpoint(tmp_path):
    secret = fill(tmp_path / "else", secret=b"key")
    folder = fill(tmp_path / "a", **{"real.bin": b"x"})
    (folder / "vocab.json").symlink_to("real.bin")
    assert names(folder) == ["vocab.json"]
    (folder / "tokenizer.model").symlink_to(secret / "secret")
    with pytest.raises(BadCheckpoint, match="a link that leaves the checkpoint"):
        sidecar_files(folder)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_only_regular_files(tmp_path, make):
    make(tmp_path / "tokenizer.json")
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        sidecar_files(tmp_path)


def test_the_hubs_cache_keeps_its_files_behind_links(tmp_path):
    fill(tmp_path / "models--a--b/blobs", abc=tokenizer_json(5))
    folder = fill(tmp_path / "models--a--b/snapshots/rev")
    (folder / "tokenizer.json").symlink_to("../../blobs/abc")
    assert vocabulary_size(folder) == 5
    fill(tmp_path / "models--a--b", other=b"x")
    (folder / "vocab.txt").symlink_to("../../other")
    with pytest.raises(BadCheckpoint, match="leaves the checkpoint"):
        sidecar_files(folder)


def test_a_tokenizer_one_folder_up(tmp_path):
    fill(tmp_path, **{"tokenizer.model": sentencepiece(7)})
    assert names(fill(tmp_path / "other")) == []
    assert vocabulary_size(fill(tmp_path / "7B", **{"consolidated.00.pth": b""})) == 7
    own = fill(tmp_path / "8B", **{"consolidated.00.pth": b"", "tokenizer.model": tiktoken(9)})
    assert sidecar_files(own) == [own / "tokenizer.model"]
    step = fill(tmp_path / "checkpoints/checkpoint_00000005/state")
    for folder in (step, step.parent, step.parent.parent):
        assert names(folder) == ["tokenizer.model"]
    assert names(fill(tmp_path / "run/12")) == []


def test_metas_own_tokenizer_in_a_hugging_face_folder(tmp_path):
    fill(tmp_path / "original", **{"tokenizer.model": tiktoken(9)})
    fill(tmp_path, **{"tokenizer.json": tokenizer_json(9)})
    assert sidecar_files(tmp_path) == [tmp_path / "tokenizer.json", tmp_path / "original/tokenizer.model"]


def test_a_tokenizer_model_is_known_by_its_content(tmp_path):
    file = tmp_path / "tokenizer.model"
    for data, kind in ((sentencepiece(300), "sentencepiece"), (tiktoken(300), "tiktoken"), (b"IQ== 0", "tiktoken")):
        file.write_bytes(data)
        assert sniff_tokenizer_model(file) == kind


@pytest.mark.parametrize(("data", "words"), [
    (b"", "empty"), (b" \n", "empty"), (LFS, "Git LFS pointer"), (b"<!DOCTYPE html><html>", "a web page"),
    (b'{"a": 1}', "JSON"), (sentencepiece(300)[:-9], "cut off"),
    (b"PK\x03\x04 zip", "neither"), (b"\x0a\x05", "cut off"),
    (b"\x12\x02\x18\x07", "no pieces"), (b"hello world, this is text", "neither"), (b"\x0a" + b"\xff" * 12, "cut off")])
def test_what_is_no_tokenizer_model_is_named(tmp_path, data, words):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=words):
        sniff_tokenizer_model(file)


@given(st.binary(max_size=50))
def test_any_bytes_are_fields_or_a_value_error(data):
    try:
        fields = list(protobuf.fields(data))
        assert all(number > 0 for number, _, _ in fields)
    except ValueError:
        pass


@pytest.mark.parametrize(("files", "size"), [
    ({"tokenizer.json": tokenizer_json(32)}, 32), ({"tokenizer.json": tokenizer_json(32, 0, 32)}, 33),
    ({"tokenizer.json": tokenizer_json(32), "added_tokens.json": '{"[PAD]": 32}'}, 33),
    ({"tokenizer.model": sentencepiece(32), "added_tokens.json": '{"[PAD]": 32}'}, 33),
    ({"tokenizer.model": sentencepiece(32),
      "tokenizer_config.json": '{"added_tokens_decoder": {"0": {}, "40": {}}}'}, 41),
    ({"tokenizer.model": tiktoken(128)}, 128 + 256), ({"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "#"}, 2),
    ({"vocab.txt": "a\nb\nc\n"}, 3), ({"tokenizer_config.json": "{}", "added_tokens.json": '{"[PAD]": 32}'}, None),
    ({"tokenizer.json": '{"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", 0.0]]}}'}, 2), ({}, None),
    ({"qwen.tiktoken": tiktoken(3)}, None)])
def test_how_many_rows_the_tokenizer_needs(tmp_path, files, size):
    assert vocabulary_size(fill(tmp_path, **files)) == size


@pytest.mark.parametrize("files", [
    {"tokenizer.json": "{}"}, {"tokenizer.json": '{"model": {"vocab": {"a": "0"}}}'}, {"vocab.json": '{"a": -1}'},
    {"vocab.json": '{"a": true}'}, {"tokenizer.json": '{"model": {"vocab": {}}, "added_tokens": [3]}'},
    {"vocab.json": "{}", "tokenizer_config.json": '{"added_tokens_decoder": {"x": {}}}'},
    {"tokenizer.model": tiktoken(3) + b"oops\n"}, {"tokenizer.model": sentencepiece(3)[:-1]}])
def test_a_damaged_tokenizer_is_refused(tmp_path, files):
    with pytest.raises(BadCheckpoint, match=str(tmp_path)):
        vocabulary_size(fill(tmp_path, **files))


@pytest.mark.parametrize(("folder", "size"), [
    ("llama_tokenizer", 32000), ("llama3_tokenizer", 128256), ("gpt2_bpe", 50257), ("configs/llama2-7b-chat", None)])
def test_real_vocabularies(shared, folder, size):
    assert vocabulary_size(shared / "data" / folder) == size


def test_real_kinds(shared):
    data = shared / "data"
    assert sniff_tokenizer_model(data / "llama_tokenizer/tokenizer.model") == "sentencepiece"
    assert sniff_tokenizer_model(data / "llama3_tokenizer/tokenizer.model") == "tiktoken"
    for file in data.glob("sentencepiece/*.model"):
        assert sniff_tokenizer_model(file) == "sentencepiece"
    for file in data.glob("lfs_pointers/*/tokenizer.model"):
        with pytest.raises(BadCheckpoint, match="Git LFS pointer"):
            sniff_tokenizer_model(file)


def test_real_tokenizer_json(shared, tmp_path):
    for name, size in (("llama2-13b", 32000), ("mistral-7b-v0.3", 32768)):
        real = shared / f"data/tokenizer_json/{name}.tokenizer.json"
        folder = fill(tmp_path / name, **{"tokenizer.json": real.read_bytes()})
        assert vocabulary_size(folder) == size
