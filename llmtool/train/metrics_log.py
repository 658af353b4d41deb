"""``RUN/metrics.jsonl``: a line for every logged step and every evaluation; the first process writes it."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from llmtool.model.processes import is_first

NAME = "metrics.jsonl"


class MetricsLog:
    """Appends lines ``{"kind": …, "step": …, …}``. ``after``: the step that the run goes on from; what an earlier life
    of the run wrote of later steps, which are now made again, is dropped."""

    def __init__(self, workdir: Path, after: int):
        self.path = workdir / NAME
        self._file: Any = None
        if is_first():
            kept = [line for line in read_metrics(workdir) if line["step"] <= after]
            whole = self.path.with_suffix(".new")
            whole.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            whole.replace(self.path)
            self._file = self.path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line, and return it. What is no number JSON can hold (a diverged loss) becomes a word."""
        line = {"kind": kind, "step": step, **{key: _plain(value) for key, value in values.items()}}
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        return line

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(workdir: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run; one that was cut off when a process died is left out."""
    path = workdir / NAME
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
