"""Read a JSON object from a file that nobody vouches for, and take typed fields out of it.

Size, kind of file, encoding, depth, twice-written keys and NaN are settled here once, so that the readers of
config.json, params.json and the rest only say which field they want and of which type.
"""

import json
import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from llmtool.errors import BadCheckpoint, Contradiction, MissingFact
from llmtool.model_config import ModelConfig

CONFIG_LIMIT = 64 << 20      # bytes; the largest real index or config is under 10 MB
TOKENIZER_LIMIT = 512 << 20  # bytes; the largest real tokenizer.json is near 40 MB
LARGEST_COUNT = 1 << 48      # no size, count or id of a model is larger
DEEPEST = 100                # objects in one another; Pax's metadata has about ten. What walks them may recurse
MOST_PARTS = 1 << 16         # layers, or experts of a layer: each is listed by name


def read_bytes(path: Path, limit: int = CONFIG_LIMIT) -> bytes:
    """The whole of a small regular file; anything else, absence and a Git LFS pointer included, is a BadCheckpoint."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadCheckpoint(f"{path}: not a regular file; expected one, and give the real one")
        if status.st_size > limit:
            raise BadCheckpoint(f"{path}: {status.st_size} bytes; expected at most {limit} for a file of this kind")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from error
    if data.startswith(b"version https://git-lfs"):
        raise BadCheckpoint(f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`")
    if len(data) > limit:
        raise BadCheckpoint(f"{path}: grew beyond {limit} bytes while it was read")
    return data


def read_json(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes; anything else is a BadCheckpoint that says what it is."""
    return parse_json(read_bytes(Path(path), limit), str(path))


def parse_json(data: bytes | str, where: str) -> dict[str, Any]:
    """The JSON object in ``data``: UTF-8, finite numbers, each key once."""

    def refuse(text: str) -> NoReturn:
        raise BadCheckpoint(f"{where}: holds {text[:40]}; expected finite numbers only")

    def finite(text: str) -> float:
        return value if math.isfinite(value := float(text)) else refuse(text)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise BadCheckpoint(f"{where}: the key {twice!r} stands there twice; keep one")
        return out

    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        if text.lstrip()[:1] == "<":
            raise BadCheckpoint(f"{where}: a web page, not JSON; download the file itself")
        value = json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{where}: not UTF-8 text (byte {error.start}); expected a JSON object") from error
    except RecursionError as error:
        raise BadCheckpoint(f"{where}: nested too deeply to be a config") from error
    except ValueError as error:  # broken syntax, or a whole number of thousands of digits
        raise BadCheckpoint(f"{where}: not JSON: {error}") from error
    level: list[Any] = [value] if isinstance(value, dict) else []
    for _ in range(DEEPEST):
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for some in children for child in some if isinstance(child, dict | list)]
    if level:
        raise BadCheckpoint(f"{where}: nested too deeply to be a config")
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{where}: holds a JSON {type(value).__name__}; expected an object {{…}}")
    return value


def dump_json(data: Mapping[str, Any]) -> bytes:
    """JSON as sidecars are written: two spaces, a final newline, no NaN."""
    return (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


class Fields:
    """Typed access to a JSON object. A method returns ``None`` where the key is absent or null."""

    def __init__(self, data: Mapping[str, Any], where: str):
        if not isinstance(data, Mapping):
            raise BadCheckpoint(f"{where}: is {_shown(data)}; expected an object")
        self.data, self.where = data, where

    def _get(self, key: str, expected: str, ok: Any) -> Any:
        value = self.data.get(key)
        if value is not None and not ok(value):
            raise BadCheckpoint(f"{self.where}: {key} is {_shown(value)}; expected {expected}")
        return value

    def count(self, key: str, most: int = LARGEST_COUNT) -> int | None:
        """A whole number from 1 to ``most``; 4096.0 is not one, "4096" is not one, true is not one."""
        return self._get(key, f"a whole number from 1 to {most}", lambda v: type(v) is int and 1 <= v <= most)

    def number(self, key: str, most: float = 1e18) -> float | None:
        """A positive number up to ``most``."""
        value = self._get(key, f"a positive number up to {most:g}", lambda v: type(v) in (int, float) and 0 < v <= most)
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        """true or false."""
        return self._get(key, "true or false", lambda v: type(v) is bool)

    def text(self, key: str) -> str | None:
        """A string."""
        return self._get(key, "a string", lambda v: type(v) is str)

    def object(self, key: str) -> "Fields | None":
        """A nested object."""
        value = self._get(key, "an object", lambda v: isinstance(v, Mapping))
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def token_ids(self, key: str) -> int | tuple[int, ...] | None:
        """One token id or several; old files write -1 where there is none."""
        def is_id(v: Any) -> bool:
            return type(v) is int and -1 <= v <= LARGEST_COUNT
        value = self._get(key, "a token id or a list of them",
                          lambda v: is_id(v) or (isinstance(v, list | tuple) and all(map(is_id, v))))
        if isinstance(value, list | tuple):
            return tuple(value) or None
        return None if value == -1 else value

    def need(self, *keys: str) -> None:
        """Raise :class:`MissingFact` naming every one of ``keys`` that is absent or null."""
        if missing := [key for key in keys if self.data.get(key) is None]:
            raise MissingFact(f"{self.where}: has no {', '.join(missing)}; add what is missing, or give "
                              "--model-config FILE|PRESET")


def model_of(facts: Mapping[str, Any], where: str) -> ModelConfig:
    """The model with these facts; where they do not fit one another, the message says ``where`` they stood."""
    try:
        return ModelConfig(**facts)
    except Contradiction as error:
        raise Contradiction(f"{where}: {error}") from error


def width_of_a_head(d_model: int, n_heads: int, where: str) -> int:
    """D/N, for files that do not give the width of a head."""
    width, rest = divmod(d_model, n_heads)
    if rest or not width:
        raise Contradiction(f"{where}: a width of {d_model} does not divide into {n_heads} heads")
    return width


def unknown(keys: Iterable[str], *known: Iterable[str]) -> list[str]:
    """Those of ``keys`` that no table of ``known`` names, sorted."""
    return sorted(set(keys).difference(*known))


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of very many digits"
    return text if len(text) <= 60 else text[:57] + "…"
