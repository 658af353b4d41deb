"""SIGTERM as a wish: the step that is running ends, is saved, and the run with it."""

import signal
import threading
from types import FrameType, TracebackType

import jax


class Stopping:
    """A context in which SIGTERM only sets a flag. Over several processes JAX's preemption service receives it, so that
    all agree on the step after which they stop; a scheduler need not reach every one of them."""

    def __init__(self) -> None:
        self._told = False
        self._before: object = None
        # Only the main thread may set handlers; a run in another is stopped by whoever started it.
        self._ours = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def after(self, step: int) -> bool:
        """Whether to stop after this step: the same answer in all processes, which must all ask."""
        if jax.process_count() == 1:
            return self._told
        from jax.experimental import multihost_utils

        return bool(multihost_utils.reached_preemption_sync_point(step))

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def __enter__(self) -> "Stopping":
        if self._ours:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]  # what signal.signal gave
