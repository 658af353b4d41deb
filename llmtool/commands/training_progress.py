"""What one sees of a run while it lasts: a bar with figures on a terminal, a line a logged step elsewhere."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from llmtool.progress import human_bytes, human_seconds

_WAITING = 0.05  # share of the time spent waiting for data that is worth a word


class TrainingProgress(AbstractContextManager["TrainingProgress"]):
    """Shows the lines of a run's log, each with its speed (:class:`llmtool.train.throughput.Speedometer`)."""

    def __init__(self, title: str, steps: int, quiet: bool):
        self.title, self.steps, self.quiet = title, steps, quiet
        self._stack = ExitStack()
        self._bar: Any = None

    def __enter__(self) -> "TrainingProgress":
        if not self.quiet and sys.stderr.isatty():
            self._bar = self._stack.enter_context(_make_bar())
            self._task = self._bar.add_task(self.title, total=self.steps, what="compiling")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """Something to know, above the bar."""
        if self.quiet:
            return
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, line: Mapping[str, Any], speed: Mapping[str, Any]) -> None:
        """One line of the log."""
        if line["kind"] != "train":
            found = ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in line.items()
                              if name not in ("kind", "step"))
            self.note(f"step {line['step']}: {line['kind']}: {found}")
        elif self._bar is None:
            self.note(f"step {line['step']}/{self.steps}: {', '.join(_figures(line, speed))}, "
                      f"{human_seconds(speed['seconds_left'])} left")
        else:
            self._bar.update(self._task, completed=line["step"], what=", ".join(_figures(line, speed)))


def _figures(line: Mapping[str, Any], speed: Mapping[str, Any]) -> list[str]:
    """The figures of a step, what matters most first: a narrow terminal cuts the end."""
    out = [f"loss {_figure(line['loss'])}", f"lr {line['lr']:.3g}", f"grad norm {_figure(line['grad_norm'])}",
           f"{speed['tokens_per_second']:,.0f} tokens/s", f"{speed['tflops_per_device']:.3g} TFLOP/s a device"]
    if speed["mfu"] is not None:
        out.append(f"MFU {speed['mfu']:.1%}")
    out += [f"{speed['sequences_per_second']:.3g} sequences/s", human_bytes(speed["memory_bytes"])]
    if line["skipped"]:
        out.append(f"{line['skipped']:.0f} steps skipped")
    if line["data_wait"] > _WAITING:
        out.append(f"waiting for data {line['data_wait']:.0%}")
    return out


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"  # a diverged loss is logged as a word


def _make_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    figures = TextColumn("{task.fields[what]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    return Progress(TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(),
                    figures, console=Console(stderr=True), expand=True)
