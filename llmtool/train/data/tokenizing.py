"""Token files: text tokenized once, so that runs start at once and read any row by its number."""

import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmtool.convert.atomic import new_folder
from llmtool.errors import BadData, BadTarget
from llmtool.evaluate.tokenizer import Tokenizer, load_tokenizer
from llmtool.train.data.documents import encode, every_text
from llmtool.train.data.open import open_texts
from llmtool.train.data.tokens import SCHEMA, token_dtype
from llmtool.train.data.words import SIDECAR, parse_word

_CHUNK = 256    # documents that a worker takes at once
_AHEAD = 4      # chunks in hand for each worker; more would only fill memory
_Documents = list[tuple[str, str]]  # where, text


def tokenize(sources: Sequence[str], target: str | Path, *, tokenizer: str | Path, text_field: str = "text",
             shards: int = 1, workers: int = 0, overwrite: bool = False,
             progress: Callable[[int], None] = lambda documents: None) -> dict[str, Any]:
    """Write the documents of ``sources`` (words without weights) to the folder ``target``; what its tokens.json says.

    Documents go to the shards in turn, whatever the number of ``workers`` (processes; 0: this one). The folder is there
    when it is whole, or not at all. Raises LlmtoolError for what cannot be read, and where ``target`` holds something
    that is not replaced: token files with ``overwrite`` only, anything else never.
    """
    target = Path(target)
    _check_target(target, overwrite)
    loaded = load_tokenizer(tokenizer)
    words = [parse_word(source) for source in sources]
    if weighted := [str(word) for word in words if word.weight is not None]:
        raise BadData(f"{', '.join(weighted)}: weights belong to training; token files keep every document once")
    dtype = np.dtype(token_dtype(loaded.size)).newbyteorder("<")
    documents = (each for word in words for each in every_text(open_texts(word, text_field)))
    offsets = [array("Q", [0]) for _ in range(shards)]
    with new_folder(target, overwrite=overwrite) as folder:
        with ExitStack() as stack:
            files = [stack.enter_context((folder / _name(n, "tokens")).open("wb")) for n in range(shards)]
            number = 0
            for encoded in _encoded(documents, loaded, str(tokenizer), workers):
                for ids in encoded:
                    shard = number % shards
                    files[shard].write(ids.astype(dtype).tobytes())
                    offsets[shard].append(offsets[shard][-1] + len(ids))
                    number += 1
                progress(len(encoded))
        if not sum(each[-1] for each in offsets):
            raise BadData(f"{', '.join(sources)}: empty; expected documents with text")
        for n, each in enumerate(offsets):
            (folder / _name(n, "offsets")).write_bytes(np.frombuffer(each, np.uint64).astype("<u8").tobytes())
        told = _sidecar(loaded, dtype.name, offsets, list(map(str, words)), text_field)
        (folder / SIDECAR).write_text(json.dumps(told, indent=2) + "\n")
    return told


def _encoded(documents: Iterator[tuple[str, str]], tokenizer: Tokenizer, path: str,
             workers: int) -> Iterator[list[np.ndarray]]:
    """Chunks of documents' ids, in order."""
    chunks = iter(lambda: list(islice(documents, _CHUNK)), [])
    if not workers:
        yield from (_encode_chunk(tokenizer, chunk) for chunk in chunks)
        return
    import multiprocessing
    from concurrent.futures import Future, ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")  # a copy of this process could hold locks of threads it has not
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(path,)) as pool:
        waiting: deque[Future[list[np.ndarray]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode_in_worker, chunk))
                if len(waiting) >= _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()


def _encode_chunk(tokenizer: Tokenizer, documents: _Documents) -> list[np.ndarray]:
    return [encode(tokenizer, text, where) for where, text in documents]


_worker: dict[str, Tokenizer] = {}


def _start_worker(path: str) -> None:
    _worker["tokenizer"] = load_tokenizer(path)


def _encode_in_worker(documents: _Documents) -> list[np.ndarray]:
    return _encode_chunk(_worker["tokenizer"], documents)


def _name(shard: int, kind: str) -> str:
    return f"shard-{shard:05d}.{kind}"


def _sidecar(tokenizer: Tokenizer, dtype: str, offsets: Sequence[Sequence[int]], sources: list[str],
             text_field: str) -> dict[str, Any]:
    shards = [{"documents": len(each) - 1, "tokens": each[-1], "tokens_file": _name(n, "tokens"),
               "offsets_file": _name(n, "offsets")} for n, each in enumerate(offsets)]
    facts = {"kind": tokenizer.kind, "sha256": tokenizer.sha, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id,
             "adds_bos": tokenizer.adds_bos}
    return {"schema": SCHEMA, "dtype": dtype, "vocab_size": tokenizer.size, "tokenizer": facts,
            "documents": sum(len(each) - 1 for each in offsets), "tokens": sum(each[-1] for each in offsets),
            "sources": sources, "text_field": text_field, "shards": shards}


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise BadTarget(f"{target}: a file or a link; expected a folder or nothing")
    if not target.is_dir() or not (names := {entry.name for entry in target.iterdir()}):
        return
    ours = {name for name in names if name == SIDECAR or (name.startswith("shard-") and
                                                          name.endswith((".tokens", ".offsets")))}
    if names - ours or SIDECAR not in names:
        raise BadTarget(f"{target}: holds {', '.join(sorted(names - ours)[:5]) or 'something'}, which is not token "
                        "files; choose another folder")
    if not overwrite:
        raise BadTarget(f"{target}: holds token files already; give --overwrite to replace them")
