"""Progress of a job that has stages (loading, then scoring), each with a bar or lines of its own."""

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from llmtool.progress import Progress, Unit, progress

_UNITS: dict[str, Unit] = {"loading": "bytes"}


class Stages(AbstractContextManager["Stages"]):
    """Call it with a stage, how much is done, and of how much; a new stage ends the one before."""

    def __init__(self, quiet: bool):
        self.quiet, self.stack = quiet, ExitStack()
        self.stage, self.done = "", 0
        self.shown: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self.stage or done < self.done or self.shown is None:
            self.stack.close()
            unit = _UNITS.get(stage, "items")
            self.shown = self.stack.enter_context(progress(stage, total, quiet=self.quiet, unit=unit))
            self.stage, self.done = stage, 0
        self.shown.advance(done - self.done)
        self.done = done

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, trace)
