"""A JSON file of a checkpoint is hostile input: one clear error, whatever is in it."""

import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtool.convert.sidecars.json_file import Fields, dump_json, parse_json, read_json
from llmtool.errors import BadCheckpoint, LlmtoolError, MissingFact

BAD = {
    b"": "not JSON", b"[1]": "a JSON list", b"3": "a JSON int", b'"x"': "a JSON str", b"null": "a JSON NoneType",
    b'{"a": NaN}': "finite", b'{"a": -Infinity}': "finite", b'{"a": 1e999}': "finite", b'{"a": 1': "not JSON",
    b'{"a": "\xff"}': "not UTF-8", b'{"a": 1, "a": 2}': "stands there twice", b"[" * 200000: "nested too deeply",
    b'{"a": ' + b"9" * 5000 + b"}": "not JSON", b"<!DOCTYPE html>": "a web page",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n": "Git LFS pointer",
}


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_what_is_no_json_object_is_named(tmp_path, data):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint) as error:
        read_json(file)
    assert BAD[data] in str(error.value) and str(file) in str(error.value) and len(str(error.value)) < 400


def test_a_file_too_large_or_no_file_is_refused_before_it_is_read(tmp_path):
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)  # sparse: a gigabyte of zeros
    with pytest.raises(BadCheckpoint, match="1073741824 bytes"):
        read_json(large)
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path):
        with pytest.raises(BadCheckpoint, match="not a regular file"):
            read_json(path)
    with pytest.raises(BadCheckpoint, match="No such file"):
        read_json(tmp_path / "absent.json")


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_one_error(data):
    with contextlib.suppress(LlmtoolError):
        assert isinstance(parse_json(data, "x"), dict)


@given(st.dictionaries(st.text(), st.one_of(st.integers(-10**6, 10**6), st.text(), st.booleans(), st.none())))
def test_what_is_written_reads_back(data):
    assert parse_json(dump_json(data), "x") == data


def test_a_byte_order_mark_and_lone_surrogates_survive():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}
    assert parse_json(dump_json({"a": "\ud800"}), "x") == {"a": "\ud800"}


@pytest.mark.parametrize("value", ["4096", 4096.0, True, -1, 0, 10**30, [1], {}])
def test_a_count_is_a_positive_whole_number(value):
    with pytest.raises(BadCheckpoint, match="f: dim is "):
        Fields({"dim": value}, "f").count("dim")


@pytest.mark.parametrize("value", ["1e-5", True, 0, -1.0, 1e300, [1], json.loads("1e400")])
def test_a_number_is_positive(value):
    with pytest.raises(BadCheckpoint, match="f: eps is "):
        Fields({"eps": value}, "f").number("eps")


def test_fields():
    fields = Fields({"a": 1, "b": None, "ids": [1, 2], "none": -1, "one": [7], "o": {"x": 2.5}, "flag": False}, "f")
    assert (fields.count("a"), fields.count("b"), fields.count("c")) == (1, None, None)
    assert fields.token_ids("ids") == (1, 2) and fields.token_ids("none") is None and fields.token_ids("one") == (7,)
    assert fields.object("o").number("x") == 2.5 and fields.flag("flag") is False
    with pytest.raises(MissingFact, match="has no b, c"):
        fields.need("a", "b", "c")
    for bad in ("yes", 1, [True]):
        with pytest.raises(BadCheckpoint):
            Fields({"flag": bad, "ids": bad if bad != 1 else "1"}, "f").flag("flag")
