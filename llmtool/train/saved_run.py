"""``RUN/run.json``: the resolved choices of a run, which it can go on with when nobody says them again."""

import json
from collections.abc import Iterator
from pathlib import Path

from llmtool.convert.sidecars.json_file import read_json
from llmtool.train.config import RunConfig
from llmtool.train.overrides import from_json, paths, to_json, value_at

RUN_FILE = "run.json"
_FREE = ("name", "notes")  # words about a run


def save_run(run: RunConfig, workdir: Path) -> None:
    """Write the choices into the run's folder."""
    (workdir / RUN_FILE).write_text(json.dumps(to_json(run), indent=1) + "\n", encoding="utf-8")


def saved_run(workdir: Path) -> RunConfig | None:
    """The choices in a run's folder; None where there are none."""
    file = workdir / RUN_FILE
    return from_json(read_json(file), str(file)) if file.is_file() else None


def differences(before: RunConfig, now: RunConfig, ignored: tuple[str, ...] = ()) -> Iterator[str]:
    """Choices in which two runs differ, as ``path = value (was value)``."""
    for path in paths():
        if path not in (*_FREE, *ignored) and value_at(before, path) != value_at(now, path):
            yield f"{path} = {value_at(now, path)} (was {value_at(before, path)})"
