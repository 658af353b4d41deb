"""LAMBADA and BoolQ files: what is mended and told, and what is refused with its line."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtool.errors import BadData, BadItems, LlmtoolError
from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.items import items_sha256

GOOGLE = {"question": "is it wet", "title": "Rain", "answer": True, "passage": "Rain is water."}
SUPERGLUE = {"question": "is it wet", "passage": "Rain -- Rain is water.", "idx": 7, "label": True}


def write(path: Path, *rows: Any, end: str = "\n", last: bool = True) -> Path:
    """JSON lines."""
    path.write_bytes((end.join(json.dumps(row, ensure_ascii=False) for row in rows) + end * last).encode())
    return path


# ── the forms ────────────────────────────────────────────────────────────────────────────────────────────────────────

def test_openai_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": "A red boat\n\nsank"}, {"text": "Two words"})
    data = load_lambada(path)
    assert [item.text for item in data.items] == ["A red boat\n\nsank", "Two words"]
    assert (data.task, data.variant, dict(data.counts), data.notes) == ("lambada", "openai", {}, ())
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert data.items[1].where == f"{path}, line 2"


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"a red boat sank\nhe did n't say `` no ''\n")
    data = load_lambada(path)
    assert [item.text for item in data.items] == ["a red boat sank", "he did n't say `` no ''"]
    assert data.variant == "original"


def test_both_spellings_of_a_passage_are_named(tmp_path: Path) -> None:
    """bugs.md B49: the variant is told by the text, not by the file's form."""
    assert load_lambada(write(tmp_path / "a", {"text": "I don't know why. Don't"})).variant == "openai"
    assert load_lambada(write(tmp_path / "b", {"text": "i do n't know why . do n't"})).variant == "original"
    (tmp_path / "c").write_text("I don't know why. Don't\n")
    assert load_lambada(tmp_path / "c").variant == "openai"


def test_google_and_superglue_give_the_same_items(tmp_path: Path) -> None:
    google, superglue = (load_boolq(write(tmp_path / name, row)) for name, row in
                         (("google", GOOGLE), ("superglue", SUPERGLUE)))
    assert google.items == superglue.items
    assert items_sha256(google.items) == items_sha256(superglue.items)
    assert (google.variant, superglue.variant) == ("google", "superglue")
    assert google.counts == {"titles_put_first": 1}
    bare = load_boolq(write(tmp_path / "bare", {key: GOOGLE[key] for key in ("question", "answer", "passage")}))
    assert (bare.variant, bare.items[0].passage) == ("google, without titles", "Rain is water.")


@pytest.mark.parametrize("label", [0, 1, False, True])
def test_labels(label: Any, tmp_path: Path) -> None:
    item, = load_boolq(write(tmp_path / "x", SUPERGLUE | {"label": label})).items
    assert item.answer is bool(label)


# ── mended, counted, told ────────────────────────────────────────────────────────────────────────────────────────────

def test_what_is_mended_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffone boat\r\n\n  \ntwo “boats”\r\nthree boats\n‘four’ boats".encode())
    data = load_lambada(path)
    assert [item.text for item in data.items] == ["one boat", "two “boats”", "three boats", "‘four’ boats"]
    assert data.counts == {"byte_order_mark": 1, "missing_final_newline": 1, "crlf": 2, "blank_lines": 2,
                           "curly_quotes": 2}
    assert "2 lines end in CRLF, which was read as a newline" in data.notes
    assert len(data.notes) == 5
    assert [item.where for item in data.items][1] == f"{path}, line 4"


@pytest.mark.parametrize(("end", "last"), [("\r\n", True), ("\r\n", False), ("\n", False)])
def test_the_same_items_whatever_ends_a_line(end: str, last: bool, tmp_path: Path) -> None:
    plain = load_boolq(write(tmp_path / "plain", SUPERGLUE, SUPERGLUE))
    other = load_boolq(write(tmp_path / "other", SUPERGLUE, SUPERGLUE, end=end, last=last))
    assert plain.items == other.items
    assert plain.sha256 != other.sha256
    crlf = {"crlf": 1 + last} if end == "\r\n" else {}
    assert other.counts == crlf | ({} if last else {"missing_final_newline": 1})


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    rows = [{"text": f"a {text} b"} for text in texts]
    path = write(tmp_path_factory.mktemp("any") / "x.jsonl", *rows)
    assert [item.text for item in load_lambada(path).items] == [row["text"] for row in rows]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\u0085three\x0cfour\x0bfive"
    path = tmp_path / "x.txt"
    path.write_text(text + "\n", newline="")
    assert [item.text for item in load_lambada(path).items] == [text]


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize(("content", "says"), [
    (b"", "empty"), (b"\n\r\n  \n", "empty"),
    (b"good line\nb\xffd line\n", r"line 2: not UTF-8 \(byte 2 of the line is 0xff\)"),
    ("{\"text\": \"caf\u00e9 b\"}\n".encode("latin-1"), "line 1: not UTF-8"),
    (b"good line\noneword\n", "line 2: 'oneword' has no target"),
    (b"good line\n  oneword  \n", "line 2: .* has no target"),
    (b"{\"text\": \"a b\"}\n{\"text\": 3}\n", "line 2: text is 3; expected a string"),
    (b"{\"text\": \"a b\"}\n{\"text\": null}\n", "line 2: text is None"),
    (b"{\"text\": \"a b\"}\n{\"txt\": \"a b\"}\n", "line 2: no 'text'; it has 'txt'"),
    (b"{\"text\": \"a b\"}\n{\"text\": \"\"}\n", "line 2: text is empty"),
    (b"{\"text\": \"a b\"}\n[1]\n", "line 2: a JSON list; expected an object"),
    (b"{\"text\": \"a b\"}\n{\"text\": \"a b\"\n", "line 2: not JSON"),
    (b"{\"text\": \"a b\"}\nplain line\n", "line 2: not JSON"),
    (b"{\"text\": \"\\ud800 b\"}\n", "line 1: text holds half a surrogate pair"),
    (b"{\"a\": " + b"[" * 100_000 + b"\n", "line 1: not JSON"),
    (b"<!DOCTYPE html>\n", "a web page"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
], ids=range(17))
def test_lambada_that_cannot_be_used(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadData, match=says) as caught:
        load_lambada(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("change", "says"), [
    ({"label": "true"}, "label is 'true'; expected true or false"),
    ({"label": 2}, "label is 2; expected true or false"),
    ({"label": 1.0}, "label is 1.0"),
    ({"label": -1}, "no target: .*validation"),
    ({"label": None}, "no target"),
    ({"question": 3}, "question is 3; expected a string"),
    ({"passage": ["x"]}, "passage is"),
    ({"passage": " "}, "passage is empty"),
    ({"title": 5}, "title is 5"),
])
def test_boolq_that_cannot_be_used(change: dict, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", SUPERGLUE, SUPERGLUE | change)
    with pytest.raises(BadItems, match=f"line 2: .*{says}"):
        load_boolq(path)


@pytest.mark.parametrize("gone", ["question", "passage", "label"])
def test_boolq_without_a_field(gone: str, tmp_path: Path) -> None:
    row = {key: value for key, value in SUPERGLUE.items() if key != gone}
    with pytest.raises(BadData, match="line 1: no " + ("target" if gone == "label" else repr(gone))):
        load_boolq(write(tmp_path / "x.jsonl", row))


def test_every_bad_item_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x", *({"text": "word"} if i % 2 else {"text": "two words"} for i in range(40)))
    with pytest.raises(BadItems, match="20 of 40 lambada items cannot be used") as caught:
        load_lambada(path)
    assert len(caught.value.problems) == 20
    assert "line 2: " in str(caught.value) and "and 10 more" in str(caught.value)


def test_lambada_is_no_boolq(tmp_path: Path) -> None:
    lambada, boolq = write(tmp_path / "l", {"text": "two words"}), write(tmp_path / "b", SUPERGLUE)
    with pytest.raises(BadData, match="no 'passage'; it has 'text'"):
        load_boolq(lambada)
    with pytest.raises(BadData, match="no 'text'; it has 'idx', 'label', 'passage', 'question'"):
        load_lambada(boolq)


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in (tmp_path / "nothing.jsonl", "nothing.txt", "no/such/folder/at/all"):
        with pytest.raises(BadData, match="no such file or folder"):
            load_lambada(spec)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadData, match=r"no prepared TFDS data set for boolq.*holds nothing"):
        load_boolq(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadData, match="not a regular file"):
        load_lambada(tmp_path / "pipe")
    monkeypatch.setenv("LLMTOOL_DATA", str(tmp_path))
    with pytest.raises(BadData, match="llmtool data get boolq"):
        load_boolq()
    write(tmp_path / "boolq_validation.jsonl", SUPERGLUE)
    assert len(load_boolq().items) == 1


# ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────────

class Hub:
    """Stands for the ``datasets`` library."""

    def __init__(self, rows: list[dict[str, Any]] | Exception):
        self.rows, self.asked = rows, []  # type: ignore[var-annotated]

    def load_dataset(self, *where: Any, **how: Any) -> list[dict[str, Any]]:
        self.asked.append((*where, how["split"]))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    hub = Hub([{"question": "q", "passage": "p", "label": 1, "idx": 0}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    data = load_boolq("aps/super_glue")
    load_boolq("someone/super_glue:other")
    load_boolq("google/boolq")
    assert hub.asked == [("aps/super_glue", "boolq", "validation"), ("someone/super_glue", "other", "validation"),
                         ("google/boolq", None, "validation")]
    assert (data.variant, data.source, data.sha256) == ("superglue", "the hub: aps/super_glue",
                                                        items_sha256(data.items))
    hub.rows = [{"text": "two words", "domain": None}, {"text": "word"}]
    with pytest.raises(BadItems, match="EleutherAI/lambada_openai, row 1: 'word' has no target"):
        load_lambada("EleutherAI/lambada_openai")
    assert hub.asked[-1] == ("EleutherAI/lambada_openai", None, "test")


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", Hub(ConnectionError("cannot reach it\nstack of lines")))
    with pytest.raises(BadData, match=r"ConnectionError: cannot reach it\).*llmtool data get lambada"):
        load_lambada("EleutherAI/lambada_openai")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(LlmtoolError, match="pip install datasets"):
        load_lambada("EleutherAI/lambada_openai")


# ── the samples that come with the project ───────────────────────────────────────────────────────────────────────────

def test_samples(root: Path) -> None:
    lambada = load_lambada(root / "evaluate" / "samples" / "lambada.jsonl")
    boolq = load_boolq(root / "evaluate" / "samples" / "boolq.jsonl")
    assert (len(set(lambada.items)), lambada.variant, lambada.notes) == (40, "openai", ())
    assert all(re.fullmatch("[a-z]+", item.text.split(" ")[-1]) for item in lambada.items)
    assert (len(set(boolq.items)), boolq.variant, boolq.counts) == (40, "google", {"titles_put_first": 40})
    assert 15 <= sum(item.answer for item in boolq.items) <= 25


# ── the real files ───────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.shared
@pytest.mark.parametrize(("name", "n", "variant", "curly"), [
    ("lambada_test.jsonl", 5153, "openai", 1978),
    ("lambada_test_plain_text.txt", 5153, "original", 27),
    ("lambada_development_plain_text.txt", 4869, "original", 12),
])
def test_real_lambada(name: str, n: int, variant: str, curly: int, shared: Path) -> None:
    data = load_lambada(shared / "data/lambada" / name)
    assert (len(data.items), data.variant, data.counts) == (n, variant, {"curly_quotes": curly})


@pytest.mark.shared
def test_real_boolq(shared: Path) -> None:
    superglue, google = (load_boolq(shared / "data/boolq" / name) for name in ("superglue_val.jsonl", "dev.jsonl"))
    assert superglue.items == google.items
    assert (len(superglue.items), sum(item.answer for item in superglue.items)) == (3270, 2033)
    assert (superglue.counts, google.counts) == ({}, {"titles_put_first": 3270})


@pytest.mark.shared
def test_what_is_fetched_is_what_was_measured(shared: Path) -> None:
    from llmtool.evaluate.fetch import PUBLISHED

    assert load_lambada(shared / "data/lambada/lambada_test.jsonl").sha256 == PUBLISHED["lambada"].sha256
    assert load_boolq(shared / "data/boolq/superglue_val.jsonl").sha256 == PUBLISHED["boolq"].sha256
