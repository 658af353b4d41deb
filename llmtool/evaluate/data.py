"""LAMBADA and BoolQ from wherever they come: a file, a prepared TFDS folder, the Hugging Face hub.

What a file has that the published ones have not (CRLF, curly quotes, no final newline, blank lines, a byte order mark)
is counted and told; what makes an item unusable is an error with its line.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llmtool.errors import BadCheckpoint, BadData, BadItems
from llmtool.evaluate.items import BoolQItem, Dataset, LambadaItem, Task, items_sha256

FILES: dict[str, str] = {"lambada": "lambada_test.jsonl", "boolq": "boolq_validation.jsonl"}  # in data_home()
_LIMIT = 1 << 30  # bytes; LAMBADA and BoolQ have 2 MB
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_CURLY = re.compile("[“”‘’]")

Record = tuple[str, dict[str, Any]]  # where, fields


def load_lambada(spec: str | Path | None = None) -> Dataset:
    """LAMBADA's test passages.

    ``spec``: OpenAI's JSON lines ({"text": …}), the original plain text (one passage a line), a TFDS folder
    (``lambada``), or a name on the hub (``EleutherAI/lambada_openai``); None for what ``llmtool data get`` put in
    place. Raises BadData where there is none of these, and for an item that has no word to guess.
    """
    return _load("lambada", spec)


def load_boolq(spec: str | Path | None = None) -> Dataset:
    """BoolQ's validation questions.

    ``spec``: JSON lines with SuperGLUE's field names (question, passage, label) or Google's (question, passage,
    answer, title), a TFDS folder (``super_glue/boolq``, ``bool_q``), or a name on the hub (``aps/super_glue:boolq``);
    None as for LAMBADA. SuperGLUE's passages begin with the page's title; Google's title is put there too, so that
    both give the same items.
    """
    return _load("boolq", spec)


def data_home() -> Path:
    """Where ``llmtool data get`` puts data sets: $LLMTOOL_DATA, else ``llmtool/data`` in the user's cache folder."""
    told = os.environ.get("LLMTOOL_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(told or os.path.join(cache, "llmtool", "data")).expanduser()


def _load(task: Task, spec: str | Path | None) -> Dataset:
    path = Path(spec) if spec is not None else data_home() / FILES[task]
    if path.is_dir():
        from llmtool.evaluate.tfds_folder import read_tfds

        records, source = read_tfds(path, task)
        return _build(task, ((where, _undo_tfds(task, fields)) for where, fields in records), source, {}, None)
    if path.exists():
        return _from_file(task, path)
    if spec is None:
        raise BadData(f"no {task} data at {path}: fetch it with `llmtool data get {task}`, or name a file with --data")
    name = str(spec)
    if not _HUB_NAME.fullmatch(name) or path.suffix in (".jsonl", ".json", ".txt"):
        raise BadData(f"{path}: no such file or folder")
    from llmtool.evaluate.hub import read_hub

    return _build(task, read_hub(name, task), f"the hub: {name}", {}, None)


def _from_file(task: Task, path: Path) -> Dataset:
    from llmtool.convert.sidecars.json_file import read_bytes
    from llmtool.evaluate.tokenizer import sha256

    try:
        data = read_bytes(path, _LIMIT)
    except BadCheckpoint as error:
        raise BadData(str(error)) from error
    counts: dict[str, int] = {}
    lines = list(_lines(data, path, counts))
    if not lines:
        raise BadData(f"{path}: empty; expected {task} items, one a line")
    if lines[0][1].lstrip()[:1] == "<":
        raise BadData(f"{path}: a web page or XML; expected JSON lines" + (" or plain text" * (task == "lambada")))
    if task == "lambada" and not lines[0][1].startswith("{"):
        records: Iterable[Record] = [(where, {"text": text}) for where, text in lines]
    else:
        records = _json_records(lines)
    return _build(task, records, str(path), counts, sha256(data))


def _lines(data: bytes, path: Path, counts: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Lines that are not blank. Only a newline ends one: a text may hold U+2028, U+0085 or a form feed."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        counts["byte_order_mark"] = 1
    *lines, rest = data.split(b"\n")
    if rest:
        lines.append(rest)
        counts["missing_final_newline"] = 1
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\r"):
            line = line[:-1]
            counts["crlf"] = counts.get("crlf", 0) + 1
        if not line.strip():
            counts["blank_lines"] = counts.get("blank_lines", 0) + 1
            continue
        where = f"{path}, line {number}"
        try:
            yield where, line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadData(f"{where}: not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x}); "
                          "convert the file, for instance with `iconv -t UTF-8`") from error


def _json_records(lines: Iterable[tuple[str, str]]) -> Iterator[Record]:
    for where, line in lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadData(f"{where}: not JSON ({error}); expected one object a line") from error
        if not isinstance(fields, dict):
            raise BadData(f"{where}: a JSON {type(fields).__name__}; expected an object")
        yield where, fields


def _build(task: Task, records: Iterable[Record], source: str, counts: dict[str, int], sha: str | None) -> Dataset:
    make: Callable[[str, dict[str, Any]], Any] = _lambada_item if task == "lambada" else _boolq_item
    items: list[Any] = []
    problems: list[str] = []
    keys: set[str] = set()
    titles = 0
    for where, fields in records:
        try:
            items.append(make(where, fields))
        except BadData as error:
            problems.append(str(error))
        titles += bool(fields.get("title"))
        keys.update(fields)
    if problems:
        total = len(problems) + len(items)
        raise BadItems(f"{source}: {len(problems)} of {total} {task} items cannot be used:", problems)
    if not items:
        raise BadData(f"{source}: empty; expected {task} items")
    texts = [item.text if task == "lambada" else item.passage + item.question for item in items]
    curly = sum(bool(_CURLY.search(text)) for text in texts)
    counts |= {"curly_quotes": curly} if curly else {}
    counts |= {"titles_put_first": titles} if task == "boolq" and titles else {}
    if task == "lambada":
        # the original was lower-cased and cut into tokens; one of its letters has no lower case of its own
        variant = "original" if sum(text != text.lower() for text in texts) * 100 < len(texts) else "openai"
    else:
        variant = "superglue" if "label" in keys else "google" if titles else "google, without titles"
    return Dataset(task, tuple(items), source, variant, sha or items_sha256(tuple(items)), counts,
                   tuple(_SAID[key].format(n) for key, n in counts.items()))


_SAID = {
    "byte_order_mark": "begins with a byte order mark, which was left out",
    "missing_final_newline": "the last line has no newline",
    "crlf": "{} lines end in CRLF, which was read as a newline",
    "blank_lines": "{} blank lines were left out",
    "curly_quotes": "{} items have curly quotes (the pax protocol straightens LAMBADA's, lm-eval leaves them)",
    "titles_put_first": "{} titles were put before their passages, as SuperGLUE has them",
}


def _lambada_item(where: str, fields: dict[str, Any]) -> LambadaItem:
    text = _text(where, fields, "text")
    if len(text.split()) < 2:
        raise BadData(f"{where}: {_shown(text)} has no target: a passage needs a word to guess and one before it")
    return LambadaItem(text, where)


def _boolq_item(where: str, fields: dict[str, Any]) -> BoolQItem:
    passage, question = _text(where, fields, "passage"), _text(where, fields, "question")
    if fields.get("title"):
        passage = f"{_text(where, fields, 'title')} -- {passage}"
    key = "label" if "label" in fields else "answer"
    answer = fields.get(key)
    if type(answer) is int and answer in (0, 1):
        answer = bool(answer)
    if type(answer) is not bool:
        if answer is None or answer == -1:
            raise BadData(f"{where}: no target: neither label nor answer tells yes or no (the test split has none; use "
                          "validation)")
        raise BadData(f"{where}: {key} is {_shown(answer)}; expected true or false")
    return BoolQItem(passage, question, answer, where)


def _text(where: str, fields: dict[str, Any], key: str) -> str:
    if key not in fields:
        raise BadData(f"{where}: no {key!r}; it has {', '.join(map(_shown, sorted(fields)[:6])) or 'nothing'}")
    value = fields[key]
    if not isinstance(value, str):
        raise BadData(f"{where}: {key} is {_shown(value)}; expected a string")
    if not value.strip():
        raise BadData(f"{where}: {key} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a pair, written as an escape
        raise BadData(f"{where}: {key} holds half a surrogate pair, which is no text") from error
    return value


def _undo_tfds(task: Task, fields: dict[str, Any]) -> dict[str, Any]:
    """TFDS keeps a LAMBADA line with its newline, and calls it a passage."""
    if task == "lambada" and isinstance(fields.get("passage"), str):
        return {"text": fields["passage"].rstrip("\r\n")}
    return fields


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"
