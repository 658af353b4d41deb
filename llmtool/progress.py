"""How far a long job is: a bar on a terminal, a line now and then in a log file, nothing when asked to be quiet.

Everything goes to stderr, so that results on stdout can be piped. rich is imported when a bar is drawn, not before.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

SECONDS_BETWEEN_LINES = 10.0
Unit = Literal["bytes", "items"]


class Progress(Protocol):
    """What a job calls as it goes on."""

    def advance(self, n: int, what: str = "") -> None:
        """``n`` more bytes (or items) are done; ``what`` is being worked on."""
        ...


@contextmanager
def progress(
    title: str, total: int | None = None, *, quiet: bool = False, unit: Unit = "bytes"
) -> Iterator[Progress]:
    """Show the progress of the block. Without a ``total`` there is a rate, but no share and no time left."""
    if quiet:
        yield _Silence()
    elif sys.stderr.isatty():
        with _bar(title, total, unit) as bar:
            yield bar
    else:
        lines = _Lines(title, total, unit)
        yield lines
        lines.finish()


def human_bytes(n: float) -> str:
    """``13476831232`` -> ``"13.5 GB"`` (powers of 1000, as disks and networks count)."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} TB" if n < 1000 else f"{n:,.0f} TB"


def human_count(n: int) -> str:
    """``6738415616`` -> ``"6.74 B"``, as people name models."""
    value = float(n)
    for unit in ("", " k", " M", " B"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"


def human_seconds(seconds: float) -> str:
    """``3725`` -> ``"1 h 2 min"``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if seconds < 3600 and minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _amount(n: float, unit: Unit) -> str:
    if unit == "bytes":
        return human_bytes(n)
    return f"{n:,.0f} items" if n >= 100 or n == int(n) else f"{n:.3g} items"


class _Silence:
    def advance(self, n: int, what: str = "") -> None:
        """Say nothing."""


class _Lines:
    """Plain lines for files and pipes: one every few seconds, one at the end."""

    def __init__(self, title: str, total: int | None, unit: Unit):
        self.title, self.total, self.unit, self.done = title, total, unit, 0
        self.start = self.last = time.monotonic()
        self.told = False

    def advance(self, n: int, what: str = "") -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES:
            self.last, self.told = now, True
            rate = self.done / (now - self.start)
            line = f"{self.title}: {_amount(self.done, self.unit)}"
            if self.total:
                line += f" of {_amount(self.total, self.unit)} ({self.done / self.total:.0%})"
            line += f", {_amount(rate, self.unit)}/s"
            if self.total and rate:
                line += f", {human_seconds(max(0, self.total - self.done) / rate)} left"
            print(line + (f": {what}" if what else ""), file=sys.stderr, flush=True)

    def finish(self) -> None:
        if not self.told:
            return  # too short to have said anything: the result says it all
        seconds = time.monotonic() - self.start
        rate = _amount(self.done / max(seconds, 1e-3), self.unit)
        line = f"{self.title}: {_amount(self.done, self.unit)} in {human_seconds(seconds)} ({rate}/s)"
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _bar(title: str, total: int | None, unit: Unit) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Amounts(ProgressColumn):
        def render(self, task: Task) -> Text:
            whole = f" of {_amount(task.total, unit)}" if task.total else ""
            rate = f", {_amount(task.speed, unit)}/s" if task.speed else ""
            return Text(_amount(task.completed, unit) + whole + rate, no_wrap=True)

    # What is worked on comes last and gives way: on a narrow terminal it is cut, not the bar.
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    name = TextColumn("{task.fields[what]}", style="dim", table_column=rest)
    columns = (TextColumn("{task.description}", table_column=Column(no_wrap=True)), BarColumn(20), Amounts(),
               TimeRemainingColumn(), name)
    with RichProgress(*columns, console=Console(stderr=True), transient=True, expand=True) as bars:
        task = bars.add_task(title, total=total, what="")

        class Bar:
            def advance(self, n: int, what: str = "") -> None:
                bars.update(task, advance=n, what=what)

        yield Bar()
