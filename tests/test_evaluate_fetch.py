"""``llmtool data get`` against a server on this machine: what is kept, what is refused, what is said without one."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llmtool import cli
from llmtool.errors import BadData
from llmtool.evaluate import fetch as fetching
from llmtool.evaluate.data import load_boolq, load_lambada
from llmtool.evaluate.fetch import PUBLISHED, Published, fetch

LAMBADA = b'{"text": "a red boat"}\n'
BOOLQ = b'{"question": "q", "passage": "p", "label": true, "idx": 0}\n'


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("BoolQ/val.jsonl", data)
    return out.getvalue()


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A base address, and the files behind it; a name that begins with "half" breaks off in the middle."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path[1:])
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write((data or b"")[:10] if self.path.startswith("/half") else data or b"")

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/", files
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("LLMTOOL_DATA", str(tmp_path / "home"))


def published(url: str, data: bytes, member: str | None = None) -> Published:
    return Published(url, hashlib.sha256(data).hexdigest(), member)


def test_a_file_and_a_member_of_an_archive(server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    base, files = server
    files |= {"l.jsonl": LAMBADA, "b.zip": zipped(BOOLQ)}
    path = fetch("lambada", published=published(base + "l.jsonl", LAMBADA), quiet=True)
    assert path == tmp_path / "home" / "lambada_test.jsonl"
    assert path.read_bytes() == LAMBADA
    assert path.stat().st_mode & 0o777 == 0o644
    assert load_lambada().items[0].text == "a red boat"
    path = fetch("boolq", tmp_path / "new" / "folder", quiet=True,
                 published=published(base + "b.zip", BOOLQ, "BoolQ/val.jsonl"))
    assert path == tmp_path / "new" / "folder" / "boolq_validation.jsonl"
    assert load_boolq(path).items[0].answer is True


def test_what_is_there_is_not_fetched_again_unless_it_is_another(server: tuple[str, dict[str, bytes]],
                                                                 tmp_path: Path) -> None:
    base, files = server
    there = tmp_path / "lambada_test.jsonl"
    there.write_bytes(LAMBADA)
    assert fetch("lambada", tmp_path, published=published("http://127.0.0.1:9/", LAMBADA), quiet=True) == there
    there.write_bytes(LAMBADA[:-5])
    files["l"] = LAMBADA
    fetch("lambada", tmp_path, published=published(base + "l", LAMBADA), quiet=True)
    assert there.read_bytes() == LAMBADA


@pytest.mark.parametrize(("name", "served", "member", "says"), [
    ("l", b"something else", None, "not the published file, or not all of it: SHA-256"),
    ("gone", None, None, "cannot be fetched.*Not Found"),
    ("half", LAMBADA, None, "not the published file"),
    ("b.zip", b"<html>sign in</html>", "BoolQ/val.jsonl", "no zip archive with BoolQ/val.jsonl"),
    ("b.zip", zipped(BOOLQ)[:90], "BoolQ/val.jsonl", "no zip archive"),
    ("b.zip", zipped(BOOLQ), "BoolQ/test.jsonl", "no zip archive with BoolQ/test.jsonl"),
    ("b.zip", zipped(b"other"), "BoolQ/val.jsonl", "not the published file"),
])
def test_nothing_else_is_kept(name: str, served: bytes | None, member: str | None, says: str,
                              server: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    base, files = server
    if served is not None:
        files[name] = served
    there = tmp_path / "lambada_test.jsonl"
    there.write_bytes(b"kept from before\n")
    with pytest.raises(BadData, match=says):
        fetch("lambada", tmp_path, published=published(base + name, LAMBADA, member), quiet=True)
    assert there.read_bytes() == b"kept from before\n"
    assert list(tmp_path.iterdir()) == [there]


def test_an_endless_answer(server: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch,
                           tmp_path: Path) -> None:
    base, files = server
    monkeypatch.setattr(fetching, "_LIMIT", 1000)
    files["l"] = bytes(5000)
    with pytest.raises(BadData, match="more than 1000 bytes"):
        fetch("lambada", tmp_path, published=published(base + "l", LAMBADA), quiet=True)


def test_the_command_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    for task, data in (("lambada", LAMBADA), ("boolq", BOOLQ)):
        monkeypatch.setitem(PUBLISHED, task, published("http://127.0.0.1:9/x", data))
        assert cli.main(["data", "get", task, "--quiet"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "cannot be fetched" in said.err and f"llmtool data get {task} --to FOLDER" in said.err
        assert "Traceback" not in said.err
    assert not (tmp_path / "home").exists()


def test_the_command(server: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                     capsys) -> None:
    base, files = server
    files["l"] = LAMBADA
    monkeypatch.setitem(PUBLISHED, "lambada", published(base + "l", LAMBADA))
    assert cli.main(["data", "get", "lambada", "--to", str(tmp_path / "d")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'd' / 'lambada_test.jsonl'}\n"
    assert "fetching lambada" in said.err
    assert cli.main(["data", "get", "hellaswag"]) == 2
