"""Progress goes to stderr, in lines where there is no terminal, and not at all when asked to be quiet."""

import sys

import pytest

from llmtool import progress as module
from llmtool.progress import human_bytes, human_count, human_seconds, progress


def test_lines_where_there_is_no_terminal(capsys, monkeypatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 20.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with progress("converting", 4_000_000) as shown:
        shown.advance(1_000_000, "embed")      # too soon to say anything
        shown.advance(1_000_000, "layers.0.attn.q.w")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "converting: 2 MB of 4 MB (50%), 182 kB/s, 11 s left: layers.0.attn.q.w\n"
        "converting: 2 MB in 20 s (100 kB/s)\n")


def test_without_a_total_there_is_a_rate_alone(capsys, monkeypatch) -> None:
    clock = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with progress("reading") as shown:
        shown.advance(5_000)
    assert capsys.readouterr().err == "reading: 5 kB, 500 B/s\nreading: 5 kB in 10 s (500 B/s)\n"


def test_quiet(capsys) -> None:
    with progress("converting", 10, quiet=True) as shown:
        shown.advance(10, "x")
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("converting", 1_000) as shown:
        shown.advance(500, "embed[0]")
    assert capsys.readouterr().out == ""


def test_no_last_line_after_an_error(capsys) -> None:
    with pytest.raises(ValueError, match="stop"), progress("converting", 10):
        raise ValueError("stop")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("n, text", [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"),
                                     (13_476_831_232, "13.5 GB"), (5e12, "5 TB"), (1.4e15, "1,400 TB")])
def test_human_bytes(n, text) -> None:
    assert human_bytes(n) == text


@pytest.mark.parametrize("n, text", [(5, "5"), (1000, "1 k"), (134_515_008, "135 M"), (6_738_415_616, "6.74 B"),
                                     (1_142_891_356_160, "1.14 T")])
def test_human_count(n, text) -> None:
    assert human_count(n) == text


@pytest.mark.parametrize("n, text", [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (125, "2 min 5 s"),
                                     (3600, "1 h 0 min"), (3725, "1 h 2 min"), (90_000, "25 h 0 min")])
def test_human_seconds(n, text) -> None:
    assert human_seconds(n) == text
