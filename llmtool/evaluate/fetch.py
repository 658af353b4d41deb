"""Fetch the published evaluation sets, checked against the hashes of the files that they are known by."""

import io
import sys
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from llmtool.convert.atomic import write_file
from llmtool.errors import BadData
from llmtool.evaluate.data import FILES, data_home
from llmtool.evaluate.items import Task
from llmtool.evaluate.tokenizer import sha256
from llmtool.progress import Progress, progress

_LIMIT = 64 << 20  # bytes; the archives have 2 to 4 MB
_TIMEOUT = 30      # seconds without an answer


@dataclass(frozen=True)
class Published:
    """A file as its authors serve it; ``member`` where it is one of a zip archive's. ``sha256`` is of the file."""

    url: str
    sha256: str
    member: str | None = None


# LAMBADA: the raw-text test set that OpenAI made for GPT-2. BoolQ: SuperGLUE's validation split.
PUBLISHED: dict[str, Published] = {
    "lambada": Published(
        "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl",
        "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"),
    "boolq": Published(
        "https://dl.fbaipublicfiles.com/glue/superglue/data/v2/BoolQ.zip",
        "0c86a5045886e5795fe9052003873f7d94b88ed3028a33007c51d99e44fd66d9", "BoolQ/val.jsonl"),
}


def fetch(task: Task, folder: str | Path | None = None, *, quiet: bool = False,
          published: Published | None = None) -> Path:
    """The task's file in ``folder`` (None: ``data_home()``, where ``load_…()`` looks), downloaded unless it is there.

    Raises BadData where it cannot be reached, or is not the file that it is known to be; nothing is kept then.
    """
    published = published or PUBLISHED[task]
    path = (data_home() if folder is None else Path(folder)) / FILES[task]
    if path.is_file() and sha256(path.read_bytes()) == published.sha256:
        return path
    if not quiet:
        print(f"fetching {task} from {published.url}", file=sys.stderr)
    try:
        with progress(f"fetching {task}", quiet=quiet) as bar:
            data = _download(published.url, bar)
    except (OSError, HTTPException) as error:  # no route, no name, a refusal, half an answer
        reason = getattr(error, "reason", None) or error
        raise BadData(
            f"{published.url}: cannot be fetched ({reason}). Without a network: run `llmtool data get {task} --to "
            f"FOLDER` where there is one, copy {FILES[task]} here, and name it with --data (or put it at {path})"
        ) from error
    if published.member:
        data = _member(data, published)
    if (found := sha256(data)) != published.sha256:
        raise BadData(f"{published.url}: not the published file, or not all of it: SHA-256 {found}, expected "
                      f"{published.sha256}; nothing was kept")
    write_file(path, data)
    return path


def _download(url: str, bar: Progress) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "llmtool"})
    parts: list[bytes] = []
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        while part := answer.read(1 << 18):
            parts.append(part)
            bar.advance(len(part))
            if sum(map(len, parts)) > _LIMIT:
                raise BadData(f"{url}: answers with more than {_LIMIT} bytes; expected a few million")
    return b"".join(parts)


def _member(data: bytes, published: Published) -> bytes:
    assert published.member is not None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open(published.member) as file:
            return file.read(_LIMIT)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise BadData(f"{published.url}: no zip archive with {published.member} ({error}); a proxy may have answered "
                      "in its place") from error
