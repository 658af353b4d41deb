"""Single choices of a run changed by name: ``optimizer.learning_rate=1e-4`` on a command line, or a TOML file.

A path is the fields of :class:`~llmtool.train.config.RunConfig` from the outside in. Values must be of the field's
type; nothing is coerced but a whole number where a fraction may stand. Errors name the path, what was expected and
what was found.
"""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmtool.errors import BadRun
from llmtool.model_config import ModelConfig
from llmtool.train.config import RunConfig

SCHEMA = "llmtool.run/1"
_NONE = ("none", "null")


def override(config: RunConfig, assignments: Iterable[str]) -> RunConfig:
    """``config`` with every ``path=value`` of a command line in place; of two for one path the later wins.

    ``none`` empties a field that may be empty; a tuple is written ``1,8,1`` or ``[1,8,1]``.
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise BadRun(f"--set {text}: expected path=value, such as optimizer.learning_rate=1e-4")
        changes[path] = _parse(value, field_type(path), f"--set {path}")
    return with_values(config, changes)


def override_from_file(config: RunConfig, file: str | Path) -> RunConfig:
    """``config`` with the choices of a TOML file in place: ``steps = 10``, ``[optimizer]``, ``learning_rate = 1e-4``.

    TOML has no word for empty: write "none".
    """
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRun(f"{file}: not TOML: {error}") from error
    changes: dict[str, Any] = {}
    for path, value in _flat(data, RunConfig, f"{file}: "):
        hint = field_type(path, f"{file}: ")
        empty = value in _NONE and _optional(hint)
        changes[path] = None if empty else _check(value, hint, f"{file}: {path}")
    return with_values(config, changes)


def with_values(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """``config`` with ``path -> value`` in place, all at once, so that values that must fit one another may change."""
    nested: dict[str, Any] = {}
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = nested
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return _replace(config, nested)


def value_at(config: RunConfig, path: str) -> Any:
    """What stands at a path of ``config``."""
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def paths(kind: Any = RunConfig) -> list[str]:
    """Every path that may be set, in the order of the fields."""
    hints = typing.get_type_hints(kind)
    return [path for name, hint in hints.items()
            for path in ([f"{name}.{inner}" for inner in paths(hint)] if dataclasses.is_dataclass(hint) else [name])]


def to_json(config: RunConfig) -> dict[str, Any]:
    """The resolved run, every field, as JSON values under schema "llmtool.run/1"; its model as ModelConfig says it."""
    return {"schema": SCHEMA, **dataclasses.asdict(config), "model": config.model.to_json()}


def from_json(data: Mapping[str, Any], where: str) -> RunConfig:
    """The inverse of :func:`to_json`. A choice that is not there has its default; an unknown one is an error."""
    if data.get("schema") != SCHEMA:
        raise BadRun(f'{where}: schema is {data.get("schema")!r}; expected "{SCHEMA}"')
    model = data.get("model")
    if not isinstance(model, Mapping) or not isinstance(data.get("name"), str):
        raise BadRun(f"{where}: not a run; expected a name and a model")
    rest = {key: value for key, value in data.items() if key not in ("schema", "model")}
    changes = {path: _check(value, field_type(path, f"{where}: "), f"{where}: {path}")
               for path, value in _flat(rest, RunConfig, f"{where}: ")}
    for name, value in model.items():
        _check(value, field_type(f"model.{name}", f"{where}: "), f"{where}: model.{name}")
    return with_values(RunConfig(data["name"], ModelConfig.from_json(dict(model), f"{where}: model")), changes)


def field_type(path: str, where: str = "") -> Any:
    """The annotation of the field at a path; raises BadRun with the nearest paths where there is none."""
    kind: Any = RunConfig
    for name in path.split("."):
        hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in hints:
            raise BadRun(f"{where}no choice of a run is called {path}; {_near(path)}")
        kind = hints[name]
    if dataclasses.is_dataclass(kind):
        raise BadRun(f"{where}{path} is a group of choices; set one of them, such as {path}.{paths(kind)[0]}")
    return kind


def _near(path: str) -> str:
    known = paths()
    close = difflib.get_close_matches(path, known, n=3, cutoff=0.6)
    same_end = [other for other in known if other.rpartition(".")[2] == path.rpartition(".")[2]]
    if choices := list(dict.fromkeys(same_end + close))[:3]:
        return f"did you mean {' or '.join(choices)}?"
    return f"there are {', '.join(sorted({other.partition('.')[0] for other in known}))}"


def _flat(data: Mapping[str, Any], kind: Any, where: str, before: str = "") -> Iterable[tuple[str, Any]]:
    """(path, value) of nested tables, as deep as choices nest."""
    hints = typing.get_type_hints(kind)
    for name, value in data.items():
        path = f"{before}{name}"
        if dataclasses.is_dataclass(hints.get(name)):
            if not isinstance(value, Mapping):
                raise BadRun(f"{where}{path} is {_shown(value)}; expected a table of choices")
            yield from _flat(value, hints[name], where, f"{path}.")
        else:
            yield path, value


def _replace(config: Any, changes: Mapping[str, Any]) -> Any:
    flat = {name: _replace(getattr(config, name), value)
            if isinstance(value, Mapping) and dataclasses.is_dataclass(getattr(config, name)) else value
            for name, value in changes.items()}
    return dataclasses.replace(config, **flat)


def _parse(text: str, hint: Any, where: str) -> Any:
    """The text of a command line as a value of a type."""
    if _optional(hint) and text.lower() in _NONE:
        return None
    for choice in _choices(hint):
        match choice:
            case type() if choice is bool and text.lower() in ("true", "false"):
                return text.lower() == "true"
            case type() if choice in (int, float):
                try:
                    return _check(choice(text), choice, where)
                except ValueError:
                    continue
            case type() if choice is str:
                return text
            case _ if typing.get_origin(choice) is tuple:
                items = typing.get_args(choice)
                parts = [part.strip().strip("\"'") for part in text.strip("[]()").split(",") if part.strip()]
                return _check([_parse(part, items[0], where) for part in parts], choice, where)
            case _ if typing.get_origin(choice) is typing.Literal and text in typing.get_args(choice):
                return text
    raise BadRun(f"{where} is {text!r}; expected {_words(hint)}")


def _check(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the field's own type (lists become tuples, tables RopeScaling), or BadRun."""
    for choice in _choices(hint):
        if not _fits(value, choice):
            continue
        if dataclasses.is_dataclass(choice):
            inner = typing.get_type_hints(choice)
            if set(value) != set(inner):
                raise BadRun(f"{where} has {', '.join(value) or 'nothing'}; expected {', '.join(inner)}")
            return choice(**{name: _check(value[name], inner[name], f"{where}.{name}") for name in inner})  # type: ignore[operator]
        return tuple(value) if typing.get_origin(choice) is tuple else float(value) if choice is float else value
    raise BadRun(f"{where} is {_shown(value)}; expected {_words(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    match typing.get_origin(hint):
        case typing.Literal:
            return isinstance(value, str) and value in typing.get_args(hint)
        case origin if origin is tuple:
            items = typing.get_args(hint)
            return (isinstance(value, list | tuple) and all(_fits(item, items[0]) for item in value)
                    and (items[-1] is Ellipsis or len(value) == len(items)))
    if hint is types.NoneType:
        return value is None
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, Mapping) if dataclasses.is_dataclass(hint) else type(value) is hint


def _choices(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _optional(hint: Any) -> bool:
    return types.NoneType in _choices(hint)


def _words(hint: Any) -> str:
    """An annotation as an error message says it."""
    if len(choices := _choices(hint)) > 1:
        return " or ".join(map(_words, choices))
    match typing.get_origin(hint):
        case typing.Literal:
            return " or ".join(typing.get_args(hint))
        case origin if origin is tuple:
            items = typing.get_args(hint)
            count = "any number of" if items[-1] is Ellipsis else str(len(items))
            return f"{count} × {_words(items[0])}"
    if dataclasses.is_dataclass(hint):
        return f"a table of {', '.join(typing.get_type_hints(hint))}"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
            types.NoneType: "none"}[hint]


def _shown(value: Any) -> str:
    return repr(value)[:60]
